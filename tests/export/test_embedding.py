"""An embedding model from a contrastive stage: as a user makes it, in the report, and in sentence-transformers."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from biphase import CATALOG, CLM, WSD, Contrastive, Finetune, Pairs, Stage, Study
from biphase.data.shards import Shards
from biphase.finetune.encoder import TaskModel, TuningOptions, encoder_of_checkpoint, per_text
from biphase.models.encoder import EmbeddingHead
from biphase.study.load import load
from biphase.study.plan import identities, make_plan
from biphase.tasks.encode import encode_texts
from biphase.tasks.load import load_pairs

TASK = CATALOG["scifact-mini"]
TEXTS = ["the cat sees the river", "A dog crosses two birds. 3,141.59 €", "a", "the old house " * 30]


@pytest.fixture
def pairs(tmp_path):
    rows = [{"anchor": f"who sees {n}", "answer": f"the cat sees {n}"} for n in range(64)]
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Pairs(str(tmp_path / "pairs" / "*.jsonl"))


@pytest.fixture
def trained(tiny_run, store, study_file, verb):
    """Runs a study whose model ends with a stage on pairs; gives its file, its plan, and what the run told."""

    def make(*sources):
        objective = Contrastive(sources, batch=16, length=24, heldout=0.3)
        run = tiny_run("pairs", Stage(CLM(), 6), Stage(objective, 10), schedule=WSD(3e-3, 2, 0))
        grid = Finetune((replace(TASK, steps=0),), lrs=1e-5, seeds=0, protocol="standard", precision="fp32")
        file = study_file(Study("pairs", (run,), grid), "Does it find?")
        code, out, told = verb("run", file, "--store", store.root)
        assert code == 0, told
        study = load(file).study
        return file, make_plan(study, identities(store)), out

    return make


def embedded(plan, store, texts):
    """The vectors of texts as zero-shot retrieval computes them."""
    run = plan.study.runs[0]
    shards = Shards.open(next(store.shards.iterdir()))
    loaded = encoder_of_checkpoint(
        run, plan.results["pairs"], store, shards, replace(plan.study.finetune, length=32)
    )
    ids = encode_texts(loaded.tokenization, texts)
    options = TuningOptions.of(torch.device("cpu"), "fp32", varlen=False)
    return per_text(TaskModel(loaded.encoder, EmbeddingHead()).eval(), ids, options).numpy()


def test_sentence_transformers_gives_the_embeddings_that_were_trained(trained, store, pairs, verb, tmp_path):
    _, plan, _ = trained(pairs)
    code, _, told = verb("export", plan.results["pairs"][:8], tmp_path / "model", "--store", store.root)
    assert code == 0, told
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    vectors = model.encode(TEXTS)
    assert np.abs(vectors - embedded(plan, store, TEXTS)).max() < 1e-5
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.array_equal(model.encode_query(TEXTS), vectors), "pairs of files have no prompts"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card
    assert "library_name: sentence-transformers" in card
    assert "fill-mask says means little" in card
    assert "not an embedding model" not in card


def test_pairs_are_read_before_anything_is_computed(tiny_run, store, study_file, verb, pairs, tmp_path):
    absent = Pairs(pairs.source, query="asked")
    for source, batch, fact in ((pairs, 65, "batch="), (absent, 16, "'asked'")):
        run = tiny_run("pairs", Stage(CLM(), 6), Stage(Contrastive(source, batch=batch, length=24), 4))
        code, _, told = verb("run", study_file(Study("pairs", (run,))), "--store", store.root)
        assert code == 2
        assert fact in told
        assert not store.checkpoints.exists() or not [*store.checkpoints.iterdir()]


def test_prompts_are_those_of_the_pairs(trained, store, pairs, verb, tmp_path):
    for number, sources in enumerate(([TASK], [TASK, pairs])):
        _, plan, _ = trained(*sources)
        folder = tmp_path / str(number)
        code, _, told = verb("export", plan.results["pairs"][:8], folder, "--store", store.root)
        assert code == 0, told
        prompts = json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]
        several = number == 1
        assert prompts == (
            {"query": "", "document": ""} if several else {"query": "Query: ", "document": "Document: "}
        )
        assert ("several prompts" in (folder / "README.md").read_text()) == several
    first = load_pairs(TASK)[0]
    assert first.query.startswith("Query: ")
    assert first.document.startswith("Document: ")


def test_report_and_tables_show_the_stage_and_another_machine_needs_no_pairs(
    trained, store, pairs, verb, tmp_path
):
    file, _, out = trained(pairs)
    assert "contrastive" in out
    assert "ndcg@10" in out
    code, out, told = verb("report", file, "--store", store.root, "--no-print", "--out", tmp_path / "report")
    assert code == 0, told
    assert "Held out, contrastive" in (tmp_path / "report" / "report.html").read_text()
    archive = tmp_path / "results.tar.zst"
    assert verb("ledger", "pack", file, archive, "--store", store.root)[0] == 0
    shutil.rmtree(tmp_path / "pairs")
    code, out, told = verb("ledger", "merge", archive, "--store", tmp_path / "there")
    assert code == 0, told
    merged = tmp_path / "there" / "studies" / "pairs" / "plan.json"
    code, out, told = verb("status", merged, "--store", tmp_path / "there")
    assert code == 0, told
    assert "2/2" in out
    assert "contrastive" in out
