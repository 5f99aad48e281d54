"""Corpus → shards: the same bytes however it is computed, and nothing lost without being counted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from biphase import progress
from biphase.data import corpus as corpus_module
from biphase.data import documents
from biphase.data import tokenize as tokenize_module
from biphase.data import tokenize as tokenizing
from biphase.data.corpus import resolve, shards_key
from biphase.data.documents import text_hash
from biphase.data.encode import BlockEncoder, Helpers
from biphase.data.shards import Shards
from biphase.data.tokenize import TakenOver, tokenize
from biphase.data.tokenizer import load_saved
from biphase.errors import DataError
from biphase.presets import CORPORA
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
def small_blocks(monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 20_000)


def made(corpus, root, said=None, **options):
    report = [].append if said is None else said.append
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


def test_every_document_is_in_one_part_in_order_and_ends_with_the_end_token(corpus, tmp_path):
    said = []
    shards = made(corpus, tmp_path / "store", said)
    assert HELD
    assert text_of(shards, shards.train) == [text for text in TEXTS if text not in HELD]
    assert text_of(shards, shards.heldout) == HELD
    card = shards.card
    assert (card["train_documents"], card["heldout_documents"], card["records"]) == (
        3000 - len(HELD),
        len(HELD),
        3000,
    )
    assert card["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert (card["mask_token"], card["mask_rule"], card["skipped"]) == ("<|mask|>", "own", {})
    assert 4 < card["unigram_entropy"] < np.log(400)
    assert card["made_from"]["encoder"] == "tiktoken"
    assert any("MB/s" in line for line in said)


def test_a_second_time_nothing_is_done(corpus, tmp_path):
    first = made(corpus, tmp_path / "store")
    (tmp_path / "corpus" / "0.jsonl.zst").touch()
    said = []
    assert made(corpus, tmp_path / "store", said).folder == first.folder
    assert said == []
    assert first.folder.name == shards_key(corpus, Store(tmp_path / "store"))


def test_any_number_of_processes_gives_the_same_bytes(corpus, tmp_path, small_blocks):
    found = [content(made(corpus, tmp_path / f"{n}", processes=n, shard_tokens=10_000)) for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    assert len([path for path in found[0] if path.suffix == ".bin"]) > 4


class Killed(BaseException):
    """Stands for a kill at a report: nothing catches it."""


@pytest.mark.parametrize("moment", [1, 3, 6])
def test_an_interrupted_attempt_goes_on_and_ends_in_the_same_bytes(
    corpus, tmp_path, small_blocks, monkeypatch, moment
):
    whole = content(made(corpus, tmp_path / "whole", shard_tokens=10_000))
    saves = 0
    publish_json = tokenize_module.Parts.state

    def state(self):
        nonlocal saves
        saves += 1
        if saves == moment:
            raise Killed
        return publish_json(self)

    monkeypatch.setattr(tokenize_module.Parts, "state", state)
    with pytest.raises(Killed):
        made(corpus, tmp_path / "store", shard_tokens=10_000, processes=1)
    monkeypatch.undo()
    said = []
    again = made(corpus, tmp_path / "store", said, shard_tokens=10_000)
    assert content(again) == whole
    assert any("going on after" in line for line in said) == (moment > 1)
    assert not list((tmp_path / "store" / "attempts").iterdir())


KILL_ME = """
import sys
from biphase.data import documents
from biphase.data.tokenize import tokenize
from biphase.store import Store
from biphase.specs import BPE; from biphase.specs import Corpus
if __name__ == "__main__":
    documents.BLOCK_BYTES = 20_000
    tokenize(Corpus("mine", sys.argv[1], BPE(400)), Store(sys.argv[2]), report=print, processes=2, shard_tokens=10_000)
