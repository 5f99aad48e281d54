"""The fingerprints a plan needs of what lies outside the study file: corpora, hub models and tasks.

    store/studies/<name>/fingerprints.json      those of a study that came from another machine

On a machine without the files of a task or the folder of a model, what was merged from elsewhere is remembered, so that
a study can be reported there. Where the files are, they alone count. (Of corpora the cards of their shards remember.)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from biphase.data.identity import HashMemory, shards_key
from biphase.data.listing import Absent
from biphase.errors import SpecError, no_safetensors
from biphase.files import Store, read_sealed, sealed, write_json
from biphase.keys import Identities
from biphase.presets import corpus_of
from biphase.records import key
from biphase.specs import Corpus, Hub, Pretrain, Study, Task
from biphase.study.pins import hubs_of
from biphase.tasks.places import task_key

FINGERPRINTS = "fingerprints.json"
WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json", "adapter_config.json")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZER = ("*token*.json", "vocab*", "merges*", "*.model", "tekken.json")


def identities(store: Store) -> Identities:
    """Fingerprints as this machine and store see them, each worked out once."""
    shards_of = cache(lambda corpus: shards_key(corpus, store))
    return Identities(
        data=lambda run: shards_of(corpus_of(run)),
        hub=cache(lambda model: _remembered("hub", model, store) or _hub_fingerprint(model, store)),
        task=cache(lambda asked: _task_key(asked, store)),
        reads=cache(lambda model: _remembered("reads", model, store) or _tokenizer_fingerprint(model, store)),
    )


def fingerprints_of(study: Study, known: Identities) -> dict[str, dict[str, str]]:
    """What another machine has to be told, to plan a study without the files of its corpora, tasks and local models."""
    starts = [model for model in hubs_of(study) if model.local]
    tasks = study.finetune.tasks if study.finetune else ()
    told = {
        "task": {key(task): known.task(task) for task in tasks},
        "hub": {key(model): known.hub(model) for model in starts},
        "reads": {key(model): known.reads(model) for model in starts},
        "data": {key(corpus_of(run)): known.data(run) for run in trained_runs(study)},
    }
    return {kind: dict(sorted(some.items())) for kind, some in told.items()}


def trained_runs(study: Study) -> list[Pretrain]:
    """The runs of a study that read a corpus, and those that they go on from."""
    found: list[Pretrain] = []
    for run in study.runs:
        at: object = run
        while isinstance(at, Pretrain):
            found += [at] if at.corpus else []
            at = at.start
    return found


def corpora_of(study: Study) -> list[Corpus]:
    """Of the study's runs, and of those that they go on from."""
    return list(dict.fromkeys(corpus_of(run) for run in trained_runs(study)))


def remember_fingerprints(name: str, told: dict[str, dict[str, str]], store: Store) -> None:
    """Keep what another machine said of a study's outside; what is known already stays."""
    path = store.studies / name / FINGERPRINTS
    known = read_sealed(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, sealed({kind: some | known.get(kind, {}) for kind, some in told.items()}))


def _remembered(kind: str, what: Hub | Task, store: Store) -> str:
    """What a merged study says of a task or of a local model; of a model only where its folder is not here."""
    if isinstance(what, Hub) and (not what.local or Path(what.source).expanduser().exists()):
        return ""
    files = sorted(store.studies.glob(f"*/{FINGERPRINTS}"))
    found = {read_sealed(path).get(kind, {}).get(key(what)) for path in files} - {None}
    if len(found) > 1:
        raise SpecError(
            f"{what.source} is not here, and the studies in {store.studies} know several versions of it; put its files "
            f"back, or remove the {FINGERPRINTS} of the study that is not meant"
        )
    return found.pop() if found else ""


def _task_key(task: Task, store: Store) -> str:
    try:
        return task_key(task, store)
    except Absent:
        remembered = _remembered("task", task, store)
        if remembered:
            return remembered
        raise


def hub_fingerprint(model: Hub) -> str:
    """Of a model on the hub a pinned revision is the content."""
    file = {"gguf": model.gguf} if model.gguf else {}
    return key({"hub": model.source, "revision": model.revision, **file})


def _hub_fingerprint(model: Hub, store: Store) -> str:
    """A pinned revision is the content; a local folder is what loading a model reads there."""
    if not model.local:
        return hub_fingerprint(model)
    folder = Path(model.source).expanduser()
    if model.gguf:
        if not (folder / model.gguf).is_file():
            raise SpecError(f"Hub({model.source!r}, gguf={model.gguf!r}): there is no such file")
        return _content([folder / model.gguf], store)
    files = sorted(path for name in WEIGHTS for path in folder.glob(name))
    if not any(path.suffix == ".safetensors" for path in files):
        if any(path.suffix in PICKLED for path in folder.glob("*")):
            raise SpecError(no_safetensors(model.source))
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
