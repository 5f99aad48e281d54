"""What a plan costs, counted without measuring: model FLOPs, tokens, disk, and lengths of texts.

`costs` sums over a plan's training jobs; `shape_of` finds the model shape that they depend on; `texts_of` counts the
tokens that a plan reads of each corpus, and `sizes_of` estimates how many tokens a task's texts have. Seconds are in
`study.prices`.

    train = 3 × forward                       the backward pass costs two forward passes
    forward, per token = 2 × block matrices
                       + 4 × layers × width × attended length      halved where attention is causal
                                                                   at most the window in layers that have one
                       + 2 × vocabulary × hidden × labelled share  the head runs only at labelled positions

The attended length is the mean over tokens. It is exact for whole rows and for `Chunks`; with document masking it
depends on the text, and the row length is used as an upper bound. What only a download would tell (the shape of a hub
model, the size of a tokenizer) is reported as unknown, never guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from biphase.catalog import CATALOG
from biphase.data.corpus import ASSETS
from biphase.errors import BiphaseError, SpecError, nearest
from biphase.metadata import WRONG
from biphase.presets import CORPORA, DEVICES, TOKENS, shares_of, sources_of
from biphase.protocol import window_overlap
from biphase.specs import Config, Contrastive, Corpus, Hub, Packing, Pretrain, Rows, Size, Task
from biphase.store import Store, read_json
from biphase.study.plan import Plan, TrainingJob, card_of
from biphase.tasks.files import local_files, on_hub
from biphase.text import counted, short

BYTES_PER_PARAMETER = 12  # fp32 weights and two fp32 Adam moments
COUNTED_VOCAB = (
    50_021  # to count a new model's matrices: as no width is equal, those with vocab rows stand out
)
_LOOKUPS = ("emb", "wte", "wpe")  # name parts of matrices that are indexed, not multiplied


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a model that its costs depend on."""

    layers: int
    width: int  # heads × head dimension
    hidden: int
    ffn: int
    matrices: int  # parameters of the blocks' matrices, which multiply every token
    blocks: int  # all parameters of the blocks and the final norm
    tied: bool
    vocab: int | None
    context: int | None = None  # context length of a hub model; others read rows as long as in training
    windowed: int = 0  # layers with a sliding window
    window: int = 0  # how many tokens such a layer attends to, in both directions

    @property
    def embedding(self) -> int:
        return (self.vocab or 0) * self.hidden

    @property
    def head(self) -> int:
        return 0 if self.tied else self.embedding

    @property
    def parameters(self) -> int:
        return self.embedding + self.blocks + self.head


@dataclass(frozen=True)
class Costs:
    """Sums over some training jobs of a plan; None: unknown for at least one of them, as `notes` explain."""

    tokens: int
    flops: float | None
    disk: int | None  # bytes if all of these checkpoints are kept
    notes: tuple[str, ...]


def peak_of(device: str) -> float:
    """Return the dense peak of a named device in FLOP/s."""
    if device not in DEVICES:
        raise SpecError(f"there is no device {device!r}; {nearest(device, DEVICES)}")
    return DEVICES[device]


def costs(plan: Plan, keys: Iterable[str] | None = None) -> Costs:
    """Return the costs of the training jobs that produce the checkpoints `keys`, by default of all jobs of the plan."""
    notes: dict[str, None] = {}
    shapes: dict[str, ModelShape | None] = {}
    tokens, flops, disk = 0, 0.0, 0
    for key in plan.jobs if keys is None else keys:
        job = plan.jobs[key]
        if job.root not in shapes:
            shapes[job.root] = shape_of(job.run)
        shape = shapes[job.root]
        tokens += job.tokens
        if shape is None:
            source = getattr(job.run.root.start, "source", "") or getattr(job.run.root.start, "name", "")
            notes[f"the shape of {source} is not known here: FLOPs and disk are left out"] = None
            continue
        if shape.vocab is None:
            notes[
                f"the vocabulary of {sources_of(job.run)[0].name} is not known: head and embedding not counted"
            ] = None
        if isinstance(job.run.packing, Rows) and job.run.packing.document_mask:
            notes["document masking depends on the text: FLOPs are an upper bound"] = None
        if isinstance(job.objective, Contrastive):
            notes["texts of pairs are counted at their longest: tokens and FLOPs are an upper bound"] = None
        flops += job_flops(job, shape)
        disk += shape.parameters * BYTES_PER_PARAMETER
    known = all(shapes.values())
    return Costs(tokens, flops if known else None, disk if known else None, tuple(notes))


