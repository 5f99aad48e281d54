"""Archives: the results of one study in one file, to be copied into another store.

`pack` writes an archive of what a store holds of a study; `check` reads an archive and validates all of it without
writing; `merge` publishes a checked archive into a store. Layout of an archive:

    ledger.json                     first: the study's name, and every other file with its size and SHA-256
    study/                          plan.json, fingerprints.json
    pins.json  corpora/link-*.json  commits of hub models; fingerprints of corpora read from a folder
    metadata/checkpoints/<key>/     checkpoint.json, metrics.jsonl: a checkpoint without weights and optimizer state
    metadata/shards/<key>/          card.json: a corpus without its tokens
    metadata/trials/<key>/          trial.json: scores without the per-example values
    trials/<key>/                   trial.json, values.safetensors, predictions.safetensors if it exists

The file is a zstandard-compressed tar, so standard tools can list it, and the same results give the same bytes.

An archive is untrusted input, so reading is strict. It may contain regular files only, with the names above, in the
order and with the sizes and hashes that ledger.json lists; links, devices, folders and extended headers are refused.
The unpacked size is checked against a limit before anything else is read. The tar headers are parsed one by one instead
of by `tarfile.open`, because that reader follows extended headers of any size. Nothing is unpacked to a path that the
archive names.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from biphase import metadata
from biphase.data.corpus import cards, corpus_fingerprint, link_path, read_link
from biphase.errors import SpecError, StoreError, one_line
from biphase.keys import Identities
from biphase.metadata import CARD, CHECKPOINT, LINES, PREDICTIONS, TRIAL, VALUES, WRONG
from biphase.presets import sources_of
from biphase.records import KEY_PATTERN, content_key, decode, encode, is_key
from biphase.specs import Corpus, Pretrain, Study
from biphase.store import Store, publish, read_checked, read_verified, verify, with_checksum, write_json
from biphase.study.ledger import read_trial, screened_in, tuning_grids
from biphase.study.load import COMMIT, hubs_of, pins_of, remember
from biphase.study.plan import (
    PLAN,
    Plan,
    corpora_of,
    datasets_of,
    fingerprints_of,
    hub_fingerprint,
    make_plan,
    remember_fingerprints,
)

LEDGER = "ledger.json"
FORMAT = 2
PLAN_ENTRY, FINGERPRINTS, PINS = "study/plan.json", "study/fingerprints.json", "pins.json"
# Files that a result's folder in an archive must hold (`FOLDERS`) and may hold in addition (`OPTIONAL`).
FOLDERS = {
    "metadata/checkpoints": (CHECKPOINT, LINES),
    "metadata/shards": (CARD,),
    "metadata/trials": (TRIAL,),
    "trials": (TRIAL, VALUES),
}
OPTIONAL = {"trials": (PREDICTIONS,)}
_FOLDER = re.compile(rf"({'|'.join(FOLDERS)})/({KEY_PATTERN})")
_LOOSE = re.compile(
    "|".join(map(re.escape, (PLAN_ENTRY, FINGERPRINTS, PINS))) + rf"|corpora/link-{KEY_PATTERN}\.json"
)
_SKIPPED = re.compile(rf"study/failures/{KEY_PATTERN}\.json")  # archives of earlier versions may hold them

BLOCK = tarfile.BLOCKSIZE
LEVEL, FRAME = 12, 2**25  # zstandard level; bytes that are compressed into one frame
MAGIC = b"\x28\xb5\x2f\xfd"  # the first bytes of a zstandard file
LARGEST_LISTING = 2**25
# An archive may unpack to `UNPACKED` bytes or `SHRUNK` times its size, whichever is larger. Real archives compress
# 4 to 22 times (measured), a decompression bomb thousands of times.
UNPACKED, SHRUNK = 2**26, 100
# Largest unpacked size in bytes by file name: these files are read whole, so they must fit into memory.
LARGEST = {"plan.json": 2**24, CARD: 2**22, TRIAL: 2**22, LINES: 2**28, VALUES: 2**28, PREDICTIONS: 2**28}
LARGEST_OTHER = 2**20


@dataclass(frozen=True)
class ArchiveEntry:
    """One file of an archive: its name, size and hash; for packing, also how to read its content when it is written."""

    name: str
    bytes: int
    sha256: str
    read: Callable[[], bytes] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, name: str, content: bytes, read: Callable[[], bytes] | None = None) -> ArchiveEntry:
        """Make an entry for `content`; without `read`, the content is kept in memory."""
        return cls(name, len(content), sha256(content).hexdigest(), read or (lambda: content))

    @property
    def folder(self) -> str:
        """The folder of the result that the file belongs to, or "" for any other file."""
        folder = self.name.rpartition("/")[0]
        return folder if _FOLDER.fullmatch(folder) else ""


def as_json(value: Any) -> bytes:
    """Serialize a value to JSON as the store does."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _refusal(path: Path, why: str) -> StoreError:
    return StoreError(
        f"{path} is no valid archive: {why}; nothing was taken from it: pack it again, or copy it again"
    )


