"""What people type and give that cannot be right: one clear line each, exit code 2, no traceback, nothing computed."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
from faults.tiny import write_study

# ---------------------------------------------------------------- files beside the study: what they hold instead

FILES: dict[str, tuple[str, bytes]] = {
    "text that is no JSON": ("text/train.jsonl", b"the cat sees\n" * 40),
    "text in another encoding": ("text/train.jsonl", b'{"text": "caf\xe9"}\n' * 40),
    "no text": ("text/train.jsonl", b""),
    "records without text": ("text/train.jsonl", b'{"words": "a"}\n' * 40),
    "text that is a list": ("text/train.jsonl", b'{"text": ["a"]}\n' * 40),
    "records that are lists": ("text/train.jsonl", b"[1]\n" * 40),
    "JSON without a bottom": ("text/train.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n"),
    "task rows that are no JSON": ("tasks/beasts/train.jsonl", b"not JSON\n"),
    "task rows without a label": ("tasks/beasts/train.jsonl", b'{"text": "a"}\n' * 8),
    "a label out of range": ("tasks/beasts/train.jsonl", b'{"text": "a", "label": 7}\n' * 8),
    "a label that is a list": ("tasks/beasts/train.jsonl", b'{"text": "a", "label": [0]}\n' * 8),
    "a text that is null": ("tasks/beasts/test.jsonl", b'{"text": null, "label": 0}\n' * 8),
    "a task without examples": ("tasks/beasts/test.jsonl", b""),
    "task rows in another encoding": ("tasks/beasts/validation.jsonl", b'{"text": "\xe9", "label": 0}\n'),
    "task rows without a bottom": ("tasks/beasts/train.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n"),
}

# ---------------------------------------------------------------- flags and keys; others are in tests/cli/test_verbs.py

FLAGS: dict[str, list[str]] = {
    "a study that is a folder": ["plan", "{folder}"],
    "a wait that is no time": ["stop", "{study}", "--wait", "long"],
    "loaders below nothing": ["run", "{study}", "--loaders", "-1"],
    "no processes": ["run", "{study}", "--processes", "0"],
    "a port too high": ["report", "{study}", "--watch", "--port", "99999"],
    "a report on a file": ["report", "{study}", "--out", "{study}"],
    "a key that is none": ["export", "xyz", "{folder}/out"],
    "a key that is absent": ["export", "00000000", "{folder}/out"],
    "a key that climbs": ["export", "../../etc", "{folder}/out"],
    "an export onto a file": ["export", "00000000", "{study}"],
    "tasks nobody knows": ["evaluate", "{folder}/model", "--tasks", "nothing"],
    "rates that are none": ["evaluate", "{folder}/model", "--tasks", "sources-mini", "--lrs", "fast"],
    "seeds that are none": ["evaluate", "{folder}/model", "--tasks", "sources-mini", "--seeds", "x-y"],
    "a home of nobody": ["tokenize", "~nobody-of-this-name/text", "--tokenizer", "bpe:300"],
    "a ledger that is none": ["ledger", "merge", "{study}"],
    "a ledger that is absent": ["ledger", "merge", "{folder}/nowhere.tar.zst"],
    "a pack into nowhere": ["ledger", "pack", "{study}", "{folder}/nowhere/file.tar.zst"],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad") / "input"
    write_study(folder, [f"the cat sees the dog {n}" for n in range(40)])
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """The study and its files, ours to spoil."""
    made = tmp_path / "input"
    shutil.copytree(written, made)
    study = made / "study.py"
    study.write_text(study.read_text().replace(str(written), str(made)))
    return made


@pytest.mark.parametrize("case", FILES)
def test_a_wrong_file_is_refused(case, folder, refused):
    name, content = FILES[case]
    (folder / name).write_bytes(content)
    line = refused("run", folder / "study.py", "--quiet")
    assert "beasts" in line or "tiny" in line, "the corpus or the task is named"


@pytest.mark.parametrize("case", FLAGS)
def test_wrong_options_are_refused(case, folder, refused):
    refused(*(word.format(folder=folder, study=folder / "study.py") for word in FLAGS[case]))


# ---------------------------------------------------------------- model folders

TENSORS = struct.pack("<Q", 2) + b"{}"


def _model(config: object, weights: bytes = TENSORS) -> dict[str, bytes]:
    return {"config.json": json.dumps(config).encode(), "model.safetensors": weights}


BERT = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_hidden_layers": 1}
MODELS: dict[str, dict[str, bytes]] = {
    "an empty folder": {},
    "no weights": {"config.json": json.dumps(BERT).encode()},
    "no configuration": {"model.safetensors": TENSORS},
    "a configuration that is no JSON": _model(BERT) | {"config.json": b"{"},
    "a configuration that is a list": _model([1, 2]),
    "a type nobody knows": _model({"model_type": "nothing"}),
    "no type": _model({}),
    "numbers that are text": _model(BERT | {"hidden_size": "large"}),
    "layers below nothing": _model(BERT | {"num_hidden_layers": -1}),
    "weights that are empty": _model(BERT, b""),
    "weights that are text": _model(BERT, b"not weights"),
    "weights with a header of any length": _model(BERT, struct.pack("<Q", 2**62) + b"{}"),
    "weights with a header without a bottom": _model(BERT, struct.pack("<Q", 99_999) + b"[" * 99_999),
    "weights of another model": _model(BERT),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_wrong_model_is_refused(case, folder, refused):
    model = folder / "model"
    model.mkdir()
    for name, content in MODELS[case].items():
        (model / name).write_bytes(content)
    line = refused(
        "evaluate", model, "--tasks", "sources-mini", "--lrs", "1e-3", "--seeds", "0", "--steps", "1"
    )
    assert str(model) in line
