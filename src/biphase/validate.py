"""`biphase validate`: test the machines, links and shared folder of a run before results are trusted to them.

The command runs its phases one after another, each as a process of its own with a time limit, so that one that hangs
is a failed check and not a command that hangs. With several machines the same command runs on each of them.

    group     processes that are launched and join as those of `run` test links, folder, clocks and versions
    calm      a small study on the built-in corpus
    killed    the same study, killed with SIGKILL at its first checkpoint, then started again
    sharded   the same study with `--shard full`

The phases of several machines meet at consecutive ports of the head, so that none meets what is left of the one before
it. What no process here could test (no GPU, one machine) is listed as not checked. All files are in one hidden folder
of the store, which is removed at the end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from biphase import doctor
from biphase.cluster import launch
from biphase.cluster.machines import Machines
from biphase.doctor import MARKS, Diagnosis
from biphase.errors import BiphaseError, SpecError, one_line
from biphase.leases import Leases, descendants, end_with_parent
from biphase.records import encode
from biphase.specs import CLM, MLM, WSD, Chunks, Pretrain, Size, Stage, Study
from biphase.store import Store, publish, read_json, verify, with_checksum, write_json
from biphase.study.devices import at_hand
from biphase.study.many_gpus import INTERCONNECTS
from biphase.text import counted, printable, si
from biphase.training import distributed
from biphase.training.distributed import BUCKET, Ranks

RESULT = "BIPHASE_VALIDATE"  # environment variable of the group phase: where its result goes
PHASE_SECONDS = 600.0
SEEN_SECONDS = 60.0  # a lease counts as stale when no heartbeat was seen for so long
SLOW_SECONDS = 5.0  # between two heartbeats
ROUNDS = 10  # of each contest of the processes for one name
DISK_BYTES = 2**26
STEPS, CHECKPOINT = 100, 20
ROUNDING, LOSS_APART = 1e-5, 0.02  # between sharded and not: of weights on CPUs, relative of losses on GPUs
KILLED, NOT_CHECKED = "killed", "not checked: "


# ---------------------------------------------------------------- the group: machines and links


def check_machines(ranks: Ranks, store: Store, machines: int) -> list[Diagnosis]:
    """Run doctor's checks on each machine: each check's worst result, or node 0's if all are well. Compare clocks."""
    checks = (doctor.check_devices, doctor.check_hub, lambda: doctor.check_store(store))
    own = [asdict(row) for check in checks if ranks.verifies for row in check()]
    facts = ranks.gather([platform.node(), own])
    everyone = [(node, rows) for node, rows in facts if rows]
    here = distributed.machine(ranks.device)
    versions = ", ".join(f"{name} {here[name]}" for name in ("biphase", "torch", "transformers"))
    rows = [Diagnosis("versions", True, f"{versions}, equal on {counted(len(everyone), 'machine')}")]
    for name in dict.fromkeys(row["name"] for _, own in everyone for row in own):
        of_all = [(node, Diagnosis(**row)) for node, own in everyone for row in own if row["name"] == name]
        node, worst = min(of_all, key=lambda each: (False, None, True).index(each[1].ok))
        named = worst.ok is not True and len(everyone) > 1
        rows.append(replace(worst, detail=f"{node}: {worst.detail}") if named else worst)
    if machines == 1:
        return [*rows, Diagnosis("clocks", None, f"{NOT_CHECKED}one machine")]
    apart = []
    for _ in range(5):
        ranks.wait()
        times = ranks.gather(time.time())
        apart.append(max(times) - min(times))
    return [*rows, Diagnosis("clocks", True, f"at most {min(apart):.3f} s apart (they need not agree)")]


