"""Costs against the published figures, against counting by hand, and honest about what is not known."""

import json
import struct
from dataclasses import replace

import pytest

from biphase.errors import SpecError
from biphase.keys import Identities
from biphase.presets import DEVICES, LLAMA3, SIZES
from biphase.specs import (
    BPE,
    CLM,
    MLM,
    MNTP,
    WSD,
    Chunks,
    Corpus,
    Cosine,
    Hub,
    Linear,
    Pretrain,
    Pretrained,
    Rows,
    Stage,
    Study,
)
from biphase.study.costs import (
    costs,
    flops_per_token,
    job_flops,
    peak_of,
    shape_of,
)
from biphase.study.plan import make_plan

OUTSIDE = Identities(data=lambda run: "data", hub=lambda hub: hub.source)
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
    assert shape is not None
    assert shape.parameters == trained
    assert shape.vocab == LLAMA3.vocab
    assert flops_per_token(shape, Rows(2048), causal=False, labelled=1) / 1e9 == pytest.approx(
        giga, abs=0.0006
    )


@pytest.mark.parametrize(("length", "shortest"), [(2048, 12), (64, 12), (24, 12), (25, 12), (10, 1)])
def test_the_attended_length_of_chunks_is_the_mean_over_all_cuts(length, shortest):
    cuts = range(shortest, length - shortest + 1)
    mean = sum((r * r + (length - r) ** 2) / length for r in cuts) / len(cuts)
    assert Chunks(length, shortest).attended_length == pytest.approx(mean, rel=1e-12)


def test_the_attended_length_of_rows_is_the_row():
    assert Rows(64).attended_length == Rows(64, document_mask=True).attended_length == 64


@pytest.mark.parametrize(
    ("objective", "packing", "share"),
    [
        (CLM(), Rows(64), 63 / 64),
        (CLM(), Chunks(64), 62 / 64),
        (MLM(0.4), Rows(64), 0.4),
        (MLM(0.4), Chunks(64), 0.4),
        (MNTP(0.4), Chunks(64), 0.4 * 62 / 64),
        (MLM(Linear(0.4, 0.2, 4)), Rows(64), (0.4 + 0.35 + 0.3 + 0.25 + 6 * 0.2) / 10),
    ],
)
def test_the_head_runs_where_there_are_labels(objective, packing, share):
    assert objective.labelled_share(packing, 0, 10) == pytest.approx(share, rel=1e-12)


@pytest.mark.parametrize("way", [Linear(0.4, 0.2, 7), Cosine(0.5, 0.15, 7)])
@pytest.mark.parametrize(("first", "until"), [(0, 1), (0, 20), (3, 9), (7, 12), (8, 9), (2, 5)])
def test_the_mean_ratio_is_the_mean_of_what_training_does(way, first, until):
    each = [MLM(way).ratio_at(step) for step in range(first, until)]
    assert way.mean(first, until) == pytest.approx(sum(each) / len(each), rel=1e-12)


def test_a_piece_costs_what_its_parts_cost_by_hand():
    size = SIZES["1m"]
    matrices = 4 * (4 * 128 * 128 + 3 * 128 * 512)
    plan = plan_of(run((CLM(), 3), (MLM(0.4), 5)))
    first, second = plan.jobs.values()
    shape = shape_of(first.run)
    assert shape is not None
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


def test_a_ratio_schedule_is_counted_from_its_act_even_when_the_piece_begins_later():
    falling = MLM(Linear(0.4, 0.2, 10))
    plan = plan_of(run((CLM(), 3), (falling, 10), keep=(8,)))
    last = list(plan.jobs.values())[-1]
    shape = shape_of(last.run)
    assert shape is not None
    share = sum(falling.ratio_at(step) for step in range(5, 10)) / 5
    expected = last.tokens * flops_per_token(shape, Rows(64), causal=False, labelled=share)
    assert job_flops(last, shape) == pytest.approx(expected)


def test_a_run_that_goes_on_has_the_shape_it_started_with():
    first = run((CLM(), 3))
    assert shape_of(run((CLM(), 3), start=first, name="then")) == shape_of(first)


