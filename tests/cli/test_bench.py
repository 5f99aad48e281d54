"""`biphase bench` as it is typed, on this CPU at tiny sizes, beside real peers."""

import json

import pytest

from biphase.store import read_json

TINY = ("--size", "1m", "--steps", "1")


def sides(result):
    for name, side in result["sides"].items():
        assert "failed" not in side, f"{name}: {side}"
        assert side["seconds"] > 0
    return list(result["sides"])


def test_pretraining_stands_beside_the_trainer(verb):
    code, out, err = verb("bench", "pretrain", *TINY, "--rows", "4", "--json", "--profile")
    assert code == 0, err
    found = json.loads(out)
    (result,) = found["results"]
    assert sides(result) == ["biphase", "trainer"]
    ours, theirs = (side["tokens_per_second"] for side in result["sides"].values())
    assert result["ratios"]["trainer"] == pytest.approx(ours / theirs)
    (profile,) = found["profiles"].values()
    assert {"GEMMs", "attention", "optimizer"} <= set(profile)


def test_finetuning_stands_beside_the_trainer(verb):
    code, out, err = verb("bench", "finetune", *TINY, "--json")
    assert code == 0, err
    results = json.loads(out)["results"]
    assert [one["like"] for one in results] == ["SST-2-like", "MNLI-like", "SQuAD-like"]
    assert all(sides(one) == ["biphase", "trainer"] for one in results)
    tokens = [one["sides"]["biphase"]["tokens"] for one in results]
    assert tokens == pytest.approx([8 * 13, 8 * 40, 8 * 180], rel=0.05)


def test_the_jobs_of_a_study_are_measured_as_a_worker_computes_them(verb):
    words = ("--size", "1m", "--vocab", "512", "--length", "64", "--rows", "4", "--steps", "6", "--json")
    code, out, err = verb("bench", "job", *words)
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert sides(result) == ["biphase"]
    ours = result["sides"]["biphase"]
    assert ours["tokens_per_second"] == pytest.approx(4 * 64 / ours["seconds"])
    whole, start, gap, heldout, saving = ours["details"].values()
    assert 0 < whole < ours["tokens_per_second"], "losses and checkpoints take time too"
    assert start > 0
    assert gap > heldout + saving > 0


def test_scale_is_saved_as_the_cost_model_reads_it(verb, tmp_path):
    code, out, err = verb("bench", "--save", "--steps", "1", "--store", tmp_path)
    assert code == 0, err
    assert f"Next: biphase plan STUDY --store {tmp_path} --device cpu" in out
    content = read_json(tmp_path / "devices" / "cpu" / "fp32.json")
    kinds = [case["kind"] for case in content["cases"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {"pretrain": 5, "finetune": 6, "score": 2}
    assert content["versions"]["torch"]
    assert content["speeds"]["measured"] == {"pretrain": 5, "finetune": 6, "score": 2}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--objective", "mntp"), "'mlm', 'clm'"),
        (("--steps", "-3"), "--steps"),
        (("--vocab", "3"), "64"),
        (("--precision", "fp8"), "'bf16', 'fp32'"),
        (("scale", "--vocab", "128"), "--vocab means nothing to bench scale"),
        (("job", "--profile"), "type bench pretrain --profile"),
        (("job", "--steps", "1"), "--steps 2"),
        (("pretrain", "--save"), "type bench scale --save"),
        (("--save", "--size", "210m"), "leave out --size"),
        (("--against", "optimus"), "known: trainer, trainer-compiled, none"),
        (("--against", "none", "--against", "trainer"), "--against none stands alone"),
    ],
)
def test_wrong_options_are_refused_in_a_line(verb, words, said):
    code, out, err = verb("bench", *words)
    assert code == 2
    assert out == ""
    refusals = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(refusals) == 1
    assert said in refusals[0]
