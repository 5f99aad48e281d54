"""Measured devices: those of the store before those that ship; and the cost model, held against measured steps."""

import json
from dataclasses import asdict

import pytest

from biphase import CLM, MLM, SIZES, Chunks, Rows
from biphase.errors import StoreError
from biphase.store import Store, with_checksum
from biphase.study import devices
from biphase.study.costs import shape_of_size
from biphase.study.devices import FORM, SHIPPED, at_hand, device_named, fit

VOCAB = 128_256
CASES = json.loads((SHIPPED / "h200" / "bf16.json").read_text())["cases"]
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
    with pytest.raises(StoreError, match=r"bf16\.json .*biphase bench scale .*--save"):
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
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{model}'\necho 'NVIDIA A100'\n" if model else "#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices._first_gpu.cache_clear()
    assert at_hand() == name
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert at_hand() == "cpu", "hidden GPUs are not computed on"
    devices._first_gpu.cache_clear()
