"""A hub model is pinned once per store, by the hub or by its cache; no pin is ever replaced or lost."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from biphase import MLM, WSD, Corpus, Hub, Pretrain, Pretrained, Stage, Study
from biphase.errors import SpecError, StoreError
from biphase.store import Store
from biphase.study.load import commit_of, pinned

OLD, NEW, OTHER = "1" * 40, "2" * 40, "abcdef0123" * 4
CORPUS = Corpus("words", "./words", Pretrained("./words"))


@pytest.fixture
def bare(tmp_path: Path) -> Store:
    """A store whose folder is not there yet."""
    return Store(tmp_path / "store")


def write_pins(store: Store, pins: object) -> None:
    store.root.mkdir(parents=True, exist_ok=True)
    (store.root / "pins.json").write_text(pins if isinstance(pins, str) else json.dumps(pins))


def read_pins(store: Store) -> dict:
    return json.loads((store.root / "pins.json").read_text())


def fill_cache(cache: Path, commits: dict[str, str]) -> Path:
    """The hub library's cache as it stands after the newest commits were fetched."""
    for source, commit in commits.items():
        refs = cache / f"models--{source.replace('/', '--')}" / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(commit)
    return cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the library reads where it is when it is imported."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def trained(name: str, start: Hub | Pretrain) -> Pretrain:
    more = (
        {"corpus": CORPUS, "schedule": WSD(1e-4, 1, 1)}
        if isinstance(start, Hub)
        else {"schedule": WSD(1e-4, 0, 1)}
    )
    return Pretrain(name, start=start, stages=(Stage(MLM(0.4), 4),), **more)


# ---------------------------------------------------------------- the study


def test_a_pinned_study_names_the_commits_that_the_store_knows(bare):
    write_pins(bare, {"some/model": OLD})
    study = Study("s", (Pretrain("known", start=Hub("some/model")), Pretrain("unknown", start=Hub("no/pin"))))
    made = pinned(study, bare, ask=False)
    assert made == Study(
        "s", (Pretrain("known", start=Hub("some/model", OLD)), Pretrain("unknown", start=Hub("no/pin")))
    )


def test_what_goes_on_from_a_pinned_run_is_pinned_and_goes_on_from_the_same_record(bare):
    write_pins(bare, {"some/model": OLD})
    base = trained("base", Hub("some/model"))
    study = Study("s", (base, trained("one", base), trained("two", trained("between", base))))
    made = pinned(study, bare, ask=False)
    first, one, two = made.runs
    assert first.start == Hub("some/model", OLD)
    assert one.start is first
    assert two.start.start is first
    assert [run.name for run in made.runs] == ["base", "one", "two"]


def test_what_is_pinned_local_or_from_scratch_stays_the_record_it_is(bare, tiny_run, tmp_path):
    write_pins(bare, {"some/model": OLD, str(tmp_path): OLD, "./folder": OLD})
    scratch = tiny_run("scratch")
    runs = (
        Pretrain("pinned", start=Hub("some/model", NEW)),
        Pretrain("folder", start=Hub("./folder")),
        Pretrain("elsewhere", start=Hub(str(tmp_path))),
        scratch,
        tiny_run("on", start=scratch),
    )
    study = Study("s", runs)
    assert pinned(study, bare, ask=True) is study
    mixed = pinned(Study("s", (*runs, Pretrain("open", start=Hub("some/model")))), bare, ask=False)
    assert all(one is was for one, was in zip(mixed.runs, runs, strict=False))
    assert mixed.runs[-1].start == Hub("some/model", OLD)


def test_only_the_revision_of_a_model_is_filled_in(bare):
    write_pins(bare, {"some/model": OLD})
    start = Hub("some/model", gguf="model.Q4_1.gguf", windows="full")
    made = pinned(Study("s", (Pretrain("run", start=start),)), bare, ask=False)
    assert made.runs[0].start == Hub("some/model", OLD, "model.Q4_1.gguf", "full")


def test_without_asking_nothing_is_looked_up_and_nothing_is_written(bare, cache):
    fill_cache(cache, {"some/model": OLD})
    study = Study("s", (Pretrain("run", start=Hub("some/model")),))
    assert pinned(study, bare, ask=False) is study
    assert not bare.root.exists()


def test_asking_pins_for_good(bare, cache):
    fill_cache(cache, {"some/model": OLD})
    study = Study("s", (Pretrain("one", start=Hub("some/model")), trained("two", Hub("some/model"))))
    made = pinned(study, bare, ask=True)
    assert [run.start.revision for run in made.runs] == [OLD, OLD]
    assert read_pins(bare) == {"some/model": OLD}
    (cache / "models--some--model" / "refs" / "main").write_text(NEW)
    assert pinned(study, bare, ask=True) == made == pinned(study, bare, ask=False)
    assert commit_of("some/model", bare) == OLD


# ---------------------------------------------------------------- without a network


def test_offline_the_commit_of_the_cache_is_taken_and_others_pins_stay(bare, cache):
    write_pins(bare, {"an/other": NEW})
    fill_cache(cache, {"some/model": f"{OLD}\n"})
    assert commit_of("some/model", bare) == OLD
    assert read_pins(bare) == {"an/other": NEW, "some/model": OLD}


def refusal(source: str, store: Store, kind: type[Exception] = SpecError) -> str:
    with pytest.raises(kind) as caught:
        commit_of(source, store)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("in_cache", [None, "", "main", "1234567", "../" * 14, "1" * 41, b"\xff\xfe"])
