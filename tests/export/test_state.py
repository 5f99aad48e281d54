"""A trained model in other tools: the same tokens, the same hidden states, the same answers."""

import json
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)

from biphase import MLM, WSD, Hub, Pretrain, Pretrained, Stage
from biphase.attention import AttentionPattern, pattern_of
from biphase.data.shards import Shards
from biphase.data.stream import heldout_stream
from biphase.finetune.encoder import encoder_of_checkpoint, encoder_of_hub
from biphase.tasks.encode import encode_texts
from biphase.training import distributed
from biphase.training.checkpoint import metrics_of
from biphase.training.pretrain import ALWAYS, heldout_losses, starting_model

TEXTS = [
    "the cat sees the river",
    "a dog",
    "every student paints its own shadow. the old house likes two birds. 7",
]


def hidden_of(model, ids):
    """What the trained model makes of one text, read both ways."""
    ids = torch.tensor([ids])
    with torch.no_grad():
        return model.hidden(ids, torch.arange(ids.shape[1])[None], AttentionPattern(causal=False))[0]


def logits_of(model, ids):
    ids = torch.tensor([ids])
    with torch.no_grad():
        return model.logits(ids, torch.arange(ids.shape[1])[None], AttentionPattern(causal=False))[0]


def close(theirs, right):
    return torch.allclose(torch.as_tensor(theirs), right, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize("name", ["masked", "early", "causal"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_auto_model_gives_the_hidden_states_of_the_trained_one(name, attention, export, ours):
    tokenizer = AutoTokenizer.from_pretrained(export(name))
    model = AutoModel.from_pretrained(export(name), attn_implementation=attention)
    right = ours(name)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        padded = model(**batch).last_hidden_state
    for row, text in enumerate(TEXTS):
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            alone = model(torch.tensor([ids])).last_hidden_state[0]
        assert close(alone, hidden_of(right, ids))
        assert close(padded[row, : len(ids)], hidden_of(right, ids))


def test_fill_mask_says_what_the_trained_head_says(folder, ours):
    fill = pipeline("fill-mask", model=str(folder), device="cpu")
    mask = fill.tokenizer.mask_token
    ids = fill.tokenizer(f"the cat {mask} the river")["input_ids"]
    logits = logits_of(ours("masked"), ids)[ids.index(fill.tokenizer.mask_token_id)]
    said = fill(f"the cat {mask} the river", top_k=3)
    assert [one["token"] for one in said] == logits.topk(3).indices.tolist()
    assert [one["score"] for one in said] == pytest.approx(
        logits.softmax(-1).topk(3).values.tolist(), rel=1e-4
    )


def test_tied_weights_are_written_once_and_stay_tied(export, ours):
    with safe_open(export("early") / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  (it is no dictionary)
    model = AutoModelForMaskedLM.from_pretrained(export("early"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ids = [5, 9, 11, 40]
    with torch.no_grad():
        assert close(model(torch.tensor([ids])).logits[0], logits_of(ours("early"), ids))


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_task_heads_stand_on_the_trained_trunk(auto, folder, ours):
    from biphase.models.hub import quietly

    with quietly():  # the new head's weights are random, which transformers tells
        model = auto.from_pretrained(folder, num_labels=3)
    assert model(torch.tensor([[5, 6, 7]])).logits.shape[-1] == 3
    with torch.no_grad():
        assert close(
            model.base_model(torch.tensor([[5, 6, 7]])).last_hidden_state[0],
            hidden_of(ours("masked"), [5, 6, 7]),
        )


# ---------------------------------------------------------------- files


def test_the_folder_holds_what_it_should_and_no_code(folder):
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
    }  # fmt: skip
    assert not list(folder.parent.glob(".*.part"))
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o644
    config = json.loads((folder / "config.json").read_text())
    assert "auto_map" not in config
    assert config["use_cache"] is False
    assert config["classifier_pooling"] == "mean"  # as our own classifiers pool
    assert config["architectures"] == ["EuroBertForMaskedLM"]


def test_configuration_and_tokenizer_agree_on_special_tokens(folder):
    config = json.loads((folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "mask_token_id"):
        assert config[name] == getattr(tokenizer, name)
    assert (tokenizer.pad_token, tokenizer.mask_token) == ("<|pad|>", "<|mask|>")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert config["vocab_size"] == file.get_slice("model.embed_tokens.weight").get_shape()[0]
    assert tokenizer.model_max_length == 32
    assert tokenizer.padding_side == "right"


def test_the_tokenizer_reads_as_fine_tuning_reads_and_cuts_alike(folder, trained, shards):
    spec = trained.study.finetune
    run = trained.study.runs[0]
    subject = encoder_of_checkpoint(
        run, trained.results["masked"], trained.store, Shards.open(shards), replace(spec, length=32)
    )
    texts = [*TEXTS, "tabs\tand\nlines, 3.14 é 🙂", "the cat sees the river. " * 20]
    right = encode_texts(subject.tokenization, texts)
    said = AutoTokenizer.from_pretrained(folder)(texts, truncation=True)
    assert set(said) == {"input_ids", "attention_mask"}
    for row, text in enumerate(texts):
        assert said["input_ids"][row] == right[row].tolist(), text
    assert len(said["input_ids"][-1]) == 32


# ---------------------------------------------------------------- back again


def test_evaluate_reads_the_folder_as_it_reads_the_state(folder, trained, shards):
    spec = trained.study.finetune
    run, key = trained.study.runs[0], trained.results["masked"]
    state = encoder_of_checkpoint(run, key, trained.store, Shards.open(shards), spec)
    back = encoder_of_hub(Hub(str(folder)), spec)
    assert (back.reading.before, back.reading.after, back.reading.length) == (
        state.reading.before,
        state.reading.after,
        state.reading.length,
    )
    texts = [*TEXTS, "<|mask|> is text here, as <|end_of_text|> is"]
    ids = encode_texts(state.reading, texts)
    assert np.array_equal(encode_texts(back.reading, texts).flat, ids.flat)
    for one in ids:
        row, places = torch.from_numpy(one)[None].long(), torch.arange(len(one))[None]
        with torch.no_grad():
            first, second = (
                subject.encoder.eval()(row, places, AttentionPattern(causal=False))
                for subject in (state, back)
            )
        assert torch.equal(first, second)


def test_a_run_goes_on_from_the_folder_without_loss(folder, trained, corpus, shards, tmp_path):
    from biphase.data.tokenize import tokenize
    from biphase.store import Store

    first = trained.study.runs[0]
    read = replace(corpus, tokenizer=Pretrained(str(folder)))
    made = Shards.open(tokenize(read, Store(tmp_path), processes=1, report=lambda text: None))
    old = Shards.open(shards)
    assert np.array_equal(made.train.span(0, len(made.train)), old.train.span(0, len(old.train)))
    run = Pretrain(
        "on",
        start=Hub(str(folder)),
        corpus=read,
        stages=Stage(MLM(0.4), 2),
        packing=first.packing,
        batch_tokens=256,
        schedule=WSD(1e-3, warmup=0, decay=0),
        precision="fp32",
    )
    model = starting_model(run, made, probed=True).eval()
    alone = distributed.Ranks(0, 1, torch.device("cpu"))
    losses = heldout_losses(
        lambda batch: model.loss_sum(batch, pattern_of(batch, varlen=False)),
        heldout_stream(made, run.packing),
        ALWAYS,
        rows=first.heldout_tokens // first.packing.length,
        micro_rows=8,
        ranks=alone,
        autocast=lambda: distributed.autocast(alone.device, "fp32"),
        fixed=False,
    )
    last = [
        line["heldout"] for line in metrics_of(trained.store, trained.results["masked"]) if "heldout" in line
    ][-1]
    assert losses == pytest.approx({name: last[name] for name in losses}, rel=1e-6)
