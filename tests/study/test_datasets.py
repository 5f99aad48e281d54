"""Tasks as the command line says them: names, local copies, own data; and what docs/tasks.md says of them."""

import json
import re
from pathlib import Path

import pytest

from biphase import (
    CATALOG,
    TASKS,
    Answer,
    Choose,
    Classify,
    Finetune,
    MultiLabel,
    Regress,
    Retrieve,
    Splits,
    Tag,
    Task,
)
from biphase.data.corpus import Absent
from biphase.errors import DataError, SpecError
from biphase.study import datasets
from biphase.study.datasets import OwnData
from biphase.tasks.load import load

DOCS = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def lay(folder, **parts):
    """A folder of parts: rows of JSON lines, or the text of a CSV file."""
    for name, rows in parts.items():
        write(folder / f"{name}.{'csv' if isinstance(rows, str) else 'jsonl'}", rows)
    return str(folder)


def tasks_named(names, data=None, steps=0, **options):
    return datasets.tasks_named(names, OwnData(**options), data=data, steps=steps)


def one(names, **options):
    (made,) = tasks_named(names, **options)
    return made


def rows_of(task):
    return load(task, documents="all")


def sizes(task):
    parts = rows_of(task)
    return len(parts.train), len(parts.validation), len(parts.test)


def refused(words, names, **options):
    with pytest.raises(SpecError, match=words) as caught:
        tasks_named(names, **options)
    assert "\n" not in str(caught.value)


def reviews(count=40):
    return [{"text": f"t{n}", "label": ("good", "bad")[n % 2]} for n in range(count)]


def questions(count, answer="some"):
    return [
        {"id": str(n), "question": f"q{n}", "context": "some context", "answers": answer}
        for n in range(count)
    ]


def beir(folder, *parts, title=True):
    extra = {"title": "t"} if title else {}
    write(folder / "corpus.jsonl", [{"_id": f"d{n}", "text": f"x{n}", **extra} for n in range(20)])
    write(folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"y{n}"} for n in range(20)])
    judged = "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(20))
    for part in parts:
        write(folder / "qrels" / f"{part}.tsv", judged)
    return str(folder)


NUMBERED = [{"text": f"t{n}", "label": n % 2} for n in range(40)]
TAGGED = [{"tokens": ["Ada", "L"], "ner_tags": [1, 2]}, {"tokens": ["x"], "ner_tags": [0]}] * 20
NAMED_TAGS = [{"tokens": ["Ada"], "tags": ["B-PER"]}, {"tokens": ["x"], "tags": ["O"]}] * 20


# ---------------------------------------------------------------- names


def test_known_tasks_come_by_name_by_family_or_all_of_the_paper():
    assert tasks_named("sst2, squad") == (CATALOG["sst2"], CATALOG["squad"])
    assert tasks_named("paper") == TASKS
    assert [task.name for task in tasks_named("boolq,QA,squad")] == ["boolq", "squad", "squad_v2", "record"]
    assert [task.name for task in tasks_named("SR,ML,MC")] == [
        "stsb",
        "go_emotions",
        "commonsense_qa",
        "swag",
    ], "families without tasks of the paper"
    borrowing = tasks_named("nq,mldr_en")
    assert [task.name for task in borrowing] == ["msmarco", "nq", "mldr_en"], "they bring their lender"
    assert Finetune(borrowing).finetunings  # the record accepts them


def test_unknown_names_and_idle_options_are_refused(tmp_path):
    texts = lay(tmp_path / "texts", train=reviews(), test=reviews(9))
    asked = lay(tmp_path / "questions", train=questions(40), test=questions(9))
    searched = beir(tmp_path / "searched", "train", "test")
    tested = lay(tmp_path / "tested", test=questions(9))
    for facts, names, options in (
        ("'sst3';.*'sst2'", "sst3", {}),
        ("no task", " , ", {}),
        ("your own", "sst2", {"label": "x"}),
        ("--query.*IR.*as SC", texts, {"query": "{text}"}),
        ("--labels.*SC.*as QA", asked, {"labels": "a,b"}),
        ("--label.*SC.*as IR", searched, {"label": "text"}),
        ("--trained-on squadd.*'squad'", tested, {"trained_on": "squadd"}),
        ("--trained-on question.*'questions'", f"{asked},{tested}", {"trained_on": "question"}),
        ("--family SX: ", texts, {"family": "SX"}),
        (r"has no corpus\* and queries\*", texts, {"family": "IR"}),
        ("no folder", "sst2", {"data": tmp_path / "nowhere"}),
        ("--test.*no file", texts, {"test": tmp_path / "nowhere.csv"}),
    ):
        refused(facts, names, **options)
    assert len(tasks_named(f"{texts},{searched}", query="{text}")) == 2, "one of them reads it"


