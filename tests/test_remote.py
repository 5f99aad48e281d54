"""What is read from the hub, by its own client: the same as from a copy, all of it or nothing, refused in one line."""

import io
import itertools
import json

import pyarrow
import pytest
import zstandard
from common import sentences, toys, write_lines, write_task
from families.tiny import with_head
from hub_server import Fault
from pyarrow import parquet

BUSY = Fault("/api/(models|datasets)/", 503, times=1)
DROPPED = Fault("GET /lfs", after=700, times=2)
GONE = "1" * 40


@pytest.fixture(scope="session")
def model(shards, tmp_path_factory):
    """A tiny decoder and its tokenizer, as a repository has them."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    tokens = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0}
    with_head("llama", seed=1, **tokens).save_pretrained(folder)
    for path in (shards / "tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def corpus_files():
    """Text as parquet and as compressed lines; and a file that no pattern means."""
    table, texts = io.BytesIO(), sentences(400)
    parquet.write_table(pyarrow.table({"text": texts[:200]}), table, row_group_size=60)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[200:])
    packed = zstandard.compress(lines.encode())
    return {"data/a.parquet": table.getvalue(), "data/b.jsonl.zst": packed, "README.md": b"# Texts"}


names = (
    f"me/one-{number}" for number in itertools.count()
)  # the client's cache lives as long as the session


def tokenized(client, store, source, *more):
    code, _, err = client("tokenize", source, "--tokenizer", "bpe:320", "--store", store, *more)
    assert code == 0, err
    (folder,) = (store / "shards").iterdir()
    return (folder / "train-00000.bin").read_bytes()


def evaluated(client, store, model, task, **environment):
    grid = ("--tasks", task, "--lrs", "1e-3", "--seeds", "0", "--steps", "2", "--quiet")
    return client("evaluate", model, *grid, "--store", store, **environment)


def refusal(answer):
    """The one line with which a command refuses, after what the hub's library logs."""
    code, _, err = answer
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, err.splitlines()[-1:]) == (2, lines)
    return lines[0]


# ---------------------------------------------------------------- read


def test_a_streamed_corpus_is_read_as_a_copy_of_it_through_faults(hub, client, corpus_files, tmp_path):
    name = next(names)
    texts = hub.add(name, corpus_files, "dataset")
    source = f"hf://{name}@{texts.branches['main']}/data/*"
    with hub.failing(BUSY, DROPPED):
        streamed = tokenized(client, tmp_path / "streamed", source)
    assert all(fault.seen == fault.times for fault in (BUSY, DROPPED))
    for path, data in corpus_files.items():
        (tmp_path / "copy" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / path).write_bytes(data)
    assert streamed == tokenized(client, tmp_path / "copied", source, "--from", tmp_path / "copy")


def test_a_model_keeps_its_commit_when_its_branch_moves_and_needs_no_hub_later(hub, client, model, tmp_path):
    name = next(names)
    repository = hub.add(name, {path.name: path.read_bytes() for path in model.iterdir()})
    first, task = repository.branches["main"], write_task(tmp_path / "task")
    code, _, err = evaluated(client, tmp_path / "store", name, task)
    assert code == 0, err
    repository.commit({"config.json": b"{}"})
    more = write_task(tmp_path / "more", lambda count, first: toys(count, first + 3))
    with hub.failing(Fault("", 500)) as asked:
        code, _, err = evaluated(client, tmp_path / "store", name, more)
    assert (code, [one for one in asked if "agent" not in one]) == (0, []), err
    assert json.loads((tmp_path / "store" / "pins.json").read_text()) == {name: first}


def test_a_task_and_its_tokenizer_are_read_from_the_hub(hub, client, model, tmp_path):
    rows = {f"data/{part}.jsonl": b"" for part in ("train", "validation", "test")}
    for path in write_task(tmp_path / "task").iterdir():
        rows[f"data/{path.name}"] = path.read_bytes()
    data, words = hub.add(next(names), rows, "dataset"), hub.add(next(names), model)
    study = tmp_path / "study.py"
    study.write_text(f"""
from biphase import *
from biphase.specs import Classify, Splits, Task
kinds = Task("kinds", Classify("{{text}}", ("a", "b")), "hf://{data.name}@{data.branches["main"]}/data",
             Splits(validation="validation*"), steps=2, batch=8)
run = Pretrain("run", start=Hub("{words.name}"))
study = Study("s", (run,), Finetune(kinds, lrs=(1e-3,), seeds=(0,), protocol="standard", precision="fp32"))
""")
    with hub.failing(
        Fault("HEAD /datasets/.*train", 429, {"RateLimit": '"resolvers";r=0;t=0'}, times=1)
    ) as asked:
        code, _, err = client("run", study, "--store", tmp_path / "store", "--quiet")
    assert code == 0, err
    assert not [one for one in asked if "main" in one], "only the pinned commits are read"
    text = write_lines(tmp_path / "text.jsonl", ({"text": text} for text in sentences(50)))
    words.tags["v1"] = words.branches["main"]  # a tag stays
    code, _, err = client("tokenize", text, "--tokenizer", f"{words.name}@v1", "--store", tmp_path / "store")
    assert code == 0, err


PIN = """
from biphase.errors import BiphaseError
from biphase.store import Store
from biphase.study.load import commit_of
for source in given[1:]:
    try:
        print(source, commit_of(source, Store(given[0])))
    except BiphaseError as refusal:
        print("refused:", refusal)
"""


