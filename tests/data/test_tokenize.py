"""Corpus → shards: the same bytes however it is computed, and nothing lost without being counted.

A test stops or disturbs a tokenization through its `report` function, which is called after every block here.
"""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from biphase.data import documents as documents_module
from biphase.data import tokenize as tokenize_module
from biphase.data.corpus import shards_key, write_link
from biphase.data.documents import text_hash
from biphase.data.shards import Shards
from biphase.data.tokenize import TakenOver, tokenize
from biphase.data.tokenizer import load_saved
from biphase.errors import DataError
from biphase.specs import BPE, Corpus, Pretrained
from biphase.store import Store

RNG = np.random.default_rng(0)
WORDS = ["".join(chr(97 + letter) for letter in RNG.integers(0, 26, RNG.integers(2, 9))) for _ in range(500)]
TEXTS = [" ".join(RNG.choice(WORDS, RNG.integers(5, 60))) + f" {number}." for number in range(3000)]
HELD = [text for text in TEXTS if text_hash(text.encode()) % 1000 == 0]


def write(path: Path, texts=TEXTS) -> Path:
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(pyarrow.Codec("zstd").compress(data, asbytes=True))
    return path


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        write(folder / f"{number}.jsonl.zst", TEXTS[number * 1000 : number * 1000 + 1000])
    return Corpus("mine", str(folder), BPE(400))


@pytest.fixture
def whole(corpus, tmp_path, small_blocks):
    """The content of the corpus's shards, tokenized without interruption."""
    return content(shards_of(corpus, tmp_path / "whole", shard_tokens=10_000))


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks, with a report after each."""
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(tokenize_module, "REPORT_SECONDS", 0.0)


def shards_of(corpus, root, messages=None, report=None, **options):
    report = report or ([] if messages is None else messages).append
    return Shards.open(tokenize(corpus, Store(root), report=report, **options), verify=True)


def content(shards):
    return {
        path.relative_to(shards.folder): path.read_bytes()
        for path in shards.folder.rglob("*")
        if path.is_file()
    }


def text_of(shards, tokens):
    ids = tokens.span(0, len(tokens)).astype(int)
    model = load_saved(shards.tokenizer).model
    ends = np.flatnonzero(ids == shards.eos_id)
    assert ends[-1] == len(ids) - 1
    return [model.decode(part[:-1].tolist()) for part in np.split(ids, ends[:-1] + 1)]


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def at_report(number, action, *, of=""):
    """Return a report function that calls `action` at its `number`-th message that contains `of`."""
    messages = []

    def report(text):
        if of in text:
            messages.append(text)
            if len(messages) == number:
                action()

    return report


def kill():
    raise Killed


TRAINING_TEXT_WRITTEN = {"number": 1, "of": "MB of text"}


def test_every_document_is_in_one_split_in_order_and_ends_with_the_end_token(corpus, tmp_path):
    messages = []
    shards = shards_of(corpus, tmp_path / "store", messages)
    assert HELD
    assert text_of(shards, shards.train) == [text for text in TEXTS if text not in HELD]
    assert text_of(shards, shards.heldout) == HELD
    card = shards.card
    counts = (card["train_documents"], card["heldout_documents"], card["records"])
    assert counts == (3000 - len(HELD), len(HELD), 3000)
    assert card["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert (card["mask_token"], card["mask_rule"], card["skipped"]) == ("<|mask|>", "own", {})
    assert 4 < card["unigram_entropy"] < np.log(400)
    assert card["made_from"]["encoder"] == "tiktoken"
    assert any("MB/s" in line for line in messages)


def test_published_shards_are_found_again_without_their_text_and_leave_no_attempts(corpus, tmp_path):
    store = Store(tmp_path / "store")
    for name in ("", "-0000", "-ffff"):  # several workers died at it
        (store.attempts / f"shards-{shards_key(corpus, store)}{name}").mkdir(parents=True)
    first = shards_of(corpus, tmp_path / "store")
    assert first.folder.name == shards_key(corpus, store)
    (tmp_path / "corpus" / "0.jsonl.zst").touch()
    messages = []
    assert shards_of(corpus, tmp_path / "store", messages).folder == first.folder
    assert messages == []
    (tmp_path / "corpus").rename(tmp_path / "away")
    assert shards_of(corpus, tmp_path / "store").folder == first.folder
    with pytest.raises(DataError, match="not there"):
        shards_of(replace(corpus, tokens=10), tmp_path / "store")
    assert not list(store.attempts.iterdir())


def test_any_number_of_processes_gives_the_same_bytes(corpus, tmp_path, small_blocks):
    contents = [
        content(shards_of(corpus, tmp_path / f"{n}", processes=n, shard_tokens=10_000)) for n in (1, 2, 3)
    ]
    assert contents[0] == contents[1] == contents[2]
    assert len([path for path in contents[0] if path.suffix == ".bin"]) > 4


# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("moment", [1, 9, 32])
def test_an_interrupted_attempt_is_resumed_and_ends_in_the_same_bytes(corpus, tmp_path, whole, moment):
    with pytest.raises(Killed):
        shards_of(
            corpus, tmp_path / "store", report=at_report(moment, kill), shard_tokens=10_000, processes=1
        )
    (left,) = (tmp_path / "store" / "attempts").iterdir()
    assert left.name.startswith(f"shards-{shards_key(corpus, Store(tmp_path / 'store'))}-")
    messages = []
    assert content(shards_of(corpus, tmp_path / "store", messages, shard_tokens=10_000)) == whole
    assert any("going on" in line for line in messages) == (moment > 1)
    assert not list((tmp_path / "store" / "attempts").iterdir())


KILL_ME = """
import sys
from biphase.data import documents, tokenize
from biphase.store import Store
from biphase.specs import BPE, Corpus
if __name__ == "__main__":
    documents.BLOCK_BYTES = 20_000
    mine = Corpus("mine", sys.argv[1], BPE(400))
    tokenize.tokenize(mine, Store(sys.argv[2]), report=print, processes=2, shard_tokens=10_000)
