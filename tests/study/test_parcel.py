"""A parcel may come from anywhere: what is not exactly one is refused in one line, and leaves nothing behind."""

import hashlib
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from safetensors.numpy import save
from safetensors.torch import save as save_tensors

from biphase import BPE, Corpus, Hub, Pretrain
from biphase.data.corpus import link_path
from biphase.errors import BiphaseError, SpecError, StoreError
from biphase.records import encode
from biphase.store import Store
from biphase.study import archive
from biphase.study.archive import (
    FINGERPRINTS,
    LEDGER,
    PLAN_ENTRY,
    Archive,
    ArchiveEntry,
    as_json,
    check,
    merge,
    write_archive,
)
from biphase.study.ledger import finetunings
from biphase.study.plan import fingerprints_of, identities, make_plan

KEY = "0123456789abcdef" * 2


@pytest.fixture
def good(plan, store) -> dict[str, bytes]:
    """The files of a sound parcel with one trial."""
    training = next(finetunings(plan))
    trial = training.trials[0]
    about = {
        "key": trial.key,
        "model": training.model,
        "task": encode(trial.task),
        "trained_on": None,
        "finetune": {"protocol": "standard"},
        "metric": "accuracy",
        "lr": training.lr,
        "seed": training.seed,
        "scores": {"validation": {"accuracy": 0.5}, "test": {"accuracy": 0.25}},
        "examples": {"validation": 4, "test": 4},
        "seconds": {"train": 1.0, "score": 1.0},
        "machine": {},
    }
    return told_by(plan, store) | {
        f"trials/{trial.key}/trial.json": as_json(about),
        f"trials/{trial.key}/values.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    }


def told_by(plan, store) -> dict[str, bytes]:
    fingerprints = fingerprints_of(plan.study, identities(store))
    return {PLAN_ENTRY: as_json(plan.to_json()), FINGERPRINTS: as_json(fingerprints)}


def leaf_of(files: dict[str, bytes]) -> str:
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


def sound(files: dict[str, bytes]) -> list[tuple[tarfile.TarInfo, bytes]]:
    return [member(LEDGER, listed(files)), *(member(name, content) for name, content in files.items())]


def refused(path: Path, match: str) -> None:
    with pytest.raises(BiphaseError, match=match) as said:
        check(path)
    assert "\n" not in str(said.value)
    assert str(path) in str(said.value)
    assert len(str(said.value)) < 1000


def test_a_sound_one_made_by_another_tool_is_taken(good, tmp_path):
    merged = merge(check(crafted(tmp_path / "f", sound(good))), Store(tmp_path / "store"))
    assert merged.added == {"scores": 1, "checkpoints": 0, "corpora": 0}
    assert (tmp_path / "store" / leaf_of(good)).read_bytes() == good[leaf_of(good)]


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
    members = sound(good)
    name = leaf_of(good) if name == "trial" else name
    members.insert(list(good).index(leaf_of(good)) + 1, member(name, type=kind, linkname="/etc/passwd"))
    refused(crafted(tmp_path / "f", members), "no plain file")


def test_extended_headers_are_refused_whatever_they_say(good, tmp_path):
    members = sound(good)
    members[1][0].pax_headers = {"path": "../../outside", "comment": "x" * 10_000}
    refused(crafted(tmp_path / "f", members, tarfile.PAX_FORMAT), "no plain file")
    members = sound(good)
    members.insert(1, member("l" * 300))
    refused(crafted(tmp_path / "g", members, tarfile.GNU_FORMAT), "no plain file")


def test_a_file_that_is_not_listed_not_there_or_another_one_is_refused(good, tmp_path):
    more = good | {f"study/failures/{KEY}.json": as_json({"key": KEY, "error": "e", "at": ""})}
    refused(
        crafted(tmp_path / "a", [member(LEDGER, listed(good)), *sound(more)[1:]]), "more in it than it says"
    )
    refused(crafted(tmp_path / "b", [member(LEDGER, listed(more)), *sound(good)[1:]]), "no file")
    changed = good | {FINGERPRINTS: good[FINGERPRINTS].replace(b"task", b"tusk")}
    refused(
        crafted(tmp_path / "c", [member(LEDGER, listed(good)), *sound(changed)[1:]]), "not what was packed"
    )
    longer = good | {FINGERPRINTS: good[FINGERPRINTS] + b" "}
    refused(crafted(tmp_path / "d", [member(LEDGER, listed(good)), *sound(longer)[1:]]), "bytes")
    turned = dict(reversed(good.items()))
    refused(crafted(tmp_path / "e", [member(LEDGER, listed(good)), *sound(turned)[1:]]), "there should be")
    twice = sound(good)
    refused(crafted(tmp_path / "f", [*twice, twice[-1]]), "more in it than it says")
    trial = [name for name in good if name.startswith("trials/")]
    apart = {
        trial[0]: good[trial[0]],
        PLAN_ENTRY: good[PLAN_ENTRY],
        FINGERPRINTS: good[FINGERPRINTS],
        trial[1]: good[trial[1]],
    }
    refused(crafted(tmp_path / "g", sound(apart)), "holds")
    half = {name: one for name, one in good.items() if name != trial[1]}
    refused(crafted(tmp_path / "h", sound(half)), "holds .*trial.json")
    refused(crafted(tmp_path / "i", sound({FINGERPRINTS: good[FINGERPRINTS]})), "begin with")


def test_a_bomb_is_refused_before_it_goes_off(good, tmp_path, monkeypatch):
    bomb = good | {values_of(good): bytes(archive.UNPACKED)}
    path = crafted(tmp_path / "f", sound(bomb))
    assert path.stat().st_size < 100_000
    read = []

    class Counted(pyarrow.CompressedInputStream):
        def read(self, size=None):
            read.append(size)
            return super().read(size)

    monkeypatch.setattr(pyarrow, "CompressedInputStream", Counted)
    refused(path, "of its size")
    assert sum(read) < 10_000
    monkeypatch.undo()
    refused(crafted(tmp_path / "g", [member(LEDGER, b" " * (archive.LARGEST_LISTING + 1))]), "bytes")
    listing = json.loads(listed(good))
    listing["files"][PLAN_ENTRY]["bytes"] = -1
    refused(crafted(tmp_path / "h", [member(LEDGER, as_json(listing)), *sound(good)[1:]]), "would unpack to")
    for name, bytes_ in ((PLAN_ENTRY, 10**30), (leaf_of(good), archive.LARGEST["trial.json"] + 1)):
        listing = json.loads(listed(good))
        listing["files"][name]["bytes"] = bytes_
        path = crafted(tmp_path / "i", [member(LEDGER, as_json(listing)), *sound(good)[1:]])
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
    refused(crafted(tmp_path / "f", [member(LEDGER, listing)]), "no valid archive")


def test_what_is_no_parcel_at_all_is_refused(tmp_path):
    with pytest.raises(SpecError, match="no file"):
        Archive.open(tmp_path / "none")
    for name, content in {
        "empty": b"",
        "text": b"hello",
        "magic": archive.MAGIC,
        "noise": archive.MAGIC + b"x" * 99,
    }.items():
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "no valid archive")


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
    name = leaf_of(good) if name == "trial" else name
    about = json.loads(good[name]) | content if name in good and isinstance(content, dict) else content
    refused(crafted(tmp_path / "f", sound(good | {name: as_json(about)})), "not as this version")


