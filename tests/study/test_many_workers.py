"""Many workers of a study: each model and dataset is read by few of them, and none waits for another."""

import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from biphase import Discard
from biphase.records import encode
from biphase.study import ledger
from biphase.study.plan import identities, make_plan, save_plan


def tuning_of(printed):
    """The model and the task of each fine-tuning that a worker has printed, in its order."""
    return [tuple(line.split("  ")[2].split(" · ")[:2]) for line in printed if " · lr " in line]


def test_workers_divide_models_and_tasks_among_them(plan, finished, worker):
    shutil.rmtree(finished.trials)
    printed = [[], [], []]

    def work(number):
        time.sleep(0.3 * number)  # so that each sees the leases of those before it
        worker(plan, finished, printed[number]).work()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [place for lines in printed for place in tuning_of(lines)]
    assert len(done) == 24, "each once"
    grids = set(done)
    assert len(grids) == 6
    read = sum(len(set(tuning_of(lines))) for lines in printed)
    # 6 if none is divided, a few more where workers end together; 14 to 18 if all go through the grids in one order
    assert read <= 12, printed


def test_a_worker_sweeps_what_an_interrupted_removal_left(plan, store, worker):
    left = store.attempts / "discarded-12345678"
    left.mkdir(parents=True)
    (left / "optimizer.safetensors").write_bytes(b"0" * 100)
    worker(plan, store, wanted=set()).work()
    assert not left.exists()


@pytest.mark.campaign
def test_processes_do_not_wait_for_each_others_fine_tunings(study, finished):
    """While one of two processes trains for 600 steps, the other one does all three short fine-tunings."""
    shutil.rmtree(finished.trials)
    toys = study.finetune.tasks[0]
    long, short = (replace(toys, name=name, steps=steps) for name, steps in (("long", 600), ("short", 2)))
    both = replace(study.finetune, tasks=(long, short), lrs=(1e-3,), seeds=(0, 1, 2))
    made = make_plan(replace(study, runs=study.runs[1:], name="uneven", finetune=both), identities(finished))
    save_plan(made, finished)
    path = finished.studies / "uneven" / "plan.json"
    words = ["run", path, "--store", finished.root, "--processes", "2", "--quiet"]
    subprocess.run([sys.executable, "-m", "biphase", *map(str, words)], check=True, capture_output=True)
    ends = sorted(finished.trials.iterdir(), key=lambda folder: folder.stat().st_mtime)
    tasks = [ledger.read_trial(finished, folder.name)["task"]["name"] for folder in ends]
    assert tasks.count("long") == tasks.count("short") == 3
    assert tasks[:3].count("short") == 3, f"in rounds, a process would wait after each for the other: {tasks}"


def test_workers_share_the_files_of_a_large_collection_and_score_as_from_memory(
    study, store, worker, monkeypatch, tmp_path
):
    facts = study.finetune.tasks[1]
    grid = replace(study.finetune, tasks=(facts,), documents="all", lrs=(1e-3, 4e-3, 8e-3), seeds=(0,))
    grid = replace(grid, discard=Discard(keep=1, seeds=(9,), share=0.5, documents=5))
    made = make_plan(replace(study, runs=study.runs[:1], finetune=grid), identities(store))
    save_plan(made, store)
    worker(made, store).work()
    assert not store.documents.exists()
    small = {folder.name: ledger.read_trial(store, folder.name) for folder in store.trials.iterdir()}
    shutil.rmtree(store.trials)
    monkeypatch.setattr("biphase.tasks.load.LARGE_BYTES", 0)
    workers = [worker(made, store), worker(made, store)]
    threads = [threading.Thread(target=each.work) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(store.documents.iterdir())) == 2, "the texts, and the ids of one tokenizer"
    large = {folder.name: ledger.read_trial(store, folder.name) for folder in store.trials.iterdir()}
    assert large.keys() == small.keys()
    assert all(large[key]["scores"] == small[key]["scores"] for key in small)
    pools = [(about.get("share", 1), about.get("documents")) for about in large.values()]
    assert set(pools) == {(0.5, "judged and 5 sampled"), (1, None)}


def test_a_sample_of_documents_for_screening_changes_only_the_keys_of_screening(study, store):
    grid = replace(study.finetune, documents="all", lrs=(1e-3, 4e-3), seeds=(0,))
    keys = []
    for documents in (0, 5):
        discard = Discard(keep=1, seeds=(9,), documents=documents)
        made = make_plan(replace(study, finetune=replace(grid, discard=discard)), identities(store))
        grids = list(ledger.tuning_grids(made, lambda trial: 0.5))
        keys.append(
            {
                kind: {trial.key for each in grids for one in getattr(each, kind) for trial in one.trials}
                for kind in ("screening", "reported")
            }
        )
    assert keys[0]["reported"] == keys[1]["reported"]
    assert keys[0]["screening"] != keys[1]["screening"]
    assert "documents" not in encode(Discard())