# ---------------------------------------------------------------- local copies


def test_a_folder_of_the_tasks_name_goes_before_the_hub(tmp_path, monkeypatch):
    rows = [{"sentence": f"s{n}", "label": n % 2} for n in range(40)]
    for folder in ("data", "glue"):
        lay(tmp_path / folder / "sst2", train=rows, validation=rows)
    asked = [{"question": "q", "context": "c", "answers": "c"}] * 40
    lay(tmp_path / "squad" / "plain_text", train=asked, validation=asked)  # also the name of the task
    monkeypatch.chdir(tmp_path)
    sst2, qqp = tasks_named("sst2,qqp", data=Path("data"))
    assert (sst2.source, qqp) == ("./data/sst2", CATALOG["qqp"])
    for task in (sst2, *tasks_named("sst2,squad", data=tmp_path)):  # copies of repositories as they stand
        assert len(rows_of(task).train) == 38
    lay(tmp_path / "less" / "sst2", train=[{}])
    with pytest.raises(Absent, match=r"'sst2':.*sst2 matches 'validation\*'"):  # and is not passed over
        tasks_named("sst2", data=tmp_path / "less")


# ---------------------------------------------------------------- parts of own data


def test_a_folder_of_texts_and_labels(tmp_path, monkeypatch):
    lay(tmp_path / "my reviews", train=reviews(), test=reviews(9))
    monkeypatch.chdir(tmp_path)
    task = one("my reviews")
    assert task == Task("my-reviews", Classify("{text}", ("bad", "good")), "my reviews", Splits())
    assert sizes(task) == (38, 2, 9)
    assert rows_of(task).test[0].label == 1


def test_parts_that_are_absent_or_ambiguous_are_refused_with_what_to_type(tmp_path):
    for facts, *parts in (
        (r"train\* and test\*, but reddit.jsonl and wiki.jsonl.*--tasks \S*/FILE --test \S*/FILE", "reddit", "wiki"),
        (r"files test\*, but eval.jsonl.*--test", "train", "eval"),
        (r"files train\*, but.*--trained-on", "test"),
        (r"validation_a.jsonl and.*--test \S*/validation_a.jsonl", "train", "validation_a", "validation_b"),
        (r"train_a.jsonl and train_b.jsonl.*train part.*--tasks", "train_a", "train_b", "test"),
    ):  # fmt: skip
        refused(facts, lay(tmp_path / "-".join(parts), **dict.fromkeys(parts, NUMBERED)))
    folder = tmp_path / "train-validation_a-validation_b"
    task = one(str(folder), test=folder / "validation_a.jsonl")
    assert (task.splits.validation, task.splits.cut_from) == ("", "train")
    shards = {"train-00000-of-00002": reviews(), "train-00001-of-00002": reviews(), "test": reviews()}
    assert one(lay(tmp_path / "c", **shards)).splits.train == "train*"
    folder, other = beir(tmp_path / "beir", "dl19", "dl20"), tmp_path / "beir" / "qrels" / "dl20.tsv"
    refused(r"dl19.tsv.*--test \S*beir/qrels/dl19.tsv", folder, zero_shot=True)
    assert one(folder, zero_shot=True, test=other).splits.test.endswith("dl20.tsv")


