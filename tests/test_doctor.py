"""The doctor finds what is wrong, says it in a line, and ends with what to type."""

import builtins
import http.server
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from biphase import doctor
from biphase.doctor import Diagnosis, compare, examine, meets, render
from biphase.leases import Leases
from biphase.store import Store


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def by_name(findings: list[Diagnosis]) -> dict[str, Diagnosis]:
    return {finding.name: finding for finding in findings}


def test_lines_are_aligned_and_a_problem_is_followed_by_what_to_type():
    findings = [
        Diagnosis("python", True, "3.11.7", "never shown"),
        Diagnosis("tensorboard", None, "is not installed", "pip install tensorboard"),
        Diagnosis("store", False, "cannot be written", "biphase run STUDY --store /b"),
    ]
    assert render(findings).splitlines() == [
        "✓ python       3.11.7",
        "! tensorboard  is not installed",
        "               → pip install tensorboard",
        "✗ store        cannot be written",
        "               → biphase run STUDY --store /b",
    ]
    assert render([]) == ""


def test_a_whole_examination_of_a_sound_machine(tmp_path):
    findings = examine(Store(tmp_path / "store"))
    found = by_name(findings)
    assert len(found) == len(findings), "no name twice"
    for name in (
        "python",
        "torch",
        "transformers",
        "tokenizers",
        "tiktoken",
        "safetensors",
        "pyarrow",
        "store",
    ):
        assert found[name].ok is True, found[name]
    assert {"gpu", "cpu", "compiler", "hub", "disk", "attempts", "built-in corpus", "tensorboard"} <= set(
        found
    )
    assert "pytest" not in found
    assert not (tmp_path / "store").exists(), "looking changes nothing"
    for finding in findings:
        assert "\n" not in finding.detail + finding.fix
        assert finding.ok is True or finding.fix


def test_the_module_itself_needs_no_torch():
    code = "import sys, biphase.doctor; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'pyarrow')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("version", "bounds", "enough"),
    [
        ("5.17", "<6,>=5.17", True),
        ("5.17.0", ">=5.17", True),
        ("5.9", ">=5.17", False),
        ("6.0", "<6,>=5.17", False),
        ("2.13.0+cpu", ">=2.11", True),
        ("2.11.0a0+git123", ">=2.11", True),
        ("15", ">=15.0", True),
        ("0.23.1", "<0.24,>=0.23.1", True),
        ("0.23.0", "<0.24,>=0.23.1", False),
        ("1.2", "", True),
        ("1.2", "==1.2.0", True),
        ("1.2", "!=1.2", False),
        ("1.2", "<=1.1", False),
        ("1.2", ">1.2", False),
    ],
)
def test_versions_are_compared_by_number(version, bounds, enough):
    assert meets(version, bounds) is enough


def test_our_comparison_agrees_with_packaging_on_our_own_requirements():
    requirements = pytest.importorskip("packaging.requirements")
    for text in importlib.metadata.requires("biphase"):
        parsed = requirements.Requirement(text)
        for version in (
            "0.1",
            "0.23.1",
            "0.24",
            "1.31",
            "2.3.9",
            "2.11.0",
            "5.17",
            "6",
            "15.0.0",
            "25.0",
            "26.1.2",
        ):
            assert meets(version, doctor._split(text.partition(";")[0])[1]) is parsed.specifier.contains(
                version
            )


def test_old_and_missing_packages_come_with_the_command_that_installs_them():
    requirements = [
        "transformers<6,>=5.17",
        "torch>=2.11",
        "tiktoken (>=0.14)",
        "tensorboard>=2.21; extra == 'track'",
    ]
    requirements += ["ruff==0.17.4; extra == 'dev'"]
    found = by_name(
        compare(requirements, {"transformers": "4.57.1", "torch": "2.13.0+cpu", "tiktoken": None})
    )
    assert list(found) == ["transformers", "torch", "tiktoken", "tensorboard"]
    assert found["torch"] == Diagnosis("torch", True, "2.13.0+cpu")
    assert found["transformers"].ok is False
    assert found["transformers"].detail == "4.57.1 is installed, <6,>=5.17 is needed"
    assert found["transformers"].fix.endswith("install 'transformers<6,>=5.17'")
    assert (found["tiktoken"].ok, found["tiktoken"].detail) == (False, "is not installed")
    assert found["tensorboard"].ok is None, "optional"


