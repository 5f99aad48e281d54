"""Files of datasets on the hub: what a repository holds at a revision, and a copy of some of it in the hub's cache.

The cache is the hub library's own. What is there already is read without a network; a copy that was broken off is
never taken for a whole one, since the library keeps the list of files beside them.
"""

from __future__ import annotations

import glob
import shlex
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from biphase.errors import DataError, one_line

SIGN = "hf://"


@dataclass(frozen=True)
class HubPlace:
    """`hf://owner/name@revision/path`, taken apart; the path may be a pattern, or empty, and so may the revision."""

    repository: str
    revision: str
    path: str

    @classmethod
    def of(cls, whose: str, text: str) -> HubPlace:
        owner, _, rest = text.removeprefix(SIGN).partition("/")
        repository, _, path = rest.partition("/")
        name, at, revision = repository.partition("@")
        if not owner or not name or bool(at) != bool(revision):
            raise DataError(f"{whose}: {text!r} is not hf://owner/name@revision/folder; correct it")
        if ".." in PurePosixPath(path).parts or path.startswith(("/", "~")):
            raise DataError(f"{whose}: {text!r} leaves its repository; name files inside it")
        return cls(f"{owner}/{name}", revision, path.rstrip("/"))

    def below(self, place: str) -> HubPlace:
        """Something in this folder."""
        return replace(self, path=f"{self.path}/{place}" if self.path else place)

    @property
    def address(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{SIGN}{self.repository}{at}/{self.path}"

    @property
    def name(self) -> str:
        """The repository without its owner: what a local copy of it is called."""
        return self.repository.split("/")[1]

    @property
    def remedy(self) -> str:
        """How to do without the hub."""
        words = ["hf", "download", self.repository, "--repo-type", "dataset"]
        words += ["--revision", self.revision] if self.revision else []
        return (
            f"where there is a network, type: {shlex.join(words)} --local-dir FOLDER/{self.name}; "
            "and then add: --data FOLDER"
        )


def refuse_unpinned(whose: str, place: HubPlace) -> None:
    """What is on the hub is read at a commit, or not at all."""
    if not place.revision:
        raise DataError(
            f"{whose}: no commit of {place.repository} is pinned; name the one its page shows: task.pin('…'); "
            f"or read a copy: {place.remedy}"
        )


def listing(whose: str, place: HubPlace) -> list[str]:
    """The names of all files of the repository."""
    refuse_unpinned(whose, place)
    try:
        from huggingface_hub import HfApi, get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            known = get_cached_repo_tree(place.repository, repo_type="dataset", revision=place.revision)
            return [file.path for file in known]
        except CachedRepoTreeNotFoundError:
            return HfApi().list_repo_files(place.repository, repo_type="dataset", revision=place.revision)
    except Exception as wrong:  # the hub's library raises many kinds: offline, refused, absent, rate limits
        raise DataError(
            f"{whose}: {place.repository} cannot be listed on the hub ({one_line(wrong)}); {place.remedy}"
        ) from wrong


def download(whose: str, place: HubPlace, names: list[str]) -> tuple[Path, ...]:
    """These files of the repository, on this machine."""
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            place.repository,
            repo_type="dataset",
            revision=place.revision,
            allow_patterns=[glob.escape(name) for name in names],
        )
    except Exception as wrong:
        raise DataError(
            f"{whose}: {place.repository} cannot be downloaded from the hub ({one_line(wrong)}); {place.remedy}"
        ) from wrong
    return tuple(Path(folder) / name for name in names)
