"""The watched page: for this machine alone, one text and no files, new when the store is."""

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
from biphase.report.build import HOST, fingerprint, listen, serve
from biphase.study import ledger as state_ledger
from biphase.study.describe import status_text
from biphase.study.ledger import finetunings


def ask(port, path="/", method="GET", host="", origin=""):
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"{HOST}:{port}")
    if origin:
        connection.putheader("Origin", origin)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


@pytest.fixture(scope="module")
def port():
    """The port of a server of one page."""
    server = listen(0)
    server.page = b"<title>the page</title>"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "header",
    [
        *({"host": host} for host in ("evil.example", "evil.example:80", "127.0.0.1", "127.0.0.1:1")),
        {"host": "localhost.evil.example"},
        *({"origin": origin} for origin in ("http://evil.example", "null", "https://127.0.0.1")),
        {"origin": "http://localhost"},
    ],
    ids=str,
)
def test_another_host_or_origin_is_refused(port, header):
    answer, body = ask(port, **header)
    assert answer.status == 403
    assert b"<title" not in body


def test_the_page_itself_may_ask_and_nobody_may_frame_it(port):
    answer, body = ask(port, origin=f"http://127.0.0.1:{port}")
    assert (answer.status, body) == (200, b"<title>the page</title>")
    assert ask(port, host=f"localhost:{port}")[0].status == 200
    assert "frame-ancestors 'none'" in answer.getheader("Content-Security-Policy")
    assert answer.getheader("Access-Control-Allow-Origin") is None


def test_no_other_path_or_method_is_served(port):
    others = ("/..", "/../../etc/passwd", "/%2e%2e/trials.csv", "/trials.csv", "/figures", "/report.md")
    assert [ask(port, path)[0].status for path in others] == [404] * 6
    answer, body = ask(port, method="HEAD")
    assert (answer.status, body) == (200, b"")
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(port, method=method)[0].status == 501


def test_it_listens_on_loopback_only_and_refuses_a_port_in_use():
    with listen(0) as server:
        assert server.server_address[0] == "127.0.0.1"
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        used = taken.getsockname()[1]
        with pytest.raises(SpecError, match=rf"port {used} .*--port 0"):
            listen(used)


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
    said, pages, broken = [], [], threading.Event()

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
        pages.append((port, *ask(port)))
        trial = next(iter(finetunings(plan))).trials[0]
        shutil.move(store.trials / trial.key, tmp_path / "away")
        until(lambda: ask(port)[0].getheader("ETag") != pages[0][1].getheader("ETag"))
        pages.append((port, *ask(port)))
        broken.set()
        shutil.move(tmp_path / "away", store.trials / trial.key)
        until(lambda: len(said) > 1)
        time.sleep(0.2)
        pages.append((port, *ask(port)))
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=use, daemon=True).start()
    serve(make_plan, store, tmp_path / "report", port=0, say=said.append)
    (port, _, first), (_, _, second), (_, _, third) = pages
    assert b"<title>three: Is it so?</title>" in first
    assert b"connect-src 'self'" in first
    assert b"location.reload" in first
    assert b"location.reload" not in (tmp_path / "report" / "report.html").read_bytes()
    assert b"179 of 180 scores" in second
    assert third == second, "a study that is being edited leaves the page as it was"
    assert [line for line in said if "studies/x.py:3" in line] == said[1:2], "once"
    assert "stopped" in said[-1]
    with socket.socket() as free:
        assert free.connect_ex((HOST, port)) != 0
