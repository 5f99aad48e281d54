"""Tasks as the command line says them: names, local copies, own data; and what docs/tasks.md says of them."""

import json
import re
from pathlib import Path

import pytest

import biphase
from biphase.catalog import CATALOG, TASKS
from biphase.data.listing import Absent
from biphase.errors import DataError, SpecError
from biphase.specs import Answer, Classify, Finetune, Retrieve, Splits, Tag, Task
from biphase.study.tasks import tasks_named
from biphase.tasks.load import load

DOCS = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lay(folder, **parts):
    for name, rows in parts.items():
        write(folder / f"{name}.jsonl", rows)
    return str(folder)


def one(names, **options):
    made = tasks_named(names, **options)
    assert len(made) == 1
    return made[0]


def refused(words, names, **options):
    with pytest.raises(SpecError, match=words) as caught:
        tasks_named(names, **options)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- names


def test_known_tasks_come_by_name_by_family_or_all_of_the_paper():
    assert tasks_named("sst2, squad") == (CATALOG["sst2"], CATALOG["squad"])
    assert tasks_named("paper") == TASKS
    assert [task.name for task in tasks_named("QA")] == ["squad", "squad_v2", "record"]
    assert tasks_named("boolq,QA,squad")[0] == CATALOG["boolq"]
    assert len(tasks_named("boolq,QA,squad")) == 4


def test_a_task_that_borrows_brings_its_lender_and_makes_a_finetuning():
    made = tasks_named("nq,mldr_en")
    assert [task.name for task in made] == ["msmarco", "nq", "mldr_en"]
    assert Finetune(made).trainings  # the record accepts them


def test_steps_are_those_that_are_said():
    assert [(task.steps, task.epochs) for task in tasks_named("sst2,conll2003", steps=7)] == [(7, 0), (7, 0)]


def test_unknown_names_and_idle_options_are_refused():
    refused("there is no task and no file 'sst3'; did you mean 'sst2'", "sst3")
    refused("names no task", " , ")
    refused("describe data of your own", "sst2", label="x")


def test_two_tasks_of_one_name_are_refused_and_one_named_twice_is_one(tmp_path):
    a, b = (lay(tmp_path / side / "same", train=reviews(), test=reviews(9)) for side in "ab")
    refused(f"two tasks 'same': {a} and {b}; rename one of the folders", f"{a},{b}")
    assert len(tasks_named(f"{a},{a}")) == 1
    own = lay(tmp_path / "sst2", train=reviews(), test=reviews(9))
    refused("two tasks 'sst2'", f"sst2,{own}")
    refused("two tasks 'sst2'", f"{own},sst2")


# ---------------------------------------------------------------- local copies


def test_a_folder_of_the_tasks_name_goes_before_the_hub(tmp_path, monkeypatch):
    rows = [{"sentence": f"s{n}", "label": n % 2} for n in range(40)]
    lay(tmp_path / "data" / "sst2", train=rows, validation=rows)
    monkeypatch.chdir(tmp_path)
    sst2, qqp = tasks_named("sst2,qqp", data=Path("data"))
    assert sst2.source == "./data/sst2"
    assert qqp == CATALOG["qqp"]
    assert len(load(sst2, documents="all").train) == 38


def test_a_copy_of_a_repository_is_read_as_it_stands_on_the_hub(tmp_path):
    rows = [{"sentence": f"s{n}", "label": n % 2} for n in range(40)]
    lay(tmp_path / "glue" / "sst2", train=rows, validation=rows)
    asked = [{"question": "q", "context": "c", "answers": "c"}] * 40
    lay(tmp_path / "squad" / "plain_text", train=asked, validation=asked)  # also the name of the task
    for task in tasks_named("sst2,squad", data=tmp_path):
        assert len(load(task, documents="all").train) == 38


