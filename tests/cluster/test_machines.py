"""Machines that train together: network namespaces stand for them."""

import json
import signal
import time

import pytest
from network import PORT, ends, start
from small_study import MACHINES_STUDY, apart, last, wait_until

from biphase.cluster import machines
from biphase.cluster.launch import states
from biphase.cluster.machines import Machines, interface_to
from biphase.errors import SpecError
from biphase.store import Store, read_json, verify, wait_for

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
@pytest.mark.parametrize(("fault", "victim"), [("kill", 0), ("freeze", 1), ("cut", 1), ("drop", 1)])
def test_a_machine_that_is_gone_ends_the_others_with_one_line_and_nothing_is_lost(
    network, corpus, study, fresh, fault, victim
):
    study.write_text(MACHINES_STUDY.format(source=corpus.source, half=400))
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
        case "drop":  # of what it receives; what it sends arrives
            network.drop(victim, 100)
    began = time.monotonic()
    # A machine that runs but is not reached must end by itself too.
    alive = [1 - victim, victim] if fault == "drop" else [1 - victim]
    for number in alive:
        ((err, code),) = ends([children[number]], 60)
        print(f"{fault} node {victim}: node {number} ended after {time.monotonic() - began:.0f} s")
        assert time.monotonic() - began < 60
        assert code == 1, err
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert ("node 0" if number else "m1") in line
        assert "same command" in line
        assert "Traceback" not in err
    network.signal(name, signal.SIGKILL)
    network.cut(victim, up=True)
    network.drop(victim, 0)
    children[victim].communicate()
    for place in Store(store).checkpoints.glob("*"):
        verify(place)
    ends_in_the_same_bits(network, study, fresh("calm"), store)


def ends_in_the_same_bits(network, study, *stores):
    for store in stores:
        ended = ends(start(network, study, store, 2))
        assert [code for _, code in ended] == [0, 0], ended
    have_the_same_bits(*stores)


def have_the_same_bits(*stores):
    one, two = map(last, stores)
    assert one[1] == two[1]
    assert apart(one[0], two[0]) == 0, "the same bits"


@pytest.mark.campaign
def test_lost_packets_and_a_short_outage_change_nothing(network, study, fresh):
    store = fresh("store")
    children = start(network, study, store, 2, "--checkpoint", "5")
    for number in (0, 1):
        network.drop(number, 5)
    wait_until(lambda: list(store.glob("checkpoints/*/manifest.json")), 120, "a first checkpoint")
    network.drop(1, 100)
    time.sleep(10)
    network.drop(1, 5)
    ended = ends(children)
    assert [code for _, code in ended] == [0, 0], ended
    ends_in_the_same_bits(network, study, fresh("calm"), store)


@pytest.mark.campaign
def test_latency_changes_nothing(network, study, fresh):
    stores, seconds = [fresh("calm"), fresh("late")], []
    for store, delay in zip(stores, (0, 0.05), strict=True):
        if delay:
            network.delay(1, delay)
        assert network.round_trip(1) >= 2 * delay
        began = time.monotonic()
        ended = ends(start(network, study, store, 2))
        seconds.append(time.monotonic() - began)
        assert [code for _, code in ended] == [0, 0], ended
    print("a run of 50 steps took {:.1f} s, and {:.1f} s with 50 ms each way to node 1".format(*seconds))
    have_the_same_bits(*stores)


@pytest.mark.campaign
@pytest.mark.parametrize("number", [0, 1])
def test_a_signal_to_any_machine_stops_all_with_a_checkpoint(network, corpus, study, fresh, number):
    study.write_text(MACHINES_STUDY.format(source=corpus.source, half=4000))
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
    words = ("run", study, "--quiet", "--nodes", 2, "--head", f"{network.address(0)}:{PORT}")

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
    ((err, code),) = ends([network.run(1, *words, "--node", 1, "--store", store)], 90)
    assert code == 2
    assert f"{network.address(0)}:{PORT}" in err.splitlines()[-1]
    assert not list(store.glob("checkpoints/*"))


@pytest.mark.campaign
def test_processes_that_cannot_reach_each_other_are_reported(network, study, fresh, monkeypatch):
    """The launchers reach each other, but gloo is told to use an interface that the other machine cannot reach."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ended = ends(start(network, study, fresh("store"), 2), 200)
    assert [code for _, code in ended] in ([1, 1], [2, 2]), (
        ended
    )  # no answer in time, or a refused connection
    lines = [err.splitlines()[-1] for err, _ in ended]
    assert all(line.startswith("error: ") for line in lines), lines
    assert any("GLOO_SOCKET_IFNAME" in line for line in lines), (
        "the other may name only the machine that ended"
    )


@pytest.mark.campaign
def test_machines_with_one_store_are_validated_and_with_two_stores_refused(network, tmp_path):
    def validated(*stores, port):
        words = ("validate", "--json", "--nodes", 2, "--head", f"{network.address(0)}:{port}")
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
