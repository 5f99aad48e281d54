"""The intervals beside a score: each where its own noise can be told, whatever the others lack."""

import math

import pytest

from biphase import CLM, MLM, Stage, Study
from biphase.report.estimates import estimate
from biphase.report.evidence import gather


def test_one_seed_still_has_test_examples(invent, run, grid, tmp_path):
    study = Study("s", (run("clm", Stage(CLM(), 20)),), grid("squad", "conll2003", seeds=(0,)))
    found = estimate(gather(*invent(study, tmp_path)))
    for score in (found.tasks["clm", "squad"], found.families["clm", "QA"]):
        assert math.isnan(score.seeds.low)
        low, high = score.examples
        assert low < score.seeds.mean < high
    noise = found.families["clm", "QA"].noise
    examples = noise.intervals["test examples"]
    assert (examples.low, examples.high) == pytest.approx((low, high), abs=0.005)
    assert (noise.pretraining_seeds, noise.finetuning_seeds) == (1, 1)


def test_a_pretraining_that_is_not_there_yet_takes_nothing_from_the_other(invent, run, grid, tmp_path):
    runs = tuple(run(f"mlm{seed}", Stage(MLM(0.4), 20), seed=seed) for seed in (1, 2))
    evidence = gather(*invent(Study("s", runs, grid("squad")), tmp_path, results=("mlm2",)))
    score = estimate(evidence).tasks["mlm1", "squad"]
    assert evidence.grids["mlm1", "squad"].examples == 0
    assert score.seeds.n == 3
    assert score.examples[0] < score.seeds.mean < score.examples[1]