def test_a_tied_head_costs_work_and_no_memory():
    tied, untied = (shape_of(run((CLM(), 3), start=replace(SIZES["1m"], tied=t))) for t in (True, False))
    assert tied is not None
    assert untied is not None
    assert untied.parameters - tied.parameters == 1_000 * 128
    work = [flops_per_token(shape, Rows(64), causal=True, labelled=1) for shape in (tied, untied)]
    assert work[0] == work[1]


def test_device_hours_are_work_over_sustained_speed():
    whole = costs(plan_of(run((CLM(), 3))))
    assert whole.flops is not None
    assert whole.device_hours("h200", 0.5) == pytest.approx(whole.flops / (DEVICES["h200"] * 0.5) / 3600)


def test_an_unknown_device_is_refused_with_the_nearest():
    with pytest.raises(SpecError, match="there is no device 'h20'; did you mean 'h200'"):
        peak_of("h20")


@pytest.mark.parametrize("efficiency", [0, -1, 1.5, 40])
def test_an_impossible_efficiency_is_refused(efficiency):
    with pytest.raises(SpecError, match=r"an efficiency lies between 0 and 1.*0\.4 is good"):
        costs(plan_of(run((CLM(), 3)))).device_hours("h200", efficiency)


def test_an_unknown_vocabulary_is_said():
    corpus = Corpus("mine", "./texts", Pretrained("./tokenizer.json"))
    whole = costs(plan_of(run((CLM(), 3), corpus=corpus)))
    assert whole.notes == ("the vocabulary of mine is not known: head and embedding not counted",)
    assert whole.disk == 12 * SIZES["1m"].block_parameters


def test_document_masking_is_said_to_be_an_upper_bound():
    whole = costs(plan_of(run((CLM(), 3), packing=Rows(64, document_mask=True))))
    assert whole.notes == ("document masking depends on the text: FLOPs are an upper bound",)


def test_a_hub_model_that_is_not_here_is_said_to_be_unknown():
    theirs = Corpus("theirs", "./texts", Pretrained("org/model", revision="1"))
    far = run((CLM(), 3), start=Hub("org/model", revision="1"), name="far", corpus=theirs)
    then = run((CLM(), 3), start=far, name="then", corpus=theirs)
    whole = costs(plan_of(far, then, run((CLM(), 3))))
    assert whole.notes == ("the shape of org/model is not known here: FLOPs and disk are left out",)
    assert (whole.flops, whole.disk) == (None, None)
    assert whole.tokens == 9 * 128
    assert whole.device_hours("h200", 0.4) is None


def model_folder(folder, *, tied, **config):
    """A model's configuration and the header of its weights, in a Llama's names."""
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
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    text = json.dumps({"__metadata__": {}} | header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    said = {"num_hidden_layers": layers, "num_attention_heads": 2, "hidden_size": hidden, "vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(said | config))
    return run((CLM(), 3), start=Hub(str(folder)), precision="fp32")


@pytest.mark.parametrize("tied", [True, False])
def test_a_local_model_is_measured_by_its_files(tmp_path, tied):
    shape = shape_of(model_folder(tmp_path, tied=tied))
    assert shape is not None
    assert shape.matrices == 2 * (8 * 8 + 4 * 8 + 16 * 8)
    assert shape.blocks == shape.matrices + 2 * 8 + 8 + 10 * 8
    assert (shape.layers, shape.width, shape.vocab, shape.tied) == (2, 8, 50, tied)
    assert shape.parameters == shape.blocks + 50 * 8 * (1 if tied else 2)


def test_a_stated_head_width_counts(tmp_path):
    shape = shape_of(model_folder(tmp_path, tied=True, head_dim=16))
    assert shape is not None
    assert shape.width == 32


def test_a_folder_that_cannot_be_measured_is_unknown(tmp_path):
    made = model_folder(tmp_path, tied=True)
    weights = tmp_path / "model.safetensors"
    for damage in (b"", struct.pack("<Q", 10**9), struct.pack("<Q", 2) + b"no"):
        weights.write_bytes(damage)
        assert shape_of(made) is None
    weights.unlink()
    assert shape_of(made) is None
    (tmp_path / "config.json").write_text("{}")
    assert shape_of(made) is None
    (tmp_path / "config.json").write_text("[]")
    assert shape_of(made) is None
    (tmp_path / "config.json").unlink()
    assert shape_of(made) is None