def test_an_old_python_is_named():
    (finding,) = compare(["python>=3.11"], {"python": "3.9.2"})
    assert finding.ok is False
    assert finding.fix.startswith("install Python >=3.11")


def test_a_package_nobody_has_has_no_version():
    assert doctor.installed_version("no-such-package-at-all") is None
    assert doctor.installed_version("torch")


def test_a_torch_that_does_not_load_is_a_finding(monkeypatch):
    real = builtins.__import__

    def broken(name: str, *rest: object, **named: object) -> object:
        if name == "torch":
            raise OSError("libcudart.so.13: cannot open shared object file\nmore")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", broken)
    (finding,) = doctor.look_at_devices()
    assert finding.ok is False
    assert finding.detail == "OSError: libcudart.so.13: cannot open shared object file more"
    assert "--force-reinstall" in finding.fix


def test_gpus_are_named_and_an_unusable_driver_is_a_problem():
    assert doctor.describe_gpus(["H200 (140 GiB)"], "13.0", driver=True).detail.startswith("H200 (140 GiB)")
    assert doctor.describe_gpus(["H200 (140 GiB)"], "13.0", driver=True).ok is True
    slower = doctor.describe_gpus(["H200 (140 GiB)"], "13.0", driver=True, lacks_frontend=True)
    assert slower.ok is None
    assert slower.fix.endswith("install nvidia-cudnn-frontend")
    assert doctor.describe_gpus([], None, driver=False).ok is True
    cpu_build = doctor.describe_gpus([], None, driver=True)
    assert cpu_build.ok is False
    assert "--index-url" in cpu_build.fix
    old_driver = doctor.describe_gpus([], "13.0", driver=True, complaint="The NVIDIA driver is too old")
    assert old_driver.ok is False
    assert "too old" in old_driver.detail


def test_the_processor_is_judged_by_its_bf16_units():
    assert "amx_bf16" in doctor.describe_cpu("flags\t\t: fpu avx512_bf16 amx_bf16\n", 4).detail
    assert doctor.describe_cpu("Features\t: fp asimd bf16\n", 4).ok is True
    plain_cpu = doctor.describe_cpu("model name: bf16\nflags\t\t: fpu avx2\n", 4)
    assert plain_cpu.ok is None
    assert 'precision="fp32"' in plain_cpu.fix
    assert doctor.describe_cpu("flags\t\t: fpu avx2\n", 4, has_gpu=True).ok is True


