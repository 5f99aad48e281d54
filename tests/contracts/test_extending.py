"""The worked examples of docs/extending.md run, and touch no more files than the page says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = {text.split("\n", 1)[0]: text for text in PAGE.split("\n## ")[1:]}
MOST_FILES = {"An objective": 4, "A task": 1, "A task family": 4, "A paper": 1}

# Runs the blocks of a section in their order, in a process that imports biphase from the changed copy of src/.
DRIVER = r"""
import json, re, shlex, sys
from pathlib import Path
from typer.testing import CliRunner
import biphase
from biphase import cli

assert Path(biphase.__file__).is_relative_to(sys.argv[1]), biphase.__file__
for language, block in json.load(sys.stdin):
    name = re.match(r"# (\w+\.py)\n", block)
    if language == "python" and name:
        Path(name[1]).write_text(block, encoding="utf-8")
    elif language == "python":
        exec(compile(block, "block of docs/extending.md", "exec"), {"__name__": "block"})
    else:
        for command in block.split("$ biphase ")[1:]:
            typed, *lines = command.splitlines()
            done = CliRunner().invoke(cli.app, shlex.split(typed))
            assert done.exit_code == 0, (typed, done.output, done.exception)
            printed = [" ".join(line.split()) for line in done.output.splitlines()]
            for line in lines:
                pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("…"))
                assert any(re.fullmatch(rf".*{pattern}\s*", text) for text in printed), (line, done.output)
"""


def blocks(section):
    return re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One store for all examples: they share the tokenized corpus and one pretrained model."""
    return tmp_path_factory.mktemp("store")


def test_the_page_has_the_four_sections():
    assert set(SECTIONS) == set(MOST_FILES)


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_worked_example_runs_and_touches_few_files(title, store, tmp_path):
    section = SECTIONS[title]
    listed = re.findall(r"(?m)^- `([^`]+)`: ", section)
    assert 1 <= len(listed) <= MOST_FILES[title]
    diff = "".join(block for language, block in blocks(section) if language == "diff")
    changed = re.findall(r"(?m)^\+\+\+ b/(\S+)", diff)
    folders = [name for name in listed if name.endswith("/")]
    assert len(set(changed)) == len(changed)
    assert {name for name in changed if not name.startswith(tuple(folders))} == (
        {name for name in listed if name.startswith("src/")} - set(folders)
    )

    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    if diff:
        outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        applied = subprocess.run(
            ["git", "apply", "-"], input=diff, cwd=tmp_path, env=outside, capture_output=True, text=True
        )
        assert applied.returncode == 0, applied.stderr

    work = tmp_path / "work"
    work.mkdir()
    (work / "store").symlink_to(store)
    steps = [(language, block) for language, block in blocks(section) if language in ("python", "console")]
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        input=json.dumps(steps),
        cwd=work,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src"), "BIPHASE_STORE": "store"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
