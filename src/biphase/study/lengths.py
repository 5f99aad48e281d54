"""How many tokens a task's texts are, without its tokenizer: from the characters, by one ratio.

Of the catalog's tasks a table is shipped (`assets/task_sizes.json`, which says where each number is from); a task whose
files are on this machine is read. Of any other nothing is known, and nothing is guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from biphase.catalog import CATALOG
from biphase.data.listing import ASSETS
from biphase.errors import BiphaseError
from biphase.files import read_json
from biphase.specs import Task
from biphase.tasks.places import local_files, on_hub

TABLE = ASSETS / "task_sizes.json"
LARGEST = 64_000_000  # bytes of a task's files that are read while planning, which should take a moment
STRIDE = 128  # tokens that neighbouring windows of a long context share
MOST_CHARACTERS = 4.5  # of a token of English, by a large vocabulary


@dataclass(frozen=True)
class Texts:
    """Some texts: how many, and the mean number of characters of each tenth of them, shortest first."""

    rows: int
    characters: tuple[float, ...]

    def tokens(self, vocab: int, limit: int) -> float:
        """The mean number of tokens of a text that is cut at `limit`."""
        return sum(min(one, limit) for one in self._each(vocab)) / len(self.characters)

    def windows(self, vocab: int, limit: int) -> tuple[float, float]:
        """Where a long text is read in windows: how many there are for each text, and their mean tokens."""
        stride = min(STRIDE, limit // 4)
        counts = [1 + max(0, math.ceil((one - limit) / (limit - stride))) for one in self._each(vocab)]
        read = sum(one + (n - 1) * stride for one, n in zip(self._each(vocab), counts, strict=True))
        return sum(counts) / len(counts), read / sum(counts)

    def _each(self, vocab: int) -> list[float]:
        ratio = characters_per_token(vocab)
        return [one / ratio + 1 for one in self.characters]  # a text and its end

    def limited(self, rows: int) -> Texts:
        return replace(self, rows=min(self.rows, rows)) if rows else self


@dataclass(frozen=True)
class Sizes:
    """The texts of a task: those an example is made of (two where it is a pair), and those that are scored."""

    train: tuple[Texts, ...]
    scored: tuple[Texts, ...]


def characters_per_token(vocab: int) -> float:
    """Of English, by BPE: measured from 2,048 words (2.85) to 50,000 (4.5), a straight line in the logarithm."""
    return min(MOST_CHARACTERS, max(1.0, 2.85 + 0.38 * math.log2(vocab / 2_048)))


def sizes_of(task: Task, documents: str) -> Sizes | None:
    """The sizes of a task that is searched among `documents` ("judged", "all"), or None where they are not known."""
    known = CATALOG.get(task.name)
    if known and task.name in _table() and _means_the_same(task, known):
        return _listed(task, _table()[task.name], documents)
    if on_hub(task):
        return None
    return _read(task, documents)


def _means_the_same(task: Task, known: Task) -> bool:
    """The same data, asked alike; how long is trained, how many rows of it, and at which commit aside."""
    splits = replace(task.splits, rows=known.splits.rows)
    places = [re.sub("@[^/]*", "", one.source) for one in (task, known)]
    return places[0] == places[1] and (task.form, splits) == (known.form, known.splits)


@cache
def _table() -> dict[str, Any]:
    return read_json(TABLE)["tasks"]


def _listed(task: Task, entry: dict[str, Any], documents: str) -> Sizes:
    def texts(of: dict[str, Any], characters: str = "characters") -> Texts:
        return Texts(of["rows"], tuple(of[characters]))

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
    except (BiphaseError, OSError):  # to be said by the verb that needs it; here it is only not known
        return None
    if task.family == "IR":
        sides = [[pair.query for pair in examples.train], [pair.document for pair in examples.train]]
        searched = [examples.validation.queries, examples.test.queries, examples.validation.library.texts]
    else:
        sides = [[_text(row) for row in examples.train]]
        searched = [[_text(row) for row in part] for part in (examples.validation, examples.test)]
    train, scored = (tuple(_measured(texts) for texts in some if texts) for some in (sides, searched))
    return Sizes(train, scored)


def _text(row: Any) -> str:
    if hasattr(row, "words"):
        return " ".join(row.words)
    return row.before + row.context if hasattr(row, "context") else row.text


def _measured(texts: Iterable[str]) -> Texts:
    lengths = [len(text) for text in texts]
    return Texts(len(lengths), deciles(lengths))


def deciles(lengths: Iterable[float]) -> tuple[float, ...]:
    """The mean of each tenth, smallest first; of fewer than ten numbers, the numbers."""
    each = sorted(lengths)
    parts = min(10, len(each))
    cuts = [len(each) * n // parts for n in range(parts + 1)]
    return tuple(round(sum(each[a:b]) / (b - a)) for a, b in pairwise(cuts))
