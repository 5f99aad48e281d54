"""A real Slurm for tests: munged, slurmctld, and slurmd of one CPU and one pretended GPU each, on loopback or on a network.

The daemons come from Debian's packages (tests/system-packages installs them) and are started here, with their own
ports, key and folders. Without them these tests fail where a machine is to prove something (CI) and are left out
elsewhere, with a line.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from biphase.cli import app

sys.path.insert(0, str(Path(__file__).parent))  # for network.py and small_study.py
from network import HOST, Network, made
from small_study import MACHINES_STUDY, SHORT, contents, typed, wait_until, write_study

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
NODES = ("n1", "n2")
START_SECONDS = 30

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost({address})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=10
SlurmdTimeout=10
MinJobAge=5
GresTypes=gpu
{nodes}
PartitionName=short Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def program(name: str) -> str:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for bound in held:
        bound.bind(("127.0.0.1", 0))
    ports = [bound.getsockname()[1] for bound in held]
    for bound in held:
        bound.close()
    return ports


class Slurm:
    """A cluster that lives as long as the tests that use it: nodes n1 and n2, or the machines of a network."""

    def __init__(self, root: Path, network: Network | None = None) -> None:
        self.root = root
        self.network = network
        self.nodes = network.hosts if network else NODES
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.slurmds: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        root = self.root
        for name in ("munge", "state", *(f"spool-{node}" for node in self.nodes)):
            (root / name).mkdir(parents=True)
        root.chmod(0o755)
        key = root / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        controller, *ports = free_ports(1 + len(self.nodes))
        address, places = "127.0.0.1", ["NodeHostname=localhost NodeAddr=127.0.0.1"] * len(self.nodes)
        if self.network:
            address = self.network.address(HOST)
            places = [f"NodeAddr={self.network.address(number)}" for number in range(len(self.nodes))]
        nodes = [
            f"NodeName={node} {place} Port={port} CPUs=1 RealMemory=1000 Gres=gpu:1"
            for node, place, port in zip(self.nodes, places, ports, strict=True)
        ]
        self.config = root / "slurm.conf"
        self.config.write_text(
            CONFIG.format(
                address=address, port=controller, user=getpass.getuser(), root=root, nodes="\n".join(nodes)
            )
        )
        (root / "gres.conf").write_text(
            "".join(f"NodeName={node} Name=gpu File=/dev/null\n" for node in self.nodes)
        )
        munge = [f"--{what}={root}/munge/{what.split('-')[0]}" for what in ("key-file", "socket", "pid-file")]
        munge += [f"--{what}={root}/munge/{what.split('-')[0]}" for what in ("log-file", "seed-file")]
        self._run("munged", "--foreground", "--force", *munge)
        wait_until((root / "munge" / "socket").exists, START_SECONDS, "munged listens")
        self._run("slurmctld", "-D", "-f", self.config)  # an absolute path, or its commands do not find it
        for number in range(len(self.nodes)):
            self.boot(number)

    def boot(self, number: int) -> None:
        """Start the daemon of a node."""
        command = "slurmd", "-D", "-N", self.nodes[number], "-f", self.config
        self.slurmds[number] = self._run(*command, machine=number)

    def _run(self, name: str, *arguments: object, machine: int | None = None) -> subprocess.Popen[bytes]:
        with (self.root / f"{name}.out").open("ab") as out:
            command = [program(name), *map(str, arguments)]
            if self.network and machine is not None:
                daemon = self.network.start(machine, *command, stdout=out, stderr=out)
            else:
                daemon = subprocess.Popen(command, stdout=out, stderr=out)
            self.daemons.append(daemon)
            return daemon

    def idle(self) -> bool:
        asked = subprocess.run(["sinfo", "--noheader", "--format=%T %D"], capture_output=True, text=True)
        return asked.stdout.split() == ["idle", str(len(self.nodes))]

    def jobs(self, states: str = "all") -> list[str]:
        """Ids of the jobs that are not gone."""
        shown = typed("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return [line.split()[0] for line in shown if states == "all" or line.split()[1] in states.split(",")]

    def clear(self) -> None:
        """No job left, and every node up."""
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], capture_output=True)
        wait_until(lambda: not self.jobs(), 60, "all jobs are gone")
        for number in [number for number, daemon in self.slurmds.items() if daemon.poll() is not None]:
            self.boot(number)
        self.resume()

    def resume(self) -> None:
        """Every node up; one that is up already, or came back by itself, is refused and all is well."""
        for node in self.nodes:
            subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True)

    @contextlib.contextmanager
    def asked(self) -> Generator[None]:
        """Slurm's commands are about this cluster."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(self.config))
            yield

    @contextlib.contextmanager
    def emptied(self) -> Generator[None]:
        with self.asked():
            self.clear()
            wait_until(self.idle, 30, "all nodes are idle")
            yield
            self.clear()

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def why(self) -> str:
        """The last words of the daemons."""
        logs = sorted([*self.root.glob("*.log"), *self.root.glob("*.out"), *self.root.glob("munge/log")])
        return "\n".join(
            f"{log.name}: {line}"
            for log in logs
            for line in log.read_text(errors="replace").splitlines()[-4:]
        )


