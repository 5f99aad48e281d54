"""`biphase doctor` names each problem of a machine in one line, with the command that fixes it."""

import builtins
import os
import shutil
import socket
import subprocess
import time

import pytest
from hub_server import Fault

from biphase import doctor
from biphase.doctor import Diagnosis, compare, describe_cpu, describe_gpus, examine
from biphase.leases import Leases
from biphase.store import Store


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def by_name(diagnoses):
    return {diagnosis.name: diagnosis for diagnosis in diagnoses}


def test_examine_a_working_machine(tmp_path):
    diagnoses = examine(Store(tmp_path / "store"))
    found = by_name(diagnoses)
    assert len(found) == len(diagnoses), "no name twice"
    for name in ("python", "torch", "transformers", "tiktoken", "safetensors", "pyarrow", "store"):
        assert found[name].ok is True, found[name]
    assert {"gpu", "cpu", "compiler", "hub", "disk", "attempts", "tensorboard"} <= set(found)
    assert "pytest" not in found
    assert not (tmp_path / "store").exists(), "examine changes nothing"
    for diagnosis in diagnoses:
        assert "\n" not in diagnosis.detail + diagnosis.fix
        assert diagnosis.ok is True or diagnosis.fix


def test_a_store_below_a_file_and_a_check_that_raises_are_diagnoses(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")

    def broken(name):
        raise RuntimeError("unheard of")

    monkeypatch.setattr(shutil, "disk_usage", broken)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = by_name(examine(Store(tmp_path / "file" / "store")))
    assert found["store"].ok is False
    assert f"{tmp_path}/file/store" in found["store"].detail
    assert "--store" in found["store"].fix
    assert found["compiler"].ok is None, "it costs speed only"
    assert found["compiler"].fix.startswith("apt-get install g++")
    store = by_name(examine(Store(tmp_path)))["store"]
    assert (store.ok, "RuntimeError: unheard of" in store.detail) == (False, True)


def test_old_and_missing_packages_come_with_the_command_that_installs_them():
    requirements = [
        "transformers<6,>=5.17", "torch>=2.11", "tiktoken (>=0.14)", "tensorboard>=2.21; extra == 'track'",
        "ruff==0.17.4; extra == 'dev'", "trackio>=0.43; extra == 'trackio'",
    ]  # fmt: skip
    found = by_name(compare(requirements, {"transformers": "4.57.1", "torch": "2.13.0+cpu"}.get))
    assert list(found) == ["transformers", "torch", "tiktoken", "tensorboard"]
    assert found["torch"] == Diagnosis("torch", True, "2.13.0+cpu")
    assert found["transformers"].ok is False
    assert all(part in found["transformers"].detail for part in ("4.57.1", "<6", ">=5.17"))
    assert found["transformers"].fix.endswith("install 'transformers<6,>=5.17'")
    assert (found["tiktoken"].ok, found["tiktoken"].detail) == (False, "is not installed")
    assert found["tensorboard"].ok is None, "optional"
    (old,) = compare(["python>=3.11"], lambda name: "3.9.2")
    assert (old.ok, "Python >=3.11" in old.fix) == (False, True)
    assert doctor.installed_version("no-such-package-at-all") is None


def test_a_torch_that_does_not_load_is_a_diagnosis(monkeypatch):
    real = builtins.__import__

    def broken(name, *rest, **named):
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file\nmore")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", broken)
    (diagnosis,) = doctor.check_devices()
    assert diagnosis.ok is False
    assert diagnosis.detail == "OSError: libcudart.so.13: cannot open shared object file more"
    assert "--force-reinstall" in diagnosis.fix


H200 = ["H200 (140 GiB)"]


@pytest.mark.parametrize(
    ("diagnosis", "ok", "detail", "fix"),
    [
        (describe_gpus(H200, "13.0", driver=True), True, "H200 (140 GiB)", ""),
        (describe_gpus(H200, "13.0", driver=True, lacks_frontend=True), None, "", "nvidia-cudnn-frontend"),
        (describe_gpus([], None, driver=False), True, "none", ""),
        (describe_gpus([], None, driver=True), False, "CPUs only", "--index-url"),
        (describe_gpus([], "13.0", driver=True, complaint="driver too old"), False, "driver too old", "nvidia-smi"),
        (describe_cpu("flags\t\t: fpu avx512_bf16 amx_bf16\n", 4), True, "amx_bf16", ""),
        (describe_cpu("Features\t: fp asimd bf16\n", 4), True, "bf16", ""),
        (describe_cpu("model name: bf16\nflags\t\t: fpu avx2\n", 4), None, "no bf16", 'precision="fp32"'),
        (describe_cpu("flags\t\t: fpu avx2\n", 4, has_gpu=True), True, "", ""),
    ],
    ids=lambda value: value.detail if isinstance(value, Diagnosis) else "",
)  # fmt: skip
def test_devices_are_described(diagnosis, ok, detail, fix):
    assert diagnosis.ok is ok
    assert detail in diagnosis.detail
    assert fix in diagnosis.fix


