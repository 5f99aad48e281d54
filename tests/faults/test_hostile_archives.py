"""Archives whose files are whole and whose content is not: refused, or harmless; no verb ever ends in a traceback."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from faults.kinds import plan_of

from biphase.specs.tasks import RANGES
from biphase.store import MANIFEST, Store, publish
from biphase.study.archive import PLAN_ENTRY, Archive, ArchiveEntry, as_json, pack, write_archive
from biphase.study.plan import identities

JUNK = [
    "", "text", "0.5", 37.0, -5, -1, 0, 1e308, 10**30, True, None, [], [1], {}, {"a": {"b": 1}}, "f" * 32, "../x",
]  # fmt: skip
METADATA = [
    ("trials", "trial.json"),
    ("checkpoints", "checkpoint.json"),
    ("checkpoints", "metrics.jsonl"),
    ("shards", "card.json"),
]


@pytest.fixture(scope="module")
def packed(calm, tmp_path_factory) -> dict[str, bytes]:
    """The files of a sound archive of the study."""
    path = tmp_path_factory.mktemp("packed") / "sound.tar.zst"
    pack(plan_of(calm.study, calm.store), calm.store, identities(calm.store), path)
    files: dict[str, bytes] = {}
    for folder, some in Archive.open(path).contents():
        files |= {f"{folder}/{name}" if folder else name: content for name, content in some.items()}
    return files


def archive(files: dict[str, bytes], path: Path) -> Path:
    """An archive of any files: every size and hash of its list is right."""
    write_archive(path, "faults", [ArchiveEntry.of(name, content) for name, content in files.items()])
    return path


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """Every value of a JSON document, by the way to it."""
    found = [at]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inside:
        found += places(one, (*at, name))
    return found


def spoil(name: str, content: bytes, chance: random.Random) -> bytes:
    """A file of JSON, or of lines of it, with one value that is another, or gone."""
    if name.endswith(".jsonl"):
        lines = content.splitlines()
        number = chance.randrange(len(lines))
        lines[number] = spoil("", lines[number], chance)
        return b"\n".join(lines) + b"\n"
    document = json.loads(content)
    *way, last = chance.choice([one for one in places(document) if one])
    inside = document
    for step in way:
        inside = inside[step]
    if chance.random() < 0.2 and isinstance(inside, dict):
        del inside[last]
    else:
        inside[last] = chance.choice(JUNK)
    return json.dumps(document).encode()


def look(verb, study: Path, store: Path, out: Path) -> str:
    """Type what reads a store; gives all that was said."""
    shown = ""
    for words in (
        ["status", study],
        ["status", study, "--json"],
        ["plan", study],
        ["report", study, "--no-print", "--out", out],
        ["ledger", "pack", study, out.with_suffix(".tar.zst")],
    ):
        code, told, err = verb(*words, "--store", store)
        assert code in (0, 1, 2)
        assert "Traceback" not in told + err
        shown += told + err
    return shown


def check_spoiled(calm, verb, packed, folder: Path, seed: int) -> bool:
    """Was it refused? If not, nothing that it says hurts."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    kind = chance.choice([*(name for _, name in METADATA), "plan.json", "fingerprints.json"])
    name = chance.choice([one for one in packed if one.endswith(kind)])
    files = packed | {name: spoil(name, packed[name], chance)}
    store = folder / "store"
    code, out, err = verb("ledger", "merge", archive(files, folder / "x.tar.zst"), "--store", store)
    assert "Traceback" not in out + err, name
    if code:
        assert (code, err.count("\n")) == (2, 1), name
        assert not store.exists(), "what is refused leaves nothing"
        return True
    look(verb, calm.study, store, folder / "report")
    for path in store.rglob("trial.json"):
        for part in json.loads(path.read_text())["scores"].values():
            assert all(RANGES.get(m, (0, 1))[0] <= score <= 1 for m, score in part.items()), name
    return False


def test_an_archive_with_one_value_changed_is_refused_or_harmless(calm, verb, packed, tmp_path):
    for seed in range(8):
        check_spoiled(calm, verb, packed, tmp_path / str(seed), seed)


@pytest.mark.campaign
def test_no_changed_value_of_an_archive_hurts(calm, verb, packed, tmp_path):
    first = random.randrange(10**6)
    refused = 0
    for seed in range(first, first + 150):
        print("seed", seed)  # shown if it fails
        refused += check_spoiled(calm, verb, packed, tmp_path / str(seed), seed)
    assert refused > 75, "most values matter"


