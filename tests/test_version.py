"""Which code computed something: the version and the commit, read without git."""

import pytest

from biphase.version import __version__, _commit, code_version

HASH = "2a3f7c4" + "0" * 33


@pytest.fixture
def git(tmp_path):
    (tmp_path / "refs/heads").mkdir(parents=True)
    (tmp_path / "HEAD").write_text("ref: refs/heads/main\n")
    return tmp_path


def test_a_branch_a_packed_branch_and_a_bare_commit_are_read(git):
    (git / "packed-refs").write_text(f"# pack-refs\n{HASH} refs/heads/main\n")
    assert _commit(git) == HASH
    (git / "refs/heads/main").write_text("b" * 40 + "\n")  # newer than what was packed
    assert _commit(git) == "b" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert _commit(git) == "c" * 40


def test_without_a_checkout_the_version_stands_alone(tmp_path, git):
    assert _commit(tmp_path / "nowhere") == ""
    assert _commit(git) == ""  # a branch without any commit
    assert code_version().startswith(__version__)
