"""How GPUs of one kind are usually joined: what a machine holds, and how fast bytes leave a GPU.

Figures are the makers' own for the machines named, in one direction. Of these collectives reach a share (`REACHED`),
which is taken from what is commonly seen, and was not measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from biphase.errors import SpecError, nearest

REACHED = 0.75  # of what a link is said to carry
LATENCY = {"inside": 20e-6, "between": 60e-6}  # seconds a collective takes however little it carries; assumed


@dataclass(frozen=True)
class Interconnect:
    """GPUs of one kind, in machines of several."""

    gpus: int  # a machine
    memory: float  # bytes of a GPU
    inside: float  # bytes a second that a GPU sends to those of its machine
    between: float  # bytes a second of network for each GPU
    source: str
    own_kernels: bool = True  # ours are for NVIDIA's, from Ampere on

    def rate(self, members: int, stride: int) -> float:
        """Bytes a second that each GPU sends in a ring of `members`, `stride` apart."""
        if (members - 1) * stride < self.gpus:
            return self.inside * REACHED
        # A ring visits every member in a machine before it leaves it, so they share the way out.
        here = min(members, max(1, self.gpus // stride))
        return min(self.inside, here * self.between) * REACHED

    def latency(self, members: int, stride: int) -> float:
        return LATENCY["inside" if (members - 1) * stride < self.gpus else "between"]


INTERCONNECTS = {
    "h200": Interconnect(8, 141e9, 450e9, 50e9, "DGX H200: NVLink 4, 900 GB/s both ways; 400 Gb/s a GPU"),
    "h100": Interconnect(8, 80e9, 450e9, 50e9, "DGX H100: NVLink 4, 900 GB/s both ways; 400 Gb/s a GPU"),
    "a100": Interconnect(
        8, 80e9, 300e9, 25e9, "DGX A100 80 GB: NVLink 3, 600 GB/s both ways; 200 Gb/s a GPU"
    ),
    "mi250x-gcd": Interconnect(
        8,
        64e9,
        50e9,
        12.5e9,
        "HPE Cray EX235a: one Infinity Fabric link between modules; 200 Gb/s a module",
        False,
    ),
    "l40s": Interconnect(8, 48e9, 32e9, 12.5e9, "PCIe 4.0 ×16; 100 Gb/s a GPU assumed"),
}


def interconnect_of(device: str) -> Interconnect:
    if device not in INTERCONNECTS:
        raise SpecError(
            f"--gpus: how GPUs of the kind {device!r} are joined is not known; {nearest(device, INTERCONNECTS)}"
        )
    return INTERCONNECTS[device]
