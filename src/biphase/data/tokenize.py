"""Tokenizes a corpus into shards: in parallel, resumable after a kill, with the same bytes for any number of processes.

    files ─► blocks (read in order) ─► ids (by helpers) ─► shard files (written in order) ─► published folder
                                                                 │
                                          journal.json: saved after each full shard file

`tokenize` is the entry point. One process reads and writes in the order of the files while helper processes parse and
encode whole blocks, so the result does not depend on timing. After each full shard file, at the end of a block, the
journal records the reading position and what is safely written; a restart keeps that and computes the rest again.

Splits. A document is held out if its text hash is 0 modulo 1,000, or, if the corpus names held-out files, if it comes
from those. Held-out text is cut off at one million tokens, within a document; what lies beyond is in neither split and
is counted. A token limit of the corpus ends the training text with the document that reaches it.

The key comes from hashes taken once at the start. If the corpus or the tokenizer has other hashes at the end, the
result is not published.

Takeover. An attempt is a folder with a random name. A worker that continues another's unfinished attempt renames it
first, so a suspended worker that was taken for dead finds its folder gone when it resumes, and stops. It cannot write
into the new owner's files by path, nor publish them.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from biphase.data import documents
from biphase.data.corpus import (
    File,
    Fingerprints,
    fingerprints,
    link_path,
    local,
    on_hub,
    read_link,
    resolve,
    write_link,
)
from biphase.data.documents import FilePosition, Tally, text_hash
from biphase.data.encode import BlockEncoder, Encoded, Helpers, TextEncoder, confirmed, fastest
from biphase.data.shards import SHARD_TOKENS, Tokens, Writer, dtype_for, entropy
from biphase.data.tokenizer import Tokenizer, load, load_saved, train
from biphase.errors import DataError, StoreError
from biphase.metadata import CARD
from biphase.progress import seconds_between
from biphase.records import encode
from biphase.specs import BPE, Corpus
from biphase.store import Store, publish, read_checked, sha256, with_checksum, write_json
from biphase.text import duration

REPORT_SECONDS = 2.0


class ReadProgress:
    """Reports reading speed and remaining time: every two seconds on a terminal, every minute in a log file.

    `report` is called every two seconds in both cases, with "" if no line is due, because it may raise to stop the
    work.
    """

    def __init__(
        self,
        corpus: Corpus,
        files: list[File],
        report: Callable[[str], None],
        start: FilePosition,
        text: int,  # bytes done before this process started
        tokens: int,  # training tokens done before this process started
    ) -> None:
        self.corpus, self.report = corpus, report
        self.total = sum(file.size for file in files)
        self.skipped = sum(file.size for file in files[: start.file])
        self.text, self.tokens = text, tokens
        self.began = self.shown = self.called = time.monotonic()
        self.every = seconds_between(REPORT_SECONDS)

    def show(self, read: int, text: int, tokens: int, *, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self.called < REPORT_SECONDS:
            return
        self.called = now
        if not last and now - self.shown < self.every:
            self.report("")
            return
        self.shown, seconds = now, max(now - self.began, 1e-9)
        rate = (text - self.text) / seconds / 1e6
        done = (read - self.skipped) / max(self.total - self.skipped, 1)
        if self.corpus.tokens:
            done = max(done, (tokens - self.tokens) / max(self.corpus.tokens - self.tokens, 1))
        left = f", {duration(seconds * (1 - done) / done)} left" if 0 < done < 1 and not last else ""
        self.report(
            f"{self.corpus.name}: {text / 1e6:,.1f} MB of text, {tokens:,} tokens, {rate:.1f} MB/s{left}"
        )


# ---------------------------------------------------------------- attempt


class TakenOver(DataError):
    """Another worker has taken over this corpus. The corpus is fine, and the caller may wait for it."""


class Attempt:
    """The folder of one attempt to tokenize a corpus: `build` becomes the result, the rest is temporary.

    Continues an unfinished attempt at the same key if there is one.
    """

    def __init__(self, corpus: Corpus, store: Store, key: str, lost: Callable[[], bool]) -> None:
        self.corpus, self.lost = corpus, lost
        # The name contains the lease's key, so that other workers can find it.
        self.folder = store.attempts / f"shards-{key}-{uuid.uuid4().hex[:8]}"
        self.build, self.journal = self.folder / "build", self.folder / "journal.json"
        self.begun = False
        for left in _left(store, key):
            if lost():  # suspended before it began: the folder belongs to the worker that took over
                raise self.refusal()
            with contextlib.suppress(FileNotFoundError):  # another worker renamed it first
                left.rename(self.folder)
                break

    def begin(self) -> None:
        self.build.mkdir(parents=True, exist_ok=True)
        self.begun = True

    def seal(self, folder: Path) -> None:
        """Record the hashes of a folder of the result, so that a restart reuses it only if it is unchanged."""
        clear(self._seal(folder))
        write_json(self._seal(folder), with_checksum(_hashes(folder)))

    def is_sealed(self, folder: Path) -> bool:
        try:
            return folder.is_dir() and read_checked(self._seal(folder)) == _hashes(folder)
        except StoreError:
            return False

    def _seal(self, folder: Path) -> Path:
        return self.folder / f"{folder.name}.sealed.json"

    def check_ours(self) -> None:
        """Raise TakenOver if another worker has taken over."""
        if self.taken_over:
            raise self.refusal()

    @property
    def taken_over(self) -> bool:
        return self.begun and (self.lost() or not self.folder.is_dir())

    def refusal(self) -> TakenOver:
        return TakenOver(
            f"corpus {self.corpus.name!r}: another worker took this corpus over, because this one was silent for "
            "long; type the command again: it waits for the other, or goes on where that one ends"
        )

    def discard(self) -> None:
        """Delete the attempt: the next one has another key or must start over."""
        self.begun = False
        shutil.rmtree(self.folder, ignore_errors=True)


def clear(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}


def remove_attempts(store: Store, key: str) -> None:
    """Remove the remains of attempts at a corpus that has been published."""
    for folder in _left(store, key):
        shutil.rmtree(folder, ignore_errors=True)


def _left(store: Store, key: str) -> list[Path]:
    """Return the unfinished attempts at a corpus, those with a journal (which can be resumed) first."""
    found = store.attempts.glob(f"shards-{key}*")
    return sorted(found, key=lambda folder: ((folder / "journal.json").is_file(), folder.name), reverse=True)


# ---------------------------------------------------------------- training and held-out splits


HELDOUT_TOKENS = 1_000_000


@dataclass
class Counts:
    """The numbers of documents in each split, and of those in neither."""

    train_documents: int = 0
    heldout_documents: int = 0
    left_out_documents: int = 0  # held out, but entirely beyond the cap
    left_out_tokens: int = 0
    text_bytes: int = 0


class Parts:
    """Writes the training and the held-out split.

    Call `begin`, or `restore` with an earlier `state` to resume after a kill.
    """

    def __init__(self, corpus: Corpus, folder: Path, dtype: np.dtype, shard_tokens: int) -> None:
        self.corpus, self.shard_tokens = corpus, shard_tokens
        self.counts = Counts()
        self.train = Writer(folder, "train", dtype, shard_tokens)
        self.heldout = Writer(folder, "heldout", dtype, shard_tokens)

    def begin(self) -> None:
        self.train.begin()
        self.heldout.begin()

    def state(self) -> dict[str, Any]:
        """Sync to disk and return what is there."""
        return {
            "shard_tokens": self.shard_tokens,
            "counts": asdict(self.counts),
            "train": self.train.state(),
            "heldout": self.heldout.state(),
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Resume from `state`; return False if the files differ from it."""
        if state["shard_tokens"] != self.shard_tokens:
            return False
        self.counts = Counts(**state["counts"])
        return self.train.restore(state["train"]) and self.heldout.restore(state["heldout"])

    def abandon(self) -> None:
        """Close the open files without finishing, as a kill would."""
        self.train.abandon()
        self.heldout.abandon()

    def close(self) -> None:
        self.train.close()
        self.heldout.close()

    @property
    def enough(self) -> bool:
        """Whether the training text has reached the corpus's token limit."""
        return bool(self.corpus.tokens) and self.train.tokens >= self.corpus.tokens

    def take(self, made: Encoded, *, named_heldout: bool) -> bool:
        """Write the documents of a block to their splits and return whether a file was filled."""
        if named_heldout:
            held = np.ones(len(made.lengths), bool)
        elif self.corpus.heldout:
            held = np.zeros(len(made.lengths), bool)
        else:
            held = made.held
        taken = len(held) if named_heldout else self._until_limit(held, made.lengths)
        held, lengths = held[:taken], made.lengths[:taken]
        ids = made.ids[: int(lengths.sum())]
        self.counts.text_bytes += int(made.sizes[:taken].sum())
        self.counts.train_documents += int((~held).sum())
        if not held.any():
            return self.train.append(ids)
        apart = np.repeat(held, lengths)
        filled = self.train.append(ids[~apart])
        return self._hold_out(ids[apart], lengths[held]) or filled

    def _until_limit(self, held: np.ndarray, lengths: np.ndarray) -> int:
        """Return how many of a block's documents to take until the training text reaches its limit."""
        if not self.corpus.tokens:
            return len(held)
        reached = self.train.tokens + np.cumsum(np.where(held, 0, lengths)) >= self.corpus.tokens
        return int(np.argmax(reached)) + 1 if reached.any() else len(held)

    def _hold_out(self, ids: np.ndarray, lengths: np.ndarray) -> bool:
        room = HELDOUT_TOKENS - self.heldout.tokens
        begun = int((np.cumsum(lengths) - lengths < room).sum())
        self.counts.heldout_documents += begun
        self.counts.left_out_documents += len(lengths) - begun
        self.counts.left_out_tokens += max(len(ids) - room, 0)
        return self.heldout.append(ids[:room])


