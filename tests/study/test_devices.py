"""Measured devices: those of the store before those that ship; and the cost model of them.

The cost model is held against machines whose true speeds are known: what was not measured is predicted within 15%.

Noise of 3% in the measured steps can be unlucky: of 39,200 predictions over 400 draws of it, two were further off.

These machines do not work as the model assumes: a product waits for its weights or its numbers, whichever takes longer;
a step waits for the host or the device; and the bytes, the causal share and the head's rate are others than the model's.
"""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from biphase import SIZES, Chunks, Rows
from biphase.errors import SpecError, StoreError
from biphase.store import Store, with_checksum
from biphase.study import devices
from biphase.study.costs import shape_of_size
from biphase.study.devices import SHIPPED, at_hand, device_named, fit

VOCAB = 128_256
MACHINES = {
    "h200": {},
    "a100": {"peak": 270e12, "d0": 60, "rows": 180e12, "varlen": 140e12, "bandwidth": 1.6e12},
    "two cores": {
        "peak": 60e9, "d0": 30, "rows": 30e9, "varlen": 25e9, "bandwidth": 15e9, "host": 1e-3, "layer": 1e-3,
    },
    "slow attention": {"rows": 300e12, "varlen": 120e12},
    "much memory traffic": {"moved": (90, 10), "logit": 16, "causal": 0.5},
    "fused": {"moved": (30, 12), "host": 1e-4, "layer": 4e-5},
    "slow host": {"host": 6e-4},
}  # fmt: skip


class Truth:
    """A machine as it is."""

    def __init__(
        self, *, peak=800e12, d0=120, rows=380e12, varlen=240e12, bandwidth=3.4e12, host=2.5e-4, layer=1.2e-4,
        moved=(55, 20), logit=9, causal=0.62,
    ):  # fmt: skip
        self.peak, self.d0, self.kernels = peak, d0, {"rows": rows, "chunks": varlen}
        self.bandwidth, self.host, self.layer = bandwidth, host, layer
        self.moved, self.logit, self.causal = moved, logit, causal

    def rate(self, width):
        return self.peak * width / (width + self.d0)

    def elementwise(self, shape, tokens):
        return (
            tokens
            * shape.layers
            * (self.moved[0] * shape.hidden + self.moved[1] * shape.ffn)
            / self.bandwidth
        )

    def pretrain(self, size, objective, ratio, packing, length, rows):
        shape, tokens = shape_of_size(SIZES[size], VOCAB), length * rows
        labelled = tokens * (1 if objective == "clm" else ratio)
        looked_at = (Chunks(length) if packing == "chunks" else Rows(length)).attended_length
        looked_at *= self.causal if objective == "clm" else 1
        device = 6 * tokens * shape.matrices / self.rate(shape.hidden)
        device += 6 * labelled * shape.embedding / (0.95 * self.rate(shape.hidden))
        device += self.logit * labelled * VOCAB / self.bandwidth
        device += 12 * tokens * shape.layers * shape.width * looked_at / self.kernels[packing]
        device += self.elementwise(shape, tokens) + 30 * shape.parameters / self.bandwidth
        return (device**4 + (shape.layers * self.host) ** 4) ** 0.25

    def finetune(self, size, batch, tokens):
        shape = shape_of_size(SIZES[size], VOCAB)
        products = 6 * tokens * shape.matrices / self.rate(shape.hidden)
        reading = 12 * shape.matrices / self.bandwidth
        attention = 12 * tokens * shape.layers * shape.width * tokens / batch / self.kernels["chunks"]
        update = 30 * (shape.blocks + shape.embedding) / self.bandwidth
        device = max(products, reading) + attention + self.elementwise(shape, tokens) + update
        return device + shape.layers * self.layer + 4e-4

    def score(self, size):
        shape = shape_of_size(SIZES[size], VOCAB)
        forward = 2 * shape.matrices / self.rate(shape.hidden) + self.elementwise(shape, 1) / 3
        return 1 / (1.15 * forward + 2e-8)


def bench(truth, seed, noise=0.03):
    """The cases that `biphase bench scale` measures, with noise."""
    rng = np.random.default_rng(seed)

    def off():
        return math.exp(noise * rng.standard_normal())

    cases = []
    for size, objective, packing in (
        ("210m", "mlm", "chunks"), ("210m", "clm", "chunks"), ("210m", "mlm", "rows"), ("610m", "mlm", "chunks"),
        ("30m", "mlm", "chunks"), ("8m", "mlm", "chunks"),
    ):  # fmt: skip
        case = {"objective": objective, "ratio": 0.4, "packing": packing, "length": 2048, "rows": 12}
        case |= {"seconds": truth.pretrain(size, **case) * off(), "kind": "pretrain"}
        cases.append(case | {"size": size, "vocab": VOCAB, "precision": "bf16"})
    for size in ("210m", "30m"):
        of = {"size": size, "vocab": VOCAB, "precision": "bf16"}
        for mean in (13, 40, 180):
            took = truth.finetune(size, 32, 32 * mean) * off()
            cases.append(of | {"kind": "finetune", "batch": 32, "tokens": 32 * mean, "seconds": took})
        cases.append(of | {"kind": "score", "tokens_per_second": truth.score(size) * off()})
    return cases


