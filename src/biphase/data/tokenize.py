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

Helper processes are started with spawn, because a process with threads or a GPU context must not be forked, and each
loads the tokenizer once. Raw bytes go in and one array of ids per block comes out. A few blocks per process are in
flight, so memory use does not depend on the corpus's size. A helper exits when its parent dies, even by SIGKILL.

The key comes from hashes taken once at the start. If the corpus or the tokenizer has other hashes at the end, the
result is not published.

Takeover. An attempt is a folder with a random name. A worker that continues another's unfinished attempt renames it
first, so a suspended worker that was taken for dead finds its folder gone when it resumes, and stops. It cannot write
into the new owner's files by path, nor publish them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from biphase.data import corpus as corpora
from biphase.data import documents
from biphase.data.corpus import File, Files, Fingerprints
from biphase.data.documents import FilePosition, RecordBlock, Tally, blocks, parse, text_hash
from biphase.data.shards import SHARD_TOKENS, Tokens, Writer, dtype_for, entropy
from biphase.data.tokenizer import Inconvertible, TextEncoder, Tokenizer, fastest, load, load_saved, train
from biphase.errors import DataError, StoreError, one_line
from biphase.metadata import CARD
from biphase.progress import seconds_between
from biphase.records import encode
from biphase.specs import BPE, Corpus
from biphase.store import MANIFEST, Store, publish, read_checked, verify, with_checksum, write_json
from biphase.text import duration

REPORT_SECONDS = 2.0
HELDOUT_TOKENS = 1_000_000
BPE_BYTES = 2**28  # a BPE is trained on about this much text at most, equally from the beginning of each file
BLOCKS_AHEAD = 3  # per process

Report = Callable[[str], None]


def tokenize(
    corpus: Corpus,
    store: Store,
    *,
    report: Report,
    processes: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    lost: Callable[[], bool] = lambda: False,
) -> Path:
    """Return the folder of the tokenized corpus; tokenize the corpus if it is not in the store yet.

    `processes` 0 uses every core. The caller must hold a lease, so that no other worker tokenizes the same corpus in
    this store; `lost` returns whether another worker has taken the lease over.
    """
    hashes = corpora.fingerprints(corpus, store)
    if not store.has_now(store.shards / hashes.key(corpus)):  # the text will be read anyway, so hash it too
        hashes = corpora.fingerprints(corpus, store, again=True)
    key = hashes.key(corpus)
    folder = store.shards / key
    if not store.has(folder):
        store.refuse_debris(folder)  # before the work rather than after it
        attempt = Attempt(corpus, store, key, lost)
        try:
            work = _Tokenization(corpus, store, hashes, attempt, report, processes, shard_tokens)
            work.run()
            attempt.check_ours()
            entries = work.splits.train.entries | work.splits.heldout.entries
            if publish(attempt.build, folder, entries):
                memory = corpora.HashMemory(store)
                for name, entry in entries.items():  # hashed while they were written
                    memory.remember(folder / name, entry["sha256"])
                memory.save()
        except Exception as wrong:
            if not attempt.taken_over:
                raise
            if not store.has(folder):
                raise attempt.refusal() from wrong
            return folder  # published by the worker that took over
    for remains in _attempts(store, key):
        _clear(remains)
    return folder


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
        self.tokenizer = self.folder / "tokenizer"
        self.begun = False
        for unfinished in _attempts(store, key):
            if lost():  # suspended before it began: the folder belongs to the worker that took over
                raise self.refusal()
            with contextlib.suppress(FileNotFoundError):  # another worker renamed it first
                unfinished.rename(self.folder)
                break

    def begin(self) -> None:
        self.build.mkdir(parents=True, exist_ok=True)
        self.begun = True

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
        _clear(self.folder)


def _attempts(store: Store, key: str) -> list[Path]:
    """Return the unfinished attempts at a corpus, those with a journal (which can be resumed) first."""
    folders = store.attempts.glob(f"shards-{key}*")
    return sorted(folders, key=lambda at: ((at / "journal.json").is_file(), at.name), reverse=True)


