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
from common import republish_json, store_with
from safetensors.numpy import save
from safetensors.torch import save as save_tensors

from biphase import BPE, Corpus, Hub, Pretrain, Study
from biphase.data.corpus import write_link
from biphase.data.tokenize import tokenize
from biphase.errors import BiphaseError, DataError, SpecError
from biphase.export.folder import find
from biphase.export.tuned import recipe_of
from biphase.keys import data_key
from biphase.records import content_key, encode
from biphase.report.build import build
from biphase.report.pretraining import job_costs
from biphase.store import MANIFEST, Store, publish, read_checked, with_checksum
from biphase.study import archive, ledger
from biphase.study.archive import FINGERPRINTS, LEDGER, PLAN_ENTRY, ArchiveEntry, as_json, check, merge
from biphase.study.build import before_after
from biphase.study.ledger import finetunings
from biphase.study.load import load, pinned, remember, run_named
from biphase.study.plan import PLAN, fingerprints_of, identities, make_plan, remember_fingerprints, save_plan

KEY = "0123456789abcdef" * 2
NO_VALUES = b"\x02\0\0\0\0\0\0\0{}"  # a safetensors file without arrays
PARTS = ("validation", "test")
Files = dict[str, bytes]
Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def good(plan, store) -> Files:
    """The files of a valid archive with one trial."""
    about = trial_record(next(finetunings(plan)))
    folder = f"trials/{about['key']}"
    trial = {f"{folder}/trial.json": as_json(about), f"{folder}/values.safetensors": NO_VALUES}
    return study_files(plan, store) | trial


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


def study_files(plan, store) -> Files:
    fingerprints = fingerprints_of(plan.study, identities(store))
    return {PLAN_ENTRY: as_json(plan.to_json()), FINGERPRINTS: as_json(fingerprints)}


def trial_of(files: Files) -> str:
    return next(name for name in files if name.endswith("trial.json"))


def values_of(files: Files) -> str:
    return next(name for name in files if name.endswith("values.safetensors"))


def changed(files: Files, name: str, change) -> Files:
    """The files with one JSON file of them changed."""
    about = json.loads(files[name])
    change(about)
    return files | {name: as_json(about)}


def listed(files: Files, study: str = "tuned") -> bytes:
    entries = {
        name: {"bytes": len(one), "sha256": hashlib.sha256(one).hexdigest()} for name, one in files.items()
    }
    return as_json({"ledger": archive.FORMAT, "study": study, "files": entries})


def member(name: str, content: bytes = b"", **fields) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def members_of(files: Files, listing: bytes | None = None) -> Members:
    """The members of an archive of these files; `listing` may lie about them."""
    return [
        member(LEDGER, listed(files) if listing is None else listing),
        *(member(*file) for file in files.items()),
    ]