def test_what_the_hub_shows_is_pinned_and_without_a_network_what_was_fetched(hub, client, tmp_path):
    one, other, unknown = (next(names) for _ in range(3))
    now = hub.add(one, {"config.json": "{}"}).branches["main"]
    for name in (one, other, unknown):
        refs = client.cache / f"models--{name.replace('/', '--')}" / "refs"
        refs.mkdir(parents=True)
        if name != unknown:
            (refs / "main").write_text(GONE)
    _, out, _ = client("-c", PIN, tmp_path, one, other)
    first, second = out.splitlines()
    assert first == f"{one} {now}", "not the older copy"
    assert second.startswith("refused: ")  # the hub says that there is none
    assert other in second
    _, out, _ = client("-c", PIN, tmp_path, other, unknown, HTTP_PROXY="http://127.0.0.1:9", NO_PROXY="")
    known, unknown_one = out.splitlines()
    assert known == f"{other} {GONE}"
    assert unknown_one.startswith(f"refused: which commit of {unknown} ")
    assert f"{unknown}@<commit>" in unknown_one
    assert json.loads((tmp_path / "pins.json").read_text()) == {one: now, other: GONE}


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("case", "environment", "facts"),
    [
        ("gated", {}, ("gated", "/me/one-", "hf auth login")),
        ("gated", {"HF_TOKEN": "hf_owner"}, ("gated", "conditions")),
        ("", {"HF_TOKEN": "hf_wrong"}, ("token", "HF_TOKEN")),
        ("absent", {}, ("not exist", "private", "hf auth login")),
        ("revision", {}, ("revision", "/commits/main")),
        ("branch", {}, ("'dev' is a branch", "commit")),
        ("limit", {}, ("too many requests", "900 s")),
    ],
)
@pytest.mark.parametrize("what", ["corpus", "model"])
def test_a_refusal_is_one_line_that_says_what_to_type(what, case, environment, facts, hub, client, corpus_files, model, tmp_path):  # fmt: skip
    name, kind = next(names), "dataset" if what == "corpus" else "model"
    repository = hub.add(name, corpus_files if what == "corpus" else model, kind, gated=case == "gated")
    repository.branches["dev"] = repository.branches["main"]
    revision = {"revision": GONE, "branch": "dev"}.get(case, repository.branches["main"])
    if case == "absent":
        hub.repositories.clear()
    faults = [Fault("/api/models|/api/datasets", 429, {"Retry-After": "900"})] if case == "limit" else []
    if what == "model" and case == "limit":
        revision = ""
    with hub.failing(*faults) as asked:
        if what == "corpus":
            source = f"hf://{name}@{revision}/data/*"
            answer = client("tokenize", source, "--tokenizer", "bpe:320", "--store", tmp_path, **environment)
        else:
            task = write_task(tmp_path / "task")
            source = f"{name}@{revision}" if revision else name
            answer = evaluated(client, tmp_path / "store", source, task, **environment)
    line = refusal(answer)
    assert all(fact in line for fact in facts), line
    assert "hf_wrong" not in line
    assert len(asked) <= 12, "an answer that will not change is not asked for again and again"
    if case == "branch":
        assert repository.branches["dev"] in line


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json", "model.safetensors"])
def test_a_model_is_not_loaded_without_a_file_that_the_hub_failed_to_send(file, hub, client, model, tmp_path):
    task, name = write_task(tmp_path / "task"), next(names)
    hub.add(name, model)
    with hub.failing(Fault(f"HEAD .*/{file}", 403)):
        assert name in refusal(evaluated(client, tmp_path / "store", name, task))
    assert not [*(tmp_path / "store" / "trials").glob("*")]
    code, _, err = evaluated(client, tmp_path / "store", name, task)
    assert code == 0, err


def test_a_repository_without_a_tokenizer_is_refused(hub, client, tmp_path):
    bare = hub.add(next(names), {"config.json": "{}"})
    text = write_lines(tmp_path / "text.jsonl", [{"text": "a cat"}])
    source = f"{bare.name}@{bare.branches['main']}"
    line = refusal(client("tokenize", text, "--tokenizer", source, "--store", tmp_path / "store"))
    assert all(fact in line for fact in (source, "no tokenizer.json", "./folder"))


# ---------------------------------------------------------------- faults at every kind of place


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("what", "place", "fault", "expected"),
    [
        ("corpus", "/api/(models|datasets)/[^?]*/tree", {"status": 503, "times": 2}, 0),
        ("model", "GET .*resolve.*(json|zst)", {"status": 504, "seconds": 5}, 2),
        ("corpus", "GET /lfs", {"after": 0}, 2),
        ("model", "GET /lfs", {"after": 5, "times": 2}, 0),
    ],
)
def test_each_fault_is_overcome_or_refused_and_the_same_command_goes_on(what, place, fault, expected, hub, client, corpus_files, model, tmp_path):  # fmt: skip
    name = next(names)
    if what == "corpus":
        oid = hub.add(name, corpus_files, "dataset").branches["main"]
        source = f"hf://{name}@{oid}/data/*"
        words = "tokenize", source, "--tokenizer", "bpe:320", "--store", tmp_path / "store"
    else:
        hub.add(name, model)
        grid = ("--lrs", "1e-3", "--seeds", "0", "--steps", "2", "--quiet", "--store", tmp_path / "store")
        words = "evaluate", name, "--tasks", write_task(tmp_path / "task"), *grid
    with hub.failing(Fault(place, **fault)) as asked:
        answer = client(*words)
    assert len(asked) < 200
    if expected:
        refusal(answer)
        assert not [*(tmp_path / "store").glob("shards/*"), *(tmp_path / "store").glob("trials/*")]
    else:
        assert answer[0] == 0, answer[2]
    code, _, err = client(*words)
    assert code == 0, err
