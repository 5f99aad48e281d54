"""`biphase verify`: every tool computes what the trained model does, and a damaged folder fails with what is wrong."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from families import tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from biphase.data.tokenizer import load_saved
from biphase.export import vectors, writing
from biphase.export.card import trial_for_task
from biphase.export.checkpoint import export_checkpoint, readbacks, write_encoder
from biphase.export.folder import find
from biphase.export.tuned import export_tuned
from biphase.export.writing import Prompts

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def quiet(text):
    """Print nothing."""


@pytest.fixture(scope="module")
def complete(trained, tmp_path_factory):
    """An encoder with everything: EuroBERT, sentence-transformers' files, a graph."""
    folder = tmp_path_factory.mktemp("complete") / "out"
    export_checkpoint(
        find(trained.results["masked"], trained.store), trained.store, folder, onnx=True, say=quiet
    )
    return folder


@pytest.fixture(scope="module")
def decoder(shards, tmp_path_factory):
    """GPT-2, which attends in both directions by a field of its configuration; its longest text has no logits."""
    folder = tmp_path_factory.mktemp("decoder")
    tokenizer = writing.tokenizer_of(load_saved(shards / "tokenizer"), bos=False, context=300)
    model = tiny.ours(
        tiny.stirred(
            tiny.with_head("gpt2", vocab_size=320, bos_token_id=0, eos_token_id=0, n_positions=300), 0.15
        )
    )
    write_encoder(model, tokenizer, folder)
    writing.write_tokenizer(tokenizer, folder)
    prompts = Prompts("Query: ", "Document: ")
    writing.write_sentences(folder, width=model.encoder.width, context=300, prompts=prompts)
    config = model.encoder.trunk.config
    made = writing.vectors_of(
        tokenizer, config, lambda texts: readbacks(model, AutoModelForCausalLM, texts), prompts=prompts
    )
    writing.verify_vectors(folder, made, onnx=False)
    return folder


def edit(folder, file, **fields):
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))