def test_repositories_of_one_task_may_be_copied_or_not(tmp_path):
    write(tmp_path / "scifact" / "corpus" / "corpus.jsonl", [{"_id": "d1", "title": "", "text": "x"}])
    write(
        tmp_path / "scifact" / "queries" / "queries.jsonl", [{"_id": f"q{n}", "text": "y"} for n in range(9)]
    )
    half = one("scifact", data=tmp_path)
    assert half.source == str(tmp_path / "scifact")
    assert half.splits == CATALOG["scifact"].splits  # still on the hub
    for part in ("train", "test"):
        path = tmp_path / "scifact-qrels" / f"{part}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td1\t1\n" for n in range(9)))
    made = load(one("scifact", data=tmp_path), documents="all")
    assert (len(made.train), len(made.validation), len(made.test)) == (8, 1, 9)


def test_a_folder_that_lacks_files_is_refused_and_not_passed_over(tmp_path):
    lay(tmp_path / "sst2", train=[{}])
    with pytest.raises(Absent, match=r"task 'sst2': no file in .*sst2 matches 'validation\*'"):
        tasks_named("sst2", data=tmp_path)
    refused("is no folder", "sst2", data=tmp_path / "nowhere")


# ---------------------------------------------------------------- own data


def reviews(count=40, **more):
    return [{"text": f"t{n}", "label": ("good", "bad")[n % 2], **more} for n in range(count)]


def test_a_folder_of_texts_and_labels(tmp_path, monkeypatch):
    lay(tmp_path / "my reviews", train=reviews(), test=reviews(9))
    monkeypatch.chdir(tmp_path)
    task = one("my reviews")
    assert task == Task("my-reviews", Classify("{text}", ("bad", "good")), "my reviews", Splits())
    made = load(task, documents="all")
    assert (len(made.train), len(made.validation), len(made.test)) == (38, 2, 9)
    assert made.test[0].label == 1


def test_without_a_test_part_validation_is_scored_and_another_is_cut(tmp_path):
    folder = lay(tmp_path, train=reviews(), dev=reviews(9))
    assert one(folder).splits == Splits(test="dev*")
    folder = lay(tmp_path, test=reviews(7))
    assert one(folder).splits == Splits(validation="dev*")
    assert len(load(one(folder), documents="all").validation) == 9


def test_one_file_needs_another_to_be_scored_by(tmp_path):
    path = write(tmp_path / "rows.v2.jsonl", reviews())
    other = write(tmp_path / "elsewhere" / "held.jsonl", reviews(9))
    task = one(str(path), test=other)
    assert task.name == "rows"
    assert len(load(task, documents="all").test) == 9
    refused("is one file, to train on; .*--test FILE", str(path))
    refused("is no file", str(path), test=tmp_path / "nowhere.csv")
    notes = tmp_path / "notes.txt"
    notes.touch()
    refused("is no table", str(notes), test=other)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([10, 9, 2], ("2", "9", "10")),
        ([1.0, 0.0], ("0", "1")),
        (["10", "9"], ("9", "10")),
        ([True, False], ("False", "True")),
        (["b", "1"], ("1", "b")),
    ],
)
def test_labels_are_read_from_the_data_in_order(values, labels, tmp_path):
    rows = [{"text": "x", "label": values[n % len(values)]} for n in range(30)]
    task = one(lay(tmp_path, train=rows, test=rows))
    assert task.form == Classify("{text}", labels)
    assert {one.label for one in load(task, documents="all").test} == set(range(len(labels)))


def test_columns_and_labels_may_be_said(tmp_path):
    rows = [{"a": f"a{n}", "b": "b", "answer": n % 2} for n in range(30)]
    folder = lay(tmp_path, train=rows, test=rows)
    refused(r"--label COLUMN, one of a, b, answer", folder)
    refused(r"--text COLUMN, or a template", folder, label="answer")
    task = one(folder, text="A: {a} B: {b}", label="answer", labels="no, yes")
    assert task.form == Classify("A: {a} B: {b}", ("no", "yes"), label="answer")
    assert load(task, documents="all").test[3].text == "A: a3 B: b"
    assert one(folder, text="a", label="answer").form == Classify("{a}", ("0", "1"), label="answer")


