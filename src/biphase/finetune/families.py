"""The families of tasks: head, loss, predictions and scores of each.

A `FamilyTrainer` holds a dataset in tokens, ready to train and score any model with the same tokenization; `family_of`
makes it once for a whole grid of learning rates and seeds. It also computes baselines that read no text, and keeps
the prediction for each example.

    family   head                          loss                                    chosen by (paper / standard)
    SC       mean pool, Linear-GELU-Linear cross-entropy                            accuracy
    TC       Linear on tokens              cross-entropy, every sub-token           sentence_f1 / entity_f1
    QA       Linear on tokens              in the answer or not / start and end     token_f1 / f1
    IR       mean pool, cosine             InfoNCE, in-batch negatives, 1/20        paper_ndcg@10 / ndcg@10
    SR       mean pool, Linear-GELU-Linear mean squared error                       pearson_spearman
    ML       mean pool, Linear-GELU-Linear binary cross-entropy, mean over labels   micro_f1
    MC       the same, one score a choice  cross-entropy over an example's choices  accuracy

`search` is the exact search of retrieval: no index, no approximation. Documents are embedded block by block,
longest last, scored against all queries and discarded; only the best `KEPT` per query are kept. So memory holds the
queries, one block of documents and at most `SCORES` scores (256 MiB), however large the collection is.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphase.finetune.encoder import TaskBatch, TaskModel, TuningOptions, packs, per_text, per_token
from biphase.models.encoder import EmbeddingHead, TextHead, TokenHead, embed_texts, pack, similarities
from biphase.objectives import IGNORE
from biphase.protocol import window_overlap
from biphase.randomness import permute, salt
from biphase.specs import Answer, Choose, Classify, MultiLabel, Regress, Retrieve, Tag, Task
from biphase.specs.tasks import FAMILIES, Form
from biphase.tasks.baselines import (
    bm25_rankings,
    tfidf_cosines,
    tfidf_label_sets,
    tfidf_labels,
    tfidf_numbers,
    word_tags,
)
from biphase.tasks.collection import Keep, Ragged, RaggedWriter, Texts, read_ragged, temporary
from biphase.tasks.encode import (
    NOTHING,
    Decoded,
    Tokenization,
    by_length,
    decode_spans,
    decode_tagged,
    encode_questions,
    encode_texts,
    encode_words,
    encoded_texts,
)
from biphase.tasks.load import Examples
from biphase.tasks.metrics import (
    accuracy,
    answer_f1,
    confusion,
    confusion_by_chance,
    correlations,
    entity_counts,
    entity_f1,
    exact_match,
    expected_at_random,
    label_counts,
    label_scores,
    multilabel_scores,
    score_rankings,
    sentence_macro_f1,
    token_set_f1,
    word_votes,
)

KEPT = 100
DOCUMENTS = 2**16  # per block
SCORES = 2**26


def search(
    queries: Tensor,
    documents: int,
    embed: Callable[[Tensor], Tensor],
    order: Tensor | None = None,
    *,
    kept: int = KEPT,
    block: int = DOCUMENTS,
) -> Tensor:
    """Return the indices of the best documents of each query, best first: (Q, d) → (Q, min(kept, documents)).

    `embed` returns the embeddings of documents by index; it is called in the order `order`. Equal scores rank by
    index, so the result does not depend on blocks; only if more than `kept` documents tie at the last place may the
    device decide which of them are dropped.
    """
    device = queries.device
    order = torch.arange(documents) if order is None else order
    best = torch.empty(len(queries), 0, device=device)
    ranked = torch.empty(len(queries), 0, dtype=torch.long, device=device)
    for numbers in order.split(block):
        vectors = embed(numbers)
        there = numbers.to(device)
        rows = max(1, SCORES // len(numbers))
        scores, indices = [], []
        for block_queries in queries.split(rows):
            top = (block_queries @ vectors.T).topk(min(kept, len(numbers)), dim=1)
            scores.append(top.values)
            indices.append(there[top.indices])
        best, ranked = torch.cat([best, torch.cat(scores)], 1), torch.cat([ranked, torch.cat(indices)], 1)
        # Sort by index first, then stably by score: equal scores stay in the order of indices.
        by_index = ranked.argsort(dim=1)
        best, ranked = best.gather(1, by_index), ranked.gather(1, by_index)
        by_score = best.argsort(dim=1, descending=True, stable=True)[:, :kept]
        best, ranked = best.gather(1, by_score), ranked.gather(1, by_score)
    return ranked


# ---------------------------------------------------------------- families


Part = Literal["validation", "test"]
PARTS: tuple[Part, Part] = ("validation", "test")
TEMPERATURE = 0.05
LOGISTIC = "TF-IDF and logistic regression"
LISTED = 10  # retrieved documents that are saved per query

Metrics = dict[str, float]
# The description and the scores of a method that counts words, if there is one.
Lexical = tuple[str, dict[Any, Metrics]] | None
Recall = Callable[[Callable[[], Lexical]], Lexical]  # returns what it computed before, or computes it


@dataclass(frozen=True)
class PartScores:
    """The scores of one split: each metric over all examples, and the per-example values it is made of."""

    metrics: Metrics
    values: dict[str, np.ndarray]
    predictions: dict[str, np.ndarray] = field(default_factory=dict)  # format: docs/evaluation.md
    constant: str = ""  # the prediction, if all examples got the same one

    @classmethod
    def means(cls, values: dict[str, np.ndarray], **more: Any) -> PartScores:
        return cls(means_of(values), values, **more)


def means_of(values: dict[str, np.ndarray]) -> Metrics:
    return {name: float(each.mean(dtype=float)) for name, each in values.items()}


def as_text(values: Sequence[Any]) -> np.ndarray:
    """Return a list as the bytes of its JSON, so that safetensors can hold it."""
    return np.frombuffer(json.dumps(values, separators=(",", ":")).encode(), np.uint8)


class FamilyTrainer(ABC):
    """The dataset of one task in tokens; subclasses define head, loss, predictions and scores."""

    form: Any
    inputs: tuple[Ragged, ...]  # texts of the training examples: one per example, or one per side of a pair
    targets: np.ndarray | Ragged  # of the training examples: one per text, or one per token

    def __init__(
        self,
        task: Task,
        examples: Examples,
        tokenization: Tokenization,
        *,
        protocol: str,
        recall: Recall = lambda compute: compute(),
        keep: Keep = temporary,
    ) -> None:
        self.keep = keep
        self.task, self.form, self.paper = task, task.form, protocol == "paper"
        # By split: the row number of each example in its files, or its id where the data has one.
        self.example_ids: dict[str, Sequence[int | str]] = dict(examples.rows)
        self.encode(examples, tokenization)
        self.size = len(self.inputs[0])  # examples per epoch
        self.by_words = recall(lambda: self.lexical(examples))  # here, since the texts are not kept

    @abstractmethod
    def encode(self, examples: Examples, tokenization: Tokenization) -> None:
        """Set `inputs` and `targets`, and what scoring needs of the other splits."""

    @property
    def steps(self) -> int:
        """Optimizer steps of a fine-tuning; a batch never crosses the end of an epoch."""
        return self.epoch * self.task.epochs if self.task.epochs else self.task.steps

    @property
    def epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return -(-self.size // self.task.batch)

    @property
    def metric(self) -> str:
        """The metric by which learning rates are chosen."""
        return FAMILIES[self.task.family].selects["paper" if self.paper else "standard"]

    @abstractmethod
    def head(self, width: int) -> nn.Module:
        """Make a new head; its weights are initialized by the caller."""

    def batch(self, rows: np.ndarray, options: TuningOptions) -> list[TaskBatch]:
        """Return the training examples `rows` as micro-batches."""
        batches = []
        for chosen, packed in packs(self.inputs[0], rows, options, options.train_tokens):
            if isinstance(self.targets, Ragged):
                targets = np.concatenate([self.targets[row] for row in chosen], dtype=np.int64)
                count, of_tokens = int((targets != IGNORE).sum()), True
            else:
                targets, count, of_tokens = self.targets[chosen], len(chosen), False
            batches.append(TaskBatch((packed,), torch.from_numpy(targets), count, of_tokens=of_tokens))
        return batches

    def loss_sum(self, model: TaskModel, batch: TaskBatch) -> Tensor:
        """Return the sum of a micro-batch's losses over its labels."""
        logits = model(batch.inputs[0])
        return F.cross_entropy(logits.float(), batch.targets, reduction="sum", ignore_index=IGNORE)

    def score(
        self, model: TaskModel, options: TuningOptions, parts: Sequence[Part] = PARTS
    ) -> dict[Part, PartScores]:
        """Score a model on the splits `parts`."""
        return {part: self._score(model, part, options) for part in parts}

    def _score(self, model: TaskModel, part: Part, options: TuningOptions) -> PartScores:
        """Score a model on one split."""
        raise NotImplementedError

    @cached_property
    def baselines(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Scores that any model should beat: by name and metric, a description and the score on both splits.

        For each metric, the "trivial" baseline is the one of `trivial` that is best on the validation split. The
        "lexical" one counts words.
        """
        scores = self.trivial()
        best: dict[str, dict[str, Any]] = {}
        for metric in next(iter(scores.values()))["validation"]:
            # Rounded, so that float noise does not choose among equals; the first of them is taken.
            what = max(scores, key=lambda what: round(scores[what]["validation"][metric], 9))
            best[metric] = {"what": what, **{part: scores[what][part][metric] for part in PARTS}}
        if self.by_words is None:
            return {"trivial": best}
        what, words = self.by_words
        counted = {metric: {"what": what, **{part: words[part][metric] for part in PARTS}} for metric in best}
        return {"trivial": best, "lexical": counted}

    @abstractmethod
    def trivial(self) -> dict[str, dict[Part, Metrics]]:
        """Return the scores of answers that read no text: description → split → metrics."""

    def lexical(self, examples: Examples) -> Lexical:
        """Return the description and the scores of a method that counts words; None if there is none."""
        return None


class TextFamily(FamilyTrainer):
    """A family whose examples are a text and a target each; subclasses say what the targets are and how to compare them."""

    ids: dict[str, Ragged]  # of each split
    gold: dict[str, np.ndarray]  # the targets of each split
    # What counts words: its description, and what predicts the targets of splits from the training texts and targets.
    counting: tuple[str, Callable[..., list[np.ndarray] | None]] | None = None

    def encode(self, examples: Examples, tokenization: Tokenization) -> None:
        rows = examples.parts
        self.ids = {part: encode_texts(tokenization, [row.text for row in rows[part]]) for part in rows}
        self.gold = {part: self.read(rows[part]) for part in rows}
        self.inputs, self.targets = (self.ids["train"],), self.gold["train"]

    @abstractmethod
    def read(self, rows: Sequence[Any]) -> np.ndarray:
        """Return the targets of examples."""

    @abstractmethod
    def metrics(self, predicted: np.ndarray, gold: np.ndarray) -> Metrics:
        """Compare predictions with targets."""

    @property
    def known(self) -> np.ndarray:
        """The targets by which a trivial baseline answers."""
        return self.gold["train"] if len(self.gold["train"]) else self.gold["validation"]

    def always(self, answer: Any) -> dict[Part, Metrics]:
        """Return the scores of one answer to every text."""
        gold = {part: self.gold[part] for part in PARTS}
        return {part: self.metrics(np.broadcast_to(answer, one.shape), one) for part, one in gold.items()}

    def lexical(self, examples: Examples) -> Lexical:
        if self.counting is None:
            return None
        what, predict = self.counting
        train, *others = ([row.text for row in examples.parts[part]] for part in ("train", *PARTS))
        return self._counted(what, predict(train, self.gold["train"], *others))

    def _counted(self, what: str, found: list[np.ndarray] | None) -> Lexical:
        if found is None:
            return None
        return what, {
            part: self.metrics(one, self.gold[part]) for part, one in zip(PARTS, found, strict=True)
        }


class TextClassification(TextFamily):
    form: Classify
    counting = LOGISTIC, tfidf_labels

    def read(self, rows: Sequence[Any]) -> np.ndarray:
        return np.array([row.label for row in rows])

    def head(self, width: int) -> nn.Module:
        return TextHead(width, len(self.form.labels))

    def metrics(self, predicted: np.ndarray, gold: np.ndarray) -> Metrics:
        return label_scores(confusion(predicted, gold, len(self.form.labels)))

    def _score(self, model: TaskModel, part: Part, options: TuningOptions) -> PartScores:
        predicted = per_text(model, self.ids[part], options).argmax(-1).cpu().numpy()
        gold = self.gold[part]
        return PartScores(
            self.metrics(predicted, gold),
            {"accuracy": accuracy(predicted, gold)},
            {"predictions": _small(predicted, len(self.form.labels))},
            _constant(predicted, gold, self.form.labels),
        )

    def trivial(self) -> dict[str, dict[Part, Metrics]]:
        number, labels = int(np.bincount(self.known).argmax()), self.form.labels
        chance = {part: label_scores(confusion_by_chance(self.gold[part], len(labels))) for part in PARTS}
        return {f"majority class: {labels[number]}": self.always(number), "chance": chance}


class TokenClassification(FamilyTrainer):
    form: Tag

    def encode(self, examples: Examples, tokenization: Tokenization) -> None:
        self.encoded = {part: encode_words(tokenization, rows) for part, rows in examples.parts.items()}
        self.inputs, self.targets = (self.encoded["train"].ids,), self.encoded["train"].labels

    def head(self, width: int) -> nn.Module:
        return TokenHead(width, len(self.form.labels))

    def _score(self, model: TaskModel, part: Part, options: TuningOptions) -> PartScores:
        encoded = self.encoded[part]
        tokens = Ragged(per_token(model, encoded.ids, options).argmax(-1), encoded.ids.starts)
        outside = self.form.labels.index("O")
        predicted = [
            word_votes(labels.tolist(), belongs.tolist(), len(gold), outside)
            for labels, belongs, gold in zip(tokens, encoded.word_of, encoded.gold, strict=True)
        ]
        flat = np.concatenate([np.array(tags, np.int64) for tags in predicted])
        scored = self._compare(predicted, part)
        kept = {
            "predictions": _small(flat, len(self.form.labels)),
            "words": encoded.gold.lengths.astype(np.int32),
        }
        return replace(
            scored, predictions=kept, constant=_constant(flat, encoded.gold.flat, self.form.labels)
        )

    def _compare(self, predicted: list[list[int]], part: Part) -> PartScores:
        """Score one predicted tag per word of each sentence."""
        pairs = list(zip(predicted, map(np.ndarray.tolist, self.encoded[part].gold), strict=True))
        macro = np.array([sentence_macro_f1(tags, gold) for tags, gold in pairs], np.float32)
        names = [[[self.form.labels[tag] for tag in tags] for tags in pair] for pair in pairs]
        counts = np.array([entity_counts(*pair) for pair in names], np.int32)
        metrics = {"entity_f1": entity_f1(counts), "sentence_f1": float(macro.mean(dtype=float))}
        return PartScores(metrics, {"entity_counts": counts, "sentence_f1": macro})

    def trivial(self) -> dict[str, dict[Part, Metrics]]:
        tag = _most_common(self.encoded["train"].gold.flat, self.encoded["validation"].gold.flat)
        always = {part: [[tag] * len(gold) for gold in self.encoded[part].gold] for part in PARTS}
        scores = {part: self._compare(always[part], part).metrics for part in PARTS}
        return {f"majority tag: {self.form.labels[tag]}": scores}

    def lexical(self, examples: Examples) -> Lexical:
        if not examples.train:
            return None
        words = {
            # Words that did not fit into the model's context are not scored.
            part: [row.words[: len(gold)] for row, gold in zip(rows, self.encoded[part].gold, strict=True)]
            for part, rows in examples.parts.items()
        }
        train = list(zip(words["train"], map(np.ndarray.tolist, self.encoded["train"].gold), strict=True))
        tags = word_tags(train, *(words[part] for part in PARTS))
        scores = {part: self._compare(found, part).metrics for part, found in zip(PARTS, tags, strict=True)}
        return "the most frequent tag of each word", scores


class QuestionAnswering(FamilyTrainer):
    form: Answer

    def encode(self, examples: Examples, tokenization: Tokenization) -> None:
        rows = examples.parts
        # A window must have more new text than it repeats, also for a model with a short context.
        stride = None if self.paper else window_overlap(tokenization.length)
        self.encoded = {part: encode_questions(tokenization, rows[part], stride=stride) for part in rows}
        train = self.encoded["train"]
        self.inputs, self.targets = (train.ids,), train.inside if self.paper else train.bounds
        self.example_ids = {part: [question.name for question in rows[part]] for part in PARTS}
        self.answers = {
            part: [[span.text for span in question.answers] for question in rows[part]] for part in PARTS
        }

    def head(self, width: int) -> nn.Module:
        return TokenHead(width, 2)

    def loss_sum(self, model: TaskModel, batch: TaskBatch) -> Tensor:
        if self.paper:
            return super().loss_sum(model, batch)
        packed = batch.inputs[0]
        logits = model(packed).float()  # (N, 2)
        # Scatter into (windows, longest, 2). Positions beyond a window's end are -inf and never win; padding
        # tokens, which belong to no window, land behind the last window and are cut off.
        longest, windows = packed.longest, len(packed)
        starts = F.pad(packed.lengths.cumsum(0), (1, 0))
        place = torch.arange(len(packed.owner), device=logits.device) - starts[packed.owner]
        padded = logits.new_full((windows * longest + len(logits), 2), float("-inf"))
        padded = padded.index_copy(0, packed.owner * longest + place, logits)
        padded = padded[: windows * longest].view(windows, longest, 2)
        start, end = (
            F.cross_entropy(padded[..., which], batch.targets[:, which], reduction="sum") for which in (0, 1)
        )
        return (start + end) / 2

    def _score(self, model: TaskModel, part: Part, options: TuningOptions) -> PartScores:
        encoded = self.encoded[part]
        logits = per_token(model, encoded.ids, options)
        if self.paper:
            decoded = decode_tagged(encoded, Ragged(logits[:, 1] - logits[:, 0], encoded.ids.starts))
        else:
            starts, ends = (Ragged(logits[:, which], encoded.ids.starts) for which in (0, 1))
            decoded = decode_spans(encoded, starts, ends, unanswerable=self.form.unanswerable)
        return self._compare(decoded, part)

    def trivial(self) -> dict[str, dict[Part, Metrics]]:
        scores: dict[str, dict[Part, Metrics]] = {"no answer": {}, "the whole context": {}}
        for part in PARTS:
            encoded = self.encoded[part]
            ends = encoded.head + encoded.spans.lengths
            whole = [
                Decoded(text, frozenset(range(head, end)))
                for text, head, end in zip(
                    encoded.contexts, encoded.head.tolist(), ends.tolist(), strict=True
                )
            ]
            for what, answers in zip(scores, ([NOTHING] * len(whole), whole), strict=True):
                scores[what][part] = self._compare(answers, part).metrics
        return scores

    def _compare(self, decoded: list[Decoded], part: Part) -> PartScores:
        pairs = list(zip(decoded, self.answers[part], strict=True))
        sets = zip(decoded, self.encoded[part].gold, strict=True)
        values = {
            "f1": [answer_f1(answer.text, gold) for answer, gold in pairs],
            "exact_match": [exact_match(answer.text, gold) for answer, gold in pairs],
            "token_f1": [token_set_f1(answer.tokens, gold) for answer, gold in sets],
        }
        answered = any(answer.text for answer in decoded) or not any(map(any, self.answers[part]))
        return PartScores.means(
            {name: np.array(each, np.float32) for name, each in values.items()},
            predictions={"predictions": np.array([answer.span for answer in decoded], np.int32)},
            constant="" if answered else "no answer",
        )


class Retrieval(FamilyTrainer):
    form: Retrieve

    def encode(self, examples: Examples, tokenization: Tokenization) -> None:
        rows = examples.parts
        library = rows["test"].library
        self.inputs = tuple(
            encode_texts(tokenization, [getattr(pair, side) for pair in examples.train])
            for side in ("query", "document")
        )
        self.names = library.names
        if isinstance(library.texts, Texts):
            folder = self.keep(
                f"ids {tokenization.identity}", lambda folder: _write_ids(folder, tokenization, library.texts)
            )
            self.documents = read_ragged(folder, "ids", np.int32)
            self.order = torch.from_numpy(np.load(folder / "order.npy", mmap_mode="c"))
        else:
            self.documents = encode_texts(tokenization, library.texts)
            self.order = torch.from_numpy(np.argsort(self.documents.lengths, kind="stable"))
        self.example_ids = {part: rows[part].names for part in PARTS}
        self.queries = {part: encode_texts(tokenization, rows[part].queries) for part in PARTS}
        self.judged = {part: rows[part].judged for part in PARTS}

    def head(self, width: int) -> nn.Module:
        return EmbeddingHead()

    def batch(self, rows: np.ndarray, options: TuningOptions) -> list[TaskBatch]:
        # All pairs of a step are in one loss, since the negatives of each are the others' documents.
        both = Ragged.from_lists([side[row] for side in self.inputs for row in rows])
        parts = list(packs(both, np.arange(len(both)), options, options.train_tokens))
        order = torch.from_numpy(np.argsort(np.concatenate([chosen for chosen, _ in parts])))
        return [TaskBatch(tuple(packed for _, packed in parts), order, len(rows))]

    def loss_sum(self, model: TaskModel, batch: TaskBatch) -> Tensor:
        queries, documents = embed_texts(model, batch.inputs, batch.targets).chunk(2)
        similar = similarities(queries, documents, TEMPERATURE)
        own = torch.arange(len(queries), device=similar.device)
        return F.cross_entropy(similar, own, reduction="sum")

    def sample(self, count: int) -> Tensor:
        """Return the documents that validation judges and `count` others, in the order in which they are embedded.

        The others are the same for all models, rates and seeds.
        """
        judged = torch.tensor(sorted({place for grades in self.judged["validation"] for place in grades}))
        every = len(self.documents)
        drawn = permute(torch.arange(min(count + len(judged), every)), every, salt(0, "documents"))
        others = drawn[~torch.isin(drawn, judged)][:count]
        pool = torch.cat([judged, others]).sort().values
        lengths = self.documents.starts[pool.numpy() + 1] - self.documents.starts[pool.numpy()]
        return pool[torch.from_numpy(np.argsort(lengths, kind="stable"))]

    def score(
        self,
        model: TaskModel,
        options: TuningOptions,
        parts: Sequence[Part] = PARTS,
        *,
        among: Tensor | None = None,
    ) -> dict[Part, PartScores]:
        """Score the splits together, since they search the same documents: `among` some, or all."""
        queries = torch.cat([per_text(model, self.queries[part], options) for part in parts])

        def embed(numbers: Tensor) -> Tensor:
            rows = numbers.numpy()
            return per_text(model, Ragged.from_lists([self.documents[row] for row in rows]), options)

        order = self.order if among is None else among
        ranked = search(queries, len(self.documents), embed, order).cpu().numpy()
        scored: dict[Part, PartScores] = {}
        first = 0
        for part in parts:
            judged = self.judged[part]
            mine = ranked[first : first + len(judged)]
            first += len(judged)
            scored[part] = PartScores.means(
                score_rankings(mine, judged, self.form.relevant),
                predictions={"predictions": as_text([[self.names[n] for n in row[:LISTED]] for row in mine])},
                constant="" if _differs(mine[:, :LISTED]) or not _differs(judged) else "the same documents",
            )
        return scored

    def trivial(self) -> dict[str, dict[Part, Metrics]]:
        relevant, documents = self.form.relevant, len(self.documents)
        expected = {
            part: means_of(expected_at_random(self.judged[part], relevant, documents)) for part in PARTS
        }
        return {"random order": expected}

    def lexical(self, examples: Examples) -> Lexical:
        rows = examples.parts
        queries = [query for part in PARTS for query in rows[part].queries]
        ranked = bm25_rankings(rows["test"].library.texts, queries, kept=KEPT)
        if ranked is None:
            return None
        by_part = np.split(ranked, [len(self.judged["validation"])])
        scores = {
            part: means_of(score_rankings(found, self.judged[part], self.form.relevant))
            for part, found in zip(PARTS, by_part, strict=True)
        }
        return "BM25", scores


def _write_ids(folder: Path, tokenization: Tokenization, texts: Sequence[str]) -> None:
    with RaggedWriter(folder, "ids") as writer:
        for ids in encoded_texts(tokenization, texts):
            writer.add(ids.data)
    np.save(folder / "order.npy", np.argsort(np.diff(np.frombuffer(writer.starts, np.int64)), kind="stable"))


class SequenceRegression(TextFamily):
    form: Regress
    counting = "TF-IDF and ridge regression", tfidf_numbers

    def read(self, rows: Sequence[Any]) -> np.ndarray:
        return np.array([row.number for row in rows], np.float32)

    def head(self, width: int) -> nn.Module:
        return TextHead(width, 1)

    def loss_sum(self, model: TaskModel, batch: TaskBatch) -> Tensor:
        return F.mse_loss(model(batch.inputs[0]).float()[:, 0], batch.targets, reduction="sum")

    def metrics(self, predicted: np.ndarray, gold: np.ndarray) -> Metrics:
        return correlations(predicted, gold)

    def _score(self, model: TaskModel, part: Part, options: TuningOptions) -> PartScores:
        predicted = per_text(model, self.ids[part], options)[:, 0].cpu().numpy()
        gold = self.gold[part]
        return PartScores(
            self.metrics(predicted, gold),
            {"number_pairs": np.stack([predicted, gold], -1)},
            {"predictions": predicted},
            "" if _differs(predicted) or not _differs(gold) else f"{predicted[0]:g}",
        )

    def trivial(self) -> dict[str, dict[Part, Metrics]]:
        mean = float(self.known.mean(dtype=float))
        return {f"always the mean, {mean:.3g}": self.always(np.float32(mean))}

    def lexical(self, examples: Examples) -> Lexical:
        if any(len(row.columns) != 2 for row in examples.test):
            return super().lexical(examples)
        train, *others = ([row.columns for row in examples.parts[part]] for part in ("train", *PARTS))
        return self._counted("TF-IDF cosine", tfidf_cosines(train, *others))


class MultiLabelClassification(TextFamily):
    form: MultiLabel
    counting = LOGISTIC, tfidf_label_sets

    def encode(self, examples: Examples, tokenization: Tokenization) -> None:
        super().encode(examples, tokenization)
        self.targets = self.gold["train"].astype(np.float32)

    def read(self, rows: Sequence[Any]) -> np.ndarray:
        """Return which labels each text has: (n, labels)."""
        marked = np.zeros((len(rows), len(self.form.labels)), bool)
        for place, row in enumerate(rows):
            marked[place, list(row.labels)] = True
        return marked

    def head(self, width: int) -> nn.Module:
        return TextHead(width, len(self.form.labels))

    def loss_sum(self, model: TaskModel, batch: TaskBatch) -> Tensor:
        logits = model(batch.inputs[0]).float()
        each = F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="none")
        return each.mean(-1).sum()

    def metrics(self, predicted: np.ndarray, gold: np.ndarray) -> Metrics:
        return multilabel_scores(predicted, gold)

    def _score(self, model: TaskModel, part: Part, options: TuningOptions) -> PartScores:
        predicted, gold = (per_text(model, self.ids[part], options) > 0).cpu().numpy(), self.gold[part]
        names = [name for name, said in zip(self.form.labels, predicted[0], strict=True) if said]
        return PartScores(
            self.metrics(predicted, gold),
            {"label_counts": label_counts(predicted, gold)},
            {"predictions": predicted},
            "" if _differs(predicted) or not _differs(gold) else ", ".join(names) or "no label",
        )

    def trivial(self) -> dict[str, dict[Part, Metrics]]:
        most = int(self.known.sum(axis=0).argmax())
        common = np.arange(len(self.form.labels)) == most
        return {
            f"always {self.form.labels[most]}": self.always(common),
            "all labels": self.always(np.ones_like(common)),
        }


class MultipleChoice(FamilyTrainer):
    form: Choose

    def encode(self, examples: Examples, tokenization: Tokenization) -> None:
        rows = examples.parts
        self.answers = {part: np.array([row.answer for row in rows[part]], np.int64) for part in rows}
        self.counts = {part: np.array([len(row.texts) for row in rows[part]], np.int64) for part in rows}
        self.choices = {
            part: encode_texts(
                tokenization, [text for row in rows[part] for text in row.texts], keep_end=True
            )
            for part in rows
        }
        # Every example of a step has as many texts, so that shapes are fixed. Where it has fewer choices, the others are
        # one token, and their scores do not count.
        most = int(self.counts["train"].max(initial=0))
        first = np.cumsum(self.counts["train"]) - self.counts["train"]
        texts = self.choices["train"]
        self.inputs = tuple(
            Ragged.from_lists(
                [
                    texts[start + place] if place < count else texts[start][:1]
                    for start, count in zip(first.tolist(), self.counts["train"].tolist(), strict=True)
                ],
                np.int32,
            )
            for place in range(max(1, most))
        )
        self.targets = np.stack([self.answers["train"], self.counts["train"]], -1)
        self.lengths = np.sum([side.lengths for side in self.inputs], axis=0)

    def head(self, width: int) -> nn.Module:
        return TextHead(width, 1)

    def batch(self, rows: np.ndarray, options: TuningOptions) -> list[TaskBatch]:
        batches = []
        for group in by_length(self.lengths[rows], options.train_tokens):
            chosen = rows[group]
            texts = [side[row] for row in chosen for side in self.inputs]
            packed = pack(texts, varlen=options.varlen, causal=options.causal)
            batches.append(TaskBatch((packed,), torch.from_numpy(self.targets[chosen]), len(chosen)))
        return batches

    def loss_sum(self, model: TaskModel, batch: TaskBatch) -> Tensor:
        scores = model(batch.inputs[0]).float().view(-1, len(self.inputs))
        answers, counts = batch.targets.unbind(-1)
        absent = torch.arange(len(self.inputs), device=scores.device) >= counts[:, None]
        return F.cross_entropy(scores.masked_fill(absent, float("-inf")), answers, reduction="sum")

    def _score(self, model: TaskModel, part: Part, options: TuningOptions) -> PartScores:
        scores = per_text(model, self.choices[part], options)[:, 0].cpu().numpy()
        each = np.split(scores, np.cumsum(self.counts[part])[:-1])
        predicted, gold = np.array([one.argmax() for one in each]), self.answers[part]
        return PartScores.means(
            {"accuracy": accuracy(predicted, gold)},
            predictions={"predictions": _small(predicted, int(self.counts[part].max()))},
            constant="" if _differs(predicted) or not _differs(gold) else f"choice {predicted[0] + 1}",
        )

    def trivial(self) -> dict[str, dict[Part, Metrics]]:
        place = _most_common(self.answers["train"], self.answers["validation"])
        return {
            f"always choice {place + 1}": {
                part: {"accuracy": float((self.answers[part] == place).mean())} for part in PARTS
            },
            "chance": {part: {"accuracy": float((1 / self.counts[part]).mean())} for part in PARTS},
        }


def _small(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return numbers below `count` in the smallest integer type that holds them."""
    return numbers.astype(np.min_scalar_type(count))


def _most_common(train: np.ndarray, validation: np.ndarray) -> int:
    """Return the most common label of the train split, the lowest of equals; of validation if train is empty."""
    return int(np.bincount(train if len(train) else validation).argmax())


def _differs(rows: Sequence[Any] | np.ndarray) -> bool:
    """Whether any row differs from the first."""
    return any(np.any(row != rows[0]) for row in rows)


def _constant(predicted: np.ndarray, gold: np.ndarray, names: Sequence[str]) -> str:
    """Return the label predicted for every example; "" if predictions differ or all gold labels are equal."""
    return "" if _differs(predicted) or not _differs(gold) else names[int(predicted[0])]


CLASSES: dict[type[Form], Any] = {
    Classify: TextClassification,
    Tag: TokenClassification,
    Answer: QuestionAnswering,
    Retrieve: Retrieval,
    Regress: SequenceRegression,
    MultiLabel: MultiLabelClassification,
    Choose: MultipleChoice,
}


def family_of(
    task: Task,
    examples: Examples,
    tokenization: Tokenization,
    *,
    protocol: str,
    recall: Recall = lambda compute: compute(),
    keep: Keep = temporary,
) -> FamilyTrainer:
    """Make the family of a task: its dataset in a model's tokens. `keep` says where those of a large collection are."""
    family = CLASSES[type(task.form)]
    return family(task, examples, tokenization, protocol=protocol, recall=recall, keep=keep)
