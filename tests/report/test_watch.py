"""The watched page: for this machine alone, three texts and no files, new when the store is."""

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
from biphase.report.watch import HOST, Watcher, fingerprint, listen, progress, serve
from biphase.store import Store
from biphase.study import ledger as state_ledger
from biphase.study.describe import status_text
from biphase.study.ledger import finetunings


def watch(plan, store, folder):
    said = []
    made = Watcher(lambda: plan, store, folder, say=said.append)
    made.said = said
    made.look()
    return made


def look_again(watcher):
    """Poll without the rest that follows a report."""
    watcher._report._not_before = watcher._progress._not_before = 0.0
    watcher.look()


@pytest.fixture
def watcher(ledger, tmp_path):
    return watch(*ledger, tmp_path / "report")


@pytest.fixture(scope="module")
def asked(three, planned, _three_store, tmp_path_factory):
    """Ask the server of a watcher of the whole ledger."""
    server = listen(0)
    server.watcher = watch(planned(three), Store(_three_store), tmp_path_factory.mktemp("watched"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()

    def ask(path, method="GET", host="", origin=""):
        connection = http.client.HTTPConnection(HOST, server.server_port, timeout=10)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"{HOST}:{server.server_port}")
        if origin:
            connection.putheader("Origin", origin)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    ask.port, ask.watcher = server.server_port, server.watcher
    yield ask
    server.shutdown()
    server.server_close()


def test_the_page_is_served_with_its_progress_and_figures(asked):
    answer, page = asked("/")
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "text/html; charset=utf-8"
    assert b"<title>three: Is it so?</title>" in page
    assert b'id="progress"' in page
    assert b"connect-src 'self'" in page
    status = json.loads(asked("/status.json")[1])["progress"]
    assert status["said"] == "all done"
    assert status["meters"]["fine-tunings"] == {"done": 144, "of": 144, "left": ""}
    assert status["meters"]["training jobs"]["done"] == status["meters"]["training jobs"]["of"] > 0
    assert "losses" in json.loads(asked("/figures.json")[1])
    assert b"<h1" in asked("/main.html")[1]
    assert asked("/report.html?x=1")[1] == page
    ordinary = asked.watcher.page.read_text()  # the page in the folder
    assert not any(word in ordinary for word in ('id="progress"', "status.json"))


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
def test_another_host_or_origin_is_refused(asked, header):
    for path in ("/", "/status.json"):
        answer, body = asked(path, **header)
        assert answer.status == 403
        assert b"<title" not in body
        assert b"progress" not in body


def test_the_page_itself_may_ask_and_nobody_may_frame_it(asked):
    answer, _ = asked("/status.json", origin=f"http://127.0.0.1:{asked.port}")
    assert answer.status == asked("/status.json", host=f"localhost:{asked.port}")[0].status == 200
    assert "frame-ancestors 'none'" in answer.getheader("Content-Security-Policy")
    assert answer.getheader("Access-Control-Allow-Origin") is None


def test_no_other_path_or_method_is_served(asked):
    others = ("/..", "/../../etc/passwd", "/%2e%2e/trials.csv", "/trials.csv", "/figures", "/report.md")
    assert [asked(path)[0].status for path in (*others, "/status.json/")] == [404] * 7
    answer, body = asked("/", method="HEAD")
    assert (answer.status, body) == (200, b"")
    assert int(answer.getheader("Content-Length")) > 1000
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked("/", method=method)[0].status == 501


def test_it_listens_on_loopback_only_and_refuses_a_port_in_use():
    with listen(0) as server:
        assert server.server_address[0] == "127.0.0.1"
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=rf"port {port} is in use.*--port 0"):
            listen(port)


def test_the_page_changes_when_a_trial_goes_or_comes_and_not_otherwise(watcher, ledger):
    plan, store = ledger
    before = watcher.shown
    look_again(watcher)
    assert watcher.shown is before
    trial = next(iter(finetunings(plan))).trials[0]
    shutil.move(store.trials / trial.key, store.root / "away")
    look_again(watcher)
    assert watcher.shown.content != before.content
    assert watcher.progress["meters"]["fine-tunings"]["done"] == 143
    assert watcher.progress["said"] == "nothing is running"
    shutil.move(store.root / "away", store.trials / trial.key)
    look_again(watcher)
    assert (watcher.shown.content, watcher.shown.figures) == (before.content, before.figures)


