"""The ONNX graph in onnxruntime: any number of texts, any length, the numbers of the trained model."""

import json
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from biphase.errors import ModelError, SpecError
from biphase.export import writing as graphs
from biphase.export.card import trial_for_task
from biphase.export.checkpoint import export_checkpoint
from biphase.export.folder import find
from biphase.export.tuned import export_tuned

TEXTS = [
    "the cat sees the river",
    "a dog",
    "every student paints its own shadow. the old house likes two birds",
]


@pytest.fixture(scope="module")
def with_graph(trained, tmp_path_factory):
    place = tmp_path_factory.mktemp("graph") / "out"
    found = find(trained.results["masked"], trained.store)
    made = export_checkpoint(found, trained.store, place, onnx=True, say=lambda text: None)
    assert "and ONNX" in made.describe()
    return place


def session_of(folder):
    import onnxruntime

    return onnxruntime.InferenceSession(
        str(folder / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"]
    )


def test_onnxruntime_gives_the_hidden_states_of_the_model(with_graph):
    session = session_of(with_graph)
    assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert session.get_inputs()[0].shape == ["batch", "length"]
    assert [one.name for one in session.get_outputs()] == ["last_hidden_state"]
    tokenizer, model = AutoTokenizer.from_pretrained(with_graph), AutoModel.from_pretrained(with_graph)
    for texts in (TEXTS[:1], TEXTS[1:2], TEXTS, TEXTS * 3):
        inputs = tokenizer(texts, padding=True, return_tensors="np")
        said = session.run(None, dict(inputs))[0]
        with torch.no_grad():
            right = model(**{name: torch.from_numpy(one) for name, one in inputs.items()}).last_hidden_state
        real = inputs["attention_mask"].astype(bool)
        assert np.allclose(said[real], right.numpy()[real], atol=1e-5)


def test_the_card_says_how_to_run_it(with_graph):
    text = (with_graph / "README.md").read_text()
    assert "onnxruntime.InferenceSession" in text
    assert "- onnx" in text.split("---")[1]


def test_a_graph_that_says_something_else_is_not_kept(with_graph, tmp_path):
    """The weights of the folder change after the graph was made of them."""
    from safetensors.torch import load_file, save_file

    from biphase.data.tokenizer import load_saved
    from biphase.export.writing import tokenizer_of

    config = json.loads((with_graph / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(with_graph / "model.safetensors")
    weights["model.norm.weight"] += 0.01
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    words = tokenizer_of(load_saved(with_graph), bos=False, context=32)
    path = with_graph / "onnx" / "model.onnx"
    for folder in (tmp_path, with_graph):
        model = graphs.OneOutput(graphs.load(folder, attn_implementation="eager"), "last_hidden_state").eval()
        with pytest.raises(ModelError, match="differs from torch") if folder == tmp_path else nullcontext():
            graphs.refuse_unlike(model, path, words)


@pytest.mark.campaign
def test_a_classifier_has_a_graph_of_its_logits(trained, tmp_path):
    from transformers import AutoModelForSequenceClassification

    trial = trial_for_task(trained.results["masked"], "kinds", trained.store)
    export_tuned(trial, trained.store, tmp_path / "out", onnx=True, say=lambda text: None)
    inputs = AutoTokenizer.from_pretrained(tmp_path / "out")(TEXTS, padding=True, return_tensors="np")
    session = session_of(tmp_path / "out")
    assert [one.name for one in session.get_outputs()] == ["logits"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        right = model(**{name: torch.from_numpy(one) for name, one in inputs.items()}).logits
    assert np.allclose(session.run(None, dict(inputs))[0], right.numpy(), atol=1e-5)


def test_without_the_packages_the_refusal_says_what_to_install(monkeypatch):
    for name in ("onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None)  # Python's own way to say that there is no such module
    with pytest.raises(
        SpecError, match=r"--onnx needs onnxscript and onnxruntime, .* pip install onnxscript onnxruntime"
    ):
        graphs.check_onnx_packages()
