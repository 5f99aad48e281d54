"""Requests and their refusals, default cases by device, results, and the device file that `plan` reads."""

from dataclasses import replace

import pytest

from biphase.bench.cases import (
    DEFAULTS,
    LIKE,
    OURS,
    PEERS,
    BenchRequest,
    CaseMaker,
    Compared,
    Report,
    Timing,
    failure,
    save,
    saved_cases,
)
from biphase.errors import SpecError
from biphase.presets import SIZES
from biphase.store import Store, read_json
from biphase.study import devices
from biphase.study.devices import device_named


def pretrain(kind="cuda", rows=8, **options):
    return CaseMaker(BenchRequest(**options), kind, rows=rows).pretrain()


def scale(kind="cuda", **options):
    """The cases of `bench scale`, by kind."""
    cases = CaseMaker(BenchRequest(**{"workload": "scale"} | options), kind, rows=4).scale()
    return {name: [case for case in cases if case.kind == name] for name in ("pretrain", "finetune", "score")}


# ---------------------------------------------------------------- cases


def test_options_replace_the_defaults_of_the_device():
    gpu, cpu = pretrain("cuda", rows=24), pretrain("cpu", rows=24)
    assert (gpu.size, gpu.vocab, gpu.length, gpu.rows, gpu.steps) == ("210m", 128_256, 2_048, 24, 20)
    assert (gpu.objective, gpu.ratio, gpu.packing) == ("mlm", 0.4, "chunks")
    assert (cpu.size, cpu.vocab, cpu.length) == ("8m", 2_048, 128)
    assert (gpu.precision, cpu.precision) == ("bf16", "fp32")
    case = pretrain(vocab=49_153, length=512, micro_batches=4)
    assert (case.vocab, case.length, case.tokens) == (49_153, 512, 4 * 8 * 512)
    assert "4 micro-batches" in case.title
    assert pretrain(deterministic=True).title.endswith(", deterministic")


@pytest.mark.parametrize(("typed", "ours", "theirs"), [(0, 24, 12), (32, 32, 32)])
def test_the_trainer_gets_twelve_rows_unless_rows_are_given(typed, ours, theirs):
    cases = CaseMaker(BenchRequest(rows=typed), "cuda", rows=24)
    assert (cases.pretrain().rows, cases.peer_rows()) == (ours, theirs)


@pytest.mark.parametrize(
    ("options", "peers"),
    [
        ({}, PEERS),
        ({"against": ("trainer", "trainer")}, ("trainer",)),
        ({"against": ("none",)}, ()),
        ({"deterministic": True}, ()),
    ],
)
def test_peers(options, peers):
    assert BenchRequest(**options).peers(DEFAULTS["cuda"]) == peers


@pytest.mark.parametrize("kind", DEFAULTS)
def test_scale_covers_every_part_of_the_cost_model(kind):
    cases, usual = scale(kind), DEFAULTS[kind].scale[0]
    shapes = {(case.size, case.objective, case.packing) for case in cases["pretrain"]}
    assert {(usual, "mlm", "chunks"), (usual, "clm", "chunks"), (usual, "mlm", "rows")} <= shapes
    assert {size for size, _, _ in shapes} == set(DEFAULTS[kind].scale) <= set(SIZES)
    assert len(cases["finetune"]) == 2 * len(LIKE)
    assert {case.size for case in cases["score"]} == {case.size for case in cases["finetune"]}
    several = scale(kind, workload="all", micro_batches=4)
    assert {case.micro_batches for case in several["pretrain"]} == {1}


def test_scale_in_fp8_is_pretraining_alone():
    fp8, bf16 = (scale(save=True, precision=precision) for precision in ("fp8", "bf16"))
    assert [replace(case, precision="bf16") for case in fp8["pretrain"]] == bf16["pretrain"]
    assert fp8["finetune"] == fp8["score"] == []


def test_scale_of_one_size():
    cases = scale(size="610m")
    assert [case.size for case in cases["pretrain"]] == ["610m"]
    assert cases["finetune"] == cases["score"] == []
    with pytest.raises(SpecError, match=r"'1b'.*210m"):
        scale(size="1b")


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"size": "211m"}, ["size", "'210m'"]),
        ({"against": ("optimus",)}, ["--against", "optimus", "trainer-compiled"]),
        ({"against": ("none", "trainer")}, ["--against none"]),
        ({"deterministic": True, "against": ("trainer",)}, ["--deterministic", "leave out --against"]),
        ({"save": True}, ["type bench scale --save"]),
        ({"workload": "scale", "save": True, "size": "210m"}, ["leave out --size"]),
        ({"workload": "finetune", "precision": "fp8"}, ["type bench pretrain --precision fp8"]),
        ({"workload": "all", "precision": "fp8"}, ["type bench pretrain --precision fp8"]),
        ({"workload": "scale", "vocab": 128}, ["--vocab", "bench scale"]),
        ({"workload": "scale", "micro_batches": 2}, ["type bench pretrain --micro-batches 2"]),
        ({"workload": "finetune", "rows": 4}, ["bench finetune", "type bench pretrain --rows 4"]),
        ({"workload": "retrieval", "profile": True}, ["bench retrieval", "type bench pretrain --profile"]),
        ({"workload": "retrieval", "ratio": 0.4}, ["--ratio", "bench retrieval"]),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_one_line(options, facts):
    with pytest.raises(SpecError) as refused:
        BenchRequest(**options)
    message = str(refused.value)
    assert "\n" not in message
    assert [fact for fact in facts if fact not in message] == []