# ---------------------------------------------------------------- tokenize


BPE_BYTES = 2**28  # a BPE is trained on about this much text at most, equally from the beginning of each file

Report = Callable[[str], None]


def tokenize(
    corpus: Corpus,
    store: Store,
    *,
    report: Report,
    processes: int = 0,
    from_folder: Path | None = None,
    shard_tokens: int = SHARD_TOKENS,
    lost: Callable[[], bool] = lambda: False,
) -> Path:
    """Return the folder of the tokenized corpus; tokenize the corpus if it is not in the store yet.

    `processes` 0 uses every core. `from_folder` reads a hub corpus from a copy of its repository and records that in
    the store. The caller must hold a lease, so that no other worker tokenizes the same corpus in this store; `lost`
    returns whether another worker has taken the lease over.
    """
    if from_folder is not None:
        write_link(corpus, store, from_folder)
    marks = fingerprints(corpus, store)
    if not store.has(store.shards / marks.key(corpus)):  # the text will be read anyway, so hash it too
        marks = fingerprints(corpus, store, again=True)
    key = marks.key(corpus)
    place = store.shards / key
    if store.has(place):
        remove_attempts(store, key)
        return place
    store.refuse_debris(place)  # before the work rather than after it
    attempt = Attempt(corpus, store, key, lost)
    try:
        _Work(corpus, store, marks, attempt, report, processes, shard_tokens).run()
        attempt.check_ours()
        publish(attempt.build, place)
    except Exception as wrong:
        if not attempt.taken_over:
            raise
        if store.has(place):  # published by the worker that took over
            return place
        raise attempt.refusal() from wrong
    remove_attempts(store, key)
    return place


