"""An exported folder → the hub. Private, unless somebody says that everybody may see it."""

from __future__ import annotations

import re
from pathlib import Path

from biphase.errors import SpecError, one_line
from biphase.export.folder import Say


def check_push(repo: str) -> None:
    """Refuse before the work what could not be uploaded after it."""
    from huggingface_hub import constants, get_token

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise SpecError(
            f"--push {repo}: a repository is named owner/name; type for example --push me/my-encoder"
        )
    if constants.HF_HUB_OFFLINE:
        raise SpecError(
            "--push needs the hub, and HF_HUB_OFFLINE says to leave it alone; type HF_HUB_OFFLINE=0 before it"
        )
    if get_token() is None:
        raise SpecError("--push needs a token that may write; type hf auth login, or set HF_TOKEN")


def upload(folder: Path, repo: str, *, public: bool, say: Say) -> str:
    """Upload a folder as one commit; gives where it is. What was exported stays in its place if this fails."""
    from huggingface_hub import HfApi

    api = HfApi()
    say(f"uploading to {repo}")
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        seen = not api.model_info(repo).private
        if not (seen and not public):
            commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Exported by biphase")
            return f"{commit.repo_url.url}: {'public' if seen else 'private'}, commit {commit.oid[:8]}"
    except Exception as wrong:  # refused, unreachable, cut off: many kinds
        raise SpecError(
            f"{repo} could not be uploaded ({one_line(wrong)[:300]}); the folder {folder} is whole: look at the token and "
            f"the name, or type hf upload {repo} {folder}"
        ) from None
    raise SpecError(
        f"{repo} is there and public, and nothing was uploaded; type --public, or another name for --push"
    )
