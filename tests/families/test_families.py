"""Every decoder family of transformers, tiny, goes the whole way to an encoder, or is refused with its reason.

The campaign takes all of them and writes docs/families.md. Here a few stand for the rest: plain decoders, windows,
caps, sinks, scaled logits, learned positions, biases; experts and recurrences, which are refused; and encoders.
"""

from __future__ import annotations

import shutil
import traceback

import pytest
from families.build import FAMILIES, Family
from families.checks import examine
from families.table import rows, write

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