# ---------------------------------------------------------------- write


def write_archive(path: Path, study: str, entries: list[ArchiveEntry]) -> int:
    """Write an archive atomically and return its size in bytes; an older archive at `path` is replaced."""
    if not path.parent.is_dir():
        raise SpecError(f"{path.parent} is no folder; make it, or name another file")
    if path.exists() and not (path.is_file() and _begins_as_archive(path)):
        raise SpecError(f"{path} is there already and is no archive; name another file")
    listing = {entry.name: {"bytes": entry.bytes, "sha256": entry.sha256} for entry in entries}
    first = ArchiveEntry.of(LEDGER, as_json({"ledger": FORMAT, "study": study, "files": listing}))
    if first.bytes > LARGEST_LISTING:
        raise SpecError(
            f"{len(entries):,} files are more than one archive may list; pack some results at a time: --only PATTERN"
        )
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with draft.open("wb") as file:
            with (
                io.BufferedWriter(_Compressor(file), FRAME) as frames,
                tarfile.open(fileobj=frames, mode="w|", format=tarfile.USTAR_FORMAT) as tar,
            ):
                for entry in (first, *entries):
                    content = entry.read() if entry.read else b""
                    if ArchiveEntry.of(entry.name, content) != entry:
                        raise StoreError(f"{entry.name} changed while it was packed; type the command again")
                    info = tarfile.TarInfo(entry.name)
                    info.size = entry.bytes
                    tar.addfile(info, io.BytesIO(content))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as wrong:
        raise SpecError(f"{path}: {wrong.strerror or wrong}; free room there, or name another file") from None
    finally:
        draft.unlink(missing_ok=True)  # exists only after an error
    return path.stat().st_size