def test_numbers_that_are_none_are_refused(good, tmp_path):
    for name in (PLAN_ENTRY, leaf_of(good)):
        for number in (b"NaN", b"Infinity"):
            hurt = good[name].replace(b'"question": ""', b'"question": ' + number)
            hurt = hurt.replace(b'"accuracy": 0.25', b'"accuracy": ' + number)
            assert hurt != good[name]
            refused(crafted(tmp_path / "f", sound(good | {name: hurt})), "not as this version")


def test_a_study_cannot_name_a_place_outside_the_store(good, tmp_path):
    for name in ("../../outside", "/tmp/outside", "..", ""):
        files = changed(good, PLAN_ENTRY, lambda about, name=name: about["study"].update(name=name))
        members = [member(LEDGER, listed(files, name)), *sound(files)[1:]]
        refused(crafted(tmp_path / "f", members), "one word without slashes")
    other = changed(good, PLAN_ENTRY, lambda about: about["study"].update(name="other"))
    refused(crafted(tmp_path / "f", sound(other)), "of another study")


def test_a_cut_or_flipped_file_is_refused_wherever_it_was_hurt(good, tmp_path):
    whole = tmp_path / "whole"
    noise = np.frombuffer(hashlib.shake_256(b"noise").digest(3_000), np.uint8) % 2

    def more(about):
        about["examples"]["test"] = 3_000
        about["scores"]["test"]["accuracy"] = float(noise.mean())

    files = changed(good, leaf_of(good), more) | {values_of(good): save({"test/accuracy": noise})}
    write_archive(whole, "tuned", [ArchiveEntry.of(name, one) for name, one in files.items()])
    check(whole)
    content, hurt = whole.read_bytes(), tmp_path / "hurt"
    for length in [*range(0, len(content), 97), len(content) - 1]:
        hurt.write_bytes(content[:length])
        refused(hurt, "no valid archive")
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
    refused(hurt, "more in it than it says")