def test_folders_of_parts_are_parts_and_configurations_are_told_apart(tmp_path):
    for part in ("train", "test"):
        write(tmp_path / "default" / part / "0000.jsonl", NUMBERED[:20])
        write(tmp_path / "default" / part / "0001.jsonl", NUMBERED[20:])
    assert len(rows_of(one(str(tmp_path))).test) == 40
    write(tmp_path / "default" / "val" / "0000.jsonl", NUMBERED[:7])
    assert len(rows_of(one(str(tmp_path))).validation) == 7
    for name in ("cola", "sst2"):
        lay(tmp_path / "glue" / name, train=NUMBERED, validation=NUMBERED)
    refused(r"sst2;.*--tasks \S*glue/cola", str(tmp_path / "glue"))
    twice = "text,label\nx,0\ny,1\n"
    task = one(lay(tmp_path / "glue" / "sst2", train=twice, validation=twice))
    assert (task.name, len(rows_of(task).test)) == ("sst2", 40), "one part in two formats is read once"


@pytest.mark.parametrize("unlabelled", [-1, None, "no column"])
def test_a_test_part_without_labels_is_not_scored_but_validation_is(unlabelled, tmp_path):
    def bare(rows, kept, column, value):
        more = {} if unlabelled == "no column" else {column: value}
        return [{kept: row[kept]} | more for row in rows]

    texts = bare(NUMBERED, "text", "label", unlabelled)
    task = one(lay(tmp_path / "a", train=NUMBERED, validation=NUMBERED[:20], test=texts))
    assert task.splits == Splits(test="validation*")
    assert len(rows_of(task).test) == 20
    refused("no labels.*--test", lay(tmp_path / "b", train=NUMBERED, test=texts))
    words = bare(TAGGED, "tokens", "tags", [unlabelled])
    assert one(lay(tmp_path / "c", train=NAMED_TAGS, dev=NAMED_TAGS, test=words)).splits.test == "dev*"


# ---------------------------------------------------------------- columns and labels of own data


@pytest.mark.parametrize(
    ("columns", "text", "label"),
    [
        (("premise", "hypothesis", "label", "idx"), "Premise: {premise}\nHypothesis: {hypothesis}", "label"),
        (("question", "title", "passage", "answer"), "Question: {question}\nPassage: {passage}", "answer"),
        (("idx", "tweet", "sentiment"), "{tweet}", "sentiment"),
        (("id", "Text", "Label"), "{Text}", "Label"),
        (("text", "stance"), "{text}", "stance"),
    ],
)
def test_columns_of_usual_names_need_no_options(columns, text, label, tmp_path):
    rows = [{name: n % 2 if name == label else f"{name} {n}" for name in columns} for n in range(40)]
    task = one(lay(tmp_path, train=rows, test=rows))
    assert (task.form.text, task.form.label) == (text, label)


def test_columns_labels_and_family_may_be_said(tmp_path):
    rows = [{"a": f"a{n}", "b": "b", "answer": n % 2} for n in range(30)]
    folder = lay(tmp_path / "a", train=rows, test=rows)
    for options in ({}, {"label": "answer"}):
        refused("--text", folder, **options)
    refused("--label.*a, b, c", lay(tmp_path / "x", train=[{"a": 1, "b": 1, "c": 1}], test=[{}]))
    task = one(folder, text="A: {a} B: {b}", label="answer", labels="no, yes")
    assert task.form == Classify("A: {a} B: {b}", ("no", "yes"), label="answer")
    assert rows_of(task).test[3].text == "A: a3 B: b"
    assert one(folder, text="a", label="answer").form == Classify("{a}", ("0", "1"), label="answer")
    rows = [{"question": "q", "context": "c", "answer": "c", **row} for row in NUMBERED]
    folder = lay(tmp_path / "b", train=rows, test=rows)
    assert isinstance(one(folder).form, Answer)
    assert one(folder, family="SC").form == Classify("{text}", ("0", "1"))


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([10, 9, 2], ("2", "9", "10")),
        (["10", "9"], ("9", "10")),
        ([True, False], ("False", "True")),
        (["b", "1"], ("1", "b")),
    ],
)
def test_labels_are_read_from_the_data_in_order(values, labels, tmp_path):
    rows = [{"text": "x", "label": values[n % len(values)]} for n in range(30)]
    task = one(lay(tmp_path, train=rows, test=rows))
    assert task.form == Classify("{text}", labels)
    assert {one.label for one in rows_of(task).test} == set(range(len(labels)))


