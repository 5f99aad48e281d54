"""What `biphase adapt` makes of what is said: a study of one run, with defaults that work."""

import json
from dataclasses import replace

import pytest

from biphase import MLM, MNTP, WSD, AdamW, Chunks, Finetune, Hub, LoRA, Pretrained, Stage
from biphase.catalog import TASKS
from biphase.errors import SpecError
from biphase.records import decode, encode
from biphase.store import Store
from biphase.study.build import AdaptOptions, CorpusOptions, adaptation

NO_TEXT = CorpusOptions("")


@pytest.fixture
def folder(shards, tmp_path):
    """A model's configuration and its tokenizer: no weights are needed to say what will be done."""
    place = tmp_path / "decoder"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 100}))
    words = (shards / "tokenizer" / "tokenizer.json").read_text()
    (place / "tokenizer.json").write_text(words)
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_text|>"}))
    return place


@pytest.fixture
def asked(folder, corpus, tmp_path):
    """The study of some wishes."""

    def make(*, text=None, gguf="", windows="symmetric", finetune=None, **wishes):
        said, text = AdaptOptions(**({"steps": 100} | wishes)), text or CorpusOptions(corpus.source)
        return adaptation(
            str(folder), text, said, Store(tmp_path / "store"), gguf=gguf, windows=windows, finetune=finetune
        )

    return make


def test_what_is_not_said_is_what_works(asked, folder, corpus):
    (run,) = asked().runs
    assert run.name == "decoder-mlm"
    assert run.start == Hub(str(folder))
    assert run.stages == (Stage(MLM(0.4), 100),)
    assert run.schedule == WSD(2e-4, warmup=5, decay=20)
    assert run.packing == Chunks(64), "the largest power of two that the model reads"
    assert run.batch_tokens == 32 * 64
    assert (run.adapter, run.freeze, run.optimizer, run.seed) == (None, "nothing", AdamW(), 42)
    assert run.corpus.tokenizer == Pretrained(str(folder))
    assert (run.corpus.source, run.corpus.bos) == (corpus.source, False)
    assert run.heldout_every == 20


def test_a_long_context_is_not_used_whole_unless_asked_for(asked, folder):
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 131072}')
    assert asked().runs[0].packing.length == 1_024
    long = asked(length=16_384).runs[0]
    assert long.packing.length == 16_384
    assert long.heldout_tokens >= 16_384, "at least one row is measured"


@pytest.mark.parametrize("field", ["n_positions", "max_sequence_length"])
def test_the_context_has_other_names_too(asked, folder, field):
    kind = {"n_positions": "gpt2", "max_sequence_length": "llama"}[field]
    (folder / "config.json").write_text(json.dumps({"model_type": kind, field: 48}))
    assert asked().runs[0].packing.length == (32 if field == "n_positions" else 1_024)


