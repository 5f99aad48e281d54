"""Exported folders in transformers 4.57, which does not know `is_causal`: it must refuse what it would read causally.

The old version is installed once, with pip, into an environment of its own below ~/.cache; torch is that of the tests.
Where it cannot be installed the test fails: nothing else shows that old versions do not read an encoder as a decoder.
"""

import json
import os
import subprocess
import sysconfig
import uuid
import venv
from pathlib import Path

import pytest
import torch
from families.build import Family, build

from biphase.attention import NAME
from biphase.data.tokenizer import load_saved
from biphase.export.checkpoint import write_encoder
from biphase.export.writing import LEAST, tokenizer_of
from biphase.models.backbone import LanguageModel

OLD = "4.57.6"
DECODERS = ("qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "gpt2", "gpt_neox", "olmo2", "llama")
ENCODERS = ("bert", "roberta", "modernbert")

# For each folder: why it was refused, or its hidden states of two texts that differ in the last token.
LOOK = """
import json, sys, torch, transformers
assert transformers.__version__ == sys.argv[1], transformers.__version__
said = {}
for folder in sys.argv[2:]:
    try:
        model = transformers.AutoModel.from_pretrained(folder).eval()
    except Exception as wrong:
        said[folder] = f"{type(wrong).__name__}: {wrong}"
        continue
    with torch.no_grad():
        said[folder] = model(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])).last_hidden_state.tolist()
print(json.dumps(said))
"""


@pytest.fixture(scope="session")
def old_python():
    """A Python that imports the old transformers, and everything else from this environment."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "biphase-tests"
    place = cache / f"transformers-{OLD}-python-{sysconfig.get_python_version()}"
    if not place.is_dir():
        draft = cache / uuid.uuid4().hex
        venv.create(draft, with_pip=True)
        command = [draft / "bin" / "python", "-m", "pip", "install", "--quiet", f"transformers=={OLD}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"transformers {OLD} cannot be installed: {done.stderr}"
        draft.rename(place)
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return place / "bin" / "python"


@pytest.mark.campaign
def test_transformers_4_refuses_what_it_would_read_causally(old_python, shards, tmp_path):
    words = tokenizer_of(load_saved(shards / "tokenizer"), bos=False, context=60)
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    right, written = {}, {}
    for family in (*map(Family, DECODERS), *(Family(name, masked=True) for name in ENCODERS)):
        model = build(family)
        model.set_attn_implementation(NAME)
        folder = str(tmp_path / family.model_type)
        Path(folder).mkdir()
        written[folder] = write_encoder(LanguageModel(model).eval(), words, Path(folder))
        model.set_attn_implementation("eager")
        right[folder] = model.base_model(ids)[0] if family.masked else None
    command = [old_python, "-c", LOOK, OLD, *written]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for folder, said in json.loads(done.stdout.splitlines()[-1]).items():
        about = written[folder]
        if about.needs:
            assert isinstance(said, str), f"{folder} is read, and should not be"
            assert f"transformers>={LEAST}" in said or "eurobert" in said, said
        else:  # an encoder whose configuration the old version knows
            assert torch.allclose(torch.tensor(said), right[folder], atol=1e-4), folder
    assert [Path(folder).name for folder, about in written.items() if not about.needs] == ["bert", "roberta"]
    assert sum(about.marked for about in written.values()) >= 8
