"""The shape of the source: imports point down, files stay readable, planning imports nothing heavy."""

import ast
import importlib
import re
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
    "study.build", "study.new", "study.prices", "study.many_gpus", "study.devices", "study.archive",
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


def imported(tree):
    """The modules of biphase that a file imports anywhere, by their names inside the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "biphase":
                    yield alias.name.removeprefix("biphase").lstrip(".")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
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
        for other in imported(ast.parse(path.read_text(encoding="utf-8"))):
            below = other.split(".")[0]
            assert below, f"{name} imports from biphase itself: import from the file that defines it"
            assert layer == "papers" or not other.startswith("papers."), f"{name} knows a paper: {other}"
            beside = {layer, below} <= folders and RANK[below] == RANK[layer]
            assert beside or RANK[below] < RANK[layer], f"{name} imports {other}, which is not below it"


def test_there_are_no_import_cycles():
    needs = {module_name(path): set(imported(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES}
    settled = set()
    while waiting := [name for name in needs if name not in settled]:
        free = [name for name in waiting if needs[name] - {name} <= settled | (needs[name] - set(needs))]
        assert free, f"these import each other in a circle: {waiting}"
        settled |= set(free)


def test_files_and_functions_have_a_readable_length():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= LONGEST_FILE or "papers" in path.parts, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= LONGEST_FUNCTION, f"{path}: {node.name} has {length} lines"


def test_every_file_has_a_docstring():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not text or ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize(
    ("modules", "heavy"), [(LIGHT, HEAVY), (["cli"], HEAVY - {"typer", "rich"})], ids=["planning", "cli"]
)
def test_light_modules_import_nothing_heavy(modules, heavy):
    code = "import sys\n" + "\n".join(f"import biphase.{name}" for name in modules)
    code += f"\nprint(*sorted(set(sys.modules) & {heavy!r}))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == []


@pytest.mark.parametrize("name", ["biphase", "biphase.specs"])
def test_all_is_true(name):
    package = importlib.import_module(name)
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)
    modules = {name for name, value in vars(package).items() if type(value).__name__ == "module"}
    public = {name for name in vars(package) if not name.startswith("_")} - modules
    assert public <= set(package.__all__) | {"annotations"}


def tracked_files():
    """The files of the repository: known to git, or new and not ignored by it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:  # an unpacked archive: no file of it is ignored
        folders = ("src", "tests", "studies", "docs", "benchmarks")
        files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
        return [*ROOT.glob("*.*"), *files]
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_no_file_contains_a_path_of_a_home_folder():
    # Written in two parts, so that this file does not match itself.
    homes = [r"/ho" + r"me/\w", r"/Use" + r"rs/\w", r"/wo" + r"rk/\w", r"/ro" + r"ot/\w", r"/mn" + r"t/\w"]
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        # A word character before it makes it a part of some other path, like a web address.
        found += [
            f"{path.relative_to(ROOT)}: {match[0]}"
            for home in homes
            for match in re.finditer(rf"(?<!\w){home}", text)
        ]
    assert not found


def test_no_pickle_and_no_remote_code():
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        names = {
            alias.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & {"pickle", "dill", "cloudpickle", "shelve", "marshal"}, path
        assert "trust_remote_code=True" not in text, path
        assert "torch.load(" not in text, path


def test_no_module_is_called_utils():
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "common", "misc")]
