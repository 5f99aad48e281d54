"""What is known of a device: under which name, and in a form that the cost model reads."""

import pytest
import torch

from biphase.bench.cases import BenchRequest, Maker
from biphase.bench.measure import Timing, failure
from biphase.bench.results import OURS, Compared, Report, cases_of, save, short_name
from biphase.store import Store, read_json
from biphase.study import devices
from biphase.study.devices import device_named

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("AMD Instinct MI250X", "mi250x-gcd"),
        ("NVIDIA GeForce RTX 3060 Ti", "rtx-3060-ti"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA RTX A1000 Laptop GPU", "rtx-a1000-laptop-gpu"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop-gpu"),
        ("NVIDIA GeForce RTX 4090 D", "rtx-4090-d"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-sxm4-40gb-mig-1g-5gb"),
    ],
)
def test_a_device_has_a_name_that_can_be_typed(full, short):
    assert short_name(GPU, full) == short


def test_a_cpu_is_called_cpu():
    assert short_name(torch.device("cpu"), "AMD EPYC") == "cpu"


def scaled(precision: str = "bf16", *, date: str = "2026-01-01", device: str = "NVIDIA H200") -> Report:
    """As a scale run on a GPU would give it, with made-up times in proportion to the work."""
    made = Maker(BenchRequest(subject="scale", precision=precision), "cuda", rows=12).scale()
    weight = {"8m": 1, "30m": 3, "210m": 10, "610m": 35}
    report = Report(device, "h200", date, {"torch": "2"}, "biphase bench scale")
    for unit, some in (("tokens/s", made.pretrain), ("ms/step", made.finetune), ("tokens/s", made.score)):
        for case in some:
            seconds = 0.008 * weight[case.size]
            side = Timing(seconds, seconds, 24_576.0)
            report.compared.append(Compared(case.title, unit, case.about(), {OURS: side}))
    return report


def test_cases_say_what_a_cost_model_asks_for():
    kinds = {}
    for case in cases_of(scaled().compared):
        kinds.setdefault(case["kind"], set()).update(case)
    common = {"kind", "size", "vocab", "precision"}
    assert kinds["pretrain"] == common | {"objective", "ratio", "packing", "length", "rows", "seconds"}
    assert kinds["finetune"] == common | {"like", "batch", "tokens", "seconds"}
    assert kinds["score"] == common | {"tokens_per_second"}


def test_a_device_is_saved_whole_and_fits(tmp_path):
    store = Store(tmp_path / "store")
    place = save(scaled(), store)
    assert place == store.root / "devices" / "h200.json"
    content = read_json(place)
    assert (content["name"], content["date"]) == ("h200", "2026-01-01")
    assert content["model"] == devices.fit(content["cases"])
    assert devices.speeds_of(content["model"], "bf16").finetune


def test_what_was_measured_in_other_precisions_stays(tmp_path):
    store = Store(tmp_path)
    for precision, date in (("bf16", "2026-01-01"), ("fp8", "2026-02-01"), ("fp32", "2026-03-01")):
        place = save(scaled(precision, date=date), store)
    save(scaled("fp8", date="2026-04-01"), store)  # again
    content = read_json(place)
    alone = {one: cases_of(scaled(one).compared) for one in ("bf16", "fp8", "fp32")}
    kept = {one: [case for case in content["cases"] if case["precision"] == one] for one in alone}
    assert kept == alone
    assert content["model"] == devices.fit(content["cases"])
    machine = device_named("h200", store)
    assert machine is not None
    assert {one: origin.date for one, origin in machine.origins.items()} == {
        "bf16": "2026-01-01", "fp8": "2026-04-01", "fp32": "2026-03-01",
    }  # fmt: skip


def test_another_device_of_the_name_and_a_damaged_file_are_written_over(tmp_path):
    store = Store(tmp_path)
    place = save(scaled("fp32", device="NVIDIA H200 NVL"), store)
    save(scaled(), store)
    assert {case["precision"] for case in read_json(place)["cases"]} == {"bf16"}
    place.write_text("{")
    save(scaled(), store)
    assert read_json(place)["earlier"] == {}


def test_cases_that_failed_are_not_saved(tmp_path):
    report = scaled()
    first = report.compared[0]
    report.compared[0] = Compared(first.title, first.unit, first.about, {OURS: failure("out of memory")})
    assert report.measured
    kinds = [case["kind"] for case in read_json(save(report, Store(tmp_path)))["cases"]]
    assert kinds == [one.about["kind"] for one in report.compared[1:]]
    assert not Report("H200", "h200", "2026-01-01", {}, "biphase bench", report.compared[:1]).measured


def compared(unit, ours, **others):
    sides = {OURS: Timing(ours, ours, 100.0)}
    sides |= {name.replace("_", "-"): Timing(value, value, 100.0) for name, value in others.items()}
    return Compared("it", unit, {"kind": "pretrain"}, sides, passages=50)


def test_a_ratio_says_how_many_times_faster_ours_is_whatever_the_unit():
    for unit in ("tokens/s", "ms/step", "passages/s"):
        one = compared(unit, 0.1, trainer=0.4, trainer_compiled=0.2)
        assert one.ratio("trainer") == pytest.approx(4.0)
        assert one.least_ratio == pytest.approx(2.0)
    assert compared("ms/step", 0.1).value(OURS) == pytest.approx(100.0)
    assert compared("passages/s", 0.1).value(OURS) == pytest.approx(500.0)
    assert compared("tokens/s", 0.1).least_ratio is None


def test_a_side_that_failed_has_no_ratio_and_its_reason_stands_below_the_table():
    sides = {OURS: Timing(0.1, 0.1, 100.0), "trainer": failure("out of memory")}
    one = Compared("210m", "tokens/s", {"kind": "pretrain"}, sides)
    assert one.least_ratio is None
    assert one.facts()["ratios"] == {}
    words = Report("H200", "h200", "2026-01-01", {}, "biphase bench", [one]).words()
    assert "failed" in words
    assert "Trainer, 210m: out of memory" in words
