"""Untrusted models, datasets, stores and names are refused or do no harm.

Beside this: code beside a model or a tokenizer, tests/models/; packed ledgers that climb, link, lie or explode,
tests/study/test_archive.py; who may ask the live page, tests/report/test_watch.py; a browser that opens a page of odd
names, tests/report/test_browser.py; model cards, tests/export/test_card.py; pickle, eval and shells in our own code, ruff.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from faults.kinds import plan_of
from faults.tiny import write_study
from safetensors.torch import save_file
from transformers import BertConfig, BertModel

from biphase.data.shards import Writer, dtype_for
from biphase.errors import ModelError, StoreError
from biphase.models.hub import trunk
from biphase.report.build import build
from biphase.specs import Hub
from biphase.store import Store, read_verified, verify
from biphase.study import ledger
from biphase.study.ledger import finetunings

EVIL_NAME = "<img src=x onerror=alert(2)>"  # a name has no slash
EVIL = f"</script><script>alert(1)</script>{EVIL_NAME}"


class Payload:
    """What a pickle may do when it is opened."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return (Path.touch, (self.place,))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    config = BertConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=16
    )
    BertModel(config).save_pretrained(folder)
    return folder


def test_a_pickle_named_as_weights_is_not_loaded(model, tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (model / name).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(ModelError, match="cannot be"):
        trunk(Hub(str(model)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/../../outside.safetensors"]
)
def test_a_weight_index_with_a_path_outside_is_refused(model, name, tmp_path):
    weights = {"embeddings.word_embeddings.weight": torch.zeros(16, 8)}
    save_file(weights, str(tmp_path / "outside.safetensors"), {"format": "pt"})
    (model / "model.safetensors").unlink()
    listed = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(listed))
    with pytest.raises(ModelError, match="outside"):
        trunk(Hub(str(model)))


def test_code_beside_a_dataset_is_never_run(verb, tmp_path):
    """A corpus with a script in its folder is refused; a task reads its rows and leaves the script alone."""
    study = write_study(tmp_path / "input", [f"the cat sees {n}" for n in range(40)])
    script = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    for place in ("text/text.py", "tasks/beasts/beasts.py", "tasks/beasts/dataset_infos.py"):
        (tmp_path / "input" / place).write_text(script)
    study.write_text(
        study.read_text().replace("/text/train.jsonl", "/text").replace(', heldout="heldout.jsonl"', "")
    )
    code, _, err = verb("run", study, "--store", tmp_path / "store")
    assert code == 2
    assert "text.py" in err
    (tmp_path / "input" / "text" / "text.py").unlink()
    assert verb("plan", study, "--store", tmp_path / "store")[0] == 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["../../secret", "{}/secret", "a/../../../secret"])
def test_a_manifest_with_a_path_outside_is_refused(name, tmp_path):
    """The file outside is there and has the hash, so that only its path is wrong."""
    (tmp_path / "secret").write_text("secret")
    folder, name = tmp_path / "checkpoints" / "key", name.format(tmp_path)
    (folder / "a").mkdir(parents=True)
    assert (folder / name).read_text() == "secret"
    entry = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"key": "key", "files": {name: entry}}))
    with pytest.raises(StoreError, match=r"manifest\.json"):
        verify(folder)
    with pytest.raises(StoreError, match=r"manifest\.json"):
        read_verified(folder, name)


def test_a_journal_with_a_path_outside_is_not_resumed(tmp_path):
    """Its journal says which files to go on with, and the last of them is written again."""
    (tmp_path / "build").mkdir()
    (tmp_path / "outside.bin").write_bytes(b"precious, and more")
    tail = {"name": "../outside.bin", "bytes": 8, "sha256": hashlib.sha256(b"precious").hexdigest()}
    writer = Writer(tmp_path / "build", "train", dtype_for(320))
    assert not writer.restore({"finished": [], "tail": tail})
    assert (tmp_path / "outside.bin").read_bytes() == b"precious, and more"


class Tags(HTMLParser):
    """The elements of a page, and what could run on it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts, self.images, self.handlers, self.links = 0, 0, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.images += tag in ("img", "iframe", "object", "embed")
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.links += [
            value for name, value in attrs if name in ("href", "src") and "javascript:" in (value or "")
        ]


def paged(folder: Path, name: str, words: str) -> tuple[Tags, str]:
    """The page of a study that has just begun, in which everything that can be named is named so."""
    study = write_study(folder / "input", [f"{words} {n}" for n in range(40)])
    text = study.read_text()
    for old in ('"tiny", layers', '"tiny", {', '"beast"', '"clm", Stage', '"two", Stage', '"on", start'):
        word = old.split('"')[1]
        text = text.replace(old, f'"{word} " + {name!r}{old[len(word) + 2 :]}')
    text = text.replace('"""Does anything that breaks change a result?"""', f'"""{name}?"""')
    study.write_text(text)
    store = Store(folder / "store")
    plan = plan_of(study, store)
    for key in (*plan.jobs, *(training.key for training in finetunings(plan))):
        ledger.note_failure(plan, store, key, RuntimeError(words))
    built = build(plan, store, folder / "report", static=False)
    return Tags(built.page.read_text()), built.page.read_text()


def test_names_and_errors_are_escaped_on_the_page(tmp_path):
    plain, _ = paged(tmp_path / "plain", "a-name", "some words")
    evil, text = paged(tmp_path / "evil", EVIL_NAME, EVIL)
    for kind in ("scripts", "images", "handlers", "links"):
        assert getattr(evil, kind) == getattr(plain, kind), kind
    assert "alert(1)</script>" not in text
    assert "&lt;img src=x" in text, "it is shown, as text"


def test_a_study_name_cannot_leave_the_store(verb, tmp_path):
    study = write_study(tmp_path / "input", ["a"] * 40)
    text = study.read_text()
    for name in ("../out", "/out", "a/b", "..", "a\\x00b"):
        study.write_text(text.replace('Study("faults"', f'Study("{name}"'))
        code, _, err = verb("plan", study, "--store", tmp_path / "store")
        assert (code, len(err.splitlines())) == (2, 1), name