def _clear(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------- helper processes


@dataclass(frozen=True)
class Encoded:
    """The documents of a block: their concatenated ids, including begin and end tokens."""

    ids: np.ndarray
    lengths: np.ndarray  # tokens per document
    sizes: np.ndarray  # UTF-8 bytes per document
    held: np.ndarray  # whether its text hash is 0 modulo 1,000
    tally: Tally


@dataclass(frozen=True)
class BlockEncoder:
    """Parses and encodes blocks. It can be sent to other processes, each of which loads the tokenizer once."""

    tokenizer: Path
    text: str
    begin: tuple[int, ...]  # ids before each document
    end: int  # id after each document
    dtype: str

    def encode(self, block: RecordBlock, tiktoken: bool) -> Encoded:
        try:
            encoder = _loaded(self.tokenizer)
        except Exception as wrong:
            raise DataError(
                f"a process that encodes text could not begin ({one_line(wrong)}); "
                "type the command again with --processes 1"
            ) from None
        begin, tally = len(self.begin), Tally()
        documents = list(parse(block, self.text, tally))
        texts = [text for text, _ in documents]
        encoded = encoder.encode(texts) if tiktoken else encoder.plain(texts)
        lengths = np.array([begin + len(document) + 1 for document in encoded], np.int64)
        ids, at = np.empty(int(lengths.sum()), self.dtype), 0
        for document, length in zip(encoded, lengths.tolist(), strict=True):
            ids[at : at + begin] = self.begin
            ids[at + begin : at + length - 1] = document
            ids[at + length - 1] = self.end
            at += length
        sizes = np.array([len(as_bytes) for _, as_bytes in documents], np.int64)
        held = np.array([text_hash(as_bytes) % 1000 == 0 for _, as_bytes in documents], bool)
        return Encoded(ids, lengths, sizes, held, tally)


@lru_cache(maxsize=1)
def _loaded(tokenizer: Path) -> TextEncoder:
    try:  # the caller checks whether tiktoken may be used; here it is only loaded
        return TextEncoder(tokenizer, tiktoken=True, proven=True)
    except Inconvertible:
        return TextEncoder(tokenizer, tiktoken=False)


class Helpers:
    """Processes that encode blocks; they start immediately and load while the caller still checks the encoder.

    `processes` 0 means one per core; 1 encodes in the caller's process.
    """

    def __init__(self, encoder: BlockEncoder, processes: int) -> None:
        self.encoder, self.processes = encoder, processes or _cores()
        self.pool: ProcessPoolExecutor | None = None
        if self.processes > 1:
            spawn = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(self.processes, spawn, _begin, (encoder.tokenizer,))
            for _ in range(self.processes):  # the pool starts a process per task while none is idle
                self.pool.submit(int)

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool:
            self.pool.shutdown(wait=True, cancel_futures=True)

    def encode(
        self, blocks: Iterator[RecordBlock], *, tiktoken: bool
    ) -> Iterator[tuple[RecordBlock, Encoded]]:
        """Yield each block with its encoded documents, in order."""
        if self.pool is None:
            yield from ((block, self.encoder.encode(block, tiktoken)) for block in blocks)
            return
        waiting: deque[tuple[RecordBlock, Future[Encoded]]] = deque()
        try:
            for block in blocks:
                without_text = replace(block, payload=b"")  # a helper has received it
                waiting.append((without_text, self.pool.submit(self.encoder.encode, block, tiktoken)))
                if len(waiting) >= self.processes * BLOCKS_AHEAD:
                    done, future = waiting.popleft()
                    yield done, future.result()
            for done, future in waiting:
                yield done, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a process that encodes text was killed, perhaps for want of memory; "
                "type the command again with fewer --processes: it goes on where it was"
            ) from None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(tokenizer: Path) -> None:
    """Initialize a helper: single-threaded, ignoring ^C (the parent handles it), exiting when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(Exception):  # raised here, it would break the pool without its message
        _loaded(tokenizer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# ---------------------------------------------------------------- training and held-out splits


# Documents and tokens that are left out are held out, but lie beyond the cap.
COUNTS = ("train_documents", "heldout_documents", "left_out_documents", "left_out_tokens", "text_bytes")


class SplitWriter:
    """Writes the training and the held-out split.

    Call `begin`, or `restore` with an earlier `state` to resume after a kill.
    """

    def __init__(self, corpus: Corpus, folder: Path, dtype: np.dtype, shard_tokens: int) -> None:
        self.corpus, self.shard_tokens = corpus, shard_tokens
        self.counts = dict.fromkeys(COUNTS, 0)
        self.train = Writer(folder, "train", dtype, shard_tokens)
        self.heldout = Writer(folder, "heldout", dtype, shard_tokens)

    def begin(self) -> None:
        self.train.begin()
        self.heldout.begin()

    def state(self) -> dict[str, Any]:
        """Sync to disk and return what is there."""
        writers = {"train": self.train.state(), "heldout": self.heldout.state()}
        return {"shard_tokens": self.shard_tokens, "counts": self.counts, **writers}

    def restore(self, state: dict[str, Any]) -> bool:
        """Resume from `state`; return False if the files differ from it."""
        if state["shard_tokens"] != self.shard_tokens:
            return False
        self.counts = state["counts"]
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

    def append(self, block: Encoded, *, named_heldout: bool) -> bool:
        """Write the documents of a block to their splits and return whether a file was filled."""
        if named_heldout or self.corpus.heldout:
            held = np.full(len(block.lengths), named_heldout)
        else:
            held = block.held
        count = len(held) if named_heldout else self._until_limit(held, block.lengths)
        held, lengths = held[:count], block.lengths[:count]
        ids = block.ids[: int(lengths.sum())]
        self.counts["text_bytes"] += int(block.sizes[:count].sum())
        self.counts["train_documents"] += int((~held).sum())
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
        self.counts["heldout_documents"] += begun
        self.counts["left_out_documents"] += len(lengths) - begun
        self.counts["left_out_tokens"] += max(len(ids) - room, 0)
        return self.heldout.append(ids[:room])


# ---------------------------------------------------------------- tokenization


class ReadProgress:
    """Reports reading speed and remaining time: every two seconds on a terminal, every minute in a log file.

    `report` is called every two seconds in both cases, with "" if no line is due, because it may raise to stop the
    work.
    """

    def __init__(self, splits: SplitWriter, files: Sequence[File], report: Report, at: FilePosition) -> None:
        self.splits, self.report = splits, report
        self.total = sum(file.size for file in files)
        read = sum(file.size for file in files[: at.file])
        self.earlier, self.earlier_text = self._done(read), splits.counts["text_bytes"]  # by another process
        self.began = self.shown = self.called = time.monotonic()
        self.every = seconds_between(REPORT_SECONDS)

    def _done(self, read: int) -> float:
        """Return the share of the work that is done: bytes of the files read, or tokens of the corpus's limit."""
        limit = self.splits.corpus.tokens
        return max(read / max(self.total, 1), self.splits.train.tokens / limit if limit else 0)

    def show(self, read: int, *, last: bool = False) -> None:
        """Report that `read` bytes of the files have been read, if a report is due."""
        now = time.monotonic()
        if not last and now - self.called < REPORT_SECONDS:
            return
        self.called = now
        if not last and now - self.shown < self.every:
            self.report("")
            return
        self.shown, seconds = now, max(now - self.began, 1e-9)
        text, done = self.splits.counts["text_bytes"], self._done(read)
        rate = (text - self.earlier_text) / seconds / 1e6
        left = ""
        if self.earlier < done < 1 and not last:
            left = f", {duration(seconds * (1 - done) / (done - self.earlier))} left"
        name, tokens = self.splits.corpus.name, self.splits.train.tokens
        self.report(f"{name}: {text / 1e6:,.1f} MB of text, {tokens:,} tokens, {rate:.1f} MB/s{left}")


