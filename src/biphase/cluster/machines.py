"""Several machines that train together: they meet before the start, compare themselves, and watch each other.

    biphase run STUDY --processes 8 --nodes 3 --node 1 --head HOST:PORT      one such line on each machine

Each machine has a launcher (`cluster/launch.py`), which calls torchrun. The launchers talk through one torch TCPStore
at HOST:PORT; its server lives in the launcher of node 0, the head, and torchrun uses the same one.

`meet` compares the machines before any process is started: the head waits a minute for all, and answers all of them
with go, or with one line that names the machine that is missing or differs. `Watch` runs beside torchrun: every
machine sends a heartbeat; a machine that is silent for `SILENT_SECONDS`, or whose processes ended, ends all others with
one line. Collectives alone would not notice: a machine that loses its power or its link closes no connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from biphase.errors import ClusterError, SpecError, one_line
from biphase.leases import descendants
from biphase.store import wait_for
from biphase.text import counted, printable

if TYPE_CHECKING:
    from torch.distributed import TCPStore

VARIABLE = "BIPHASE_MACHINES"  # environment variable by which a launcher is told about the machines
RESUME = "published results are complete: type the same command to resume"
MEETING_SECONDS = 60.0
BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0
CONNECT_SECONDS = 60.0  # for the processes of all machines to connect to each other, once all are ready to
SECONDS_TO_ANSWER = 5.0  # of one attempt to reach the head
SEEN_SECONDS = 30.0  # until a file of the head must be visible on the other machines
GRACE_SECONDS = 10.0  # for torchrun to end after its processes were killed
STATES = (
    "starting",
    "joining",
    "begun",
)  # of a machine's processes; each is noted when the process gets there


@dataclass(frozen=True)
class Machines:
    """The machines of one run, and which of them this is."""

    nodes: int = 1
    node: int = 0
    host: str = ""
    port: int = 0
    folder: str = ""  # of the study; all machines must see the same
    worker: str = ""  # the head's name in the worker registry
    alike: dict[str, str] = field(default_factory=dict)  # what must be equal on all machines

    @classmethod
    def named(cls, nodes: int, node: int, head: str) -> Machines:
        """Parse the options --nodes, --node and --head."""
        if nodes == 1:
            if node or head:
                raise SpecError("--node and --head say which of several machines this is; type --nodes 2 too")
            return cls()
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:]+):(\d{1,5})", head.strip())
        if not match or not 0 < int(match[2]) < 65_536:
            raise SpecError(
                f"--head {head!r}: type the address of node 0 and a free port there, e.g. --head {socket.gethostname()}:29400"
            )
        if node >= nodes:
            raise SpecError(
                f"--node {node}: the nodes are numbered from 0; type 0 to {nodes - 1}, another one on each machine"
            )
        return cls(nodes, node, match[1].strip("[]"), int(match[2]))

    @property
    def head(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def answered(self) -> bool:
        """Whether something listens at the head."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((self.host, self.port), SECONDS_TO_ANSWER),
        ):
            return True
        return False

    def variables(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))} if self.nodes > 1 else {}

    @classmethod
    def of_environment(cls) -> Machines:
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))


def _name(facts: dict[str, Any]) -> str:
    return f"machine {facts['machine']} (node {facts['node']})"


ALONE = Machines()


# ---------------------------------------------------------------- meeting


def meet(machines: Machines) -> tuple[TCPStore, list[dict[str, Any]]]:
    """Compare the machines; return the store they share, and who they are, or raise ClusterError on all of them."""
    store = _connect(machines)
    facts: dict[str, Any] = {"machine": socket.gethostname(), "node": machines.node, "nodes": machines.nodes}
    facts |= {"alike": machines.alike, "worker": machines.worker}
    try:
        verdict = _judge(machines, store, facts) if machines.node == 0 else _ask(machines, store, facts)
    except RuntimeError:  # torch's errors of the network and of timeouts
        raise ClusterError(
            f"node 0 at {machines.head} ended while the machines were compared; see there"
        ) from None
    if verdict["error"]:
        raise ClusterError(verdict["error"])
    return store, verdict["machines"]


