"""Fine-tuned models, made again and exported: pipelines and embeddings that say what the scored model said."""

import json
import shutil

import numpy as np
import pytest
import torch
from families import tiny
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, pipeline

from biphase import Finetune, Hub, MultiLabel, Regress
from biphase.errors import DataError, ModelError, SpecError
from biphase.export.card import trial_for_task
from biphase.export.folder import find
from biphase.export.tuned import export_tuned, recipe_of, retrain
from biphase.finetune.encoder import TuningOptions, per_text, per_token
from biphase.specs import Pretrain, Study
from biphase.store import Store
from biphase.study.ledger import finetunings
from biphase.tasks.encode import encode_texts
from biphase.tasks.load import load

OPTIONS = TuningOptions(torch.device("cpu"), "fp32", varlen=False, train_tokens=4_096, score_tokens=4_096)


def exported(trial, store, folder, say=lambda text: None, *, onnx=False):
    return export_tuned(trial, store, folder, onnx=onnx, say=say)


def tuned(trial, store, folder):
    """The exported fine-tuned model of a trial, and the model itself, made independently."""
    made = exported(trial, store, folder)
    return made, retrain(recipe_of(trial, store), lambda text: None)


def of_task(trained, task):
    return trial_for_task(trained.results["masked"], task, trained.store)


def ids_of(again, texts):
    return encode_texts(again.recipe.encoder.tokenization, texts)


def rated(count, first=0):
    return [{"text": f"{'good ' * (n % 5)}{first + n}", "label": n % 5 / 2} for n in range(count)]


def labelled(count, first=0):
    names = ("beast", "place")
    return [
        {"text": f"{' and '.join(names[: n % 3])} {first + n}", "labels": list(names[: n % 3])}
        for n in range(count)
    ]


@pytest.mark.parametrize("kind", ["kinds", "numbers", "several"])
def test_a_text_classifier_is_a_ready_pipeline_with_label_names(kind, trained, evaluated, own_task, tmp_path):
    if kind == "kinds":
        trial, store = of_task(trained, "kinds"), trained.store
    elif kind == "numbers":
        trial, store = evaluated("llama", own_task(Regress("{text}"), rated, 6))
    else:
        task = own_task(MultiLabel("{text}", ("beast", "place")), labelled, 6)
        trial, store = evaluated("llama", task, best_epoch=True)
    made, again = tuned(trial, store, tmp_path / "out")
    assert made.written.architecture == "EuroBertForSequenceClassification"
    assert "the same as when it was first made" in made.describe()
    texts = [example.text for example in load(again.recipe.trained_on, documents="judged").test]
    right = per_text(again.model, ids_of(again, texts), OPTIONS)
    if kind == "kinds":
        assert texts[0].startswith("About: ")
        assert len(set(right.argmax(-1).tolist())) > 1, "a test of one answer would show nothing"
    numbers = {"kinds": right.softmax(-1), "numbers": right, "several": right.sigmoid()}[kind].tolist()
    config = json.loads((made.folder / "config.json").read_text())
    problem = {"numbers": "regression", "several": "multi_label_classification"}.get(kind)
    assert config.get("problem_type") == problem
    names = {"kinds": ["a beast", "a place"], "numbers": ["number"], "several": ["beast", "place"]}[kind]
    say = pipeline("text-classification", model=str(made.folder), device="cpu", top_k=None)
    for answers, wanted in zip(say(texts, batch_size=5), numbers, strict=True):
        said = {answer["label"]: answer["score"] for answer in answers}
        assert said == pytest.approx(dict(zip(names, wanted, strict=True)), rel=1e-4)
    card = (made.folder / "README.md").read_text()
    assert ('model="FOLDER", top_k=None)' in card) == (kind == "several")
    (steps,) = [line for line in card.splitlines() if line.startswith("| steps |")]
    best = trial.about.get("best_step")
    assert (best is not None) == (f"step {best} are kept" in steps) == (kind == "several")


def test_a_tagger_is_a_ready_pipeline_with_label_names(trained, tmp_path):
    made, again = tuned(of_task(trained, "names"), trained.store, tmp_path / "out")
    assert made.written.architecture == "EuroBertForTokenClassification"
    examples = load(again.recipe.trained_on, documents="judged").test
    sentences = [" ".join(example.words) for example in examples]
    ids = ids_of(again, sentences)
    right = per_token(again.model, ids, OPTIONS).argmax(-1)
    tag = pipeline("token-classification", model=str(tmp_path / "out"), device="cpu", ignore_labels=[])
    names = ("O", "B-PER", "I-PER")
    for number, sentence in enumerate(sentences):
        own = right[ids.starts[number] : ids.starts[number + 1] - 1]  # but the end token, which is no word
        assert [answer["entity"] for answer in tag(sentence)] == [names[label] for label in own]
    assert len(np.unique(right)) > 1


@pytest.mark.parametrize("task", ["facts", "facts-too"])
def test_a_retrieval_model_is_a_ready_sentence_transformer(task, trained, tmp_path):
    from sentence_transformers import SentenceTransformer

    made, again = tuned(of_task(trained, task), trained.store, tmp_path / "out")
    assert made.written.architecture == "EuroBertModel"
    assert again.recipe.trained_on.name == "facts"
    model = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    queries = ["the cat sees the river", "two birds"]
    right = per_text(again.model, ids_of(again, [f"Query: {query}" for query in queries]), OPTIONS)
    assert np.allclose(model.encode(queries, prompt_name="query"), right.numpy(), atol=1e-5)
    assert model.prompts == {"query": "Query: ", "document": "Document: "}
    text = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: sentence-transformers" in text
    assert '"Query: {text}" and "Document: {title}. {text}"' in text


