"""Results carried in one file: the report is the same, nothing is computed twice, and what is here stays."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from biphase import BPE, Corpus, Hub, Pretrain, Study
from biphase.data.corpus import write_link
from biphase.data.tokenize import tokenize
from biphase.errors import DataError, SpecError
from biphase.export.folder import find
from biphase.export.tuned import recipe_of
from biphase.keys import data_key
from biphase.records import content_key, encode
from biphase.report.build import build
from biphase.report.pretraining import job_costs
from biphase.store import MANIFEST, Store, publish, read_checked, with_checksum
from biphase.study import ledger
from biphase.study.archive import check, merge, pack
from biphase.study.build import before_after
from biphase.study.load import load, pinned, remember
from biphase.study.names import run_named
from biphase.study.plan import PLAN, identities, make_plan, remember_fingerprints, save_plan
from biphase.study.worker import Worker
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions


def packed(plan, store: Store, file: Path, **options) -> Path:
    pack(plan, store, identities(store), file, **options)
    return file


def received(file: Path, root: Path) -> Store:
    """The parcel in a store of its own."""
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
    assert not any(home.added.values()), "a store learns nothing from its own parcel"
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


def test_two_halves_make_the_whole(plan, finished, tmp_path):
    halves = [
        packed(plan, finished, tmp_path / f"{n}.ledger", results={plan.results[name] for name in names})
        for n, names in enumerate((("clm", "clm-4"), ("both",)))
    ]
    store = received(halves[0], tmp_path / "other")
    assert ledger.count(plan, store).done == 16
    merged = merge(check(halves[1]), store)
    assert merged.added["scores"] == 12
    assert merged.kept == []
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


def test_nothing_computed_is_nothing_to_pack(plan, store, tmp_path):
    with pytest.raises(SpecError, match=r"nothing of tuned.*biphase run"):
        packed(plan, store, tmp_path / "one.ledger")
    assert not list(tmp_path.glob("*ledger*"))


def test_a_file_that_is_no_ledger_is_not_overwritten(plan, finished, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(SpecError, match="name another file"):
        packed(plan, finished, tmp_path / "notes")
    with pytest.raises(SpecError, match="is no folder"):
        packed(plan, finished, tmp_path / "nowhere" / "one.ledger")
    assert (tmp_path / "notes").read_text() == "mine"


def put_leaf(plan, store: Store, training) -> None:
    """An invented trial, where nothing need be computed."""
    about = {
        "key": training.trials[0].key,
        "model": training.model,
        "task": encode(training.trials[0].task),
        "trained_on": None,
        "finetune": {"protocol": "standard"},
        "metric": "accuracy",
        "lr": training.lr,
        "seed": training.seed,
        "scores": {part: {"accuracy": 0.5} for part in ("validation", "test")},
        "examples": {"validation": 4, "test": 4},
        "seconds": {"train": 1.0},
        "machine": {},
    }
    with store.attempt("trial") as folder:
        (folder / "trial.json").write_text(json.dumps(about))
        (folder / "values.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        publish(folder, store.trials / about["key"])


def put_card(store: Store, corpus: Corpus) -> None:
    """An invented corpus, as far as its card."""
    card = {"corpus": encode(corpus), "fingerprint": "f" * 32, "tokenizer_fingerprint": "e" * 32}
    card |= dict.fromkeys(("vocab", "eos_id", "mask_id", "train_tokens", "heldout_tokens"), 9)
    with store.attempt("shards") as folder:
        (folder / "card.json").write_text(json.dumps(card | {"special_ids": [], "unigram_entropy": 1.5}))
        publish(folder, store.shards / data_key(corpus, "f" * 32, "e" * 32))


def test_what_names_stand_for_travels_too(grid, tiny_run, model_folders, store, tmp_path):
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
    put_leaf(plan, store, next(iter(ledger.finetunings(plan))))
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
    with pytest.raises(DataError, match=r"tokenize fine --from FOLDER.*remove .*link-") as refused:
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


# ---------------------------------------------------------------- states without weights


def test_finished_leaves_are_not_computed_again_and_weights_only_where_they_are_needed(
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
    # The states are whole now, and count before their receipts.
    assert store.readable(store.checkpoints / missing.model) == store.checkpoints / missing.model
    again = files_of(store.trials / missing.trials[0].key)["values.safetensors"]
    assert again == files_of(finished.trials / missing.trials[0].key)["values.safetensors"], "the same bits"


def test_a_branch_needs_the_weights_of_its_trunk_alone(plan, finished, shards, tmp_path):
    store = received(packed(plan, finished, tmp_path / "one.ledger"), tmp_path / "other")
    store.shards.mkdir(parents=True)
    (store.shards / shards.name).symlink_to(shards)
    end = plan.results["both"]
    shutil.rmtree(store.metadata_of(store.checkpoints / end))
    computed(plan, store)
    assert ledger.keys_with_weights(plan, store) == {job.key for job in plan.path(end)}


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
    with pytest.raises(SpecError, match="without its weights"):
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
    code, out, _ = verb("ledger", "pack", study, file, "--store", finished.root)
    assert code == 0
    assert f"36 of 36 scores; {len(plan.jobs)} of {len(plan.jobs)} states, without weights" in out
    assert "biphase ledger merge one.ledger" in out
    code, out, _ = verb("ledger", "merge", file, "--store", other)
    assert code == 0
    assert f"36 scores, {len(plan.jobs)} states without weights, 1 card of corpora (" in out
    typed = out.split("What they show: biphase ")[1].split()
    assert verb(*typed, "--no-print")[0] == 0
    code, out, _ = verb("status", other / "studies" / "tuned" / PLAN, "--store", other)
    assert "24/24 fine-tunings" in out
    assert f"{len(plan.jobs)} training jobs came without weights" in out
    code, out, _ = verb("plan", other / "studies" / "tuned" / PLAN, "--store", other)
    assert "all 5 training jobs and 24 fine-tunings computed" in out
    code, out, _ = verb("ledger", "merge", file, file, "--store", other, "--json")
    told = json.loads(out)
    assert [one["already"] for one in told] == [36 + len(plan.jobs) + 1] * 2
    code, out, err = verb("export", plan.results["clm"][:8], tmp_path / "model", "--store", other)
    assert (code, out) == (2, "")
    assert "without its weights" in err
    code, out, _ = verb("ledger", "pack", study, file, "--store", finished.root, "--only", "both", "--json")
    assert json.loads(out)["scores"] == 12
    code, _, err = verb("ledger", "pack", study, file, "--store", finished.root, "--only", "nothing")
    assert code == 2
    assert "matches" in err
    code, _, err = verb("ledger", "merge", tmp_path / "none", "--store", other)
    assert code == 2
    assert "there is no file" in err