def crafted(path: Path, members: Members | Files, form: int = tarfile.USTAR_FORMAT) -> Path:
    """Any tar in zstandard, as somebody else would make it."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=form) as tar:
        for info, content in members_of(members) if isinstance(members, dict) else members:
            tar.addfile(info, io.BytesIO(content))
    path.write_bytes(pyarrow.Codec("zstd").compress(plain.getvalue(), asbytes=True))
    return path


@pytest.fixture
def refused(tmp_path):
    """Check an archive (its path, files or members) that must be refused in one line."""

    def checked(what: Path | Files | Members, match: str) -> None:
        path = what if isinstance(what, Path) else crafted(tmp_path / "refused", what)
        with pytest.raises(BiphaseError, match=match) as said:
            check(path)
        assert "\n" not in str(said.value)
        assert str(path) in str(said.value)
        assert len(str(said.value)) < 1000

    return checked


def test_other_tools_make_and_read_archives(good, tmp_path):
    merged = merge(check(crafted(tmp_path / "f", good)), Store(tmp_path / "store"))
    assert merged.added == {"scores": 1, "checkpoints": 0, "corpora": 0}
    assert (tmp_path / "store" / trial_of(good)).read_bytes() == good[trial_of(good)]
    archive.write_archive(tmp_path / "f", "tuned", [ArchiveEntry.of(name, one) for name, one in good.items()])
    stream = pyarrow.CompressedInputStream(str(tmp_path / "f"), "zstd")
    with tarfile.open(fileobj=io.BytesIO(stream.read())) as tar:
        assert tar.getnames() == [LEDGER, *good]
        assert tar.extractfile(PLAN_ENTRY).read() == good[PLAN_ENTRY]
        assert {(one.mtime, one.uid, one.mode) for one in tar} == {(0, 0, 0o644)}


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../outside.json", "study/../plan.json", "studies/tuned/plan.json", "leases/x", "",
        f"trials/../../{KEY}/trial.json", f"trials/{KEY}/manifest.json", f"trials/{KEY[:-1]}/trial.json",
        f"trials/{KEY.upper()}/trial.json", f"metadata/checkpoints/{KEY}/model.safetensors", f"shards/{KEY}/card.json",
        f"corpora/link-{KEY}.json/x", f"trials/{KEY}/trial.json\n", "long/" * 30,
    ],
)  # fmt: skip
def test_names_outside_the_layout_are_refused(good, name, refused):
    refused(good | {name: b"{}"}, "no place")


@pytest.mark.parametrize("name", ["trial", "/etc/passwd", PLAN_ENTRY])
@pytest.mark.parametrize(
    "kind",
    [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE],
)
def test_links_devices_and_folders_are_refused(good, kind, name, refused):
    members = members_of(good)
    name = trial_of(good) if name == "trial" else name
    members.insert(list(good).index(trial_of(good)) + 1, member(name, type=kind, linkname="/etc/passwd"))
    refused(members, "plain file")


def test_a_file_that_is_not_listed_not_there_or_another_one_is_refused(good, refused):
    more = good | {archive.PINS: as_json({})}
    tusk = good | {FINGERPRINTS: good[FINGERPRINTS].replace(b"task", b"tusk")}
    for files, listing, match in (
        (more, good, "does not list"),
        (good, more, "missing"),
        (tusk, good, "was packed"),
        (dict(reversed(good.items())), good, "does not list"),
    ):
        refused(members_of(files, listed(listing)), match)
    refused([*members_of(good), members_of(good)[-1]], "does not list")
    for name in good:
        refused({other: content for other, content in good.items() if other != name}, "this version")


def test_a_bomb_is_refused_before_it_goes_off(good, refused, tmp_path, monkeypatch):
    """Whether the bytes are in a file or in a header, which `tarfile` reads by itself."""
    read = []

    class Counted(pyarrow.CompressedInputStream):
        def read(self, size=None):
            read.append(size)
            return super().read(size)

    monkeypatch.setattr(pyarrow, "CompressedInputStream", Counted)
    monkeypatch.setattr(archive, "UNPACKED", 2**20)
    huge = bytes(2**26)
    for form, members in (
        (tarfile.USTAR_FORMAT, members_of(good | {values_of(good): huge})),
        (tarfile.PAX_FORMAT, [member(LEDGER, pax_headers={"comment": "0" * 2**26})]),
        (tarfile.GNU_FORMAT, [member("x" * 2**26)]),
    ):
        path = crafted(tmp_path / "f", members, form)
        assert path.stat().st_size < 10_000
        read.clear()
        refused(path, "its size")
        assert sum(read) < 2**21
    refused([member(LEDGER, b" " * (archive.LARGEST_JSON + 1))], "bytes")


def test_headers_that_describe_more_than_they_hold_are_refused(good, refused, tmp_path):
    """A sparse file unpacks to bytes that were never in the archive; `tarfile` calls itself for every further header."""
    holes = {"GNU.sparse.size": str(2**25), "GNU.sparse.map": f"{2**25},0"}
    sparse = member(PLAN_ENTRY, pax_headers=holes)
    refused(crafted(tmp_path / "f", [*members_of({}), sparse], tarfile.PAX_FORMAT), "no plain file")
    for kind in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME):
        refused([member("x", type=kind)] * 3_000, "damaged")


@pytest.mark.parametrize(
    "listing",
    [b"", b"no JSON", b"[]", b"{}", b'{"ledger": 2, "study": "x", "files": {}}', b"[" * 100_000,
     b'{"ledger": 2, "study": "x", "files": {"study/plan.json": 3}}', b'{"ledger": 2, "study": "x", "files": [1]}',
     b'{"ledger": 2, "study": "x", "files": {"study/plan.json": {"bytes": 1e999, "sha256": ""}}}',
     b'{"ledger": %s, "study": "x", "files": {}}' % (b"9" * 4000)],
    ids=range(10),
)  # fmt: skip
def test_a_first_file_that_says_nothing_is_refused(good, listing, refused):
    refused(members_of(good, listing), "valid archive")


@pytest.mark.parametrize("content", [b"", b"hello", archive.MAGIC, archive.MAGIC + b"x" * 99])
def test_what_is_no_archive_is_refused(content, refused, tmp_path):
    refused(tmp_path / "none", "no file")
    (tmp_path / "f").write_bytes(content)
    refused(tmp_path / "f", "valid archive")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("trial", wrong) for wrong in (
            [], {"key": "f" * 32}, {"lr": "nan"}, {"lr": 0.5}, {"seed": True}, {"model": KEY}, {"metric": "luck"},
            {"share": 0.5}, {"machine": {"device": {"nested": "one"}}}, {"examples": {"validation": 4, "test": 0}},
            {"scores": {part: {"accuracy": 37.0} for part in PARTS}},
            {"baselines": {"trivial": {"accuracy": {"what": "chance", "test": 0.5}}}},
        )),
        *((PLAN_ENTRY, wrong) for wrong in ({"study": 3}, {"study": {"kind": "Nothing"}})),
        *((FINGERPRINTS, wrong) for wrong in ([], {"task": {}}, {"more": {"x": "../.."}})),
        (archive.PINS, {"owner/name": "main"}),
        (archive.PINS, {"owner/name": "f" * 40}),
        (f"corpora/link-{KEY}.json", {"source": "s", "heldout": "", "folder": "/", "fingerprint": "f" * 32}),
        (f"metadata/shards/{KEY}/card.json", {"corpus": None}),
    ],
)  # fmt: skip
def test_files_that_do_not_say_what_they_should_are_refused(good, name, content, refused):
    name = trial_of(good) if name == "trial" else name
    about = json.loads(good[name]) | content if name in good and isinstance(content, dict) else content
    refused(good | {name: as_json(about)}, "this version")


def test_a_study_cannot_name_a_place_outside_the_store(good, refused):
    for name in ("../../outside", "/tmp/outside", "..", ""):
        files = changed(good, PLAN_ENTRY, lambda about, name=name: about["study"].update(name=name))
        refused(members_of(files, listed(files, name)), "without slashes")
    refused(changed(good, PLAN_ENTRY, lambda about: about["study"].update(name="other")), "another study")


def test_trials_of_another_study_are_refused(good, study, store, tiny_run, refused):
    """What would be taken for results of another study of the store, though nobody asked for it."""
    other = make_plan(replace(study, runs=(tiny_run("other", seed=8),)), identities(store))
    training = next(finetunings(other))
    about = json.loads(good[trial_of(good)]) | {"key": training.trials[0].key, "model": training.model}
    planted = {f"metadata/trials/{about['key']}/trial.json": as_json(about)}
    said = changed(good, PLAN_ENTRY, lambda about: about["results"].update(both=training.model))
    for files in (good, said):  # what plan.json says of keys is not believed
        refused(files | planted, "study's")
    twice = f"metadata/{trial_of(good)}"
    refused(
        {**good, twice: changed(good, trial_of(good), lambda about: about.update(lr=9.0))[trial_of(good)]},
        "twice",
    )


def test_a_study_that_plans_too_much_is_refused(good, refused, monkeypatch):
    monkeypatch.setattr(archive, "TRIALS", 1)
    refused(good, "plans more than 1 fine-tunings")


def test_a_cut_or_flipped_file_is_refused_wherever_it_was_hurt(good, refused, tmp_path):
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    noise = np.frombuffer(hashlib.shake_256(b"noise").digest(3_000), np.uint8) % 2

    def more(about):
        about["examples"]["test"] = 3_000
        about["scores"]["test"]["accuracy"] = float(noise.mean())

    files = changed(good, trial_of(good), more) | {values_of(good): save({"test/accuracy": noise})}
    archive.write_archive(whole, "tuned", [ArchiveEntry.of(name, one) for name, one in files.items()])
    content, true = whole.read_bytes(), list(check(whole).archive.contents())
    for length in [*range(0, len(content), 97), len(content) - 1]:
        hurt.write_bytes(content[:length])
        refused(hurt, "valid archive")
    harmless = 0
    for place in range(0, len(content), 13):
        for bit in (1, 64):
            hurt.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
            try:
                came = list(check(hurt).archive.contents())
            except BiphaseError:
                continue
            assert came == true  # a bit that means nothing: what comes out is the same to the last byte
            harmless += 1
    assert harmless < 5


def test_a_refused_file_leaves_the_store_as_it_was_whatever_came_before_it(good, verb, tmp_path):
    sane = crafted(tmp_path / "sane", good)
    bad = crafted(tmp_path / "bad", members_of(good)[:-1])
    code, out, err = verb("ledger", "merge", sane, bad, "--store", tmp_path / "other")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("test/accuracy", torch.zeros(4, dtype=torch.bfloat16)),
        ("test/accuracy", torch.zeros(5)),
        ("test/entity_counts", torch.zeros(4, 2)),
        ("train/accuracy", torch.zeros(4)),
        ("test/accuracy", torch.tensor([0.0, 0.0, 0.0, float("nan")])),
        ("test/accuracy", torch.tensor([-1.0, 2.0, 0.0, 0.0])),
        ("test/accuracy", torch.tensor([1.0, 1.0, 0.0, 0.0])),  # its score is 0.25
        ("test/entity_counts", -torch.ones(4, 3)),
    ],
)
def test_values_that_a_report_cannot_count_with_are_refused(good, name, tensor, refused, tmp_path):
    counts, values = np.zeros((4, 3), np.int32), np.arange(4) % 2 == 0
    fine = save({"test/entity_counts": counts, "validation/accuracy": values})
    check(crafted(tmp_path / "f", good | {values_of(good): fine}))
    for content in (save_tensors({name: tensor}), fine[:-1]):
        refused(good | {values_of(good): content}, "values.safetensors")


# ---------------------------------------------------------------- pack and merge


def packed(plan, store: Store, file: Path, **options) -> Path:
    archive.pack(plan, store, identities(store), file, **options)
    return file


def received(file: Path, root: Path) -> Store:
    """The archive in a store of its own."""
    store = Store(root)
    merge(check(file), store)
    return store


@pytest.fixture
def file(plan, finished, tmp_path) -> Path:
    """An archive of the finished study."""
    return packed(plan, finished, tmp_path / "one.ledger")


@pytest.fixture
def other(file, tmp_path) -> Store:
    """That archive in a store of its own."""
    return received(file, tmp_path / "other")


def plan_in(store: Store):
    loaded = load(store.studies / "tuned" / PLAN)
    return make_plan(loaded.study, identities(store), loaded.question)


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def report(plan, store: Store, folder: Path) -> Files:
    build(plan, store, folder, static=False)
    return files_of(folder)


@pytest.fixture
def computed(worker):
    """Let a worker do what is to be done; gives what it says it did."""

    def work(plan, store: Store, **options) -> list[str]:
        said: list[str] = []
        assert not worker(plan, store, said, **options).work().failed
        return [line for line in said if "fine-tunings" in line or "tok/s" in line]

    return work


# ---------------------------------------------------------------- there and back


def test_the_report_of_a_merged_store_is_the_same_byte_for_byte(plan, finished, other, tmp_path):
    tensors = {path.name for path in other.root.rglob("*.safetensors")}
    assert tensors == {"values.safetensors", "predictions.safetensors"}
    assert not other.checkpoints.exists()
    assert not other.shards.exists()
    here = report(plan, finished, tmp_path / "report-here")
    assert report(plan_in(other), other, tmp_path / "report-there") == here
    assert len(here) > 8


def test_the_same_ledger_gives_the_same_file_also_after_it_travelled(plan, finished, file, other, tmp_path):
    for path in finished.root.rglob("*"):
        os.utime(path, (1e9, 1e9))
    for some, store in ((plan, finished), (plan_in(other), other)):
        assert packed(some, store, tmp_path / "two.ledger").read_bytes() == file.read_bytes()
    assert {path.name for path in tmp_path.glob("*ledger*")} == {"one.ledger", "two.ledger"}


def test_a_study_is_planned_where_neither_its_text_nor_its_tasks_are(plan, finished, other, tmp_path):
    toys = plan.study.finetune.tasks[0]
    text = Path(plan.study.runs[0].corpus.source).parent
    hidden = {text: tmp_path / "text", Path(toys.source): tmp_path / "toys"}
    for place, away in hidden.items():
        place.rename(away)
    try:
        there = plan_in(other)
        assert (there.results, there.tasks) == (plan.results, plan.tasks)
        assert ledger.count(there, other) == ledger.count(plan, finished)
        with pytest.raises(DataError):
            make_plan(plan.study, identities(Store(tmp_path / "empty")))
        versions = {"task": {content_key(toys): "another"}, "hub": {}, "reads": {}}
        remember_fingerprints("more", versions, other)
        with pytest.raises(SpecError, match="several versions"):
            identities(other).task(toys)
    finally:
        for place, away in hidden.items():
            away.rename(place)


def test_merging_again_changes_nothing(plan, finished, file, other):
    before = files_of(other.root)
    again = merge(check(file), other)
    assert not any(again.added.values())
    assert (again.already, again.kept) == (len(plan.jobs) + 36 + 1, [])
    assert files_of(other.root) == before
    home = merge(check(file), finished)
    assert not any(home.added.values()), "a store learns nothing from its own archive"
    assert not finished.metadata.exists()


def test_a_study_on_its_way_is_packed_as_far_as_it_is(plan, finished, tmp_path):
    gone = plan.results["both"]
    shutil.rmtree(finished.checkpoints / gone)
    for trial in (trial for tuning in finetunings(plan, models={gone}) for trial in tuning.trials):
        shutil.rmtree(finished.trials / trial.key)
    ledger.note_failure(plan, finished, gone, ValueError("the disk was full"))
    (finished.attempts / "left").mkdir(parents=True)
    told = archive.pack(plan, finished, identities(finished), tmp_path / "one.ledger")
    assert (told.jobs, told.jobs_planned) == (len(plan.jobs) - 1, len(plan.jobs))
    assert (told.scores, told.scores_planned) == (24, 36)
    store = received(tmp_path / "one.ledger", tmp_path / "other")
    assert not (store.studies / "tuned" / "failures").exists(), "a failure is of the machine"
    ledger.forget_failure(plan, finished, gone)
    assert report(plan_in(store), store, tmp_path / "a") == report(plan, finished, tmp_path / "b")


def test_two_machines_that_both_trained_the_trunk_make_the_whole(plan, finished, shards, computed, tmp_path):
    files = []
    for names in (("clm", "clm-4"), ("both",)):
        machine = store_with(shards, tmp_path / names[0])
        results = {plan.results[name] for name in names}
        wanted = {one.key for key in results for one in plan.path(key)}
        computed(plan, machine, wanted=wanted, evaluated=results)
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


def test_damaged_results_are_left_out_or_left_alone_and_named(plan, finished, file, tmp_path):
    trial = next(finetunings(plan)).trials[0].key
    store = Store(tmp_path / "other")
    (store.trials / trial).mkdir(parents=True)
    (store.trials / trial / MANIFEST).write_text("")
    told = merge(check(file), store)
    assert [one.startswith(f"trials/{trial[:8]}: damaged here") for one in told.kept] == [True]
    assert sum(told.added.values()) == len(plan.jobs) + 36 - 1 + 1
    (finished.trials / trial / "trial.json").write_text("{}")
    told = archive.pack(plan, finished, identities(finished), file)
    assert told.scores == told.scores_planned - 1
    assert len(told.left_out) == 1
    assert trial in told.left_out[0]


def test_a_file_that_is_no_ledger_is_not_overwritten(plan, store, request, tmp_path):
    with pytest.raises(SpecError, match=r"of tuned.*biphase run"):  # nothing is computed
        packed(plan, store, tmp_path / "one.ledger")
    assert not list(tmp_path.glob("*ledger*"))
    finished = request.getfixturevalue("finished")
    (tmp_path / "notes").write_text("mine")
    for name, match in (("notes", "another file"), ("nowhere/one.ledger", "no folder")):
        with pytest.raises(SpecError, match=match):
            packed(plan, finished, tmp_path / name)
    assert (tmp_path / "notes").read_text() == "mine"


def put(store: Store, place: Path, **files: bytes) -> None:
    """Publish invented files, where nothing need be computed."""
    with store.attempt("put") as folder:
        for name, content in files.items():
            (folder / name.replace("_", ".")).write_bytes(content)
        publish(folder, place)


def put_card(store: Store, corpus: Corpus) -> None:
    """An invented corpus, as far as its card."""
    card = {"corpus": encode(corpus), "fingerprint": "f" * 32, "tokenizer_fingerprint": "e" * 32}
    card |= dict.fromkeys(("vocab", "eos_id", "mask_id", "train_tokens", "heldout_tokens"), 9)
    card |= {"special_ids": [], "unigram_entropy": 1.5}
    put(store, store.shards / data_key(corpus, "f" * 32, "e" * 32), card_json=as_json(card))


def test_pins_links_and_fingerprints_are_packed(grid, tiny_run, model_folders, store, tmp_path):
    corpus = Corpus("fine", f"hf://owner/text@{'c' * 40}/*.jsonl", BPE(320))
    text, bert, elsewhere = tmp_path / "text", tmp_path / "bert", tmp_path / "elsewhere"
    for folder in (text, elsewhere):
        folder.mkdir()
        (folder / "a.jsonl").write_text(json.dumps({"text": folder.name}))
    shutil.copytree(model_folders["bert"], bert)
    write_link(corpus, store, text)
    (text / "b.jsonl").write_text('{"text": "more since then"}\n')
    remember("owner/model", "a" * 40, store)
    remember("owner/other", "b" * 40, store)
    starts = (Pretrain("local", start=Hub(str(bert))), Pretrain("pinned", start=Hub("owner/model")))
    study = Study("names", (*starts, tiny_run("linked", corpus=corpus)), grid)

    def plan_at(store):
        return make_plan(pinned(study, store, ask=False), identities(store))

    plan = plan_at(store)
    about = trial_record(next(finetunings(plan)))
    put(store, store.trials / about["key"], trial_json=as_json(about), values_safetensors=NO_VALUES)
    file = packed(plan, store, tmp_path / "one.ledger")
    for folder in (text, bert):
        shutil.rmtree(folder)
    other = received(file, tmp_path / "other")
    assert json.loads((other.root / "pins.json").read_text()) == {"owner/model": "a" * 40}
    assert plan_at(other) == plan
    assert ledger.count(plan, other).done == 1
    assert merge(check(file), other).already == 1
    assert not [name for name, content in files_of(other.root).items() if str(text).encode() in content]
    text.mkdir()  # something else lies there on this machine
    (text / "a.jsonl").write_text('{"text": "mine"}\n')
    assert plan_at(other) == plan
    with pytest.raises(DataError, match=r"tokenize fine --from FOLDER.*remove.*link-") as refused:
        tokenize(corpus, other, report=lambda line: None)
    assert "\n" not in str(refused.value)
    assert not other.shards.exists()
    assert packed(plan_at(other), other, tmp_path / "two.ledger").read_bytes() == file.read_bytes()

    taken = Store(tmp_path / "taken")  # where the same names stand for something else
    write_link(corpus, taken, elsewhere)
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


# ---------------------------------------------------------------- what does not travel


def test_finished_trials_are_not_computed_again_and_weights_only_where_they_are_needed(
    plan, finished, other, shards, computed
):
    assert computed(plan, other) == []
    assert not other.checkpoints.exists()
    entries = ledger.survey_jobs(plan, other)
    assert {entry.standing for entry in entries.values()} == {"done"}
    assert not any(entry.weights for entry in entries.values())

    other.shards.mkdir(parents=True)
    (other.shards / shards.name).symlink_to(shards)
    missing = next(one for one in finetunings(plan) if one.model == plan.results["clm"])
    trial = missing.trials[0].key
    shutil.rmtree(other.trials / trial)
    way = {job.key for job in plan.path(missing.model)}
    assert ledger.settled(plan, other, ledger.count(plan, other)) == set(plan.jobs) - way
    lines = computed(plan, other)
    assert len([line for line in lines if "tok/s" in line]) == len(way)
    assert len([line for line in lines if "· toys ·" in line]) == 1
    assert ledger.keys_with_weights(plan, other) == way
    assert ledger.settled(plan, other, ledger.count(plan, other)) == set(plan.jobs)
    # Whole checkpoints are read before metadata-only copies.
    assert other.readable(other.checkpoints / missing.model) == other.checkpoints / missing.model
    again, before = (files_of(store.trials / trial)["values.safetensors"] for store in (other, finished))
    assert again == before, "the same bits"


def test_whoever_wants_the_weights_is_told_where_they_are(plan, other):
    at = plan.results["clm"]
    for ask in (find, run_named):
        with pytest.raises(
            SpecError, match=rf"without its weights.*checkpoints/{at}.*biphase run"
        ) as refused:
            ask(at[:8], other)
        assert "\n" not in str(refused.value)
    trial = find(next(finetunings(plan)).trials[0].key[:8], other)
    with pytest.raises(SpecError, match="its weights"):
        recipe_of(trial, other)
    told = before_after(plan, other, "")
    assert "without its weights" in told[-1]
    assert not any("biphase export" in line for line in told)


# ---------------------------------------------------------------- what is here stays


def test_what_is_here_with_other_content_is_said_and_kept(plan, finished, file):
    slower, better = (training.trials[0].key for training in list(finetunings(plan))[:2])
    job = plan.results["clm"]
    for place, name, change in (
        (finished.trials / slower, "trial.json", lambda about: about["seconds"].update(train=9.0)),
        (finished.trials / better, "trial.json", lambda about: about["scores"]["test"].update(accuracy=0.123)),
        (finished.checkpoints / job, "checkpoint.json", lambda about: about["progress"].update(seconds=99.0)),
    ):  # fmt: skip
        republish_json(place, name, change)
    path = finished.studies / "tuned" / PLAN
    said = read_checked(path)
    said["study"]["runs"].pop()
    path.write_text(json.dumps(with_checksum(said)))
    before = files_of(finished.root)
    assert set(merge(check(file), finished).kept) == {
        "studies/tuned/plan.json: another version of the study; give biphase report the study's file",
        f"trials/{slower[:8]}: computed twice, with the same scores",
        f"trials/{better[:8]}: computed twice, with other scores",
        f"checkpoints/{job[:8]}: computed twice",
    }
    after = files_of(finished.root)
    assert {name: after[name] for name in before} == before
    assert not finished.metadata.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from biphase import store as files
from biphase.study import archive
real, left = files.write_json, [int(sys.argv[3])]
def killed(path, value):  # the manifest, between the files and the rename
    left[0] -= 1
    if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
    real(path, value)
files.write_json = killed
archive.merge(archive.check(Path(sys.argv[1])), files.Store(sys.argv[2]))
"""


def test_a_kill_while_merging_leaves_whole_results_and_the_next_merge_ends_it(plan, finished, file, tmp_path):
    store = Store(tmp_path / "other")
    for writes in (2, 9):
        done = subprocess.run([sys.executable, "-c", KILLED, file, store.root, str(writes)], check=False)
        assert done.returncode == -signal.SIGKILL
        manifests = [path for kind in ("trials", "metadata") for path in (store.root / kind).rglob(MANIFEST)]
        for path in manifests:
            names = {MANIFEST, *json.loads(path.read_text())["files"]}
            assert {file.name for file in path.parent.iterdir()} == names
    assert len(manifests) >= 7
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
    code, _, err = verb("ledger", "pack", study, file, "--store", finished.root, "--only", "nothing")
    assert (code, "matches" in err) == (2, True)
