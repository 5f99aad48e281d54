"""`biphase verify`: every tool computes what the trained model does, and a damaged folder fails with what is wrong."""

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


@pytest.fixture
def damaged(tmp_path):
    """Copies a folder and edits a file of it: `damaged(folder, "config.json", is_causal=True)`."""

    def damage(folder, file, **fields):
        copy = shutil.copytree(folder, tmp_path / "copy")
        content = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps(content | fields))
        return copy

    return damage


def weights(folder, change):
    """Change the tensors of a folder's model."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


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
    ended = run(damaged(decoder, "config.json", is_causal=True))
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


STATES = ["transformers", "sentence-transformers"]


@pytest.mark.parametrize("tool", STATES)
def test_a_decoder_whose_configuration_is_causal_again_fails(tool, decoder, damaged):
    assert vectors.check(decoder, tool).attention == "bidirectional"
    result = vectors.check(damaged(decoder, "config.json", is_causal=True), tool)
    assert result.differs.startswith("causal attention: ")
    assert result.attention == "causal"


@pytest.mark.parametrize("tool", STATES)
def test_an_encoder_loaded_by_a_causal_class_fails(tool, complete, damaged):
    folder = damaged(complete, "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    result = vectors.check(folder, tool)
    assert result.differs.startswith("causal attention: ")


@pytest.mark.parametrize(
    ("mode", "found"),
    [("cls", "cls"), ("max", "max"), ("lasttoken", "last"), ("mean_sqrt_len", "not of length")],
)
def test_another_pooling_is_named(mode, found, complete, damaged):
    field = {"cls": "cls_token", "max": "max_tokens", "mean_sqrt_len": "mean_sqrt_len_tokens"}.get(mode, mode)
    folder = damaged(
        complete, "1_Pooling/config.json", pooling_mode_mean_tokens=False, **{f"pooling_mode_{field}": True}
    )
    modules = json.loads((folder / "modules.json").read_text())
    if mode == "mean_sqrt_len":
        (folder / "modules.json").write_text(json.dumps(modules[:2]))
    differs = vectors.check(folder, "sentence-transformers").differs
    assert differs.startswith("pooling: ")
    assert found in differs
    assert vectors.check(folder, "transformers").differs == "", "which does not pool"


@pytest.mark.parametrize("tool", ["sentence-transformers", "mteb"])
@pytest.mark.parametrize("prompts", [{}, {"query": "Query: ", "document": "passage: "}])
def test_other_prompts_are_named(tool, prompts, complete, damaged):
    folder = damaged(complete, "config_sentence_transformers.json", prompts=prompts)
    differs = vectors.check(folder, tool).differs
    assert differs.startswith("prompts: ")
    assert '"Document: "' in differs
    assert ('"Query: "' in differs) == (not prompts)


@pytest.mark.parametrize("tool", [*STATES, "onnx"])
def test_another_tokenizer_is_named(tool, complete, damaged):
    folder = damaged(complete, "tokenizer.json", normalizer={"type": "Lowercase"})
    differs = vectors.check(folder, tool).differs
    assert differs.startswith("tokens: ")
    assert "Café" in differs


def test_other_tokens_are_named(complete, damaged, tmp_path):
    special = damaged(complete, "tokenizer_config.json", pad_token="<|mask|>")
    assert "pad_token" in vectors.check(special, "transformers").differs
    (special / "tokenizer.json").write_text("{")
    assert vectors.check(special, "transformers").differs.startswith("tokens: ")
    shutil.rmtree(special)
    short = damaged(complete, "sentence_bert_config.json", max_seq_length=16)
    assert "read as 16 tokens" in vectors.check(short, "sentence-transformers").differs


@pytest.mark.parametrize("tool", ["sentence-transformers", "mteb"])
def test_neither_code_nor_pickles_of_a_folder_are_run(tool, complete, damaged):
    """Versions of sentence-transformers before 6 would run both."""
    folder = damaged(complete, "config.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "safetensors" in vectors.check(folder, tool).differs
    (folder / "payload.py").write_text("from sentence_transformers.models import Normalize")
    modules = (folder / "modules.json").read_text().replace("sentence_transformers.models", "payload")
    (folder / "modules.json").write_text(modules)
    assert vectors.check(folder, tool).differs.startswith("modules.json names payload.Transformer")


@pytest.mark.parametrize("tool", [*STATES, "mteb"])
def test_one_changed_matrix_fails_and_a_stale_graph_with_it(tool, complete, damaged):
    folder = damaged(complete, "config.json")
    weights(folder, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].mul_(1.5))
    assert vectors.check(folder, tool).differs.startswith("weights")
    assert vectors.check(folder, "onnx").differs == "", "its graph has weights of its own"


def test_a_graph_of_other_weights_fails(complete, damaged):
    import onnx

    folder = damaged(complete, "config.json")
    graph = onnx.load(folder / "onnx" / "model.onnx")
    for tensor in graph.graph.initializer:
        if tensor.raw_data and len(tensor.dims) == 1 and tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.raw_data = (np.frombuffer(tensor.raw_data, np.float32) * 1.1).tobytes()
    onnx.save(graph, folder / "onnx" / "model.onnx")
    assert vectors.check(folder, "onnx").differs.startswith("weights: ")


def test_16_bits_are_allowed_for_if_the_folder_says_so(complete, damaged):
    half = damaged(complete, "config.json", dtype="bfloat16")
    result = vectors.check(half, "transformers")
    assert (result.differs, result.dtype, result.tolerance) == ("", "bfloat16", vectors.TOLERANCE["bfloat16"])
    assert max(one["relative"] for one in result.measured) > vectors.TOLERANCE["float32"]
    assert result.attention == "bidirectional"
    shutil.rmtree(half)
    rounded = damaged(complete, "config.json")
    weights(rounded, lambda tensors: [one.copy_(one.bfloat16()) for one in tensors.values()])
    differs = vectors.check(rounded, "transformers").differs
    assert differs.startswith("dtype: ")
    assert "float32" in differs


def test_the_exit_code_and_one_line_say_what_differs(decoder, damaged, verb):
    folder = damaged(decoder, "config.json", is_causal=True)
    code, out, _ = verb("verify", folder, "--with", "transformers")
    assert code == 1
    assert out.startswith("FAIL  transformers ")
    assert "causal attention" in out.splitlines()[0]


def test_what_cannot_be_verified_is_refused_in_one_line(complete, decoder, damaged, verb, tmp_path):
    (tmp_path / "empty").mkdir()
    (
        broken := damaged(complete, "vectors/vectors.json", outputs={"hidden_states": {"class": "os.system"}})
    ).is_dir()
    for words, part in (
        ((tmp_path / "empty",), "biphase export"),
        ((broken,), "vectors"),
        ((complete, "--with", "torchscript"), "onnx"),
        ((decoder, "--with", "onnx"), "--onnx"),
    ):
        code, _, told = verb("verify", *words)
        assert (code, told.count("\n")) == (2, 1)
        assert part in told


def test_a_folder_is_refused_that_computes_something_else(complete, tmp_path):
    """The check that `export` makes before it keeps a folder."""
    folder = shutil.copytree(complete, tmp_path / "copy")
    recorded = vectors.read(folder)
    shutil.rmtree(folder / "vectors")
    weights(folder, lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    with pytest.raises(writing.ModelError, match=r"transformers.*differ by"):
        writing.verify_vectors(folder, recorded, onnx=True)
