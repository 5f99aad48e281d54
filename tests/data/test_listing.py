"""The files of a corpus: every spelling means what it says, and nothing is left out silently."""

import os
import shlex

import pytest

from biphase.data.corpus import ASSETS, Absent, HubSource, resolve, tokenize_command
from biphase.errors import DataError
from biphase.presets import CORPORA
from biphase.specs import BPE, Corpus, Pretrained


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "corpus"
    (made / "sub" / "deep").mkdir(parents=True)
    (made / "b.txt").write_text("b")
    (made / "sub" / "a.jsonl").write_text('{"text": "a"}\n')
    (made / "sub" / "deep" / "c.txt").write_text("c")
    return made


def mine(source, **fields):
    return Corpus("mine", str(source), **{"tokenizer": BPE(300), **fields})


def names(source, **fields):
    return [file.name for file in resolve(mine(source, **fields)).train]


def test_the_builtin_corpus_ships_with_the_package():
    files = resolve(CORPORA["builtin"])
    assert [file.path.parent for file in (*files.train, *files.heldout)] == [ASSETS, ASSETS]
    assert sum(file.path.stat().st_size for file in (*files.train, *files.heldout)) < 2_000_000


def test_a_file_a_folder_and_patterns_mean_their_files(folder):
    (folder / ".hidden").write_text("never text")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.txt").touch()
    everything = ["b.txt", "sub/a.jsonl", "sub/deep/c.txt"]
    assert names(folder) == names(folder / "**" / "*") == names(folder / "**") == everything
    assert names(folder / "b.txt") == names(folder / "*.txt") == names(folder / "[ab].txt") == ["b.txt"]
    assert names(folder / "**" / "*.txt") == ["b.txt", "sub/deep/c.txt"]
    assert names(folder / "s?b" / "*") == ["sub/a.jsonl"]
    assert names(folder / "*" / "deep" / "c.txt") == ["sub/deep/c.txt"]
    assert names(folder / "**" / "deep" / "**" / "*") == ["sub/deep/c.txt"]


def test_what_exists_is_no_pattern(folder):
    odd = folder.rename(folder.with_name("[old] *corpus"))
    assert names(odd / "b.txt") == names(odd / "*.txt") == ["b.txt"]


def test_stars_amid_a_name_are_refused_with_what_was_meant(folder):
    with pytest.raises(DataError, match=r"\*\* stands for whole folders; type \*\*/\*.jsonl"):
        resolve(mine(folder / "**.jsonl"))


def test_held_out_files_stand_beside_the_source_and_are_not_trained_on(folder):
    files = resolve(mine(folder, heldout="corpus/b.txt"))
    assert [file.name for file in files.train] == ["sub/a.jsonl", "sub/deep/c.txt"]
    assert [file.name for file in files.heldout] == ["b.txt"]
    with pytest.raises(DataError, match=r"all files of .* are held out"):
        resolve(mine(folder / "b.txt", heldout="b.txt"))


@pytest.mark.parametrize(
    "spelled", ["dotted", "absolute", "link", "pattern", "absolute pattern", "home", "parent"]
)
def test_held_out_files_are_not_trained_on_however_they_are_spelled(folder, spelled, monkeypatch):
    (folder.parent / "link.txt").symlink_to(folder / "b.txt")
    monkeypatch.setenv("HOME", str(folder.parent))
    heldout = {
        "dotted": "./corpus/sub/../b.txt",
        "absolute": str(folder / "b.txt"),
        "link": "link.txt",
        "pattern": "corpus/*.txt",
        "absolute pattern": str(folder / "*.txt"),
        "home": "~/corpus/b.txt",
        "parent": "../" + folder.parent.name + "/corpus/*.txt",
    }[spelled]
    files = resolve(mine(folder, heldout=heldout))
    assert [file.name for file in files.train] == ["sub/a.jsonl", "sub/deep/c.txt"]
    assert [file.path.resolve() for file in files.heldout] == [folder / "b.txt"]


def test_links_are_followed_but_not_in_circles(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "d.txt").write_text("d")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "sub" / "round").symlink_to(folder)
    (elsewhere / "itself").symlink_to(elsewhere)
    everything = ["b.txt", "linked/d.txt", "sub/a.jsonl", "sub/deep/c.txt"]
    assert names(folder) == names(folder / "**" / "*") == everything


def test_what_is_neither_file_nor_folder_is_refused(folder):
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    for source in (folder, folder / "*.txt"):
        with pytest.raises(DataError, match=r"gone.txt is no file and no folder \(a broken link\?\)"):
            resolve(mine(source))
    (folder / "gone.txt").unlink()
    os.mkfifo(folder / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe.jsonl is no file"):
        resolve(mine(folder))


def test_a_file_of_unknown_kind_is_refused(folder):
    (folder / "README.md").touch()
    with pytest.raises(DataError, match=r"README.md .* is none of .txt.*by a pattern"):
        resolve(mine(folder))


def test_an_absent_source_and_an_empty_folder_are_told_apart_from_bad_ones(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, words in (
        ("absent", "is not there"),
        ("empty", "holds no files"),
        ("corpus/*.parquet", "holds no"),
        ("absent/**/*.txt", "holds no"),
    ):
        with pytest.raises(Absent, match=words):
            resolve(mine(tmp_path / source))


def test_absent_held_out_files_do_not_make_the_text_absent(folder):
    with pytest.raises(DataError, match=r"held.txt is not there") as caught:
        resolve(mine(folder, heldout="held.txt"))
    assert not isinstance(caught.value, Absent)


HUB = mine("hf://owner/name@abc/data/*.txt", heldout="held")


def test_a_hub_source_is_taken_apart():
    assert HubSource.of(HUB) == HubSource("owner/name", "abc", "data/*.txt")
    with pytest.raises(DataError, match="is not hf://owner/name@revision/glob"):
        HubSource.of(mine("hf://owner/name@/data/x"))
    for heldout in ("/etc/held.txt", "../held.txt", "~/held.txt"):
        with pytest.raises(DataError, match="leaves the repository"):
            HubSource.of(mine(HUB.source, heldout=heldout))


def test_a_copy_of_a_repository_gives_the_names_the_hub_gives(tmp_path):
    for name in ("data/a.txt", "data/.gitattributes", "held/deep/b.txt", "held/.x", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = resolve(HUB, tmp_path)
    assert [file.name for file in files.train] == ["data/a.txt"]
    assert [file.name for file in files.heldout] == ["held/deep/b.txt"]
    with pytest.raises(
        DataError, match=r"type: biphase tokenize 'hf://owner/name@abc/data/\*.txt' .*--from FOLDER"
    ):
        resolve(HUB)


def test_the_command_names_what_the_command_line_knows():
    assert tokenize_command(CORPORA["fineweb-edu"]) == "biphase tokenize fineweb-edu"
    same_name = Corpus("fineweb-edu", "hf://o/n@1/a b/*.txt", Pretrained("o/t", revision="2"), text="body")
    assert shlex.split(tokenize_command(same_name)) == [
        "biphase", "tokenize", "hf://o/n@1/a b/*.txt", "--tokenizer", "o/t@2", "--text", "body",
    ]  # fmt: skip
    assert tokenize_command(mine("./x")) == "biphase tokenize ./x --tokenizer bpe:300"
