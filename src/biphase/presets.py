"""Named values: model sizes, ModernBERT's shapes, corpora, devices.

210m, 610m and 1b are those of arXiv:2507.00994, exactly; 2b is EuroBERT's largest. Smaller ones are named by the parameters of their
blocks, for laptops and single-GPU studies, in the proportions of the 210m: heads of width 64, as many key as query
heads, a feed-forward layer four times as wide.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from biphase.errors import SpecError, nearest
from biphase.records import ByName
from biphase.specs import BPE, Blend, Config, Corpus, Pretrain, Pretrained, Size

SIZES = ByName(
    "size",
    {
        size.name: size
        for size in (
            Size("1m", layers=4, hidden=128, heads=2, kv_heads=2, ffn=512, precision="fp32"),
            Size("2m", layers=4, hidden=192, heads=3, kv_heads=3, ffn=768, precision="fp32"),
            Size("8m", layers=8, hidden=256, heads=4, kv_heads=4, ffn=1024, precision="fp32"),
            Size("30m", layers=7, hidden=512, heads=8, kv_heads=8, ffn=2048, precision="fp32"),
            Size("60m", layers=9, hidden=640, heads=10, kv_heads=10, ffn=2560),
            Size("210m", layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072),
            Size("610m", layers=26, hidden=1152, heads=18, kv_heads=6, ffn=4096),
            Size("1b", layers=28, hidden=1728, heads=18, kv_heads=6, ffn=5120),
            Size("2b", layers=32, hidden=2304, heads=18, kv_heads=6, ffn=6144),
        )
    },
)


def modernbert(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    precision: Literal["fp32", "bf16"] = "bf16",
    local_rope_base: float = 10_000.0,
    **more: Any,
) -> Config:
    """Return a model in ModernBERT's architecture; `more` are further fields of its config.json.

    GeGLU, LayerNorm, tied embeddings; every third layer attends to the whole text, the others within 64 tokens to
    either side (CLM: 64 tokens back), with a RoPE base of their own.
    """
    bases = {"full_attention": 160_000.0, "sliding_attention": local_rope_base}
    fields = {
        "model_type": "modernbert",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "max_position_embeddings": 8_192,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
        },
    }
    return Config(name, fields | more, precision)


# ModernBERT's two sizes (arXiv:2412.13663) and Ettin's six (arXiv:2507.11412), whose windowed layers have the same RoPE
# base as the others. The smaller ones, in the same proportions, are named by the parameters of their blocks.
_ETTIN: dict[str, Any] = {"local_rope_base": 160_000.0, "max_position_embeddings": 7_999}
CONFIGS = ByName(
    "config",
    {
        config.name: config
        for config in (
            modernbert("modernbert-1m", layers=7, hidden=128, heads=2, ffn=192, precision="fp32"),
            modernbert("modernbert-8m", layers=10, hidden=320, heads=5, ffn=480, precision="fp32"),
            modernbert("modernbert-30m", layers=13, hidden=512, heads=8, ffn=768, precision="fp32"),
            modernbert("modernbert-base", layers=22, hidden=768, heads=12, ffn=1_152),
            modernbert("modernbert-large", layers=28, hidden=1_024, heads=16, ffn=2_624),
            modernbert("ettin-17m", layers=7, hidden=256, heads=4, ffn=384, **_ETTIN),
            modernbert("ettin-32m", layers=10, hidden=384, heads=6, ffn=576, **_ETTIN),
            modernbert("ettin-68m", layers=19, hidden=512, heads=8, ffn=768, **_ETTIN),
            modernbert("ettin-150m", layers=22, hidden=768, heads=12, ffn=1_152, **_ETTIN),
            modernbert("ettin-400m", layers=28, hidden=1_024, heads=16, ffn=2_624, **_ETTIN),
            modernbert("ettin-1b", layers=28, hidden=1_792, heads=28, ffn=3_840, **_ETTIN),
        )
    },
)

STARTS: ByName[Size | Config] = ByName("size", {**SIZES, **CONFIGS})

# Llama 3's vocabulary with a mask token in a reserved slot (128002).
LLAMA3 = Pretrained(
    "EuroBERT/EuroBERT-210m", revision="39b51e15dd1f1a06f58b5cbf6a8a188cec60bd0e", vocab=128_256
)

_FINEWEB_EDU = "hf://HuggingFaceFW/fineweb-edu@87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"

CORPORA = ByName(
    "corpus",
    {
        corpus.name: corpus
        for corpus in (
            Corpus("fineweb-edu", f"{_FINEWEB_EDU}/sample/100BT/*.parquet", LLAMA3),
            Corpus("fineweb-edu-10b", f"{_FINEWEB_EDU}/sample/10BT/*.parquet", LLAMA3),
            Corpus("builtin", "builtin:corpus.jsonl.zst", BPE(2_048), heldout="heldout.jsonl.zst"),
        )
    },
)

# Approximate training tokens of these corpora, used until a store has counted them: the sample's name, or a count.
TOKENS = {"fineweb-edu": 100_000_000_000, "fineweb-edu-10b": 10_000_000_000, "builtin": 1_424_968}

# Dense peak of one device in FLOP/s: bf16 for GPUs, fp32 for the CPU (measured on two AVX2 cores).
DEVICES = ByName(
    "device",
    {
        "h200": 989e12,
        "h100": 989e12,
        "a100": 312e12,
        "mi250x-gcd": 191.5e12,
        "l40s": 362e12,
        "rtx4090": 165e12,
        "cpu": 50e9,
    },
)


def corpus_of(run: Pretrain, corpus: str | Corpus | Blend = "") -> Corpus | Blend:
    """Return the corpus or blend of a run, or of one of its stages, with records in place of names."""
    corpus = corpus or run.corpus
    if isinstance(corpus, Blend):
        return replace(corpus, sources=tuple(shares_of(corpus, run).items()))
    return next(iter(shares_of(corpus, run)))


def shares_of(corpus: str | Corpus | Blend, run: Pretrain) -> dict[Corpus, float]:
    """Return the corpora that a run reads where it reads `corpus`, each with its share of the rows.

    The weights of a blend with a temperature are no shares; a plan has those in its place.
    """
    shares: dict[Corpus, float] = {}
    for source, share in corpus.sources if isinstance(corpus, Blend) else ((corpus, 1.0),):
        if isinstance(source, str) and source not in CORPORA:
            raise SpecError(
                f"Pretrain {run.name!r}: there is no corpus {source!r}; {nearest(source, CORPORA)} "
                "Or describe yours: corpus=Corpus('mine', './folder', BPE(32_000))"
            )
        shares[CORPORA[source] if isinstance(source, str) else source] = share
    return shares


def sources_of(run: Pretrain) -> tuple[Corpus, ...]:
    """Return every corpus that is read up to the end of a run; before others those that train the tokenizer."""
    every = (run.corpus, *(corpus for _, corpus in run.reads))
    found = dict.fromkeys(source for corpus in every for source in shares_of(corpus, run))
    if len({corpus.name for corpus in found}) < len(found):
        raise SpecError(f"Pretrain {run.name!r}: two corpora that it reads have one name; give each its own")
    return tuple(
        sorted(found, key=lambda corpus: isinstance(corpus.tokenizer, BPE) and bool(corpus.tokenizer.on))
    )