def test_a_refused_file_leaves_the_store_as_it_was_whatever_came_before_it(good, verb, tmp_path):
    sane = crafted(tmp_path / "sane", sound(good))
    bad = crafted(tmp_path / "bad", sound(good)[:-1])
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
    with pytest.raises(SpecError, match=r"4 files are more than .*--only PATTERN"):
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
    files = good | {values_of(good): save_tensors({name: tensor})}
    refused(crafted(tmp_path / "f", sound(files)), "values.safetensors")


def test_values_are_taken_where_they_are_one_for_each_example(good, tmp_path):
    half = np.array([True, False, True, False])
    values = {"test/entity_counts": np.zeros((4, 3), np.int32), "validation/accuracy": half}
    check(crafted(tmp_path / "f", sound(good | {values_of(good): save(values)})))
    files = good | {values_of(good): save(values)[:-1]}
    refused(crafted(tmp_path / "g", sound(files)), "values.safetensors cannot be read")


def test_predictions_may_come_along_and_hold_numbers_of_a_part(good, tmp_path):
    trial = leaf_of(good)
    name = trial.replace("trial.json", "predictions.safetensors")
    fine = save({"test/ids": np.frombuffer(b"[1,2]", np.uint8), "test/words": np.ones(2, np.int32)})
    merged = merge(check(crafted(tmp_path / "f", sound(good | {name: fine}))), Store(tmp_path / "store"))
    assert merged.added["scores"] == 1
    assert (tmp_path / "store" / name).read_bytes() == fine
    for odd in (fine[:-1], save({"train/ids": np.ones(2)})):
        refused(crafted(tmp_path / "g", sound(good | {name: odd})), "predictions.safetensors")
    elsewhere = {place: one for place, one in good.items() if not place.startswith("trials/")}
    elsewhere |= {f"metadata/{trial}": good[trial], f"metadata/{name}": fine}
    refused(crafted(tmp_path / "h", sound(elsewhere)), "metadata/trials")


# ---------------------------------------------------------------- a parcel speaks for its own study


def test_the_plan_comes_first_because_the_rest_is_judged_by_it(good, tmp_path):
    turned = {FINGERPRINTS: good[FINGERPRINTS], **good}
    refused(crafted(tmp_path / "f", sound(turned)), "does not begin with study/plan.json")


