"""Archives: what is not exactly one is refused and leaves nothing behind; what is merged is the same, and nothing is computed twice."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save as save_tensors

from biphase import BPE, Corpus, Hub, Pretrain, Study
from biphase.data.corpus import link_path, write_link
from biphase.data.tokenize import tokenize
from biphase.errors import BiphaseError, DataError, SpecError, StoreError
from biphase.export.folder import find
from biphase.export.tuned import recipe_of
from biphase.keys import data_key
from biphase.records import content_key, encode
from biphase.report.build import build
from biphase.report.pretraining import job_costs
from biphase.store import MANIFEST, Store, publish, read_checked, with_checksum
from biphase.study import archive, ledger
from biphase.study.archive import (
    FINGERPRINTS,
    LEDGER,
    PLAN_ENTRY,
    Archive,
    ArchiveEntry,
    as_json,
    check,
    merge,
    pack,
    write_archive,
)
from biphase.study.build import before_after
from biphase.study.ledger import finetunings
from biphase.study.load import load, pinned, remember, run_named
from biphase.study.plan import PLAN, fingerprints_of, identities, make_plan, remember_fingerprints, save_plan
from biphase.study.worker import Worker
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions

KEY = "0123456789abcdef" * 2
NO_VALUES = b"\x02\0\0\0\0\0\0\0{}"  # a safetensors file without arrays


@pytest.fixture
def good(plan, store) -> dict[str, bytes]:
    """The files of a valid archive with one trial."""
    about = trial_record(next(finetunings(plan)))
    return study_files(plan, store) | {
        f"trials/{about['key']}/trial.json": as_json(about),
        f"trials/{about['key']}/values.safetensors": NO_VALUES,
    }


def trial_record(tuning) -> dict:
    """The record of a fine-tuning's first trial, with invented scores."""
    return {
        "key": tuning.trials[0].key,
        "model": tuning.model,
        "task": encode(tuning.trials[0].task),
        "trained_on": None,
        "finetune": {"protocol": "standard"},
        "metric": "accuracy",
        "lr": tuning.lr,
        "seed": tuning.seed,
        "scores": {"validation": {"accuracy": 0.5}, "test": {"accuracy": 0.25}},
        "examples": {"validation": 4, "test": 4},
        "seconds": {"train": 1.0, "score": 1.0},
        "machine": {},
    }


def study_files(plan, store) -> dict[str, bytes]:
    fingerprints = fingerprints_of(plan.study, identities(store))
    return {PLAN_ENTRY: as_json(plan.to_json()), FINGERPRINTS: as_json(fingerprints)}


def trial_of(files: dict[str, bytes]) -> str:
    return next(name for name in files if name.endswith("trial.json"))


def values_of(files: dict[str, bytes]) -> str:
    return next(name for name in files if name.endswith("values.safetensors"))


def changed(files: dict[str, bytes], name: str, change) -> dict[str, bytes]:
    """The files with one JSON file of them changed, or another in its place."""
    about = json.loads(files[name])
    return files | {name: as_json(change(about) or about)}


def listed(files: dict[str, bytes], study: str = "tuned") -> bytes:
    files = {
        name: {"bytes": len(one), "sha256": hashlib.sha256(one).hexdigest()} for name, one in files.items()
    }
    return as_json({"ledger": archive.FORMAT, "study": study, "files": files})


