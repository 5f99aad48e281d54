"""Every decoder family of transformers, tiny, goes the whole way to an encoder, or is refused with its reason.

The campaign takes all of them and writes docs/families.md. Here a few stand for the rest: plain decoders, windows,
caps, sinks, scaled logits, learned positions, biases; experts and recurrences, which are refused; and encoders.
"""

import shutil
import traceback
from collections import Counter
from pathlib import Path

import pytest
import transformers
from families.build import FAMILIES, Family
from families.checks import examine

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BECAME = ("passed", "not exported", "refused", "not built")
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

ENOUGH = 40
DECODERS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "cohere2", "granite_swa", "stablelm",
)  # fmt: skip
ENCODERS = ("bert", "roberta", "modernbert", "eurobert")
PASS = [Family(name) for name in DECODERS] + [Family(name, masked=True) for name in ENCODERS]
REFUSED = {
    "mixtral": "mixture of experts",
    "gpt_oss": "mixture of experts",
    "mamba": "not attention",
    "bloom": "attention",
}


def write(verdicts):
    """Write the page of every family."""
    counts = Counter(dict.fromkeys(BECAME, 0))
    counts.update(verdict.became for verdict in verdicts)
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|", *(verdict.row for verdict in verdicts)]
    text = INTRODUCTION.format(version=transformers.__version__, **counts)
    PAGE.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


def rows():
    """Of each family of the page, its row."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


@pytest.mark.parametrize("family", PASS, ids=str)
def test_a_family_goes_the_whole_way(family, corpora, tmp_path):
    verdict = examine(family, corpora[family.masked], tmp_path)
    assert verdict.became == "passed", verdict.why
    assert rows()[str(family)] == verdict.row


@pytest.mark.parametrize(("name", "why"), REFUSED.items(), ids=str)
def test_an_unsuited_family_is_refused(name, why, corpora, tmp_path):
    verdict = examine(Family(name), corpora[False], tmp_path)
    assert verdict.became == "refused"
    assert why in verdict.why
    assert rows()[name] == verdict.row


def test_the_page_tells_of_every_family():
    assert {str(family) for family in FAMILIES} <= set(rows())


@pytest.mark.campaign
def test_every_family(corpora, tmp_path):
    verdicts, failed = [], []
    for number, family in enumerate(FAMILIES):
        folder = tmp_path / str(number)
        try:
            verdicts.append(examine(family, corpora[family.masked], folder))
        except Exception as wrong:  # one family that fails must not hide the others
            last = traceback.extract_tb(wrong.__traceback__)[-1]
            failed.append(f"{family}: {type(wrong).__name__}: {wrong} ({last.filename}:{last.lineno})")
        shutil.rmtree(folder, ignore_errors=True)
    assert not failed, "\n".join(failed)
    write(verdicts)
    assert sum(verdict.became == "passed" for verdict in verdicts) >= ENOUGH
