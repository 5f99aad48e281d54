"""Measured devices: those of the store before those that ship, fitted anew where another version fitted them."""

import json

import pytest

from biphase.errors import SpecError, StoreError
from biphase.store import Store, with_checksum
from biphase.study import devices
from biphase.study.devices import SHIPPED, at_hand, device_named, fit

CASE = {
    "kind": "pretrain", "size": "210m", "vocab": 128_256, "objective": "mlm", "ratio": 0.4, "packing": "chunks",
    "length": 2048, "rows": 12, "seconds": 0.07, "precision": "bf16",
}  # fmt: skip


def device(folder, name, **change):
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "device": "NVIDIA Fast", "name": name, "date": "2026-11-15T10:00:00", "versions": {"torch": "2.11.0+cu130"},
        "cases": [CASE], "model": fit([CASE]),
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(with_checksum(facts | change)))


def test_a_measured_device_of_the_store_replaces_the_shipped_one(tmp_path):
    store, shipped = Store(tmp_path / "store"), tmp_path / "shipped"
    device(shipped, "fast", device="shipped")
    found = device_named("fast", store, shipped)
    assert found is not None
    assert (found.title, found.origins["bf16"].shipped) == ("shipped", True)
    device(store.root / "devices", "fast")
    found = device_named("fast", store, shipped)
    assert found is not None
    assert (found.title, found.origins["bf16"].shipped, found.when(["bf16"])) == (
        "NVIDIA Fast", False, "measured 2026-11-15, torch 2.11.0",
    )  # fmt: skip
    assert found.model == fit([CASE])


def test_missing_precisions_come_from_the_shipped_device(tmp_path):
    store, shipped = Store(tmp_path / "store"), tmp_path / "shipped"
    ours, theirs, fp8 = CASE, CASE | {"seconds": 0.5}, CASE | {"precision": "fp8", "seconds": 0.05}
    both = [theirs, fp8]
    device(shipped, "fast", cases=both, model=fit(both), date="2025-01-01", versions={"torch": "2.9"})
    device(store.root / "devices", "fast", cases=[ours], model=fit([ours]))
    found = device_named("fast", store, shipped)
    assert found is not None
    assert found.title == "NVIDIA Fast"
    assert found.model == fit([ours, fp8])
    assert {precision: origin.shipped for precision, origin in found.origins.items()} == {
        "bf16": False,
        "fp8": True,
    }
    assert found.when(["fp8"]) == "measured 2025-01-01, torch 2.9"
    assert found.when(["bf16", "fp8"]) == (
        "measured bf16 2026-11-15, torch 2.11.0; fp8 2025-01-01, torch 2.9"
    )


def test_an_unmeasured_device_has_its_peak_and_an_unknown_one_is_refused(tmp_path):
    store = Store(tmp_path / "store")
    assert device_named("a100", store, tmp_path) is None
    device(store.root / "devices", "b200")
    with pytest.raises(SpecError, match=r"'b20'.*'b200'"):
        device_named("b20", store, tmp_path)
    for odd in ("../devices/b200", "", "*"):
        with pytest.raises(SpecError, match="no device"):
            device_named(odd, store, tmp_path)


@pytest.mark.parametrize("model", [None, {"form": 0}, {}])
def test_a_model_of_another_version_is_fitted_again_from_the_cases(tmp_path, model):
    store = Store(tmp_path)
    device(store.root / "devices", "fast", model=model)
    found = device_named("fast", store)
    assert found is not None
    assert found.model == fit([CASE])


@pytest.mark.parametrize(
    "change",
    [
        {"model": None, "cases": []}, {"model": None, "cases": None}, {"date": "x", "versions": {}},
        {"model": {"form": 1, "precisions": {"bf16": {}}}}, {"model": None, "cases": [CASE | {"seconds": -1}]},
    ],
)  # fmt: skip
def test_a_damaged_device_file_is_refused(tmp_path, change):
    store = Store(tmp_path)
    device(store.root / "devices", "fast", **change)
    with pytest.raises(StoreError, match=r"fast\.json .*biphase bench scale --save"):
        device_named("fast", store)
    (tmp_path / "devices" / "fast.json").write_text("{")
    with pytest.raises(StoreError, match=r"fast\.json"):
        device_named("fast", store)


def test_shipped_devices_can_be_read(tmp_path):
    for path in SHIPPED.glob("*.json"):
        found = device_named(path.stem, Store(tmp_path))
        assert found is not None
        assert found.model["precisions"].keys() == found.origins.keys()
        assert all(origin.shipped for origin in found.origins.values())


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


def test_the_measured_cases_of_a_device_are_described(tmp_path):
    found = device_named("h200", Store(tmp_path))
    assert found is not None
    text = found.steps_behind(["bf16"])
    facts = ("MLM 40% in chunks of 2,048 at 8m, 30m, 210m, 610m", "fine-tuning at 30m, 210m", "within 10%")
    assert all(fact in text for fact in facts)
    assert found.not_measured(["210m", "1b"]) == ["1b"]