def member(name: str, content: bytes = b"", **fields) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def crafted(
    path: Path, members: list[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.USTAR_FORMAT
) -> Path:
    """Any tar in zstandard, as somebody else would make it."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=form) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    path.write_bytes(pyarrow.Codec("zstd").compress(plain.getvalue(), asbytes=True))
    return path


def members_of(files: dict[str, bytes]) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [member(LEDGER, listed(files)), *(member(name, content) for name, content in files.items())]


def refused(path: Path, match: str) -> None:
    with pytest.raises(BiphaseError, match=match) as said:
        check(path)
    assert "\n" not in str(said.value)
    assert str(path) in str(said.value)
    assert len(str(said.value)) < 1000


def test_an_archive_made_by_another_tool_is_taken(good, tmp_path):
    merged = merge(check(crafted(tmp_path / "f", members_of(good))), Store(tmp_path / "store"))
    assert merged.added == {"scores": 1, "checkpoints": 0, "corpora": 0}
    assert (tmp_path / "store" / trial_of(good)).read_bytes() == good[trial_of(good)]


def test_what_is_written_is_read_by_other_tools(good, tmp_path):
    write_archive(tmp_path / "f", "tuned", [ArchiveEntry.of(name, one) for name, one in good.items()])
    stream = pyarrow.CompressedInputStream(str(tmp_path / "f"), "zstd")
    with tarfile.open(fileobj=io.BytesIO(stream.read())) as tar:
        assert tar.getnames() == [LEDGER, *good]
        assert tar.extractfile(PLAN_ENTRY).read() == good[PLAN_ENTRY]
        assert {(one.mtime, one.uid, one.mode) for one in tar} == {(0, 0, 0o644)}


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../outside.json",
        f"trials/../../{KEY}/trial.json",
        f"trials/{KEY}/../../../trial.json",
        f"trials/{KEY}/manifest.json",
        f"trials/{KEY[:-1]}/trial.json",
        f"trials/{KEY.upper()}/trial.json",
        f"checkpoints/{KEY}/model.safetensors",
        f"metadata/checkpoints/{KEY}/model.safetensors",
        f"shards/{KEY}/card.json",
        "study/../plan.json",
        "studies/tuned/plan.json",
        "leases/x",
        f"corpora/link-{KEY}.json/x",
        f"leaves\\{KEY}\\trial.json",
        f"trials/{KEY}/trial.json\0.txt",
        f"trials/{KEY}/trial.json\n",
        "",
    ],
)
def test_names_outside_the_layout_are_refused_before_anything_is_read(good, name, tmp_path):
    files = {LEDGER: listed(good | {name: b"{}"}), **good}
    refused(crafted(tmp_path / "f", [member(*one) for one in files.items()]), "no place|holds")


@pytest.mark.parametrize("name", ["trial", "/etc/passwd", "../x", PLAN_ENTRY])
@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE],
)
def test_links_devices_and_folders_are_refused(good, kind, name, tmp_path):
    members = members_of(good)
    name = trial_of(good) if name == "trial" else name
    members.insert(list(good).index(trial_of(good)) + 1, member(name, type=kind, linkname="/etc/passwd"))
    refused(crafted(tmp_path / "f", members), "plain file")


def test_extended_headers_are_refused_whatever_they_say(good, tmp_path):
    members = members_of(good)
    members[1][0].pax_headers = {"path": "../../outside", "comment": "x" * 10_000}
    refused(crafted(tmp_path / "f", members, tarfile.PAX_FORMAT), "plain file")
    members = members_of(good)
    members.insert(1, member("l" * 300))
    refused(crafted(tmp_path / "g", members, tarfile.GNU_FORMAT), "plain file")


def test_a_file_that_is_not_listed_not_there_or_another_one_is_refused(good, tmp_path):
    more = good | {f"study/failures/{KEY}.json": as_json({"key": KEY, "error": "e", "at": ""})}
    refused(crafted(tmp_path / "a", [member(LEDGER, listed(good)), *members_of(more)[1:]]), "it says")
    refused(crafted(tmp_path / "b", [member(LEDGER, listed(more)), *members_of(good)[1:]]), "no file")
    changed = good | {FINGERPRINTS: good[FINGERPRINTS].replace(b"task", b"tusk")}
    refused(crafted(tmp_path / "c", [member(LEDGER, listed(good)), *members_of(changed)[1:]]), "was packed")
    longer = good | {FINGERPRINTS: good[FINGERPRINTS] + b" "}
    refused(crafted(tmp_path / "d", [member(LEDGER, listed(good)), *members_of(longer)[1:]]), "bytes")
    turned = dict(reversed(good.items()))
    refused(crafted(tmp_path / "e", [member(LEDGER, listed(good)), *members_of(turned)[1:]]), "should be")
    twice = members_of(good)
    refused(crafted(tmp_path / "f", [*twice, twice[-1]]), "it says")
    trial = [name for name in good if name.startswith("trials/")]
    apart = {
        trial[0]: good[trial[0]],
        PLAN_ENTRY: good[PLAN_ENTRY],
        FINGERPRINTS: good[FINGERPRINTS],
        trial[1]: good[trial[1]],
    }
    refused(crafted(tmp_path / "g", members_of(apart)), "holds")
    half = {name: one for name, one in good.items() if name != trial[1]}
    refused(crafted(tmp_path / "h", members_of(half)), "holds.*trial.json")
    refused(crafted(tmp_path / "i", members_of({FINGERPRINTS: good[FINGERPRINTS]})), "begin with")


def test_a_bomb_is_refused_before_it_goes_off(good, tmp_path, monkeypatch):
    bomb = good | {values_of(good): bytes(archive.UNPACKED)}
    path = crafted(tmp_path / "f", members_of(bomb))
    assert path.stat().st_size < 100_000
    read = []

    class Counted(pyarrow.CompressedInputStream):
        def read(self, size=None):
            read.append(size)
            return super().read(size)

    monkeypatch.setattr(pyarrow, "CompressedInputStream", Counted)
    refused(path, "its size")
    assert sum(read) < 10_000
    monkeypatch.undo()
    refused(crafted(tmp_path / "g", [member(LEDGER, b" " * (archive.LARGEST_LISTING + 1))]), "bytes")
    listing = json.loads(listed(good))
    listing["files"][PLAN_ENTRY]["bytes"] = -1
    refused(crafted(tmp_path / "h", [member(LEDGER, as_json(listing)), *members_of(good)[1:]]), "unpack to")
    for name, bytes_ in ((PLAN_ENTRY, 10**30), (trial_of(good), archive.LARGEST["trial.json"] + 1)):
        listing = json.loads(listed(good))
        listing["files"][name]["bytes"] = bytes_
        path = crafted(tmp_path / "i", [member(LEDGER, as_json(listing)), *members_of(good)[1:]])
        refused(path, f"{name}.*would unpack")


@pytest.mark.parametrize(
    "listing",
    [b"", b"no JSON", b"[]", b"{}", b'{"ledger": 2, "study": "x", "files": {}}', b"[" * 100_000,
     b'{"ledger": 2, "study": "x", "files": {"study/plan.json": 3}}', b'{"ledger": 2, "study": "x", "files": [1]}',
     *(b'{"ledger": 2, "study": "x", "files": {"study/plan.json": {"bytes": %s, "sha256": ""}}}' % one
       for one in (b"1e999", b"NaN", b"2.5", b"true", b'"3"', b"9" * 4000, b"-" + b"9" * 4000)),
     b'{"ledger": %s, "study": "x", "files": {}}' % (b"9" * 4000)],
    ids=range(16),
)  # fmt: skip
def test_a_first_file_that_says_nothing_is_refused(listing, tmp_path):
    refused(crafted(tmp_path / "f", [member(LEDGER, listing)]), "valid archive")


def test_what_is_no_archive_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no file"):
        Archive.open(tmp_path / "none")
    for name, content in {
        "empty": b"",
        "text": b"hello",
        "magic": archive.MAGIC,
        "noise": archive.MAGIC + b"x" * 99,
    }.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "valid archive")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("trial", {"key": "f" * 32}),
        ("trial", {"scores": {}}),
        ("trial", {"seconds": {"train": "long"}}),
        ("trial", []),
        ("trial", {"lr": "nan"}),
        ("trial", {"lr": 10**400}),
        ("trial", {"lr": 0.5}),
        ("trial", {"seed": True}),
        ("trial", {"model": KEY}),
        ("trial", {"metric": "luck"}),
        ("trial", {"machine": {"device": {"nested": "one"}}}),
        ("trial", {"examples": {"validation": 4, "test": 0}}),
        ("trial", {"scores": {"validation": {"accuracy": 0.5}, "test": {"accuracy": 37.0}}}),
        ("trial", {"scores": {"validation": {"accuracy": -5}, "test": {"accuracy": 0.5}}}),
        ("trial", {"scores": {part: {"accuracy": 0.5, "f1": 0.5} for part in ("validation", "test")}}),
        ("trial", {"scores": {part: {"accuracy": "0.5"} for part in ("validation", "test")}}),
        ("trial", {"constant": {"test": 1}}),
        ("trial", {"constant": {"train": ""}}),
        ("trial", {"baselines": {"trivial": {"accuracy": 0.5}}}),
        ("trial", {"baselines": {"trivial": {"accuracy": {"what": "chance", "test": 0.5}}}}),
        ("trial", {"baselines": {"trivial": {"accuracy": {"what": "x", "validation": 0.5, "test": "0.5"}}}}),
        (PLAN_ENTRY, {"study": 3}),
        (PLAN_ENTRY, {"study": {"kind": "Nothing"}}),
        (PLAN_ENTRY, {"jobs": []}),
        (PLAN_ENTRY, {"results": {}}),
        (FINGERPRINTS, []),
        (FINGERPRINTS, {"task": {}}),
        (FINGERPRINTS, {"task": {KEY: KEY}}),
        (FINGERPRINTS, {"data": {}}),
        (FINGERPRINTS, {"more": {}}),
        ("pins.json", {"owner/name": "main"}),
        (f"corpora/link-{KEY}.json", {"source": "s", "heldout": "", "folder": "/", "fingerprint": "f"}),
        (f"study/failures/{KEY}.json", {"key": "f" * 32, "error": ""}),
        (f"metadata/shards/{KEY}/card.json", {"corpus": None}),
    ],
)
def test_files_that_do_not_say_what_they_should_are_refused(good, name, content, tmp_path):
    name = trial_of(good) if name == "trial" else name
    about = json.loads(good[name]) | content if name in good and isinstance(content, dict) else content
    refused(crafted(tmp_path / "f", members_of(good | {name: as_json(about)})), "this version")


def test_numbers_that_are_none_are_refused(good, tmp_path):
    for name in (PLAN_ENTRY, trial_of(good)):
        for number in (b"NaN", b"Infinity"):
            hurt = good[name].replace(b'"question": ""', b'"question": ' + number)
            hurt = hurt.replace(b'"accuracy": 0.25', b'"accuracy": ' + number)
            assert hurt != good[name]
            refused(crafted(tmp_path / "f", members_of(good | {name: hurt})), "this version")


def test_a_study_cannot_name_a_place_outside_the_store(good, tmp_path):
    for name in ("../../outside", "/tmp/outside", "..", ""):
        files = changed(good, PLAN_ENTRY, lambda about, name=name: about["study"].update(name=name))
        members = [member(LEDGER, listed(files, name)), *members_of(files)[1:]]
        refused(crafted(tmp_path / "f", members), "without slashes")
    other = changed(good, PLAN_ENTRY, lambda about: about["study"].update(name="other"))
    refused(crafted(tmp_path / "f", members_of(other)), "another study")


def test_a_cut_or_flipped_file_is_refused_wherever_it_was_hurt(good, tmp_path):
    whole = tmp_path / "whole"
    noise = np.frombuffer(hashlib.shake_256(b"noise").digest(3_000), np.uint8) % 2

    def more(about):
        about["examples"]["test"] = 3_000
        about["scores"]["test"]["accuracy"] = float(noise.mean())

    files = changed(good, trial_of(good), more) | {values_of(good): save({"test/accuracy": noise})}
    write_archive(whole, "tuned", [ArchiveEntry.of(name, one) for name, one in files.items()])
    check(whole)
    content, hurt = whole.read_bytes(), tmp_path / "hurt"
    for length in [*range(0, len(content), 97), len(content) - 1]:
        hurt.write_bytes(content[:length])
        refused(hurt, "valid archive")
    harmless = []
    for place in range(0, len(content), 13):
        for bit in (1, 64):
            hurt.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            try:
                check(hurt)
                harmless.append((place, bit))
            except BiphaseError:
                continue
    for place, bit in harmless:  # bits that mean nothing: what comes out is the same to the last byte
        hurt.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        assert list(check(hurt).archive.contents()) == list(check(whole).archive.contents())
    assert len(harmless) < 5
    hurt.write_bytes(content + b"more")
    refused(hurt, "damaged")
    hurt.write_bytes(content + content)
    refused(hurt, "it says")


def test_a_refused_file_leaves_the_store_as_it_was_whatever_came_before_it(good, verb, tmp_path):
    sane = crafted(tmp_path / "sane", members_of(good))
    bad = crafted(tmp_path / "bad", members_of(good)[:-1])
    code, out, err = verb("ledger", "merge", sane, bad, "--store", tmp_path / "other")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert not (tmp_path / "other").exists()


def test_a_file_that_changes_while_it_is_packed_is_not_packed(tmp_path):
    source = ArchiveEntry.of(PLAN_ENTRY, b"{}", lambda: b"[]")
    with pytest.raises(StoreError, match="changed while"):
        write_archive(tmp_path / "f", "s", [source])
    assert not list(tmp_path.iterdir())


def test_more_files_than_a_reader_would_take_are_not_packed(good, tmp_path, monkeypatch):
    sources = [ArchiveEntry.of(name, one) for name, one in good.items()]
    monkeypatch.setattr(archive, "LARGEST_LISTING", 100)
    with pytest.raises(SpecError, match=r"4.*--only PATTERN"):
        write_archive(tmp_path / "f", "tuned", sources)
    assert not list(tmp_path.glob("f*"))


# ---------------------------------------------------------------- values by example


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("test/accuracy", torch.zeros(4, dtype=torch.bfloat16)),
        ("test/accuracy", torch.zeros(4, dtype=torch.float8_e4m3fn)),
        ("test/accuracy", torch.zeros(())),
        ("test/accuracy", torch.zeros(5)),
        ("test/accuracy", torch.zeros(4, 2)),
        ("test/entity_counts", torch.zeros(4)),
        ("test/entity_counts", torch.zeros(4, 2)),
        ("train/accuracy", torch.zeros(4)),
        ("test/accuracy", torch.tensor([0.0, 0.0, 0.0, float("nan")])),
        ("test/accuracy", torch.tensor([-1.0, 2.0, 0.0, 0.0])),
        ("test/accuracy", torch.tensor([1.0, 1.0, 0.0, 0.0])),  # its score is 0.25
        ("test/entity_counts", -torch.ones(4, 3)),
    ],
)
def test_values_that_a_report_cannot_count_with_are_refused(good, name, tensor, tmp_path):
    fine = save(
        {"test/entity_counts": np.zeros((4, 3), np.int32), "validation/accuracy": np.arange(4) % 2 == 0}
    )
    check(crafted(tmp_path / "f", members_of(good | {values_of(good): fine})))
    for content in (save_tensors({name: tensor}), fine[:-1]):
        refused(crafted(tmp_path / "g", members_of(good | {values_of(good): content})), "values.safetensors")


def test_predictions_may_come_along_and_hold_numbers_of_a_part(good, tmp_path):
    trial = trial_of(good)
    name = trial.replace("trial.json", "predictions.safetensors")
    fine = save({"test/ids": np.frombuffer(b"[1,2]", np.uint8), "test/words": np.ones(2, np.int32)})
    merged = merge(check(crafted(tmp_path / "f", members_of(good | {name: fine}))), Store(tmp_path / "store"))
    assert merged.added["scores"] == 1
    assert (tmp_path / "store" / name).read_bytes() == fine
    for odd in (fine[:-1], save({"train/ids": np.ones(2)})):
        refused(crafted(tmp_path / "g", members_of(good | {name: odd})), "predictions.safetensors")
    elsewhere = {place: one for place, one in good.items() if not place.startswith("trials/")}
    elsewhere |= {f"metadata/{trial}": good[trial], f"metadata/{name}": fine}
    refused(crafted(tmp_path / "h", members_of(elsewhere)), "metadata/trials")


# ---------------------------------------------------------------- an archive holds results of its own study


def test_only_models_that_the_study_starts_from_are_pinned(study, store, model_folders, tmp_path):
    local = str(model_folders["bert"])
    runs = (Pretrain("pinned", start=Hub("owner/model")), Pretrain("local", start=Hub(local)))
    told = study_files(make_plan(replace(study, runs=runs), identities(store)), store)
    files = told | {"pins.json": as_json({"owner/model": "a" * 40})}
    check(crafted(tmp_path / "f", members_of(files)))
    for source in ("owner/other", local):
        more = files | {"pins.json": as_json({"owner/model": "a" * 40, source: "a" * 40})}
        refused(crafted(tmp_path / "f", members_of(more)), f"pins {source}")


def test_only_corpora_that_the_study_reads_are_linked(study, store, tiny_run, tmp_path):
    mine, other = (Corpus("fine", f"hf://owner/{name}@{'c' * 40}/*.jsonl", BPE(320)) for name in ("a", "b"))
    plan = make_plan(replace(study, runs=(tiny_run("one", corpus=mine),)), identities(store))
    for corpus, said in (
        (mine, {}),
        (other, {}),
        (mine, {"folder": "/there"}),
        (mine, {"fingerprint": "short"}),
    ):
        link = {"source": corpus.source, "heldout": "", "fingerprint": KEY} | said
        name = f"corpora/{link_path(corpus, Store(tmp_path)).name}"
        path = crafted(tmp_path / "f", members_of(study_files(plan, store) | {name: as_json(link)}))
        if corpus is mine and not said:
            check(path)
        else:
            refused(path, "does not read" if corpus is other else "is no link|fingerprint")


def test_only_jobs_of_the_study_have_failed(good, plan, tmp_path):
    files = good
    for at in (*plan.jobs, *(one.key for one in finetunings(plan))):
        failure = {f"study/failures/{at}.json": as_json({"key": at, "error": "e", "at": ""})}
        files = {**files, **failure}
    check(crafted(tmp_path / "f", members_of(files)))
    more = files | {f"study/failures/{KEY}.json": as_json({"key": KEY, "error": "e", "at": ""})}
    refused(crafted(tmp_path / "g", members_of(more)), "the study")


@pytest.mark.parametrize("field", ["fingerprint", "tokenizer_fingerprint"])
def test_a_card_without_a_fingerprint_is_refused(good, shards, field, tmp_path):
    card = json.loads((shards / "card.json").read_text())
    name = f"metadata/shards/{shards.name}/card.json"
    check(crafted(tmp_path / "f", members_of(good | {name: as_json(card)})))
    for wrong in ({field: 3}, {field: ""}):
        refused(crafted(tmp_path / "f", members_of(good | {name: as_json(card | wrong)})), "fingerprint")
    refused(crafted(tmp_path / "f", members_of(good | {name: as_json(card | {field: KEY})})), "the card")
    del card[field]
    refused(crafted(tmp_path / "f", members_of(good | {name: as_json(card)})), field)


def test_trials_checkpoints_and_corpora_of_another_study_are_refused(
    good, plan, study, store, tiny_run, tmp_path
):
    """What would be taken for results of another study of the store, though nobody asked for it."""
    other = make_plan(replace(study, runs=(tiny_run("other", seed=8),)), identities(store))
    training = next(finetunings(other))
    about = json.loads(good[trial_of(good)]) | {"key": training.trials[0].key, "model": training.model}
    planted = f"metadata/trials/{about['key']}/trial.json"
    refused(crafted(tmp_path / "f", members_of(good | {planted: as_json(about)})), "study's")
    said = changed(good, PLAN_ENTRY, lambda about: about["results"].update(both=training.model))
    refused(crafted(tmp_path / "f", members_of(said | {planted: as_json(about)})), "its study")


def test_an_archive_of_an_earlier_version_is_planned_by_its_cards(good, shards, tmp_path):
    old = changed(good, FINGERPRINTS, lambda about: about.pop("data") and None)
    refused(crafted(tmp_path / "f", members_of(old)), "'tiny'")
    card = {f"metadata/shards/{shards.name}/card.json": (shards / "card.json").read_bytes()}
    check(crafted(tmp_path / "f", members_of(old | card)))


def test_a_study_that_would_take_for_ever_to_plan_is_refused(good, tmp_path):
    def grow(about):
        about["study"]["finetune"] |= {"lrs": [n / 1e5 for n in range(1, 2_000)], "seeds": list(range(2_000))}

    refused(crafted(tmp_path / "f", members_of(changed(good, PLAN_ENTRY, grow))), "more than")


# ---------------------------------------------------------------- pack and merge


def packed(plan, store: Store, file: Path, **options) -> Path:
    pack(plan, store, identities(store), file, **options)
    return file


def received(file: Path, root: Path) -> Store:
    """The archive in a store of its own."""
    store = Store(root)
    merge(check(file), store)
    return store


def plan_in(store: Store):
    loaded = load(store.studies / "tuned" / PLAN)
    return make_plan(loaded.study, identities(store), loaded.question)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def report(plan, store: Store, folder: Path) -> dict[str, bytes]:
    build(plan, store, folder, static=False)
    return files_of(folder)


def computed(plan, store: Store, **options) -> list[str]:
    """What a worker says it did."""
    said: list[str] = []
    worker = Worker(
        plan, store, identities(store), Ranks(0, 1, torch.device("cpu")), RuntimeOptions(quiet=True, loaders=0),
        say=said.append, **({"wanted": set(plan.jobs)} | options),
    )  # fmt: skip
    outcome = worker.work()
    assert not outcome.failed
    return [line for line in said if "fine-tunings" in line or "tok/s" in line]


def rewritten(place: Path, name: str, change) -> None:
    """A result published anew with one JSON file changed."""
    about = json.loads((place / name).read_text())
    change(about)
    (place / name).write_text(json.dumps(about))
    (place / MANIFEST).unlink()
    built = place.with_name("built")
    place.rename(built)
    assert publish(built, place)


# ---------------------------------------------------------------- there and back


def test_the_report_of_a_merged_store_is_the_same_byte_for_byte(plan, finished, tmp_path):
    file = packed(plan, finished, tmp_path / "one.ledger")
    store = received(file, tmp_path / "other")
    assert {path.name for path in store.root.rglob("*.safetensors")} == {
        "values.safetensors",
        "predictions.safetensors",
    }
    assert not store.checkpoints.exists()
    assert not store.shards.exists()
    there = plan_in(store)
    assert there.results == plan.results
    here = report(plan, finished, tmp_path / "report-here")
    assert report(there, store, tmp_path / "report-there") == here
    assert len(here) > 8


def test_the_same_ledger_gives_the_same_file_also_after_it_travelled(plan, finished, tmp_path):
    one = packed(plan, finished, tmp_path / "one.ledger").read_bytes()
    for path in finished.root.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert packed(plan, finished, tmp_path / "two.ledger").read_bytes() == one
    store = received(tmp_path / "one.ledger", tmp_path / "other")
    assert packed(plan_in(store), store, tmp_path / "three.ledger").read_bytes() == one
    assert {path.name for path in tmp_path.glob("*ledger*")} == {"one.ledger", "two.ledger", "three.ledger"}


def test_a_study_is_planned_and_reported_where_neither_its_text_nor_its_tasks_are(plan, finished, tmp_path):
    file = packed(plan, finished, tmp_path / "one.ledger")
    store = received(file, tmp_path / "other")
    corpus = plan.study.runs[0].corpus
    toys = Path(plan.study.finetune.tasks[0].source)
    hidden = {Path(corpus.source).parent: tmp_path / "text", toys: tmp_path / "toys"}
    for place, away in hidden.items():
        place.rename(away)
    try:
        there = plan_in(store)
        assert there.results == plan.results
        assert there.tasks == plan.tasks
        assert ledger.count(there, store) == ledger.count(plan, finished)
        with pytest.raises(DataError):
            make_plan(plan.study, identities(Store(tmp_path / "empty")))
    finally:
        for place, away in hidden.items():
            away.rename(place)


def test_merging_again_changes_nothing(plan, finished, tmp_path):
    file = packed(plan, finished, tmp_path / "one.ledger")
    store = received(file, tmp_path / "other")
    before = files_of(store.root)
    again = merge(check(file), store)
    assert not any(again.added.values())
    assert again.already == len(plan.jobs) + 36 + 1
    assert again.kept == []
    assert files_of(store.root) == before
    home = merge(check(file), finished)
    assert not any(home.added.values()), "a store learns nothing from its own archive"
    assert not finished.metadata.exists()


def test_a_study_on_its_way_is_packed_as_far_as_it_is(plan, finished, tmp_path):
    gone = plan.results["both"]
    shutil.rmtree(finished.checkpoints / gone)
    every = list(ledger.finetunings(plan, {gone}))
    for training in every:
        for trial in training.trials:
            shutil.rmtree(finished.trials / trial.key)
    early = received(packed(plan, finished, tmp_path / "early.ledger"), tmp_path / "early")
    assert report(plan, early, tmp_path / "c") == report(plan, finished, tmp_path / "d")
    ledger.note_failure(plan, finished, gone, ValueError("the disk was full"))
    ledger.note_failure(plan, finished, plan.results["clm"], ValueError("mended since"))
    (finished.attempts / "left").mkdir(parents=True)
    told = pack(plan, finished, identities(finished), tmp_path / "one.ledger")
    assert (told.jobs, told.jobs_planned) == (len(plan.jobs) - 1, len(plan.jobs))
    assert (told.scores, told.scores_planned, told.failures) == (24, 36, 1)
    store = received(tmp_path / "one.ledger", tmp_path / "other")
    assert ledger.survey_jobs(plan, store)[gone].error == "ValueError: the disk was full"
    noted = json.loads((store.studies / "tuned" / "failures" / f"{gone}.json").read_text())
    assert "traceback" not in noted
    assert report(plan_in(store), store, tmp_path / "a") == report(plan, finished, tmp_path / "b")


def test_two_machines_that_both_trained_the_trunk_make_the_whole(plan, finished, shards, tmp_path):
    files = []
    for names in (("clm", "clm-4"), ("both",)):
        machine = Store(tmp_path / names[0])
        machine.shards.mkdir(parents=True)
        (machine.shards / shards.name).symlink_to(shards)
        results = {plan.results[name] for name in names}
        computed(
            plan, machine, wanted={one.key for key in results for one in plan.path(key)}, evaluated=results
        )
        files.append(packed(plan, machine, tmp_path / f"{names[0]}.ledger"))
    store = received(files[0], tmp_path / "other")
    merged = merge(check(files[1]), store)
    assert merged.kept == [f"checkpoints/{plan.results['clm-4'][:8]}: computed twice"]
    assert merged.added["scores"] == 12
    built = build(plan_in(store), store, tmp_path / "a", static=False)
    whole = build(plan, finished, tmp_path / "b", static=False)
    assert not built.content.missing.any
    assert built.to_json()["claims"] == whole.to_json()["claims"]
    assert all(job.seconds is None or job.seconds >= 0 for job in job_costs(plan, store))
    mine, theirs = ((tmp_path / one / "scores.csv").read_text() for one in "ab")
    assert mine == theirs, "the same bits, so the same scores"


def test_what_is_damaged_is_left_out_and_named(plan, finished, tmp_path):
    trial = next(ledger.finetunings(plan)).trials[0].key
    (finished.trials / trial / "trial.json").write_text("{}")
    told = pack(plan, finished, identities(finished), tmp_path / "one.ledger")
    assert told.scores == told.scores_planned - 1
    assert len(told.left_out) == 1
    assert trial in told.left_out[0]


def test_a_damaged_result_here_is_named_and_the_rest_is_merged(plan, finished, tmp_path):
    file = packed(plan, finished, tmp_path / "one.ledger")
    trial = next(ledger.finetunings(plan)).trials[0].key
    store = Store(tmp_path / "other")
    place = store.trials / trial
    place.mkdir(parents=True)
    (place / MANIFEST).write_text("")
    told = merge(check(file), store)
    assert [one.startswith(f"trials/{trial[:8]}: damaged here") for one in told.kept] == [True]
    assert sum(told.added.values()) == len(plan.jobs) + 36 - 1 + 1


def test_a_file_that_is_no_ledger_is_not_overwritten(plan, store, request, tmp_path):
    with pytest.raises(SpecError, match=r"of tuned.*biphase run"):  # nothing is computed
        packed(plan, store, tmp_path / "one.ledger")
    assert not list(tmp_path.glob("*ledger*"))
    finished = request.getfixturevalue("finished")
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(SpecError, match="another file"):
        packed(plan, finished, tmp_path / "notes")
    with pytest.raises(SpecError, match="no folder"):
        packed(plan, finished, tmp_path / "nowhere" / "one.ledger")
    assert (tmp_path / "notes").read_text() == "mine"


def put_trial(store: Store, tuning) -> None:
    """Publish an invented trial, where nothing need be computed."""
    about = trial_record(tuning)
    with store.attempt("trial") as folder:
        (folder / "trial.json").write_text(json.dumps(about))
        (folder / "values.safetensors").write_bytes(NO_VALUES)
        publish(folder, store.trials / about["key"])


def put_card(store: Store, corpus: Corpus) -> None:
    """An invented corpus, as far as its card."""
    card = {"corpus": encode(corpus), "fingerprint": "f" * 32, "tokenizer_fingerprint": "e" * 32}
    card |= dict.fromkeys(("vocab", "eos_id", "mask_id", "train_tokens", "heldout_tokens"), 9)
    with store.attempt("shards") as folder:
        (folder / "card.json").write_text(json.dumps(card | {"special_ids": [], "unigram_entropy": 1.5}))
        publish(folder, store.shards / data_key(corpus, "f" * 32, "e" * 32))


def test_pins_links_and_fingerprints_are_packed(grid, tiny_run, model_folders, store, tmp_path):
    corpus = Corpus("fine", f"hf://owner/text@{'c' * 40}/*.jsonl", BPE(320))
    text, bert = tmp_path / "text", tmp_path / "bert"
    text.mkdir()
    (text / "a.jsonl").write_text('{"text": "a"}\n')
    shutil.copytree(model_folders["bert"], bert)
    write_link(corpus, store, text)
    (text / "b.jsonl").write_text('{"text": "more since then"}\n')
    remember("owner/model", "a" * 40, store)
    remember("owner/other", "b" * 40, store)
    study = Study(
        "names",
        (
            Pretrain("local", start=Hub(str(bert))),
            Pretrain("pinned", start=Hub("owner/model")),
            tiny_run("linked", corpus=corpus),
        ),
        grid,
    )
    plan = make_plan(pinned(study, store, ask=False), identities(store))
    put_trial(store, next(ledger.finetunings(plan)))
    file = packed(plan, store, tmp_path / "one.ledger")
    for folder in (text, bert):
        shutil.rmtree(folder)
    other = received(file, tmp_path / "other")
    assert json.loads((other.root / "pins.json").read_text()) == {"owner/model": "a" * 40}
    assert make_plan(pinned(study, other, ask=False), identities(other)) == plan
    assert ledger.count(plan, other).done == 1
    assert merge(check(file), other).already == 1
    assert not [name for name, content in files_of(other.root).items() if str(text).encode() in content]
    text.mkdir()  # something else lies there on this machine
    (text / "a.jsonl").write_text('{"text": "mine"}\n')
    assert make_plan(pinned(study, other, ask=False), identities(other)) == plan
    with pytest.raises(DataError, match=r"tokenize fine --from FOLDER.*remove.*link-") as refused:
        tokenize(corpus, other, report=lambda line: None)
    assert "\n" not in str(refused.value)
    assert not other.shards.exists()
    again = packed(
        make_plan(pinned(study, other, ask=False), identities(other)), other, tmp_path / "two.ledger"
    )
    assert again.read_bytes() == file.read_bytes()

    taken = Store(tmp_path / "taken")  # where the same names stand for something else
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_text('{"text": "b"}\n')
    write_link(corpus, taken, tmp_path / "elsewhere")
    remember("owner/model", "d" * 40, taken)
    before = files_of(taken.root)
    kept = merge(check(file), taken).kept
    assert len(kept) == 2
    assert any("pinned to dddddddd, and to aaaaaaaa there" in one for one in kept)
    assert any("linked to another folder here" in one for one in kept)
    assert {name: content for name, content in files_of(taken.root).items() if name in before} == before

    used = Store(tmp_path / "used")  # where it was read from the hub itself
    put_card(used, corpus)
    assert any("other text here than there" in one for one in merge(check(file), used).kept)
    assert not list((used.root / "corpora").glob("link-*"))

    apart = Store(tmp_path / "apart")  # where another part of it was held out, so it is another corpus
    put_card(apart, replace(corpus, heldout="held/*.jsonl"))
    assert merge(check(file), apart).kept == []

    planned = Store(tmp_path / "planned")  # where a study is to read it from the hub
    mine = make_plan(Study("mine", (tiny_run("one", corpus=corpus),)), identities(planned))
    save_plan(mine, planned)
    assert any("studies/mine reads it from the hub" in one for one in merge(check(file), planned).kept)
    assert make_plan(mine.study, identities(planned)) == mine


def test_two_versions_of_what_is_not_here_are_not_mixed_up(plan, finished, tmp_path):
    store = received(packed(plan, finished, tmp_path / "one.ledger"), tmp_path / "other")
    toys = plan.study.finetune.tasks[0]
    away = Path(toys.source).rename(tmp_path / "away")
    try:
        assert identities(store).task(toys) == plan.tasks["toys"]
        remember_fingerprints("more", {"task": {content_key(toys): "another"}, "hub": {}, "reads": {}}, store)
        with pytest.raises(SpecError, match="several versions"):
            identities(store).task(toys)
    finally:
        away.rename(toys.source)


def test_another_version_of_the_study_does_not_replace_the_one_here(plan, finished, tmp_path):
    file = packed(plan, finished, tmp_path / "one.ledger")
    path = finished.studies / "tuned" / PLAN
    said = read_checked(path)
    said["study"]["runs"].pop()
    path.write_text(json.dumps(with_checksum(said)))
    merged = merge(check(file), finished)
    assert merged.kept == [
        "studies/tuned/plan.json: another version of the study; give biphase report the study's file"
    ]
    assert read_checked(path) == said


# ---------------------------------------------------------------- without values by example


def test_scores_alone_still_make_a_report_that_says_what_it_lacks(plan, finished, tmp_path):
    whole = packed(plan, finished, tmp_path / "whole.ledger")
    light = packed(plan, finished, tmp_path / "light.ledger", examples=False)
    assert light.stat().st_size < whole.stat().st_size
    store = received(light, tmp_path / "other")
    there = plan_in(store)
    assert ledger.count(there, store).done == ledger.count(plan, finished).done
    built = build(there, store, tmp_path / "report", static=False)
    assert "36 scores came without their values by example" in built.words()
    assert not built.content.missing.unreadable
    assert "computed" not in built.words()
    assert computed(there, store) == []
    more = merge(check(whole), store)
    assert (more.added["scores"], more.kept) == (36, [])
    assert report(there, store, tmp_path / "a") == report(plan, finished, tmp_path / "b")


# ---------------------------------------------------------------- checkpoints without weights


def test_finished_trials_are_not_computed_again_and_weights_only_where_they_are_needed(
    plan, finished, shards, tmp_path
):
    store = received(packed(plan, finished, tmp_path / "one.ledger"), tmp_path / "other")
    assert computed(plan, store) == []
    assert not store.checkpoints.exists()
    entries = ledger.survey_jobs(plan, store)
    assert {entry.standing for entry in entries.values()} == {"done"}
    assert not any(entry.weights for entry in entries.values())

    store.shards.mkdir(parents=True)
    (store.shards / shards.name).symlink_to(shards)
    missing = next(one for one in ledger.finetunings(plan) if one.model == plan.results["clm"])
    shutil.rmtree(store.trials / missing.trials[0].key)
    way = {job.key for job in plan.path(missing.model)}
    assert ledger.settled(plan, store, ledger.count(plan, store)) == set(plan.jobs) - way
    lines = computed(plan, store)
    assert len([line for line in lines if "tok/s" in line]) == len(way)
    assert len([line for line in lines if "· toys ·" in line]) == 1
    assert ledger.keys_with_weights(plan, store) == way
    assert store.has(store.trials / missing.trials[0].key)
    assert ledger.settled(plan, store, ledger.count(plan, store)) == set(plan.jobs)
    # Whole checkpoints are read before metadata-only copies.
    assert store.readable(store.checkpoints / missing.model) == store.checkpoints / missing.model
    again = files_of(store.trials / missing.trials[0].key)["values.safetensors"]
    assert again == files_of(finished.trials / missing.trials[0].key)["values.safetensors"], "the same bits"


def test_whoever_wants_the_weights_is_told_where_they_are(plan, finished, tmp_path):
    store = received(packed(plan, finished, tmp_path / "one.ledger"), tmp_path / "other")
    at = plan.results["clm"]
    for ask in (lambda: find(at[:8], store), lambda: run_named(at[:8], store)):
        with pytest.raises(
            SpecError, match=rf"without its weights.*checkpoints/{at}.*biphase run"
        ) as refused:
            ask()
        assert "\n" not in str(refused.value)
    trial = find(next(ledger.finetunings(plan)).trials[0].key[:8], store)
    with pytest.raises(SpecError, match="its weights"):
        recipe_of(trial, store)
    told = before_after(plan, store, "")
    assert "without its weights" in told[-1]
    assert not any("biphase export" in line for line in told)


# ---------------------------------------------------------------- what is here stays


def test_a_result_computed_twice_is_said_and_the_one_here_is_kept(plan, finished, tmp_path):
    file = packed(plan, finished, tmp_path / "one.ledger")
    slower, better = (training.trials[0].key for training in list(ledger.finetunings(plan))[:2])
    rewritten(finished.trials / slower, "trial.json", lambda about: about["seconds"].update(train=9.0))
    rewritten(
        finished.trials / better, "trial.json", lambda about: about["scores"]["test"].update(accuracy=0.123)
    )
    job = plan.results["clm"]
    rewritten(
        finished.checkpoints / job, "checkpoint.json", lambda about: about["progress"].update(seconds=99.0)
    )
    before = files_of(finished.root)
    merged = merge(check(file), finished)
    assert sorted(merged.kept) == sorted(
        [
            f"trials/{slower[:8]}: computed twice, with the same scores",
            f"trials/{better[:8]}: computed twice, with other scores",
            f"checkpoints/{job[:8]}: computed twice",
        ]
    )
    after = files_of(finished.root)
    assert {name: after[name] for name in before} == before
    assert not finished.metadata.exists()


def test_a_kill_while_merging_leaves_whole_results_and_the_next_merge_ends_it(plan, finished, tmp_path):
    file = packed(plan, finished, tmp_path / "one.ledger")
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from biphase import store as files\n"
        "from biphase.study import archive\n"
        "real, left = files.write_json, [int(sys.argv[3])]\n"
        "def killed(path, value):\n"  # the manifest, between the files and the rename
        "    left[0] -= 1\n"
        "    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(path, value)\n"
        "files.write_json = killed\n"
        "archive.merge(archive.check(Path(sys.argv[1])), files.Store(sys.argv[2]))\n"
    )
    store = Store(tmp_path / "other")
    for writes in (2, 9):
        done = subprocess.run([sys.executable, "-c", code, file, store.root, str(writes)], check=False)
        assert done.returncode == -signal.SIGKILL
        folders = [
            path.parent for kind in ("trials", "metadata") for path in (store.root / kind).rglob(MANIFEST)
        ]
        for folder in folders:
            assert {path.name for path in folder.iterdir()} == {
                MANIFEST,
                *json.loads((folder / MANIFEST).read_text())["files"],
            }
    assert len(folders) >= 7
    assert list(store.attempts.iterdir()), "what was being written is not in its place"
    merge(check(file), store)
    assert report(plan_in(store), store, tmp_path / "a") == report(plan, finished, tmp_path / "b")


# ---------------------------------------------------------------- as it is typed


def test_the_verbs_say_what_travelled_and_what_to_type_next(plan, finished, verb, tmp_path):
    study, file, other = finished.studies / "tuned" / PLAN, tmp_path / "one.ledger", tmp_path / "other"
    jobs = len(plan.jobs)
    code, out, _ = verb("ledger", "pack", study, file, "--store", finished.root)
    assert code == 0
    assert all(fact in out for fact in ("36 of 36", f"{jobs} of {jobs}", "biphase ledger merge one.ledger"))
    code, out, _ = verb("ledger", "merge", file, "--store", other)
    assert code == 0
    assert all(fact in out for fact in ("36 scores", f"{jobs} checkpoints", "1 card"))
    typed = out.split(": biphase ")[1].split()
    assert verb(*typed, "--no-print")[0] == 0
    code, out, _ = verb("status", other / "studies" / "tuned" / PLAN, "--store", other)
    assert all(fact in out for fact in ("24/24", "without weights"))
    code, out, _ = verb("ledger", "merge", file, file, "--store", other, "--json")
    assert [merged["already"] for merged in json.loads(out)] == [36 + jobs + 1] * 2
    code, out, _ = verb("ledger", "pack", study, file, "--store", finished.root, "--only", "both", "--json")
    assert json.loads(out)["scores"] == 12
    for words, fact in (
        (("pack", study, file, "--store", finished.root, "--only", "nothing"), "matches"),
        (("merge", tmp_path / "none", "--store", other), "no file"),
    ):
        code, _, err = verb("ledger", *words)
        assert code == 2
        assert fact in err
