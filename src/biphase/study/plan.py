"""A plan: the training jobs that a study needs, as a tree in which runs share equal beginnings.

`make_plan` computes it from a study, `save_plan` writes it to the store, and `identities` provides the fingerprints
of what the study refers to: corpora, hub models and tasks.

    root                                              a start: a size from scratch, or a hub model; nothing to compute
    └─ training job ──► checkpoint ── training job ──► checkpoint

A checkpoint is needed at the end of a run, at its `keep` steps, where the objective changes and where the decay
starts, and where another run takes it over or averages it. Two runs can diverge only at one of these steps, so every
branch point is among them. A run passes through each needed checkpoint whose key equals its own key at that step; so a
shared trunk is split where another run leaves it, while no key depends on where the splits are. One training job
therefore has one objective, and is either decaying or not.

    store/studies/<name>/plan.json              the latest plan of a study
    store/studies/<name>/plans/<hash>.json      every plan that was ever run under this name
    store/studies/<name>/fingerprints.json      fingerprints of a study that was merged from another machine

On a machine without a task's files or a local model's folder, the merged fingerprints are used, so that the study
can be reported there. Where the files exist, only they count. (Corpora have the cards of their shards instead.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from biphase.data.corpus import Absent, HashMemory, shards_key
from biphase.errors import BiphaseError, SpecError, StoreError, no_safetensors
from biphase.keys import Identities, Keyring
from biphase.metadata import read_card, text, whole
from biphase.presets import corpus_of, shares_of, sources_of
from biphase.records import KEY_LENGTH, content_key, encode
from biphase.specs import (
    BPE,
    Blend,
    Contrastive,
    Corpus,
    Finetune,
    Hub,
    Merge,
    Objective,
    Pairs,
    Pretrain,
    Study,
    Task,
)
from biphase.store import CHECKSUM, Store, read_checked, with_checksum, write_json
from biphase.study.load import hubs_of
from biphase.tasks.files import task_key

FINGERPRINTS = "fingerprints.json"
WEIGHTS = ("config.json", "*.safetensors", "*.safetensors.index.json", "adapter_config.json")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
TOKENIZER = ("*token*.json", "vocab*", "merges*", "*.model", "tekken.json")


AnyCorpus = str | Corpus | Blend


def identities(store: Store) -> Identities:
    """Return functions that fingerprint corpora, models and tasks on this machine, each cached."""
    return Identities(
        data=cache(lambda corpus: shards_key(corpus, store)),
        hub=cache(lambda model: _remembered("hub", model, store) or _hub_fingerprint(model, store)),
        task=cache(lambda task: _task_key(task, store)),
        reads=cache(lambda model: _remembered("reads", model, store) or _tokenizer_fingerprint(model, store)),
        tokens=cache(lambda corpus: card_of(corpus, store)[1].get("train_tokens", 0)),
    )


def fingerprints_of(study: Study, known: Identities) -> dict[str, dict[str, str]]:
    """Return the fingerprints with which another machine can plan a study without its files."""
    starts = [model for model in hubs_of(study) if model.local]
    tasks = datasets_of(study)
    fingerprints = {
        "task": {content_key(task): known.task(task) for task in tasks},
        "hub": {content_key(model): known.hub(model) for model in starts},
        "reads": {content_key(model): known.reads(model) for model in starts},
        "data": {content_key(corpus): known.data(corpus) for corpus in corpora_of(study)},
    }
    return {kind: dict(sorted(some.items())) for kind, some in fingerprints.items()}


def datasets_of(study: Study) -> list[Task | Pairs]:
    """Return the tasks that a study fine-tunes on, and the pairs that its runs train on."""
    runs = dict.fromkeys(ancestor for run in study.runs for ancestor in run.lineage)
    objectives = (stage.objective for run in runs for stage in run.stages)
    pairs = [one for objective in objectives if isinstance(objective, Contrastive) for one in objective.pairs]
    return [*(study.finetune.tasks if study.finetune else ()), *dict.fromkeys(pairs)]


def corpora_of(study: Study) -> list[Corpus]:
    """Return the corpora of a study's runs and of the runs they continue, but not of those that train nothing."""
    runs = [ancestor for run in study.runs for ancestor in reversed(run.lineage) if ancestor.corpus]
    return list(dict.fromkeys(corpus for run in runs for corpus in sources_of(run)))


