"""The documentation is right: its studies plan, its commands run, its links exist, the map names every file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from biphase import __version__

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


STUDIES = [
    (path, block)
    for path in DOCS
    for block in blocks(path.read_text(), "python")
    if "study = Study(" in block and path.name != "extending.md"  # which test_extending.py runs
]
COMMANDS = [
    (path, line[2:])
    for path in DOCS
    for block in blocks(path.read_text(), "console")
    for line in block.splitlines()
    if line.startswith(("$ biphase plan studies", "$ biphase --help"))
]
assert STUDIES
assert COMMANDS


@pytest.mark.parametrize(
    ("path", "text"), STUDIES, ids=[f"{path.name}-{n}" for n, (path, _) in enumerate(STUDIES)]
)
def test_every_documented_study_plans(path, text, tmp_path):
    study = tmp_path / "shown.py"
    study.write_text(text)
    done = biphase("plan", str(study), "--store", str(tmp_path / "store"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_every_documented_light_command_runs(path, command, tmp_path):
    done = biphase(*command.removeprefix("biphase ").split(" #")[0].split(), cwd=ROOT)
    assert done.returncode == 0, done.stderr


def biphase(*arguments, cwd=None):
    command = [sys.executable, "-m", "biphase", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_the_documented_plan_is_that_of_the_quickstart(tmp_path):
    done = biphase("plan", "studies/quickstart.py", "--store", str(tmp_path / "store"), cwd=ROOT)
    tree = [line for line in done.stdout.splitlines() if "→" in line]
    assert tree
    for line in tree:
        assert line.rstrip() in README, line


def test_the_map_names_every_file():
    shown = (ROOT / "docs" / "map.md").read_text()
    missing = [
        path.relative_to(ROOT).as_posix()
        for folder in ("src/biphase", "studies", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py") and path.name not in shown
    ]
    assert not missing


def test_links_exist_and_no_number_is_missing():
    for path in DOCS:
        text = path.read_text()
        assert "<<MEASURE" not in text, path
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
            if not target.startswith(("http:", "https:")):
                file = path.parent / target if target else path
                assert file.exists(), f"{path}: {target}"
                assert not anchor or anchor in anchors(file), f"{path}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and docs/hooks.py make them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_the_version_is_the_same_everywhere():
    changes, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    assert re.search(r"## \[(.+?)\] - (.+)", changes).groups() == (
        __version__,
        re.search(r"date-released: (.+)", citation)[1],
    )
    assert f"version: {__version__}\n" in citation