def test_the_hub_is_reached_refused_silent_or_offline(hub, monkeypatch):
    (diagnosis,) = doctor.check_hub()
    assert (diagnosis.ok, "hf download" in diagnosis.fix) == (None, True)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    here = f"http://127.0.0.1:{hub.port}"
    monkeypatch.setenv("HF_ENDPOINT", here + "/")
    for token in ("", "hf_owner"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert doctor.check_hub() == [Diagnosis("hub", True, f"{here} answers")]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    (diagnosis,) = doctor.check_hub()
    assert (diagnosis.ok, "HF_TOKEN" in diagnosis.fix, "hf_wrong" in str(diagnosis)) == (False, True, False)
    with hub.failing(Fault("HEAD /", 403)):
        assert "Forbidden" in doctor.unreachable(here)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        nobody = f"http://127.0.0.1:{mute.getsockname()[1]}"
        began = time.monotonic()
        assert doctor.unreachable(nobody, 0.2)
        assert time.monotonic() - began < 1.0
    assert "refused" in doctor.unreachable(nobody)
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    (diagnosis,) = doctor.check_hub()
    assert (diagnosis.ok, nobody in diagnosis.detail) == (None, True)


def test_an_existing_store_is_tested_and_left_unchanged(tmp_path):
    store, disk = doctor.check_store(Store(tmp_path))
    assert store.ok is True
    assert "atomic" in store.detail
    assert disk.detail.endswith("GB free")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_whose_renames_replace_folders_is_refused(tmp_path, monkeypatch):
    real = os.rename

    def replacing(source, target):
        shutil.rmtree(target, ignore_errors=True)
        real(source, target)

    monkeypatch.setattr(os, "rename", replacing)
    (diagnosis,) = doctor.check_store(Store(tmp_path))
    assert diagnosis.ok is False
    assert "overwrite" in diagnosis.detail


@pytest.mark.parametrize(("free", "ok"), [(1e8, False), (5e9, None), (5e11, True)])
def test_free_disk_space_is_judged(tmp_path, monkeypatch, free, ok):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free))
    assert doctor.check_store(Store(tmp_path))[1].ok is ok


@pytest.fixture
def left_behind(tmp_path):
    """A store with attempts that were last written two hours ago."""
    store, past = Store(tmp_path / "my store"), time.time() - 7200

    def leave(*names):
        for name in names:
            (store.attempts / name / "inner").mkdir(parents=True)
            weights = store.attempts / name / "inner" / "weights"
            weights.write_bytes(b"x" * 1_000_000)
            for path in (weights, weights.parent, weights.parent.parent):
                os.utime(path, (past, past))
        return store

    return leave


def test_only_attempts_of_killed_runs_are_to_be_removed(left_behind):
    store = left_behind("dead1-aaaa", "held2-bbbb", "young-cccc")
    os.utime(store.attempts / "young-cccc" / "inner" / "weights")
    with Leases(store.leases).take("held2"):
        (diagnosis,) = doctor.check_attempts(store)
        assert diagnosis.ok is None
        assert diagnosis.detail.startswith("1 left by killed runs, 1.0 MB")
        subprocess.run(diagnosis.fix, shell=True, check=True)
        assert sorted(path.name for path in store.attempts.iterdir()) == ["held2-bbbb", "young-cccc"]
        assert doctor.check_attempts(store)[0].ok is True


def test_an_unfinished_tokenization_is_kept(left_behind):
    store = left_behind("shards-0123-ab", "shards-4567")
    (diagnosis,) = doctor.check_attempts(store)
    assert (diagnosis.ok, diagnosis.fix) == (True, "")
    assert "2 unfinished" in diagnosis.detail
    assert "biphase tokenize" in diagnosis.detail
    left_behind("dead-aaaa")
    (diagnosis,) = doctor.check_attempts(store)
    assert diagnosis.detail.startswith("1 left by killed runs, 1.0 MB; 2 unfinished")
    assert "shards" not in diagnosis.fix
    with Leases(store.leases).take("shards-4567"):
        assert "; 1 unfinished" in doctor.check_attempts(store)[0].detail
