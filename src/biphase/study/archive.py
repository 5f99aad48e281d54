"""A parcel: results of one study in one file, to be carried to another store.

    ledger.json                     first: the study, and every other file with its size and hash
    study/                          plan.json, fingerprints.json, failures/<key>.json
    pins.json  corpora/link-*.json  what the study's names stand for
    receipts/states/<key>/          state.json, metrics.jsonl: a state without weights and moments
    receipts/shards/<key>/          card.json: a corpus without its tokens
    receipts/leaves/<key>/          leaf.json: scores without their values by example
    leaves/<key>/                   leaf.json, values.safetensors, predictions.safetensors if there are any

It is a tar in zstandard, so any tool lists it; the same results give the same bytes. It may come from anywhere, so it is
read strictly: only plain files, of the names above, in the order, of the sizes and with the hashes that its first file
says. Links, devices, folders and extended headers have no place in it, and what it unpacks to is known, and judged,
before any of it is read. Python's own reader follows extended headers of any size, so the headers are read one by one.
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
FORMAT = 1
PLAN_ENTRY, FINGERPRINTS, PINS = "study/plan.json", "study/fingerprints.json", "pins.json"
# What a result's folder in a parcel holds: all of it, and nothing else but what it may hold as well.
FOLDERS = {
    "receipts/states": ("metrics.jsonl", "state.json"),
    "receipts/shards": ("card.json",),
    "receipts/leaves": ("leaf.json",),
    "leaves": ("leaf.json", "values.safetensors"),
}
OPTIONAL = {"leaves": ("predictions.safetensors",)}
_LOOSE = re.compile(
    rf"{re.escape(PLAN_ENTRY)}|{re.escape(FINGERPRINTS)}|pins\.json|study/failures/{KEY_PATTERN}\.json|corpora/link-{KEY_PATTERN}\.json"
)
_FOLDER = re.compile(rf"({'|'.join(FOLDERS)})/({KEY_PATTERN})")

BLOCK = 512  # of a tar
LEVEL, FRAME = 12, 2**25  # how hard to compress, and how much at a time
MAGIC = b"\x28\xb5\x2f\xfd"  # a file in zstandard begins so
LARGEST_LISTING = 2**25
# A parcel may unpack to this, or to so many times its size. Ledgers shrink 4 to 22 times (measured), a bomb thousands of times.
UNPACKED, SHRUNK = 2**26, 100
# And no file of it to more than this, by its name: what is read whole must fit into memory.
LARGEST = {
    "plan.json": 2**24,
    "card.json": 2**22,
    "leaf.json": 2**22,
    "metrics.jsonl": 2**28,
    "values.safetensors": 2**28,
    "predictions.safetensors": 2**28,
}
LARGEST_OTHER = 2**20


@dataclass(frozen=True)
class ArchiveEntry:
    """One file of a parcel."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class EntrySource:
    """A file that goes into a parcel, and where its content comes from when its turn is there."""

    item: ArchiveEntry
    read: Callable[[], bytes]

    @classmethod
    def of(cls, name: str, content: bytes, read: Callable[[], bytes] | None = None) -> EntrySource:
        """Without `read` the content itself is kept."""
        item = ArchiveEntry(name, len(content), hashlib.sha256(content).hexdigest())
        return cls(item, read or (lambda: content))


def as_json(value: Any) -> bytes:
    """As the store writes JSON."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


# ---------------------------------------------------------------- write


def write_archive(path: Path, study: str, sources: list[EntrySource]) -> int:
    """Write a parcel whole, or not at all; gives its bytes."""
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
        draft.unlink(missing_ok=True)  # there only if something went wrong
    return path.stat().st_size


def _refuse_taken(path: Path) -> None:
    """An older parcel is replaced; nothing else is."""
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
    """A stream in zstandard, compressed frame by frame."""

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
    """A parcel whose first file was read and makes sense; the others are checked as they are read."""

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
            parcel = cls(path, str(said["study"]), items)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise reader.refusal(f"its {LEDGER} does not say what is in it") from None
        parcel._judge(reader)
        return parcel

    @property
    def unpacked(self) -> int:
        """What it unpacks to."""
        return sum(item.bytes for item in self.items)

    def _judge(self, reader: _Reader) -> None:
        """Refuse names that have no place in a ledger, folders that are not whole, and too much."""
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
        if self.items[0].name != PLAN_ENTRY:  # what the others may say depends on it
            raise reader.refusal(f"it does not begin with {PLAN_ENTRY}")
        most = max(UNPACKED, SHRUNK * self.path.stat().st_size)
        if self.unpacked > most:
            raise reader.refusal(
                f"it would unpack to more than the {most:,} bytes that a ledger of its size can"
            )

    def contents(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Its files, as they were packed: those of a result together under its folder, others one by one under ""."""
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
    """The members of a parcel in order, read from the beginning on."""

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
        """The next file, which must be a plain one of this name and size."""
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
        rest = self._read(2 * BLOCK) + self._read(tarfile.RECORDSIZE, whole=False)  # some tools fill a record
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
# What of a study goes into a parcel: everything that a report elsewhere needs, and nothing heavy.
#
# Published results only, each checked against its manifest: leaves with their values by example and predictions;
# states as receipts, without weights and moments; the cards of corpora; why jobs failed. What is damaged is left out
# and named. Tracebacks stay here: they tell of this machine and not of the study.