# ---------------------------------------------------------------- what is in the store already


def files_in(place: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in place.iterdir() if path.is_file() and path.name != MANIFEST
    }


def put(store: Store, content: dict[str, bytes], place: Path) -> None:
    """Metadata with fitting hashes, as an earlier version merged it or a hand wrote it."""
    store.discard(place)
    with store.attempt("test") as built:
        for name, one in content.items():
            (built / name).write_bytes(one)
        publish(built, place)


def check_read(calm, verb, folder: Path, kind: str, name: str, seed: int) -> None:
    """Metadata that is not as it should be counts as missing, wherever it is read."""
    store = calm.copied(folder / "store")
    chance = random.Random(f"{kind} {name} {seed}")
    place = chance.choice(sorted((store.root / kind).iterdir()))
    hurt = spoil(name, (place / name).read_bytes(), chance)
    (place / name).write_bytes(hurt)
    manifest = json.loads((place / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": len(hurt), "sha256": hashlib.sha256(hurt).hexdigest()}
    (place / MANIFEST).write_text(json.dumps(manifest))
    look(verb, calm.study, store.root, folder / "report")
    typed = [["run", calm.study, "--quiet"]]
    typed += [["export", place.name[:8], folder / "model"]] if kind != "shards" else []
    for words in typed:
        code, out, err = verb(*words, "--store", store.root)
        assert code in (0, 1, 2)
        assert "Traceback" not in out + err


@pytest.mark.parametrize("seeds", [1, pytest.param(25, marks=pytest.mark.campaign)])
@pytest.mark.parametrize(("kind", "name"), METADATA)
def test_no_metadata_ends_a_verb_in_a_traceback(calm, verb, tmp_path, kind, name, seeds):
    first = 1 if seeds == 1 else random.randrange(10**6)
    for seed in range(first, first + seeds):
        print("seed", seed)
        check_read(calm, verb, tmp_path / str(seed), kind, name, seed)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("metrics.jsonl", {"heldout": [1, 2]}),
        ("metrics.jsonl", {"heldout": {"clm": "low"}}),
        ("checkpoint.json", {"epochs": "half"}),
        ("checkpoint.json", {"progress": {"step": 6, "next_sample": 1, "seconds": 1, "machine": {"device": {}}}}),
        ("trial.json", {"metric": "luck"}),
        ("trial.json", {"seconds": {"train": "long"}}),
    ],
)  # fmt: skip
def test_damaged_metadata_is_named_and_its_number_is_not_shown(calm, verb, tmp_path, name, change):
    store = calm.copied(tmp_path / "store")
    key = plan_of(calm.study, store).results["two"]
    place = min(store.trials.iterdir()) if name == "trial.json" else store.checkpoints / key
    files = files_in(place)
    if name == "metrics.jsonl":
        lines = [json.loads(line) for line in files[name].splitlines()]
        lines = [line | change if "heldout" in line else line for line in lines]
        files[name] = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    else:
        files[name] = as_json(json.loads(files[name]) | change)
    put(store, files, place)
    code, out, _ = verb("status", calm.study, "--store", store.root)
    assert code == 0
    assert str(place / name) in out
    told = json.loads(verb("status", calm.study, "--store", store.root, "--json")[1])
    failed = [job["key"] for job in told["jobs"] if job["error"]]
    assert place.name in (*told["damaged"], *failed)
    code, out, _ = verb("run", calm.study, "--store", store.root, "--quiet")
    assert code == 1
    assert str(place / name) in out


def test_the_plan_of_an_archive_is_made_again_from_its_study(verb, packed, tmp_path):
    """Other studies keep what a plan of the store needs: what it says must be true."""
    said = json.loads(packed[PLAN_ENTRY])
    for state in said["jobs"]:
        del state["root"]
        state["steps"] = "zz"
    file = archive(packed | {PLAN_ENTRY: as_json(said)}, tmp_path / "x.tar.zst")
    code, _, err = verb("ledger", "merge", file, "--store", tmp_path / "store")
    assert code == 0, err
    kept = json.loads((tmp_path / "store" / "studies" / "faults" / "plan.json").read_text())
    assert kept["jobs"] == json.loads(packed[PLAN_ENTRY])["jobs"]
