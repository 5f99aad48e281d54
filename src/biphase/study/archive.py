"""Archives: the results of one study in one file, to be copied into another store.

`pack` writes an archive of what a store holds of a study; `check` reads an archive and validates all of it without
writing; `merge` publishes a checked archive into a store. Layout of an archive:

    ledger.json                     first: the study's name, and every other file with its size and SHA-256
    study/                          plan.json, fingerprints.json, failures/<key>.json
    pins.json  corpora/link-*.json  commits of hub models; fingerprints of corpora read from a folder
    metadata/checkpoints/<key>/     checkpoint.json, metrics.jsonl: a checkpoint without weights and optimizer state
    metadata/shards/<key>/          card.json: a corpus without its tokens
    metadata/trials/<key>/          trial.json: scores without the per-example values
    trials/<key>/                   trial.json, values.safetensors, predictions.safetensors if it exists

The file is a zstandard-compressed tar, so standard tools can list it, and the same results give the same bytes.

An archive is untrusted input, so reading is strict. It may contain regular files only, with the names above, in the
order and with the sizes and hashes that ledger.json lists; links, devices, folders and extended headers are refused.
The unpacked size is checked against a limit before anything else is read. The tar headers are parsed one by one instead
of by `tarfile.open`, because that reader follows extended headers of any size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from biphase.data.corpus import cards, corpus_fingerprint, link_path, read_link
from biphase.errors import SpecError, StoreError, one_line
from biphase.keys import Identities
from biphase.metadata import (
    CARD,
    CHECKPOINT,
    LINES,
    PARTS,
    ROUNDING,
    TRIAL,
    WRONG,
    check_card,
    check_checkpoint,
    check_line,
    check_trial,
)
from biphase.presets import corpus_of
from biphase.records import KEY_PATTERN, content_key, decode, encode, is_key
from biphase.specs import Corpus, Hub, Pretrain, Study, Task
from biphase.specs.claims import RANGES
from biphase.store import Store, publish, read_checked, read_verified, verify, with_checksum, write_json
from biphase.study import ledger
from biphase.study.ledger import PREDICTIONS, VALUES, finetunings, finished, read_trial
from biphase.study.load import COMMIT, hubs_of, pins_of, remember
from biphase.study.plan import (
    PLAN,
    Plan,
    corpora_of,
    fingerprints_of,
    hub_fingerprint,
    make_plan,
    remember_fingerprints,
    trained_runs,
)

LEDGER = "ledger.json"
FORMAT = 2
PLAN_ENTRY, FINGERPRINTS, PINS = "study/plan.json", "study/fingerprints.json", "pins.json"
# Files that a result's folder in an archive must hold (`FOLDERS`) and may hold in addition (`OPTIONAL`).
FOLDERS = {
    "metadata/checkpoints": ("checkpoint.json", "metrics.jsonl"),
    "metadata/shards": ("card.json",),
    "metadata/trials": ("trial.json",),
    "trials": ("trial.json", "values.safetensors"),
}
OPTIONAL = {"trials": ("predictions.safetensors",)}
_LOOSE = re.compile(
    rf"{re.escape(PLAN_ENTRY)}|{re.escape(FINGERPRINTS)}|pins\.json|study/failures/{KEY_PATTERN}\.json|corpora/link-{KEY_PATTERN}\.json"
)
_FOLDER = re.compile(rf"({'|'.join(FOLDERS)})/({KEY_PATTERN})")

BLOCK = 512  # bytes; the block size of a tar
LEVEL, FRAME = 12, 2**25  # zstandard level; bytes that are compressed into one frame
MAGIC = b"\x28\xb5\x2f\xfd"  # the first bytes of a zstandard file
LARGEST_LISTING = 2**25
# An archive may unpack to `UNPACKED` bytes or `SHRUNK` times its size, whichever is larger. Real archives compress
# 4 to 22 times (measured), a decompression bomb thousands of times.
UNPACKED, SHRUNK = 2**26, 100
# Largest unpacked size in bytes by file name: these files are read whole, so they must fit into memory.
LARGEST = {
    "plan.json": 2**24,
    "card.json": 2**22,
    "trial.json": 2**22,
    "metrics.jsonl": 2**28,
    "values.safetensors": 2**28,
    "predictions.safetensors": 2**28,
}
LARGEST_OTHER = 2**20


@dataclass(frozen=True)
class ArchiveEntry:
    """One file of an archive: its name, size and hash."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class EntrySource:
    """A file to be packed, and a function that reads its content again when it is written."""

    item: ArchiveEntry
    read: Callable[[], bytes]

    @classmethod
    def of(cls, name: str, content: bytes, read: Callable[[], bytes] | None = None) -> EntrySource:
        """Make a source for `content`; without `read`, the content is kept in memory."""
        item = ArchiveEntry(name, len(content), hashlib.sha256(content).hexdigest())
        return cls(item, read or (lambda: content))


