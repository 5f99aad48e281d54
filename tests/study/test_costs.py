"""FLOPs, tokens and bytes: against published figures, by hand, and unknown where they are not known."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from biphase import (
    BPE,
    CATALOG,
    CLM,
    MLM,
    MNTP,
    WSD,
    Chunks,
    Corpus,
    Cosine,
    Hub,
    Linear,
    Mix,
    Pretrain,
    Rows,
    Stage,
    Study,
)
from biphase.keys import Identities
from biphase.presets import LLAMA3, SIZES
from biphase.study import costs as costs_module
from biphase.study.costs import (
    TextLengths,
    costs,
    flops_per_token,
    job_flops,
    shape_of,
    sizes_of,
)
from biphase.study.plan import make_plan

OUTSIDE = Identities(data=lambda corpus: "data", hub=lambda hub: hub.source)
CORPUS = Corpus("mine", "./texts", BPE(1_000))


def run(*stages, start=SIZES["1m"], name="run", **fields):
    said = {"corpus": CORPUS, "batch_tokens": 128, "packing": Rows(64), "schedule": WSD(warmup=0, decay=0)}
    return Pretrain(name, start, stages=tuple(Stage(*stage) for stage in stages), **(said | fields))


def plan_of(*runs):
    return make_plan(Study("s", runs), OUTSIDE)


@pytest.mark.parametrize(
    ("size", "giga", "trained"),
    [
        ("210m", 1.497, 310_266_624),
        ("610m", 4.383, 755_625_600),
        ("1b", 8.316, 1_409_482_944),
        ("2b", 14.457, 2_403_092_736),
    ],
)
def test_flops_and_parameters_are_the_published_ones(size, giga, trained):
    shape = shape_of(Pretrain("p", SIZES[size], "fineweb-edu", (Stage(CLM(), 9_000),)))
    assert shape.parameters == trained
    assert shape.vocab == LLAMA3.vocab
    assert flops_per_token(shape, Rows(2048), causal=False, labelled=1) / 1e9 == pytest.approx(
        giga, abs=0.0006
    )


@pytest.mark.parametrize(("length", "shortest"), [(2048, 12), (25, 12), (10, 1)])
def test_the_attended_length_of_chunks_is_the_mean_over_all_cuts(length, shortest):
    cuts = range(shortest, length - shortest + 1)
    mean = sum((r * r + (length - r) ** 2) / length for r in cuts) / len(cuts)
    assert Chunks(length, shortest).attended_length == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize(
    ("objective", "packing", "share"),
    [
        (CLM(), Rows(64), 63 / 64),
        (MNTP(0.4), Chunks(64), 0.4 * 62 / 64),
        (MLM(Linear(0.4, 0.2, 4)), Rows(64), (0.4 + 0.35 + 0.3 + 0.25 + 6 * 0.2) / 10),
        (
            Mix({MLM(0.2): Linear(1, 0, 4), MLM(0.4): Linear(0, 1, 4)}),
            Rows(64),
            (0.2 + 0.25 + 0.3 + 0.35 + 6 * 0.4) / 10,
        ),
    ],
)
def test_the_head_runs_where_there_are_labels(objective, packing, share):
    assert objective.labelled_share(packing, 0, 10) == pytest.approx(share, rel=1e-12)


def test_the_flops_of_a_mixture_are_those_of_its_rows():
    mix = Mix({CLM(): 3, MLM(0.4): 1})
    jobs = [next(iter(plan_of(run((one, 4))).jobs.values())) for one in (mix, CLM(), MLM(0.4))]
    flops, causal, masked = (job_flops(job, shape_of(job.run)) for job in jobs)
    assert flops == pytest.approx(0.75 * causal + 0.25 * masked)


@pytest.mark.parametrize("way", [Linear(0.4, 0.2, 7), Cosine(0.5, 0.15, 7)])
@pytest.mark.parametrize(("first", "until"), [(0, 20), (8, 9)])
def test_the_mean_ratio_is_the_mean_of_what_training_does(way, first, until):
    each = [MLM(way).ratio_at(step) for step in range(first, until)]
    assert way.mean(first, until) == pytest.approx(sum(each) / len(each), rel=1e-12)


def test_flops_of_a_job_are_the_sum_by_hand():
    size = SIZES["1m"]
    matrices = 4 * (4 * 128 * 128 + 3 * 128 * 512)
    plan = plan_of(run((CLM(), 3), (MLM(0.4), 5)))
    first, second = plan.jobs.values()
    shape = shape_of(first.run)
    assert (shape.matrices, shape.blocks) == (matrices, size.block_parameters)
    clm = 3 * 128 * 3 * (2 * matrices + 4 * 4 * 128 * 64 / 2 + 2 * 1_000 * 128 * 63 / 64)
    mlm = 5 * 128 * 3 * (2 * matrices + 4 * 4 * 128 * 64 + 2 * 1_000 * 128 * 0.4)
    assert job_flops(first, shape) == pytest.approx(clm)
    assert job_flops(second, shape) == pytest.approx(mlm)
    whole = costs(plan)
    assert whole.flops == pytest.approx(clm + mlm)
    assert whole.tokens == 8 * 128
    assert whole.disk == 2 * 12 * (size.block_parameters + 2 * 1_000 * 128)
    assert whole.notes == ()
    assert costs(plan, [second.key]).flops == pytest.approx(mlm)


def model_folder(folder, *, tied, **config):
    """A model's configuration and weights, in a Llama's names."""
    vocab, hidden, kv, ffn, layers = 50, 8, 4, 16, 2
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.q_proj.weight": [hidden, hidden],
            f"model.layers.{layer}.k_proj.weight": [kv, hidden],
            f"model.layers.{layer}.q_proj.bias": [hidden],
            f"model.layers.{layer}.up.weight": [ffn, hidden],
        }
    if not tied:
        shapes["lm_head.weight"] = [vocab, hidden]
    shapes["model.position_embeddings.weight"] = [10, hidden]
    save_file(
        {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors"
    )
    said = {"num_hidden_layers": layers, "num_attention_heads": 2, "hidden_size": hidden, "vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(said | config))
    return run((CLM(), 3), start=Hub(str(folder)), precision="fp32")


@pytest.mark.parametrize("tied", [True, False])
def test_a_local_model_is_measured_by_its_files(tmp_path, tied):
    shape = shape_of(model_folder(tmp_path, tied=tied))
    assert shape.matrices == 2 * (8 * 8 + 4 * 8 + 16 * 8)
    assert shape.blocks == shape.matrices + 2 * 8 + 8 + 10 * 8
    assert (shape.layers, shape.width, shape.vocab, shape.tied) == (2, 8, 50, tied)
    assert shape.parameters == shape.blocks + 50 * 8 * (1 if tied else 2)


# ---------------------------------------------------------------- text lengths of tasks


@pytest.mark.parametrize("name", ["sources-mini", "wikiann-mini", "squadshifts-mini", "scifact-mini"])
def test_the_table_says_what_reading_the_files_finds(name):
    for documents in ("judged", "all"):
        listed, read = sizes_of(CATALOG[name], documents), costs_module._read(CATALOG[name], documents)
        assert listed == read


def test_tokens_are_cut_at_the_limit_and_windows_cover_all():
    texts = TextLengths(10, (45.0, 4_500.0))  # 11 and 1,001 tokens
    assert texts.tokens(128_256, 2_028) == pytest.approx(506)
    assert texts.tokens(128_256, 500) == pytest.approx((11 + 500) / 2)
    count, mean = texts.windows(128_256, 500)
    assert count == (1 + 3) / 2  # 500 + 375 + 126 more
    assert mean == pytest.approx((11 + 1_001 + 2 * 125) / 4)
    assert texts.windows(128_256, 2_028) == (1, pytest.approx(506))