def _begins_as_archive(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False


class _Compressor(io.RawIOBase):
    """Writes each piece that it gets as one zstandard frame; the pieces are those of the buffer above it."""

    def __init__(self, file: IO[bytes]) -> None:
        from pyarrow import Codec

        self.file, self.codec = file, Codec("zstd", compression_level=LEVEL)

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.file.write(self.codec.compress(bytes(content), asbytes=True))
        return len(content)


# ---------------------------------------------------------------- read


@dataclass(frozen=True)
class Archive:
    """An archive whose ledger.json was read and validated; the other files are checked when they are read."""

    path: Path
    study: str
    entries: tuple[ArchiveEntry, ...]

    @classmethod
    def open(cls, path: Path) -> Archive:
        listing = _Reader(path).member(LEDGER, None)
        try:
            about = json.loads(listing)
            if about["ledger"] != FORMAT:
                raise _refusal(
                    path, f"its format is {str(about['ledger'])[:20]!r}, and this version reads {FORMAT}"
                )
            entries = tuple(
                ArchiveEntry(name, entry["bytes"], str(entry["sha256"]))
                for name, entry in about["files"].items()
            )
            if any(type(entry.bytes) is not int for entry in entries):
                raise TypeError
            archive = cls(path, str(about["study"]), entries)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise _refusal(path, f"its {LEDGER} does not say what is in it") from None
        if fault := archive._fault():
            raise _refusal(path, fault)
        return archive

    def _fault(self) -> str:
        """Return what is wrong with the listed names, folders and sizes, or ""."""
        for entry in self.entries:
            name, most = entry.name[:200], LARGEST.get(entry.name.rpartition("/")[2], LARGEST_OTHER)
            if not entry.folder and not (_LOOSE.fullmatch(entry.name) or _SKIPPED.fullmatch(entry.name)):
                return f"{name!r} has no place in an archive"
            if not 0 <= entry.bytes <= most:
                return f"{name!r} would unpack to {str(entry.bytes)[:30]} bytes; {most:,} are allowed"
        for folder, entries in groupby(self.entries, lambda entry: entry.folder):  # its files come together
            names = [entry.name.rpartition("/")[2] for entry in entries]
            kind = folder.rpartition("/")[0]
            if folder and set(names) - set(OPTIONAL.get(kind, ())) != set(FOLDERS[kind]):
                return f"{folder} holds {str(names)[:200]}"
        # The other entries are validated against the plan.
        if not self.entries or self.entries[0].name != PLAN_ENTRY:
            return f"it does not begin with {PLAN_ENTRY}"
        most = max(UNPACKED, SHRUNK * self.path.stat().st_size)
        if sum(entry.bytes for entry in self.entries) > most:
            return f"it would unpack to more than the {most:,} bytes that an archive of its size can"
        return ""

    def contents(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the files in the order of the archive, each checked against its hash.

        The files of one result come together as (folder, {name: content}); every other file comes alone as
        ("", {path: content}).
        """
        reader = _Reader(self.path)
        reader.member(LEDGER, None)
        for _, group in groupby(self.entries, lambda entry: entry.folder or entry.name):
            folder, files = "", {}
            for entry in group:
                folder, content = entry.folder, reader.member(entry.name, entry.bytes)
                if sha256(content).hexdigest() != entry.sha256:
                    raise _refusal(self.path, f"{entry.name} is not what was packed")
                files[entry.name.removeprefix(f"{folder}/")] = content
            yield folder, files
        reader.end()


class _Reader:
    """Reads the members of an archive sequentially, from the beginning."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self.path = path
        if not path.is_file():
            raise SpecError(f"there is no file {path}; type one that biphase ledger pack has written")
        if not _begins_as_archive(path):
            raise _refusal(path, "it does not begin as one")
        self.stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")

    def member(self, name: str, size: int | None) -> bytes:
        """Return the content of the next member, which must be a regular file of this name and size."""
        try:
            info = tarfile.TarInfo.frombuf(self._read(BLOCK), "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as wrong:
            raise _refusal(self.path, f"{name} is missing, there is no file ({one_line(wrong)})") from None
        if info.name != name or info.type != tarfile.REGTYPE:
            what = "" if info.type == tarfile.REGTYPE else "something that is no plain file, "
            raise _refusal(self.path, f"there should be {name}, and there is {what}{info.name[:200]!r}")
        if info.size != size and (size is not None or info.size > LARGEST_LISTING):
            raise _refusal(self.path, f"{name} has {info.size:,} bytes")
        content = self._read(info.size)
        self._read(-info.size % BLOCK)
        return content

    def end(self) -> None:
        # Tools pad the tar to a full record.
        rest = self._read(2 * BLOCK) + self._read(tarfile.RECORDSIZE, whole=False)
        if any(rest) or self._read(1, whole=False):
            raise _refusal(self.path, "there is more in it than it says")

    def _read(self, size: int, *, whole: bool = True) -> bytes:
        content = bytearray()
        while len(content) < size:
            try:
                part = self.stream.read(size - len(content))
            except OSError as wrong:
                raise _refusal(self.path, f"it is cut short or damaged ({one_line(wrong)})") from None
            if not part:
                if whole:
                    raise _refusal(self.path, "it is cut short")
                break
            content += part
        return bytes(content)


# ---------------------------------------------------------------- pack
# An archive holds everything that a report elsewhere needs, but no weights: published results only, each checked
# against its manifest. Damaged results are left out and listed. Failures are not packed: they describe this machine,
# not the study.


@dataclass
class PackSummary:
    """Counts of what went into an archive, and what was left out."""

    study: str
    scores: int = 0
    scores_planned: int = 0
    jobs: int = 0
    jobs_planned: int = 0
    corpora: int = 0
    bytes: int = 0  # size of the archive
    unpacked: int = 0
    left_out: list[str] = field(default_factory=list)  # one reason per result


def pack(
    plan: Plan,
    store: Store,
    identities: Identities,
    path: Path,
    *,
    results: Collection[str] | None = None,  # keys of the models to pack; None: all
    predictions: bool = True,
) -> PackSummary:
    """Write what the store holds of a plan, or of some of its results, into the archive `path`.

    With `predictions=False`, the values by example stay: a report needs them, and predictions take four times as much
    space.
    """
    packed = PackSummary(plan.study.name)
    path_jobs = plan.needed_for(results or ())
    jobs = [key for key in plan.jobs if results is None or key in path_jobs]
    entries = [
        ArchiveEntry.of(PLAN_ENTRY, as_json(plan.to_json())),
        ArchiveEntry.of(FINGERPRINTS, as_json(fingerprints_of(plan.study, identities))),
        *_names(plan, store),
    ]

    def add(place: Path, kind: str) -> bool:
        files = _result(store, place, kind, packed, predictions=predictions)
        entries.extend(files)
        return bool(files)

    read = dict.fromkeys(corpus for job in plan.jobs.values() for corpus in sources_of(job.run))
    for key in dict.fromkeys(map(identities.data, read)):
        packed.corpora += add(store.shards / key, "metadata/shards")
    for key in jobs:
        packed.jobs_planned += 1
        packed.jobs += add(store.checkpoints / key, "metadata/checkpoints")
    for grid in tuning_grids(plan, screened_in(store), results):
        # Of screening trials only the scores: reported trials are valid in an archive that holds all of these.
        screened = [add(store.trials / tuning.trials[0].key, "metadata/trials") for tuning in grid.screening]
        packed.scores_planned += sum(len(tuning.trials) for tuning in grid.tunings)
        packed.scores_planned += grid.pending * len(grid.scored)
        packed.scores += sum(screened)
        for trial in (trial for tuning in grid.reported for trial in tuning.trials if all(screened)):
            kind = "trials" if store.has(store.trials / trial.key) else "metadata/trials"
            packed.scores += add(store.trials / trial.key, kind)
    if not packed.scores and not packed.jobs:
        raise SpecError(
            f"nothing of {packed.study} is in {store.root} yet; compute some of it: biphase run STUDY"
        )
    packed.bytes = write_archive(path, packed.study, entries)
    packed.unpacked = sum(entry.bytes for entry in entries)
    return packed


def _names(plan: Plan, store: Store) -> Iterable[ArchiveEntry]:
    """Yield the pins of hub models and the links of corpora read from a folder; the folder's path is not included."""
    if pins := pins_of(plan.study, store):
        yield ArchiveEntry.of(PINS, as_json(pins))
    linked = {
        link_path(corpus, store).name: corpus
        for corpus in corpora_of(plan.study)
        if corpus.hub and read_link(corpus, store)
    }
    for name, corpus in sorted(linked.items()):
        fingerprint = corpus_fingerprint(corpus, store)  # the plan's, since the folder may have changed
        link = {"source": corpus.source, "heldout": corpus.heldout, "fingerprint": fingerprint}
        yield ArchiveEntry.of(f"corpora/{name}", as_json(link))


def _result(
    store: Store, place: Path, kind: str, packed: PackSummary, *, predictions: bool
) -> list[ArchiveEntry]:
    """Return the packable files of a result; empty if it is absent or damaged (see `left_out`)."""
    if not store.knows(place):
        packed.left_out += [fault] if (fault := store.fault(place)) else []
        return []
    source, folder = store.readable(place), f"{kind}/{place.name}"
    try:
        entries = verify(source, contents=False)
        optional = OPTIONAL.get(kind, ()) if predictions else ()  # predictions are the only optional file
        names = [*FOLDERS[kind], *(name for name in optional if name in entries)]
        for name in names:
            if entries[name]["bytes"] > (most := LARGEST.get(name, LARGEST_OTHER)):
                raise StoreError(f"{name} has more than {most:,} bytes")
        files = {name: read_verified(source, name) for name in names}
        Validator(packed.study).result(folder, files)  # do not pack what `check` would refuse
    except WRONG as wrong:
        packed.left_out.append(f"{folder}: {one_line(wrong)}")
        return []
    return [
        ArchiveEntry.of(f"{folder}/{name}", content, lambda name=name: read_verified(source, name))
        for name, content in files.items()
    ]


# ---------------------------------------------------------------- validate
# An archive may contain results of its own study only. Its plan is computed again from the study it carries, and every
# key in it (of a checkpoint, trial or corpus) must be in that plan. Metadata is checked by the same schema
# that readers use (`biphase.metadata`), and sizes against what such a plan can produce. Nothing is written here.


TRIALS = 1_000_000  # most fine-tunings that one study may plan
# Size limit of metrics.jsonl: bytes per line, and lines allowed beyond one per step.
LINE_BYTES, SPARE_LINES = 1_000, 100
HELDOUT_LINES = 500_000  # limit for a whole archive, since `status` parses all of them


class Validator:
    """Takes the files of one archive in order and raises an error for anything that biphase would not have written.

    Call `result` for each result folder, `loose` for every other file, and `finish` at the end.
    """

    def __init__(self, study: str) -> None:
        self.name = study
        self.plan: dict[str, Any] = {}  # plan.json as it is in the archive
        self.fingerprints: dict[str, dict[str, str]] = {}
        self.jobs: dict[str, tuple[int, int]] = {}  # key → steps from the root, bytes of metrics.jsonl
        self.trials: dict[str, dict[str, Any]] = {}
        self.screened: dict[str, float] = {}  # validation scores of screening trials
        self.corpora: dict[str, Corpus] = {}  # by the key of their shards
        self.heldout = 0

    def result(self, folder: str, files: dict[str, bytes]) -> None:
        kind, key = folder.split("/")[-2:]
        if kind == "trials":
            about = metadata.check_trial(json.loads(files[TRIAL]), key)
            if VALUES in files:
                metadata.check_values(VALUES, files[VALUES], about)
            if PREDICTIONS in files:  # checked for its format only; no command reads it
                metadata.check_arrays(PREDICTIONS, files[PREDICTIONS])
            self.trials[key] = {name: about.get(name) for name in ("model", "lr", "seed", "metric", "share")}
            if "share" in about:
                self.screened[key] = about["scores"]["validation"][about["metric"]]
        elif kind == "checkpoints":
            about = metadata.check_checkpoint(json.loads(files[CHECKPOINT]), key)
            _need(isinstance(decode(about["run"]), Pretrain), "it has no run")
            last = about["origin_step"] + about["progress"]["step"]
            self.jobs[key] = last, len(files[LINES])
            for text in io.BytesIO(files[LINES]):
                line = metadata.check_line(json.loads(text))
                _need(line["step"] <= last, f"{LINES} goes on to step {line['step']}, beyond {last}")
                self.heldout += "heldout" in line
            _need(self.heldout <= HELDOUT_LINES, f"{LINES} has more than {HELDOUT_LINES:,} held-out losses")
        else:
            self.corpora[key] = decode(metadata.check_card(json.loads(files[CARD]), key)["corpus"])

    def loose(self, name: str, content: bytes) -> None:
        about = json.loads(content)
        as_json(about)  # refuses NaN and excessive nesting, which could not be written again
        if name == PLAN_ENTRY:
            study = decode(about["study"])
            _need(isinstance(study, Study) and study.name == self.name, f"{name} is of another study")
            self.study, self.plan = study, about
        elif name == FINGERPRINTS:
            kinds = set(about) | {"data"}  # archives of earlier versions have no fingerprints of corpora
            _need(kinds == {"task", "hub", "reads", "data"}, f"{name} says something else")
            keys = [key for fingerprints in about.values() for pair in fingerprints.items() for key in pair]
            # A model's tokenizer may have no fingerprint (an empty string).
            _need(all(is_key(key) or key == "" for key in keys), f"{name} has no keys")
            self.fingerprints = about
        elif name == PINS:
            _need(all(COMMIT.fullmatch(commit) for commit in about.values()), f"{name} pins to no commit")
            others = set(about) - {model.source for model in hubs_of(self.study) if not model.local}
            _need(not others, f"{name} pins {min(others, default='')}, which the study does not start from")
        elif not _SKIPPED.fullmatch(name):
            hub = [corpus for corpus in corpora_of(self.study) if corpus.hub]
            linked = {f"corpora/{link_path(corpus, Store('')).name}": corpus for corpus in hub}
            _need(name in linked, f"{name} links a corpus that the study does not read")
            corpus = linked[name]
            link = {"source": corpus.source, "heldout": corpus.heldout, "fingerprint": about["fingerprint"]}
            _need(about == link and is_key(about["fingerprint"]), f"{name} is no link")

    def finish(self) -> Plan:
        """Compute the plan from the archive's study, check all keys seen so far against it, and return it."""
        plan = self._planned()
        keys = {job["key"]: job["parent"] for job in self.plan["jobs"]}
        same = keys == {job.key: job.parent for job in plan.jobs.values()}
        _need(same and self.plan["results"] == plan.results, f"{PLAN_ENTRY} has other keys than its study")
        grids = tuning_grids(plan, lambda trial: self.screened.get(trial.key))
        tunings = [tuning for grid in grids for tuning in grid.tunings]
        trials = {trial.key: (tuning, trial) for tuning in tunings for trial in tuning.trials}
        for what, found, planned in (
            ("checkpoint", self.jobs, plan.jobs),
            ("trial", self.trials, trials),
            ("corpus", self.corpora, map(self._data, corpora_of(self.study))),
        ):
            others = set(found) - set(planned)
            _need(not others, f"the {what} {min(others, default='')} is none of the study's")
        for key, (step, size) in self.jobs.items():
            _need(step == plan.jobs[key].span[1], f"the checkpoint {key} is at step {step}")
            most = LINE_BYTES * (step + SPARE_LINES)
            _need(size <= most, f"{LINES} of {key} has {size:,} bytes for {step:,} steps")
        for key, about in self.trials.items():
            tuning, trial = trials[key]
            expected = {"model": tuning.model, "lr": tuning.lr, "seed": tuning.seed, "metric": trial.metric}
            expected["share"] = tuning.share if tuning.share < 1 else None
            _need(about == expected, f"the trial {key} is of another model, learning rate, seed or metric")
        return plan

    def _planned(self) -> Plan:
        spec = self.study.finetune
        seen = {kind: set(keys) for kind, keys in self.fingerprints.items()}
        local = {content_key(model) for model in hubs_of(self.study) if model.local}
        tasks = {content_key(task) for task in datasets_of(self.study)}
        own = {"task": tasks, "hub": local, "reads": local}
        own |= {"data": {content_key(corpus) for corpus in corpora_of(self.study)}} if "data" in seen else {}
        _need(seen == own, f"{FINGERPRINTS} is not of this study's tasks, models and corpora")
        models = sum(len(run.keep) + 1 for run in self.study.runs)
        seeds = len(spec.seeds) + (len(spec.discard.seeds) if spec.discard else 0) if spec else 0
        tunings = models * len(spec.tasks) * len(spec.lrs) * seeds if spec else 0
        _need(tunings <= TRIALS, f"it plans more than {TRIALS:,} fine-tunings")
        known = self.fingerprints
        identities = Identities(
            data=self._data,
            hub=lambda model: known["hub"][content_key(model)] if model.local else hub_fingerprint(model),
            task=lambda task: known["task"][content_key(task)],
            reads=lambda model: known["reads"][content_key(model)] if model.local else "",
        )
        return make_plan(self.study, identities, str(self.plan.get("question", "")))

    def _data(self, corpus: Corpus) -> str:
        """Return the key of a corpus's shards, from fingerprints.json or else from a corpus card of the archive."""
        key = self.fingerprints.get("data", {}).get(content_key(corpus), "")
        key = key or next((key for key, packed in self.corpora.items() if packed == corpus), "")
        _need(key, f"it does not say which text the corpus {corpus.name!r} is")
        return key


def _need(condition: Any, why: str) -> None:
    if not condition:
        raise StoreError(why)


def check(path: Path) -> tuple[Archive, Plan]:
    """Read and validate a whole archive without writing anything; return it with the plan computed from its study.

    Raises a `StoreError` if it is not valid.
    """
    archive = Archive.open(path)
    validator = Validator(archive.study)
    for folder, files in archive.contents():
        with _refusing(path, folder or "study"):
            if folder:
                validator.result(folder, files)
            else:
                validator.loose(*files.popitem())
    with _refusing(path, "what is in it"):
        return archive, validator.finish()


@contextlib.contextmanager
def _refusing(path: Path, where: str) -> Generator[None]:
    try:
        yield
    except WRONG as wrong:
        why = one_line(wrong)[:400]
        raise _refusal(path, f"{where} is not as this version of biphase writes it ({why})") from None


# ---------------------------------------------------------------- merge
# An archive is read twice: `check` validates all of it without writing, then `merge` publishes its results one by
# one with the store's atomic rename. So a refused archive changes nothing, a merge that is killed leaves complete
# results only, and repeating it continues. Results already in the store are never replaced: if their content
# differs (two machines computed the same job), they are reported and kept.


KINDS = {"trials": "scores", "checkpoints": "checkpoints", "shards": "corpora"}


@dataclass
class Merged:
    """Counts of what a merge added, and what it left unchanged."""

    study: str
    plan: Path
    added: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS.values(), 0))
    already: int = 0  # results already in the store with the same content
    bytes: int = 0  # added to the store
    kept: list[str] = field(default_factory=list)  # what the store has with other content and keeps


def merge(checked: tuple[Archive, Plan], store: Store) -> Merged:
    """Publish what the store does not have yet.

    The plan that is written is the one that `check` computed, not the archive's own file.
    """
    archive, plan = checked
    merged = Merged(archive.study, store.studies / archive.study / PLAN)
    if not merged.plan.is_file():
        merged.plan.parent.mkdir(parents=True, exist_ok=True)
        write_json(merged.plan, with_checksum(plan.to_json()))
    elif read_checked(merged.plan).get("study") != encode(plan.study):
        merged.kept.append(
            f"studies/{merged.study}/{PLAN}: another version of the study; give biphase report the study's file"
        )
    for folder, files in archive.contents():
        if folder:
            _merge_result(folder, files, store, merged)
        else:
            _merge_loose(*files.popitem(), store, merged)
    return merged


def _merge_result(folder: str, files: dict[str, bytes], store: Store, merged: Merged) -> None:
    kind, key = folder.split("/")[-2:]
    place = store.root / kind / key
    metadata_only = folder.startswith("metadata/")
    try:
        if fault := store.fault(place):
            raise StoreError(fault)
        if store.knows(place):
            here = verify(store.readable(place), contents=False)
            hashes = {name: sha256(content).hexdigest() for name, content in files.items()}
            if any(name in here and here[name]["sha256"] != hashed for name, hashed in hashes.items()):
                how = "computed twice"
                if kind == "trials":
                    same = read_trial(store, key)["scores"] == json.loads(files[TRIAL])["scores"]
                    how += ", with the same scores" if same else ", with other scores"
                merged.kept.append(f"{kind}/{key[:8]}: {how}")
                return
            if metadata_only or store.has(place):
                merged.already += 1
                return
    except StoreError as wrong:
        merged.kept.append(f"{kind}/{key[:8]}: damaged here, and left as it is ({one_line(wrong)})")
        return
    with store.attempt(f"merge-{key}") as built:
        for name, content in files.items():
            (built / name).write_bytes(content)
        if publish(built, store.metadata_of(place) if metadata_only else place):
            merged.added[KINDS[kind]] += 1
            merged.bytes += sum(len(content) for content in files.values())
        else:  # another process published it first
            merged.already += 1


def _merge_loose(name: str, content: bytes, store: Store, merged: Merged) -> None:
    """Merge fingerprints, pins and corpus links; the plan is merged already."""
    about = json.loads(content)
    if name == FINGERPRINTS:
        remember_fingerprints(merged.study, about, store)
    elif name == PINS:
        for source, commit in about.items():
            pinned = remember(source, commit, store)
            if pinned != commit:
                merged.kept.append(f"{PINS}: {source} is pinned to {pinned[:8]}, and to {commit[:8]} there")
    elif name.startswith("corpora/"):
        _merge_link(store.root / name, about, store, merged)


def _merge_link(path: Path, link: dict[str, Any], store: Store, merged: Merged) -> None:
    """Add the link of a hub corpus, only if the store has no other text for it.

    A link decides which text a corpus is, and so the keys of everything trained on it; adding one must not change
    the keys of results or plans that are already in the store.
    """
    linked = link["source"], link["heldout"]
    here = {
        card["fingerprint"]
        for card in cards(store)
        if (card["corpus"].get("source"), card["corpus"].get("heldout")) == linked
    }
    why = ""
    if here - {link["fingerprint"]}:
        why = "other text here than there"
    elif path.is_file():
        same = read_checked(path).get("fingerprint") == link["fingerprint"]
        why = "" if same else "linked to another folder here"
    elif reader := _reader_here(path, store, merged.study):
        why = f"{reader} reads it from the hub"
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, with_checksum(link))
    if why:
        merged.kept.append(f"{link['source']}: {why}; merge into a store of its own")


def _reader_here(link: Path, store: Store, but: str) -> str:
    """Return another study of this store whose plan reads the linked corpus, as "studies/<name>", or ""."""
    for path in sorted(store.studies.glob(f"*/{PLAN}")):
        with contextlib.suppress(*WRONG):  # commands that read that plan report its damage
            corpora = corpora_of(decode(read_checked(path)["study"])) if path.parent.name != but else ()
            if link in {link_path(corpus, store) for corpus in corpora}:
                return f"studies/{path.parent.name}"
    return ""
