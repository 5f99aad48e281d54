"""What became of each family, as the table of docs/families.md: written by the tests, and read by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import transformers

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
Became = Literal["passed", "not exported", "refused", "not built"]
HEADS = ("family", "class", "what became of it", "exported as", "why")

INTRODUCTION = """# Which families of models can be adapted

A tiny random model of every type in transformers' mapping of causal language models, with every kind of layer that the
family has, goes the whole way; so do four masked language models. Nothing in biphase names a family: this page is
what the probes and the tests find. It is written by `tests/families/test_families.py` (transformers {version}).

- **passed** ({passed}): its logits are those of transformers' own forward; told to be causal it sees no later token and
  told to read both ways it does, at every position, exactly as far as its windows reach; packed texts are blind to one
  another and read as each alone; 30 steps of masked training bring the loss down; killed and begun again it ends in
  the same bits; exported, plain transformers reads the folder with the same hidden states, and it is a start again.
  Where a family has windows and its class differs without them, both classes are named.
- **not exported** ({not exported}): all of that but the export, which transformers' classes do not allow.
- **refused** ({refused}): before any training, in one line.
- **not built** ({not built}): not a model of text alone.

"""


@dataclass(frozen=True)
class Verdict:
    """What became of a family."""

    family: str
    kind: str  # the class of its model
    became: Became
    why: str = ""
    exported: str = ""  # the class it was written as

    @property
    def row(self) -> str:
        cells = (self.family, self.kind, self.became, self.exported, self.why)
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def write(verdicts: Iterable[Verdict], page: Path = PAGE) -> None:
    verdicts = list(verdicts)
    counts = Counter(dict.fromkeys(("passed", "not exported", "refused", "not built"), 0))
    counts.update(verdict.became for verdict in verdicts)
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", *(verdict.row for verdict in verdicts)]
    text = INTRODUCTION.format(version=transformers.__version__, **counts)
    page.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


def rows(page: Path = PAGE) -> dict[str, str]:
    """Of each family of the page, its row."""
    lines = [line for line in page.read_text("utf-8").splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}