def check_links(ranks: Ranks, gigabytes: float) -> list[Diagnosis]:
    """Sum known numbers over all processes, on the host and on GPUs, and measure the bandwidth.

    `gigabytes`: of which half must be reached by the GPUs, or by the host if there are none; 0: as known of the GPUs.
    """
    gpu = ranks.device.type == "cuda"
    devices = {"gloo": torch.device("cpu")} | ({"nccl": ranks.device} if gpu else {})
    missing = [] if gpu else [Diagnosis("nccl", None, f"{NOT_CHECKED}no GPU here")]
    if ranks.world == 1:
        return [Diagnosis(name, None, f"{NOT_CHECKED}one process") for name in devices] + missing
    problem = ""
    try:
        ranks.check()
    except BiphaseError as error:
        problem = one_line(error)
    if problem := next(filter(None, ranks.gather(problem)), ""):
        return [Diagnosis(name, False, problem) for name in devices] + missing
    known = INTERCONNECTS.get(at_hand()) if gpu else None
    expected = gigabytes * 1e9 or (1e9 / known.seconds(1e9, ranks.world, 1) if known else 0.0)
    rows = []
    for name, device in devices.items():
        reached, detail = _timed_sum(ranks, device)
        well: bool | None = reached > 0
        if expected and name == list(devices)[-1]:
            detail += f"; {si(expected)}B/s expected"
            if 0 < reached < expected / 2:
                well = False if gigabytes else None
        rows.append(Diagnosis(name, well, detail))
    return rows + missing