def as_json(value: Any) -> bytes:
    """Serialize a value to JSON as the store does."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


# ---------------------------------------------------------------- write


def write_archive(path: Path, study: str, sources: list[EntrySource]) -> int:
    """Write an archive atomically and return its size in bytes."""
    _refuse_taken(path)
    listing = {one.item.name: {"bytes": one.item.bytes, "sha256": one.item.sha256} for one in sources}
    first = EntrySource.of(LEDGER, as_json({"ledger": FORMAT, "study": study, "files": listing}))
    if first.item.bytes > LARGEST_LISTING:
        raise SpecError(
            f"{len(sources):,} files are more than one ledger may list; pack some results at a time: --only PATTERN"
        )
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with draft.open("wb") as file:
            frames = _Frames(file)
            for one in (first, *sources):
                content = one.read()
                if EntrySource.of(one.item.name, content).item != one.item:
                    raise StoreError(f"{one.item.name} changed while it was packed; type the command again")
                info = tarfile.TarInfo(one.item.name)
                info.size = len(content)
                frames.add(info.tobuf(tarfile.USTAR_FORMAT, "utf-8") + content + bytes(-len(content) % BLOCK))
            frames.add(bytes(2 * BLOCK))
            frames.end()
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as wrong:
        raise SpecError(f"{path}: {wrong.strerror or wrong}; free room there, or name another file") from None
    finally:
        draft.unlink(missing_ok=True)  # exists only after an error
    return path.stat().st_size


def _refuse_taken(path: Path) -> None:
    """Raise a `SpecError` unless `path` is free or holds an older archive, which is replaced."""
    if not path.parent.is_dir():
        raise SpecError(f"{path.parent} is no folder; make it, or name another file")
    if path.exists() and (not path.is_file() or _beginning(path) != MAGIC):
        raise SpecError(f"{path} is there already and is no packed ledger; name another file")


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC))
    except OSError as wrong:
        raise SpecError(f"{path} cannot be read ({wrong.strerror}); name another file") from None


class _Frames:
    """Writes a zstandard stream in frames of at least `FRAME` bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        from pyarrow import Codec

        self.codec = Codec("zstd", compression_level=LEVEL)
        self.file, self.waiting = file, bytearray()

    def add(self, content: bytes) -> None:
        self.waiting += content
        if len(self.waiting) >= FRAME:
            self.end()

    def end(self) -> None:
        if self.waiting:
            self.file.write(self.codec.compress(bytes(self.waiting), asbytes=True))
            self.waiting.clear()


# ---------------------------------------------------------------- read


