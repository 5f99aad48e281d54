"""Elapsed time: jobs wait for what they begin from, workers for jobs, and nothing is faster than the longest chain."""

import pytest

from biphase import CLM, MLM, SIZES, WSD, Finetune, Pretrain, Rows, Stage, Study
from biphase.catalog import CATALOG
from biphase.keys import Identities
from biphase.study.plan import make_plan
from biphase.study.prices import elapsed

OUTSIDE = Identities(
    data=lambda run: "d", hub=lambda hub: hub.source, reads=lambda hub: "", task=lambda task: task.name
)


def run(name, *stages):
    return Pretrain(
        name,
        start=SIZES["1m"],
        corpus="builtin",
        stages=tuple(Stage(*one) for one in stages),
        batch_tokens=128,
        packing=Rows(64),
        schedule=WSD(warmup=0, decay=0),
    )


@pytest.fixture(scope="module")
def plan():
    """A trunk of 10 steps with two branches of 20 and 30, and a run of 40 steps apart; two fine-tunings each."""
    runs = (
        run("a", (CLM(), 10), (MLM(0.4), 20)),
        run("b", (CLM(), 40)),
        run("m", (MLM(0.4), 40)),
    )
    grid = Finetune((CATALOG["sources-mini"],), lrs=(1e-3,), seeds=(0, 1), protocol="standard")
    return make_plan(Study("s", runs, grid), OUTSIDE)


def priced(plan, tuning=5.0):
    jobs = {key: float(job.steps) for key, job in plan.jobs.items()}
    tunings = {(key, "sources-mini"): tuning for key in plan.results.values()}
    return jobs, tunings, dict.fromkeys(tunings, 2)


def test_one_worker_does_one_job_after_another(plan):
    took = elapsed(plan, *priced(plan), 1)
    assert took.seconds == pytest.approx(10 + 20 + 30 + 40 + 6 * 5)
    assert (took.chain, took.ends) == (45.0, "b")


def test_branches_wait_for_their_trunk_and_fine_tunings_for_their_model(plan):
    jobs, tunings, counts = priced(plan)
    # Trunk and m begin at once; a's branch at 10; b's at 30 + 5 · 2 where fine-tunings come first, on the first worker.
    assert elapsed(plan, jobs, tunings, counts, 2).seconds == pytest.approx(75)
    assert elapsed(plan, jobs, tunings, counts, 3).seconds == pytest.approx(50)
    assert elapsed(plan, jobs, tunings, counts, 99).seconds == pytest.approx(45), "the longest chain"


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_it_is_never_faster_than_the_chain_or_the_shared_work(plan, workers):
    jobs, tunings, counts = priced(plan, tuning=7.0)
    took = elapsed(plan, jobs, tunings, counts, workers)
    assert took.seconds >= max(took.chain, (sum(jobs.values()) + 6 * 7) / workers) - 1e-9


def test_what_is_done_is_not_waited_for(plan):
    jobs, tunings, counts = priced(plan)
    left = {key: seconds for key, seconds in jobs.items() if plan.jobs[key].parent}
    took = elapsed(plan, left, tunings, counts, 99)
    assert (took.chain, took.seconds) == (35.0, 35.0)


def test_models_as_they_are_are_only_fine_tuned(plan):
    _, tunings, counts = priced(plan)
    assert elapsed(plan, {}, tunings, counts, 4).seconds == pytest.approx(10)
    assert elapsed(plan, {}, {}, {}, 4).seconds == 0
