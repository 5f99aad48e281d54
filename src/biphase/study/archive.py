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

An archive is untrusted input. It may contain regular files only, with the names above, in the order and with the sizes
and hashes that ledger.json lists. The decompressed bytes are counted, and reading ends at a limit, so neither a file
nor a header can fill the memory. Headers of POSIX's extended format are refused: they can describe a sparse file, which
is larger than the bytes that were counted. Nothing is unpacked to a path that the archive names.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
import uuid
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby, zip_longest
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
    fingerprints_of,
    hub_fingerprint,
    make_plan,
    remember_fingerprints,
)

LEDGER = "ledger.json"
FORMAT = 2
PLAN_ENTRY, FINGERPRINTS, PINS = "study/plan.json", "study/fingerprints.json", "pins.json"
# The folders of results and their files, of which only predictions may be absent.
FOLDERS = {
    "metadata/checkpoints": (CHECKPOINT, LINES),
    "metadata/shards": (CARD,),
    "metadata/trials": (TRIAL,),
    "trials": (TRIAL, VALUES, PREDICTIONS),
}
_NAME = re.compile(
    "|".join(
        [
            *map(re.escape, (LEDGER, PLAN_ENTRY, FINGERPRINTS, PINS)),
            rf"corpora/link-{KEY_PATTERN}\.json",
            *(
                rf"{kind}/{KEY_PATTERN}/(?:{'|'.join(map(re.escape, files))})"
                for kind, files in FOLDERS.items()
            ),
        ]
    )
)

LEVEL, FRAME = 12, 2**25  # zstandard level; bytes that are compressed into one frame
MAGIC = b"\x28\xb5\x2f\xfd"  # the first bytes of a zstandard file
# An archive may unpack to `UNPACKED` bytes or `SHRUNK` times its size, whichever is larger. Real archives compress
# 4 to 22 times (measured), a decompression bomb thousands of times.
UNPACKED, SHRUNK = 2**26, 100
# Largest size in bytes of a file: files are read whole, and a parsed JSON takes many times its size.
LARGEST_JSON, LARGEST = 2**25, 2**28
TRIALS = 1_000_000  # most fine-tunings that an archive's study may plan; a few lines can plan any number


@dataclass(frozen=True)
class ArchiveEntry:
    """One file of an archive: its name, size and hash; for packing, also how to read its content when it is written."""

    name: str
    bytes: int
    sha256: str
    read: Callable[[], bytes] = field(default=bytes, compare=False)

    @classmethod
    def of(cls, name: str, content: bytes, read: Callable[[], bytes] | None = None) -> ArchiveEntry:
        """Make an entry for `content`; without `read`, the content is kept in memory."""
        return cls(name, len(content), sha256(content).hexdigest(), read or (lambda: content))


def as_json(value: Any) -> bytes:
    """Serialize a value to JSON as the store does."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def largest(name: str) -> int:
    """Return the most bytes that a file of an archive may have."""
    return LARGEST_JSON if name.endswith(".json") else LARGEST


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
    if first.bytes > LARGEST_JSON:
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
                    content = entry.read()
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


class _Decompressor:
    """The decompressed bytes of an archive for `tarfile`, up to the limit for an archive of its size."""

    def __init__(self, path: Path) -> None:
        import pyarrow

        self.stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
        self.most = self.left = max(UNPACKED, SHRUNK * path.stat().st_size)

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        self.left -= len(content)
        if self.left < 0:
            raise OSError(f"more than the {self.most:,} bytes that an archive of its size can unpack to")
        return content


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of an archive's members, which must be regular files with the names of an archive."""
    if not path.is_file():
        raise SpecError(f"there is no file {path}; type one that biphase ledger pack has written")
    try:
        stream: Any = _Decompressor(path)
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for info in tar:
                name = info.name[:200]
                if not _NAME.fullmatch(info.name) or info.type != tarfile.REGTYPE or info.pax_headers:
                    raise _refusal(path, f"{name!r} has no place in an archive, or is no plain file")
                if not 0 <= info.size <= largest(info.name):
                    raise _refusal(path, f"{name!r} has {info.size:,} bytes")
                content = tar.extractfile(info)
                yield info.name, content.read() if content else b""
    # RecursionError: tarfile calls itself for each of many headers of one file.
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as wrong:
        raise _refusal(path, f"it is cut short or damaged ({one_line(wrong)[:200]})") from None