def test_what_cannot_be_labels_is_refused(tmp_path):
    rows = [{"text": "x", "label": n + 0.5} for n in range(9)]
    refused("holds measures, not labels", lay(tmp_path / "a", train=rows, test=rows))
    rows = [{"text": "x", "label": str(n)} for n in range(1_001)]
    refused("over 1,000 values", lay(tmp_path / "b", train=rows, test=rows))
    table = lay_csv(tmp_path / "d", train="text,label\nx,0.333\ny,1\n", test="text,label\nx,1\n")
    refused("column 'label' holds measures, not labels, e.g. 0.333; .*--label COLUMN", table)
    assert one(table, labels="0.333,1").form == Classify("{text}", ("0.333", "1"))


def lay_csv(folder, **parts):
    folder.mkdir(parents=True)
    for name, raw in parts.items():
        (folder / f"{name}.csv").write_text(raw)
    return str(folder)


@pytest.mark.parametrize("label", [None, "", "  ", float("nan"), ["good"], {"x": 1}])
def test_a_row_without_a_label_is_named(label, tmp_path):
    rows = [*reviews(4), {"text": "x", "label": label}]
    refused("train.jsonl:5 has no label in 'label'", lay(tmp_path, train=rows, test=reviews()))


@pytest.mark.parametrize("label", ["good ", " good", "good\t"])
def test_a_space_around_a_label_makes_no_class(label, tmp_path):
    rows = [*reviews(4), {"text": "x", "label": label}]
    refused("train.jsonl:5 has the label ' ?good.*space", lay(tmp_path / "a", train=rows, test=reviews()))
    table = lay_csv(tmp_path / "b", train=f"text,label\nx,bad\ny,{label}\n", test="text,label\nx,bad\n")
    refused("train.csv:3 has the label", table)


def test_fewer_than_two_labels_are_refused_with_the_column(tmp_path):
    rows = [{"text": "x", "label": "good", "kind": n % 2} for n in range(30)]
    folder = lay(tmp_path / "a", train=rows, test=rows)
    refused("task 'a': column 'label' of the train part holds only 'good', .*--label COLUMN", folder)
    assert one(folder, label="kind").form.labels == ("0", "1")
    assert one(folder, labels="bad,good").form.labels == ("bad", "good")
    for said in ("good", "good,good", "good,"):
        refused("--labels 'good.* must be two names or more, all different", folder, labels=said)
    bare = lay_csv(tmp_path / "b", train="text,label\n", test="text,label\nx,a\n")
    refused("column 'label' of the train part holds nothing", bare)


def test_a_column_of_two_words_cannot_stand_in_a_template(tmp_path):
    rows = [{"review text": "x", "b": "y", "label": n % 2} for n in range(30)]
    folder = lay(tmp_path, train=rows, test=rows)
    for text in ("review text", "{b}: {review text}"):
        refused(
            "the column 'review text' cannot .*rename it in the files, e.g. review_text", folder, text=text
        )
    refused("'revew text' is no column; did you mean 'review text'", folder, text="revew text")
    assert one(folder, text="{{b b}} {b}").form.text == "{{b b}} {b}"


def test_parts_that_are_absent_or_ambiguous_are_refused(tmp_path):
    refused(r"needs files train\* and test\*", lay(tmp_path / "a", train=reviews()))
    folder = lay(
        tmp_path / "b", train=reviews(), validation_matched=reviews(), validation_mismatched=reviews()
    )
    refused("only one can be the validation part", folder)
    shards = lay(
        tmp_path / "c",
        **{"train-00000-of-00002": reviews(), "train-00001-of-00002": reviews(), "test": reviews()},
    )
    assert one(shards).splits.train == "train*"