def weights(folder, change):
    """Change the tensors of a folder's model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def damaged(tmp_path):
    """Copies a folder and changes something in it: `damaged(folder, change)`."""

    def damage(folder, change):
        copy = shutil.copytree(folder, tmp_path / "copy")
        change(copy)
        return copy

    return damage


# ---------------------------------------------------------------- folders as they were exported


SHOWN = {
    "transformers": {"hidden_states", "logits"},
    "sentence-transformers": {"hidden_states", *vectors.EMBEDDINGS},
    "onnx": {"hidden_states"},
    "mteb": {*vectors.EMBEDDINGS},
}


@pytest.mark.parametrize("tool", vectors.TOOLS)
def test_every_tool_computes_what_the_trained_model_does(tool, complete):
    result = vectors.check(complete, tool)
    assert (result.differs, result.dtype) == ("", "float32")
    assert (result.attention == "bidirectional") == (tool != "mteb"), "which shows no states"
    assert all(one["relative"] < 1e-5 and one["cosine"] > 0.99999 for one in result.measured)
    names = {one["name"].removesuffix(", padded") for one in result.measured}
    assert names == SHOWN[tool]


@pytest.mark.campaign
def test_each_tool_is_a_process_of_its_own(complete, verb):
    code, out, told = verb("verify", complete)
    assert code == 0, out + told
    assert re.findall(r"(?m)^(\w+)  ([a-z-]+) \d", out) == [("pass", tool) for tool in vectors.TOOLS]
    assert out.count("bidirectional") == 3
    code, out, _ = verb("verify", complete, "--with", "transformers", "--json")
    (result,) = json.loads(out)
    assert (code, result["differs"], result["dtype"]) == (0, "", "float32")


def test_the_vectors_are_small_and_cover_what_is_asked(complete):
    recorded = vectors.read(complete)
    texts = recorded.about["texts"]
    assert any(not one["text"].isascii() for one in texts)
    assert any("<|mask|>" in one["text"] for one in texts)
    assert len(texts[-1]["ids"]) == 32, "the longest text fills the context"
    assert all({0, len(one["ids"]) - 1} <= {*one["positions"]} for one in texts)
    first, second = texts[:2]
    at = recorded.about["common_position"]
    assert first["ids"][: at + 1] == second["ids"][: at + 1]
    assert first["ids"][at + 1] != second["ids"][at + 1]
    assert sum(path.stat().st_size for path in (complete / "vectors").iterdir()) < 200_000


def test_the_script_of_the_documentation_checks_without_biphase(complete, decoder, damaged, tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    (script,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "vectors.json" in block
    ]
    assert len(script.splitlines()) <= 20
    assert "biphase" not in script
    (tmp_path / "check.py").write_text(script)

    def run(folder):
        command = [sys.executable, tmp_path / "check.py", folder]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run(complete).returncode == 0
    ended = run(damaged(decoder, causal))
    assert "causal" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("task", ["kinds", "names", "facts"])
def test_fine_tuned_models_pass(task, trained, tmp_path):
    trial = trial_for_task(trained.results["masked"], task, trained.store)
    export_tuned(trial, trained.store, tmp_path / "out", onnx=False, say=quiet)
    recorded = vectors.read(tmp_path / "out")
    assert ("logits" in recorded.tensors, "query_embeddings" in recorded.tensors) == (
        task != "facts",
        task == "facts",
    )
    tool = "sentence-transformers" if task == "facts" else "transformers"
    assert vectors.check(tmp_path / "out", tool).differs == ""
    name = "classifier.weight" if task != "facts" else "norm.weight"
    weights(tmp_path / "out", lambda tensors: tensors[name].mul_(-1))
    assert vectors.check(tmp_path / "out", tool).differs.startswith("weights: ")


# ---------------------------------------------------------------- damaged folders


def causal(folder):
    edit(folder, "config.json", is_causal=True)


def pooled(name, *, modules=3):
    """Pool in another way; without the last module vectors are not normalized."""

    def change(folder):
        edit(
            folder, "1_Pooling/config.json", pooling_mode_mean_tokens=False, **{f"pooling_mode_{name}": True}
        )
        kept = json.loads((folder / "modules.json").read_text())[:modules]
        (folder / "modules.json").write_text(json.dumps(kept))

    return change


def prompted(**prompts):
    return lambda folder: edit(folder, "config_sentence_transformers.json", prompts=prompts)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_code(folder):
    (folder / "payload.py").write_text("from sentence_transformers.models import Normalize")
    modules = (folder / "modules.json").read_text().replace("sentence_transformers.models", "payload")
    (folder / "modules.json").write_text(modules)


def other_graph(folder):
    import onnx

    graph = onnx.load(folder / "onnx" / "model.onnx")
    for tensor in graph.graph.initializer:
        if tensor.raw_data and len(tensor.dims) == 1 and tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.raw_data = (np.frombuffer(tensor.raw_data, np.float32) * 1.1).tobytes()
    onnx.save(graph, folder / "onnx" / "model.onnx")


def one_matrix(folder):
    weights(folder, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].mul_(1.5))


def rounded(folder):
    weights(folder, lambda tensors: [one.copy_(one.bfloat16()) for one in tensors.values()])


HF, ST = "transformers", "sentence-transformers"
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
ANOTHER = {"normalizer": {"type": "Lowercase"}}


@pytest.mark.parametrize(
    ("change", "tools", "found", "fact", "passes"),
    [
        (lambda folder: edit(folder, "config.json", **LLAMA), (HF, ST), "causal attention: ", "", ()),
        (pooled("cls_token"), (ST,), "pooling: ", "cls", (HF,)),  # which does not pool
        (pooled("max_tokens"), (ST,), "pooling: ", "max", (HF,)),
        (pooled("lasttoken"), (ST,), "pooling: ", "last", ()),
        (pooled("mean_sqrt_len_tokens", modules=2), (ST,), "pooling: ", "not of length", ()),
        (prompted(), (ST, "mteb"), "prompts: ", '"Query: "', (HF,)),
        (prompted(query="Query: ", document="passage: "), (ST, "mteb"), "prompts: ", '"Document: "', ()),
        (lambda folder: edit(folder, "tokenizer.json", **ANOTHER), (HF, ST, "onnx"), "tokens: ", "Café", ()),
        (lambda folder: edit(folder, "tokenizer_config.json", pad_token="<|mask|>"), (HF,), "tokens: ", "pad_token", ()),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), (HF,), "tokens: ", "", ()),
        (lambda folder: edit(folder, "sentence_bert_config.json", max_seq_length=16), (ST,), "tokens: ", "as 16 tokens", ()),
        (one_matrix, (HF, ST, "mteb"), "weights", "", ("onnx",)),  # its graph has weights of its own
        (other_graph, ("onnx",), "weights: ", "", (HF,)),
        (rounded, (HF,), "dtype: ", "float32", ()),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_differs_is_named(change, tools, found, fact, passes, complete, damaged):
    folder = damaged(complete, change)
    for tool in tools:
        differs = vectors.check(folder, tool).differs
        assert differs.startswith(found)
        assert fact in differs
    assert [vectors.check(folder, tool).differs for tool in passes] == [""] * len(passes)


@pytest.mark.parametrize("tool", [HF, ST])
def test_a_decoder_whose_configuration_is_causal_again_fails(tool, decoder, damaged):
    assert vectors.check(decoder, tool).attention == "bidirectional"
    result = vectors.check(damaged(decoder, causal), tool)
    assert result.differs.startswith("causal attention: ")
    assert result.attention == "causal"


@pytest.mark.parametrize("tool", [ST, "mteb"])
def test_neither_code_nor_pickles_of_a_folder_are_run(tool, complete, damaged):
    """Versions of sentence-transformers before 6 would run both."""
    folder = damaged(complete, pickled)
    assert "safetensors" in vectors.check(folder, tool).differs
    with_code(folder)
    assert vectors.check(folder, tool).differs.startswith("modules.json names payload.Transformer")


def test_16_bits_are_allowed_for_if_the_folder_says_so(complete, damaged):
    result = vectors.check(
        damaged(complete, lambda folder: edit(folder, "config.json", dtype="bfloat16")), HF
    )
    assert (result.differs, result.dtype, result.tolerance) == ("", "bfloat16", vectors.TOLERANCE["bfloat16"])
    assert max(one["relative"] for one in result.measured) > vectors.TOLERANCE["float32"]
    assert result.attention == "bidirectional"


def test_the_exit_code_and_one_line_say_what_differs(decoder, damaged, verb):
    code, out, _ = verb("verify", damaged(decoder, causal), "--with", HF)
    assert code == 1
    assert out.startswith("FAIL  transformers ")
    assert "causal attention" in out.splitlines()[0]


def test_what_cannot_be_verified_is_refused_in_one_line(complete, decoder, damaged, verb, tmp_path):
    (tmp_path / "empty").mkdir()
    run = {"outputs": {"hidden_states": {"class": "os.system"}}}
    for words, part in (
        ((tmp_path / "empty",), "biphase export"),
        ((damaged(complete, lambda folder: edit(folder, "vectors/vectors.json", **run)),), "vectors"),
        ((complete, "--with", "torchscript"), "onnx"),
        ((decoder, "--with", "onnx"), "--onnx"),
    ):
        code, _, told = verb("verify", *words)
        assert (code, told.count("\n")) == (2, 1)
        assert part in told


def test_a_folder_is_refused_that_computes_something_else(complete, damaged):
    """The check that `export` makes before it keeps a folder."""
    folder, recorded = damaged(complete, one_matrix), vectors.read(complete)
    shutil.rmtree(folder / "vectors")
    with pytest.raises(writing.ModelError, match=r"transformers.*differ by"):
        writing.verify_vectors(folder, recorded, onnx=True)
