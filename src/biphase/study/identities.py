"""The fingerprints a plan needs of what lies outside the study file: corpora, hub models and tasks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from biphase.data.identity import HashMemory, shards_key
from biphase.errors import SpecError
from biphase.files import Store
from biphase.keys import Identities
from biphase.presets import corpus_of
from biphase.records import key
from biphase.specs import Hub
from biphase.tasks.places import task_key

TOKENIZER = ("*token*.json", "vocab*", "merges*", "*.model", "tekken.json")


def identities(store: Store) -> Identities:
    """Fingerprints as this machine and store see them, each worked out once."""
    shards_of = cache(lambda corpus: shards_key(corpus, store))
    return Identities(
        data=lambda run: shards_of(corpus_of(run)),
        hub=cache(lambda model: _hub_fingerprint(model, store)),
        task=cache(lambda asked: task_key(asked, store)),
        reads=cache(lambda model: _tokenizer_fingerprint(model, store)),
    )


def _hub_fingerprint(model: Hub, store: Store) -> str:
    """A pinned revision is the content; a local folder is its configuration and weights."""
    if not model.local:
        file = {"gguf": model.gguf} if model.gguf else {}
        return key({"hub": model.source, "revision": model.revision, **file})
    folder = Path(model.source).expanduser()
    if model.gguf:
        if not (folder / model.gguf).is_file():
            raise SpecError(f"Hub({model.source!r}, gguf={model.gguf!r}): there is no such file")
        return _content([folder / model.gguf], store)
    files = sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")])
    if not any(path.suffix == ".safetensors" for path in files):
        raise SpecError(
            f"Hub({model.source!r}): no safetensors there; give a folder with config.json and weights"
        )
    return _content(files, store)


def _tokenizer_fingerprint(model: Hub, store: Store) -> str:
    """What a model that is evaluated as it is reads with: of a local folder, the files transformers may look for."""
    if not model.local:
        return ""
    folder = Path(model.source).expanduser()
    files = {path for name in TOKENIZER for path in folder.glob(name) if path.is_file()}
    return _content(sorted(files), store)


def _content(files: list[Path], store: Store) -> str:
    memory = HashMemory(store)
    hashes = [[path.name, memory.sha256(path)] for path in files]
    memory.save()
    return key({"files": hashes})