def job_flops(job: TrainingJob, shape: ModelShape) -> float:
    """Return the model FLOPs of one training job."""
    if job.merge:
        return 0.0
    share, causal = (part(job.first, job.step) for part in (job.run.labelled_share, job.run.causal_share))
    packing, _ = job.run.reads_at(job.first)
    return job.tokens * flops_per_token(shape, packing, causal=causal, labelled=share)


def flops_of(job: TrainingJob) -> float | None:
    """Return the model FLOPs of one training job, or None if its model's shape is unknown without a download."""
    try:
        shape = shape_of(job.run)
    except BiphaseError:
        return None
    return job_flops(job, shape) if shape else None


def flops_per_token(shape: ModelShape, packing: Packing, *, causal: float, labelled: float) -> float:
    """Return the FLOPs to train on one token, forward and backward; `causal` and `labelled` are shares."""
    every, within = packing.attended_length, min(packing.attended_length, shape.window)
    attended = (shape.layers - shape.windowed) * every + shape.windowed * within  # summed over layers
    attention = 4 * shape.width * attended * (1 - 0.5 * causal)
    return 3 * (2 * shape.matrices + attention + 2 * shape.embedding * labelled)


# ---------------------------------------------------------------- shapes


def start_of(run: Pretrain) -> str:
    """Return the name of the size, configuration or hub model that a run begins with."""
    start = run.root.start
    return getattr(start, "name", "") or getattr(start, "source", "") or run.name


def shape_of(run: Pretrain) -> ModelShape | None:
    """Return the shape of the model that a run trains, or None if only a download would tell."""
    root = run.root
    if isinstance(root.start, Size):
        return shape_of_size(root.start, sources_of(root)[0].tokenizer.vocab or None)
    if isinstance(root.start, Config):
        return shape_of_config(root.start, sources_of(root)[0].tokenizer.vocab or None)
    if isinstance(root.start, Hub) and root.start.local:
        return _shape_of_folder(Path(root.start.source).expanduser())
    return None


def shape_of_size(size: Size, vocab: int | None) -> ModelShape:
    norms = (2 * size.layers + 1) * size.hidden
    return ModelShape(
        layers=size.layers,
        width=size.hidden,
        hidden=size.hidden,
        ffn=size.ffn,
        matrices=size.block_parameters - norms,
        blocks=size.block_parameters,
        tied=size.tied,
        vocab=vocab,
    )


@cache
def shape_of_config(start: Config, vocab: int | None) -> ModelShape | None:
    """Return the shape of a new model, built without memory for its weights; None if its layers cannot be counted."""
    import torch

    from biphase.models.hub import narrowest, new_model

    with torch.device("meta"):
        model = new_model(start, vocab=COUNTED_VOCAB)
    config, tensors = model.config, {name: list(weight.shape) for name, weight in model.named_parameters()}
    names = ("num_attention_heads", "head_dim", "hidden_size", "num_hidden_layers", "intermediate_size")
    try:
        fields = {name: getattr(config, name, None) for name in names}  # under these names in every family
        shape = replace(_shape({**fields, "vocab_size": COUNTED_VOCAB}, tensors), vocab=vocab)
    except Exception:  # widths that differ between layers: a few families raise errors of their own
        return None
    wide = sum(math.prod(dims[1:]) for dims in tensors.values() if dims[0] == COUNTED_VOCAB)
    every = sum(map(math.prod, tensors.values())) + wide * ((vocab or 0) - COUNTED_VOCAB)
    shape = replace(shape, blocks=every - shape.embedding - shape.head)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * shape.layers
    window = getattr(config, "sliding_window", None) or narrowest(config)
    if not window:
        return shape
    windowed = sum("sliding" in kind or "chunked" in kind for kind in kinds)
    # `window` tokens in each direction, both counting the token itself; a few families leave it out of the number.
    return replace(shape, windowed=windowed, window=2 * window - 1)


def _shape_of_folder(folder: Path) -> ModelShape | None:
    """Return a model folder's shape from config.json and the headers of its safetensors files; None if unreadable."""
    from safetensors import SafetensorError, safe_open

    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors: dict[str, list[int]] = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="np") as file:
                names = file.keys()
                tensors |= {name: file.get_slice(name).get_shape() for name in names}
        return _shape(config, tensors) if tensors else None
    except (OSError, *WRONG, ArithmeticError, SafetensorError):
        return None