"""


def helpers_of(process):
    children = Path(f"/proc/{process}/task/{process}/children")
    return [int(one) for one in children.read_text().split()] if children.exists() else []


def test_a_sigkill_loses_nothing_and_leaves_no_helpers(corpus, tmp_path, small_blocks):
    whole = content(made(corpus, tmp_path / "whole", shard_tokens=10_000))
    script = tmp_path / "kill_me.py"
    script.write_text(KILL_ME)
    command = [sys.executable, str(script), corpus.source, str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        journals = tmp_path / "store" / "attempts"
        while process.poll() is None and not list(journals.glob("*/journal.json")):
            time.sleep(0.005)
        helpers = helpers_of(process.pid)
        process.send_signal(signal.SIGKILL)
    assert helpers
    assert process.returncode == -signal.SIGKILL
    assert not list((tmp_path / "store").glob("shards/*/manifest.json"))
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{helper}/exe").exists() for helper in helpers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [helper for helper in helpers if Path(f"/proc/{helper}/exe").exists()]
    said = []
    assert content(made(corpus, tmp_path / "store", said, shard_tokens=10_000)) == whole
    assert any("going on after" in line for line in said)


def test_a_helper_that_is_killed_is_an_error_that_says_what_to_type(corpus, tmp_path, small_blocks):
    shards = made(corpus, tmp_path / "store")
    how = BlockEncoder(shards.tokenizer, "text", (), shards.eos_id, "<u2")
    blocks = documents.blocks(corpus, corpus_module.local(resolve(corpus).train))
    with Helpers(how, 2) as helpers:
        helpers.pool.submit(os._exit, 1)
        with pytest.raises(DataError, match="fewer --processes"):
            list(helpers.encode(blocks, tiktoken=True))


def test_helpers_are_all_started_at_once(corpus, tmp_path):
    shards = made(corpus, tmp_path / "store")
    with Helpers(BlockEncoder(shards.tokenizer, "text", (), shards.eos_id, "<u2"), 3) as helpers:
        assert len(helpers.pool._processes) == 3


def test_a_helper_that_cannot_begin_says_why(corpus, tmp_path):
    how = BlockEncoder(tmp_path / "nowhere", "text", (), 0, "<u2")
    blocks = documents.blocks(corpus, corpus_module.local(resolve(corpus).train))
    with (
        Helpers(how, 2) as helpers,
        pytest.raises(DataError, match=r"could not begin \(.*nowhere.*\); type the command again"),
    ):
        list(helpers.encode(blocks, tiktoken=True))


def test_another_size_of_shards_starts_again(corpus, tmp_path, small_blocks, monkeypatch):
    monkeypatch.setattr("biphase.data.tokenize._Work._finish", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(corpus, tmp_path / "store", shard_tokens=10_000)
    monkeypatch.undo()
    again = content(made(corpus, tmp_path / "store", shard_tokens=50_000))
    assert again == content(made(corpus, tmp_path / "whole", shard_tokens=50_000))


@pytest.mark.parametrize("minute", [0.0, 60.0])
def test_progress_tells_speed_and_time_left_once_a_minute(
    corpus, tmp_path, small_blocks, monkeypatch, minute
):
    monkeypatch.setattr(tokenize_module, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "MINUTE", minute)
    said = []
    made(
        Corpus("mine", corpus.source, corpus.tokenizer, tokens=100_000), tmp_path / "store", said, processes=1
    )
    line = re.compile(r"mine: [\d.]+ MB of text, [\d,]+ tokens, [\d.]+ MB/s, \d+ s left")
    told = sum(bool(line.fullmatch(one)) for one in said)
    assert told == 0 if minute else told > 3
    assert said.count("") > 3 or not minute, "whoever is told may end the work meanwhile"
    assert said[-1].endswith(" MB/s") or "held" in said[-1]


def test_unfinished_shards_that_changed_are_not_built_upon(corpus, tmp_path, small_blocks, monkeypatch):
    whole = content(made(corpus, tmp_path / "whole", shard_tokens=10_000))
    monkeypatch.setattr("biphase.data.tokenize._Work._finish", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(corpus, tmp_path / "store", shard_tokens=10_000)
    monkeypatch.undo()
    damaged = next((tmp_path / "store").glob("attempts/*/build/train-00000.bin"))
    damaged.write_bytes(b"?" * damaged.stat().st_size)
    said = []
    assert content(made(corpus, tmp_path / "store", said, shard_tokens=10_000)) == whole
    assert any("starting again" in line for line in said)


def test_a_limit_ends_the_corpus_with_the_document_that_reaches_it(
    corpus, tmp_path, small_blocks, monkeypatch
):
    limited = Corpus("mine", corpus.source, corpus.tokenizer, tokens=30_000)
    shards = made(limited, tmp_path / "store")
    texts = text_of(shards, shards.train)
    assert texts == [text for text in TEXTS if text not in HELD][: len(texts)]
    last = np.flatnonzero(shards.train.span(0, len(shards.train)) == shards.eos_id)[-2] + 1
    assert last < 30_000 <= len(shards.train)
    # a kill after the limit was reached adds nothing
    monkeypatch.setattr("biphase.data.tokenize._Work._finish", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made(limited, tmp_path / "other", shard_tokens=5_000)
    monkeypatch.undo()
    again = made(limited, tmp_path / "other", shard_tokens=5_000)
    assert text_of(again, again.train) == texts


def test_named_held_out_files_are_the_only_held_out_text(corpus, tmp_path):
    named = Corpus("mine", corpus.source, corpus.tokenizer, heldout="corpus/2.jsonl.zst")
    shards = made(named, tmp_path / "store")
    assert text_of(shards, shards.train) == TEXTS[:2000]
    assert text_of(shards, shards.heldout) == TEXTS[2000:]


def test_held_out_text_beyond_the_cap_is_in_neither_part_and_counted(corpus, tmp_path, monkeypatch):
    named = Corpus("mine", corpus.source, corpus.tokenizer, heldout="corpus/2.jsonl.zst")
    whole = made(named, tmp_path / "whole")
    monkeypatch.setattr(tokenize_module, "HELDOUT_TOKENS", 1234)
    said = []
    shards = made(named, tmp_path / "store", said)
    assert len(shards.heldout) == 1234
    np.testing.assert_array_equal(shards.heldout.span(0, 1234), whole.heldout.span(0, 1234))
    card = shards.card
    assert card["left_out_tokens"] == len(whole.heldout) - 1234
    assert card["heldout_documents"] + card["left_out_documents"] == 1000
    assert any("left out" in line for line in said)


def test_a_corpus_without_held_out_documents_says_so(tmp_path):
    said = []
    shards = made(
        Corpus("mine", str(write(tmp_path / "a.jsonl.zst", TEXTS[:20])), BPE(300)), tmp_path / "store", said
    )
    assert len(shards.heldout) == 0
    assert any("no document is held out" in line and "--heldout FILE" in line for line in said)


def test_skipped_records_are_in_the_card_and_reported(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good words"}\n{"text": ""}\nnot json\n' * 3)
    said = []
    shards = made(Corpus("mine", str(path), BPE(300)), tmp_path / "store", said)
    assert shards.card["skipped"] == {"empty text": 3, "malformed JSON": 3}
    assert shards.card["first_skipped"] == {"empty text": "a.jsonl:2", "malformed JSON": "a.jsonl:3"}
    assert any("skipped 3 × empty text, first a.jsonl:2" in line for line in said)


@pytest.mark.parametrize("tokenizer", ["bpe", "pretrained"])
def test_a_corpus_of_mostly_bad_records_is_refused_and_leaves_nothing(tmp_path, tokenizer, corpus):
    good = made(corpus, tmp_path / "good")
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good words"}\n{"body": "misnamed"}\n' * 20)
    kind = BPE(300) if tokenizer == "bpe" else Pretrained(str(good.tokenizer))
    with pytest.raises(
        DataError, match=r"20 of the first 40 records are bad \(20 × no field 'text', first a.jsonl:2"
    ):
        made(Corpus("bad", str(path), kind), tmp_path / "store")
    assert not list((tmp_path / "store" / "attempts").iterdir())


def test_a_corpus_without_documents_is_refused(tmp_path, corpus):
    good = made(corpus, tmp_path / "good")
    (tmp_path / "a.txt").touch()
    for kind in (BPE(300), Pretrained(str(good.tokenizer))):
        with pytest.raises(DataError, match=r"no documents to train on \(1 × empty text, first a.txt\)"):
            made(Corpus("bad", str(tmp_path / "a.txt"), kind), tmp_path / "store")


def test_a_corpus_that_changes_while_it_is_read_is_refused(corpus, tmp_path, monkeypatch):
    original = tokenize_module.Parts.close

    def close(self):
        write(tmp_path / "corpus" / "0.jsonl.zst", ["other text"])
        original(self)

    monkeypatch.setattr(tokenize_module.Parts, "close", close)
    with pytest.raises(DataError, match="changed while it was read; type the command again"):
        made(corpus, tmp_path / "store")


def test_a_corpus_that_changes_before_it_is_read_is_never_published_under_the_old_key(
    corpus, tmp_path, monkeypatch
):
    store = Store(tmp_path / "store")
    before = shards_key(corpus, store)
    original = tokenize_module.Parts.begin

    def begin(self):
        write(tmp_path / "corpus" / "0.jsonl.zst", TEXTS[:500])
        original(self)

    monkeypatch.setattr(tokenize_module.Parts, "begin", begin)
    with pytest.raises(DataError, match="changed while it was read; type the command again"):
        made(corpus, tmp_path / "store")
    monkeypatch.undo()
    assert not store.has(store.shards / before)
    again = made(corpus, tmp_path / "store")
    assert again.folder.name == shards_key(corpus, store) != before
    assert again.card["records"] == 2500


def test_the_key_is_that_of_the_hashes_in_the_card_even_if_files_change_between_two_looks(
    corpus, tmp_path, monkeypatch
):
    real, hashed = corpus_module.sha256, []

    def slow(path):
        digest = real(path)
        hashed.append(path)
        if len(hashed) == 3:  # the last file has been hashed: now the first one changes
            write(tmp_path / "corpus" / "0.jsonl.zst", TEXTS[:500])
        return digest

    monkeypatch.setattr(corpus_module, "sha256", slow)
    found = made(corpus, tmp_path / "store")
    assert found.folder.name == shards_key(corpus, Store(tmp_path / "store"))
    assert found.card["records"] == 2500, "the text that was hashed last is the one that was read"


def test_a_tokenizer_that_changes_meanwhile_is_refused(corpus, tmp_path, monkeypatch):
    folder = made(corpus, tmp_path / "good").tokenizer
    original = tokenize_module.Parts.close

    def close(self):
        (folder / "special_tokens_map.json").write_text("{}")
        original(self)

    monkeypatch.setattr(tokenize_module.Parts, "close", close)
    with pytest.raises(DataError, match="its tokenizer changed while it was read"):
        made(Corpus("mine", corpus.source, Pretrained(str(folder))), tmp_path / "store")


def test_a_worker_whose_lease_is_lost_ends_and_publishes_nothing(corpus, tmp_path, small_blocks):
    asked = []

    def lost():
        asked.append(1)
        return len(asked) > 5

    with pytest.raises(DataError, match=r"another worker took this corpus over.*type the command again"):
        made(corpus, tmp_path / "store", processes=1, lost=lost)
    assert not list((tmp_path / "store").glob("shards/*"))


def test_a_worker_that_loses_its_lease_at_the_last_moment_publishes_nothing(corpus, tmp_path, monkeypatch):
    gone, finish = [], tokenizing._Work._finish
    monkeypatch.setattr(tokenizing._Work, "_finish", lambda work: (finish(work), gone.append(1)))
    with pytest.raises(DataError, match="another worker took this corpus over"):
        made(corpus, tmp_path / "store", lost=lambda: bool(gone))
    assert not list((tmp_path / "store").glob("shards/*"))


def test_a_worker_that_stalled_before_it_began_leaves_the_attempt_of_the_other(corpus, tmp_path, monkeypatch):
    def interrupted(_):
        raise Killed

    monkeypatch.setattr(tokenizing._Work, "_finish", interrupted)
    with pytest.raises(Killed):
        made(corpus, tmp_path / "store")
    (others,) = (tmp_path / "store" / "attempts").iterdir()
    with pytest.raises(TakenOver):
        made(corpus, tmp_path / "store", lost=lambda: True)
    assert list((tmp_path / "store" / "attempts").iterdir()) == [others]


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("moment", [1, 4, 7])
def test_a_stalled_worker_spoils_nothing_of_who_took_its_corpus_over(
    corpus, tmp_path, small_blocks, monkeypatch, moment, knows
):
    """It stops after a save, another goes on from there to the end, and then it comes back to life."""
    whole = content(made(corpus, tmp_path / "whole", shard_tokens=10_000))
    state, saves, stolen = tokenize_module.Parts.state, [], []

    def stall(self):
        saved = state(self)
        saves.append(1)
        if len(saves) == moment + 1:  # the journal of the save before is on disk
            monkeypatch.undo()
            monkeypatch.setattr(documents, "BLOCK_BYTES", 20_000)
            monkeypatch.setattr(tokenizing._Work, "_finish", interrupted)
            with pytest.raises(Killed):
                made(corpus, tmp_path / "store", shard_tokens=10_000, processes=1)
            monkeypatch.undo()
            stolen.append(1)
            for writer in (self.train, self.heldout):
                writer._file.write(b"?" * 1000)
                writer._file.flush()
        return saved

    def interrupted(_):
        raise Killed

    monkeypatch.setattr(tokenize_module.Parts, "state", stall)
    with pytest.raises(DataError, match="another worker took this corpus over"):
        made(
            corpus, tmp_path / "store", shard_tokens=10_000, processes=1, lost=lambda: knows and bool(stolen)
        )
    assert stolen
    said = []
    assert content(made(corpus, tmp_path / "store", said, shard_tokens=10_000)) == whole
    assert any("going on after" in line for line in said), said
    assert not any("starting again" in line for line in said)


def test_a_stalled_worker_takes_the_result_of_who_took_its_corpus_over(
    corpus, tmp_path, small_blocks, monkeypatch
):
    state, results = tokenize_module.Parts.state, []

    def stall(self):
        monkeypatch.undo()
        results.append(made(corpus, tmp_path / "store", processes=1))
        return state(self)

    monkeypatch.setattr(tokenize_module.Parts, "state", stall)
    late = made(corpus, tmp_path / "store", processes=1)
    assert late.folder == results[0].folder


def test_an_attempt_is_named_by_the_lease_that_guards_it(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("biphase.data.tokenize._Work._finish", lambda _: 1 / 0)
    names = set()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            made(corpus, tmp_path / "store")
        (left,) = (tmp_path / "store" / "attempts").iterdir()
        assert left.name.startswith(f"shards-{shards_key(corpus, Store(tmp_path / 'store'))}-")
        names.add(left.name)
    assert len(names) == 2, "each owner has a name of its own"


def test_a_published_corpus_leaves_no_attempts(corpus, tmp_path):
    store = Store(tmp_path / "store")
    for name in ("", "-0000", "-ffff"):  # several workers died at it
        (store.attempts / f"shards-{shards_key(corpus, store)}{name}").mkdir(parents=True)
    made(corpus, tmp_path / "store")
    assert not list(store.attempts.iterdir())


def test_a_corpus_whose_files_are_absent_leaves_no_attempt(corpus, tmp_path):
    shards = made(corpus, tmp_path / "store")
    (tmp_path / "corpus").rename(tmp_path / "away")
    assert made(corpus, tmp_path / "store").folder == shards.folder, "what is made stays"
    with pytest.raises(DataError, match="is not there"):
        made(Corpus("mine", corpus.source, corpus.tokenizer, tokens=10), tmp_path / "store")
    assert not list((tmp_path / "store" / "attempts").iterdir())


def test_a_store_that_cannot_be_written_is_not_taken_for_a_lost_job(corpus, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "attempts").touch()
    with pytest.raises(OSError, match="attempts"):
        made(corpus, tmp_path / "store")


def test_documents_begin_with_the_begin_token_where_asked(corpus, tmp_path):
    made(corpus, tmp_path / "store")
    plain = made(corpus, tmp_path / "store")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((plain.tokenizer / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|pad|>"}')
    shards = made(Corpus("mine", corpus.source, Pretrained(str(folder)), bos=True), tmp_path / "store")
    ids = shards.train.span(0, len(shards.train))
    ends = np.flatnonzero(ids == shards.eos_id)
    assert ids[0] == 2
    assert (ids[ends[:-1] + 1] == 2).all()
    assert len(shards.train) == len(plain.train) + shards.card["train_documents"]


def test_a_hub_corpus_is_made_from_a_folder_and_the_store_remembers(tmp_path):
    copy = tmp_path / "copy" / "sample" / "10BT"
    copy.mkdir(parents=True)
    for number in range(2):
        table = pyarrow.table({"text": TEXTS[number * 100 : number * 100 + 100], "id": range(100)})
        parquet.write_table(table, copy / f"{number}.parquet", row_group_size=30)
    hub = Corpus("fineweb", "hf://owner/name@abc/sample/10BT/*.parquet", BPE(300))
    said = []
    shards = made(hub, tmp_path / "store", said, from_folder=tmp_path / "copy")
    assert text_of(shards, shards.train) == [text for text in TEXTS[:200] if text not in HELD]
    assert "which stands for hf://owner/name@abc" in said[0]
    assert made(hub, tmp_path / "store").folder == shards.folder
    with pytest.raises(DataError, match="leave out --from"):
        made(Corpus("mine", str(copy), BPE(300)), tmp_path / "store", from_folder=tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        made(hub, tmp_path / "store", from_folder=tmp_path / "absent")


def test_a_plain_tokenizer_without_tiktoken_makes_shards_too(corpus, tmp_path):
    base = made(corpus, tmp_path / "store")
    spec = json.loads((base.tokenizer / "tokenizer.json").read_text())
    spec["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    said = []
    shards = made(
        Corpus("mine", corpus.source, Pretrained(str(tmp_path / "tokenizer.json"))), tmp_path / "store", said
    )
    assert shards.card["made_from"]["encoder"] == "tokenizers"
    np.testing.assert_array_equal(shards.train.span(0, len(base.train)), base.train.span(0, len(base.train)))
    assert any("normalizes" in line for line in said)


def test_the_builtin_corpus_becomes_shards(tmp_path):
    shards = made(CORPORA["builtin"], tmp_path / "store")
    assert shards.vocab == 2048
    assert 1_200_000 < len(shards.train) < 1_800_000
    assert 50_000 < len(shards.heldout) < 100_000
    assert shards.card["skipped"] == {}
    assert os.path.commonpath([shards.folder, tmp_path]) == str(tmp_path)