def test_only_models_that_the_study_starts_from_are_pinned(study, store, model_folders, tmp_path):
    local = str(model_folders["bert"])
    runs = (Pretrain("pinned", start=Hub("owner/model")), Pretrain("local", start=Hub(local)))
    told = told_by(make_plan(replace(study, runs=runs), identities(store)), store)
    files = told | {"pins.json": as_json({"owner/model": "a" * 40})}
    check(crafted(tmp_path / "f", sound(files)))
    for source in ("owner/other", local):
        more = files | {"pins.json": as_json({"owner/model": "a" * 40, source: "a" * 40})}
        refused(crafted(tmp_path / "f", sound(more)), f"pins {source}")


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
        path = crafted(tmp_path / "f", sound(told_by(plan, store) | {name: as_json(link)}))
        if corpus is mine and not said:
            check(path)
        else:
            refused(path, "does not read" if corpus is other else "is no link|fingerprint")


def test_only_jobs_of_the_study_have_failed(good, plan, tmp_path):
    files = good
    for at in (*plan.jobs, *(one.key for one in finetunings(plan))):
        failure = {f"study/failures/{at}.json": as_json({"key": at, "error": "e", "at": ""})}
        files = {**files, **failure}
    check(crafted(tmp_path / "f", sound(files)))
    more = files | {f"study/failures/{KEY}.json": as_json({"key": KEY, "error": "e", "at": ""})}
    refused(crafted(tmp_path / "g", sound(more)), "none of the study")


@pytest.mark.parametrize("field", ["fingerprint", "tokenizer_fingerprint"])
def test_a_card_without_a_fingerprint_is_refused(good, shards, field, tmp_path):
    card = json.loads((shards / "card.json").read_text())
    name = f"metadata/shards/{shards.name}/card.json"
    check(crafted(tmp_path / "f", sound(good | {name: as_json(card)})))
    for wrong in ({field: 3}, {field: ""}):
        refused(crafted(tmp_path / "f", sound(good | {name: as_json(card | wrong)})), "fingerprint")
    refused(crafted(tmp_path / "f", sound(good | {name: as_json(card | {field: KEY})})), "not the card")
    del card[field]
    refused(crafted(tmp_path / "f", sound(good | {name: as_json(card)})), field)


def test_scores_states_and_corpora_of_another_study_are_refused(good, plan, study, store, tiny_run, tmp_path):
    """What would be taken for results of another study of the store, though nobody asked for it."""
    other = make_plan(replace(study, runs=(tiny_run("other", seed=8),)), identities(store))
    training = next(finetunings(other))
    about = json.loads(good[leaf_of(good)]) | {"key": training.trials[0].key, "model": training.model}
    planted = f"metadata/trials/{about['key']}/trial.json"
    refused(crafted(tmp_path / "f", sound(good | {planted: as_json(about)})), "none of the study's")
    said = changed(good, PLAN_ENTRY, lambda about: about["results"].update(both=training.model))
    refused(crafted(tmp_path / "f", sound(said | {planted: as_json(about)})), "other keys than its study")


def test_an_archive_of_an_earlier_version_is_planned_by_its_cards(good, shards, tmp_path):
    old = changed(good, FINGERPRINTS, lambda about: about.pop("data") and None)
    refused(crafted(tmp_path / "f", sound(old)), "does not say which text the corpus 'tiny' is")
    card = {f"metadata/shards/{shards.name}/card.json": (shards / "card.json").read_bytes()}
    check(crafted(tmp_path / "f", sound(old | card)))


def test_a_study_that_would_take_for_ever_to_plan_is_refused(good, tmp_path):
    def grow(about):
        about["study"]["finetune"] |= {"lrs": [n / 1e5 for n in range(1, 2_000)], "seeds": list(range(2_000))}

    refused(crafted(tmp_path / "f", sound(changed(good, PLAN_ENTRY, grow))), "plans more than")