@dataclass(frozen=True)
class Archive:
    """An archive whose ledger.json was read; the other files are compared with it when they are read."""

    path: Path
    study: str
    entries: dict[str, dict[str, Any]]  # by name: size and hash, as ledger.json lists them

    @classmethod
    def open(cls, path: Path) -> Archive:
        name, content = next(_members(path), ("", b""))
        with _refusing(path, LEDGER):
            _need(name == LEDGER, f"it begins with {name!r}")
            about = json.loads(content)
            _need(
                about["ledger"] == FORMAT,
                f"its format is {str(about['ledger'])[:20]}; this version reads {FORMAT}",
            )
            return cls(path, str(about["study"]), dict(about["files"]))

    def contents(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the files of each result as (folder, {name: content}), and all others as ("", {path: content})."""
        for folder, group in groupby(self._files(), lambda file: _folder(file[0])):
            yield folder, {name.removeprefix(f"{folder}/"): content for name, content in group}

    def _files(self) -> Iterator[tuple[str, bytes]]:
        """Yield the files after ledger.json, each compared with it."""
        members = _members(self.path)
        next(members, None)
        for entry, member in zip_longest(self.entries.items(), members):
            if not member:
                raise _refusal(self.path, f"{entry[0][:200]!r} is missing")
            name, content = member
            if not entry or name != entry[0]:
                raise _refusal(self.path, f"{name} is there, which {LEDGER} does not list there")
            with _refusing(self.path, LEDGER):
                listed = entry[1]["bytes"], entry[1]["sha256"]
            if (len(content), sha256(content).hexdigest()) != listed:
                raise _refusal(self.path, f"{name} is not what was packed")
            yield name, content


def _folder(name: str) -> str:
    """Return the folder of the result that a file belongs to, or "" for any other file."""
    folder = name.rpartition("/")[0]
    return folder if folder.rpartition("/")[0] in FOLDERS else ""


@contextlib.contextmanager
def _refusing(path: Path, where: str) -> Generator[None]:
    """Turn what untrusted JSON can raise into the refusal of the archive."""
    try:
        yield
    except WRONG as wrong:
        why = one_line(wrong)[:400]
        raise _refusal(path, f"{where} is not as this version of biphase writes it ({why})") from None


def _need(condition: Any, why: str) -> None:
    if not condition:
        raise StoreError(why)


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
    loose = {
        PLAN_ENTRY: plan.to_json(),
        FINGERPRINTS: fingerprints_of(plan.study, identities),
        PINS: pins_of(plan.study, store),
        **_links(plan.study, store),
    }
    entries = [ArchiveEntry.of(name, as_json(about)) for name, about in loose.items() if about]

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


def _links(study: Study, store: Store) -> dict[str, dict[str, str]]:
    """Return the links of hub corpora that are read from a folder, by their names, without the folder's path."""
    linked = (corpus for corpus in corpora_of(study) if corpus.hub and read_link(corpus, store))
    # The plan's fingerprint, since the folder may have changed.
    links = {_link_name(corpus): _link(corpus, corpus_fingerprint(corpus, store)) for corpus in linked}
    return dict(sorted(links.items()))


def _link_name(corpus: Corpus) -> str:
    return f"corpora/{link_path(corpus, Store('')).name}"


def _link(corpus: Corpus, fingerprint: str) -> dict[str, str]:
    return {"source": corpus.source, "heldout": corpus.heldout, "fingerprint": fingerprint}


def _result(
    store: Store, place: Path, kind: str, packed: PackSummary, *, predictions: bool
) -> list[ArchiveEntry]:
    """Return the packable files of a result; empty if it is absent or damaged (see `left_out`)."""
    if not store.knows(place):
        packed.left_out += [fault] if (fault := store.fault(place)) else []
        return []
    source, folder = store.readable(place), f"{kind}/{place.name}"
    try:
        written = verify(source, contents=False)
        names = [name for name in FOLDERS[kind] if name != PREDICTIONS or (predictions and name in written)]
        for name in names:
            if name in written and written[name]["bytes"] > (most := largest(name)):
                raise StoreError(f"{name} has more than {most:,} bytes")
        files = {name: read_verified(source, name) for name in names}
        check_result(folder, files)  # do not pack what `check` would refuse
    except WRONG as wrong:
        packed.left_out.append(f"{folder}: {one_line(wrong)}")
        return []
    return [
        ArchiveEntry.of(f"{folder}/{name}", content, lambda name=name: read_verified(source, name))
        for name, content in files.items()
    ]


# ---------------------------------------------------------------- check
# An archive may contain results of its own study only. Its plan is made again from the study and the fingerprints that
# it carries, and the key of every checkpoint, trial and corpus in it must be in that plan. Metadata is checked by the
# schema that readers use (`biphase.metadata`). Nothing is written here.


@dataclass(frozen=True)
class Checked:
    """A valid archive, and what it says apart from results."""

    archive: Archive
    plan: Plan
    fingerprints: dict[str, dict[str, str]]
    pins: dict[str, str]
    links: dict[str, dict[str, str]]


def check(path: Path) -> Checked:
    """Read and validate a whole archive without writing anything; raise StoreError if it is not valid."""
    archive = Archive.open(path)
    loose: dict[str, bytes] = {}
    found: dict[str, dict[str, dict[str, Any]]] = {"checkpoints": {}, "trials": {}, "shards": {}}
    for folder, files in archive.contents():
        with _refusing(path, folder or "study"):
            if folder:
                kind, key = folder.split("/")[-2:]
                _need(key not in found[kind], "it is there twice")
                found[kind][key] = check_result(folder, files)
            else:
                loose |= files
    with _refusing(path, "what is in it"):
        plan, identities = _planned(archive.study, loose, found["shards"])
        _check_keys(plan, identities, found)
        pins = json.loads(loose.get(PINS, b"{}"))
        starts = {model.source for model in hubs_of(plan.study) if not model.local}
        _need(set(pins) <= starts, f"{PINS} pins models that the study does not start from")
        _need(all(map(COMMIT.fullmatch, pins.values())), f"{PINS} pins to no commit")
        hub = {_link_name(corpus): corpus for corpus in corpora_of(plan.study) if corpus.hub}
        named = {
            name: json.loads(loose[name])["fingerprint"] for name in loose if name.startswith("corpora/")
        }
        _need(set(named) <= set(hub), "it links a corpus that the study does not read")
        _need(all(map(is_key, named.values())), "a link has no fingerprint")
        links = {name: _link(hub[name], fingerprint) for name, fingerprint in named.items()}
        return Checked(archive, plan, fingerprints_of(plan.study, identities), pins, links)


def check_result(folder: str, files: dict[str, bytes]) -> dict[str, Any]:
    """Check the files of one result by the schema of its kind, and return its metadata; raises one of WRONG."""
    place, _, key = folder.rpartition("/")
    missing = set(FOLDERS[place]) - set(files) - {PREDICTIONS}
    _need(not missing, f"{folder} lacks {min(missing, default='')}")
    if CARD in files:
        return metadata.check_card(json.loads(files[CARD]), key)
    if CHECKPOINT in files:
        about = metadata.check_checkpoint(json.loads(files[CHECKPOINT]), key)
        _need(isinstance(decode(about["run"]), Pretrain), "it has no run")
        last = about["origin_step"] + about["progress"]["step"]
        for text in io.BytesIO(files[LINES]):
            line = metadata.check_line(json.loads(text))
            _need(line["step"] <= last, f"{LINES} goes on to step {line['step']}, beyond {last}")
        return about
    about = metadata.check_trial(json.loads(files[TRIAL]), key)
    if VALUES in files:
        metadata.check_values(VALUES, files[VALUES], about)
    if PREDICTIONS in files:  # checked for its format only; no command reads it
        metadata.check_arrays(PREDICTIONS, files[PREDICTIONS])
    return about


def _planned(name: str, loose: dict[str, bytes], cards: dict[str, dict[str, Any]]) -> tuple[Plan, Identities]:
    """Compute the plan from the study and the fingerprints in an archive."""
    about, known = json.loads(loose[PLAN_ENTRY]), json.loads(loose[FINGERPRINTS])
    study = decode(about["study"])
    _need(isinstance(study, Study) and study.name == name, f"{PLAN_ENTRY} is of another study")
    if spec := study.finetune:
        seeds = len(spec.seeds) + (len(spec.discard.seeds) if spec.discard else 0)
        models = sum(len(run.keep) + 1 for run in study.runs)
        tunings = models * len(spec.tasks) * len(spec.lrs) * seeds
        _need(tunings <= TRIALS, f"it plans more than {TRIALS:,} fine-tunings")
    keys = [key for kind in known.values() for key in kind.values()]
    # A model's tokenizer may have no fingerprint (an empty string).
    _need(all(key == "" or is_key(key) for key in keys), f"{FINGERPRINTS} has no keys")
    packed = {decode(card["corpus"]): key for key, card in cards.items()}

    def data(corpus: Corpus) -> str:
        # Archives of earlier versions have no fingerprints of corpora, but all cards.
        key = known.get("data", {}).get(content_key(corpus)) or packed.get(corpus, "")
        _need(key, f"it does not say which text the corpus {corpus.name!r} is")
        return key

    identities = Identities(
        data=data,
        hub=lambda model: known["hub"][content_key(model)] if model.local else hub_fingerprint(model),
        task=lambda task: known["task"][content_key(task)],
        reads=lambda model: known["reads"][content_key(model)] if model.local else "",
    )
    plan = make_plan(study, identities, str(about.get("question", "")))
    as_json(plan.to_json())  # refuses NaN, which could not be written
    return plan, identities


def _check_keys(plan: Plan, identities: Identities, found: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Refuse results that are not in the plan, or that say they are another result than the one of their key."""
    trials = found["trials"]

    def screened(trial: Any) -> float | None:
        about = trials.get(trial.key, {})
        return about["scores"]["validation"][about["metric"]] if "share" in about else None

    tunings = [tuning for grid in tuning_grids(plan, screened) for tuning in grid.tunings]
    planned = {trial.key: (tuning, trial) for tuning in tunings for trial in tuning.trials}
    corpora = set(map(identities.data, corpora_of(plan.study)))
    for kind, keys in (("checkpoints", set(plan.jobs)), ("trials", set(planned)), ("shards", corpora)):
        others = set(found[kind]) - keys
        _need(not others, f"{kind}/{min(others, default='')} is none of the study's")
    for key, about in found["checkpoints"].items():
        step = about["origin_step"] + about["progress"]["step"]
        _need(step == plan.jobs[key].span[1], f"the checkpoint {key} is at step {step}")
    for key, about in trials.items():
        tuning, trial = planned[key]
        expected = {"model": tuning.model, "lr": tuning.lr, "seed": tuning.seed, "metric": trial.metric}
        expected["share"] = tuning.share if tuning.share < 1 else None
        said = {name: about.get(name) for name in expected}
        _need(said == expected, f"the trial {key} is of another model, learning rate, seed or metric")


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


def merge(checked: Checked, store: Store) -> Merged:
    """Publish what the store does not have yet.

    The plan that is written is the one that `check` computed, not the archive's own file.
    """
    plan, name = checked.plan, checked.archive.study
    merged = Merged(name, store.studies / name / PLAN)
    if not merged.plan.is_file():
        merged.plan.parent.mkdir(parents=True, exist_ok=True)
        write_json(merged.plan, with_checksum(plan.to_json()))
    elif read_checked(merged.plan).get("study") != encode(plan.study):
        merged.kept.append(
            f"studies/{name}/{PLAN}: another version of the study; give biphase report the study's file"
        )
    remember_fingerprints(name, checked.fingerprints, store)
    for source, commit in checked.pins.items():
        if (pinned := remember(source, commit, store)) != commit:
            merged.kept.append(f"{PINS}: {source} is pinned to {pinned[:8]}, and to {commit[:8]} there")
    for link, about in checked.links.items():
        if why := _merge_link(store.root / link, about, store, name):
            merged.kept.append(f"{about['source']}: {why}; merge into a store of its own")
    for folder, files in checked.archive.contents():
        if folder:
            _merge_result(folder, files, store, merged)
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


def _merge_link(path: Path, link: dict[str, str], store: Store, study: str) -> str:
    """Add the link of a hub corpus, or return why not: the store has other text for it.

    A link decides which text a corpus is, and so the keys of everything trained on it; adding one must not change
    the keys of results or plans that are already in the store.
    """
    fingerprints = {
        card["fingerprint"]
        for card in cards(store)
        if all(card["corpus"].get(name) == link[name] for name in ("source", "heldout"))
    }
    if fingerprints - {link["fingerprint"]}:
        return "other text here than there"
    if path.is_file():
        same = read_checked(path).get("fingerprint") == link["fingerprint"]
        return "" if same else "linked to another folder here"
    for plan in sorted(store.studies.glob(f"*/{PLAN}")):
        with contextlib.suppress(*WRONG):  # commands that read that plan report its damage
            corpora = corpora_of(decode(read_checked(plan)["study"])) if plan.parent.name != study else ()
            if any(link_path(corpus, store) == path for corpus in corpora):
                return f"studies/{plan.parent.name} reads it from the hub"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, with_checksum(link))
    return ""