@pytest.mark.parametrize(
    ("facts", "labels"),
    [
        ("not labels", [n + 0.5 for n in range(9)]),
        ("over 1,000 values", [str(n) for n in range(1_001)]),
        ("train.jsonl:1.*a row", [["a", "b"]] * 9),
        *(("train.jsonl:2.*'label'", ["good", nothing]) for nothing in (None, "  ", float("nan"), {"x": 1})),
        ("train.jsonl:2.*'good '.*space", ["good", "good "]),
        ("'label'.*'good',.*--label COLUMN", ["good", "good"]),
    ],
)
def test_what_cannot_be_labels_is_refused(facts, labels, tmp_path):
    rows = [{"text": "x", "label": label} for label in labels]
    refused(facts, lay(tmp_path, train=rows, test=rows))


def test_words_and_tags_are_token_classification(tmp_path):
    rows = [{"words": ["Ada", "of", "London"], "ner_tags": ["B-PER", "O", "B-LOC"]}] * 30
    task = one(lay(tmp_path / "names", train=rows, test=rows))
    assert isinstance(task.form, Tag)
    assert task.form.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert rows_of(task).test[0].tags == (3, 0, 1)
    numbered = lay(tmp_path / "numbers", train=TAGGED, test=TAGGED)
    assert rows_of(one(numbered, labels="O,B-PER,I-PER")).test[0].tags == (1, 2)
    refused("--labels.*IOB2", numbered, labels="O,PER")
    refused("--labels.*O.*--label COLUMN", numbered, labels="B-PER,I-PER")


@pytest.mark.parametrize(
    ("part", "nothing"),
    [
        ("train", {"text": [], "answer_start": []}),
        ("validation", ""),
        ("test", None),
        ("train", []),
        ("test", [""]),
    ],
)
def test_questions_without_an_answer_are_looked_for_in_every_part(part, nothing, tmp_path):
    parts = {name: questions(30) for name in ("train", "validation", "test")}
    parts[part] += questions(1, nothing)
    task = one(lay(tmp_path, **parts))
    assert task.form.unanswerable
    assert [len(rows.answers) for rows in getattr(rows_of(task), part)][-1] == 0


# ---------------------------------------------------------------- retrieval


def test_a_beir_folder_is_retrieval(tmp_path):
    task = one(beir(tmp_path / "a", "train", "test"))
    assert task.form == Retrieve(document="Document: {title:. }{text}")
    assert sizes(task)[:2] == (19, 1)
    plain = one(beir(tmp_path / "b", "train", "dev", "test", title=False))
    assert (plain.form, plain.splits.validation) == (Retrieve(), "qrels/dev*")
    assert len(rows_of(plain).train) == 20
    assert one(beir(tmp_path / "c", "train", "test"), text="{text}").form == Retrieve(document="{text}")


def test_retrieval_without_judgments_to_train_on(tmp_path):
    folder = beir(tmp_path / "mine", "test")
    refused("train on;.*--zero-shot.*--trained-on msmarco", folder)
    lender, task = tasks_named(folder, trained_on="msmarco")
    assert (lender, task.trained_on) == (CATALOG["msmarco"], "msmarco")
    assert sizes(task) == (0, 10, 10)
    write(tmp_path / "mine" / "pairs.jsonl", [{"query": "a", "document": "b"}])
    assert sizes(one(folder))[:2] == (1, 10)
    _, task = tasks_named(beir(tmp_path / "mine", "train", "test"), trained_on="msmarco")
    assert (task.trained_on, task.trains) == ("msmarco", False), "goes before what the folder could train on"
    refused("scored by", beir(tmp_path / "none", "train"))


