"""The fingerprints a plan needs of what lies outside the study file: corpora, hub models and tasks."""

from __future__ import annotations

from pathlib import Path

from biphase.data.identity import HashMemory, shards_key
from biphase.errors import SpecError
from biphase.files import Store
from biphase.keys import Identities
from biphase.presets import corpus_of
from biphase.records import key
from biphase.specs import Corpus, Hub, Pretrain, Task
from biphase.tasks.places import task_key

TOKENIZER = ("*token*.json", "vocab*", "merges*", "*.model", "tekken.json")


def identities(store: Store) -> Identities:
    """Fingerprints as this machine and store see them, each worked out once."""
    corpora: dict[Corpus, str] = {}
    hubs: dict[Hub, str] = {}
    tokenizers: dict[Hub, str] = {}
    tasks: dict[Task, str] = {}

    def data(run: Pretrain) -> str:
        corpus = corpus_of(run)
        if corpus not in corpora:
            corpora[corpus] = shards_key(corpus, store)
        return corpora[corpus]

    def hub(model: Hub) -> str:
        if model not in hubs:
            hubs[model] = _hub_fingerprint(model, store)
        return hubs[model]

    def task(asked: Task) -> str:
        if asked not in tasks:
            tasks[asked] = task_key(asked, store)
        return tasks[asked]

    def reads(model: Hub) -> str:
        if model not in tokenizers:
            tokenizers[model] = _tokenizer_fingerprint(model, store)
        return tokenizers[model]

    return Identities(data, hub, task, reads)


def _hub_fingerprint(model: Hub, store: Store) -> str:
    """A pinned revision is the content; a local folder is its configuration and weights."""
    if not model.local:
        return key({"hub": model.source, "revision": model.revision})
    folder = Path(model.source).expanduser()
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