def test_words_and_tags_are_token_classification(tmp_path):
    rows = [{"words": ["Ada", "of", "London"], "ner_tags": ["B-PER", "O", "B-LOC"]}] * 30
    task = one(lay(tmp_path / "names", train=rows, test=rows))
    assert isinstance(task.form, Tag)
    assert task.form.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert load(task, documents="all").test[0].tags == (3, 0, 1)
    numbered = lay(
        tmp_path / "numbers",
        train=[{"tokens": ["Ada"], "tags": [1]}] * 30,
        test=[{"tokens": ["x"], "tags": [0]}],
    )
    refused("its tags are numbers; .*--labels O,B-PER", numbered)
    assert load(one(numbered, labels="O,B-PER,I-PER"), documents="all").train[0].tags == (1,)
    odd = lay(
        tmp_path / "odd",
        train=[{"tokens": ["Ada"], "tags": ["PER"]}],
        test=[{"tokens": ["x"], "tags": ["O"]}],
    )
    refused("task 'odd': column 'tags' of the train part holds PER; write tags in IOB2", odd)
    refused("--labels holds PER; write tags in IOB2", odd, labels="O,PER")
    refused("--labels lacks O", odd, labels="B-PER,I-PER")


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ([None], "train.jsonl:2 has no label in 'tags"),
        ([["O"]], "train.jsonl:2 has no label in 'tags"),
        ([{"a": 1}], "train.jsonl:2 has no label in 'tags"),
        (["O "], "train.jsonl:2 has the label 'O ', with a space"),
        ("O", "train.jsonl:2 has no list of labels in 'tags"),
        ([1.5], "its tags are numbers"),
        (["1"], "its tags are numbers"),
        (["O"], "column 'tags' of the train part holds O only"),
    ],
)
def test_tags_that_are_none_are_refused_in_one_line(tags, words, tmp_path):
    rows = [{"tokens": ["a"], "tags": ["O"]}, {"tokens": ["a"], "tags": tags}]
    refused(words, lay(tmp_path, train=rows, test=rows))


@pytest.mark.parametrize("empty", [False, True])
def test_questions_and_contexts_are_question_answering(empty, tmp_path):
    rows = [
        {"question": "q", "context": "some context", "answers": {"text": ["some"], "answer_start": [0]}}
    ] * 30
    more = [{"question": "q", "context": "c", "answers": {"text": [], "answer_start": []}}] if empty else []
    task = one(lay(tmp_path, train=rows + more, test=rows), text="Q: {question}\nC: ")
    assert task.form == Answer(answers="answers|answer", text="Q: {question}\nC: ", unanswerable=empty)
    assert load(task, documents="all").test[0].before == "Q: q\nC: "


@pytest.mark.parametrize("part", ["train", "validation", "test"])
@pytest.mark.parametrize("nothing", [{"text": [], "answer_start": []}, "", None, [], [""]])
def test_questions_without_an_answer_are_looked_for_in_every_part(part, nothing, tmp_path):
    row = {"question": "q", "context": "some context", "answers": "some"}
    parts = {name: [row] * 30 for name in ("train", "validation", "test")}
    parts[part] = [*parts[part], row | {"answers": nothing}]
    task = one(lay(tmp_path, **parts))
    assert task.form.unanswerable
    assert [len(rows.answers) for rows in getattr(load(task, documents="all"), part)][-1] == 0


def test_the_family_may_be_said(tmp_path):
    rows = [
        {"question": "q", "context": "c", "answer": "c", "text": f"t{n}", "label": n % 2} for n in range(30)
    ]
    folder = lay(tmp_path, train=rows, test=rows)
    assert isinstance(one(folder).form, Answer)
    assert one(folder, family="SC").form == Classify("{text}", ("0", "1"))
    refused("--family SX: ", folder, family="SX")
    refused(r"has no corpus\* and queries\*", folder, family="IR")
    refused("is no retrieval data", folder, trained_on="msmarco")


def beir(folder, *parts, title=True):
    extra = {"title": "t"} if title else {}
    write(folder / "corpus.jsonl", [{"_id": f"d{n}", "text": f"x{n}", **extra} for n in range(20)])
    write(folder / "queries.jsonl", [{"_id": f"q{n}", "text": f"y{n}"} for n in range(20)])
    for part in parts:
        path = folder / "qrels" / f"{part}.tsv"
        path.parent.mkdir(exist_ok=True)
        path.write_text("query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\td{n}\t1\n" for n in range(20)))
    return str(folder)


