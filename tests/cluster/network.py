"""Network namespaces as machines, each with its own address, link and host name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

PORT = 29_400
HOST = 253  # number of this machine on a network that it joined
View = tuple[Path, Path]  # a folder, and the one in whose place a machine sees it


class Network:
    """Machines m0, m1, … joined by a bridge in a namespace of its own; this host is on it if it has `joined`."""

    def __init__(self, count: int, name: str = "", *, joined: bool = False) -> None:
        prefix = f"bp{os.getpid()}{name}"
        self.hosts = [f"m{number}" for number in range(count)]
        self.names = [f"{prefix}{host}" for host in self.hosts]
        self.bridge = f"{prefix}br"
        self.link = f"{prefix}h" if joined else ""
        self.delays: list[subprocess.Popen[bytes]] = []
        self.known = Path(f"/run/{prefix}.hosts")  # in the place of /etc/hosts
        self.subnet = f"198.18.{os.getpid() % 256}"  # reserved for tests of networks

    def address(self, number: int) -> str:
        return f"{self.subnet}.{number + 1}"

    def make(self) -> None:
        for name in (self.bridge, *self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.bridge, "link", "add", "name", "bridge0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "bridge0", "up")
        lines = [f"{self.address(number)} {host}\n" for number, host in enumerate(self.hosts)]
        self.known.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        for number, name in enumerate(self.names):
            self._plug(number, f"link add eth0 netns {name}", self.address(number), "-n", name)
        if self.link:
            self._plug(len(self.names), f"link add {self.link}", self.address(HOST))

    def _plug(self, port: int, add: str, address: str, *where: str) -> None:
        link = add.split()[2]
        ip(*add.split(), "type", "veth", "peer", "name", f"p{port}", "netns", self.bridge)
        ip(*where, "addr", "add", f"{address}/24", "dev", link)
        ip(*where, "link", "set", link, "up")
        ip("-n", self.bridge, "link", "set", f"p{port}", "master", "bridge0", "up")

    def remove(self) -> None:
        for name in (*self.names, self.bridge):
            self.signal(name, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        for child in self.delays:
            child.kill()
            child.wait()
        self.known.unlink(missing_ok=True)

    def signal(self, name: str, number: signal.Signals) -> None:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)

    def cut(self, number: int, *, up: bool = False) -> None:
        ip("-n", self.bridge, "link", "set", f"p{number}", "up" if up else "down")

    def drop(self, number: int, percent: int) -> None:
        """Drop this share of the packets that reach a machine, from now on; 0: none."""
        rules = "flush ruleset\n"
        if percent:
            some = f"numgen random mod 100 < {percent} " if percent < 100 else ""
            rule = f"iifname eth0 {some}drop"
            rules += f"table ip faults {{ chain drops {{ type filter hook input priority 0; {rule}; }}\n}}"
        typed = ["ip", "netns", "exec", self.names[number], "nft", "-f", "-"]
        subprocess.run(typed, input=rules, text=True, check=True)

    def delay(self, number: int, seconds: float) -> None:
        """Deliver every frame to and from a machine this much later, from now on; do not `cut` it then."""
        port, inner, outer = f"p{number}", f"i{number}", f"o{number}"
        ip("-n", self.bridge, "link", "set", port, "nomaster")
        ip("-n", self.bridge, "link", "add", "name", inner, "up", "type", "veth", "peer", "name", outer)
        ip("-n", self.bridge, "link", "set", outer, "master", "bridge0", "up")
        forward = [sys.executable, Path(__file__).with_name("delayed_link.py"), port, inner, str(seconds)]
        self.delays.append(subprocess.Popen(["ip", "netns", "exec", self.bridge, *forward]))

    def round_trip(self, number: int) -> float:
        """Return the seconds in which a machine refuses machine 0 a connection."""
        connect = f"socket.socket().connect_ex(('{self.address(number)}', 9))"
        script = f"import socket, timeit; print(timeit.timeit(lambda: {connect}, number=1))"
        asked = self.start(0, sys.executable, "-c", script, stdout=subprocess.PIPE)
        return float(asked.communicate(timeout=60)[0])

    def start(
        self, number: int, *command: object, view: View | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on a machine."""
        # Not `ip netns exec`: it hides /sys/fs/cgroup, which Slurm wants.
        inside = ["nsenter", f"--net=/run/netns/{self.names[number]}", "unshare", "--uts", "--mount"]
        views = [(self.known, Path("/etc/hosts")), *([view] if view else [])]
        mounts = [f"mount --bind {what} {at}" for what, at in views]
        script = " && ".join([f"hostname {self.hosts[number]}", *mounts, 'exec "$@"'])
        return subprocess.Popen([*inside, "sh", "-c", script, "sh", *map(str, command)], **options)

    def run(self, number: int, *words: object, view: View | None = None) -> subprocess.Popen[str]:
        return self.start(
            number, sys.executable, "-m", "biphase", *words, view=view,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {words}: {done.stderr}"


@contextlib.contextmanager
def made(network: Network) -> Generator[Network]:
    try:
        network.make()
        yield network
    finally:
        network.remove()


def start(
    network: Network,
    study: Path,
    store: Path,
    nodes: int,
    *more: object,
    processes: int = 1,
    views: Sequence[View] = (),
) -> list[subprocess.Popen[str]]:
    """Start one run on the first machines."""
    words = ("run", study, "--store", store, "--quiet", "--processes", processes, "--nodes", nodes, *more)
    head = ("--head", f"{network.address(0)}:{PORT}")
    seen = views or [None] * nodes
    return [
        network.run(number, *words, "--node", number, *head, view=seen[number]) for number in range(nodes)
    ]


def ends(children: list[subprocess.Popen[str]], seconds: float = 240) -> list[tuple[str, int]]:
    """Return error output and exit code of each."""
    return [(child.communicate(timeout=seconds)[1], child.returncode) for child in children]
