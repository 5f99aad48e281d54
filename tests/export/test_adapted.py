"""A decoder from a folder, adapted here, exported, and begun from again."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from biphase import MLM, WSD, Chunks, Hub, LoRA, Pretrain, Pretrained, Stage, Study
from biphase.attention import AttentionPattern
from biphase.data.shards import Shards
from biphase.data.tokenize import tokenize
from biphase.export.card import data
from biphase.export.checkpoint import export_checkpoint
from biphase.export.folder import find
from biphase.store import Store
from biphase.study.plan import identities, make_plan, save_plan
from biphase.study.worker import Worker
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import model_of_checkpoint, starting_model

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


@pytest.fixture
def decoder(shards, tmp_path):
    """Makes a folder with a decoder whose tokenizer has no mask token, and a licence in its card."""

    def make(model):
        folder = tmp_path / "decoder"
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model().save_pretrained(folder)
        words = json.loads((shards / "tokenizer" / "tokenizer.json").read_text())
        words["added_tokens"] = [one for one in words["added_tokens"] if one["content"] != "<|mask|>"]
        words["model"]["vocab"]["spare"] = words["model"]["vocab"].pop("<|mask|>")
        (folder / "tokenizer.json").write_text(json.dumps(words))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "README.md").write_text("---\nlicense: mit\n---\n# Small\n")
        return folder

    return make


def adapted(folder, corpus, store, **fields):
    """Three steps of masked training; the run and the key of its end."""
    read = replace(corpus, tokenizer=Pretrained(str(folder)))
    run = Pretrain(
        "adapted",
        start=Hub(str(folder)),
        corpus=read,
        packing=Chunks(32, shortest=4),
        batch_tokens=256,
        schedule=WSD(3e-3, warmup=1, decay=1),
        precision="fp32",
        heldout_tokens=512,
        **fields,
    )
    known = identities(store)
    plan = make_plan(Study("one", (run,)), known)
    save_plan(plan, store)
    options, alone = RuntimeOptions(quiet=True, loaders=0), Ranks(0, 1, torch.device("cpu"))
    worker = Worker(plan, store, known, alone, options, wanted=set(plan.jobs), say=lambda text: None)
    assert not worker.work().failed
    return plan.study.runs[0], plan.results["adapted"]


@pytest.mark.parametrize(
    ("model", "fields", "architecture"),
    [
        (
            lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=320, bos_token_id=0, eos_token_id=0)),
            {"stages": (Stage(MLM(0.4), 2), Stage(MLM(0.4), 2, rope_base=50_000.0)), "adapter": LoRA(rank=2)},
            "EuroBertForMaskedLM",
        ),
        (
            lambda: GPT2LMHeadModel(GPT2Config(**GPT2, vocab_size=320, bos_token_id=0, eos_token_id=0)),
            {"stages": (Stage(MLM(0.4), 3),)},
            "GPT2LMHeadModel",
        ),
    ],
    ids=["llama-lora-rope", "gpt2"],
)
def test_an_adapted_decoder_loads_everywhere_and_is_a_start_again(
    model, fields, architecture, decoder, corpus, tmp_path
):
    folder, store = decoder(model), Store(tmp_path / "store")
    run, key = adapted(folder, corpus, store, **fields)
    made = export_checkpoint(find(key, store), store, tmp_path / "out", onnx=False, say=lambda text: None)
    assert made.written.architecture == architecture
    shards = Shards.open(store.shards / identities(store).data(run))
    assert shards.vocab == 321  # a mask token was added
    right = model_of_checkpoint(run, key, store, shards).eval()
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    assert tokenizer.mask_token_id == 320
    ids = torch.tensor([tokenizer("the <|mask|> river")["input_ids"]])
    places = torch.arange(ids.shape[1])[None]
    on = replace(run, start=Hub(str(made.folder)), adapter=None)
    read = replace(corpus, tokenizer=Pretrained(str(made.folder)))
    retold = Shards.open(tokenize(read, store, processes=1, report=lambda text: None))
    assert np.array_equal(retold.train.span(0, len(retold.train)), shards.train.span(0, len(shards.train)))
    again = starting_model(on, retold, probed=True).eval()
    with torch.no_grad():
        said = AutoModel.from_pretrained(made.folder)(ids).last_hidden_state
        assert torch.allclose(
            said, right.hidden(ids, places, AttentionPattern(causal=False)), rtol=1e-4, atol=1e-5
        )
        for one in ("hidden", "logits"):
            first, second = (
                getattr(each, one)(ids, places, AttentionPattern(causal=False)) for each in (right, again)
            )
            assert torch.allclose(first, second, rtol=1e-4, atol=1e-5)
    text = (made.folder / "README.md").read_text()
    needs = text[: text.index("## How to load it")], made.describe()
    assert all("transformers 5.17 or later" in one for one in needs)
    assert ("biphase.load(" in text, "assert hidden[0, 0]" in text) == (
        architecture == "GPT2LMHeadModel",
    ) * 2
    for block in re.findall(r"```python\n(.*?)```", text, re.S)[:2]:
        exec(block.replace("FOLDER", str(made.folder)), {})
    embedded = SentenceTransformer(str(made.folder), device="cpu").encode("the river")
    assert embedded.shape == (32,)
    assert "license: mit" in text.split("---")[1]
    assert "The model it was made from, decoder, is under the licence mit." in text
    assert str(tmp_path) not in text
    state = find(key, store)
    converted = replace(corpus, tokenizer=Pretrained(str(tmp_path / "tokenizers" / ("0" * 32))))
    start = Hub(str(folder), gguf="decoder.Q4.gguf")
    rows = data(replace(state, run=replace(state.run, start=start, corpus=converted)), shards)
    (said,) = (row for row in rows if row.startswith("| tokenizer |"))
    assert "of decoder, decoder.Q4.gguf, converted" in said
    assert "000" not in said
    shutil.rmtree(folder)  # nothing of what was exported points back
    AutoModel.from_pretrained(made.folder)
