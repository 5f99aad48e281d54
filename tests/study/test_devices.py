"""Measured devices: those of the store before those that ship; and the cost model, held against measured steps."""

import json
import math
import random
from dataclasses import asdict

import pytest

from biphase import CLM, MLM, SIZES, Chunks, Rows
from biphase.errors import SpecError, StoreError
from biphase.store import Store, with_checksum
from biphase.study import devices
from biphase.study.costs import shape_of_size
from biphase.study.devices import FORM, SHIPPED, at_hand, device_named, fit

VOCAB = 128_256
CASES = json.loads((SHIPPED / "h200" / "bf16.json").read_text())["cases"]
MNLI = next(case for case in CASES if case.get("like") == "MNLI-like")
SPEEDS = fit(CASES)
SHAPES = {name: shape_of_size(size, VOCAB) for name, size in SIZES.items()}


def step(size, objective, packing, rows, speeds=SPEEDS):
    """The predicted seconds of a step of this many rows."""
    labelled = objective.labelled_share(packing, 0, 1)
    tokens = rows * packing.length
    return speeds.step(SHAPES[size], packing, tokens, causal=objective.causal, labelled=labelled)


# Measured on one H200 and not among the fitted steps: docs/performance.md.
@pytest.mark.parametrize(
    ("size", "objective", "packing", "rows", "seconds"),
    [
        ("210m", MLM(0.4), Chunks(2048), 64, 0.2945),
        ("210m", MLM(0.4), Chunks(2048), 48, 0.2341),
        ("210m", CLM(), Chunks(2048), 64, 0.3651),
        ("210m", CLM(), Rows(2048), 64, 0.3734),
        ("1b", MLM(0.4), Chunks(2048), 24, 0.6884),
    ],
)
def test_steps_that_were_not_fitted_are_predicted(size, objective, packing, rows, seconds):
    assert step(size, objective, packing, rows) == pytest.approx(seconds, rel=0.075)


# Whole studies on one H200 by one worker, tokens per second in docs/performance.md, and last the fastest 200 steps in the
# ledgers of docs/results/crossing, whose jobs shared the GPU most of the time. No such step was fitted: theirs were timed
# on a batch that stays on the GPU. Only BATCH_SECONDS is taken from the first.
@pytest.mark.parametrize(
    ("size", "vocab", "objective", "packing", "rows", "speed"),
    [
        ("2m", 16_384, MLM(0.4), Chunks(256), 128, 5.7e6),
        ("2m", 16_384, CLM(), Chunks(256), 128, 5.9e6),
        ("8m", 16_384, MLM(0.4), Chunks(256), 128, 3.5e6),
        ("30m", 49_153, MLM(0.4), Chunks(512), 64, 1.58e6),
        ("30m", 49_153, CLM(), Chunks(512), 64, 1.24e6),
        ("2m", 16_384, MLM(0.2), Chunks(256), 128, 5.38e6),
        ("2m", 16_384, CLM(), Chunks(256), 128, 5.37e6),
    ],
)
def test_small_studies_of_one_worker_are_predicted(size, vocab, objective, packing, rows, speed):
    tokens, labelled = rows * packing.length, objective.labelled_share(packing, 0, 1)
    shape = shape_of_size(SIZES[size], vocab)
    took = SPEEDS.step(shape, packing, tokens, causal=objective.causal, labelled=labelled)
    assert tokens / took == pytest.approx(speed, rel=0.15)


def test_what_was_measured_is_followed_closely_and_the_worst_is_told():
    assert SPEEDS.measured == {"pretrain": 12, "finetune": 6, "score": 2}
    assert all(error < 0.11 for error in SPEEDS.worst.values())
    assert step("210m", MLM(0.4), Chunks(2048), 24) == pytest.approx(CASES[0]["seconds"], rel=0.11)


def test_the_prior_has_no_speed_of_its_own():
    slower = fit([case | {"seconds": 9 * case["seconds"]} for case in CASES if case["kind"] == "pretrain"])
    for size in ("8m", "1b"):
        where = size, MLM(0.4), Chunks(2048), 24
        assert step(*where, speeds=slower) == pytest.approx(9 * step(*where), rel=1e-6)


def test_speeds_are_never_negative_and_few_cases_stay_plausible():
    chance = random.Random(0)
    for _ in range(20):  # a machine that was busy with something else
        busy = fit([
            case | {"seconds": case["seconds"] * math.exp(chance.gauss(0, 0.3))}
            for case in CASES
            if "seconds" in case
        ])  # fmt: skip
        assert min(*busy.base.values(), *busy.finetune.values(), *busy.score.values()) >= 0
    alone = fit(CASES[:1])
    assert step("1b", MLM(0.4), Chunks(2048), 24, alone) == pytest.approx(0.6884, rel=0.3)


def test_a_step_of_many_micro_batches_pays_for_one_update():
    one, many = (step("210m", MLM(0.4), Chunks(2048), 24 * count) for count in (1, 100))
    update = 30 * SHAPES["210m"].parameters * SPEEDS.base["bytes"]
    assert many == pytest.approx(100 * one - 99 * update, rel=1e-9)