@dataclass
class PackSummary:
    """What went into a parcel."""

    study: str
    scores: int = 0
    scores_planned: int = 0
    bare: int = 0  # scores without their values by example
    states: int = 0
    states_planned: int = 0
    corpora: int = 0
    failures: int = 0
    bytes: int = 0  # of the file
    unpacked: int = 0
    left_out: list[str] = field(default_factory=list)  # why


def pack(
    plan: Plan,
    store: Store,
    identities: Identities,
    path: Path,
    *,
    results: Collection[str] | None = None,  # keys; None: all
    examples: bool = True,
) -> PackSummary:
    """Write what the store knows of a plan, or of some of its results, into one file."""
    packed = PackSummary(plan.study.name)
    sources = [
        EntrySource.of(PLAN_ENTRY, as_json(plan.to_json())),
        EntrySource.of(FINGERPRINTS, as_json(fingerprints_of(plan.study, identities))),
        *_names(plan, store),
        *_failures(plan, store, results, packed),
        *_corpora(plan, store, identities, packed),
        *_states(plan, store, results, packed),
        *_leaves(plan, store, results, packed, examples=examples),
    ]
    if not packed.scores and not packed.states:
        raise SpecError(
            f"nothing of {packed.study} is in {store.root} yet; compute some of it: biphase run STUDY"
        )
    packed.bytes = write_archive(path, packed.study, sources)
    packed.unpacked = sum(one.item.bytes for one in sources)
    return packed


def _names(plan: Plan, store: Store) -> Iterable[EntrySource]:
    """What the study's names stand for in this store: models on the hub, corpora read from a folder, but not where it is."""
    pins = pins_of(plan.study, store)
    if pins:
        yield EntrySource.of(PINS, as_json(pins))
    linked = {
        link_path(corpus, store).name: {
            "source": corpus.source,
            "heldout": corpus.heldout,
            "fingerprint": corpus_fingerprint(
                corpus, store
            ),  # as the plan has it: the folder may have changed
        }
        for corpus in corpora_of(plan.study)
        if corpus.hub and read_link(corpus, store)
    }
    for name, told in sorted(linked.items()):
        yield EntrySource.of(f"corpora/{name}", as_json(told))


def _failures(
    plan: Plan, store: Store, results: Collection[str] | None, packed: PackSummary
) -> Iterable[EntrySource]:
    """Why jobs that are not done failed."""
    done = ledger.done_keys(plan, store)
    left = {key for key in _state_keys(plan, results) if key not in done}
    left |= {one.key for one in finetunings(plan, results) if not finished(one, store)}
    for key, noted in sorted(ledger.failures(plan, store).items()):
        if key in left:
            packed.failures += 1
            kept = {name: str(noted.get(name, "")) for name in ("key", "error", "at")}
            yield EntrySource.of(f"study/failures/{key}.json", as_json(kept))


def _state_keys(plan: Plan, results: Collection[str] | None) -> list[str]:
    if results is None:
        return list(plan.states)
    wanted = {state.key for key in results for state in plan.path(key)}
    return [key for key in plan.states if key in wanted]


def _corpora(plan: Plan, store: Store, identities: Identities, packed: PackSummary) -> Iterable[EntrySource]:
    runs = {corpus_of(state.run): state.run for state in plan.states.values()}
    for key in dict.fromkeys(identities.data(run) for run in runs.values()):
        made = _folder(store, store.shards / key, "receipts/shards", packed)
        packed.corpora += bool(made)
        yield from made


def _states(
    plan: Plan, store: Store, results: Collection[str] | None, packed: PackSummary
) -> Iterable[EntrySource]:
    for key in _state_keys(plan, results):
        made = _folder(store, store.states / key, "receipts/states", packed)
        packed.states_planned += 1
        packed.states += bool(made)
        yield from made


def _leaves(
    plan: Plan, store: Store, results: Collection[str] | None, packed: PackSummary, *, examples: bool
) -> Iterable[EntrySource]:
    for training in finetunings(plan, results):
        for leaf in training.leaves:
            place = store.leaves / leaf.key
            whole = examples and store.has(place)
            made = _folder(store, place, "leaves" if whole else "receipts/leaves", packed)
            packed.scores_planned += 1
            packed.scores += bool(made)
            packed.bare += bool(made) and not whole
            yield from made