@dataclass(frozen=True)
class Archive:
    """An archive whose ledger.json was read and validated; the other files are checked when they are read."""

    path: Path
    study: str
    items: tuple[ArchiveEntry, ...]

    @classmethod
    def open(cls, path: Path) -> Archive:
        reader = _Reader(path)
        said = reader.parsed(reader.member(LEDGER, None))
        try:
            if said["ledger"] != FORMAT:
                raise reader.refusal(
                    f"its format is {str(said['ledger'])[:20]!r}, and this version reads {FORMAT}"
                )
            items = tuple(
                ArchiveEntry(name, one["bytes"], str(one["sha256"])) for name, one in said["files"].items()
            )
            if any(type(item.bytes) is not int for item in items):
                raise TypeError
            archive = cls(path, str(said["study"]), items)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise reader.refusal(f"its {LEDGER} does not say what is in it") from None
        archive._judge(reader)
        return archive

    @property
    def unpacked(self) -> int:
        """The total unpacked size of the listed files in bytes."""
        return sum(item.bytes for item in self.items)

    def _judge(self, reader: _Reader) -> None:
        """Refuse names that do not belong in an archive, incomplete folders, and sizes above the limits."""
        folders: dict[str, list[str]] = {}
        before = ""
        for item in self.items:
            folder, _, name = item.name.rpartition("/")
            if _FOLDER.fullmatch(folder):
                if folder in folders and folder != before:
                    raise reader.refusal(f"the files of {folder} are not together")
                folders.setdefault(folder, []).append(name)
            elif not _LOOSE.fullmatch(item.name):
                raise reader.refusal(f"{item.name[:200]!r} has no place in a ledger")
            if item.bytes < 0:
                raise reader.refusal(f"{item.name[:200]!r} has less than 0 bytes")
            most = LARGEST.get(name, LARGEST_OTHER)
            if item.bytes > most:
                raise reader.refusal(f"{item.name[:200]!r} would unpack to more than {most:,} bytes")
            before = folder
        for folder, names in folders.items():
            kind = folder.rpartition("/")[0]
            if tuple(sorted(set(names) - set(OPTIONAL.get(kind, ())))) != FOLDERS[kind]:
                raise reader.refusal(f"{folder} holds {str(names)[:200]}")
        if PLAN_ENTRY not in {item.name for item in self.items}:
            raise reader.refusal(f"it has no {PLAN_ENTRY}")
        if self.items[0].name != PLAN_ENTRY:  # the other entries are validated against the plan
            raise reader.refusal(f"it does not begin with {PLAN_ENTRY}")
        most = max(UNPACKED, SHRUNK * self.path.stat().st_size)
        if self.unpacked > most:
            raise reader.refusal(
                f"it would unpack to more than the {most:,} bytes that a ledger of its size can"
            )

    def contents(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the files in the order of the archive, each checked against its hash.

        The files of one result come together as (folder, {name: content}); every other file comes alone as
        ("", {path: content}).
        """
        reader = _Reader(self.path)
        reader.member(LEDGER, None)
        at, together = "", dict[str, bytes]()
        for item in self.items:
            content = reader.member(item.name, item.bytes)
            if hashlib.sha256(content).hexdigest() != item.sha256:
                raise reader.refusal(f"{item.name} is not what was packed")
            folder, _, name = item.name.rpartition("/")
            result = folder if _FOLDER.fullmatch(folder) else ""
            if at and result != at:
                yield at, together
                together = {}
            if result:
                together[name] = content
            else:
                yield "", {item.name: content}
            at = result
        if at:
            yield at, together
        reader.end()


class _Reader:
    """Reads the members of an archive sequentially, from the beginning."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self.path = path
        if not path.is_file():
            raise SpecError(f"there is no file {path}; type one that biphase ledger pack has written")
        if _beginning(path) != MAGIC:
            raise self.refusal("it does not begin as one")
        self.stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")

    def refusal(self, why: str) -> StoreError:
        return StoreError(
            f"{self.path} is no sound ledger: {why}; nothing was taken from it: pack it again, or copy it again"
        )

    def parsed(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise self.refusal(f"its {LEDGER} is no JSON") from None

    def member(self, name: str, size: int | None) -> bytes:
        """Return the content of the next member, which must be a regular file of this name and size."""
        header = self._read(BLOCK)
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as wrong:
            raise self.refusal(f"there should be {name}, and there is no file ({one_line(wrong)})") from None
        if info.name != name or info.type != tarfile.REGTYPE:
            what = "" if info.type == tarfile.REGTYPE else "something that is no plain file, "
            raise self.refusal(f"there should be {name}, and there is {what}{info.name[:200]!r}")
        if info.size != size and (size is not None or info.size > LARGEST_LISTING):
            raise self.refusal(f"{name} has {info.size:,} bytes")
        content = self._read(info.size)
        self._read(-info.size % BLOCK)
        return content

    def end(self) -> None:
        # Some tools pad the tar to a full record.
        rest = self._read(2 * BLOCK) + self._read(tarfile.RECORDSIZE, whole=False)
        if any(rest) or self._read(1, whole=False):
            raise self.refusal("there is more in it than it says")

    def _read(self, size: int, *, whole: bool = True) -> bytes:
        parts, left = [], size
        while left:
            try:
                part = self.stream.read(left)
            except OSError as wrong:
                raise self.refusal(f"it is cut short or damaged ({one_line(wrong)})") from None
            if not part:
                if whole:
                    raise self.refusal("it is cut short")
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


# ---------------------------------------------------------------- pack
# An archive holds everything that a report elsewhere needs, but no weights: published results only, each checked
# against its manifest. Damaged results are left out and listed. Tracebacks are not packed: they describe this
# machine, not the study.


@dataclass
class PackSummary:
    """Counts of what went into an archive, and what was left out."""

    study: str
    scores: int = 0
    scores_planned: int = 0
    bare: int = 0  # scores without per-example values
    jobs: int = 0
    jobs_planned: int = 0
    corpora: int = 0
    failures: int = 0
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
    examples: bool = True,
) -> PackSummary:
    """Write what the store holds of a plan, or of some of its results, into the archive `path`.

    With `examples=False`, trials are packed as metadata only, without per-example values and predictions.
    """
    packed = PackSummary(plan.study.name)
    sources = [
        EntrySource.of(PLAN_ENTRY, as_json(plan.to_json())),
        EntrySource.of(FINGERPRINTS, as_json(fingerprints_of(plan.study, identities))),
        *_names(plan, store),
        *_failures(plan, store, results, packed),
        *_corpora(plan, store, identities, packed),
        *_jobs(plan, store, results, packed),
        *_trials(plan, store, results, packed, examples=examples),
    ]
    if not packed.scores and not packed.jobs:
        raise SpecError(
            f"nothing of {packed.study} is in {store.root} yet; compute some of it: biphase run STUDY"
        )
    packed.bytes = write_archive(path, packed.study, sources)
    packed.unpacked = sum(one.item.bytes for one in sources)
    return packed


def _names(plan: Plan, store: Store) -> Iterable[EntrySource]:
    """Yield the pins of hub models and the links of corpora read from a folder; the folder's path is not included."""
    pins = pins_of(plan.study, store)
    if pins:
        yield EntrySource.of(PINS, as_json(pins))
    linked = {
        link_path(corpus, store).name: {
            "source": corpus.source,
            "heldout": corpus.heldout,
            # The plan's fingerprint, since the folder may have changed.
            "fingerprint": corpus_fingerprint(corpus, store),
        }
        for corpus in corpora_of(plan.study)
        if corpus.hub and read_link(corpus, store)
    }
    for name, told in sorted(linked.items()):
        yield EntrySource.of(f"corpora/{name}", as_json(told))


def _failures(
    plan: Plan, store: Store, results: Collection[str] | None, packed: PackSummary
) -> Iterable[EntrySource]:
    """Yield the failure records of jobs that are not done."""
    done = ledger.done_keys(plan, store)
    left = {key for key in _job_keys(plan, results) if key not in done}
    left |= {one.key for one in finetunings(plan, results) if not finished(one, store)}
    for key, noted in sorted(ledger.failures(plan, store).items()):
        if key in left:
            packed.failures += 1
            kept = {name: str(noted.get(name, "")) for name in ("key", "error", "at")}
            yield EntrySource.of(f"study/failures/{key}.json", as_json(kept))


def _job_keys(plan: Plan, results: Collection[str] | None) -> list[str]:
    if results is None:
        return list(plan.jobs)
    wanted = {job.key for key in results for job in plan.path(key)}
    return [key for key in plan.jobs if key in wanted]


def _corpora(plan: Plan, store: Store, identities: Identities, packed: PackSummary) -> Iterable[EntrySource]:
    runs = {corpus_of(job.run): job.run for job in plan.jobs.values()}
    for key in dict.fromkeys(identities.data(run) for run in runs.values()):
        made = _folder(store, store.shards / key, "metadata/shards", packed)
        packed.corpora += bool(made)
        yield from made


def _jobs(
    plan: Plan, store: Store, results: Collection[str] | None, packed: PackSummary
) -> Iterable[EntrySource]:
    for key in _job_keys(plan, results):
        made = _folder(store, store.checkpoints / key, "metadata/checkpoints", packed)
        packed.jobs_planned += 1
        packed.jobs += bool(made)
        yield from made


def _trials(
    plan: Plan, store: Store, results: Collection[str] | None, packed: PackSummary, *, examples: bool
) -> Iterable[EntrySource]:
    for training in finetunings(plan, results):
        for trial in training.trials:
            place = store.trials / trial.key
            whole = examples and store.has(place)
            made = _folder(store, place, "trials" if whole else "metadata/trials", packed)
            packed.scores_planned += 1
            packed.scores += bool(made)
            packed.bare += bool(made) and not whole
            yield from made


def _folder(store: Store, place: Path, kind: str, packed: PackSummary) -> list[EntrySource]:
    """Return the packable files of a result; empty if it is absent or damaged (see `left_out`)."""
    if not store.knows(place):
        packed.left_out += [fault] if (fault := store.fault(place)) else []
        return []
    told, folder = store.readable(place), f"{kind}/{place.name}"
    try:
        there = verify(told, contents=False)
        names = [*FOLDERS[kind], *(name for name in OPTIONAL.get(kind, ()) if name in there)]
        for name in names:
            if there[name]["bytes"] > (most := LARGEST.get(name, LARGEST_OTHER)):
                raise StoreError(f"{name} has more than {most:,} bytes")
        files = {name: read_verified(told, name) for name in names}
        Validator(packed.study).result(folder, files)  # do not pack what `check` would refuse
    except WRONG as wrong:
        packed.left_out.append(f"{folder}: {one_line(wrong)}")
        return []
    return [
        EntrySource.of(f"{folder}/{name}", content, lambda name=name: read_verified(told, name))
        for name, content in files.items()
    ]


# ---------------------------------------------------------------- validate
# An archive may contain results of its own study only. Its plan is computed again from the study it carries, and every
# key in it (of a checkpoint, trial, corpus or failed job) must be in that plan. Metadata is checked by the same schema
# that readers use (`biphase.metadata`), and sizes against what such a plan can produce. Nothing is written here.


LINK = ("source", "heldout", "fingerprint")  # fields of a corpus link
FINGERPRINT_KINDS = {"task", "hub", "reads", "data"}  # fingerprints.json of earlier versions has no `data`
# Numeric types that are accepted: safetensors' name → numpy's.
NUMBERS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
MEAN = 1e-4  # tolerance between a score and the mean of its per-example values, which are rounded
COUNTS = "entity_counts"  # per example: correct, predicted and true entities
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
        self.said: dict[str, Any] = {}  # plan.json as it is in the archive
        self.fingerprints: dict[str, dict[str, str]] = {}
        self.jobs: dict[str, tuple[int, int]] = {}  # key → steps from the root, bytes of metrics.jsonl
        self.trials: dict[str, dict[str, Any]] = {}
        self.corpora: dict[str, Corpus] = {}  # by the key of their shards
        self.failed: set[str] = set()
        self.heldout = 0

    def result(self, folder: str, files: dict[str, bytes]) -> None:
        kind, at = folder.split("/")[-2:]
        if kind == "trials":
            about = check_trial(json.loads(files[TRIAL]), at)
            if VALUES in files:
                _check_values(files[VALUES], about)
            if PREDICTIONS in files:  # checked for its format only; no command reads it
                _arrays(PREDICTIONS, files[PREDICTIONS])
            self.trials[at] = {name: about[name] for name in ("model", "lr", "seed", "metric")}
        elif kind == "checkpoints":
            about = check_checkpoint(json.loads(files[CHECKPOINT]), at)
            _need(isinstance(decode(about["run"]), Pretrain), "it has no run")
            step = about["origin_step"] + about["progress"]["step"]
            self.jobs[at] = step, len(files[LINES])
            self._check_lines(files[LINES], step)
        else:
            self.corpora[at] = decode(check_card(json.loads(files[CARD]), at)["corpus"])

    def _check_lines(self, content: bytes, last: int) -> None:
        for text in io.BytesIO(content):
            line = check_line(json.loads(text))
            _need(line["step"] <= last, f"{LINES} goes on to step {line['step']}, and the state is at {last}")
            self.heldout += "heldout" in line
        _need(self.heldout <= HELDOUT_LINES, f"{LINES} has more than {HELDOUT_LINES:,} held-out losses")

    def loose(self, name: str, content: bytes) -> None:
        said = json.loads(content)
        as_json(said)  # refuses NaN and excessive nesting, which could not be written again
        if name == PLAN_ENTRY:
            made = decode(said["study"])
            _need(isinstance(made, Study) and made.name == self.name, f"{name} is of another study")
            self.study, self.said = made, said
        elif name == FINGERPRINTS:
            _need(
                FINGERPRINT_KINDS - {"data"} <= set(said) <= FINGERPRINT_KINDS, f"{name} says something else"
            )
            keys = [one for some in said.values() for pair in some.items() for one in pair]
            # A model's tokenizer may have no fingerprint (an empty string).
            _need(all(is_key(one) or one == "" for one in keys), f"{name} has no keys")
            self.fingerprints = said
        elif name == PINS:
            _need(all(COMMIT.fullmatch(commit) for commit in said.values()), f"{name} pins to no commit")
            other = set(said) - {model.source for model in hubs_of(self.study) if not model.local}
            _need(not other, f"{name} pins {min(other, default='')}, which the study does not start from")
        elif name.startswith("corpora/"):
            self._check_link(name, said)
        else:
            _need(said["key"] == Path(name).stem and isinstance(said["error"], str), f"{name} is no failure")
            self.failed.add(said["key"])

    def _check_link(self, name: str, said: dict[str, Any]) -> None:
        _need(set(LINK) == set(said), f"{name} is no link")
        _need(all(isinstance(one, str) for one in said.values()), f"{name} is no link")
        _need(is_key(said["fingerprint"]), f"{name} has no fingerprint")
        linked = content_key({"source": said["source"], "heldout": said["heldout"]})
        _need(Path(name).stem == f"link-{linked}", f"{name} links another corpus")
        own = {(corpus.source, corpus.heldout) for corpus in corpora_of(self.study) if corpus.hub}
        _need((said["source"], said["heldout"]) in own, f"{name} links a corpus that the study does not read")

    # ------------------------------------------------------------ checks against the plan

    def finish(self) -> Plan:
        """Compute the plan from the archive's study, check all keys seen so far against it, and return it."""
        plan = self._planned()
        keys = {job["key"]: job["parent"] for job in self.said["jobs"]}
        same = keys == {job.key: job.parent for job in plan.jobs.values()}
        _need(same and self.said["results"] == plan.results, f"{PLAN_ENTRY} has other keys than its study")
        every = {one.key: one for one in finetunings(plan)}
        trials = {trial.key: (one, trial.metric) for one in every.values() for trial in one.trials}
        for at, (step, size) in self.jobs.items():
            _need(at in plan.jobs, f"the state {at} is none of the study's")
            _need(step == plan.jobs[at].span[1], f"the state {at} is at step {step}")
            _need(
                size <= LINE_BYTES * (step + SPARE_LINES),
                f"{LINES} of {at} has {size:,} bytes for {step:,} steps",
            )
        for at, about in self.trials.items():
            _need(at in trials, f"the scores {at} are none of the study's")
            one, metric = trials[at]
            planned = {"model": one.model, "lr": one.lr, "seed": one.seed, "metric": metric}
            _need(about == planned, f"the scores {at} are of another model, learning rate, seed or metric")
        others = set(self.corpora) - {self._data(run) for run in trained_runs(self.study)}
        _need(not others, f"the corpus {min(others, default='')} is none of the study's")
        others = self.failed - set(plan.jobs) - set(every)
        _need(not others, f"the failure {min(others, default='')} is of no job of the study")
        return plan

    def _planned(self) -> Plan:
        tasks = self.study.finetune.tasks if self.study.finetune else ()
        told = {kind: set(some) for kind, some in self.fingerprints.items()}
        local = {content_key(model) for model in hubs_of(self.study) if model.local}
        own = {"task": {content_key(task) for task in tasks}, "hub": local, "reads": local}
        own |= {"data": {content_key(corpus) for corpus in corpora_of(self.study)}} if "data" in told else {}
        _need(told == own, f"{FINGERPRINTS} is not of this study's tasks, models and corpora")
        spec = self.study.finetune
        steps = sum(len(run.keep) + 1 for run in self.study.runs)
        _need(
            spec is None or steps * len(spec.tasks) * len(spec.lrs) * len(spec.seeds) <= TRIALS,
            f"it plans more than {TRIALS:,} fine-tunings",
        )
        identities = Identities(self._data, self._hub, self._task, self._reads)
        return make_plan(self.study, identities, str(self.said.get("question", "")))

    def _data(self, run: Pretrain) -> str:
        """Return the key of a run's shards, from fingerprints.json or else from a corpus card of the archive."""
        corpus = corpus_of(run)
        told = self.fingerprints.get("data", {}).get(content_key(corpus), "")
        found = told or next((at for at, one in self.corpora.items() if one == corpus), "")
        _need(found, f"it does not say which text the corpus {corpus.name!r} is")
        return found

    def _hub(self, model: Hub) -> str:
        return self.fingerprints["hub"][content_key(model)] if model.local else hub_fingerprint(model)

    def _reads(self, model: Hub) -> str:
        return self.fingerprints["reads"][content_key(model)] if model.local else ""

    def _task(self, task: Task) -> str:
        return self.fingerprints["task"][content_key(task)]


def _check_values(content: bytes, about: dict[str, Any]) -> None:
    """Check the per-example values of a trial.

    Each array must hold one finite number per example (three counts for entities), within the metric's range, and its
    mean must equal the score.
    """
    import numpy as np

    for name, array in _arrays(VALUES, content):
        part, _, metric = name.partition("/")
        examples = about["examples"][part]
        shape = [examples, 3] if metric == COUNTS else [examples]
        _need(list(array["shape"]) == shape, f"{VALUES}: {name!r} is {array['shape']} and should be {shape}")
        values = np.frombuffer(array["data"], NUMBERS[array["dtype"]]).astype(np.float64)
        _need(np.isfinite(values).all(), f"{VALUES}: {name!r} has numbers that are not finite")
        score = about["scores"][part].get(metric)
        if metric == COUNTS:
            _need((values >= 0).all(), f"{VALUES}: {name!r} has counts below 0")
        elif score is not None:
            low, high = RANGES.get(metric, (0.0, 1.0))
            inside = (values >= low - ROUNDING) & (values <= high + ROUNDING)
            _need(inside.all(), f"{VALUES}: {name!r} goes beyond {low:g} to {high:g}")
            _need(
                abs(values.mean() - score) <= MEAN,
                f"{VALUES}: {name!r} is {values.mean():.4f} on average, and the score is {score}",
            )


def _arrays(file: str, content: bytes) -> list[tuple[str, Any]]:
    """Deserialize a safetensors file and check that array names begin with a split and that types are numeric."""
    from safetensors import SafetensorError, deserialize

    try:
        arrays = deserialize(content)
    except SafetensorError as wrong:
        raise StoreError(f"{file} cannot be read: {wrong}") from None
    for name, array in arrays:
        part, _, what = name.partition("/")
        _need(part in PARTS and what, f"{file} has {name[:60]!r}")
        _need(array["dtype"] in NUMBERS, f"{file}: {name!r} is of the type {array['dtype']}")
    return arrays


def _need(true: Any, why: str) -> None:
    if not true:
        raise StoreError(why)


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


@dataclass(frozen=True)
class Checked:
    """An archive that passed `check`, with the plan computed from its study."""

    archive: Archive
    plan: Plan


def check(path: Path) -> Checked:
    """Read and validate a whole archive without writing anything; raise a `StoreError` if it is not valid."""
    found = Archive.open(path)
    judge = Validator(found.study)
    folder = ""
    contents = found.contents()  # raises by itself if the file is damaged
    while (some := next(contents, None)) is not None:
        folder, files = some
        with _refusing(path, folder or "study"):
            if folder:
                judge.result(folder, files)
            else:
                judge.loose(*files.popitem())
    with _refusing(path, "what is in it"):
        plan = judge.finish()
    return Checked(found, plan)


@contextlib.contextmanager
def _refusing(path: Path, where: str) -> Generator[None]:
    try:
        yield
    except WRONG as wrong:
        raise StoreError(
            f"{path} is no sound ledger: {where} is not as biphase writes it ({one_line(wrong)[:400]}); nothing was "
            "taken from it: pack it again with the version that made it, or with this one"
        ) from None


def merge(checked: Checked, store: Store) -> Merged:
    """Publish what the store does not have yet.

    The plan that is written is the one that `check` computed, not the archive's own file.
    """
    found = checked.archive
    merged = Merged(found.study, store.studies / found.study / PLAN)
    _merge_plan(checked.plan, store, merged)
    for folder, files in found.contents():
        if folder:
            _merge_result(folder, files, store, merged)
        else:
            name, content = files.popitem()
            if name != PLAN_ENTRY:
                _merge_loose(name, content, store, merged)
    return merged


# ---------------------------------------------------------------- results


def _merge_result(folder: str, files: dict[str, bytes], store: Store, merged: Merged) -> None:
    kind, at = folder.split("/")[-2:]
    place = store.root / kind / at
    metadata_of = folder.startswith("metadata/")
    if fault := store.fault(place):
        merged.kept.append(f"{kind}/{at[:8]}: damaged here, and left as it is ({fault})")
        return
    if store.knows(place):
        try:
            here = verify(store.readable(place), contents=False)
        except StoreError as wrong:
            merged.kept.append(f"{kind}/{at[:8]}: damaged here, and left as it is ({one_line(wrong)})")
            return
        other = [
            name for name in files if name in here and here[name]["sha256"] != sha256(files[name]).hexdigest()
        ]
        if other:
            merged.kept.append(_kept(kind, at, files, store))
            return
        if metadata_of or store.has(place):
            merged.already += 1
            return
    with store.attempt(f"merge-{at}") as built:
        for name, content in files.items():
            (built / name).write_bytes(content)
        if publish(built, store.metadata_of(place) if metadata_of else place):
            merged.added[KINDS[kind]] += 1
            merged.bytes += sum(len(content) for content in files.values())
        else:  # another process published it first
            merged.already += 1


def _kept(kind: str, at: str, files: dict[str, bytes], store: Store) -> str:
    """Describe how the store's result differs from the archive's."""
    told = "computed twice"
    if kind == "trials":
        try:
            same = read_trial(store, at)["scores"] == json.loads(files[TRIAL])["scores"]
        except StoreError as wrong:
            return f"{kind}/{at[:8]}: damaged here, and left as it is ({one_line(wrong)})"
        told += ", with the same scores" if same else ", with other scores"
    return f"{kind}/{at[:8]}: {told}"


# ---------------------------------------------------------------- study, pins and corpus links


def _merge_plan(plan: Plan, store: Store, merged: Merged) -> None:
    if not merged.plan.is_file():
        merged.plan.parent.mkdir(parents=True, exist_ok=True)
        write_json(merged.plan, with_checksum(plan.to_json()))
    elif read_checked(merged.plan).get("study") != encode(plan.study):
        merged.kept.append(
            f"studies/{merged.study}/{PLAN}: another version of the study; give biphase report the study's file"
        )


def _merge_loose(name: str, content: bytes, store: Store, merged: Merged) -> None:
    said = json.loads(content)
    study = store.studies / merged.study
    if name == FINGERPRINTS:
        remember_fingerprints(merged.study, said, store)
    elif name == PINS:
        for source, commit in said.items():
            pinned = remember(source, commit, store)
            if pinned != commit:
                merged.kept.append(
                    f"pins.json: {source} is pinned to {pinned[:8]}, and to {commit[:8]} there"
                )
    elif name.startswith("corpora/"):
        _merge_link(store.root / name, said, store, merged)
    else:
        path = study / "failures" / Path(name).name
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, said)