@dataclass
class _Tokenization:
    """The work of one attempt at tokenizing one corpus."""

    corpus: Corpus
    store: Store
    hashes: Fingerprints
    attempt: Attempt
    report: Report
    processes: int
    shard_tokens: int

    def run(self) -> None:
        """Tokenize the corpus into `build`, ready to be published."""
        self.files = self._files(self.corpus)
        self.attempt.begin()
        self.tokenizer = self._tokenizer()
        self.dtype, special = dtype_for(self.tokenizer.vocab), self.tokenizer.special
        begin = (special.bos,) if self.corpus.bos and special.bos is not None else ()
        encoder = BlockEncoder(self.attempt.tokenizer, self.corpus.text, begin, special.eos, self.dtype.str)
        # Starting a process takes longer than encoding the few blocks of a small corpus.
        small = sum(file.size for file in self.files.train) < 2 * documents.BLOCK_BYTES
        self.splits = self._splits()
        with Helpers(encoder, 1 if small else self.processes) as helpers:
            self.encoder = self._encoder()
            try:
                self._restore()
                self._write(helpers)
            finally:
                self.splits.abandon()
        self._finish()

    def _files(self, corpus: Corpus) -> Files:
        link = corpora.read_link(corpus, self.store) if corpus.hub else None
        if corpus.hub and not link:
            return corpora.on_hub(corpus)
        if link and "folder" not in link:
            raise DataError(
                f"corpus {corpus.name!r}: the merged results of this store come from a folder on another machine that "
                f"stood for {corpus.source}; type biphase tokenize {corpus.name} --from FOLDER for a copy of it, or "
                f"another --store; to leave those results aside, remove {corpora.link_path(corpus, self.store)}"
            )
        if link:
            self.report(f"{corpus.name}: read from {link['folder']}, which stands for {corpus.source}")
        return corpora.resolve(corpus, Path(link["folder"]) if link else None)

    def _tokenizer(self) -> Tokenizer:
        """Return the tokenizer of this attempt; an earlier process may have saved it in the attempt's folder."""
        folder = self.attempt.tokenizer
        with contextlib.suppress(StoreError):  # absent or changed
            verify(folder)
            return load_saved(folder)
        _clear(folder)
        bpe = self.corpus.tokenizer if isinstance(self.corpus.tokenizer, BPE) else None
        other = bpe.on if bpe else None
        shards = self.store.shards / corpora.shards_key(other, self.store) if other else None
        if shards and self.store.has(shards):
            verify(shards, only="tokenizer/")
            tokenizer = load_saved(shards / "tokenizer")
        elif bpe:
            self.report(
                f"{self.corpus.name}: training a BPE of {bpe.vocab}{f' on {other.name}' if other else ''}"
            )
            tokenizer = train(self.corpus, self._sample_for_bpe(other or self.corpus), self.report)
        else:
            tokenizer = load(self.corpus)
        draft = self.attempt.folder / "tokenizer.part"
        _clear(draft)
        tokenizer.save(draft)
        publish(draft, folder)
        return tokenizer

    def _sample_for_bpe(self, corpus: Corpus) -> Iterator[str]:
        files, tally = (self.files if corpus is self.corpus else self._files(corpus)).train, Tally()
        each = max(BPE_BYTES // len(files), 1)
        for file in files:
            size = 0
            for block in blocks(corpus, [file]):
                for text, as_bytes in parse(block, corpus.text, tally):
                    if corpus.heldout or text_hash(as_bytes) % 1000:
                        size += len(as_bytes)
                        yield text
                if size >= each:
                    break
            self._judge(tally)

    def _encoder(self) -> TextEncoder:
        """Return a tiktoken encoder if it agrees with `tokenizers` on a sample and on the first 256 KiB of text."""
        texts, size = [], 0
        for text, as_bytes in parse(next(blocks(self.corpus, self.files.train)), self.corpus.text, Tally()):
            if size > 2**18:
                break
            texts.append(text)
            size += len(as_bytes)
        return fastest(self.tokenizer, texts, self.report)

    def _splits(self) -> SplitWriter:
        return SplitWriter(self.corpus, self.attempt.build, self.dtype, self.shard_tokens)

    def _restore(self) -> None:
        """Continue where an earlier attempt stopped, or start from the beginning."""
        self.part, self.position, self.tally = "train", FilePosition(), Tally()
        journal_file = self.attempt.journal
        if journal_file.exists():
            with contextlib.suppress(StoreError, KeyError):  # damaged, or of another version
                journal = read_checked(journal_file)
                if self.splits.restore(journal["splits"]):
                    self.part, self.position = journal["part"], FilePosition(**journal["position"])
                    self.tally = Tally(**journal["tally"])
                    self.report(f"{self.corpus.name}: going on after {self.splits.train.tokens:,} tokens")
                    return
            self.report(f"{self.corpus.name}: what was left unfinished has changed; starting again")
            self.splits.abandon()
            self.splits = self._splits()
            _clear(journal_file)
        for stray in self.attempt.build.glob("*.bin"):
            _clear(stray)
        self.splits.begin()

    def _save(self) -> None:
        journal = {
            "part": self.part,
            "position": asdict(self.position),
            "tally": asdict(self.tally),
            "splits": self.splits.state(),
        }
        write_json(self.attempt.journal, with_checksum(journal))

    def _write(self, helpers: Helpers) -> None:
        if self.part == "train":
            if not self.splits.enough:  # the limit may have been reached before a kill
                self._write_part(helpers, self.files.train)
            self.part, self.position = "heldout", FilePosition()
            self._save()
        self._write_part(helpers, self.files.heldout)
        self._judge(self.tally)
        self.splits.close()

    def _write_part(self, helpers: Helpers, files: Sequence[File]) -> None:
        """Read the files of one split from `position` on, and write their documents."""
        splits = self.splits
        progress = ReadProgress(splits, files, self.report, self.position)
        records = blocks(self.corpus, files, self.position)
        for block, encoded in helpers.encode(records, tiktoken=self.encoder.fast is not None):
            self.attempt.check_ours()
            filled = splits.append(encoded, named_heldout=self.part == "heldout")
            self.tally.add(encoded.tally)
            self.position = block.after
            if block.ends_file:
                self._judge(self.tally)
            if filled:
                self._save()
            progress.show(block.read)
            if self.part == "train" and splits.enough:
                break
        if files:
            progress.show(progress.total, last=True)

    def _judge(self, tally: Tally) -> None:
        try:
            tally.judge(self.corpus.name)
        except DataError:
            self.attempt.discard()  # corrected files will have another key
            raise

    def _finish(self) -> None:
        """Check the result, write its card and report what was skipped."""
        corpus = self.corpus
        if not self.splits.train.tokens:
            self.attempt.discard()
            why = "all documents are held out" if self.tally.records else "its files are blank"
            skipped = self.tally.describe() or why
            raise DataError(
                f"corpus {corpus.name!r} has no documents to train on ({skipped}); correct {corpus.source}"
            )
        now = corpora.fingerprints(corpus, self.store)
        if now != self.hashes:
            self.attempt.discard()
            changed = "its tokenizer" if now.content == self.hashes.content else corpus.source
            raise DataError(f"corpus {corpus.name!r}: {changed} changed while it was read; run it again")
        build = self.attempt.build
        for draft in build.rglob("*.part"):
            draft.unlink()
        without = shutil.ignore_patterns(MANIFEST)
        shutil.copytree(self.attempt.tokenizer, build / "tokenizer", ignore=without, dirs_exist_ok=True)
        write_json(build / CARD, self._card())
        if self.tally.skipped:
            self.report(f"{corpus.name}: skipped {self.tally.describe()}")
        if left_out := self.splits.counts["left_out_documents"]:
            self.report(f"{corpus.name}: left out {left_out:,} held-out documents beyond the cap")
        if not self.splits.heldout.tokens:
            self.report(
                f"{corpus.name}: no document is held out (1 in 1,000 is); name some: Corpus(heldout='…'), or --heldout FILE"
            )

    def _card(self) -> dict[str, Any]:
        special, vocab = self.tokenizer.special, self.tokenizer.vocab
        counts = Tokens(sorted(self.attempt.build.glob("train-*.bin")), self.dtype).counts(vocab)
        return {
            "corpus": encode(self.corpus),
            "fingerprint": self.hashes.content,
            "tokenizer_fingerprint": self.hashes.tokenizer,
            "vocab": vocab,
            "eos_id": special.eos,
            "mask_id": special.mask,
            "pad_id": special.pad,
            "bos_id": special.bos,
            "special_ids": list(special.ids),
            "mask_token": self.tokenizer.model.id_to_token(special.mask),
            "mask_rule": special.mask_rule,
            "train_tokens": self.splits.train.tokens,
            "heldout_tokens": self.splits.heldout.tokens,
            **self.splits.counts,
            "records": self.tally.records,
            "skipped": self.tally.skipped,
            "first_skipped": self.tally.first,
            "unigram_entropy": entropy(counts),
            "made_from": {
                "files": {
                    part: [[file.name, file.size] for file in files]
                    for part, files in self.files._asdict().items()
                },
                "encoder": self.encoder.name,
                "tokenizers": version("tokenizers"),
                "tiktoken": version("tiktoken"),
            },
        }
