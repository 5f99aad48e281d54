"""The named values are the paper's, to the unit."""

import pytest

from biphase.catalog import CATALOG
from biphase.errors import SpecError
from biphase.presets import CORPORA, DEVICES, LLAMA3, SIZES, corpus_of
from biphase.specs import BPE, CLM, Corpus, Pretrain, Stage

# Blocks and final norm, as counted in the reference implementation's released shapes.
EXACT = {"210m": 113_265_408, "610m": 460_123_776, "1b": 966_230_208, "2b": 1_812_089_088}
WITH_EMBEDDING = {"210m": 211_766_016, "610m": 607_874_688, "1b": 1_187_856_576}  # as published


@pytest.mark.parametrize("name", EXACT)
def test_large_sizes_are_exact(name):
    size = SIZES[name]
    assert size.block_parameters == EXACT[name]
    assert not size.tied
    assert size.precision == "bf16"
    if name in WITH_EMBEDDING:
        assert size.block_parameters + LLAMA3.vocab * size.hidden == WITH_EMBEDDING[name]


@pytest.mark.parametrize("name", [name for name in SIZES if name not in EXACT])
def test_small_sizes_are_named_by_their_blocks_and_keep_the_proportions(name):
    size = SIZES[name]
    assert size.block_parameters == pytest.approx(float(name[:-1]) * 1e6, rel=0.2)
    assert size.hidden == 64 * size.heads
    assert size.kv_heads == size.heads
    assert size.ffn == 4 * size.hidden
    assert size.precision == ("bf16" if name == "60m" else "fp32")


@pytest.mark.parametrize(
    ("table", "typed", "meant"),
    [
        (SIZES, "1mm", "1m"),
        (CATALOG, "sst-2", "sst2"),
        (CORPORA, "fineweb", "fineweb-edu"),
        (DEVICES, "h20", "h200"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(table, typed, meant):
    with pytest.raises(SpecError, match=f"{typed!r}; did you mean {meant!r}"):
        table[typed]
    assert table.get(typed) is None
    assert typed not in table
    assert table[meant] == dict(table)[meant]


def named(corpus):
    return Pretrain("run", SIZES["610m"], corpus, (Stage(CLM(), 9_000),))


def test_a_corpus_is_found_by_its_name_or_is_itself():
    mine = Corpus("mine", "./texts", BPE(1_000))
    assert corpus_of(named("fineweb-edu")) is CORPORA["fineweb-edu"]
    assert corpus_of(named(mine)) is mine
    with pytest.raises(
        SpecError, match=r"'run'.*'fineweb'; did you mean 'fineweb-edu'.*corpus=Corpus\('mine'"
    ):
        corpus_of(named("fineweb"))