def test_retrieval_without_training_scores_every_test_query(tmp_path):
    folder = beir(tmp_path / "mine", "test")
    task = one(folder, zero_shot=True)
    assert (task.steps, task.is_trained) == (0, False)
    assert sizes(task) == (0, 20, 20), "nothing is chosen by a half"
    assert (task.form.query, task.form.document) == ("{text}", "{title:. }{text}"), "without prefixes"
    write(tmp_path / "mine" / "pairs.jsonl", [{"query": "a", "document": "b"}])
    assert sizes(one(beir(tmp_path / "mine", "train", "test"), zero_shot=True))[0] == 0
    said = one(folder, zero_shot=True, query="query: {text}", text="Document: {text}").form
    assert (said.query, said.document) == ("query: {text}", "Document: {text}")
    assert one(folder, query=r"Q\n{text}").form.query == "Q\n{text}"
    known = tasks_named("scifact-mini,nq", zero_shot=True)
    assert [task.name for task in known] == ["scifact-mini", "nq"], "no lender is needed"
    assert not any(task.is_trained for task in known)
    assert Finetune(known).finetunings
    refused("sst2.*only retrieval", "sst2,scifact-mini", zero_shot=True)
    refused("--zero-shot and --steps", "scifact-mini", zero_shot=True, steps=5)
    refused("--zero-shot and --trained-on", folder, zero_shot=True, trained_on="msmarco")


# ---------------------------------------------------------------- names of numbered labels


HUB_CARD = """---
dataset_info:
- config_name: other
  features:
  - name: label
    dtype:
      class_label:
        names:
          '0': x
          '1': y
- config_name: {config}
  features:
  - name: label
    dtype:
      class_label:
        names:
          '0': bad
          '1': good
  - name: ner_tags
    sequence:
      class_label:
        names:
          '0': O
          '1': B-PER
          '2': I-PER
---
"""


@pytest.mark.parametrize("below", ["", "plain_text"])
def test_the_names_of_numbered_labels_are_read_from_the_card_beside_the_rows(below, tmp_path):
    for folder, rows in (("texts", NUMBERED), ("names", TAGGED)):
        config = below or folder  # the configuration is named as the folder of its files is
        lay(tmp_path / folder / below, train=rows, test=rows)
        write(tmp_path / folder / "README.md", HUB_CARD.replace("{config}", config))
    task = one(str(tmp_path / "texts"))
    assert (task.name, task.form) == ("texts", Classify("{text}", ("bad", "good")))
    assert [row.label for row in rows_of(task).test[:2]] == [0, 1]
    # Named by the folder of the files, a card above it counts for what it says of that configuration.
    file = tmp_path / "texts" / below / "train.jsonl"
    for task in (one(str(file.parent)), one(str(file), test=file)):
        assert task.form.labels == ("bad", "good")
    task = one(str(tmp_path / "names"))
    assert task.form.labels == ("O", "B-PER", "I-PER")
    assert rows_of(task).test[0].tags == (1, 2)


@pytest.mark.parametrize("part", ["validation", "test"])
def test_numbers_beside_a_train_part_of_names_are_refused(part, tmp_path):
    parts = {"train": reviews(), "validation": reviews(9), "test": reviews(9)}
    folder = lay(tmp_path / "texts", **parts | {part: NUMBERED})
    refused(f"{part}.jsonl:1 of the {part} part has the label 0.*train part.*bad, good.*--labels", folder)
    assert one(folder, labels="bad,good").form.labels == ("bad", "good")
    numbers = [{"tokens": ["Ada"], "tags": [1]}] * 9
    folder = lay(tmp_path / "tags", **dict.fromkeys(parts, NAMED_TAGS) | {part: numbers})
    refused(f"{part} part has the label 1.*--labels", folder)
    lists = {name: [row | {"label": [row["label"]]} for row in rows] for name, rows in parts.items()}
    lists[part] = [row | {"label": [row["label"]]} for row in NUMBERED]
    folder = lay(tmp_path / "lists", **lists)
    refused(f"{part}.jsonl:1 of the {part} part has the label 0.*bad, good.*--labels", folder, family="ML")
    assert one(folder, family="ML", labels="good,bad").form.labels == ("good", "bad")


