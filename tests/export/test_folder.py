"""`biphase export` on the command line: one folder, whole or not at all; lookup by key, and upload."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hub_stand_in import serve

from biphase.cli import main
from biphase.errors import SpecError, StoreError
from biphase.export.folder import SavedTrial, building, find
from biphase.store import Store, publish, read_json, write_json


@pytest.fixture
def verb(monkeypatch, capsys, trained):
    """Run the command in this process; gives its exit code, stdout and stderr."""

    def run(*words, store=None):
        command = ["biphase", "export", *map(str, words), "--store", str(store or trained.store.root)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def key(trained):
    return trained.results["masked"]


# ---------------------------------------------------------------- target


@pytest.mark.parametrize("exists", [False, True])
def test_a_checkpoint_is_exported_to_a_new_or_empty_folder(exists, verb, key, tmp_path):
    folder = tmp_path / "new" / "folder"
    if exists:
        folder.mkdir(parents=True)
    code, out, err = verb(key[:10], folder)
    assert code == 0, err
    assert out.startswith(f"{folder}: EuroBertForMaskedLM; ")
    assert {"model.safetensors", "README.md"} <= {path.name for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


def test_nothing_is_overwritten(verb, key, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name, fact in (("mine", "not empty"), ("file", "is a file")):
        code, out, err = verb(key[:10], tmp_path / name)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{tmp_path / name} " in err
        assert fact in err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_failed_export_leaves_nothing(tmp_path):
    def fail():
        with building(tmp_path / "out") as folder:
            (folder / "half.txt").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    target = tmp_path / "out"

    def slow():
        with building(target) as folder:
            (folder / "mine.txt").write_text("mine")
            target.mkdir()
            (target / "other.txt").write_text("other")

    with pytest.raises(SpecError, match="not empty"):
        slow()
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["other.txt"]


# ---------------------------------------------------------------- lookup


@pytest.mark.parametrize("digits", ["xyz", "abc", "../../etc", "0" * 12])
def test_a_wrong_key_is_refused(digits, verb, tmp_path):
    code, out, err = verb(digits, tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert digits in err
    assert not (tmp_path / "out").exists()


def test_digits_that_several_results_share_are_refused(trained, key, tmp_path):
    store = Store(tmp_path)
    shutil.copytree(trained.store.checkpoints / key, store.checkpoints / key)
    trial = next(iter(trained.store.trials.iterdir()))
    alike = store.trials / f"{key[:12]}{trial.name[12:]}"
    built = shutil.copytree(trial, tmp_path / "built")
    write_json(built / "trial.json", read_json(built / "trial.json") | {"key": alike.name})
    (built / "manifest.json").unlink()
    publish(built, alike)
    with pytest.raises(SpecError, match="2 results"):
        find(key[:8], store)
    assert find(key, store).key == key
    assert isinstance(find(alike.name, store), SavedTrial)
    (store.checkpoints / key / "manifest.json").unlink()  # no manifest, no result
    with pytest.raises(StoreError, match=f"{key}.*no manifest"):
        find(key, store)


def test_options_that_exclude_each_other_are_refused(verb, trained, key, tmp_path):
    trial = next(iter(trained.store.trials.iterdir())).name
    for words, fact in (
        ((trial, "--task", "kinds"), "leave out --task"),
        ((key, "--public"), "--push owner/name"),
    ):
        code, _, err = verb(words[0], tmp_path / "out", *words[1:])
        assert code == 2
        assert fact in err


@pytest.mark.parametrize(("damaged", "fact"), [(False, "biphase tokenize CORPUS"), (True, "has changed")])
def test_missing_shards_and_damaged_checkpoints_are_refused(damaged, fact, verb, trained, key, tmp_path):
    store = Store(tmp_path / "store")
    shutil.copytree(trained.store.checkpoints / key, store.checkpoints / key)
    if damaged:
        shutil.copytree(trained.store.shards, store.shards, symlinks=True)
        with (store.checkpoints / key / "model.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\0\0\x80\x3f")
    code, _, err = verb(key, tmp_path / "out", store=store.root)
    assert code == 2
    assert fact in err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


# ---------------------------------------------------------------- upload


@pytest.fixture
def hub():
    stand_in, server = serve()
    yield stand_in
    server.shutdown()
    server.server_close()


def python(hub, home, *command, **variables):
    """Run Python in a process of its own, whose hub is the stand-in."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_secret",
        **variables,
    }
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={name: value for name, value in environment.items() if value},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


PUSH = """
import sys
from pathlib import Path
from biphase.errors import SpecError
from biphase.export.folder import check_push, upload
try:
    check_push(sys.argv[2])
    print(upload(Path(sys.argv[1]), sys.argv[2], public=len(sys.argv) > 3, say=lambda text: None))
except SpecError as refusal:
    sys.exit(f"error: {refusal}")
"""


def test_the_command_uploads_what_it_wrote(hub, trained, key, tmp_path):
    folder = tmp_path / "out"
    command = ("-m", "biphase", "export", key, folder, "--store", trained.store.root, "--push", "me/it")
    done = python(hub, tmp_path / "home", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.endpoint}/me/it: private, commit aaaaaaaa"
    assert hub.private == {"me/it": True}
    files = (path for path in folder.rglob("*") if path.is_file())
    assert hub.files == {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
    assert set(hub.large.values()) == {(folder / "model.safetensors").read_bytes()}
    assert "Bearer hf_secret" in hub.tokens


def test_a_repository_is_public_only_on_request(hub, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("---\ntags: [biphase]\n---\n")

    def push(*words):
        return python(hub, tmp_path, "-c", PUSH, tmp_path / "out", *words)

    done = push("me/open", "public")
    assert done.stdout.startswith(f"{hub.endpoint}/me/open: public"), done.stderr
    assert hub.private == {"me/open": False}
    hub.files.clear()
    done = push("me/open")
    assert done.returncode == 1
    assert "me/open" in done.stderr
    assert "type --public" in done.stderr
    assert hub.files == {}
    hub.private["me/mine"] = True  # one that exists and is private
    done = push("me/mine")
    assert done.stdout.startswith(f"{hub.endpoint}/me/mine: private"), done.stderr


def test_an_upload_that_cannot_succeed_is_refused(hub, tmp_path):
    def refused(repo, **variables):
        done = python(hub, tmp_path / "home", "-c", PUSH, tmp_path, repo, **variables)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "hf_secret" not in done.stderr
        return done.stderr

    assert "hf auth login" in refused("me/it", HF_TOKEN="")
    assert "owner/name" in refused("it")
    assert "owner/name" in refused("../it")
    assert "HF_HUB_OFFLINE=0" in refused("me/it", HF_HUB_OFFLINE="1")
    hub.refuses = True
    assert f"hf upload me/it {tmp_path}" in refused("me/it")
