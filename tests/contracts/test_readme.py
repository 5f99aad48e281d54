"""The documentation is right: its studies plan, its commands run, its links exist, and the version is the same everywhere."""

import re
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
def test_every_documented_study_plans(path, text, tmp_path, verb, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write their own data
    study = tmp_path / "shown.py"
    study.write_text(text)
    code, _, err = verb("plan", study, "--store", tmp_path / "store")
    assert code == 0, err


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_every_documented_light_command_runs(path, command, verb, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, _, err = verb(*command.removeprefix("biphase ").split(" #")[0].split())
    assert code == 0, err


def test_the_documented_plan_is_that_of_the_quickstart(tmp_path, verb):
    _, out, _ = verb("plan", ROOT / "studies" / "quickstart.py", "--store", tmp_path / "store")
    tree = [line for line in out.splitlines() if "→" in line]
    assert tree
    for line in tree:
        assert line.rstrip() in README, line


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