def test_what_the_datasets_library_writes_is_read_with_its_label_names(tmp_path):
    from datasets import ClassLabel, Dataset, Features, List, Value

    label, tag = ClassLabel(names=["bad", "good"]), ClassLabel(names=["O", "B-PER", "I-PER"])
    made = Dataset.from_list(NUMBERED, features=Features(text=Value("string"), label=label))
    tagged = Dataset.from_list(TAGGED, features=Features(tokens=List(Value("string")), ner_tags=List(tag)))
    for name, rows in (("texts", made), ("names", tagged)):
        (tmp_path / name / "data").mkdir(parents=True)
        for part in ("train", "test"):
            shard = "00000-of-00001-a09b74b3ef9c3b56"
            rows.to_parquet(tmp_path / name / "data" / f"{part}-{shard}.parquet")
    task = one(str(tmp_path / "texts"))
    assert (task.name, task.form.labels, sizes(task)[0]) == ("texts", ("bad", "good"), 38)
    assert one(str(tmp_path / "names")).form.labels == ("O", "B-PER", "I-PER")


# ---------------------------------------------------------------- numbers, several labels, choices


def test_numbers_are_predicted_if_the_family_says_so_from_one_text_or_two(tmp_path):
    pairs = "sentence1,sentence2,score\n" + "".join(f"a {n},b {n},{n / 8}\n" for n in range(40))
    folder = lay(tmp_path / "pairs", train=pairs, test=pairs)
    refused("holds measures.*--family SR", folder, label="score")
    task = one(folder, family="SR")
    assert task.form == Regress("Sentence 1: {sentence1}\nSentence 2: {sentence2}", "score")
    row = rows_of(task).test[9]
    assert (row.number, row.columns) == (9 / 8, ("a 9", "b 9"))
    texts = [{"review": f"t{n}", "stars": n * 1000} for n in range(40)]
    folder = lay(tmp_path / "texts", train=texts, test=texts)
    task = one(folder, family="SR", label="stars")
    assert task.form == Regress("{review}", "stars")
    (warning, *_) = [w for w in datasets.describe(task, download=False).warnings if "scale" in w]
    assert "0 to 39000" in warning
    known = dict(datasets.describe(task, download=False).about)
    assert known["family"] == "SR, sequence regression"
    assert re.fullmatch(r"'t(\d+)' → (?:\1)000", known["example"])


@pytest.mark.parametrize("number", ["high", None, True, "nan", 1e9, 10**400])
def test_a_number_that_is_none_is_refused_with_its_place(number, tmp_path):
    rows = [{"text": f"t{n}", "score": n / 2} for n in range(40)]
    folder = lay(tmp_path / "own", train=[*rows, {"text": "x", "score": number}], test=rows)
    with pytest.raises(DataError, match=r"'own': train.jsonl:41 .*'score'") as caught:
        rows_of(one(folder, family="SR"))
    assert "\n" not in str(caught.value)


def test_several_labels_are_a_list_or_columns_of_0_and_1(tmp_path):
    lists = [{"text": f"t{n}", "labels": ["b", "a"][: n % 3]} for n in range(40)]
    folder = lay(tmp_path / "lists", train=lists, test=lists)
    refused("--family ML", folder)
    task = one(folder, family="ML")
    assert task.form == MultiLabel("{text}", ("a", "b"), "labels")
    assert [row.labels for row in rows_of(task).test[:3]] == [(), (1,), (0, 1)]
    assert dict(datasets.describe(task, download=False).about)["labels"] == "a, b"
    columns = "id,text,toxic,insult\n" + "".join(f"{n},t{n},{n % 2},{n % 3 // 2}\n" for n in range(40))
    task = one(lay(tmp_path / "columns", train=columns, test=columns), family="ML")
    assert task.form == MultiLabel("{text}", ("toxic", "insult"), "")
    assert [row.labels for row in rows_of(task).test[:4]] == [(), (0,), (1,), (0,)]
    folder = lay(tmp_path / "columns", train=columns, test=columns)
    assert one(folder, family="ML", labels="insult,toxic").form.labels == ("insult", "toxic")
    for bad, words in (({"text": "x", "labels": "a"}, "no list"), ({"text": "x", "labels": ["c"]}, "'c'")):
        folder = lay(tmp_path / "bad", train=lists, test=[*lists, bad])
        with pytest.raises(DataError, match=f"'bad': test.jsonl:41 .*{words}"):
            rows_of(one(folder, family="ML"))
    wrong = columns + "40,t,2,0\n"
    with pytest.raises(DataError, match=r"'wrong': test.csv:42 .*2.*'toxic'"):
        rows_of(one(lay(tmp_path / "wrong", train=columns, test=wrong), family="ML"))
    single = [{"text": "x", "labels": ["a"]}] * 9
    refused(
        "'single'.*'labels'.*'a'.*--labels", lay(tmp_path / "single", train=single, test=single), family="ML"
    )


