"""The target folder of an export, the lookup of what to export, and the upload to the hub.

An export is built in a temporary folder beside its target, verified, and renamed, so the target is complete or absent.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from biphase.errors import SpecError
from biphase.metadata import read_checkpoint_file
from biphase.protocol import KEY_DIGITS
from biphase.records import decode
from biphase.remote import patiently, refusing
from biphase.specs import Pretrain
from biphase.store import Store, sync
from biphase.study.ledger import read_trial, trial_keys
from biphase.study.load import refuse_metadata_only

Say = Callable[[str], None]  # prints progress


def refuse_taken(target: Path) -> None:
    """Refuse a target that is a file, a link or a folder with content."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise SpecError(f"{target} is a file; type the name of a folder that is not there yet")
    if target.is_dir() and any(target.iterdir()):
        raise SpecError(f"{target} is not empty, and an export overwrites nothing; type another folder")


@contextlib.contextmanager
def building(target: Path) -> Generator[Path]:
    """Yield a temporary folder; rename it to its target when the block succeeds, delete it when it fails."""
    refuse_taken(target)
    draft = target.parent / f".{target.name}-{uuid.uuid4().hex[:8]}.part"
    try:
        draft.mkdir(parents=True)
    except OSError as wrong:
        raise SpecError(f"{target} cannot be written ({wrong.strerror}); type another folder") from None
    try:
        yield draft
        for path in draft.rglob("*"):
            if path.is_file():
                path.chmod(0o644)  # safetensors makes files readable by the owner only
            sync(path)
        refuse_taken(target)  # another process may have created it meanwhile
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# ---------------------------------------------------------------- lookup by key


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint of the store and the run that made it."""

    key: str
    run: Pretrain
    step: int
    about: dict[str, Any]  # the content of its checkpoint.json


@dataclass(frozen=True)
class SavedTrial:
    """A trial of the store: the scores of a fine-tuned model."""

    key: str
    about: dict[str, Any]  # the content of its trial.json


def find(digits: str, store: Store) -> SavedCheckpoint | SavedTrial:
    """The one checkpoint or trial of the store whose key begins with these digits."""
    if not re.fullmatch(rf"[0-9a-f]{{{KEY_DIGITS},}}", digits):
        raise SpecError(
            f"{digits!r} is no key: type the first {KEY_DIGITS} or more digits of one that biphase plan shows"
        )
    checkpoints = store.named(store.checkpoints, digits)
    trials = trial_keys(store, digits)
    count = len(checkpoints) + len(trials)
    if count != 1:
        if not count:
            refuse_metadata_only(digits, store)
        why = f"{count} results begin with it; type more digits" if count else "there is no such result"
        raise SpecError(f"{digits} names no one result of {store.root}: {why}")
    if checkpoints:
        return saved_checkpoint(checkpoints[0], store)
    about = read_trial(store, trials[0])
    if "share" in about:
        raise SpecError(
            f"{digits} is a short fine-tuning that screened the learning rate {about['lr']:g}; type the key of a full one, "
            "or of a checkpoint with --task NAME"
        )
    return SavedTrial(trials[0], about)


def saved_checkpoint(key: str, store: Store) -> SavedCheckpoint:
    about = read_checkpoint_file(store.checkpoints / key)
    return SavedCheckpoint(key, decode(about["run"]), int(about["progress"]["step"]), about)


# ---------------------------------------------------------------- upload


# Files that only an export writes: those of an earlier one must not stay beside the new ones.
WRITTEN = (
    "*.safetensors",
    "*.json",
    "onnx/*",
    "1_Pooling/*",
    "2_Normalize/*",
    "vectors/*",
    ".eval_results/*",
)


def check_push(repo: str, revision: str = "") -> None:
    """Refuse an upload that cannot succeed, before the export is computed."""
    from huggingface_hub import HfApi, constants, get_token

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise SpecError(f"--push {repo}: name it owner/name; type for example --push me/my-encoder")
    if revision and not re.fullmatch(r"\w[\w.-]*", revision):
        raise SpecError(f"--revision {revision}: name a branch; type for example --revision step-2000")
    if constants.HF_HUB_OFFLINE:
        raise SpecError(
            "--push needs the hub, and HF_HUB_OFFLINE forbids it; type HF_HUB_OFFLINE=0 before it"
        )
    if get_token() is None:
        raise SpecError("--push needs a token that may write; type hf auth login, or set HF_TOKEN")
    with refusing(SpecError, f"--push {repo}", repo, "leave out --push"):
        user = patiently(HfApi().whoami)
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise SpecError("--push needs a token that may write, and this one may only read; type hf auth login")


def is_exported(folder: Path, key: str, *, onnx: bool) -> bool:
    """Whether a folder is a finished export of a result; its upload may have failed."""
    card = folder / "README.md"
    # The card of a fine-tuned model has the key of its encoder too, further down.
    first = re.search(r"\| key \| (\w+) \|", card.read_text("utf-8")) if card.is_file() else None
    return first is not None and first[1] == key and (folder / "onnx").is_dir() == onnx


def upload(folder: Path, repo: str, *, public: bool, say: Say, revision: str = "") -> str:
    """Upload a folder as one commit and return its address. The folder is kept if the upload fails.

    The repository is private unless `public`; an existing public one is refused without it. With a `revision`, the commit
    is on a branch of that name, which begins empty.
    """
    say(f"uploading to {repo}")
    kept = f"{folder} is whole, and the same command only uploads it"
    what = f"{repo} could not be uploaded, and shows nothing of it; {kept}"
    with refusing(SpecError, what, repo, "type the command again"):
        visible, commit = patiently(lambda: _push(folder, repo, public=public, branch=revision or "main"))
    page = f"{commit.repo_url.url}{f'/tree/{revision}' if revision else ''}"
    return f"{page}: {'public' if visible else 'private'}, commit {commit.oid}"


def _push(folder: Path, repo: str, *, public: bool, branch: str) -> tuple[bool, Any]:
    """Make the folder the content of a branch; returns whether everybody may see it, and the commit.

    huggingface_hub's `upload_folder` splits what takes long into several commits; a reader could load half of it.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    api.create_repo(repo, private=not public, exist_ok=True)
    visible = not api.model_info(repo).private
    if visible and not public:
        raise SpecError(f"{repo} is public, and nothing was uploaded; type --public, or another --push")
    if branch != "main":
        # The first commit is that of the empty repository, so the branch never shows another model.
        first = api.list_repo_commits(repo)[-1].commit_id
        api.create_branch(repo, branch=branch, revision=first, exist_ok=True)
    now = api.model_info(repo, revision=branch)
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    left = [file.rfilename for file in now.siblings or () if file.rfilename not in names]
    gone = [
        name
        for name in left
        for pattern in WRITTEN
        if fnmatchcase(name, pattern)
        and name.count("/") == pattern.count("/")  # files beside them are not ours
    ]
    changes = [CommitOperationAdd(name, folder / name) for name in names]
    commit = api.create_commit(
        repo, [*map(CommitOperationDelete, gone), *changes], commit_message="Exported by biphase",
        revision=branch, parent_commit=now.sha,
    )  # fmt: skip
    return visible, commit