def _connect(machines: Machines) -> TCPStore:
    from torch.distributed import TCPStore

    head = machines.node == 0
    try:
        socket.getaddrinfo(machines.host, machines.port)
        # torch tries several times as long as it was told to.
        if not head and not wait_for(machines.answered, MEETING_SECONDS):
            raise RuntimeError("no answer")
        return TCPStore(
            machines.host,
            machines.port,
            None,
            head,
            timedelta(seconds=MEETING_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,  # torchrun's own store in this process shares the server
        )
    except socket.gaierror:
        raise ClusterError(
            f"--head {machines.head}: this machine knows no host of that name; type an address"
        ) from None
    except RuntimeError:
        if head:
            why = f"node 0 cannot listen at {machines.head}; type an address of this machine and a free port as --head"
        else:
            why = f"node 0 did not answer at {machines.head} within {MEETING_SECONDS:g} s; start it there, with the same --head"
        raise ClusterError(why) from None


def _judge(machines: Machines, store: TCPStore, own: dict[str, Any]) -> dict[str, Any]:
    """On the head: wait for the others, compare, and tell them the verdict."""
    token = secrets.token_hex(8)
    folder = Path(machines.folder)
    folder.mkdir(parents=True, exist_ok=True)
    proof = folder / f"meeting-{token}"
    proof.write_text(token, encoding="utf-8")
    try:
        store.set("token", token)
        until = time.monotonic() + MEETING_SECONDS
        while store.add("arrivals", 0) < machines.nodes - 1 and time.monotonic() < until:
            time.sleep(0.1)
        count = store.add("arrivals", 0)
        others = [json.loads(store.get(f"arrival {number}")) for number in range(1, count + 1)]
    finally:
        proof.unlink(missing_ok=True)
    everyone = sorted([own, *others], key=lambda facts: facts["node"])
    verdict = {"error": _difference(machines, own, everyone), "machines": everyone}
    store.set("verdict", json.dumps(verdict))
    if verdict["error"]:  # the server ends with this process: let the others read
        until = time.monotonic() + GRACE_SECONDS
        while store.add("told", 0) < count and time.monotonic() < until:
            time.sleep(0.1)
    return verdict


def _ask(machines: Machines, store: TCPStore, own: dict[str, Any]) -> dict[str, Any]:
    """On the other machines: arrive, and wait for the verdict."""
    token = store.get("token").decode()
    proof = Path(machines.folder) / f"meeting-{token}"
    sees = wait_for(proof.is_file, SEEN_SECONDS) or store.check(["verdict"])
    number = store.add("arrivals", 1)
    if number >= machines.nodes or store.check(["verdict"]):
        raise ClusterError(
            f"another run of several machines is under way at {machines.head}; end it (biphase stop STUDY), or type "
            "another port on all machines"
        )
    store.set(f"arrival {number}", json.dumps(own | {"sees": sees}))
    store.set_timeout(timedelta(seconds=2 * MEETING_SECONDS))
    verdict = json.loads(store.get("verdict"))
    store.add("told", 1)
    return verdict


def _difference(machines: Machines, own: dict[str, Any], everyone: list[dict[str, Any]]) -> str:
    """Return the first reason why these machines cannot train together; "" if there is none."""
    for facts in everyone:
        if facts["nodes"] != own["nodes"]:
            return f"{_name(facts)} was started with --nodes {facts['nodes']}, node 0 with {own['nodes']}; type the same on all"
    present = [facts["node"] for facts in everyone]
    twice = [facts for facts in everyone if present.count(facts["node"]) > 1]
    if twice:
        names = " and ".join(facts["machine"] for facts in twice)
        return f"--node {twice[0]['node']} was typed twice ({names}); type another number on each machine"
    missing = [node for node in range(own["nodes"]) if node not in present]
    if missing:
        which = ", ".join(f"node {node}" for node in missing)
        return (
            f"of {counted(own['nodes'], 'machine')} these did not come to {machines.head} within {MEETING_SECONDS:g} s: "
            f"{which}; type the same command there, with its own --node"
        )
    for facts in everyone[1:]:
        for what, value in own["alike"].items():
            theirs = facts["alike"].get(what, "none")
            if theirs != value:
                return f"{_name(facts)} differs from node 0 in {what}: {theirs} there, {value} here; make them equal"
        if not facts["sees"]:
            return f"{_name(facts)} does not see the store of node 0 in {machines.folder}; type the --store that all share"
    return ""


def interface_to(host: str, port: int) -> str:
    """Return the name of the network interface by which `host` is reached, "" if unknown.

    Without it gloo uses the address that this machine's own name resolves to, often one that others cannot reach.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                asked = struct.pack("256s", name.encode())
                get_address = 0x8915  # SIOCGIFADDR
                if socket.inet_ntoa(fcntl.ioctl(probe, get_address, asked)[20:24]) == address:
                    return name
    return ""


# ---------------------------------------------------------------- watching


class Watch:
    """Watches the other machines while torchrun runs here, and ends the processes of this one if another has ended.

    `states` returns the state of each of this machine's processes. `report` leaves the line for the launcher to print.
    """

    def __init__(
        self,
        machines: Machines,
        store: TCPStore,
        everyone: list[dict[str, Any]],
        states: Callable[[], list[str]],
        report: Callable[[str], object],
    ) -> None:
        self.machines, self.store, self.everyone = machines, store, everyone
        self.states, self.report = states, report
        self.code = 2  # of this launcher, if `report` was called
        self.signalled = self.forwarded = False
        self.finished, self.ended = threading.Event(), threading.Event()
        self.beats = 0
        self.heard = time.monotonic()
        self.seen = {
            facts["node"]: (b"", self.heard) for facts in everyone
        }  # last heartbeat, and when it changed
        self.joining_since = 0.0
        self.guard = threading.Lock()
        for target in (self._beat, self._look_at_head):
            threading.Thread(target=target, daemon=True).start()

    def signal(self, *_: object) -> None:
        """Handle a signal to stop: it is forwarded to the processes once all of them can save what they did."""
        self.signalled = True

    def announce(self, line: str, code: int) -> None:
        """Tell the other machines why this one ended."""
        own = self.everyone[self.machines.node]
        with contextlib.suppress(RuntimeError):
            self.store.compare_set("ended", "", json.dumps({"line": f"{_name(own)}: {line}", "code": code}))
            if self.machines.node == 0:  # the server ends with this process: let the others read
                time.sleep(3 * BEAT_SECONDS)

    def finish(self) -> None:
        """Leave when torchrun has ended here. The server may be out of reach: then a call to it blocks for minutes."""
        self.finished.set()
        leaving = threading.Thread(target=self._leave, daemon=True)
        leaving.start()
        leaving.join(GRACE_SECONDS + 1)

    def _leave(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.store.set(f"beat {self.machines.node}", "done")
            names = (
                [f"beat {facts['node']}" for facts in self.everyone[1:]] if self.machines.node == 0 else []
            )
            until = (
                time.monotonic() + GRACE_SECONDS
            )  # the server ends with the head: let the others end first
            while time.monotonic() < until and any(self.store.get(name) != b"done" for name in names):
                time.sleep(0.1)

    def _beat(self) -> None:
        while not self.finished.wait(BEAT_SECONDS):
            try:
                self._send_and_read()
            except RuntimeError:  # torch's errors of the network
                if not self.finished.wait(3 * BEAT_SECONDS):
                    self._end(f"node 0 at {self.machines.head} has ended, so all were ended; {RESUME}")
                return
            self.heard = time.monotonic()

    def _look_at_head(self) -> None:
        """A call to a server whose machine is gone blocks for minutes; so another thread looks at the clock."""
        while not self.finished.wait(BEAT_SECONDS):
            if time.monotonic() - self.heard > SILENT_SECONDS:
                self._end(
                    f"node 0 at {self.machines.head} has not answered for {SILENT_SECONDS:g} s, so all were ended; {RESUME}"
                )

    def _send_and_read(self) -> None:
        self.beats += 1
        states = self.states()
        slowest = min(states, key=STATES.index, default=STATES[0])
        if self.signalled and not self.forwarded and slowest == STATES[-1]:
            self.forwarded = True
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        self.store.set(f"beat {self.machines.node}", f"{self.beats} {slowest}")
        if self.machines.node == 0:
            self._look_at_others(slowest)
        if self.store.check(["ended"]):
            ended = json.loads(self.store.get("ended"))
            self._end(ended["line"], ended["code"])

    def _look_at_others(self, own: str) -> None:
        """On the head: announce a machine that is silent, and processes that do not reach each other."""
        now, states = time.monotonic(), [own]
        for facts in self.everyone[1:]:
            name = f"beat {facts['node']}"
            beat = self.store.get(name) if self.store.check([name]) else b""
            before, since = self.seen[facts["node"]]
            if beat != before:
                self.seen[facts["node"]] = beat, now
            elif beat != b"done" and now - since > SILENT_SECONDS:
                self._announce(
                    f"{_name(facts)} has not answered for {SILENT_SECONDS:g} s, so all were ended; {RESUME}"
                )
            states.append(beat.decode().partition(" ")[2])
        if all(state == "joining" for state in states):
            self.joining_since = self.joining_since or now
            if now - self.joining_since > CONNECT_SECONDS:
                self._announce(
                    f"the processes of the machines did not reach each other within {CONNECT_SECONDS:g} s: allow all TCP "
                    "ports between them, or name the network with export GLOO_SOCKET_IFNAME=…"
                )

    def _announce(self, line: str) -> None:
        self.store.compare_set("ended", "", json.dumps({"line": line, "code": 1}))

    def _end(self, line: str, code: int = 1) -> None:
        """Kill this machine's processes; torchrun then ends, and the launcher prints the line."""
        with self.guard:
            if self.finished.is_set() or self.ended.is_set():
                return
            self.code = code
            self.report(line)
            self.ended.set()
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self.finished.wait(GRACE_SECONDS):  # torchrun itself waits for a machine that is gone
            _exit_with(line, code)


def _exit_with(line: str, code: int) -> NoReturn:
    print(printable(f"error: {one_line(ClusterError(line))}"), file=sys.stderr, flush=True)
    os._exit(code)