# ---------------------------------------------------------------- the model that was scored, or none


def test_a_model_that_scores_otherwise_is_not_the_one_that_was_scored(changeable, trained, tmp_path):
    key = of_task(trained, "kinds").key
    before = find(key, changeable).about["scores"]["validation"]["accuracy"]
    far = before - 0.5 if before > 0.5 else before + 0.5
    changeable.change(key, lambda about: about["scores"]["validation"].update(accuracy=far))
    with pytest.raises(ModelError, match="was scored"):
        exported(find(key, changeable), changeable, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    near = before - 1 / 12  # one example of twelve judged otherwise, as on another machine
    changeable.change(key, lambda about: about["scores"]["validation"].update(accuracy=near))
    made = exported(find(key, changeable), changeable, tmp_path / "out")
    assert f"{before * 100:.2f}%, and {near * 100:.2f}% when it was first made" in made.describe()
    assert f"{near * 100:.2f}% when it was first made" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("edit", "error", "match"),
    [
        (lambda about: about["finetune"].update(causal=True), ModelError, "was fine-tuned.*reading forwards"),
        (lambda about: about.update(model="0" * 32), SpecError, "that was fine-tuned.*run.*study again"),
    ],
)
def test_what_read_forwards_only_or_is_gone_is_refused(edit, error, match, changeable, trained, tmp_path):
    key = of_task(trained, "kinds").key
    changeable.change(key, edit)
    with pytest.raises(error, match=match):
        exported(find(key, changeable), changeable, tmp_path / "out")


def test_a_model_is_not_made_again_from_other_data(changeable, trained, tmp_path):
    trial = of_task(trained, "kinds")
    folder = shutil.copytree(trial.about["task"]["source"], tmp_path / "data")
    changeable.change(trial.key, lambda about: about["task"].update(source=str(folder)))
    elsewhere = recipe_of(find(trial.key, changeable), changeable)
    assert elsewhere.task.source == str(folder), "the same data elsewhere"
    path = next(folder.glob("train*"))
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(DataError, match=r"other data.*kinds"):
        exported(find(trial.key, changeable), changeable, tmp_path / "out")


# ---------------------------------------------------------------- hub models, fine-tuned as they are


@pytest.fixture(scope="session")
def hub_folders(shards, tmp_path_factory):
    """Untrained models of two families beside a tokenizer."""
    folders = {}
    for family, fields in (("llama", {"bos_token_id": 0, "eos_token_id": 0}), ("bert", {"pad_token_id": 2})):
        folders[family] = tmp_path_factory.mktemp("hub") / family
        tiny.with_head(family, vocab_size=320, **fields).save_pretrained(folders[family])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(shards / "tokenizer" / file, folders[family] / file)
    return folders


@pytest.fixture
def evaluated(hub_folders, work, tmp_path):
    """The only trial of a model as it is on a task, and its store."""

    def evaluate(family, task, protocol="standard", *, best_epoch=False):
        store = Store(tmp_path / "store")
        more = {"protocol": protocol, "best_epoch": best_epoch}
        grid = Finetune(task, lrs=(1e-3,), seeds=(0,), precision="fp32", **more)
        plan = work(Study("as-it-is", (Pretrain("it", start=Hub(str(hub_folders[family]))),), grid), store)
        return find(next(finetunings(plan)).trials[0].key, store), store

    return evaluate


def test_answers_by_start_and_end_where_transformers_has_a_class(evaluated, answering, tmp_path):
    trial, store = evaluated("bert", answering)
    made, again = tuned(trial, store, tmp_path / "out")
    assert made.written.architecture == "BertForQuestionAnswering"
    text = "Question: who was seen?\nContext: the cat saw Eve by the river 3"
    right = per_token(again.model, ids_of(again, [text]), OPTIONS)
    inputs = AutoTokenizer.from_pretrained(made.folder)(text, return_tensors="pt")
    with torch.no_grad():
        answer = AutoModelForQuestionAnswering.from_pretrained(made.folder)(**inputs)
    both = torch.stack([answer.start_logits, answer.end_logits], -1)[0].numpy()
    assert np.allclose(both, right, atol=1e-5)
    with pytest.raises(SpecError, match="two outputs,"):
        exported(trial, store, tmp_path / "graph", onnx=True)


def test_answers_as_tags_are_a_tagger(evaluated, answering, tmp_path):
    made = exported(*evaluated("llama", answering, protocol="paper"), tmp_path / "out")
    assert made.written.architecture == "EuroBertForTokenClassification"  # Llama has the usual shape
    config = json.loads((made.folder / "config.json").read_text())
    assert config["id2label"] == {"0": "O", "1": "ANSWER"}


def test_what_transformers_has_no_class_for_is_refused_before_the_work(evaluated, tasks, tmp_path):
    trial, store = evaluated("bert", tasks[0])  # its classifier pools otherwise than ours
    messages = []
    with pytest.raises(ModelError, match=r"class.*text-classification on BertModel.*fine-tuned"):
        exported(trial, store, tmp_path / "out", messages.append)
    assert not any("fine-tuning" in message for message in messages)
    assert not (tmp_path / "out").exists()
