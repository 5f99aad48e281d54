"""The watched page: for this machine alone, no other file, new when the store is."""

import http.client
import json
import shutil
import signal
import socket
import threading
import time

import pytest

from biphase.errors import SpecError
from biphase.leases import Leases
from biphase.report import build
from biphase.report.build import HOST, PAGE, fingerprint, serve
from biphase.study import ledger as state_ledger
from biphase.study.describe import status_text
from biphase.study.ledger import finetunings


def ask(port, path=f"/{PAGE}", host=HOST, origin=""):
    """The status and the text that a request gets."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host)
    if origin:
        connection.putheader("Origin", origin)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.getheader("X-Frame-Options") == "DENY"
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_a_port_in_use_is_refused(ledger, tmp_path):
    plan, store = ledger
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        used = taken.getsockname()[1]
        with pytest.raises(SpecError, match=rf"port {used}.*--port 0"):
            serve(lambda: plan, store, tmp_path / "report", port=used, say=print)


def test_what_trains_is_told_with_step_loss_and_speed(ledger):
    plan, store = ledger
    job = plan.jobs[plan.results["mlm"]]
    shutil.rmtree(store.checkpoints / job.key)
    path = state_ledger.live_file(plan, store, job.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"loss": 3.21456, "objective": "mlm 40%"}
    lines = [json.dumps({"step": n, **line, "tokens": 1_000 * n, "seconds": n / 4}) for n in range(1, 19)]
    path.write_text("\n".join([*lines, '{"step": 19, "heldout": {"clm": 1.0}}', '{"step": 19, "lo']))
    store.leases.mkdir(exist_ok=True)
    with Leases(store.leases).take(job.key):
        told = status_text(plan, store, command_path="x")
    assert all(one in told for one in ("mlm", "step 18 of 20", "loss 3.215", "4 ktok/s")), told


def test_the_fingerprint_sees_every_kind_of_change(ledger):
    plan, store = ledger
    seen = {fingerprint(plan, store)}
    for folder in (store.checkpoints, store.trials, store.studies / "three" / "failures"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "new").touch()
        seen.add(fingerprint(plan, store))
    live = state_ledger.live_file(plan, store, plan.results["mlm"])
    live.parent.mkdir(parents=True, exist_ok=True)
    live.write_text("{}")
    seen.add(fingerprint(plan, store))
    assert len(seen) == 5
    assert fingerprint(plan, store) in seen


@pytest.fixture
def usual_interrupt():
    """^C as a command finds it: another test of this process may have left a handler of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_interrupt")
def test_the_page_changes_with_the_store_survives_a_broken_study_and_ends_at_control_c(
    ledger, tmp_path, monkeypatch
):
    plan, store = ledger
    monkeypatch.setattr(build, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(build, "REST", 0.0)
    said, seen, broken = [], {}, threading.Event()

    def make_plan():
        if broken.is_set():
            raise SpecError("studies/x.py:3: SyntaxError: invalid syntax")
        return plan

    def until(happens):
        while not happens():
            time.sleep(0.02)

    def use():
        until(lambda: said)
        port = int(said[0].split(":")[3].split("/")[0])
        seen["first"] = ask(port)[1]
        seen["refused"] = [
            ask(port, host=host)[0] for host in ("evil.example", f"localhost.evil.example:{port}")
        ]
        seen["refused"] += [
            ask(port, path)[0] for path in ("/", "/trials.csv", "/../three/plan.json", "/tables")
        ]
        seen["refused"] += [ask(port, origin=origin)[0] for origin in ("http://evil.example", "null")]
        trial = next(iter(finetunings(plan))).trials[0]
        shutil.move(store.trials / trial.key, tmp_path / "away")
        until(lambda: ask(port)[1] != seen["first"])
        seen["second"] = ask(port, host=f"localhost:{port}")[1]
        broken.set()
        shutil.move(tmp_path / "away", store.trials / trial.key)
        until(lambda: len(said) > 1)
        time.sleep(0.2)
        seen["third"], seen["port"] = ask(port)[1], port
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=use, daemon=True).start()
    serve(make_plan, store, tmp_path / "report", port=0, say=said.append)
    assert said[0].split()[2].startswith("http://127.0.0.1:"), "loopback alone"
    assert "<title>three: Is it so?</title>" in seen["first"]
    assert seen["refused"] == [404] * 8
    assert (tmp_path / "report" / "trials.csv").exists()
    assert "179 of 180 scores" in seen["second"]
    assert seen["third"] == seen["second"], "a study that is being edited leaves the page as it was"
    assert [line for line in said if "studies/x.py:3" in line] == said[1:2], "once"
    assert "stopped" in said[-1]
    with socket.socket() as free:
        assert free.connect_ex((HOST, seen["port"])) != 0