def test_weights_in_bf16_are_updated_in_half_the_time():
    pure, mixed = (
        SPEEDS.tuning_step(SHAPES["210m"], 400, 32, precision=precision)
        for precision in ("pure-bf16", "bf16")
    )
    assert 0.5 * mixed < pure < 0.85 * mixed


def test_a_kind_that_was_not_measured_is_not_offered():
    pretraining, finetuning = (
        fit([case for case in CASES if case["kind"] == kind]) for kind in ("pretrain", "finetune")
    )
    assert (set(pretraining.measured), set(finetuning.measured)) == ({"pretrain"}, {"finetune"})
    assert finetuning.tuning_step(SHAPES["210m"], 1_280, 32) == pytest.approx(MNLI["seconds"], rel=0.1)


def test_rows_of_documents_do_not_count_since_nobody_knows_how_far_they_reach():
    documents = CASES[0] | {"packing": "documents", "seconds": CASES[0]["seconds"] * 50}
    assert fit([*CASES, documents]) == SPEEDS


# ---------------------------------------------------------------- files of devices


CASE = CASES[0]


def device(folder, precision="bf16", **change):
    (folder / "fast").mkdir(parents=True, exist_ok=True)
    cases = [CASE | {"precision": precision}]
    facts = {
        "device": "NVIDIA Fast", "date": "2026-11-15T10:00:00", "versions": {"torch": "2.11.0+cu130"},
        "cases": cases, "speeds": asdict(fit(cases)),
    }  # fmt: skip
    (folder / "fast" / f"{precision}.json").write_text(json.dumps(with_checksum(facts | change)))


def test_a_measured_precision_of_the_store_replaces_the_shipped_one(tmp_path):
    store, shipped = Store(tmp_path / "store"), tmp_path / "shipped"
    for precision in ("bf16", "fp32"):
        device(shipped, precision, date="2025-01-01", versions={"torch": "2.9"})
    device(store.root / "devices")
    found = device_named("fast", store, shipped)
    assert {name: each.shipped for name, each in found.measurements.items()} == {"bf16": False, "fp32": True}
    assert found.speeds("bf16") == fit([CASE])
    assert found.speeds("pure-bf16") is None
    assert found.when(["fp32"]) == "measured 2025-01-01, torch 2.9"
    assert found.when(["bf16", "fp32"]) == (
        "measured bf16 2026-11-15, torch 2.11.0; fp32 2025-01-01, torch 2.9"
    )


def test_an_unmeasured_device_has_its_peak_and_an_unknown_one_is_refused(tmp_path):
    store = Store(tmp_path / "store")
    assert device_named("a100", store, tmp_path) is None
    device(store.root / "devices")
    with pytest.raises(SpecError, match=r"'fst'.*'fast'"):
        device_named("fst", store, tmp_path)
    for odd in ("../devices/fast", "", "*"):
        with pytest.raises(SpecError, match="no device"):
            device_named(odd, store, tmp_path)


def test_speeds_of_another_version_are_fitted_again_from_the_cases(tmp_path):
    store = Store(tmp_path)
    device(store.root / "devices", speeds={"form": 0})
    assert device_named("fast", store).speeds("bf16") == fit([CASE])


@pytest.mark.parametrize(
    "change",
    [
        {"speeds": {}, "cases": []}, {"speeds": {}, "cases": None}, {"date": "x", "versions": {}},
        {"speeds": {"form": FORM, "base": {}}}, {"speeds": {}, "cases": [{"kind": "pretrain"}]}, "{",
    ],
)  # fmt: skip
def test_a_damaged_device_file_is_refused(tmp_path, change):
    store = Store(tmp_path)
    device(store.root / "devices", **({} if change == "{" else change))
    if change == "{":
        (tmp_path / "devices" / "fast" / "bf16.json").write_text(change)
    with pytest.raises(StoreError, match=r"bf16\.json .*biphase bench scale --save"):
        device_named("fast", store)


def test_shipped_devices_can_be_read(tmp_path):
    names = {path.parent.name for path in SHIPPED.glob("*/*.json")}
    assert "h200" in names
    for name in names:
        found = device_named(name, Store(tmp_path))
        for precision, each in found.measurements.items():
            assert each.shipped
            assert {case["precision"] for case in each.cases} == {each.speeds.precision} == {precision}
            assert each.speeds.base == pytest.approx(fit(each.cases).base)


@pytest.mark.parametrize(
    ("model", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 3060", "rtx-3060"), ("", "cpu")],
)
def test_this_machine_s_device_is_its_first_gpu_or_its_cpu(model, name, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if model:
        (tmp_path / "0000:19:00.0").mkdir()
        (tmp_path / "0000:19:00.0" / "information").write_text(f"Model: \t\t {model}\nIRQ:  \t\t 1\n")
    assert at_hand() == name
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert at_hand() == "cpu", "hidden GPUs are not computed on"