def test_a_beir_folder_is_retrieval(tmp_path):
    task = one(beir(tmp_path / "a", "train", "test"))
    assert task.form == Retrieve(document="Document: {title}. {text}")
    assert [
        len(part) for part in (load(task, documents="all").train, load(task, documents="all").validation)
    ] == [19, 1]
    plain = one(beir(tmp_path / "b", "train", "dev", "test", title=False))
    assert plain.form == Retrieve()
    assert plain.splits.validation == "qrels/dev*"
    assert len(load(plain, documents="judged").train) == 20
    assert one(beir(tmp_path / "c", "train", "test"), text="{text}").form == Retrieve(document="{text}")


def test_retrieval_without_judgments_to_train_on(tmp_path):
    folder = beir(tmp_path / "mine", "test")
    refused("nothing to train on; .*--trained-on msmarco", folder)
    lender, task = tasks_named(folder, trained_on="msmarco")
    assert (lender, task.trained_on) == (CATALOG["msmarco"], "msmarco")
    assert [
        len(part) for part in (load(task, documents="all").validation, load(task, documents="all").test)
    ] == [10, 10]
    write(tmp_path / "mine" / "pairs.jsonl", [{"query": "a", "document": "b"}])
    made = load(one(folder), documents="all")
    assert (len(made.train), len(made.validation)) == (1, 10)
    refused("no judgments to be scored by", beir(tmp_path / "none", "train"))


def test_a_borrowed_model_goes_before_what_the_folder_could_train_on(tmp_path):
    folder = beir(tmp_path / "mine", "train", "test")
    write(tmp_path / "mine" / "pairs.jsonl", [{"query": "a", "document": "b"}])
    _, task = tasks_named(folder, trained_on="msmarco")
    assert (task.trained_on, task.trains) == ("msmarco", False)
    made = load(task, documents="all")
    assert (len(made.train), len(made.validation), len(made.test)) == (0, 10, 10)
    lender, borrower = tasks_named(f"{folder},{beir(tmp_path / 'other', 'test')}", trained_on="mine")
    assert (lender.trained_on, borrower.trained_on) == ("", "mine")
    assert Finetune((lender, borrower)).trainings


def test_train_judgments_beside_pairs_are_not_used(tmp_path):
    folder = beir(tmp_path, "train", "test")
    write(tmp_path / "pairs.jsonl", [{"query": "a", "document": "b"}])
    made = load(one(folder), documents="all")
    assert (len(made.train), len(made.validation), len(made.test)) == (1, 10, 10)


# ---------------------------------------------------------------- the page


def test_the_page_names_every_task_and_its_records_can_be_made(tmp_path, monkeypatch):
    for task in TASKS:
        assert f"| `{task.name}` |" in DOCS, task.name
    for name in CATALOG:
        assert f"`{name}`" in DOCS, name
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        made: dict = {}
        exec(block, made)
        shown = [value for value in made.values() if isinstance(value, Task)]
        assert shown
        if made.get("boolq"):
            assert made["boolq"] == CATALOG["boolq"]


def test_the_page_shows_the_refusal_that_a_bad_row_gets(tmp_path):
    folder = tmp_path / "reviews"
    good = "text,label\n" + "x,good\ny,bad\n" * 20
    table = lay_csv(folder, train=good, test="text,label\n" + "x,good\n" * 15 + "x,goood\n")
    with pytest.raises(DataError) as caught:
        load(one(table), documents="all")
    assert f"```text\n{caught.value}\n```" in DOCS


def test_the_page_says_how_the_twelve_are_cut_and_asked():
    for task in TASKS:
        row = next(line for line in DOCS.splitlines() if line.startswith(f"| `{task.name}` |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] == task.family
        length = f"{task.epochs} epoch" if task.epochs else f"{task.steps:,}"
        assert cells[-1] == ("–" if task.trained_on else length), task.name
        if isinstance(task.form, Classify):
            assert task.form.text.replace("\n", "\\n") in row, task.name
        if task.trained_on:
            assert task.trained_on in row


def test_the_public_names_are_those_of_the_page():
    shown = set(
        re.findall(
            r"\b(Task|Classify|Tag|Answer|Retrieve|Splits|Finetune|TASKS|[A-Z]+_TASKS|CATALOG)\b", DOCS
        )
    )
    assert shown <= set(biphase.__all__)