def errors(truth, speeds):
    """Relative errors of what was not measured."""
    made = {}
    for size, objective, ratio, packing, length in (
        ("1b", "mlm", 0.4, "chunks", 2048), ("610m", "clm", 0.4, "chunks", 2048), ("210m", "mlm", 0.2, "chunks", 2048),
        ("210m", "mlm", 0.4, "rows", 512), ("60m", "clm", 0.4, "chunks", 2048), ("2b", "mlm", 0.4, "chunks", 2048),
    ):  # fmt: skip
        packed = Chunks(length) if packing == "chunks" else Rows(length)
        causal = objective == "clm"
        said = speeds.step(
            shape_of_size(SIZES[size], VOCAB), packed, 24_576, causal=causal, labelled=1 if causal else ratio
        )
        took = truth.pretrain(size, objective, ratio, packing, length, 24_576 // length)
        made[f"{size} {objective} {ratio} {packing} of {length}"] = said / took - 1
    for size, mean in (("610m", 13), ("610m", 40), ("610m", 180), ("1b", 100), ("60m", 40), ("210m", 100)):
        said = speeds.tuning_step(shape_of_size(SIZES[size], VOCAB), 32 * mean, 32)
        made[f"fine-tuning {size} at {mean}"] = said / truth.finetune(size, 32, 32 * mean) - 1
    for size in ("610m", "60m"):
        said = speeds.scoring(shape_of_size(SIZES[size], VOCAB), 1_000)
        made[f"scoring {size}"] = said * truth.score(size) / 1_000 - 1
    return made


@pytest.mark.parametrize("name", MACHINES)
def test_what_was_not_measured_is_predicted_within_15_percent(name):
    truth, found = Truth(**MACHINES[name]), []
    for seed in range(20):
        speeds = fit(bench(truth, seed))
        found += [(abs(error), what, seed) for what, error in errors(truth, speeds).items()]
    beyond = [one for one in found if one[0] > 0.15]
    assert len(beyond) <= 0.01 * len(found), beyond
    assert max(found)[0] < 0.2, max(found)


def test_what_was_measured_is_followed_closely_and_the_worst_is_told():
    cases = bench(Truth(), seed=0)
    speeds = fit(cases)
    assert speeds.measured == {"pretrain": 6, "finetune": 6, "score": 2}
    assert all(error < 0.06 for error in speeds.worst.values())
    shape = shape_of_size(SIZES["210m"], VOCAB)
    said = speeds.step(shape, Chunks(2048), 24_576, causal=False, labelled=0.4)
    assert said == pytest.approx(cases[0]["seconds"], rel=0.06)


def test_speeds_are_never_negative_and_few_cases_stay_plausible():
    truth = Truth()
    for seed in range(5):
        busy = fit(bench(truth, seed, noise=0.3))  # a machine that was busy with something else
        assert min(*busy.base.values(), *busy.finetune.values(), *busy.score.values()) >= 0
    speeds = fit(bench(truth, 0)[:1])
    shape = shape_of_size(SIZES["1b"], VOCAB)
    said = speeds.step(shape, Chunks(2048), 24_576, causal=False, labelled=0.4)
    assert said == pytest.approx(truth.pretrain("1b", "mlm", 0.4, "chunks", 2048, 12), rel=0.3)


def test_a_step_of_many_micro_batches_pays_for_one_update():
    speeds = fit(bench(Truth(), 0, noise=0))
    shape = shape_of_size(SIZES["210m"], VOCAB)
    one, many = (speeds.step(shape, Chunks(2048), 24_576 * n, causal=False, labelled=0.4) for n in (1, 100))
    update = 30 * shape.parameters * speeds.base["bytes"]
    assert many == pytest.approx(100 * one - 99 * update, rel=1e-9)


def test_weights_in_bf16_are_updated_in_half_the_time():
    speeds = fit(bench(Truth(), 0))
    shape = shape_of_size(SIZES["210m"], VOCAB)
    pure, mixed = (speeds.tuning_step(shape, 400, 32, precision=one) for one in ("pure-bf16", "bf16"))
    assert 0.5 * mixed < pure < 0.85 * mixed


def test_a_kind_that_was_not_measured_is_not_offered():
    cases = bench(Truth(), 0)
    pretraining, finetuning = (
        fit([case for case in cases if case["kind"] == kind]) for kind in ("pretrain", "finetune")
    )
    assert (set(pretraining.measured), set(finetuning.measured)) == ({"pretrain"}, {"finetune"})
    shape = shape_of_size(SIZES["210m"], VOCAB)
    assert finetuning.tuning_step(shape, 32 * 40, 32) == pytest.approx(
        Truth().finetune("210m", 32, 32 * 40), rel=0.1
    )


def test_rows_of_documents_do_not_count_since_nobody_knows_how_far_they_reach():
    cases = bench(Truth(), 0)
    documents = cases[0] | {"packing": "documents", "seconds": cases[0]["seconds"] * 50, "attended": 300}
    assert fit([*cases, documents]) == fit(cases)


# ---------------------------------------------------------------- files of devices


CASE = {
    "kind": "pretrain", "size": "210m", "vocab": 128_256, "objective": "mlm", "ratio": 0.4, "packing": "chunks",
    "length": 2048, "rows": 12, "seconds": 0.07, "precision": "bf16",
}  # fmt: skip


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
    for precision in ("bf16", "fp8"):
        device(shipped, precision, date="2025-01-01", versions={"torch": "2.9"})
    device(store.root / "devices")
    found = device_named("fast", store, shipped)
    assert {name: each.shipped for name, each in found.measurements.items()} == {"bf16": False, "fp8": True}
    assert found.speeds("bf16") == fit([CASE])
    assert found.speeds("fp32") is None
    assert found.when(["fp8"]) == "measured 2025-01-01, torch 2.9"
    assert found.when(["bf16", "fp8"]) == (
        "measured bf16 2026-11-15, torch 2.11.0; fp8 2025-01-01, torch 2.9"
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
        {"speeds": {"form": 1, "base": {}}}, {"speeds": {}, "cases": [{"kind": "pretrain"}]}, "{",
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
