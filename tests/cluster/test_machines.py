"""Machines that train together: network namespaces stand for them, each with its own address, link and host name."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from conftest import leave_out
from safetensors.torch import load_file
from small_study import wait_until

from biphase.cluster import machines, slurm
from biphase.cluster.launch import states
from biphase.cluster.machines import Machines, interface_to
from biphase.errors import SpecError
from biphase.store import Store, read_json, verify, wait_for

STUDY = """
from biphase import BPE, CLM, MLM, WSD, Chunks, Corpus, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
study = Study("machines", runs=(Pretrain(
    "two", start=tiny, corpus=Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl"),
    stages=(Stage(CLM(), {half}), Stage(MLM(0.4), {half})), packing=Chunks(32, shortest=4), batch_tokens=256,
    schedule=WSD(peak=3e-3, warmup=5, decay=10), heldout_every=25, heldout_tokens=512,
),))
"""
PORT = 29_400


# ---------------------------------------------------------------- options and comparison


@pytest.mark.parametrize(
    ("nodes", "node", "head", "fact"),
    [
        (1, 1, "", "--nodes 2"), (1, 0, "n1:29400", "--nodes 2"), (2, 0, "", ":29400"), (2, 0, "n1", ":29400"),
        (2, 0, "n1:0", ":29400"), (2, 0, "n1:70000", ":29400"), (2, 2, "n1:29400", "0 to 1"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(nodes, node, head, fact):
    with pytest.raises(SpecError, match=fact):
        Machines.named(nodes, node, head)


def test_addresses_are_names_or_numbers():
    assert Machines.named(1, 0, "") == Machines()
    assert Machines.named(3, 2, "gpu-17.cluster:29400").host == "gpu-17.cluster"
    six = Machines.named(2, 1, "[fe80::1]:29400")
    assert (six.host, six.head) == ("fe80::1", "[fe80::1]:29400")
    assert interface_to("127.0.0.1", PORT) == "lo"


def came(node, **fields):
    facts = {
        "machine": f"m{node}",
        "node": node,
        "nodes": 3,
        "alike": {"torch": "2", "the plan": "a"},
        "sees": True,
    }
    return facts | fields


@pytest.mark.parametrize(
    ("second", "third", "facts"),
    [
        (came(1), came(2), ()),
        (came(1), None, ("node 2", "n0:29400")),
        (came(1), came(1, machine="m9"), ("--node 1", "m1", "m9")),
        (came(1), came(2, nodes=4), ("m2", "--nodes 4")),
        (came(1, alike={"torch": "3", "the plan": "a"}), came(2), ("m1 (node 1)", "torch", "3", "2")),
        (came(1), came(2, alike={"torch": "2", "the plan": "b"}), ("m2 (node 2)", "the plan")),
        (came(1), came(2, sees=False), ("m2 (node 2)", "/shared", "--store")),
    ],
)
def test_the_machine_that_is_missing_or_differs_is_named(second, third, facts):
    here = Machines(3, 0, "n0", PORT, "/shared")
    everyone = [came(0), second, *([third] if third else [])]
    line = machines._difference(here, everyone[0], everyone)
    assert bool(line) == bool(facts)
    assert all(fact in line for fact in facts)


def test_the_state_of_processes_is_what_they_noted(tmp_path):
    path = tmp_path / "error"
    for event, rank in (("joining", 4), ("joining", 5), ("begun", 5)):
        (tmp_path / f"error.{event}.{rank}").touch()
    assert states(path, 3) == ["begun", "joining", "starting"]


def test_what_appears_late_is_waited_for_and_what_never_does_is_not_waited_for_forever():
    answers = iter([False, False, True])
    assert wait_for(lambda: next(answers), 5)
    began = time.monotonic()
    assert not wait_for(lambda: False, 0.2)
    assert time.monotonic() - began < 2


# ---------------------------------------------------------------- network namespaces as machines


class Network:
    """Namespaces m0, m1, … of this process id, joined by a bridge in one of their own."""

    def __init__(self, count: int) -> None:
        self.names = [f"bp{os.getpid()}m{number}" for number in range(count)]
        self.bridge = f"bp{os.getpid()}br"

    def make(self) -> None:
        for name in (self.bridge, *self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.bridge, "link", "add", "name", "bridge0", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "bridge0", "up")
        for number, name in enumerate(self.names):
            ip(
                "-n",
                name,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"p{number}",
                "netns",
                self.bridge,
            )
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", self.bridge, "link", "set", f"p{number}", "master", "bridge0", "up")

    def remove(self) -> None:
        for name in (*self.names, self.bridge):
            self.signal(name, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def signal(self, name: str, number: signal.Signals) -> None:
        for pid in subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True
        ).stdout.split():
            os.kill(int(pid), number)

    def cut(self, number: int, *, up: bool = False) -> None:
        ip("-n", self.bridge, "link", "set", f"p{number}", "up" if up else "down")

    def run(self, number: int, *words: object) -> subprocess.Popen[str]:
        name = self.names[number]
        command = [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            f"m{number}",
        ]
        return subprocess.Popen(
            [*command, sys.executable, "-m", "biphase", *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {words}: {done.stderr}"


@pytest.fixture
def network() -> Generator[Network]:
    if os.geteuid() or not shutil.which("ip"):
        leave_out("network namespaces need root and the command ip")
    made = Network(3)
    try:
        made.make()
        yield made
    finally:
        made.remove()


@pytest.fixture
def study(corpus, tmp_path) -> Path:
    path = tmp_path / "study.py"
    path.write_text(STUDY.format(source=corpus.source, half=25))
    return path


def start(network, study, store, nodes, *more, processes=1):
    words = ("run", study, "--store", store, "--quiet", "--processes", processes, "--nodes", nodes, *more)
    head = ("--head", f"10.77.0.1:{PORT}")
    return [network.run(number, *words, "--node", number, *head) for number in range(nodes)]


def ends(children, seconds=240):
    """Exit code and error output of each."""
    return [(child.communicate(timeout=seconds)[1], child.returncode) for child in children]


def last(store):
    places = {
        read_json(place / "checkpoint.json")["progress"]["step"]: place
        for place in Path(store).glob("checkpoints/*")
    }
    place = places[max(places)]
    verify(place)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    labels = {line["step"]: (line["labels"], line["tokens"]) for line in lines if "labels" in line}
    return {**load_file(place / "model.safetensors"), **load_file(place / "optimizer.safetensors")}, labels


def apart(one, two):
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)


@pytest.fixture
def fresh(shards, tmp_path):
    def make(name):
        (tmp_path / name / "shards").mkdir(parents=True)
        (tmp_path / name / "shards" / shards.name).symlink_to(shards)
        return tmp_path / name

    return make


@pytest.mark.campaign
def test_one_two_and_three_machines_train_the_same_model(network, study, fresh):
    results = {}
    for nodes, processes, more in ((1, 1, ()), (2, 1, ()), (3, 1, ()), (2, 2, ("--shard", "full"))):
        if nodes == 1:
            children = [network.run(0, "run", study, "--store", fresh("one"), "--quiet")]
        else:
            children = start(network, study, fresh(f"{nodes}-{processes}"), nodes, *more, processes=processes)
        for err, code in ends(children):
            assert code == 0, err
    results = {name: last(study.parent / name) for name in ("one", "2-1", "3-1", "2-2")}
    weights, labels = results.pop("one")
    for name, (others, seen) in results.items():
        assert seen == labels, f"{name}: the same samples and masks"
        assert apart(weights, others) <= 1e-5, name


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("fault", "victim"), [("kill", 1), ("kill", 0), ("freeze", 1), ("freeze", 0), ("cut", 1)]
)
def test_a_machine_that_is_gone_ends_the_others_with_one_line_and_nothing_is_lost(
    network, corpus, study, fresh, fault, victim
):
    study.write_text(STUDY.format(source=corpus.source, half=400))
    store = fresh("store")
    children = start(network, study, store, 2, "--checkpoint", "5")
    wait_until(lambda: list(store.glob("checkpoints/*/manifest.json")), 120, "a first checkpoint")
    name = network.names[victim]
    match fault:
        case "kill":
            network.signal(name, signal.SIGKILL)
        case "freeze":
            network.signal(name, signal.SIGSTOP)
        case "cut":
            network.cut(victim)
    began = time.monotonic()
    ((err, code),) = ends([children[1 - victim]], 60)
    assert time.monotonic() - began < 60
    assert code == 1, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert ("node 0" if victim == 0 else "m1") in line
    assert "same command" in line
    assert "Traceback" not in err
    network.signal(name, signal.SIGKILL)
    network.cut(victim, up=True)
    children[victim].communicate()
    for place in Store(store).checkpoints.glob("*"):
        verify(place)
    calm = start(network, study, fresh("calm"), 2)
    calmly = ends(calm)
    assert [code for _, code in calmly] == [0, 0], calmly
    again = ends(start(network, study, store, 2))
    assert [code for _, code in again] == [0, 0], again
    one, two = last(store), last(study.parent / "calm")
    assert one[1] == two[1]
    assert apart(one[0], two[0]) == 0, "the same bits"


@pytest.mark.campaign
@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_to_any_machine_stops_all_with_a_checkpoint(network, corpus, study, fresh, number):
    study.write_text(STUDY.format(source=corpus.source, half=4000))
    store = fresh("store")
    children = start(network, study, store, 2, "--checkpoint", "200")
    wait_until(lambda: list(store.glob("checkpoints/*/manifest.json")), 120, "a first checkpoint")
    children[number].send_signal(signal.SIGTERM)
    ended = ends(children, 60)
    assert [code for _, code in ended] == [0, 0], ended
    steps = [read_json(path)["progress"]["step"] for path in store.glob("checkpoints/*/checkpoint.json")]
    assert any(step % 200 for step in steps), "a checkpoint of the step at which all stopped"


@pytest.mark.campaign
def test_machines_that_do_not_fit_are_named_before_anything_is_computed(network, study, fresh):
    store, other = fresh("store"), fresh("other")
    words = ("run", study, "--quiet", "--nodes", 2, "--head", f"10.77.0.1:{PORT}")

    def pair(first, second):
        ended = ends(
            [network.run(0, *words, "--node", 0, *first), network.run(1, *words, "--node", 1, *second)], 120
        )
        assert [code for _, code in ended] == [2, 2], ended
        lines = [[line for line in err.splitlines() if line.startswith("error: ")] for err, _ in ended]
        assert lines[0] == lines[1]
        return lines[0]

    assert "m1" in pair(("--store", store), ("--store", other))[0]
    assert "--processes" in pair(("--store", store), ("--store", store, "--processes", 2))[0]
    ((err, code),) = ends([network.run(0, *words, "--node", 0, "--store", store)], 120)
    assert code == 2
    assert "node 1" in err.splitlines()[-1]
    ((err, code),) = ends([network.run(1, *words, "--node", 1, "--store", store)], 120)
    assert code == 2
    assert f"10.77.0.1:{PORT}" in err.splitlines()[-1]
    assert not list(store.glob("checkpoints/*"))


@pytest.mark.campaign
def test_processes_that_cannot_reach_each_other_are_reported(network, study, fresh, monkeypatch):
    """The launchers reach each other, but gloo is told to use an interface that the other machine cannot reach."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ended = ends(start(network, study, fresh("store"), 2), 200)
    assert [code for _, code in ended] == [1, 1], ended
    for err, _ in ended:
        assert "GLOO_SOCKET_IFNAME" in err.splitlines()[-1] or "ended" in err.splitlines()[-1], err