def _timed_sum(ranks: Ranks, device: torch.device) -> tuple[float, str]:
    """Return the bytes per second that each process sends in a sum, 0 if the sum is wrong, and its description."""
    numbers = torch.arange(BUCKET, device=device, dtype=torch.int32) % 1000
    seconds, wrong = [], False
    for known in (*[numbers[:1]] * 5, *[numbers] * 5):
        sent = known * (ranks.rank + 1)
        distributed.finish(device)
        ranks.wait()
        began = time.perf_counter()
        dist.all_reduce(sent)
        distributed.finish(device)
        seconds.append(time.perf_counter() - began)
        wrong |= not torch.equal(sent, known * (ranks.world * (ranks.world + 1) // 2))
    facts = ranks.gather([platform.node(), wrong, min(seconds[:5]), min(seconds[5:])])
    if bad := sorted({node for node, wrong, *_ in facts if wrong}):
        return 0.0, f"wrong sums on {', '.join(bad)}; examine the network and the GPUs there"
    latency, took = (max(fact[place] for fact in facts) for place in (2, 3))
    reached = 2 * (ranks.world - 1) / ranks.world * numbers.nbytes / took  # of a ring
    return reached, f"sums of {ranks.world} are right; {si(reached)}B/s a process, {latency * 1e6:.0f} µs"


# ---------------------------------------------------------------- the group: the shared folder


def check_folder(ranks: Ranks, folder: Path, seconds: float = SEEN_SECONDS) -> list[Diagnosis]:
    """Test what the store needs of a file system, with all processes at once.

    `seconds`: how long to wait until the others see what one process has written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_contests(ranks, folder)]
    if ranks.world == 1:
        rows += [Diagnosis(name, None, f"{NOT_CHECKED}one process") for name in ("locks", "visible")]
    else:
        rows += [_locks(ranks, folder / "lock"), _visibility(ranks, folder / "seen", seconds)]
    times = [0.0]
    if ranks.verifies:  # one process of each machine
        data = os.urandom(DISK_BYTES)
        for size in (*[4096] * 10, DISK_BYTES):
            began = time.perf_counter()
            with (folder / f"written-{ranks.rank}").open("wb") as file:
                file.write(data[:size])
                file.flush()
                os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    sync, whole = map(max, zip(*ranks.gather([statistics.median(times), times[-1]]), strict=True))
    detail = f"4 kB written and synced in {sync * 1e3:.1f} ms, large files at {si(DISK_BYTES / whole)}B/s"
    return [*rows, Diagnosis("sync", True, detail)]


def _contests(ranks: Ranks, folder: Path) -> Diagnosis:
    """Have all processes create, lease and publish the same names: exactly one may succeed with each."""
    leases, held = Leases(folder / "leases"), []

    def create(number: int) -> bool:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / f"new-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        return False

    def lease(number: int) -> bool:
        held.append(leases.take(f"job-{number}"))
        return held[-1] is not None

    def put(number: int) -> bool:
        built = folder / f"built-{number}-{ranks.rank}"
        built.mkdir()
        (built / "winner").write_text(str(ranks.rank))
        return publish(built, folder / f"result-{number}")

    for what, attempt in (("create a file", create), ("take a lease", lease), ("publish a folder", put)):
        for number in range(ROUNDS):
            ranks.wait()
            problem, won = "", False
            try:
                won = attempt(number)
            except (OSError, BiphaseError) as error:
                problem = one_line(error)
            winners, problems = ranks.sum(won)[0], list(filter(None, ranks.gather(problem)))
            if winners != 1 or problems:
                how = problems[0] if problems else f"{winners} of {ranks.world} processes did, and one may"
                return Diagnosis(
                    "folder", False, f"{what}: {how}; use one that all share, with atomic renames"
                )
    for each in held:
        if each:
            each.release()
    who = f"one of {ranks.world} wins" if ranks.world > 1 else "one process"
    return Diagnosis("folder", True, f"new files, leases, renames: {who}, in {ROUNDS} rounds each")


def _locks(ranks: Ranks, path: Path) -> Diagnosis:
    path.touch()
    got = 0
    with path.open("r+") as file:
        for turn in (True, False):  # the first process, then the others
            ranks.wait()
            if ranks.first is turn:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    got = 1
        locked, all_of_them = int(ranks.share(got)), ranks.sum(got)[0]
    if locked and all_of_them == 1:
        return Diagnosis("locks", True, "a lock of one process excludes the others")
    why = "several processes hold one" if locked else "not supported"
    return Diagnosis("locks", None, f"{why}: two workers may compute one job, which costs time only")


def _visibility(ranks: Ranks, path: Path, seconds: float) -> Diagnosis:
    """Measure how long until the others see a file that the first process creates and then changes."""
    path.exists()  # a client of a file server now remembers that it is absent
    waits = []
    for content in (b"1", b"2"):
        ranks.wait()
        if ranks.first:
            handle = os.open(path, os.O_RDWR | os.O_CREAT)
            os.pwrite(handle, content, 0)  # in place, as a heartbeat
            os.fsync(handle)
            os.close(handle)
        ranks.wait()
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds:
            with contextlib.suppress(OSError):
                if path.read_bytes() == content:
                    break
            time.sleep(0.01)
        waits.append(max(ranks.gather(waited)))
    if max(waits) >= seconds:
        late = "new" if waits[0] >= seconds else "changed"
        fix = "mount it with a shorter actimeo and lookupcache=positive"
        return Diagnosis("visible", False, f"others do not see a {late} file within {seconds:g} s", fix)
    detail = f"others see a new file after {waits[0]:.2f} s, a changed one after {waits[1]:.2f} s"
    return Diagnosis("visible", None if max(waits) > SLOW_SECONDS else True, detail)


# ---------------------------------------------------------------- the study


def small_study(processes: int) -> Study:
    """Return a study of two phases, with a row of each step for every process."""
    tiny = Size("tiny", layers=2, hidden=64, heads=2, kv_heads=1, ffn=128, precision="fp32")
    run = Pretrain(
        "two", start=tiny, corpus="builtin", stages=(Stage(CLM(), STEPS // 2), Stage(MLM(0.4), STEPS // 2)),
        packing=Chunks(64), batch_tokens=64 * max(8, processes), schedule=WSD(peak=1e-3, warmup=5, decay=10),
        heldout_every=STEPS // 2, heldout_tokens=4_096,
    )  # fmt: skip
    return Study("validate", (run,))


@dataclass(frozen=True)
class End:
    """What a run of the small study ended with."""

    samples: list[tuple[Any, ...]]
    losses: list[float]
    weights: dict[str, torch.Tensor]
    hashes: list[str]  # of weights and optimizer state

    @classmethod
    def of(cls, store: Path) -> End:
        paths = store.glob("checkpoints/*/checkpoint.json")
        folder = max(paths, key=lambda path: read_json(path)["progress"]["step"]).parent
        files = verify(folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        lines = [line for line in lines if "labels" in line]
        return cls(
            [tuple(line[name] for name in ("step", "objective", "labels", "tokens")) for line in lines],
            [line["loss"] for line in lines],
            load_file(folder / "model.safetensors"),
            [files[name]["sha256"] for name in ("model.safetensors", "optimizer.safetensors")],
        )

    def compare(self, other: End, *, bits: bool) -> tuple[bool, str]:
        """Compare with another end. `bits`: the bits must be equal, not only the numbers up to rounding."""
        if self.samples != other.samples or len(self.samples) != STEPS:
            return False, "not the same samples"
        if self.hashes == other.hashes:
            return True, "same samples, same bits"
        away = max(float((one - other.weights[name]).abs().max()) for name, one in self.weights.items())
        loss = max(abs(one - two) / one for one, two in zip(self.losses, other.losses, strict=True))
        near = loss <= LOSS_APART if torch.cuda.is_available() else away <= ROUNDING
        return near and not bits, f"same samples, weights within {away:.0e}, losses {loss:.1%}"


# ---------------------------------------------------------------- the command


@dataclass(frozen=True)
class Validation:
    """One `biphase validate` as typed on this machine."""

    store: Store
    processes: int
    machines: Machines
    link: float = 0.0  # GB/s expected; 0: as known of the GPUs
    study: bool = True
    say: Callable[[str], None] = lambda text: None

    def check(self) -> list[Diagnosis]:
        """Run all phases and return their checks."""
        gpus = torch.cuda.device_count()
        if gpus and self.processes > gpus:
            raise SpecError(
                f"--processes {self.processes}: this machine has {gpus} GPUs; type --processes {gpus}"
            )
        new = not self.store.root.exists()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it cleans up too
        with tempfile.TemporaryDirectory(prefix="biphase-", ignore_cleanup_errors=True) as folder:
            result = Path(folder) / "group.json"
            # What killed processes leave in TMPDIR is removed with the folder.
            os.environ |= {RESULT: str(result), "TMPDIR": folder}
            try:
                self.say("links, folder and machines")
                problem = self._phase(0, "validate", ["--link", f"{self.link:g}"], self.store.root)
                if problem or not result.is_file():
                    return [Diagnosis("start", False, problem or "the processes left no result")]
                group = read_json(result)
                rows = [Diagnosis(**row) for row in group["rows"]]
                return rows + (self._study(Path(folder), Path(group["scratch"])) if self.study else [])
            finally:
                if self.machines.node == 0:
                    if result.is_file():
                        shutil.rmtree(read_json(result)["scratch"], ignore_errors=True)
                    if new:
                        with contextlib.suppress(OSError):
                            self.store.root.rmdir()

    def _study(self, folder: Path, scratch: Path) -> list[Diagnosis]:
        """Run the small study undisturbed, killed and resumed, and sharded."""
        path, world = folder / "study.json", self.processes * self.machines.nodes
        write_json(path, with_checksum({"study": encode(small_study(world)), "question": ""}))
        words = [str(path), "--quiet", "--checkpoint", str(CHECKPOINT)]
        calm, killed, sharded = (scratch / name for name in ("calm", "killed", "sharded"))

        def saved() -> bool:  # the other machines end with the head
            return self.machines.node == 0 and any(killed.glob("checkpoints/*/manifest.json"))

        self.say("a small study")
        if problem := self._phase(1, "run", words, calm):
            return [Diagnosis("study", False, problem)]
        self.say("the same study, killed and resumed")
        ended = self._phase(2, "run", words, killed, kill=saved)
        if not ended:
            rows = [Diagnosis("resume", None, f"{NOT_CHECKED}the study ended before it could be killed")]
        else:
            as_meant = ended == KILLED or self.machines.node
            problem = self._phase(3, "run", words, killed) if as_meant else ended
            rows = [self._compared("resume", calm, killed, problem, bits=not torch.cuda.is_available())]
        if world == 1:
            return [*rows, Diagnosis("shard", None, f"{NOT_CHECKED}one process")]
        self.say("the same study, sharded")
        problem = self._phase(4, "run", [*words, "--shard", "full"], sharded)
        return [*rows, self._compared("shard", calm, sharded, problem)]

    def _compared(self, name: str, calm: Path, other: Path, problem: str, *, bits: bool = False) -> Diagnosis:
        if problem:
            return Diagnosis(name, False, problem)
        if self.machines.node:
            return Diagnosis(name, None, f"{NOT_CHECKED}node 0 compares the results")
        try:
            well, how = End.of(calm).compare(End.of(other), bits=bits)
        except (BiphaseError, OSError, KeyError, ValueError) as error:
            return Diagnosis(name, False, one_line(error))
        what = "after SIGKILL" if name == "resume" else "--shard full as none"
        return Diagnosis(name, well, f"{what}: {how}")

    def _phase(
        self, number: int, verb: str, words: list[str], store: Path, kill: Callable[[], bool] = lambda: False
    ) -> str:
        """Run a command of biphase on this machine; return why it failed, "" if it did not.

        When `kill()`, or after `PHASE_SECONDS`, it and all its processes are killed.
        """
        typed = [verb, *words, "--store", str(store.resolve()), "--processes", str(self.processes)]
        if self.machines.nodes > 1:
            there = replace(self.machines, port=self.machines.port + number)
            typed += ["--nodes", str(there.nodes), "--node", str(there.node), "--head", there.head]
        until, problem = time.monotonic() + PHASE_SECONDS, ""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
            child = subprocess.Popen(
                [sys.executable, "-m", "biphase", *typed], stdout=subprocess.DEVNULL, stderr=printed
            )
            try:
                while child.poll() is None and not problem:
                    if time.monotonic() > until:
                        problem = f"it did not end within {PHASE_SECONDS:g} s"
                    elif kill():
                        problem = KILLED
                    time.sleep(0.01)
            finally:
                for pid in (*descendants(child.pid), child.pid) if child.poll() is None else ():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                child.wait()
            if child.returncode and not problem:
                printed.seek(0)
                lines = [line.strip() for line in printed if line.strip()]
                lines = [line for line in lines if line.startswith("error: ")] or lines
                problem = lines[-1].removeprefix("error: ") if lines else f"exit code {child.returncode}"
        return problem

    def group(self) -> NoReturn:
        """The group phase: launch the processes of this machine, or, in one of them, check and leave the result."""
        if "RANK" not in os.environ:
            alike = {"--processes": str(self.processes), "--link": f"{self.link:g}"}
            machines = replace(
                self.machines, folder=str(self.store.root.resolve()), alike=distributed.alike() | alike
            )
            sys.exit(launch.in_processes(self.processes, sys.argv[1:], machines.variables())[0])
        end_with_parent()
        launch.note("joining")
        ranks = distributed.join()
        launch.note("begun")
        scratch = self.store.root.resolve() / ranks.share(f".validate-{secrets.token_hex(4)}")

        def leave(rows: list[Diagnosis]) -> None:
            if ranks.verifies:
                facts = {"scratch": str(scratch), "rows": [asdict(row) for row in rows]}
                write_json(Path(os.environ[RESULT]), facts)

        leave([])  # before anything is written there, so that it is removed whatever happens
        rows = check_machines(ranks, self.store, self.machines.nodes)
        leave([*rows, *check_links(ranks, self.link), *check_folder(ranks, scratch)])
        ranks.wait()
        launch.note("ended", "0")
        distributed.leave(0)

    def facts(self, rows: list[Diagnosis]) -> dict[str, Any]:
        """Return the page as data, to send back."""
        return {
            "version": distributed.code_version(), "machine": platform.node(), "node": self.machines.node,
            "machines": self.machines.nodes, "processes": self.processes, "link": self.link,
            "well": all(row.ok is not False for row in rows), "checks": [asdict(row) for row in rows],
        }  # fmt: skip

    def page(self, rows: list[Diagnosis]) -> str:
        """Return one line for each check, wrapped at 80 columns, and what was not checked."""
        each = counted(self.processes, "process", "processes")
        lines = [f"{counted(self.machines.nodes, 'machine')}, {each} on each"]
        missing = [row.name for row in rows if row.detail.startswith(NOT_CHECKED)]
        failed = [row.name for row in rows if row.ok is False]
        for row in rows:
            begin = f"{'–' if row.name in missing else MARKS[row.ok]} {row.name:<9} "
            text = f"{row.detail} → {row.fix}" if row.fix and row.ok is False else row.detail
            lines += textwrap.wrap(
                printable(text), 80, initial_indent=begin, subsequent_indent=" " * len(begin)
            )
        last = f"failed: {', '.join(failed)}" if failed else "nothing failed"
        last += f"; not checked here: {', '.join(missing)}" if missing else ""
        return "\n".join([*lines, *textwrap.wrap(last, 80)])
