"""`biphase export` on the command line: one folder, whole or not at all; lookup by key, and upload."""

import shutil
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from biphase.cli import main
from biphase.errors import SpecError, StoreError
from biphase.export.folder import SavedTrial, building, check_push, find, upload
from biphase.store import Store, publish, read_json, write_json


@pytest.fixture
def verb(monkeypatch, capsys, trained):
    """Run the command in this process; gives its exit code, stdout and stderr."""

    def run(*words, store=None):
        command = ["biphase", "export", *map(str, words), "--store", str(store or trained.store.root)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


@pytest.fixture
def key(trained):
    return trained.results["masked"]


# ---------------------------------------------------------------- target


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


def build(target, action):
    with building(target) as folder:
        (folder / "half.txt").write_text("half")
        action()


def test_a_failed_export_leaves_nothing_and_keeps_what_appeared_meanwhile(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        build(target, lambda: 1 / 0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SpecError, match="not empty"):
        build(target, lambda: [target.mkdir(), (target / "other.txt").write_text("other")])
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["other.txt"]


# ---------------------------------------------------------------- lookup


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
def hub(monkeypatch):
    """A hub that keeps what is uploaded to it."""

    class Hub:
        private, files = {}, {}  # whether a repository is private; of the last commit
        refuses = False

        def create_repo(self, repo, *, private, exist_ok):
            if self.refuses:
                raise PermissionError("no write rights")
            assert exist_ok
            self.private.setdefault(repo, private)

        def model_info(self, repo):
            return SimpleNamespace(private=self.private[repo])

        def upload_folder(self, *, repo_id, folder_path, commit_message):
            files = (path for path in folder_path.rglob("*") if path.is_file())
            self.files.update({path.relative_to(folder_path): path.read_bytes() for path in files})
            return SimpleNamespace(repo_url=SimpleNamespace(url=f"https://hub/{repo_id}"), oid="a" * 40)

    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return hub


def test_a_checkpoint_is_exported_to_an_empty_folder_and_uploaded(hub, verb, key, tmp_path):
    folder = tmp_path / "new" / "folder"
    folder.mkdir(parents=True)
    code, out, err = verb(key[:10], folder, "--push", "me/it")
    assert code == 0, err
    assert out.startswith(f"{folder}: EuroBertForMaskedLM; ")
    assert out.splitlines()[-1] == "https://hub/me/it: private, commit aaaaaaaa"
    assert hub.private == {"me/it": True}
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]
    assert {"model.safetensors", "README.md"} <= {path.name for path in hub.files}
    files = (path for path in folder.rglob("*") if path.is_file())
    assert hub.files == {path.relative_to(folder): path.read_bytes() for path in files}


def test_a_repository_is_public_only_on_request(hub, tmp_path):
    (tmp_path / "README.md").write_text("---\ntags: [biphase]\n---\n")

    def push(repo, *, public=False):
        return upload(tmp_path, repo, public=public, say=lambda text: None)

    assert push("me/open", public=True).startswith("https://hub/me/open: public")
    hub.files.clear()
    with pytest.raises(SpecError, match=r"me/open.*--public"):
        push("me/open")
    assert hub.files == {}
    hub.private["me/mine"] = True  # one that exists and is private
    assert push("me/mine").startswith("https://hub/me/mine: private")
    hub.refuses = True
    with pytest.raises(SpecError, match=f"no write rights.*hf upload me/it {tmp_path}"):
        push("me/it")


@pytest.mark.parametrize(
    ("repo", "token", "offline", "fact"),
    [
        ("it", "hf_secret", False, "owner/name"),
        ("../it", "hf_secret", False, "owner/name"),
        ("me/it", "hf_secret", True, "HF_HUB_OFFLINE=0"),
        ("me/it", "", False, "hf auth login"),
    ],
)
def test_an_upload_that_cannot_succeed_is_refused(hub, monkeypatch, tmp_path, repo, token, offline, fact):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(SpecError, match=fact) as caught:
        check_push(repo)
    assert "hf_secret" not in str(caught.value)