# ---------------------------------------------------------------- as a Slurm job

STAND_INS = {
    "scontrol": 'case "$1" in show) echo 127.0.0.1;; *) echo "$*";; esac',
    "srun": 'while [ "$1" != bash ]; do shift; done; echo $$ >"$STEP"; pids=""; worst=0\n'
    'for node in 0 1; do SLURM_NODEID=$node "$@" & pids="$pids $!"; done\n'
    'for pid in $pids; do wait "$pid"; code=$?; [ $code -le $worst ] || worst=$code; done; exit $worst',
    # Slurm signals every process of a step, not only those that it started.
    "scancel": f"""exec {sys.executable} -c '
import os, sys
from biphase.leases import descendants
number = {{"USR1": 10, "TERM": 15}}[sys.argv[1]]
for pid in descendants(int(open(os.environ["STEP"]).read())):
    os.kill(pid, number)
' "${{2#--signal=}}"
""",
}


@pytest.mark.campaign
def test_a_warned_job_of_two_machines_stops_requeues_and_goes_on(corpus, study, fresh, tmp_path, monkeypatch):
    study.write_text(STUDY.format(source=corpus.source, half=1500))
    store, programs = fresh("store"), tmp_path / "programs"
    programs.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name, value in {
        "JOB_ID": "17",
        "ARRAY_JOB_ID": "17",
        "ARRAY_TASK_ID": "0",
        "JOB_NODELIST": "n[1-2]",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("STEP", str(tmp_path / "step"))
    arguments = ["run", str(study), "--store", str(store), "--quiet", "--checkpoint", "200"]
    text = slurm.job_script(
        slurm.Profile(nodes=2), study="machines", submission="s1", jobs=1, arguments=arguments
    )
    (tmp_path / "job.sh").write_text(text)
    job = subprocess.Popen(
        ["bash", tmp_path / "job.sh"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: list(store.glob("checkpoints/*/manifest.json")), 120, "a first checkpoint")
    job.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=60)
    assert "requeue 17" in out.splitlines()[-1], err
    steps = [read_json(path)["progress"]["step"] for path in store.glob("checkpoints/*/checkpoint.json")]
    assert any(step % 200 for step in steps), "a checkpoint of the step at which all stopped"
    again = subprocess.run(
        ["bash", tmp_path / "job.sh"], capture_output=True, text=True, timeout=240, check=False
    )
    assert again.returncode == 0, again.stderr
    assert len(last(store)[1]) == 3000


@pytest.mark.campaign
def test_machines_with_one_store_are_validated_and_with_two_stores_refused(network, tmp_path):
    def validated(*stores, port):
        words = ("validate", "--json", "--nodes", 2, "--head", f"10.77.0.1:{port}")
        children = [
            network.run(number, *words, "--node", number, "--store", store)
            for number, store in enumerate(stores)
        ]
        ended = [child.communicate(timeout=1200)[0] for child in children]
        assert not any(store.exists() for store in stores), "nothing is left"
        return [child.returncode for child in children], [json.loads(text)["checks"] for text in ended]

    one, two = tmp_path / "one", tmp_path / "two"
    codes, (checks, _) = validated(one, one, port=PORT)
    assert codes == [0, 0], checks
    well = {check["name"] for check in checks if check["ok"]}
    assert {"gloo", "folder", "locks", "visible", "clocks", "resume", "shard"} <= well
    codes, (checks, _) = validated(one, two, port=PORT + 10)
    assert codes == [1, 1]
    assert "m1" in checks[0]["detail"]