@pytest.mark.parametrize(
    ("wishes", "field", "value"),
    [
        ({"objective": "mntp", "ratio": 0.2}, "stages", (Stage(MNTP(0.2), 100),)),
        ({"rope_base": 5e4}, "stages", (Stage(MLM(0.4), 100, rope_base=5e4),)),
        ({"lr": 1e-3, "warmup": 0.1, "decay": 0.5}, "schedule", WSD(1e-3, 10, 50)),
        ({"lora": 4}, "adapter", LoRA(rank=4, alpha=8)),
        ({"lora": 4}, "schedule", WSD(1e-3, 5, 20)),
        ({"lora": 4, "lr": 3e-4}, "schedule", WSD(3e-4, 5, 20)),
        ({"freeze_embeddings": True}, "freeze", "embeddings"),
        ({"layer_decay": 0.9}, "optimizer", AdamW(layer_decay=0.9)),
        ({"length": 32, "batch_rows": 3}, "batch_tokens", 96),
        ({"precision": "bf16"}, "precision", "bf16"),
        ({"seed": 3}, "seed", 3),
        ({"heldout_tokens": 2_000}, "heldout_tokens", 2_000),
        ({"steps": 3, "heldout_tokens": 512}, "heldout_every", 1),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_wish_has_its_field(asked, wishes, field, value):
    assert getattr(asked(**wishes).runs[0], field) == value


@pytest.mark.parametrize(
    ("steps", "rows", "every", "tokens"),
    [
        (1_000, 32, 200, 8_192),  # as ever
        (20, 32, 4, 2_048),  # 40,960 tokens to train on: measured on fewer
        (6, 2, 6, 256),  # 768 tokens: at its ends alone, on the fewest
    ],
)
def test_held_out_losses_cost_little_beside_a_short_run(asked, steps, rows, every, tokens):
    run = asked(steps=steps, batch_rows=rows).runs[0]
    assert (run.heldout_every, run.heldout_tokens) == (every, tokens)
    said = asked(steps=steps, batch_rows=rows, heldout_tokens=4_096).runs[0]
    assert (said.heldout_every, said.heldout_tokens) == (max(1, steps // 5), 4_096), "what is said holds"


def test_another_wish_is_another_study_and_the_same_is_the_same(asked):
    names = [asked().name, asked().name, asked(seed=1).name, asked(windows="full").name]
    assert len(set(names)) == 3
    assert names[0] == names[1]
    assert names[0].startswith("adapt-decoder-")


def test_the_study_can_be_written_down_and_read(asked):
    study = asked(lora=2, rope_base=5e4, windows="full", finetune=Finetune(TASKS[:1]))
    assert decode(json.loads(json.dumps(encode(study)))) == study


def test_with_tasks_the_model_as_it_was_stands_beside(asked, folder):
    before, after = asked(finetune=Finetune(TASKS[:1])).runs
    assert (before.name, before.start, before.stages) == ("decoder", Hub(str(folder)), ())
    assert after.start == before.start


@pytest.mark.parametrize(("config", "begins"), [({}, False), ({"bos_token": "<|pad|>"}, True)])
def test_a_document_begins_with_a_token_only_where_the_template_says_so(asked, folder, config, begins):
    named = {"eos_token": "<|end_of_text|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    assert asked().runs[0].corpus.bos is False, "a name alone puts nothing there"
    words = json.loads((folder / "tokenizer.json").read_text())
    begin, text = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    words["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, text],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [2], "tokens": ["<|pad|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(words))
    assert asked().runs[0].corpus.bos is begins


def test_places_are_said_so_that_they_can_be_read_from_elsewhere(asked, corpus, monkeypatch):
    from pathlib import Path

    monkeypatch.chdir(Path(corpus.source).parent)
    for said in ("./train.jsonl", "train.jsonl", "./tr*.jsonl"):
        source = asked(text=CorpusOptions(said)).runs[0].corpus.source
        assert source == str(Path(corpus.source).with_name(Path(said).name))
    assert asked(text=CorpusOptions("builtin")).runs[0].corpus.source.startswith("builtin:")
    some = asked(text=CorpusOptions("train.jsonl", "body", "heldout.jsonl", 500)).runs[0].corpus
    assert (some.text, some.heldout, some.tokens) == ("body", "heldout.jsonl", 500)


def test_a_state_is_continued_with_new_moments_from_the_beginning_of_its_text(plan, finished):
    key = plan.results["clm"]

    def on(text=NO_TEXT, **wishes):
        said = AdaptOptions(**({"steps": 10} | wishes))
        return adaptation(key[:8], text, said, finished, gguf="", windows="symmetric", finetune=None)

    (run,) = on().runs
    assert run.name == "clm-mlm"
    assert run.start == replace(plan.study.runs[0], keep=())
    assert (run.optimizer_state, run.data, run.corpus) == ("reset", "restart", run.start.corpus)
    assert (run.packing, run.batch_tokens) == (run.start.packing, 32 * 32)
    assert on(length=24).runs[0].packing == Chunks(24)
    with pytest.raises(SpecError, match="--text, --heldout and --tokens are of a --corpus"):
        on(CorpusOptions("", tokens=5))


def test_what_cannot_be_meant_is_refused(asked):
    for words, wishes in (
        ("say which text to learn from: --corpus", {"text": CorpusOptions("")}),
        ("--objective clm: ", {"objective": "clm"}),
        ("a masking ratio lies between 0 and 1", {"ratio": 1.5}),
    ):
        with pytest.raises(SpecError, match=words) as caught:
            asked(**wishes)
        assert "\n" not in str(caught.value)
