"""Default cases by device, results, and the device file that `plan` reads."""

from dataclasses import asdict, replace

import pytest

from biphase.bench.cases import (
    DEFAULTS,
    LIKE,
    OURS,
    BenchRequest,
    CaseMaker,
    Compared,
    Report,
    Timing,
    failure,
    save,
)
from biphase.presets import SIZES
from biphase.store import Store, read_json
from biphase.study import devices
from biphase.study.devices import device_named


def cases(kind="cuda", rows=8, **options):
    return CaseMaker(BenchRequest(**options), kind, rows=rows).cases()


def scale(kind="cuda", **options):
    """The cases of `bench scale`, by kind."""
    every = cases(kind, workload="scale", **options)
    return {name: [case for case in every if case.kind == name] for name in ("pretrain", "finetune", "score")}


# ---------------------------------------------------------------- cases


def test_options_replace_the_defaults_of_the_device():
    (gpu,), (cpu,) = cases("cuda", rows=24), cases("cpu", rows=24)
    assert (gpu.size, gpu.vocab, gpu.length, gpu.rows, gpu.steps) == ("210m", 128_256, 2_048, 24, 20)
    assert (gpu.objective, gpu.ratio, gpu.packing) == ("mlm", 0.4, "chunks")
    assert (cpu.size, cpu.vocab, cpu.length) == ("8m", 2_048, 128)
    assert (gpu.precision, cpu.precision) == ("bf16", "fp32")
    (case,) = cases(vocab=49_153, length=512)
    assert (case.vocab, case.length, case.rows) == (49_153, 512, 8)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_scale_covers_every_part_of_the_cost_model(kind):
    cases, usual = scale(kind), DEFAULTS[kind].scale[0]
    shapes = {(case.size, case.objective, case.packing) for case in cases["pretrain"]}
    assert {(usual, "mlm", "chunks"), (usual, "clm", "chunks"), (usual, "mlm", "rows")} <= shapes
    assert {size for size, _, _ in shapes} == set(DEFAULTS[kind].scale) <= set(SIZES)
    assert len(cases["finetune"]) == 2 * len(LIKE)
    assert {case.size for case in cases["score"]} == {case.size for case in cases["finetune"]}


# ---------------------------------------------------------------- results


def report(*compared, date="2026-01-01"):
    return Report("NVIDIA H200", "h200", date, {"torch": "2"}, "biphase bench", list(compared))


@pytest.mark.parametrize(("workload", "value"), [("pretrain", 1_000), ("finetune", 100)])
def test_ratios_are_those_of_speed_and_a_failed_side_has_none(workload, value):
    case = cases(workload=workload)[0]
    took = {OURS: 0.1, "trainer": 0.4, "trainer-compiled": 0.2}
    result = Compared(case, {side: Timing(seconds, seconds, 100.0) for side, seconds in took.items()})
    assert result.value(OURS) == pytest.approx(value)
    assert result.ratios == pytest.approx({"trainer": 4.0, "trainer-compiled": 2.0})
    assert "2.00×" in report(result).describe()
    failed = replace(result, sides={OURS: Timing(0.1, 0.1, 100.0), "trainer": failure("out of memory")})
    assert failed.facts()["ratios"] == {}
    assert f"Trainer, {case.title}: out of memory" in report(failed).describe()


# ---------------------------------------------------------------- saved devices


def scaled(precision="bf16", *, date="2026-01-01"):
    """The report of a scale run on a GPU, with times in proportion to the work."""
    weight = {"2m": 0.5, "8m": 1, "30m": 3, "210m": 10, "610m": 35}
    every = cases(workload="scale", precision=precision)
    timings = [Timing(0.008 * weight[case.size], 0.1, 24_576.0) for case in every]
    return report(
        *(Compared(case, {OURS: timing}) for case, timing in zip(every, timings, strict=True)), date=date
    )


def test_a_device_is_saved_by_precision_with_its_fitted_speeds(tmp_path):
    store = Store(tmp_path / "store")
    for precision, date in (("fp32", "2026-02-01"), ("bf16", "2026-01-01"), ("bf16", "2026-04-01")):
        path = save(scaled(precision, date=date), store)
    content = read_json(path)
    assert path == store.root / "devices" / "h200" / "bf16.json"
    assert content["speeds"] == asdict(devices.fit(content["cases"]))
    fields = {case["kind"]: set(case) for case in content["cases"]}
    common = {"kind", "size", "vocab", "precision"}
    assert fields["pretrain"] == common | {"objective", "ratio", "packing", "length", "rows", "seconds"}
    assert fields["finetune"] == common | {"like", "batch", "tokens", "seconds"}
    assert fields["score"] == common | {"tokens_per_second"}
    dates = {name: each.date for name, each in device_named("h200", store).measurements.items()}
    assert dates == {"bf16": "2026-04-01", "fp32": "2026-02-01"}


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI250X", "mi250x-gcd"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop-gpu"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-sxm4-40gb-mig-1g-5gb"),
    ],
)
def test_the_name_of_a_device(full, short):
    assert devices.short_name(full) == short