def card_of(corpus: Corpus, store: Store) -> tuple[str, dict[str, Any]]:
    """Return the key of a corpus's shards and their card, as far as known on this machine (else "" and {})."""
    try:
        key = shards_key(corpus, store)
        folder = store.readable(store.shards / key)
        return key, read_card(folder) if store.has(folder) else {}
    except BiphaseError:
        return "", {}


def remember_fingerprints(name: str, fingerprints: dict[str, dict[str, str]], store: Store) -> None:
    """Save the fingerprints of a merged study; those already known are kept."""
    path = store.studies / name / FINGERPRINTS
    known = read_checked(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {kind: some | known.get(kind, {}) for kind, some in fingerprints.items()}
    write_json(path, with_checksum(merged))


def _remembered(kind: str, what: Hub | Task | Pairs, store: Store) -> str:
    """Return a merged study's fingerprint of a task, or of a local model whose folder is not here, or ""."""
    if isinstance(what, Hub) and (not what.local or Path(what.source).expanduser().exists()):
        return ""
    files = sorted(store.studies.glob(f"*/{FINGERPRINTS}"))
    known = {read_checked(path).get(kind, {}).get(content_key(what)) for path in files} - {None}
    if len(known) > 1:
        raise SpecError(
            f"{what.source} is not here, and the studies in {store.studies} know several versions of it; put its files "
            f"back, or remove the {FINGERPRINTS} of the study that is not meant"
        )
    return known.pop() if known else ""


def _task_key(task: Task | Pairs, store: Store) -> str:
    try:
        return task_key(task, store)
    except Absent:
        remembered = _remembered("task", task, store)
        if remembered:
            return remembered
        raise


def hub_fingerprint(model: Hub) -> str:
    """Fingerprint a hub model: its pinned revision identifies the content."""
    file = {"gguf": model.gguf} if model.gguf else {}
    return content_key({"hub": model.source, "revision": model.revision, **file})


def _hub_fingerprint(model: Hub, store: Store) -> str:
    """Fingerprint a hub model by its revision, or a local folder by the files that loading the model reads."""
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
    """Fingerprint the tokenizer of a local folder: all files that transformers may look for; "" for a hub model."""
    if not model.local:
        return ""
    folder = Path(model.source).expanduser()
    files = {path for name in TOKENIZER for path in folder.glob(name) if path.is_file()}
    return _content(sorted(files), store)


def _content(files: list[Path], store: Store) -> str:
    hashes = HashMemory(store).hashes(files)
    return content_key({"files": [[path.name, digest] for path, digest in zip(files, hashes, strict=True)]})


# ---------------------------------------------------------------- plan


PLAN = "plan.json"
VERSIONS = "plans"  # folder beside it with all plans that were ever run under the study's name


@dataclass(frozen=True)
class Root:
    """A start, before any step; its results are the runs without stages."""

    key: str
    run: Pretrain  # one run that starts here; all others start the same
    results: tuple[str, ...]


@dataclass(frozen=True)
class Averaging:
    """Stands for the objective of a job that averages checkpoints."""

    parts: int
    causal: bool = False

    @property
    def label(self) -> str:
        return f"merge of {self.parts}"


@dataclass(frozen=True)
class TrainingJob:
    """The training job that produces one needed checkpoint; `key` is the checkpoint's."""

    key: str
    run: Pretrain  # one run that passes through it; all others train it the same
    step: int  # of that run, at the job's end
    first: int  # of that run, at the job's beginning
    parent: str | None  # key of the checkpoint it continues; None: the start itself
    root: str
    results: tuple[str, ...]
    others: tuple[str, ...] = ()  # of a merge: keys of the other checkpoints that it averages

    @property
    def merge(self) -> bool:
        """Whether it averages checkpoints instead of training; its parent is the one with the most steps."""
        return self.step == 0

    @property
    def needs(self) -> tuple[str, ...]:
        """The keys of the checkpoints that it begins with."""
        return (*((self.parent,) if self.parent else ()), *self.others)

    @property
    def steps(self) -> int:
        return self.step - self.first

    @property
    def tokens(self) -> int:
        return 0 if self.merge else self.steps * self.run.reads_at(self.first)[1]

    @property
    def objective(self) -> Objective | Averaging:
        return Averaging(len(self.run.sources)) if self.merge else self.run.phase_at(self.first).objective

    @property
    def corpus(self) -> AnyCorpus:
        """What it reads."""
        return (not self.merge and self.run.phase_at(self.first).corpus) or self.run.corpus

    @property
    def decaying(self) -> bool:
        return not self.merge and self.first >= self.run.decay_start

    @property
    def span(self) -> tuple[int, int]:
        """First and last step of the training job, counted from the root through all earlier runs."""
        before = self.run.origin_step
        return before + self.first, before + self.step


@dataclass(frozen=True)
class Plan:
    """The roots, training jobs and results of a study, in the order in which jobs are run: depth first."""

    study: Study  # with corpus names resolved, so that it means the same wherever it is read
    question: str
    roots: dict[str, Root]
    jobs: dict[str, TrainingJob]
    results: dict[str, str]  # name → key of a checkpoint or a root
    steps_written: int
    tasks: dict[str, str]  # name → key of a dataset to fine-tune on

    @cached_property
    def tuned(self) -> dict[str, Finetune]:
        """What each result is fine-tuned on, by key: everything at the ends of runs, maybe less at `keep` steps."""
        spec, ends = self.study.finetune, {self.results[run.name] for run in self.study.runs}
        if spec is None:
            return {}
        whole, part = spec.part(on_the_way=False), spec.part(on_the_way=True)
        return {model: whole if model in ends else part for model in self.results.values()}

    @cached_property
    def finetunings(self) -> dict[tuple[object, ...], Any]:
        """The fine-tunings whose keys were computed, which `ledger` fills."""
        return {}

    @property
    def job_count(self) -> int:
        return len(self.jobs)

    @property
    def steps_to_compute(self) -> int:
        return sum(job.steps for job in self.jobs.values())

    def left(
        self, done: Collection[str], *, metadata_only: Collection[str] = (), unscored: Collection[str] = ()
    ) -> list[str]:
        """Return the training jobs left to run, in order.

        A job whose only descendants are finished is not needed, even if its checkpoint was pruned. Checkpoints in
        `metadata_only` have their weights on another machine; they are computed again only if their weights are
        needed, because they are in `unscored` or a job that is left continues them.
        """
        left: set[str] = set()
        continued: set[str] = set()
        for key, job in reversed(self.jobs.items()):  # children come before their parents
            needed = key in continued or key in unscored or (job.results and key not in metadata_only)
            if key not in done and needed:
                left.add(key)
                continued.update(job.needs)
        return [key for key in self.jobs if key in left]

    def needed_for(self, keys: Iterable[str]) -> set[str]:
        """Return the keys of all training jobs that these checkpoints need, with their own."""
        needed, waiting = set(), [key for key in keys if key in self.jobs]
        while waiting:
            key = waiting.pop()
            if key not in needed:
                needed.add(key)
                waiting.extend(self.jobs[key].needs)
        return needed

    def path(self, key: str) -> tuple[TrainingJob, ...]:
        """Return the training jobs from the root to this checkpoint, in order; of a merge, its longest part's."""
        jobs: list[TrainingJob] = []
        at: str | None = key
        while at in self.jobs:
            jobs.append(self.jobs[at])
            at = jobs[-1].parent
        return tuple(reversed(jobs))

    def to_json(self) -> dict[str, Any]:
        jobs = [
            {
                "key": job.key,
                "parent": job.parent,
                **({"others": list(job.others)} if job.others else {}),
                "root": job.root,
                "steps": list(job.span),
                "objective": job.objective.label,
                "decaying": job.decaying,
                "results": list(job.results),
            }
            for job in self.jobs.values()
        ]
        return {
            "question": self.question,
            "study": encode(self.study),
            "counts": {
                "runs": len(self.study.runs),
                "jobs": self.job_count,
                "steps_written": self.steps_written,
                "steps_to_compute": self.steps_to_compute,
            },
            "roots": [{"key": root.key, "results": list(root.results)} for root in self.roots.values()],
            "jobs": jobs,
            "results": self.results,
        }


def make_plan(study: Study, identities: Identities, question: str = "") -> Plan:
    """Compute the plan of a study. The order of its runs decides the order of jobs, but no key."""
    study = resolve(study, identities.tokens)
    keyring = Keyring(identities)
    listed = dict.fromkeys(study.runs)
    everyone = dict.fromkeys(ancestor for run in study.runs for ancestor in run.lineage)

    needed: set[str] = set()
    cuts: dict[str, set[int]] = {}  # by the key at step 0: only runs with equal starts can share jobs
    for run in everyone:
        for step in _own_cuts(run, with_keep=run in listed):
            cuts.setdefault(keyring.at(run, 0), set()).add(step)
            needed.add(keyring.at(run, step))
        for part in run.sources:
            if part.step:
                cuts.setdefault(keyring.at(part.run, 0), set()).add(part.step)
                needed.add(keyring.at(part.run, part.step))

    names: dict[str, list[str]] = {}
    results: dict[str, str] = {}
    for run in study.runs:
        for name, step in run.results.items():
            results[name] = keyring.at(run, step)
            names.setdefault(results[name], []).append(name)

    roots: dict[str, Root] = {}
    jobs: dict[str, TrainingJob] = {}
    for run in everyone:
        parent, root = None, keyring.at(run, 0)
        if isinstance(run.start, Merge):
            if root not in jobs:
                jobs[root] = _merge_job(run, root, keyring, jobs, tuple(names.get(root, ())))
            parent, root = root, jobs[root].root
        elif isinstance(run.start, Pretrain):
            parent, root = root, jobs[root].root
        elif root not in roots:
            roots[root] = Root(root, run, tuple(names.get(root, ())))
        first = 0
        for step in sorted(cuts.get(keyring.at(run, 0), ())):
            if step > run.steps or (key := keyring.at(run, step)) not in needed:
                continue
            if key not in jobs:
                jobs[key] = TrainingJob(key, run, step, first, parent, root, tuple(names.get(key, ())))
            parent, first = key, step

    written = sum(run.steps for run in everyone)
    tasks = _task_keys(study.finetune, identities) if study.finetune else {}
    plan = Plan(study, question, roots, dict(_depth_first(roots, jobs)), results, written, tasks)
    needed = plan.needed_for(
        results.values()
    )  # without the end of a run that is only merged at earlier steps
    return replace(plan, jobs={key: job for key, job in plan.jobs.items() if key in needed})


def _merge_job(
    run: Pretrain, key: str, keyring: Keyring, jobs: dict[str, TrainingJob], results: tuple[str, ...]
) -> TrainingJob:
    first, *others = (keyring.at(part.run, part.step) for part in run.sources)
    trained = tuple(other for other in others if other in jobs)
    if first in jobs:
        return TrainingJob(key, run, 0, 0, first, jobs[first].root, results, trained)
    return TrainingJob(key, run, 0, 0, None, first, results, trained)


def _task_keys(finetune: Finetune, identities: Identities) -> dict[str, str]:
    """Return the key of each task's dataset, and refuse two names of one dataset: its grid would count twice."""
    keys = {task.name: identities.task(task) for task in finetune.tasks}
    names: dict[tuple[str, str], str] = {}
    for task in finetune.tasks:
        name = names.setdefault((keys[finetune.lender(task).name], keys[task.name]), task.name)
        if name != task.name:
            raise SpecError(
                f"tasks {name!r} and {task.name!r} are the same data, asked and trained alike; leave out one of them"
            )
    return keys


def resolve(study: Study, tokens: Callable[[Corpus], int]) -> Study:
    """Return the study with every corpus name replaced by its corpus, and epochs by steps.

    `tokens` returns the number of training tokens of a corpus, 0 if it is not tokenized.
    """

    @cache
    def resolved(run: Pretrain) -> Pretrain:
        start = run.start
        if isinstance(start, Pretrain):
            start = resolved(start)
        elif isinstance(start, Merge):
            start = replace(start, parts=tuple(replace(part, run=resolved(part.run)) for part in start.parts))
        settled = partial(_settled, run=run, tokens=tokens)
        stages = tuple(replace(stage, corpus=settled(stage.corpus)) for stage in run.stages)
        run = replace(run, start=start, corpus=settled(run.corpus), stages=stages)
        if run.stages or run.sources:
            _check_tokenizer(run)
        if not run.in_epochs:
            return run
        # An epoch of a blend is as many tokens as its corpora have together.
        return run.in_steps(sum(_sizes(run.corpus, run, "stages in epochs", tokens)))

    return replace(study, runs=tuple(resolved(run) for run in study.runs))


def _settled(corpus: AnyCorpus, run: Pretrain, tokens: Callable[[Corpus], int]) -> AnyCorpus:
    """Return a run's corpus in place of its name, and shares in place of a temperature; "" if there is none."""
    found = corpus_of(run, corpus) if corpus else ""
    if isinstance(found, Blend) and found.temperature:
        return found.by_size(_sizes(found, run, "a blend with a temperature", tokens))
    return found


def _sizes(corpus: AnyCorpus, run: Pretrain, has: str, tokens: Callable[[Corpus], int]) -> list[int]:
    """Return the training tokens of a corpus, or of each one of a blend; the run needs them because it has `has`."""
    sizes = {source.name: tokens(source) for source in shares_of(corpus, run)}
    if unknown := next((name for name, size in sizes.items() if not size), ""):
        raise SpecError(
            f"Pretrain {run.name!r}: it has {has}, and the corpus {unknown!r} is not tokenized "
            "yet, so its size is not known; type: biphase tokenize with the study's file and the same --store, as biphase tokenize mine.py"
        )
    return [*sizes.values()]


def _check_tokenizer(run: Pretrain) -> None:
    """Refuse corpora whose token ids differ from each other, or from those that the run's start was trained with."""
    first, *others = sources_of(run)
    one = "give both one: BPE(…, on=…) or Pretrained('./folder')"
    if isinstance(run.start, Hub) and isinstance(first.tokenizer, BPE):
        raise SpecError(
            f"Pretrain {run.name!r}: {run.start.source} has a vocabulary of its own, and its corpus one trained on "
            f"the text; say Corpus(…, tokenizer=Pretrained({run.start.source!r}, revision=…))"
        )
    for before in (part.run for part in run.sources):
        if sources_of(before)[0].reader != first.reader:
            raise SpecError(
                f"Pretrain {run.name!r}: its corpus is read by another tokenizer than that of {before.name!r}, which it "
                f"goes on from, so ids would mean other words; {one}"
            )
    for other in others:
        if (other.reader, other.bos) != (first.reader, first.bos):
            raise SpecError(
                f"Pretrain {run.name!r}: {first.name!r} and {other.name!r} have different tokenizers or `bos`, so ids would "
                f"mean other words; {one}"
            )


def _own_cuts(run: Pretrain, *, with_keep: bool) -> set[int]:
    """Return the steps of a run at which it needs checkpoints itself."""
    steps = {phase.until for phase in run.phases} | {run.decay_start}
    if with_keep:  # a run that is only continued has no results of its own
        steps |= set(run.keep)
    return steps - {0}


def _depth_first(roots: dict[str, Root], jobs: dict[str, TrainingJob]) -> Iterator[tuple[str, TrainingJob]]:
    below = children_of(jobs.values())
    waiting = [job for root in reversed(roots) for job in reversed(below.get(root, []))]
    postponed: list[TrainingJob] = []  # merges of checkpoints that come later
    yielded: set[str] = set()
    while waiting or postponed:
        ready = next((job for job in postponed if yielded.issuperset(job.others)), None)
        if ready:
            postponed.remove(ready)
        job = ready or waiting.pop()
        if not yielded.issuperset(job.others):
            postponed.append(job)
            continue
        yielded.add(job.key)
        yield job.key, job
        waiting.extend(reversed(below.get(job.key, [])))


def children_of(jobs: Iterable[TrainingJob]) -> dict[str, list[TrainingJob]]:
    """Return the training jobs that begin at each root or checkpoint, by its key."""
    below: dict[str, list[TrainingJob]] = {}
    for job in jobs:
        below.setdefault(job.root if job.parent is None else job.parent, []).append(job)
    return below


def save_plan(plan: Plan, store: Store) -> None:
    """Write the resolved study and its tree to the store; `load` reads it back without the study file.

    Every version stays in `plans/`: an edited study, or another version of the code, has other checkpoints, and
    those of a worker that still runs the old plan must not be pruned.
    """
    folder = store.studies / plan.study.name
    content = with_checksum(plan.to_json())
    version = folder / VERSIONS / f"{content[CHECKSUM][:KEY_LENGTH]}.json"
    version.parent.mkdir(parents=True, exist_ok=True)
    write_json(version, content)
    write_json(folder / PLAN, content)


def needed_jobs(store: Store) -> dict[str, dict[str, Any]]:
    """Return the training jobs by key of all plans in this store, in any version; pruning keeps their checkpoints.

    A plan that cannot be read raises an error: ignoring it would let its checkpoints be pruned.
    """
    needed: dict[str, dict[str, Any]] = {}
    for path in sorted([*store.studies.glob(f"*/{PLAN}"), *store.studies.glob(f"*/{VERSIONS}/*.json")]):
        try:
            for job in read_checked(path)["jobs"]:
                first, until = job["steps"]
                if not (whole(first) and whole(until) and text(job["root"]) and text(job["objective"])):
                    raise TypeError
                needed[job["key"]] = job | {"decaying": bool(job["decaying"])}
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{path} is no plan; make it again (biphase plan STUDY) or remove it") from None
    return needed