def _shape(config: Mapping[str, Any], tensors: Mapping[str, list[int]]) -> ModelShape:
    """Return the shape that a configuration and the dimensions of its weights describe."""
    heads = config["num_attention_heads"]
    width = heads * (config.get("head_dim") or config["hidden_size"] // heads)
    vocab, hidden, layers = config["vocab_size"], config["hidden_size"], config["num_hidden_layers"]
    ffn = int(config.get("intermediate_size") or 4 * hidden)
    vocabulary = {name for name, dims in tensors.items() if dims == [vocab, hidden]}
    inner = {name: dims for name, dims in tensors.items() if name not in vocabulary}
    multiplied = [
        dims for name, dims in inner.items() if len(dims) > 1 and not any(w in name for w in _LOOKUPS)
    ]
    return ModelShape(
        layers=layers,
        width=width,
        hidden=hidden,
        ffn=ffn,
        matrices=sum(map(math.prod, multiplied)),
        blocks=sum(map(math.prod, inner.values())),
        tied=len(vocabulary) < 2,
        vocab=vocab,
        context=config.get("max_position_embeddings"),
    )


# ---------------------------------------------------------------- tokens of corpora


REPEATED = 1.05  # epochs; above this a corpus counts as repeated (a few repeated rows change little)


@dataclass(frozen=True)
class CorpusTokens:
    """How many tokens a corpus has, and how many of them the runs of a plan read."""

    corpus: Corpus
    tokens: int | None  # training tokens; None: unknown before tokenization
    exact: bool  # counted in this store
    read: dict[str, int]  # run → tokens read by it and the runs it continues

    @property
    def bytes(self) -> int | None:
        """Size of its shards: two bytes per token if the vocabulary fits into 16 bits, else four."""
        vocab = self.corpus.tokenizer.vocab
        return None if self.tokens is None else self.tokens * (2 if 0 < vocab <= 2**16 else 4)

    @property
    def repeating(self) -> list[str]:
        """The runs that read the corpus more than once, the one that reads most first; none if its size is unknown."""
        most_first = sorted(self.read, key=lambda run: -self.read[run])
        return [run for run in most_first if self.tokens and self.read[run] > REPEATED * self.tokens]

    def described(self, run: str) -> str:
        """Say how much a run reads of the corpus, and how often if its size is known."""
        repeated = ": repeated" if run in self.repeating else ""
        epochs = f", {self.read[run] / self.tokens:.2f} epochs{repeated}" if self.tokens else ""
        return f"{self.corpus.name} ({short(self.read[run])} tokens{epochs})"


def reading_notes(texts: Sequence[CorpusTokens]) -> list[str]:
    """Say what a run reads that blends corpora or repeats one; of several runs of one corpus, that which reads most."""
    notes = []
    for run in dict.fromkeys(run for text in texts for run in text.read):
        reads = [text for text in texts if run in text.read]
        if len(reads) > 1:
            total = sum(text.read[run] for text in reads)
            parts = [f"{text.read[run] / total * 100:.4g}% {text.described(run)}" for text in reads]
            notes.append(f"{run} reads {' + '.join(parts)}")
        elif reads[0].repeating[:1] == [run]:
            others = len(reads[0].repeating) - 1
            more = f"; {counted(others, 'other run')} repeat it too" if others else ""
            notes.append(f"{run} reads {reads[0].described(run)}{more}")
    return notes


def tokens_read(job: TrainingJob) -> dict[Corpus, int]:
    """Return how many tokens a training job reads of each corpus; none if it reads pairs."""
    if isinstance(job.objective, Contrastive):
        return {}
    return {source: round(job.tokens * share) for source, share in shares_of(job.corpus, job.run).items()}


def texts_of(plan: Plan, store: Store) -> list[CorpusTokens]:
    """Return the size and use of each corpus of a plan."""
    read: dict[Corpus, dict[str, int]] = {}
    for run in plan.study.runs:
        for job in plan.path(plan.results[run.name]):
            for corpus, tokens in tokens_read(job).items():
                of_run = read.setdefault(corpus, {})
                of_run[run.name] = of_run.get(run.name, 0) + tokens
    texts = []
    for corpus, tokens in read.items():
        exact = card_of(corpus, store)[1].get("train_tokens")
        published = TOKENS.get(corpus.name) if CORPORA.get(corpus.name) == corpus else None
        texts.append(CorpusTokens(corpus, exact or corpus.tokens or published, bool(exact), tokens))
    return texts


# ---------------------------------------------------------------- text lengths of tasks
# Token counts are estimated from characters by one ratio, without a tokenizer. Character counts of the catalog's
# tasks are in `assets/task_sizes.json`, which names the source of each number; a task whose files are local is
# read. The sizes of any other task are unknown.


TABLE = ASSETS / "task_sizes.json"
LARGEST = 64_000_000  # bytes of task files; larger tasks are not read, since planning should be quick


MOST_CHARACTERS = 4.5  # per token of English with a large vocabulary


@dataclass(frozen=True)
class TextLengths:
    """The number of some texts, and the mean number of characters of each tenth of them, shortest first."""

    rows: int
    characters: tuple[float, ...]

    def tokens(self, vocab: int, limit: int) -> float:
        """Return the mean number of tokens of a text truncated at `limit` tokens."""
        return sum(min(tokens, limit) for tokens in self._each(vocab)) / len(self.characters)

    def windows(self, vocab: int, limit: int) -> tuple[float, float]:
        """Return windows per text and mean tokens per window, for texts split into windows of `limit` tokens."""
        stride = window_overlap(limit)
        lengths = self._each(vocab)
        counts = [1 + max(0, math.ceil((tokens - limit) / (limit - stride))) for tokens in lengths]
        read = sum(lengths) + stride * sum(count - 1 for count in counts)
        return sum(counts) / len(counts), read / sum(counts)

    def _each(self, vocab: int) -> list[float]:
        ratio = characters_per_token(vocab)
        return [characters / ratio + 1 for characters in self.characters]  # + 1: the end-of-text token

    def limited(self, rows: int) -> TextLengths:
        return replace(self, rows=min(self.rows, rows)) if rows else self


@dataclass(frozen=True)
class Sizes:
    """Text lengths of a task: of the training inputs (two entries for pairs) and of the texts that are scored."""

    train: tuple[TextLengths, ...]
    scored: tuple[TextLengths, ...]


def characters_per_token(vocab: int) -> float:
    """Return the characters per BPE token of English for a vocabulary size.

    Measured between 2,048 tokens (2.85) and 50,000 (4.5); linear in the logarithm of the size.
    """
    return min(MOST_CHARACTERS, max(1.0, 2.85 + 0.38 * math.log2(vocab / 2_048)))


def sizes_of(task: Task, documents: str) -> Sizes | None:
    """Return the text lengths of a task, or None if they are unknown.

    `documents`: which documents a retrieval task searches, "judged" or "all".
    """
    if task.name in _table() and _means_the_same(task, CATALOG[task.name]):
        return _listed(task, _table()[task.name], documents)
    return None if on_hub(task) else _read(task, documents)


def _means_the_same(task: Task, known: Task) -> bool:
    """Whether a task reads the same data in the same form as the catalog's, apart from row limits and the commit."""
    splits = replace(task.splits, rows=known.splits.rows)
    source, known_source = (re.sub("@[^/]*", "", some.source) for some in (task, known))
    return (source, task.form, splits) == (known_source, known.form, known.splits)


@cache
def _table() -> dict[str, Any]:
    return read_json(TABLE)["tasks"]


def _listed(task: Task, entry: dict[str, Any], documents: str) -> Sizes:
    def texts(of: dict[str, Any], characters: str = "characters") -> TextLengths:
        return TextLengths(of["rows"], tuple(of[characters]))

    caps = dict(zip(("train", "validation", "test"), task.splits.rows, strict=True))
    scored = [texts(entry[part]).limited(caps[part]) for part in ("validation", "test")]
    if "library" in entry:
        scored.append(texts(entry["library"][documents]))
    if task.trained_on:
        return Sizes((), tuple(scored))
    kinds = ["characters", "documents"] if "library" in entry else ["characters"]
    train = tuple(texts(entry["train"], kind).limited(caps["train"]) for kind in kinds)
    return Sizes(train, tuple(scored))


def _read(task: Task, documents: Any) -> Sizes | None:
    from biphase.tasks.load import load

    try:
        files = [path for paths in local_files(task).values() for path in paths]
        if sum(path.stat().st_size for path in files) > LARGEST:
            return None
        examples: Any = load(task, documents=documents)
    except (BiphaseError, OSError):  # the command that needs the task reports the error
        return None
    if "corpus" in task.form.files:
        train = [[pair.query for pair in examples.train], [pair.document for pair in examples.train]]
        scored = [examples.validation.queries, examples.test.queries, examples.validation.library.texts]
    else:
        train = [[row.text for row in examples.train]]
        scored = [[row.text for row in split] for split in (examples.validation, examples.test)]
    return Sizes(*(tuple(_measured(texts) for texts in some if texts) for some in (train, scored)))


def _measured(texts: Iterable[str]) -> TextLengths:
    lengths = sorted(len(text) for text in texts)
    tenths = min(10, len(lengths))
    cuts = [len(lengths) * n // tenths for n in range(tenths + 1)]
    return TextLengths(len(lengths), tuple(round(sum(lengths[a:b]) / (b - a)) for a, b in pairwise(cuts)))