# ---------------------------------------------------------------- results


def compared(unit, ours, **others):
    sides = {OURS: Timing(ours, ours, 100.0)}
    sides |= {name.replace("_", "-"): Timing(value, value, 100.0) for name, value in others.items()}
    return Compared("it", unit, {"kind": "pretrain"}, sides, passages=50)


@pytest.mark.parametrize(("unit", "value"), [("tokens/s", 1_000), ("ms/step", 100), ("passages/s", 500)])
def test_ratios_are_those_of_speed_in_every_unit(unit, value):
    case = compared(unit, 0.1, trainer=0.4, trainer_compiled=0.2)
    assert case.value(OURS) == pytest.approx(value)
    assert case.ratios == pytest.approx({"trainer": 4.0, "trainer-compiled": 2.0})
    assert "2.00×" in Report("H200", "h200", "2026-01-01", {}, "biphase bench", [case]).describe()
    assert compared(unit, 0.1).ratios == {}


def test_a_failed_side_has_no_ratio_and_its_reason_is_shown():
    sides = {OURS: Timing(0.1, 0.1, 100.0), "trainer": failure("out of memory")}
    case = Compared("210m", "tokens/s", {"kind": "pretrain"}, sides)
    assert case.facts()["ratios"] == {}
    text = Report("H200", "h200", "2026-01-01", {}, "biphase bench", [case]).describe()
    assert "failed" in text
    assert "Trainer, 210m: out of memory" in text


# ---------------------------------------------------------------- saved devices


def scaled(precision="bf16", *, date="2026-01-01", device="NVIDIA H200"):
    """The report of a scale run on a GPU, with times in proportion to the work."""
    weight = {"8m": 1, "30m": 3, "210m": 10, "610m": 35}
    report = Report(device, "h200", date, {"torch": "2"}, "biphase bench scale")
    for case in (case for cases in scale(precision=precision).values() for case in cases):
        seconds = 0.008 * weight[case.size]
        timing = Timing(seconds, seconds, 24_576.0)
        report.compared.append(Compared(case.title, case.unit, case.facts(), {OURS: timing}))
    return report


def test_saved_cases_have_the_fields_of_the_cost_model():
    fields = {case["kind"]: set(case) for case in saved_cases(scaled().compared)}
    common = {"kind", "size", "vocab", "precision"}
    assert fields["pretrain"] == common | {"objective", "ratio", "packing", "length", "rows", "seconds"}
    assert fields["finetune"] == common | {"like", "batch", "tokens", "seconds"}
    assert fields["score"] == common | {"tokens_per_second"}


def test_a_device_is_saved_with_its_fitted_model(tmp_path):
    store = Store(tmp_path / "store")
    path = save(scaled(), store)
    assert path == store.root / "devices" / "h200.json"
    content = read_json(path)
    assert (content["name"], content["date"]) == ("h200", "2026-01-01")
    assert content["model"] == devices.fit(content["cases"])
    assert devices.speeds_of(content["model"], "bf16").finetune


def test_measurements_in_other_precisions_are_kept(tmp_path):
    store = Store(tmp_path)
    for precision, date in (("bf16", "2026-01-01"), ("fp8", "2026-02-01"), ("fp32", "2026-03-01")):
        path = save(scaled(precision, date=date), store)
    save(scaled("fp8", date="2026-04-01"), store)  # again
    content = read_json(path)
    for precision in ("bf16", "fp8", "fp32"):
        kept = [case for case in content["cases"] if case["precision"] == precision]
        assert kept == saved_cases(scaled(precision).compared)
    assert content["model"] == devices.fit(content["cases"])
    device = device_named("h200", store)
    assert device is not None
    dates = {precision: origin.date for precision, origin in device.origins.items()}
    assert dates == {"bf16": "2026-01-01", "fp8": "2026-04-01", "fp32": "2026-03-01"}


def test_another_device_of_the_name_and_a_damaged_file_are_overwritten(tmp_path):
    store = Store(tmp_path)
    path = save(scaled("fp32", device="NVIDIA H200 NVL"), store)
    save(scaled(), store)
    assert {case["precision"] for case in read_json(path)["cases"]} == {"bf16"}
    path.write_text("{")
    save(scaled(), store)
    assert read_json(path)["earlier"] == {}


def test_failed_cases_are_not_saved(tmp_path):
    report = scaled()
    first = report.compared[0]
    report.compared[0] = replace(first, sides={OURS: failure("out of memory")})
    assert report.measured
    kinds = [case["kind"] for case in read_json(save(report, Store(tmp_path)))["cases"]]
    assert kinds == [result.case["kind"] for result in report.compared[1:]]
    assert not replace(report, compared=report.compared[:1]).measured


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
