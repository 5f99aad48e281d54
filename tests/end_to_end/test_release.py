"""What is released works without the repository, with the oldest and the newest versions that pyproject.toml allows.

Both files are built once; pip installs them from its index. A GPU build of torch is 3 GB, so torch is the version of
this environment throughout, and its own lower bound is not tested.
"""

import json
import os
import re
import subprocess
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("track", "bench", "lora", "gguf", "onnx")  # those of a machine without a GPU
TORCH = f"torch=={torch.__version__.split('+')[0]}"

pytestmark = pytest.mark.campaign


def done(*command, **how) -> str:
    """Run a command that must succeed, outside the repository; gives what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    how = {"capture_output": True, "text": True, "env": environment, **how}
    ended = subprocess.run([str(part) for part in command], check=False, **how)
    assert ended.returncode == 0, f"{command}: {ended.stdout[-2_000:]}{ended.stderr[-4_000:]}"
    return ended.stdout


def environment(folder: Path, *packages: object) -> Path:
    """Make an environment with these packages; gives its folder of programs."""
    venv.create(folder, with_pip=True)
    done(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *packages)
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The wheel and the sdist."""
    folder = tmp_path_factory.mktemp("built")
    programs = environment(folder / "hatchling", "hatchling")
    done(programs / "python", "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return {kind: next(folder.glob(f"*.{kind}")) for kind in ("whl", "tar.gz")}


def test_what_is_built_is_small_and_has_no_results(built):
    with zipfile.ZipFile(built["whl"]) as wheel, tarfile.open(built["tar.gz"]) as sdist:
        inside = [name.partition("/")[2] for name in sdist.getnames()]
        names = {"whl": wheel.namelist(), "tar.gz": inside}
    for kind, inside in names.items():
        assert built[kind].stat().st_size < 3_000_000
        assert not [
            name for name in inside if name.startswith(("docs/", "tests/", "store/", ".venv", ".git/"))
        ]
    needed = (
        "store.py",
        "study/new.j2",
        "report/page/style.css",
        "assets/quickstart.py",
        "papers/wsm/study.py",
    )
    assert {f"biphase/{name}" for name in needed} <= set(names["whl"])
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt"} <= set(names["tar.gz"])


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_an_installed_package_runs_the_quickstart_outside_the_repository(kind, built, tmp_path):
    programs = environment(tmp_path / "venv", "--no-deps", built[kind])
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def biphase(*words: str) -> str:
        return done(programs / "biphase", *words, cwd=tmp_path)

    found = done(programs / "python", "-c", "import biphase; print(biphase.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(tmp_path)
    assert "4 runs" in biphase("plan", "quickstart")
    assert "papers/wsm/gpu" in biphase("papers", "--device", "h200")
    assert "2 runs" in biphase("new", "two-stage", "--device", "cpu")
    if kind == "tar.gz":  # its content is that of the wheel, which runs
        return
    facts = json.loads(biphase("doctor", "--json"))
    assert facts, "doctor says something of this machine"
    biphase("run", "quickstart", "--only", "clm", "--quiet")
    report = json.loads(biphase("report", "quickstart", "--no-print", "--json"))
    assert report["claims"], "its claims have verdicts"


def lowest() -> list[str]:
    """Every dependency at the lower bound of pyproject.toml."""
    needed = [
        *PROJECT["dependencies"],
        *(each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra]),
    ]
    bounds = [re.match(r"([\w-]+)>=([\d.]+)", each).groups() for each in needed]
    return [f"{name}=={version}" for name, version in bounds if name != "torch"]


@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_it_works_with_the_oldest_and_the_newest_dependencies(versions, built, tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("\n".join([TORCH, *(lowest() if versions == "oldest" else [])]))
    programs = environment(tmp_path / "venv", "-c", pins, f"{built['whl']}[{','.join(EXTRAS)}]")

    def biphase(*words: str) -> str:
        return done(programs / "biphase", *words, cwd=tmp_path)

    study = (ROOT / "studies" / "quickstart.py").read_text()
    for long, short in {
        "STEPS, SWITCH = 240, 120": "STEPS, SWITCH = 8, 4",
        "warmup=20, decay=40": "warmup=2, decay=2",
        "heldout_every=20": "heldout_every=4",
        "SEEDS = (2, 3, 4, 5, 6, 7)": "SEEDS = (2, 3)",
        "steps=14": "steps=2",
    }.items():
        assert long in study
        study = study.replace(long, short)
    (tmp_path / "short.py").write_text(study)
    biphase("run", "short.py", "--quiet")
    assert len(json.loads(biphase("report", "short.py", "--json"))["claims"]) == 2
    jobs = json.loads(biphase("status", "short.py", "--json"))["jobs"]
    key = next(job["key"] for job in jobs if "mlm40" in job["results"])
    biphase(
        "export", key, "encoder", "--onnx"
    )  # compares with transformers and onnxruntime before it is kept
    biphase(
        "adapt",
        "./encoder",
        "--corpus",
        "builtin",
        "--steps",
        "2",
        "--length",
        "64",
        "--lora",
        "2",
        "--quiet",
    )
