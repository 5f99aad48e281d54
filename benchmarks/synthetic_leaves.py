"""The leaves of an invented ledger: scores and values with a known truth behind them. See `synthetic_ledger.py`.

    score of a trial = truth of its result on its task             the best rate of the grid scores this
                      − what its rate loses                       a parabola in log-rate, narrower after MLM
                      + noise, 30% of it common to all models     same seed, same rate, same task: same luck
    example         = ease for everybody + for this model + luck  the easiest come out right, until the score is met

The score that is written is the one its values come to, as it is in a real trial.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import save
from synthetic_states import MACHINE, as_json, put

from biphase.metadata import TRIAL, VALUES
from biphase.records import encode
from biphase.specs import Task
from biphase.store import Store
from biphase.study.ledger import FineTuning, finetunings
from biphase.study.plan import Plan
from biphase.tasks.metrics import entity_f1


@dataclass(frozen=True)
class Dataset:
    """What is known of a task: sizes of its parts, noise in points, and how it stands in its family."""

    test: int = 500
    validation: int = 500
    noise: float = 0.25
    best_rate: float = 6e-5
    after_mlm: float = 80.0  # percent at 610m; only the distances within a family count
    after_clm: float = 80.0


DATASETS = {
    "sst2": Dataset(872, 3_368, 0.30, 6e-5, 90.6, 91.3),
    "mnli": Dataset(9_815, 19_636, 0.20, 6e-5, 81.1, 75.5),
    "qqp": Dataset(40_430, 18_193, 0.15, 6e-5, 89.3, 84.0),
    "conll2003": Dataset(3_453, 3_250, 0.15, 6e-5, 90.6, 92.4),
    "ontonotes5": Dataset(8_262, 8_528, 0.12, 6e-5, 92.6, 92.4),
    "uner_en": Dataset(2_077, 2_001, 0.20, 6e-5, 93.4, 93.3),
    "squad": Dataset(10_570, 4_380, 0.25, 9e-5, 75.2, 63.2),
    "squad_v2": Dataset(11_873, 6_516, 0.25, 9e-5, 60.0, 43.0),
    "record": Dataset(10_000, 5_037, 0.30, 9e-5, 53.1, 20.1),
    "msmarco": Dataset(43, 6_980, 0.30, 9e-5, 91.0, 91.3),
    "nq": Dataset(1_726, 1_726, 0.15, 9e-5, 87.1, 84.2),
    "mldr_en": Dataset(800, 200, 0.25, 9e-5, 60.5, 53.1),
}
# Of a family under a protocol: the metric that rates are chosen by comes first. Others follow it, some points apart.
METRICS = {
    ("SC", "paper"): {"accuracy": 0.0},
    ("TC", "paper"): {"sentence_f1": 0.0, "entity_f1": -3.0},
    ("QA", "paper"): {"token_f1": 0.0, "f1": 4.0, "exact_match": -6.0},
    ("IR", "paper"): {"paper_ndcg@10": 0.0, "ndcg@10": -9.0, "mrr@10": -5.0, "recall@100": 6.0},
    ("SC", "standard"): {"accuracy": 0.0},
    ("TC", "standard"): {"entity_f1": 0.0, "sentence_f1": 3.0},
    ("QA", "standard"): {"f1": 0.0, "exact_match": -10.0, "token_f1": -4.0},
    ("IR", "standard"): {"ndcg@10": 0.0, "paper_ndcg@10": 9.0, "mrr@10": 4.0, "recall@100": 15.0},
}


@dataclass(frozen=True)
class Truth:
    """What a ledger is made to say."""

    means: Mapping[tuple[str, str], float]  # result, family → percent at the best rate
    lost: Mapping[str, float]  # result → the share of it that is lost at the worst rate
    causal: frozenset[str] = frozenset()  # results whose tasks stand as they do after CLM


@dataclass(frozen=True)
class Ledger:
    """A ledger to be written."""

    plan: Plan
    store: Store
    truth: Truth
    seed: int = 0
    shrink: float = 1.0  # of the test and validation parts
    every_metric: bool = False  # keep the values of all metrics and not of the selecting one only
    datasets: Mapping[str, Dataset] = field(default_factory=lambda: DATASETS)


def write_leaves(ledger: Ledger, result: str) -> int:
    """Every trial of a result."""
    made: dict[str, Invented] = {}
    count = 0
    for training in finetunings(ledger.plan, models={ledger.plan.results[result]}):
        for trial in training.trials:
            if trial.task.name not in made:
                made[trial.task.name] = Invented(ledger, result, trial.task)
            about, values = made[trial.task.name].trial(training, trial.key)
            files = {TRIAL: as_json(about), VALUES: save(values)}
            put(ledger.store.trials / trial.key, files)
            count += 1
    return count


class Invented:
    """One result on one task: what all its leaves share."""

    def __init__(self, ledger: Ledger, result: str, task: Task) -> None:
        finetune = ledger.plan.study.finetune
        assert finetune is not None
        self.ledger, self.result, self.task, self.finetune = ledger, result, task, finetune
        self.about = ledger.datasets.get(task.name, Dataset())
        self.n = max(2, round(self.about.test * ledger.shrink))
        self.metrics = METRICS[task.family, finetune.protocol]
        self.best = task_means(ledger, result, task.family)[task.name]
        steps = [self._away(lr) for lr in finetune.lrs]
        self.least, self.most = min(steps), max(steps)
        # Examples are hard or easy for every model, and each model has some that suit it.
        common, own = self.chance("difficulty"), self.chance("taste", result)
        self.suits = 0.74 * common.standard_normal(self.n, np.float32)
        self.suits += 0.39 * own.standard_normal(self.n, np.float32)
        self.entities = np.repeat(np.arange(self.n), common.poisson(1.8, self.n))

    def chance(self, *words: object) -> np.random.Generator:
        """Noise that is the same whenever the same is asked for."""
        text = json.dumps([self.ledger.seed, self.task.name, *words])
        return np.random.default_rng(list(hashlib.sha256(text.encode()).digest()[:16]))

    def _away(self, lr: float) -> float:
        """The square of the distance from the best rate, in orders of magnitude."""
        return math.log10(lr / self.about.best_rate) ** 2

    def expected(self, lr: float) -> float:
        """The score of a rate without noise: the best one of the grid scores as the truth says."""
        way = (self._away(lr) - self.least) / (self.most - self.least) if self.most > self.least else 0.0
        return self.best * (1 - self.ledger.truth.lost[self.result] * way)

    def trial(self, training: FineTuning, key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        lr, seed = training.lr, training.seed
        shared = self.chance("seed", lr, seed).standard_normal()
        own = self.chance("trial", self.result, lr, seed)
        tested = math.sqrt(0.3) * shared + math.sqrt(0.7) * own.standard_normal()
        validated = 0.6 * tested + 0.8 * own.standard_normal()
        mean, sd = self.expected(lr), self.about.noise / 100
        ease = self.suits + 0.55 * own.standard_normal(self.n, np.float32)
        scores: dict[str, dict[str, float]] = {"validation": {}, "test": {}}
        values = {}
        for number, (metric, apart) in enumerate(self.metrics.items()):
            target = _bounded(mean + apart / 100 + tested * sd)
            scores["validation"][metric] = _bounded(mean + apart / 100 + 0.003 + validated * sd)
            if number and not self.ledger.every_metric:
                scores["test"][metric] = target
                continue
            name, each = self.values(metric, target, ease)
            values[f"test/{name}"] = each
            scores["test"][metric] = (
                entity_f1(each) if metric == "entity_f1" else float(each.mean(dtype=float))
            )
        return self._leaf_json(training, key, scores, own), values

    def values(self, metric: str, target: float, ease: np.ndarray) -> tuple[str, np.ndarray]:
        """Example by example, so that they come to `target` as nearly as their kind allows."""
        if metric == "entity_f1":
            by_entity = ease[self.entities] + np.linspace(-0.5, 0.5, len(self.entities), dtype=np.float32)
            right, gold = np.zeros(self.n, np.int32), np.bincount(self.entities, minlength=self.n)
            np.add.at(right, self.entities[by_entity <= _quantile(by_entity, target)], 1)
            return "entity_counts", np.stack([right, gold, gold], axis=1).astype(np.int32)
        if metric in ("accuracy", "exact_match"):
            return metric, (ease <= _quantile(ease, target)).astype(np.float32)
        return metric, _graded(ease, target)

    def _leaf_json(
        self,
        training: FineTuning,
        key: str,
        scores: dict[str, dict[str, float]],
        chance: np.random.Generator,
    ) -> dict[str, Any]:
        borrowed = self.task is not training.task
        steps = training.task.steps if not training.task.epochs else 439
        every = max(1, steps // 50)
        at = sorted({*range(1, steps + 1, every), steps})
        falls = 0.3 + 0.8 * np.exp(-np.array(at) / steps * 3) + 0.05 * chance.standard_normal(len(at))
        validation = max(2, round(self.about.validation * self.ledger.shrink))
        spent = 60 * (0.9 + 0.2 * chance.random())
        spec = {k: v for k, v in encode(self.finetune).items() if k not in ("tasks", "lrs", "seeds")}
        return {
            "key": key,
            "training": training.key,
            "model": training.model,
            "task": encode(self.task),
            "trained_on": encode(training.task) if borrowed else None,
            "finetune": spec,
            "lr": training.lr,
            "seed": training.seed,
            "metric": next(iter(self.metrics)),
            "scores": scores,
            "baselines": {
                baseline: {
                    name: {"what": "invented", "validation": 0.3, "test": 0.25} for name in self.metrics
                }
                for baseline in (("trivial",) if self.task.family == "QA" else ("trivial", "lexical"))
            },
            "constant": {"validation": "", "test": ""},
            "examples": {"validation": validation, "test": self.n},
            "steps": steps,
            "trained_examples": steps * training.task.batch,
            "losses": [[step, float(loss)] for step, loss in zip(at, falls, strict=True)],
            "skipped": 0,
            "seconds": {
                "train": 0.0 if borrowed else round(spent, 3),
                "score": round(2 + (self.n + validation) / 1_000, 3),
            },
            "machine": MACHINE,
        }


def task_means(ledger: Ledger, result: str, family: str) -> dict[str, float]:
    """The tasks of a family around its mean, at distances that stay the same in log-odds."""
    finetune, truth = ledger.plan.study.finetune, ledger.truth
    assert finetune is not None
    names = [task.name for task in finetune.tasks if task.family == family]
    known = [ledger.datasets.get(name, Dataset()) for name in names]
    odds = [_logit((one.after_clm if result in truth.causal else one.after_mlm) / 100) for one in known]
    mean, low, high = truth.means[result, family] / 100, -20.0, 20.0
    for _ in range(60):
        shift = (low + high) / 2
        now = sum(1 / (1 + math.exp(-one - shift)) for one in odds) / len(odds)
        low, high = (shift, high) if now < mean else (low, shift)
    return {name: 1 / (1 + math.exp(-one - shift)) for name, one in zip(names, odds, strict=True)}


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def _bounded(score: float) -> float:
    return min(0.999, max(0.001, score))


def _graded(ease: np.ndarray, target: float, width: float = 1.2) -> np.ndarray:
    """Values between 0 and 1 that fall with `ease` and have the mean `target`.

    The mean rises with `middle`, by the share of examples strictly between: Newton's steps find it, and halves of the
    bracket where those lead out of it.
    """
    low, high = float(ease.min()) - width, float(ease.max()) + width
    middle = (low + high) / 2
    for _ in range(60):
        made = np.clip(np.float32(0.5) + (np.float32(middle) - ease) / np.float32(width), 0, 1)
        off = target - float(made.mean(dtype=float))
        if abs(off) < 1e-7:
            break
        low, high = (middle, high) if off > 0 else (low, middle)
        between = float(((made > 0) & (made < 1)).mean())
        middle += off * width / between if between else high - low
        middle = middle if low < middle < high else (low + high) / 2
    return made


def _quantile(values: np.ndarray, share: float) -> np.floating:
    """The value that so large a share of them does not exceed; below all of them for none."""
    count = round(share * len(values))
    return np.partition(values, count - 1)[count - 1] if count else values.min() - np.float32(1)
