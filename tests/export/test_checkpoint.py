"""Exported checkpoints in transformers and sentence-transformers, as starts of new runs, and after adaptation."""

import json
import re
import shutil
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import tiny
from families.checks import check_plain_transformers, check_start
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModel,
    AutoTokenizer,
    pipeline,
)

from biphase import MLM, WSD, Chunks, Hub, LoRA, Pretrain, Pretrained, Retrieve, Stage, Study
from biphase.attention import AttentionPattern
from biphase.data.shards import Shards
from biphase.data.tokenize import tokenize
from biphase.export.checkpoint import export_checkpoint
from biphase.export.folder import find
from biphase.export.writing import prompts_of
from biphase.finetune.encoder import encoder_of_checkpoint, encoder_of_hub
from biphase.store import Store
from biphase.study.plan import identities
from biphase.tasks.encode import encode_texts
from biphase.training.pretrain import model_of_checkpoint

TEXTS = [
    "the cat sees the river",
    "a dog",
    "every student paints its own shadow. the old house likes birds. 7",
]
BIDIRECTIONAL = AttentionPattern(causal=False)


@torch.no_grad()
def of_text(read, ids):
    """What `read` (hidden states or logits of a trained model) gives for one text."""
    return read(torch.tensor([ids]), torch.arange(len(ids))[None], BIDIRECTIONAL)[0]


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize("name", ["masked", "early", "causal"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_auto_model_gives_the_hidden_states_of_the_trained_model(name, attention, export, ours):
    check_plain_transformers(ours(name), export(name), attn_implementation=attention)


def test_fill_mask_gives_the_answers_of_the_trained_head(folder, ours):
    fill = pipeline("fill-mask", model=str(folder), device="cpu")
    text = f"the cat {fill.tokenizer.mask_token} the river"
    ids = fill.tokenizer(text)["input_ids"]
    logits = of_text(ours("masked").logits, ids)[ids.index(fill.tokenizer.mask_token_id)]
    answers = fill(text, top_k=3)
    assert [answer["token"] for answer in answers] == logits.topk(3).indices.tolist()
    shares = logits.softmax(-1).topk(3).values.tolist()
    assert [answer["score"] for answer in answers] == pytest.approx(shares, rel=1e-4)


def test_the_files_of_a_folder(folder):
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
        "vectors/vectors.json", "vectors/vectors.safetensors",
    }  # fmt: skip
    assert not list(folder.parent.glob(".*.part"))
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o644
    config = json.loads((folder / "config.json").read_text())
    assert "auto_map" not in config
    assert config["use_cache"] is False
    assert config["classifier_pooling"] == "mean"  # as our own classifiers pool
    assert config["architectures"] == ["EuroBertForMaskedLM"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name in ("pad_token_id", "eos_token_id", "bos_token_id", "mask_token_id"):
        assert config[name] == getattr(tokenizer, name)
    assert (tokenizer.pad_token, tokenizer.mask_token) == ("<|pad|>", "<|mask|>")
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (32, "right")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert config["vocab_size"] == file.get_slice("model.embed_tokens.weight").get_shape()[0]


# ---------------------------------------------------------------- biphase again


def tokenized(corpus, folder, store):
    """The shards of the corpus, read by the tokenizer in a folder."""
    corpus = replace(corpus, tokenizer=Pretrained(str(folder)))
    return Shards.open(tokenize(corpus, store, processes=1, report=lambda text: None))


def test_evaluate_and_transformers_read_the_folder_as_the_checkpoint_is_read(folder, trained, shards):
    spec = replace(trained.study.finetune, length=32)
    run, key = trained.study.runs[0], trained.results["masked"]
    both = (
        encoder_of_checkpoint(run, key, trained.store, Shards.open(shards), spec),
        encoder_of_hub(Hub(str(folder)), spec),
    )
    (first, second) = (encoder.tokenization for encoder in both)
    for name in ("before", "after", "length"):
        assert getattr(first, name) == getattr(second, name)
    texts = [*TEXTS, "tabs\tand\nlines, 3.14 é 🙂", "the cat sees the river. " * 20]
    ids = encode_texts(first, texts)
    encoded = AutoTokenizer.from_pretrained(folder)(texts, truncation=True)
    assert set(encoded) == {"input_ids", "attention_mask"}
    assert encoded["input_ids"] == [ids[row].tolist() for row in range(len(texts))]
    assert len(encoded["input_ids"][-1]) == 32
    for text in ids:
        hidden = [of_text(encoder.encoder.eval(), text.tolist()) for encoder in both]
        assert torch.equal(*hidden)
    spelled = ["<|mask|> is text here, as <|end_of_text|> is"]
    assert np.array_equal(encode_texts(second, spelled).flat, encode_texts(first, spelled).flat)


def test_a_run_continues_from_the_folder_without_loss(folder, ours, corpus, shards, tmp_path):
    old, again = Shards.open(shards), tokenized(corpus, folder, Store(tmp_path))
    assert np.array_equal(again.train.span(0, len(again.train)), old.train.span(0, len(old.train)))
    check_start(ours("masked"), folder, again.vocab, again.mask_id)


# ---------------------------------------------------------------- adapted decoders


def decoder(family, shards, folder):
    """A folder with a decoder whose tokenizer has no mask token, and a licence in its card."""
    tiny.with_head(family, vocab_size=320, bos_token_id=0, eos_token_id=0, seed=1).save_pretrained(folder)
    content = json.loads((shards / "tokenizer" / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<|mask|>"]
    content["model"]["vocab"]["spare"] = content["model"]["vocab"].pop("<|mask|>")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Small\n")
    return folder


def adapted(folder, corpus, store, work, **fields):
    """A few steps of masked training; the run and the key of its end."""
    run = Pretrain(
        "adapted",
        start=Hub(str(folder)),
        corpus=replace(corpus, tokenizer=Pretrained(str(folder))),
        packing=Chunks(32, shortest=4),
        batch_tokens=256,
        schedule=WSD(3e-3, warmup=1, decay=1),
        precision="fp32",
        heldout_tokens=512,
        **fields,
    )
    plan = work(Study("one", (run,)), store)
    return plan.study.runs[0], plan.results["adapted"]


TWO_BASES = (Stage(MLM(0.4), 2), Stage(MLM(0.4), 2, rope_base=50_000.0))


@pytest.mark.parametrize(
    ("family", "fields", "architecture"),
    [
        ("llama", {"stages": TWO_BASES, "adapter": LoRA(rank=2)}, "EuroBertForMaskedLM"),
        ("gpt2", {"stages": (Stage(MLM(0.4), 3),)}, "GPT2LMHeadModel"),
    ],
)
def test_an_adapted_decoder_loads_everywhere_and_is_a_start_again(
    family, fields, architecture, shards, corpus, work, tmp_path
):
    folder, store = decoder(family, shards, tmp_path / "decoder"), Store(tmp_path / "store")
    run, key = adapted(folder, corpus, store, work, **fields)
    exported = export_checkpoint(find(key, store), store, tmp_path / "out", onnx=False, say=lambda text: None)
    assert exported.written.architecture == architecture
    read = Shards.open(store.shards / identities(store).data(run.corpus))
    assert read.vocab == 321  # a mask token was added
    right = model_of_checkpoint(run, key, store, read).eval()
    assert AutoTokenizer.from_pretrained(exported.folder).mask_token_id == 320
    check_plain_transformers(right, exported.folder)
    reread = tokenized(corpus, exported.folder, store)
    assert np.array_equal(reread.train.span(0, len(reread.train)), read.train.span(0, len(read.train)))
    check_start(right, exported.folder, 321, 320)
    embedding = SentenceTransformer(str(exported.folder), device="cpu").encode("the river")
    assert embedding.shape == (32,)
    check_card(exported, tmp_path, in_its_own_class=architecture == "GPT2LMHeadModel")
    shutil.rmtree(folder)  # nothing in the export refers to it
    AutoModel.from_pretrained(exported.folder)


def check_card(exported, folder, *, in_its_own_class):
    """The card names the version, the licence and no folder of this machine, and its snippets run."""
    text = (exported.folder / "README.md").read_text()
    for part in (text[: text.index("## How to load it")], exported.describe()):
        assert "transformers 5.17 or later" in part
    assert ("biphase.load(" in text) == ("assert hidden[0, 0]" in text) == in_its_own_class
    for block in re.findall(r"```python\n(.*?)```", text, re.S)[:2]:
        exec(block.replace("FOLDER", str(exported.folder)), {})
    assert "license: mit" in text.split("---")[1]
    assert "decoder, is under the licence mit" in text
    assert str(folder) not in text


# ---------------------------------------------------------------- sentence-transformers


@pytest.fixture(scope="module")
def sentences(folder):
    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def embed(folder, ours):
    """The normalized mean hidden state of each text, by the trained model."""
    tokenizer, trained = AutoTokenizer.from_pretrained(folder), ours("masked")

    def embed(texts):
        means = torch.stack([of_text(trained.hidden, tokenizer(text)["input_ids"]).mean(0) for text in texts])
        return torch.nn.functional.normalize(means, dim=1).numpy()

    return embed


def test_encode_gives_our_means_with_our_prompts(sentences, embed):
    texts = [*TEXTS[:2], "two birds", "the river crosses the garden"]
    assert np.allclose(sentences.encode(texts, batch_size=3), embed(texts), atol=1e-5)
    for name, before in (("query", "Query: "), ("document", "Document: ")):
        right = embed([f"{before}{text}" for text in texts])
        assert np.allclose(sentences.encode(texts, prompt_name=name), right, atol=1e-5)
    assert np.allclose(sentences.encode_query(texts), sentences.encode(texts, prompt_name="query"))
    assert prompts_of(Retrieve(query="{text}", document="Passage, {title}: {text}")) == ("", "Passage, ")
    assert sentences.max_seq_length == 32
    assert sentences.similarity_fn_name == "cosine"