def leave_out(why: str) -> None:
    """Skip with a reason, but fail where a machine is to prove something."""
    if os.environ.get("CI") or os.environ.get("BIPHASE_CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


def check_namespaces() -> None:
    if os.geteuid() or not all(map(program, ("ip", "nft"))):
        leave_out(
            "network namespaces need root, and the commands ip and nft: run tests/system-packages as root"
        )


@contextlib.contextmanager
def started(cluster: Slurm) -> Generator[Slurm]:
    missing = [name for name in (*DAEMONS, *COMMANDS) if not program(name)]
    if missing:
        leave_out(f"no Slurm ({', '.join(missing)} missing): run tests/system-packages as root")
    try:
        cluster.start()
        with cluster.asked():
            try:
                wait_until(cluster.idle, START_SECONDS, "all nodes are idle")
            except AssertionError:
                why = f"Slurm did not start as {getpass.getuser()}:\n{cluster.why()}"
                if os.geteuid():
                    leave_out(f"{why}\nit is known to start as root")
                pytest.fail(why, pytrace=False)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def _slurm(tmp_path_factory: pytest.TempPathFactory) -> Generator[Slurm]:
    with started(Slurm(tmp_path_factory.mktemp("slurm"))) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _networked_slurm(tmp_path_factory: pytest.TempPathFactory) -> Generator[Slurm]:
    check_namespaces()
    folder = tmp_path_factory.mktemp("slurm")
    with made(Network(4, "s", joined=True)) as network, started(Slurm(folder, network)) as cluster:
        yield cluster


@pytest.fixture
def slurm(_slurm: Slurm) -> Generator[Slurm]:
    """The cluster of two nodes, empty."""
    with _slurm.emptied():
        yield _slurm


@pytest.fixture
def networked_slurm(_networked_slurm: Slurm) -> Generator[Slurm]:
    """The cluster whose nodes are machines of a network, empty."""
    with _networked_slurm.emptied():
        yield _networked_slurm


@pytest.fixture(scope="session")
def calm(corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a local run of the short study leaves in its store."""
    folder = tmp_path_factory.mktemp("calm")
    study = write_study(folder, corpus.source, **SHORT)
    ended = CliRunner().invoke(app, ["run", str(study), "--store", str(folder / "store"), "--quiet"])
    assert ended.exit_code == 0, ended.output
    return contents(folder / "store")


@pytest.fixture
def network() -> Generator[Network]:
    check_namespaces()
    with made(Network(3)) as network:
        yield network


@pytest.fixture
def study(corpus, tmp_path) -> Path:
    path = tmp_path / "study.py"
    path.write_text(MACHINES_STUDY.format(source=corpus.source, half=25))
    return path


@pytest.fixture
def fresh(shards, tmp_path):
    def make(name):
        (tmp_path / name / "shards").mkdir(parents=True)
        (tmp_path / name / "shards" / shards.name).symlink_to(shards)
        return tmp_path / name

    return make
