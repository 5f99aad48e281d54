"""A model folder that was hurt after it was exported: refused in one line, or another model under another key.

Such a folder has no manifest, since other tools write and read it too. What it holds is part of the key instead.
"""

from __future__ import annotations

import json
import shutil

import pytest
from faults.damage import TRIES, hurt

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
EVERY = [(name, *one) for name in FILES for one in TRIES]
FEW = [("config.json", "cut", 0), ("model.safetensors", "flipped", 0), ("tokenizer.json", "emptied", 0)]


@pytest.fixture(scope="module")
def exported(calm, tmp_path_factory):
    """The study's end as a folder, and the store of its evaluation."""
    from faults.kinds import plan_of
    from typer.testing import CliRunner

    from biphase.cli import app

    folder = tmp_path_factory.mktemp("exported") / "model"
    key = plan_of(calm.study, calm.store).results["on"]
    done = CliRunner().invoke(app, ["export", key, str(folder), "--store", str(calm.store.root)])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def evaluated(calm, verb):
    """The leaves of an evaluation by their keys, or None where it was refused."""

    def typed(folder, store):
        words = [
            "--tasks",
            calm.study.parent / "tasks" / "beasts",
            "--lrs",
            "1e-3",
            "--seeds",
            "0",
            "--steps",
            "2",
        ]
        code, out, err = verb("evaluate", folder, *words, "--quiet", "--store", store)
        assert "Traceback" not in out + err
        assert code in (0, 1, 2)
        if code:
            assert str(folder) in out + err, "it is named"
            return None
        found = (store / "trials").glob("*/trial.json")
        return {path.parent.name: json.loads(path.read_text())["scores"] for path in found}

    return typed


def check(exported, evaluated, tmp_path, name, damage, seed):
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    whole = evaluated(folder, tmp_path / "whole")
    assert whole is not None
    (folder / name).stat()
    hurt(folder / name, damage, seed)
    found = evaluated(folder, tmp_path / "hurt")
    for key, scores in (found or {}).items():
        assert whole.get(key, scores) == scores, "another model has another key"


@pytest.mark.parametrize(("name", "damage", "seed"), FEW)
def test_a_damaged_model_is_refused_or_another_one(exported, evaluated, tmp_path, name, damage, seed):
    check(exported, evaluated, tmp_path, name, damage, seed)


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "damage", "seed"), [one for one in EVERY if one not in FEW])
def test_no_damage_to_a_model_gives_its_key_other_scores(exported, evaluated, tmp_path, name, damage, seed):
    check(exported, evaluated, tmp_path, name, damage, seed)