def _merge_link(path: Path, said: dict[str, Any], store: Store, merged: Merged) -> None:
    """Add the link of a hub corpus, only if the store has no other text for it.

    A link decides which text a corpus is, and so the keys of everything trained on it; adding one must not change
    the keys of results or plans that are already in the store.
    """
    linked = said["source"], said["heldout"]
    records = [card for card in cards(store) if isinstance(card.get("corpus"), dict)]
    here = {
        card.get("fingerprint")
        for card in records
        if (card["corpus"].get("source"), card["corpus"].get("heldout")) == linked
    }
    if here - {said["fingerprint"]}:
        merged.kept.append(f"{said['source']}: other text here than there; merge into a store of its own")
    elif path.is_file():
        if read_checked(path).get("fingerprint") != said["fingerprint"]:
            merged.kept.append(
                f"{said['source']}: linked to another folder here; merge into a store of its own"
            )
    elif reader := _reader_here(path, store, merged.study):
        merged.kept.append(f"{said['source']}: {reader} reads it from the hub; merge into a store of its own")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, with_checksum(said))


def _reader_here(link: Path, store: Store, but: str) -> str:
    """Return another study of this store whose plan reads the linked corpus, as "studies/<name>", or ""."""
    for path in sorted(store.studies.glob(f"*/{PLAN}")):
        with contextlib.suppress(*WRONG):  # commands that read that plan report its damage
            corpora = corpora_of(decode(read_checked(path)["study"])) if path.parent.name != but else ()
            if link in {link_path(corpus, store) for corpus in corpora}:
                return f"studies/{path.parent.name}"
    return ""
