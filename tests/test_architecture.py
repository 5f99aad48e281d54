"""The shape of the source: imports point down, files stay readable, planning imports nothing heavy."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "biphase"
# A link leads to a study, which is written as a user writes it.
FILES = sorted(path for path in SOURCE.rglob("*.py") if not path.is_symlink())

# Bottom first. A file imports only from lines below its own; files of a folder also from each other, and from folders
# of the same line.
LAYERS = [
    {"errors", "randomness", "text", "version"},
    {"progress", "records", "tracking"},
    {"specs", "store", "remote"},
    {"presets"},
    {"catalog", "keys", "leases", "objectives", "protocol"},
    {"metadata", "attention"},
    {"data", "fast"},
    {"models", "tasks"},
    {"training"},
    {"finetune"},
    {"study", "cluster"},
    {"report", "papers"},
    {"export"},
    {"bench"},
    {"doctor"},
    {"validate"},
    {"cli"},
    {"workbench"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# What `biphase plan` and `biphase status` import, and what says which tasks and models are meant.
LIGHT = [
    "errors", "records", "specs", "presets", "catalog", "store", "leases", "keys", "metadata", "text", "protocol",
    "data.corpus", "tasks.files", "study.load", "study.plan", "study.costs", "study.describe", "study.ledger",
    "study.build", "study.prices", "study.many_gpus", "study.devices", "study.archive",
    "cluster.launch", "cluster.workers", "cluster.slurm", "doctor", "progress",
]  # fmt: skip
HEAVY = {
    "torch", "numpy", "transformers", "tokenizers", "pyarrow", "safetensors", "huggingface_hub", "scipy", "typer", "rich",
}  # fmt: skip

LONGEST_FILE = 900
LONGEST_FUNCTION = 80


def module_name(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path) for path in FILES}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path):
    """The modules of biphase that a file imports anywhere, by their names inside the package."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "biphase":
                    yield alias.name.removeprefix("biphase").lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] == "biphase":
                inside = module.removeprefix("biphase").lstrip(".")
                for alias in node.names:
                    deeper = f"{inside}.{alias.name}".lstrip(".")
                    yield deeper if deeper in MODULES else inside


def test_imports_point_down():
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    for path in FILES:
        name = module_name(path)
        if name == "" or (name.startswith("papers.") and name.endswith(".study")):
            continue  # the public names stand above everything they name; a paper's study is written with them
        layer = name.split(".")[0]
        assert layer in RANK, f"{layer} has no place in the list of layers: give it one"
        for other in imported(path):
            below = other.split(".")[0]
            assert below, f"{name} imports from biphase itself: import from the file that defines it"
            assert layer == "papers" or not other.startswith("papers."), f"{name} knows a paper: {other}"
            beside = {layer, below} <= folders and RANK[below] == RANK[layer]
            assert beside or RANK[below] < RANK[layer], f"{name} imports {other}, which is not below it"


def test_there_are_no_import_cycles():
    needs = {module_name(path): set(imported(path)) for path in FILES}
    settled = set()
    while waiting := [name for name in needs if name not in settled]:
        free = [name for name in waiting if needs[name] - {name} <= settled | (needs[name] - set(needs))]
        assert free, f"these import each other in a circle: {waiting}"
        settled |= set(free)


def test_files_and_functions_have_a_readable_length():
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= LONGEST_FILE or "papers" in path.parts, path
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{path}: {node.name} has {length} lines"


@pytest.mark.parametrize(
    ("modules", "heavy"), [(LIGHT, HEAVY), (["cli"], HEAVY - {"typer", "rich"})], ids=["planning", "cli"]
)
def test_light_modules_import_nothing_heavy(modules, heavy):
    code = "import sys\n" + "\n".join(f"import biphase.{name}" for name in modules)
    code += f"\nprint(*sorted(set(sys.modules) & {heavy!r}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == []


def test_no_file_names_a_home_folder():
    # Each name has a bracket, so that this file does not match itself.
    homes = r"(^|[^[:alnum:]_])/(ho[m]e|Use[r]s|wo[r]k|ro[o]t|mn[t])/[[:alnum:]_]"
    command = ["git", "grep", "--untracked", "-nIE", homes]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.stdout == ""


def test_no_class_of_a_model_or_dataset_may_bring_code():
    assert not [path for path in FILES if "trust_remote_code=True" in path.read_text(encoding="utf-8")]