def _folder(store: Store, place: Path, kind: str, packed: PackSummary) -> list[EntrySource]:
    """The light files of a result; none where it is not there, or not what was published."""
    if not store.knows(place):
        packed.left_out += [fault] if (fault := store.fault(place)) else []
        return []
    told, folder = store.told(place), f"{kind}/{place.name}"
    try:
        there = verify(told, contents=False)
        names = [*FOLDERS[kind], *(name for name in OPTIONAL.get(kind, ()) if name in there)]
        for name in names:
            if there[name]["bytes"] > (most := LARGEST.get(name, LARGEST_OTHER)):
                raise StoreError(f"{name} has more than {most:,} bytes")
        files = {name: read_verified(told, name) for name in names}
        Validator(packed.study).result(folder, files)  # what would be refused elsewhere is not packed
    except WRONG as wrong:
        packed.left_out.append(f"{folder}: {one_line(wrong)}")
        return []
    return [
        EntrySource.of(f"{folder}/{name}", content, lambda name=name: read_verified(told, name))
        for name, content in files.items()
    ]


# ---------------------------------------------------------------- sound
# What an archive of results (a parcel) may say: whoever reads the store later relies on it.
#
# An archive speaks for its own study alone. Its plan is made again from the study that travels in it, so every key in it
# must be one of that study's: of a state, a trial, a corpus or a failed job. Metadata is checked by the schema that readers
# use (`metadata`), and sizes against what such a plan can leave. Nothing is written here.


LINK = ("source", "heldout", "fingerprint")  # what is said of a corpus that was read from a folder
FINGERPRINT_KINDS = {"task", "hub", "reads", "data"}  # of fingerprints; earlier versions told no `data`
# As safetensors calls them, and as numpy does: what a report can count with.
NUMBERS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
MEAN = 1e-4  # by which a score may differ from the mean of its values, which are rounded
COUNTS = "entity_counts"  # of each example: entities that are right, that were said, that are true
TRIALS = 1_000_000  # that one study may plan
LINE_BYTES, SPARE_LINES = 1_000, 100  # of metrics: for each step, and beside
HELDOUT_LINES = 500_000  # of a whole archive: `status` parses all of them


class Validator:
    """Hears the files of one archive in their order, and refuses what is not as biphase writes it."""

    def __init__(self, study: str) -> None:
        self.name = study
        self.said: dict[str, Any] = {}  # the plan, as the archive has it
        self.fingerprints: dict[str, dict[str, str]] = {}
        self.states: dict[str, tuple[int, int]] = {}  # key → its step from the root, bytes of its metrics
        self.trials: dict[str, dict[str, Any]] = {}
        self.corpora: dict[str, Corpus] = {}  # by the key of their shards
        self.failed: set[str] = set()
        self.heldout = 0

    def result(self, folder: str, files: dict[str, bytes]) -> None:
        kind, at = folder.split("/")[-2:]
        if kind == "leaves":
            about = check_trial(json.loads(files[TRIAL]), at)
            if VALUES in files:
                _check_values(files[VALUES], about)
            if PREDICTIONS in files:  # which no verb reads
                _arrays(PREDICTIONS, files[PREDICTIONS])
            self.trials[at] = {name: about[name] for name in ("model", "lr", "seed", "metric")}
        elif kind == "states":
            about = check_checkpoint(json.loads(files[CHECKPOINT]), at)
            _need(isinstance(decode(about["run"]), Pretrain), "it has no run")
            step = about["origin_step"] + about["progress"]["step"]
            self.states[at] = step, len(files[LINES])
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
        as_json(said)  # it must be possible to write it again: no NaN, no depths
        if name == PLAN_ENTRY:
            made = decode(said["study"])
            _need(isinstance(made, Study) and made.name == self.name, f"{name} is of another study")
            self.study, self.said = made, said
        elif name == FINGERPRINTS:
            _need(
                FINGERPRINT_KINDS - {"data"} <= set(said) <= FINGERPRINT_KINDS, f"{name} says something else"
            )
            keys = [one for some in said.values() for pair in some.items() for one in pair]
            # Of a model's tokenizer there may be nothing to say.
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

    # ------------------------------------------------------------ the end: every key is one of the study's

    def finish(self) -> Plan:
        """After the last file: make the plan again, and hold everything that was heard against it. Gives that plan."""
        plan = self._planned()
        keys = {state["key"]: state["parent"] for state in self.said["states"]}
        same = keys == {state.key: state.parent for state in plan.states.values()}
        _need(same and self.said["results"] == plan.results, f"{PLAN_ENTRY} has other keys than its study")
        every = {one.key: one for one in finetunings(plan)}
        leaves = {leaf.key: (one, leaf.metric) for one in every.values() for leaf in one.leaves}
        for at, (step, size) in self.states.items():
            _need(at in plan.states, f"the state {at} is none of the study's")
            _need(step == plan.states[at].span[1], f"the state {at} is at step {step}")
            _need(
                size <= LINE_BYTES * (step + SPARE_LINES),
                f"{LINES} of {at} has {size:,} bytes for {step:,} steps",
            )
        for at, about in self.trials.items():
            _need(at in leaves, f"the scores {at} are none of the study's")
            one, metric = leaves[at]
            planned = {"model": one.model, "lr": one.lr, "seed": one.seed, "metric": metric}
            _need(about == planned, f"the scores {at} are of another model, learning rate, seed or metric")
        others = set(self.corpora) - {self._data(run) for run in trained_runs(self.study)}
        _need(not others, f"the corpus {min(others, default='')} is none of the study's")
        others = self.failed - set(plan.states) - set(every)
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
        """The key of a run's shards: as the fingerprints say, or as a card of the archive does."""
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
    """One number for each example of its part, within the metric's range, that make up its score; of entities three counts."""
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
    """The arrays of a file, each of numbers of a part."""
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
# Parcels from other machines into a store.
#
# A parcel is read twice: first all of it is checked and nothing is written, then its results are published one by one, by
# the store's own rename. So a parcel that is refused changes nothing, a merge that is killed leaves whole results only, and
# merging again goes on where it ended. What is in the store stays: a result that is there with other content, as when two
# machines computed the same one, is named and kept as it is.


