"""Fine-tuned models, made again and exported: pipelines and embeddings that say what the scored model said."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, pipeline

from biphase import Answer, Finetune, Hub, Splits, Task
from biphase.errors import DataError, ModelError, SpecError
from biphase.export.card import grids_of, trial_for_task
from biphase.export.folder import find
from biphase.export.tuned import export_tuned, recipe_of, retrain
from biphase.finetune.encoder import TuningOptions, per_text, per_token
from biphase.specs import Pretrain, Study
from biphase.store import Store, publish, write_json
from biphase.tasks.encode import encode_texts
from biphase.tasks.load import load

SETTING = TuningOptions(torch.device("cpu"), "fp32", varlen=False, train_tokens=4_096, score_tokens=4_096)


def quiet(text):
    """Say nothing."""


def tuned(trained, task, place):
    """The folder of the fine-tuned model for a task, and the model itself, made independently."""
    trial = trial_for_task(trained.results["masked"], task, trained.store)
    made = export_tuned(trial, trained.store, place, onnx=False, say=quiet)
    return made, retrain(recipe_of(trial, trained.store), quiet)


def test_a_classifier_is_a_ready_pipeline_with_label_names(trained, tmp_path):
    made, again = tuned(trained, "kinds", tmp_path / "out")
    assert made.written.architecture == "EuroBertForSequenceClassification"
    assert "the same as when it was first made" in made.describe()
    texts = [one.text for one in load(again.recipe.trained_on, documents="judged").test]
    assert texts[0].startswith("About: ")
    ids = encode_texts(again.recipe.subject.reading, texts)
    right = per_text(again.model, ids, SETTING).softmax(-1)
    said = pipeline("text-classification", model=str(tmp_path / "out"), device="cpu")(texts, batch_size=5)
    names = ("a beast", "a place")
    assert [one["label"] for one in said] == [names[number] for number in right.argmax(-1)]
    assert {one["label"] for one in said} == set(names), "a test of one answer alone would show nothing"
    assert [one["score"] for one in said] == pytest.approx(right.max(-1).values.tolist(), rel=1e-4)


def test_a_tagger_is_a_ready_pipeline_with_label_names(trained, tmp_path):
    made, again = tuned(trained, "names", tmp_path / "out")
    assert made.written.architecture == "EuroBertForTokenClassification"
    sentences = [" ".join(one.words) for one in load(again.recipe.trained_on, documents="judged").test]
    ids = encode_texts(again.recipe.subject.reading, sentences)
    right = per_token(again.model, ids, SETTING).argmax(-1)
    tag = pipeline("token-classification", model=str(tmp_path / "out"), device="cpu", ignore_labels=[])
    names = ("O", "B-PER", "I-PER")
    seen = set()
    for number, sentence in enumerate(sentences):
        own = right[ids.starts[number] : ids.starts[number + 1] - 1]  # but the end token, which is no word
        assert [one["entity"] for one in tag(sentence)] == [names[one] for one in own]
        seen |= set(own.tolist())
    assert len(seen) > 1


@pytest.mark.parametrize("task", ["facts", "facts-too"])
def test_a_retrieval_model_is_a_ready_sentence_transformer(task, trained, tmp_path):
    from sentence_transformers import SentenceTransformer

    made, again = tuned(trained, task, tmp_path / "out")
    assert made.written.architecture == "EuroBertModel"
    assert "the same as when it was first made" in made.describe()
    assert again.recipe.trained_on.name == "facts"
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    queries = ["the cat sees the river", "two birds"]
    ids = encode_texts(again.recipe.subject.reading, [f"Query: {one}" for one in queries])
    right = per_text(again.model, ids, SETTING)
    assert np.allclose(model.encode(queries, prompt_name="query"), right.numpy(), atol=1e-5)
    assert model.prompts == {"query": "Query: ", "document": "Document: "}
    text = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers" in text
    assert '"Query: {text}" and "Document: {title}. {text}"' in text


def test_a_leaf_is_exported_by_its_own_key_too(trained, tmp_path):
    grid = next(one for one in grids_of(trained.results["masked"], trained.store) if one.task == "kinds")
    other = next(one for cell, one in grid.trials.items() if cell != (grid.rate, 0))
    made = export_tuned(
        find(other.key[:12], trained.store), trained.store, tmp_path / "out", onnx=False, say=quiet
    )
    text = (made.folder / "README.md").read_text()
    assert f"| learning rate, seed | {other.about['lr']:g}, {other.about['seed']} |" in text
    assert f"| key | `{other.key}` |" in text
    assert "labels | a beast, a place" in text
    assert '| texts | "About: {text}" |' in text


# ---------------------------------------------------------------- the model that was scored, or none


@pytest.fixture
def changeable(trained, tmp_path):
    """The trained store, with leaves that may be changed."""
    made = Store(tmp_path / "store")
    for kind in ("checkpoints", "shards", "studies"):
        made.root.mkdir(exist_ok=True)
        (made.root / kind).symlink_to(getattr(trained.store, kind))
    shutil.copytree(trained.store.trials, made.trials)
    return made


def change(store, key, edit):
    place = store.trials / key
    about = json.loads((place / "trial.json").read_text())
    edit(about)
    write_json(place / "trial.json", about)
    (place / "manifest.json").unlink()
    place.rename(store.root / "moved")
    publish(store.root / "moved", place)


def test_a_model_that_scores_otherwise_is_not_the_one_that_was_scored(changeable, trained, tmp_path):
    trial = trial_for_task(trained.results["masked"], "kinds", changeable)
    before = trial.about["scores"]["validation"]["accuracy"]
    far = before - 0.5 if before > 0.5 else before + 0.5
    change(changeable, trial.key, lambda about: about["scores"]["validation"].update(accuracy=far))
    with pytest.raises(ModelError, match="so this is not the model that was scored"):
        export_tuned(find(trial.key, changeable), changeable, tmp_path / "out", onnx=False, say=quiet)
    assert not (tmp_path / "out").exists()
    near = before - 1 / 12  # one example of twelve judged otherwise, as on another machine
    change(changeable, trial.key, lambda about: about["scores"]["validation"].update(accuracy=near))
    made = export_tuned(find(trial.key, changeable), changeable, tmp_path / "out", onnx=False, say=quiet)
    assert f"{before * 100:.2f}%, and {near * 100:.2f}% when it was first made" in made.describe()
    assert f"{near * 100:.2f}% when it was first made" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_is_not_made_again_from_other_data(changeable, trained, tmp_path):
    trial = trial_for_task(trained.results["masked"], "kinds", changeable)
    folder = shutil.copytree(trial.about["task"]["source"], tmp_path / "data")
    change(changeable, trial.key, lambda about: about["task"].update(source=str(folder)))
    assert recipe_of(find(trial.key, changeable), changeable).task.source == str(folder), (
        "the same data elsewhere"
    )
    path = next(folder.glob("train*"))
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(DataError, match=r"other data.*kinds"):
        export_tuned(find(trial.key, changeable), changeable, tmp_path / "out", onnx=False, say=quiet)


def test_what_read_forwards_only_is_no_encoder(changeable, trained, tmp_path):
    trial = trial_for_task(trained.results["masked"], "kinds", changeable)
    change(changeable, trial.key, lambda about: about["finetune"].update(causal=True))
    with pytest.raises(ModelError, match="was fine-tuned reading forwards only"):
        export_tuned(find(trial.key, changeable), changeable, tmp_path / "out", onnx=False, say=quiet)


def test_a_model_that_is_gone_cannot_be_fine_tuned_again(changeable, trained, tmp_path):
    trial = trial_for_task(trained.results["masked"], "kinds", changeable)
    change(changeable, trial.key, lambda about: about.update(model="0" * 32))
    with pytest.raises(SpecError, match=r"that was fine-tuned is not in .*run the study again"):
        export_tuned(find(trial.key, changeable), changeable, tmp_path / "out", onnx=False, say=quiet)


# ---------------------------------------------------------------- hub models, fine-tuned as they are


@pytest.fixture(scope="session")
def answering(tmp_path_factory):
    """A task of questions."""
    folder = tmp_path_factory.mktemp("answers")
    for part, first, count in (("train", 0, 12), ("validation", 12, 6), ("test", 18, 6)):
        rows = []
        for number in range(first, first + count):
            context = f"the cat saw {('Ann', 'Bob', 'Eve')[number % 3]} by the river {number}"
            name = context.split()[3]
            answers = {"text": [name], "answer_start": [context.index(name)]}
            rows.append({"question": "who was seen?", "context": context, "answers": answers})
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Task("seen", Answer(), str(folder), Splits(validation="validation*"), steps=3, batch=4)


SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def hub_folders(shards, tmp_path_factory):
    """Untrained models of two families beside a tokenizer."""
    made = {}
    for name, model in (
        ("llama", lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, bos_token_id=0, eos_token_id=0))),
        ("bert", lambda: BertModel(BertConfig(**SHAPE, pad_token_id=2))),
    ):
        made[name] = tmp_path_factory.mktemp("hub") / name
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model().save_pretrained(made[name])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(shards / "tokenizer" / file, made[name] / file)
    return made


def evaluated(folder, task, store, protocol="standard"):
    """The only trial of a model as it is on a task."""
    from biphase.study.ledger import finetunings
    from biphase.study.plan import identities, make_plan, save_plan
    from biphase.study.worker import Worker
    from biphase.training.distributed import Ranks
    from biphase.training.options import RuntimeOptions

    grid = Finetune(task, lrs=(1e-3,), seeds=(0,), protocol=protocol, precision="fp32")
    known = identities(store)
    plan = make_plan(Study("as-it-is", (Pretrain("it", start=Hub(str(folder))),), grid), known)
    save_plan(plan, store)
    options = RuntimeOptions(quiet=True, loaders=0)
    Worker(plan, store, known, Ranks(0, 1, torch.device("cpu")), options, wanted=set(), say=quiet).work()
    return find(next(finetunings(plan)).trials[0].key, store)


@pytest.mark.parametrize(
    ("family", "architecture"), [("llama", "LlamaForQuestionAnswering"), ("bert", "BertForQuestionAnswering")]
)
def test_answers_by_start_and_end_where_transformers_has_a_class(
    family, architecture, hub_folders, answering, tmp_path
):
    from transformers import AutoModelForQuestionAnswering

    store = Store(tmp_path / "store")
    trial = evaluated(hub_folders[family], answering, store)
    made = export_tuned(trial, store, tmp_path / "out", onnx=False, say=quiet)
    assert made.written.architecture == architecture
    again = retrain(recipe_of(trial, store), quiet)
    text = "Question: who was seen?\nContext: the cat saw Eve by the river 3"
    ids = encode_texts(again.recipe.subject.reading, [text])
    right = per_token(again.model, ids, SETTING)
    inputs = AutoTokenizer.from_pretrained(made.folder)(text, return_tensors="pt")
    with torch.no_grad():
        said = AutoModelForQuestionAnswering.from_pretrained(made.folder)(**inputs)
    both = torch.stack([said.start_logits, said.end_logits], -1)[0].numpy()
    assert np.allclose(both, right, atol=1e-5)
    with pytest.raises(SpecError, match="two outputs, not one graph"):
        export_tuned(trial, store, tmp_path / "graph", onnx=True, say=quiet)


def test_answers_as_tags_are_a_tagger(hub_folders, answering, tmp_path):
    store = Store(tmp_path / "store")
    trial = evaluated(hub_folders["llama"], answering, store, protocol="paper")
    made = export_tuned(trial, store, tmp_path / "out", onnx=False, say=quiet)
    assert made.written.architecture == "EuroBertForTokenClassification"  # Llama has the usual shape
    config = json.loads((made.folder / "config.json").read_text())
    assert config["id2label"] == {"0": "O", "1": "ANSWER"}


def test_what_transformers_has_no_class_for_is_refused_before_the_work(
    trained, hub_folders, answering, tasks, tmp_path
):
    store, said = Store(tmp_path / "store"), []
    trial = evaluated(hub_folders["bert"], tasks[0], store)  # its classifier pools otherwise than ours
    with pytest.raises(
        ModelError, match="no class that does text-classification on BertModel as it was fine-tuned"
    ):
        export_tuned(trial, store, tmp_path / "out", onnx=False, say=said.append)
    assert not any("fine-tuning" in one for one in said)
    assert not (tmp_path / "out").exists()
