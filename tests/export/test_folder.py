"""`biphase export` on the command line: one folder, whole or not at all; lookup by key, and upload."""

import shutil
import sys

import pytest
from hub_server import Fault

from biphase.cli import main
from biphase.errors import SpecError, StoreError
from biphase.export.folder import SavedTrial, building, check_push, find
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
def push(client, trained, tmp_path):
    """Exports and pushes in the process that knows the hub: `push(key, "folder", "--push", "me/it")`."""

    def typed(key, folder, *words, **environment):
        store = ("--store", trained.store.root)
        return client(
            "export", key, tmp_path / folder, *words, *store, **{"HF_TOKEN": "hf_owner", **environment}
        )

    return typed


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def pushed(repository, branch="main"):
    return {name: data for name, data in repository.files(branch).items() if name != ".gitattributes"}


def test_an_export_is_one_commit_and_replaces_an_earlier_one(hub, push, trained, tmp_path):
    code, out, err = push(trained.results["masked"][:10], "one", "--push", "me/it")
    assert code == 0, err
    repository = hub.repositories["model", "me/it"]
    commit = repository.branches["main"]
    assert out.splitlines()[-1] == f"http://127.0.0.1:{hub.port}/me/it: private, commit {commit}"
    assert repository.private
    assert len(repository.commits) == 2, "the empty one and this"
    assert pushed(repository) == content(tmp_path / "one")
    mine = {"diagram.png": b"mine", "mine/data.json": b"{}"}
    repository.commit({"onnx/model.onnx": b"of an older export", **mine})
    code, _, err = push(trained.results["causal"], "two", "--push", "me/it")
    assert code == 0, err
    assert pushed(repository) == {**content(tmp_path / "two"), **mine}


def test_a_kept_step_is_pushed_to_a_branch_of_its_own(hub, push, client, trained, tmp_path):
    first, last = trained.results["early"], trained.results["masked"]
    for key, folder, more in ((last, "last", ()), (first, "step", ("--revision", "step-6"))):
        code, out, err = push(key, folder, "--push", "me/steps", *more)
        assert code == 0, err
    repository = hub.repositories["model", "me/steps"]
    with hub.failing(Fault("POST .*/commit/", 403)):
        assert push(last, "last", "--push", "me/steps", "--revision", "failed")[0] == 2
    assert pushed(repository, "failed") == {}, "not the model of another branch"
    assert "/tree/step-6: private, commit " in out
    assert pushed(repository) == content(tmp_path / "last")
    assert pushed(repository, "step-6") == content(tmp_path / "step")
    loads = "from transformers import AutoModel; AutoModel.from_pretrained(given[0], revision=given[1])"
    code, _, err = client("-c", loads, "me/steps", "step-6", HF_TOKEN="hf_owner")
    assert code == 0, err


def test_a_repository_is_public_only_on_request(hub, push, trained):
    key = trained.results["masked"]
    code, out, err = push(key, "one", "--push", "me/open", "--public")
    assert code == 0, err
    assert "me/open: public" in out
    before = hub.repositories["model", "me/open"].branches["main"]
    code, _, err = push(key, "two", "--push", "me/open")
    assert (code, "--public" in err.splitlines()[-1]) == (2, True)
    assert hub.repositories["model", "me/open"].branches["main"] == before


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("PUT /lfs", 500, times=1), 0),
        (Fault("POST .*/commit/", after=10, times=1), 0),  # the commit is made, and the answer lost
        (Fault("POST .*/create", 429, {"Retry-After": "0"}, times=1), 0),
        (Fault("POST .*/batch", 403), 2),
        (Fault("POST .*/commit/", 412), 2),  # somebody else has changed it
    ],
)
def test_a_failed_upload_publishes_nothing_and_the_same_command_goes_on(fault, code, hub, push, trained, folder, tmp_path):  # fmt: skip
    command = trained.results["masked"], "out", "--push", "me/it"
    shutil.copytree(folder, tmp_path / "out")  # an export is not made again
    with hub.failing(fault):
        ended, _, err = push(*command)
    assert ended == code, err
    repository = hub.repositories["model", "me/it"]
    if code:
        assert pushed(repository) == {}
        remedy = "hf auth login" if fault.status == 403 else "again"
        assert all(fact in err.splitlines()[-1] for fact in ("me/it", str(tmp_path / "out"), remedy))
        assert push(*command)[0] == 0
    assert pushed(repository) == content(tmp_path / "out") == content(folder)
    assert len(repository.commits) == 2


def test_the_folder_of_a_fine_tuned_model_is_not_uploaded_as_its_encoder(hub, push, trained):
    key = trained.results["masked"]
    code, _, err = push(key, "out", "--task", "kinds")
    assert code == 0, err
    code, _, err = push(key, "out", "--push", "me/it")
    assert (code, "not empty" in err) == (2, True)
    assert not hub.repositories


@pytest.mark.parametrize(
    ("words", "environment", "fact"),
    [
        (("--push", "../it"), {}, "owner/name"),
        (("--push", "me/it", "--revision", "a/../b"), {}, "step-2000"),
        (("--revision", "step-6"), {}, "--push owner/name"),
        (("--push", "me/it"), {"HF_TOKEN": ""}, "hf auth login"),
        (("--push", "me/it"), {"HF_TOKEN": "hf_wrong"}, "correct HF_TOKEN"),
        (("--push", "me/it"), {"HF_TOKEN": "hf_reader"}, "only read"),
    ],
)
def test_an_upload_that_cannot_succeed_is_refused_before_the_export(words, environment, fact, hub, push, trained, tmp_path):  # fmt: skip
    hub.tokens["hf_reader"] = "me-reads"
    code, out, err = push(trained.results["masked"], "out", *words, **environment)
    assert (code, out) == (2, "")
    assert fact in err.splitlines()[-1]
    assert "hf_" not in err
    assert not (tmp_path / "out").exists()


def test_a_push_is_refused_where_the_hub_is_switched_off():
    with pytest.raises(SpecError, match="HF_HUB_OFFLINE=0"):
        check_push("me/it")