def test_losses_that_are_being_written_change_the_figures_alone(ledger, tmp_path):
    plan, store = ledger
    for key in plan.jobs:
        if key in (plan.results["mlm"], *[s.key for s in plan.path(plan.results["mlm"])]):
            shutil.rmtree(store.checkpoints / key, ignore_errors=True)
    path = state_ledger.live_file(plan, store, plan.path(plan.results["mlm"])[0].key)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"step": n, "loss": 8.0 - n / 10, "objective": "mlm 40%", "tokens": 128 * n}) + "\n"
        for n in range(1, 9)
    ]
    path.write_text("".join(lines[:4]))
    made = watch(plan, store, tmp_path / "report")
    before = made.shown
    path.write_text("".join(lines) + '{"step": 9, "lo')
    look_again(made)
    assert made.shown.figures != before.figures
    assert made.shown.content == before.content
    drawn = json.loads(made.shown.texts["/figures.json"][1])["losses"]["data"]
    lines = [[row["x"] for row in series.get("values", [])] for series in drawn]
    assert [[step] for step in range(1, 9)] in lines, "the half line is not read"
    served = made.shown.texts["/main.html"][1].decode()
    assert served.index('data-figure="losses"') < served.index('id="claims"'), (
        "while it trains, losses come first"
    )
    assert served.count('data-figure="losses"') == 1
    assert "not tested yet" in served


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
        (told,) = progress(plan, store)["running"]
        status = status_text(plan, store, command_path="x")
    for facts in (told, status):
        assert all(one in facts for one in ("mlm", "step 18 of 20", "loss 3.215", "4 ktok/s")), facts
    path.write_text("no line")
    with Leases(store.leases).take(job.key):
        assert progress(plan, store)["running"][0].startswith("mlm on "), "a damaged file is only looked at"


def test_what_runs_and_what_failed_is_told(ledger):
    plan, store = ledger
    first, second, third = (
        one
        for one in finetunings(plan)
        if one.task.name == "sst2" and one.seed == 0 and one.model == plan.results["mlm"]
    )
    for one in (first, second, third):
        shutil.rmtree(store.trials / one.trials[0].key)
    state_ledger.note_failure(plan, store, second.key, ValueError("no"))
    store.leases.mkdir(exist_ok=True)
    with Leases(store.leases).take(first.key):
        told = progress(plan, store)
    assert told["said"] == "1 running, 1 failed"
    assert told["running"][0].startswith("mlm · sst2 · lr 2e-05 · seed 0 on ")
    meter = told["meters"]["fine-tunings"]
    assert (meter["done"], meter["of"]) == (141, 144)
    assert meter["left"]


def test_a_study_file_that_is_being_edited_leaves_the_page_as_it_was(watcher, ledger):
    _, store = ledger
    shown = watcher.shown

    def broken():
        raise SpecError("studies/x.py:3: SyntaxError: invalid syntax")

    watcher.make_plan = broken
    store.leases.mkdir(exist_ok=True)
    (store.leases / "x").write_text("")
    for _ in range(2):
        look_again(watcher)
    assert watcher.shown is shown
    assert len(watcher.said) == 1, "once"
    assert "studies/x.py:3: SyntaxError: invalid syntax" in watcher.said[0]
    with pytest.raises(SpecError, match=r"studies/x\.py:3"):
        serve(broken, store, watcher.folder, port=0, say=watcher.said.append)


def test_the_fingerprint_costs_little_and_sees_every_kind_of_change(ledger):
    plan, store = ledger
    seen = {fingerprint(plan, store)}
    for folder in (store.checkpoints, store.trials, store.leases, store.studies / "three" / "failures"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "new").touch()
        seen.add(fingerprint(plan, store))
    assert len(seen) == 5
    assert fingerprint(plan, store) in seen
    assert fingerprint(plan, Store(store.root / "nowhere"))


@pytest.fixture
def usual_interrupt():
    """^C as a command finds it: another test of this process may have left a handler of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("usual_interrupt")
def test_control_c_ends_it_cleanly(ledger, tmp_path):
    plan, store = ledger
    said = []

    def interrupt():
        while not said:
            time.sleep(0.02)
        time.sleep(0.1)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    serve(lambda: plan, store, tmp_path / "report", port=0, say=said.append)
    assert "http://127.0.0.1:" in said[0]
    assert "stopped" in said[-1]
    port = int(said[0].split(":")[3].split("/")[0])
    with socket.socket() as free:
        assert free.connect_ex((HOST, port)) != 0