class _Work:
    """The work of one attempt at tokenizing one corpus."""

    def __init__(
        self,
        corpus: Corpus,
        store: Store,
        marks: Fingerprints,
        attempt: Attempt,
        report: Report,
        processes: int,
        shard_tokens: int,
    ) -> None:
        self.corpus, self.store, self.marks, self.report = corpus, store, marks, report
        self.processes, self.shard_tokens = processes, shard_tokens
        self.attempt, self.build, self.journal = attempt, attempt.build, attempt.journal

    def run(self) -> None:
        """Tokenize the corpus into `build`, ready to be published."""
        self.files = dict(zip(("train", "heldout"), self._open_files(), strict=True))
        self.attempt.begin()
        self.tokenizer = self._tokenizer()
        self.parts = Parts(self.corpus, self.build, dtype_for(self.tokenizer.vocab), self.shard_tokens)
        with Helpers(self._block_encoder(), self._processes()) as helpers:
            self.encoder = self._encoder()
            try:
                self._restore()
                self._write(helpers)
            finally:
                self.parts.abandon()
        self._finish()

    def _open_files(self) -> tuple[list[File], list[File]]:
        link = read_link(self.corpus, self.store) if self.corpus.hub else None
        if self.corpus.hub and not link:
            return on_hub(self.corpus)
        if link and "folder" not in link:
            raise DataError(
                f"corpus {self.corpus.name!r}: the results that were merged into this store come from a folder on another "
                f"machine that stood for {self.corpus.source}; type biphase tokenize {self.corpus.name} --from FOLDER for a "
                f"copy of it, or another --store; to read the hub here and leave those results aside, remove "
                f"{link_path(self.corpus, self.store)}"
            )
        if link:
            self.report(
                f"{self.corpus.name}: read from {link['folder']}, which stands for {self.corpus.source}"
            )
        found = resolve(self.corpus, Path(link["folder"]) if link else None)
        return local(found.train), local(found.heldout)

    # ------------------------------------------------------------ tokenizer

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer of this attempt, which is built once and moved into `build` atomically."""
        folder = self.build / "tokenizer"
        if self.attempt.is_sealed(folder):
            return load_saved(folder)
        clear(folder)
        if isinstance(self.corpus.tokenizer, BPE):
            self.report(f"{self.corpus.name}: training a BPE of {self.corpus.tokenizer.vocab}")
            made = train(self.corpus, self._sample_for_bpe(), self.report)
        else:
            made = load(self.corpus)
        draft = self.attempt.folder / "tokenizer.part"
        shutil.rmtree(draft, ignore_errors=True)
        made.save(draft)
        draft.rename(folder)
        self.attempt.seal(folder)
        return made

    def _sample_for_bpe(self) -> Iterator[str]:
        files, tally = self.files["train"], Tally()
        each = max(BPE_BYTES // len(files), 1)
        for file in files:
            taken = 0
            for block in documents.blocks(self.corpus, [file]):
                for text, as_bytes in documents.parse(block, self.corpus.text, tally):
                    if self.corpus.heldout or text_hash(as_bytes) % 1000:
                        taken += len(as_bytes)
                        yield text
                if taken >= each:
                    break
            self._judge(tally)

    def _encoder(self) -> TextEncoder:
        """Return a tiktoken encoder if it agrees with `tokenizers` on a sample and on the first documents."""
        encoder = fastest(self.tokenizer, self.report)
        first = next(documents.blocks(self.corpus, self.files["train"]), None)
        texts, size = [], 0
        for text, as_bytes in documents.parse(first, self.corpus.text, Tally()) if first else ():
            if size > 2**18:
                break
            texts.append(text)
            size += len(as_bytes)
        return confirmed(encoder, texts, "the first documents", self.report)

    # ------------------------------------------------------------ ids

    def _restore(self) -> None:
        """Continue where an earlier attempt stopped, or start from the beginning."""
        self.part, self.place, self.tally = "train", FilePosition(), Tally()
        if self.journal.exists():
            with contextlib.suppress(StoreError):  # the journal is damaged
                journal = read_checked(self.journal)
                if self.parts.restore(journal["parts"]):
                    self.part, self.place = journal["part"], FilePosition(**journal["place"])
                    self.tally = Tally(**journal["tally"])
                    self.report(f"{self.corpus.name}: going on after {self.parts.train.tokens:,} tokens")
                    return
            self.report(f"{self.corpus.name}: what was left unfinished has changed; starting again")
            self.parts.abandon()
            self.parts = Parts(self.corpus, self.build, dtype_for(self.tokenizer.vocab), self.shard_tokens)
            clear(self.journal)
        for stray in self.build.glob("*.bin"):
            clear(stray)
        self.parts.begin()

    def _save(self) -> None:
        here = {"part": self.part, "place": asdict(self.place), "tally": asdict(self.tally)}
        write_json(self.journal, with_checksum({**here, "parts": self.parts.state()}))

    def _write(self, helpers: Helpers) -> None:
        if self.part == "train":
            if not self.parts.enough:  # the limit may have been reached before a kill
                self._write_part(helpers)
            self.part, self.place = "heldout", FilePosition()
            self._save()
        self._write_part(helpers)
        self._judge(self.tally)
        self.parts.close()

    def _write_part(self, helpers: Helpers) -> None:
        """Read the files of one split from `place` on, and write their documents."""
        parts, files = self.parts, self.files[self.part]
        meter = ReadProgress(
            self.corpus, files, self.report, self.place, parts.counts.text_bytes, parts.train.tokens
        )
        blocks = documents.blocks(self.corpus, files, self.place)
        for block, made in helpers.encode(blocks, tiktoken=self.encoder.fast is not None):
            self.attempt.check_ours()
            filled = parts.take(made, named_heldout=self.part == "heldout")
            self.tally.add(made.tally)
            self.place = block.after
            if block.ends_file:
                self._judge(self.tally)
            if filled:
                self._save()
            meter.show(block.read, parts.counts.text_bytes, parts.train.tokens)
            if self.part == "train" and parts.enough:
                break
        if files:
            meter.show(meter.total, parts.counts.text_bytes, parts.train.tokens, last=True)

    def _block_encoder(self) -> BlockEncoder:
        special = self.tokenizer.special
        begin = (special.bos,) if self.corpus.bos and special.bos is not None else ()
        dtype = dtype_for(self.tokenizer.vocab).str
        return BlockEncoder(self.build / "tokenizer", self.corpus.text, begin, special.eos, dtype)

    def _processes(self) -> int:
        """Return 1 for a small corpus, since starting a process takes longer than encoding a few blocks."""
        small = sum(file.size for file in self.files["train"]) < 2 * documents.BLOCK_BYTES
        return 1 if small else self.processes

    def _judge(self, tally: Tally) -> None:
        try:
            tally.judge(self.corpus.name)
        except DataError:
            self.attempt.discard()  # corrected files will have another key
            raise

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Check the result, write its card and report what was skipped."""
        corpus, counts = self.corpus, self.parts.counts
        if not self.parts.train.tokens:
            self.attempt.discard()
            skipped = self.tally.words() or (
                "all documents are held out" if self.tally.records else "its files are blank"
            )
            raise DataError(
                f"corpus {corpus.name!r} has no documents to train on ({skipped}); correct {corpus.source}"
            )
        self._check_unchanged()
        for draft in self.build.rglob("*.part"):
            draft.unlink()
        card = self._card()
        write_json(self.build / CARD, card)
        if card["skipped"]:
            self.report(f"{corpus.name}: skipped {self.tally.words()}")
        if counts.left_out_documents:
            self.report(
                f"{corpus.name}: left out {counts.left_out_documents:,} held-out documents beyond the cap"
            )
        if not card["heldout_tokens"]:
            self.report(
                f"{corpus.name}: no document is held out (1 in 1,000 is); name some: Corpus(heldout='…'), or --heldout FILE"
            )

    def _check_unchanged(self) -> None:
        now, corpus = fingerprints(self.corpus, self.store), self.corpus
        if now != self.marks:
            self.attempt.discard()
            what = "its tokenizer" if now.content == self.marks.content else corpus.source
            raise DataError(
                f"corpus {corpus.name!r}: {what} changed while it was read; type the command again"
            )

    def _card(self) -> dict[str, Any]:
        special, vocab = self.tokenizer.special, self.tokenizer.vocab
        counts = Tokens(sorted(self.build.glob("train-*.bin")), dtype_for(vocab)).counts(vocab)
        return {
            "corpus": encode(self.corpus),
            "fingerprint": self.marks.content,
            "tokenizer_fingerprint": self.marks.tokenizer,
            "vocab": vocab,
            "eos_id": special.eos,
            "mask_id": special.mask,
            "pad_id": special.pad,
            "bos_id": special.bos,
            "special_ids": list(special.ids),
            "mask_token": self.tokenizer.model.id_to_token(special.mask),
            "mask_rule": special.mask_rule,
            "train_tokens": self.parts.train.tokens,
            "heldout_tokens": self.parts.heldout.tokens,
            **asdict(self.parts.counts),
            "records": self.tally.records,
            "skipped": self.tally.skipped,
            "first_skipped": self.tally.first,
            "unigram_entropy": entropy(counts),
            "made_from": {
                "files": {
                    part: [[file.name, file.size] for file in files] for part, files in self.files.items()
                },
                "encoder": self.encoder.name,
                "tokenizers": version("tokenizers"),
                "tiktoken": version("tiktoken"),
            },
        }
