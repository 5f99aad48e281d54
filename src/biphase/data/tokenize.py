"""Corpus → shards: in parallel, resumable after a kill, the same bytes for any number of processes.

    files ─► blocks (read in order) ─► ids (by processes) ─► shard files (written in order) ─► published folder
                                                                 │
                                          journal.json: after each full shard, everything up to the last block

One process reads and writes in the order of the files, others parse and encode whole blocks, so that nothing
depends on who was faster. After each full shard file the journal records, at the end of a block, where reading
stands and what is safely written; a restart keeps that and computes the rest again. A document whose text hash is
0 modulo 1,000 is held out, unless the corpus names held-out files; text beyond the first million held-out tokens
is left out of both and counted. A limit on tokens ends the corpus with the document that reaches it.

The key comes from hashes taken once, at the beginning; a corpus or tokenizer that has other ones at the end is not
published.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from biphase.data import documents
from biphase.data.attempt import Attempt, clear, remove_attempts
from biphase.data.documents import Place, Tally, text_hash
from biphase.data.encoder import Encoder, confirmed, fastest
from biphase.data.identity import Fingerprints, fingerprints, link_path, read_link, write_link
from biphase.data.listing import resolve
from biphase.data.meter import Meter
from biphase.data.parallel import BlockEncoder, Helpers
from biphase.data.parts import Parts
from biphase.data.shards import SHARD_TOKENS, Tokens, dtype_for, entropy
from biphase.data.sources import File, local, on_hub
from biphase.data.tokenizer import Tokenizer, load, load_saved, train
from biphase.errors import DataError, StoreError
from biphase.files import Store, publish, read_sealed, sealed, write_json
from biphase.metadata import CARD
from biphase.records import encode
from biphase.specs import BPE, Corpus

BPE_BYTES = 2**28  # a BPE is trained on at most so much text, the same share from the beginning of each file

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
    """The folder of the tokenized corpus, made if it is not there yet.

    `processes` 0 takes every core. `from_folder` reads a hub corpus from a copy of its repository; the store
    remembers it. The caller makes sure that nobody else tokenizes the same corpus in this store meanwhile, and
    `lost` says whether somebody does so all the same, taking this worker for dead.
    """
    if from_folder is not None:
        write_link(corpus, store, from_folder)
    marks = fingerprints(corpus, store)
    if not store.has(store.shards / marks.key(corpus)):  # the text will be read: then hash it too
        marks = fingerprints(corpus, store, again=True)
    key = marks.key(corpus)
    place = store.shards / key
    if store.has(place):
        remove_attempts(store, key)
        return place
    store.refuse_debris(place)  # now, and not after the work
    attempt = Attempt(corpus, store, key, lost)
    try:
        _Work(corpus, store, marks, attempt, report, processes, shard_tokens).run()
        attempt.check_ours()
        publish(attempt.build, place)
    except Exception as wrong:
        if not attempt.taken_over:
            raise
        if store.has(place):  # by who took it over
            return place
        raise attempt.refusal() from wrong
    remove_attempts(store, key)
    return place


class _Work:
    """What is done in one attempt at one corpus."""

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
        """Leave the finished result in `build`."""
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
        """The tokenizer of this attempt: made once, whole or not at all."""
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

    def _encoder(self) -> Encoder:
        """tiktoken's, if it agrees with tokenizers on a sample and on the first documents."""
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
        """Where an earlier attempt stopped, or the beginning."""
        self.part, self.place, self.tally = "train", Place(), Tally()
        if self.journal.exists():
            with contextlib.suppress(StoreError):  # it was changed since it was written
                journal = read_sealed(self.journal)
                if self.parts.restore(journal["parts"]):
                    self.part, self.place = journal["part"], Place(**journal["place"])
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
        write_json(self.journal, sealed({**here, "parts": self.parts.state()}))

    def _write(self, helpers: Helpers) -> None:
        if self.part == "train":
            if not self.parts.enough:  # a limit may have been reached before a kill
                self._write_part(helpers)
            self.part, self.place = "heldout", Place()
            self._save()
        self._write_part(helpers)
        self._judge(self.tally)
        self.parts.close()

    def _write_part(self, helpers: Helpers) -> None:
        """Read the files of one part from `place` on, and write their documents."""
        parts, files = self.parts, self.files[self.part]
        meter = Meter(
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
        """A process takes longer to start than a few blocks take to encode."""
        small = sum(file.size for file in self.files["train"]) < 2 * documents.BLOCK_BYTES
        return 1 if small else self.processes

    def _judge(self, tally: Tally) -> None:
        try:
            tally.judge(self.corpus.name)
        except DataError:
            self.attempt.discard()  # corrected files have another key
            raise

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Check, count, describe: after this the folder says what it is."""
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