"""


def test_a_sigkill_loses_nothing_and_leaves_no_helpers(corpus, tmp_path, whole):
    script = tmp_path / "kill_me.py"
    script.write_text(KILL_ME)
    command = [sys.executable, str(script), corpus.source, str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None and not list(tmp_path.glob("store/attempts/*/journal.json")):
            time.sleep(0.005)
        helpers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    assert helpers
    assert process.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("store/shards/*/manifest.json"))
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{helper}/exe").exists() for helper in helpers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [helper for helper in helpers if Path(f"/proc/{helper}/exe").exists()]
    messages = []
    assert content(shards_of(corpus, tmp_path / "store", messages, shard_tokens=10_000)) == whole
    assert any("going on" in line for line in messages)


@pytest.mark.parametrize("changed", ["shard size", "content"])
def test_unfinished_shards_that_changed_are_not_built_upon(corpus, tmp_path, whole, changed):
    size = 50_000 if changed == "shard size" else 10_000
    with pytest.raises(Killed):
        shards_of(corpus, tmp_path / "store", report=at_report(30, kill), shard_tokens=size)
    if changed == "content":
        damaged = next((tmp_path / "store").glob("attempts/*/build/train-00000.bin"))
        damaged.write_bytes(b"?" * damaged.stat().st_size)
    messages = []
    assert content(shards_of(corpus, tmp_path / "store", messages, shard_tokens=10_000)) == whole
    assert any("starting again" in line for line in messages)


# ---------------------------------------------------------------- takeover


@pytest.mark.parametrize("moment", [0, 5, "last"])
def test_a_worker_whose_lease_is_lost_stops_and_publishes_nothing(corpus, tmp_path, small_blocks, moment):
    small = Corpus("mine", str(write(tmp_path / "a.jsonl.zst", TEXTS[:20])), BPE(300))
    calls, reported = [], []

    def lost():
        calls.append(1)
        return bool(reported) if moment == "last" else len(calls) > moment

    # The report that no document is held out is the last one.
    report = at_report(1, lambda: reported.append(1), of="--heldout")
    with pytest.raises(TakenOver, match="mine"):
        shards_of(
            small if moment == "last" else corpus, tmp_path / "store", report=report, processes=1, lost=lost
        )
    assert not list((tmp_path / "store").glob("shards/*"))
    assert bool(reported) == (moment == "last")


@pytest.mark.parametrize(("moment", "knows"), [(9, True), (20, False)])
def test_a_stalled_worker_spoils_nothing_of_the_worker_that_took_over(corpus, tmp_path, whole, moment, knows):
    """It stalls after a block, another worker continues from there, and then it comes back to life."""
    taken = []

    def take_over():
        parts = [
            sorted(tmp_path.glob(f"store/attempts/*/build/{part}-*.bin")) for part in ("train", "heldout")
        ]
        handles = [paths[-1].open("ab") for paths in parts]
        with pytest.raises(Killed):
            shards_of(corpus, tmp_path / "store", report=at_report(action=kill, **TRAINING_TEXT_WRITTEN),
                      shard_tokens=10_000, processes=1)  # fmt: skip
        taken.append(1)
        for handle in handles:  # the files that the stalled worker has open
            handle.write(b"?" * 1000)
            handle.close()

    with pytest.raises(TakenOver):
        shards_of(corpus, tmp_path / "store", report=at_report(moment, take_over), shard_tokens=10_000,
                  processes=1, lost=lambda: knows and bool(taken))  # fmt: skip
    assert taken
    messages = []
    assert content(shards_of(corpus, tmp_path / "store", messages, shard_tokens=10_000)) == whole
    assert any("going on" in line for line in messages), messages
    assert not any("starting again" in line for line in messages)


def test_a_stalled_worker_returns_the_result_of_the_worker_that_took_over(corpus, tmp_path, small_blocks):
    results = []

    def take_over():
        results.append(shards_of(corpus, tmp_path / "store", processes=1))

    late = shards_of(corpus, tmp_path / "store", report=at_report(5, take_over), processes=1)
    assert late.folder == results[0].folder


# ---------------------------------------------------------------- splits


def test_a_limit_ends_the_corpus_with_the_document_that_reaches_it(corpus, tmp_path, small_blocks):
    limited = replace(corpus, tokens=30_000)
    shards = shards_of(limited, tmp_path / "store")
    texts = text_of(shards, shards.train)
    assert texts == [text for text in TEXTS if text not in HELD][: len(texts)]
    last = np.flatnonzero(shards.train.span(0, len(shards.train)) == shards.eos_id)[-2] + 1
    assert last < 30_000 <= len(shards.train)
    with pytest.raises(Killed):  # a kill after the limit was reached adds nothing
        shards_of(limited, tmp_path / "other", report=at_report(1, kill, of="--heldout"), shard_tokens=5_000)
    again = shards_of(limited, tmp_path / "other", shard_tokens=5_000)
    assert text_of(again, again.train) == texts


def test_named_heldout_files_are_the_only_heldout_text_up_to_the_cap(corpus, tmp_path, monkeypatch):
    named = replace(corpus, heldout="corpus/2.jsonl.zst")
    whole = shards_of(named, tmp_path / "whole")
    assert text_of(whole, whole.train) == TEXTS[:2000]
    assert text_of(whole, whole.heldout) == TEXTS[2000:]
    monkeypatch.setattr(tokenize_module, "HELDOUT_TOKENS", 1234)
    messages = []
    shards = shards_of(named, tmp_path / "store", messages)
    assert len(shards.heldout) == 1234
    np.testing.assert_array_equal(shards.heldout.span(0, 1234), whole.heldout.span(0, 1234))
    card = shards.card
    assert card["left_out_tokens"] == len(whole.heldout) - 1234
    assert card["heldout_documents"] + card["left_out_documents"] == 1000
    assert any("left out" in line for line in messages)


def test_documents_begin_with_the_begin_token_if_asked(corpus, tmp_path):
    plain = shards_of(corpus, tmp_path / "store")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((plain.tokenizer / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|pad|>"}')
    shards = shards_of(replace(corpus, tokenizer=Pretrained(str(folder)), bos=True), tmp_path / "store")
    ids = shards.train.span(0, len(shards.train))
    ends = np.flatnonzero(ids == shards.eos_id)
    assert ids[0] == 2
    assert (ids[ends[:-1] + 1] == 2).all()
    assert len(shards.train) == len(plain.train) + shards.card["train_documents"]


# ---------------------------------------------------------------- refusals and sources


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    ("name", "text", "facts"),
    [
        (
            "a.jsonl",
            '{"text": "good words"}\n{"body": "misnamed"}\n' * 20,
            ["20 of", "no field 'text'", "a.jsonl:2"],
        ),
        ("a.txt", "", ["1 × empty text, first a.txt"]),
    ],
)
def test_bad_or_absent_documents_are_refused_and_leave_nothing(tmp_path, corpus, trained, name, text, facts):
    kind = BPE(300) if trained else Pretrained(str(shards_of(corpus, tmp_path / "good").tokenizer))
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        shards_of(Corpus("bad", str(tmp_path / name), kind), tmp_path / "store")
    assert all(fact in str(caught.value) for fact in facts)
    assert not list((tmp_path / "store" / "attempts").iterdir())


@pytest.mark.parametrize("moment", [1, 30])
def test_a_corpus_that_changes_while_it_is_read_is_never_published_under_the_old_key(
    corpus, tmp_path, small_blocks, moment
):
    store = Store(tmp_path / "store")
    before = shards_key(corpus, store)
    other = write(tmp_path / "other.jsonl.zst", TEXTS[:500])
    change = at_report(moment, lambda: other.rename(tmp_path / "corpus" / "0.jsonl.zst"))
    with pytest.raises(DataError, match="corpus changed"):
        shards_of(corpus, tmp_path / "store", report=change, processes=1)
    assert not store.has(store.shards / before)
    again = shards_of(corpus, tmp_path / "store")
    assert again.folder.name == shards_key(corpus, store) != before
    assert again.card["records"] == 2500


def test_a_tokenizer_that_changes_meanwhile_is_refused(corpus, tmp_path):
    folder = shards_of(corpus, tmp_path / "good").tokenizer
    change = at_report(1, lambda: (folder / "special_tokens_map.json").write_text("{}"), of="MB of text")
    with pytest.raises(DataError, match="tokenizer changed"):
        shards_of(replace(corpus, tokenizer=Pretrained(str(folder))), tmp_path / "store", report=change)


def test_a_hub_corpus_is_read_from_a_folder_which_the_store_records(tmp_path):
    copy = tmp_path / "copy" / "sample" / "10BT"
    copy.mkdir(parents=True)
    for number in range(2):
        table = pyarrow.table({"text": TEXTS[number * 100 : number * 100 + 100], "id": range(100)})
        parquet.write_table(table, copy / f"{number}.parquet", row_group_size=30)
    hub = Corpus("fineweb", "hf://owner/name@abc/sample/10BT/*.parquet", BPE(300))
    messages = []
    write_link(hub, Store(tmp_path / "store"), tmp_path / "copy")
    shards = shards_of(hub, tmp_path / "store", messages)
    assert text_of(shards, shards.train) == [text for text in TEXTS[:200] if text not in HELD]
    assert str(tmp_path / "copy") in messages[0]
    assert "hf://owner/name@abc" in messages[0]
    assert shards_of(hub, tmp_path / "store").folder == shards.folder
    with pytest.raises(DataError, match="--from"):
        write_link(Corpus("mine", str(copy), BPE(300)), Store(tmp_path / "store"), tmp_path)
    with pytest.raises(DataError, match="absent is not"):
        write_link(hub, Store(tmp_path / "store"), tmp_path / "absent")