def test_what_is_not_known_offline_is_refused_with_what_to_type(in_cache, bare, cache):
    if in_cache is not None:
        fill_cache(cache, {"some/model": ""})
        text = in_cache if isinstance(in_cache, bytes) else in_cache.encode()
        (cache / "models--some--model" / "refs" / "main").write_bytes(text)
    said = refusal("some/model", bare)
    assert "some/model@<commit>" in said
    assert "Hub('some/model', revision='<commit>')" in said
    assert "local folder" in said
    assert not bare.root.exists()


def test_what_is_no_name_of_a_model_is_refused(bare, cache):
    assert "some/model/more" in refusal("some/model/more", bare)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "null", '{"some/model": 1}', '{"some/model": "main"}', '{"an/other": ""}', "\x00"],
)
def test_a_damaged_list_of_pins_is_refused_and_left_as_it_is(content, bare, cache):
    fill_cache(cache, {"some/model": OLD})
    write_pins(bare, content)
    said = refusal("some/model", bare, StoreError)
    assert str(bare.root / "pins.json") in said
    assert (bare.root / "pins.json").read_text() == content
    with pytest.raises(StoreError):
        pinned(Study("s", (Pretrain("run", start=Hub("some/model")),)), bare, ask=False)


# ---------------------------------------------------------------- the hub, as a server on this machine


class StandIn(ThreadingHTTPServer):
    """Answers what the hub answers about models: status and commit by name, and remembers who asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.models: dict[str, tuple[int, str | None]] = {}
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/api/models/")
        if name != self.path:  # the library has questions of its own, too
            self.server.asked.append(name)
        status, commit = self.server.models.get(name, (404, None))
        body = json.dumps({"id": name, "sha": commit} if status == 200 else {"error": "not here"}).encode()
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def hub():
    server = StandIn()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


ASK = """
import sys
from biphase.errors import BiphaseError
from biphase.store import Store
from biphase.study.load import commit_of
for source in sys.argv[2:]:
    try:
        print(source, commit_of(source, Store(sys.argv[1])))
    except BiphaseError as refusal:
        print("refused:", refusal)
"""


def start(store: Store, *sources: str, **environment: str) -> subprocess.Popen:
    """Another process; the hub's library reads its settings when it is imported."""
    settings = {"HF_HUB_OFFLINE": "0", "HF_HOME": str(store.root.parent / "home"), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", ASK, str(store.root), *sources],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


def test_the_hub_is_asked_once_and_the_first_answer_stays(bare, hub):
    hub.models["some/model"] = (200, OLD)
    assert (
        lines(start(bare, "some/model", "some/model", HF_ENDPOINT=hub.address)) == [f"some/model {OLD}"] * 2
    )
    assert hub.asked == ["some/model"]
    hub.models["some/model"] = (200, NEW)
    assert lines(start(bare, "some/model", HF_ENDPOINT=hub.address)) == [f"some/model {OLD}"]
    assert hub.asked == ["some/model"]
    assert read_pins(bare) == {"some/model": OLD}


def test_what_the_hub_shows_counts_and_not_an_older_copy(bare, hub, tmp_path):
    hub.models |= {
        "some/model": (200, NEW),
        "hidden/model": (401, None),
        "no/commit": (200, None),
        "odd/one": (200, "main"),
    }
    names = ["some/model", "gone/model", "hidden/model", "no/commit", "odd/one"]
    fill_cache(tmp_path / "cache", dict.fromkeys(names, OLD))
    said = lines(start(bare, *names, HF_ENDPOINT=hub.address, HF_HUB_CACHE=str(tmp_path / "cache")))
    assert said[0] == f"some/model {NEW}"
    assert len(said) == len(names)
    for name, line in zip(names[1:], said[1:], strict=True):
        assert line.startswith("refused: ")
        assert f"{name}@<commit>" in line
    assert read_pins(bare) == {"some/model": NEW}


def test_where_the_hub_cannot_be_reached_the_copy_counts(bare, tmp_path):
    fill_cache(tmp_path / "cache", {"some/model": OTHER})
    with socket.socket() as taken:  # bound and not listening: a connection is refused
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        asked = start(
            bare, "some/model", "an/other", HF_ENDPOINT=nobody, HF_HUB_CACHE=str(tmp_path / "cache")
        )
        known, unknown = lines(asked)
    assert known == f"some/model {OTHER}"
    assert unknown.startswith("refused: ")
    assert read_pins(bare) == {"some/model": OTHER}


def test_processes_that_pin_at_once_lose_nothing_and_agree(bare, tmp_path):
    """Four, each with models of its own and all with the same ones, which each believes at another commit."""
    shared = [f"same/model-{n}" for n in range(30)]
    working = []
    for number in range(4):
        own = [f"own/{number}-{n}" for n in range(30)]
        cache = fill_cache(tmp_path / f"cache-{number}", dict.fromkeys([*shared, *own], str(number) * 40))
        names = [name for pair in zip(shared, own, strict=True) for name in pair]
        working.append(start(bare, *names, HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(cache)))
    while any(process.poll() is None for process in working):  # a reader finds it whole at every moment
        if (bare.root / "pins.json").exists():
            read_pins(bare)
        time.sleep(0.001)
    told = [dict(line.split() for line in lines(process)) for process in working]
    final = read_pins(bare)
    assert len(final) == 30 + 4 * 30
    for number, one in enumerate(told):
        assert all(final[name] == commit for name, commit in one.items())
        assert all(one[f"own/{number}-{n}"] == str(number) * 40 for n in range(30))
    assert not list(bare.root.glob("*.part"))