def test_a_missing_compiler_costs_speed_only(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    (finding,) = doctor.look_at_compiler()
    assert finding.ok is None
    assert finding.fix.startswith("apt-get install g++")


def test_offline_is_respected_and_says_how_to_copy():
    (finding,) = doctor.look_at_hub()
    assert finding.ok is None
    assert "hf download" in finding.fix


def test_a_hub_is_reached_refused_or_silent(monkeypatch):
    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(403 if self.path == "/blocked" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", here + "/")
        assert doctor.look_at_hub() == [Diagnosis("hub", True, f"{here} answers")]
        assert "Forbidden" in doctor.unreachable(f"{here}/blocked")
        server.shutdown()
    assert "refused" in doctor.unreachable(here)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{mute.getsockname()[1]}")
        monkeypatch.setattr(doctor, "HUB_SECONDS", 0.2)
        began = time.monotonic()
        assert doctor.unreachable(os.environ["HF_ENDPOINT"], 0.2)
        assert time.monotonic() - began < 1.0
    (finding,) = doctor.look_at_hub()
    assert finding.ok is None
    assert "does not answer" in finding.detail


def test_missing_assets_are_named(tmp_path):
    (finding,) = doctor.look_at_assets(tmp_path)
    assert finding.ok is False
    assert "corpus.jsonl.zst" in finding.detail
    for name in ("corpus.jsonl.zst", "heldout.jsonl.zst"):
        (tmp_path / name).write_bytes(b"x" * 1_000_000)
    assert doctor.look_at_assets(tmp_path) == [Diagnosis("built-in corpus", True, "2.0 MB")]


def test_a_store_under_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    findings = examine(Store(tmp_path / "file" / "store"))
    broken = by_name(findings)["store"]
    assert broken.ok is False
    assert "cannot be written" in broken.detail
    assert "--store" in broken.fix
    assert f"✗ store            {tmp_path}/file/store" in render(findings)


def test_a_store_that_exists_is_tried_and_left_as_it_was(tmp_path):
    store, disk = doctor.look_at_store(Store(tmp_path))
    assert store.ok is True
    assert "renames are atomic" in store.detail
    assert disk.detail.endswith("GB free")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_whose_renames_cannot_be_trusted_is_refused(tmp_path, monkeypatch):
    real = os.rename

    def replacing(source: str, target: str) -> None:
        shutil.rmtree(target, ignore_errors=True)
        real(source, target)

    monkeypatch.setattr(os, "rename", replacing)
    (finding,) = doctor.look_at_store(Store(tmp_path))
    assert finding.ok is False
    assert "overwrite" in finding.detail


@pytest.mark.parametrize(("free", "ok"), [(1e8, False), (5e9, None), (5e11, True)])
def test_room_is_judged(free, ok):
    assert doctor.describe_room(free, "elsewhere").ok is ok


def test_only_what_killed_runs_left_is_named_with_the_command_that_removes_it(tmp_path):
    store = Store(tmp_path / "my store")
    past = time.time() - 7200
    for name in ("dead1-aaaa", "held2-bbbb", "young-cccc"):
        (store.attempts / name / "inner").mkdir(parents=True)
        weights = store.attempts / name / "inner" / "weights"
        weights.write_bytes(b"x" * 1_000_000)
        for path in (weights, weights.parent, weights.parent.parent):
            os.utime(path, (past, past))
    os.utime(store.attempts / "young-cccc" / "inner" / "weights")
    with Leases(store.leases).take("held2"):
        (finding,) = doctor.look_at_attempts(store)
    assert finding.ok is None
    assert finding.detail.startswith("1 left by killed runs, 1.0 MB")
    subprocess.run(finding.fix, shell=True, check=True)
    assert sorted(path.name for path in store.attempts.iterdir()) == ["held2-bbbb", "young-cccc"]
    with Leases(store.leases).take("held2"):
        assert doctor.look_at_attempts(store)[0].ok is True


def left_behind(store, *names):
    past = time.time() - 7200
    for name in names:
        (store.attempts / name).mkdir(parents=True)
        (store.attempts / name / "file").write_bytes(b"x" * 1_000_000)
        for path in (store.attempts / name / "file", store.attempts / name):
            os.utime(path, (past, past))


def test_an_unfinished_tokenization_can_be_gone_on_with_and_is_not_to_be_removed(tmp_path):
    store = Store(tmp_path)
    left_behind(store, "shards-0123-ab", "shards-4567")
    (finding,) = doctor.look_at_attempts(store)
    assert (finding.ok, finding.fix) == (True, "")
    assert finding.detail.endswith("; 2 unfinished in tokenizing: biphase tokenize goes on with them")
    left_behind(store, "dead-aaaa")
    (finding,) = doctor.look_at_attempts(store)
    assert finding.detail.startswith("1 left by killed runs, 1.0 MB; 2 unfinished")
    assert "shards" not in finding.fix
    with Leases(store.leases).take("shards-4567"):
        assert "; 1 unfinished" in doctor.look_at_attempts(store)[0].detail


def test_an_attempt_that_vanishes_while_it_is_looked_at_is_none(tmp_path, monkeypatch):
    store = Store(tmp_path)
    left_behind(store, "dead-aaaa", "gone-bbbb")
    real = os.stat

    def vanishing(path, *rest, **named):
        if "gone-bbbb" in str(path):
            raise FileNotFoundError(path)
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "stat", vanishing)
    (finding,) = doctor.look_at_attempts(store)
    assert "dead-aaaa" in finding.fix
    assert "gone-bbbb" not in finding.fix


def test_a_look_that_fails_is_a_finding_and_not_the_end():
    def broken() -> list[Diagnosis]:
        raise RuntimeError("unheard of")

    (finding,) = doctor.guarded("devices", broken)
    assert (finding.name, finding.ok) == ("devices", False)
    assert "RuntimeError: unheard of" in finding.detail