KINDS = {"leaves": "scores", "states": "states", "shards": "corpora"}


@dataclass
class Merged:
    """What came of merging a parcel."""

    study: str
    plan: Path
    added: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS.values(), 0))
    already: int = 0  # results that were here, the same
    bytes: int = 0  # that were added to the store
    kept: list[str] = field(default_factory=list)  # what is here with other content, and stays


@dataclass(frozen=True)
class Checked:
    """A parcel that was read whole, and the plan that its study makes."""

    parcel: Archive
    plan: Plan


def check(path: Path) -> Checked:
    """Read the whole parcel and refuse what is not as it should be. Writes nothing."""
    found = Archive.open(path)
    judge = Validator(found.study)
    folder = ""
    contents = found.contents()  # it refuses by itself what is damaged
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
    """Publish what the store does not have yet. Its plan is the one that was made again, not the archive's own."""
    found = checked.parcel
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
    receipt = folder.startswith("receipts/")
    if fault := store.fault(place):
        merged.kept.append(f"{kind}/{at[:8]}: damaged here, and left as it is ({fault})")
        return
    if store.knows(place):
        try:
            here = verify(store.told(place), contents=False)
        except StoreError as wrong:
            merged.kept.append(f"{kind}/{at[:8]}: damaged here, and left as it is ({one_line(wrong)})")
            return
        other = [
            name for name in files if name in here and here[name]["sha256"] != sha256(files[name]).hexdigest()
        ]
        if other:
            merged.kept.append(_kept(kind, at, files, store))
            return
        if receipt or store.has(place):
            merged.already += 1
            return
    with store.attempt(f"merge-{at}") as built:
        for name, content in files.items():
            (built / name).write_bytes(content)
        if publish(built, store.receipt(place) if receipt else place):
            merged.added[KINDS[kind]] += 1
            merged.bytes += sum(len(content) for content in files.values())
        else:  # somebody was faster
            merged.already += 1


def _kept(kind: str, at: str, files: dict[str, bytes], store: Store) -> str:
    """In which way a result that is here is another one."""
    told = "computed twice"
    if kind == "leaves":
        try:
            same = read_trial(store, at)["scores"] == json.loads(files[TRIAL])["scores"]
        except StoreError as wrong:
            return f"{kind}/{at[:8]}: damaged here, and left as it is ({one_line(wrong)})"
        told += ", with the same scores" if same else ", with other scores"
    return f"{kind}/{at[:8]}: {told}"


# ---------------------------------------------------------------- the study and its names


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
    """Which text a hub corpus is changes the keys of all that is trained on it, so it comes only where nothing was."""
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
    """Another study of this store that is planned on the corpus of a link, though nothing of it is computed yet."""
    for path in sorted(store.studies.glob(f"*/{PLAN}")):
        with contextlib.suppress(*WRONG):  # who reads that plan says what is wrong with it
            corpora = corpora_of(decode(read_checked(path)["study"])) if path.parent.name != but else ()
            if link in {link_path(corpus, store) for corpus in corpora}:
                return f"studies/{path.parent.name}"
    return ""
