"""`--push`: what was exported arrives whole, for its owner's eyes alone unless said otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hub_stand_in import serve


@pytest.fixture
def hub():
    made, server = serve()
    yield made
    server.shutdown()
    server.server_close()


def typed(hub, home, *command, **more):
    """Run Python in a process of its own, whose hub is the stand-in."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_secret",
        **more,
    }
    environment = {name: value for name, value in environment.items() if value}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


PUSH = """
import sys
from pathlib import Path
from biphase.errors import SpecError
from biphase.export.folder import check_push; from biphase.export.folder import upload
try:
    check_push(sys.argv[2])
    print(upload(Path(sys.argv[1]), sys.argv[2], public=len(sys.argv) > 3, say=lambda text: None))
except SpecError as refusal:
    sys.exit(f"error: {refusal}")
"""


def test_the_command_uploads_what_it_wrote(hub, trained, tmp_path):
    place = tmp_path / "out"
    words = ("-m", "biphase", "export", trained.results["masked"], place, "--store", trained.store.root)
    done = typed(hub, tmp_path / "home", *words, "--push", "me/it")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{hub.endpoint}/me/it: private, commit aaaaaaaa"
    assert hub.private == {"me/it": True}
    assert hub.files == {
        path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()
    }
    assert set(hub.large.values()) == {(place / "model.safetensors").read_bytes()}
    assert "Bearer hf_secret" in hub.tokens


def test_public_is_public_only_when_said(hub, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("---\ntags: [biphase]\n---\n")
    done = typed(hub, tmp_path, "-c", PUSH, tmp_path / "out", "me/open", "public")
    assert done.stdout.startswith(f"{hub.endpoint}/me/open: public"), done.stderr
    assert hub.private == {"me/open": False}
    hub.files.clear()
    done = typed(hub, tmp_path, "-c", PUSH, tmp_path / "out", "me/open")
    assert done.returncode == 1
    assert "me/open is there and public, and nothing was uploaded; type --public" in done.stderr
    assert hub.files == {}
    hub.private["me/mine"] = True  # one that is there already and private
    done = typed(hub, tmp_path, "-c", PUSH, tmp_path / "out", "me/mine")
    assert done.stdout.startswith(f"{hub.endpoint}/me/mine: private"), done.stderr


def test_what_could_not_be_uploaded_is_said_before_the_work(hub, tmp_path):
    def refused(repo, **more):
        done = typed(hub, tmp_path / "home", "-c", PUSH, tmp_path, repo, **more)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert "type hf auth login, or set HF_TOKEN" in refused("me/it", HF_TOKEN="")
    assert "a repository is named owner/name" in refused("it")
    assert "a repository is named owner/name" in refused("../it")
    assert "type HF_HUB_OFFLINE=0" in refused("me/it", HF_HUB_OFFLINE="1")
    hub.refuses = True
    said = refused("me/it")
    assert "me/it could not be uploaded" in said
    assert f"hf upload me/it {tmp_path}" in said
    assert "hf_secret" not in said