@pytest.mark.parametrize(
    ("columns", "form"),
    [
        (
            {
                "question": "who?",
                "choices": {"label": ["A", "B"], "text": ["a dog", "a cat"]},
                "answerKey": "B",
            },
            Choose("{question}\n{choice}", "choices", "answerKey"),
        ),
        (
            {"article": "long", "question": "who?", "options": ["a dog", "a cat"], "answer": "B"},
            Choose("{article}\n{question}\n{choice}", "options", "answer"),
        ),
        (  # COPA
            {"premise": "It ran.", "choice1": "a dog", "choice2": "a cat", "question": "who?", "label": 1},
            Choose("{premise}\n{question}\n{choice}", ("choice1", "choice2"), "label"),
        ),
        (  # PIQA
            {"goal": "who?", "sol1": "a dog", "sol2": "a cat", "label": 1},
            Choose("{goal}\n{choice}", ("sol1", "sol2"), "label"),
        ),
    ],
)
def test_choices_as_datasets_of_the_hub_have_them(columns, form, tmp_path):
    task = one(lay(tmp_path / "own", train=[columns] * 40, test=[columns] * 9))
    assert task.form == form
    row = rows_of(task).test[0]
    assert row.answer == 1
    assert row.texts[1].endswith("who?\na cat")
    assert dict(datasets.describe(task, download=False).about)["family"] == "MC, multiple choice"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"answer": "C"}, "'C'.*2 choices"),
        ({"answer": -1}, "no answer"),
        ({"choices": ["a"]}, "1 choices"),
        ({"choices": ["a", " "]}, "without text"),
        ({"choices": [{"text": "a"}, {"text": "b"}]}, r"no list of choices as texts.*\"text\": \["),
    ],
)
def test_a_question_without_its_right_choice_is_refused_with_its_place(bad, words, tmp_path):
    row = {"question": "q", "choices": ["a", "b"], "answer": 0}
    folder = lay(tmp_path / "own", train=[row] * 40, test=[*[row] * 9, row | bad])
    with pytest.raises(DataError, match=f"'own': test.jsonl:10 .*{words}") as caught:
        rows_of(one(folder, family="MC"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("choices", "answer", "right"),
    [
        (["1", "2", "3"], 2, 2),  # a number is a place
        (["1", "2", "3"], "3", 2),  # a text, as there is no place 3
        (["1", "2", "3"], "C", 2),
        (["0", "1", "9"], "1", 1),  # text and place agree
        (["40", "2", "0"], "1", 1),
        ({"label": ["A", "B"], "text": ["B", "A"]}, "A", 0),  # labels of the data win
        ({"label": ["x", "y"], "text": ["a", "b"]}, "b", 1),
        (["40", "2", "0"], "0", None),  # the text of the third, or the place of the first
        (["a", "a"], "a", None),
        ({"label": ["A", "A"], "text": ["a", "b"]}, "A", None),
    ],
)
def test_an_answer_is_the_one_choice_that_it_fits_or_refused(choices, answer, right):
    values = ["which?", choices, answer]
    if right is not None:
        assert Choose().example(values, "here").answer == right
        return
    with pytest.raises(
        ValueError, match=f"'{answer}'.*fits 2 choices.*text, number or letter.*from 0"
    ) as caught:
        Choose().example(values, "here")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- the page


def test_the_page_names_every_task_and_its_records_can_be_made(tmp_path, monkeypatch):
    for name in CATALOG:
        assert f"`{name}`" in DOCS, name
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        made: dict = {}
        exec(block, made)
        assert any(isinstance(value, Task) for value in made.values())
        assert made.get("boolq", CATALOG["boolq"]) == CATALOG["boolq"]
