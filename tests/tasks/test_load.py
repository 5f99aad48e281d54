"""Examples from files: every layout is read, every bad row is named, validation is cut as `datasets` cuts it."""

import json
from dataclasses import replace

import datasets
import pyarrow
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from biphase.catalog import CATALOG
from biphase.errors import DataError
from biphase.specs import Answer, Classify, Retrieve, Splits, Tag, Task
from biphase.specs.rows import Numbering
from biphase.specs.tasks import AnswerSpan, LabelledText, Question, TaggedSentence
from biphase.tasks.load import Pair, cut, load


def write(path, rows):
    """Rows as JSON lines or parquet, by the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    if codec:
        with pyarrow.CompressedOutputStream(str(path), codec) as sink:
            sink.write(raw)
    else:
        path.write_bytes(raw)


def lay(folder, **parts):
    for name, rows in parts.items():
        write(folder / f"{name}.jsonl", rows)
    return str(folder)


def refused(task, words, documents="all"):
    with pytest.raises(DataError, match=words) as caught:
        load(task, documents=documents)
    assert "\n" not in str(caught.value)
    assert "task" in str(caught.value)


# ---------------------------------------------------------------- cutting


@settings(max_examples=30, deadline=None)
@example(67_349, 0.05, 42)
@given(st.integers(2, 3000), st.sampled_from([0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.5]), st.integers(0, 2**31))
def test_validation_is_cut_as_the_datasets_library_cuts(count, share, seed):
    assert (Splits().cut, Splits().seed) == (0.05, 42), "the paper's"
    first, rest = cut(count, Splits(cut=share, seed=seed))
    assert sorted(first + rest) == list(range(count))
    if not rest:
        return  # the library refuses what we refuse later
    whole = datasets.Dataset.from_dict({"row": list(range(count))})
    parts = whole.train_test_split(train_size=1 - share, seed=seed)
    assert parts["test"]["row"][:] == first
    assert parts["train"]["row"][:] == rest


# ---------------------------------------------------------------- labels


TWO = ("no", "yes")


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        (TWO, {"yes": 1, 1: 1, "1": 1, "True": 1, "false": 0, 2: None, -1: None, 0.5: None, None: None, "maybe": None}),
        (("true", "false"), {True: 0}),
        (("1", "2", "3"), {1: 0, "3": 2, 0: None}),
        (("1", "0"), {0: 1}),
        (("0", "1"), {True: 1}),
    ],
)  # fmt: skip
def test_a_label_is_a_name_or_a_number_and_a_name_goes_first(labels, numbers):
    assert {value: Numbering(labels)(value) for value in numbers} == numbers


# ---------------------------------------------------------------- sequence classification

NLI = Classify("Premise: {premise}\nHypothesis: {hypothesis}", ("entailment", "neutral", "contradiction"))


def sentences(count, **more):
    return [{"premise": f"p{n}", "hypothesis": f"h{n}", "label": n % 3, **more} for n in range(count)]


def test_texts_fill_the_template_and_parts_are_cut_and_limited(tmp_path):
    source = lay(tmp_path, train=sentences(40), test=sentences(9), validation=sentences(5))
    task = Task("nli", NLI, source)
    made = load(task, documents="all")
    assert (len(made.train), len(made.validation), len(made.test)) == (38, 2, 9)
    assert made.test[4] == LabelledText("Premise: p4\nHypothesis: h4", 1)
    first, rest = cut(40, Splits())
    assert [one.text for one in made.validation] == [f"Premise: p{n}\nHypothesis: h{n}" for n in first]
    assert [one.text for one in made.train] == [f"Premise: p{n}\nHypothesis: h{n}" for n in rest]
    few = load(replace(task, splits=Splits(rows=(3, 1, 2))), documents="all")
    assert (few.train, few.validation, few.test) == (made.train[:3], made.validation[:1], made.test[:2])
    own = load(replace(task, splits=Splits(validation="validation*")), documents="all")
    assert (len(own.train), len(own.validation)) == (40, 5)
    halves = load(replace(task, splits=Splits(cut_from="test", cut=0.5)), documents="all")
    assert (len(halves.train), len(halves.validation), len(halves.test)) == (40, 5, 4)
    borrowed = load(replace(task, trained_on="mnli"), documents="all")
    assert (len(borrowed.train), len(borrowed.validation), len(borrowed.test)) == (0, 2, 9)
    for some, whole in ((few, 40), (halves, 9)):  # every example says which row it was
        for part in ("validation", "test"):
            numbers = list(some.rows[part])
            texts = [f"Premise: p{n}\nHypothesis: h{n}" for n in numbers]
            assert [one.text for one in getattr(some, part)] == texts
            assert max(numbers) < whole


TAGS = ("O", "B-PER", "I-PER")
CONTEXT = "Ada wrote notes. Ada was a countess."


def qa(answers, question="Who?", context=CONTEXT):
    return question, context, answers, None


def spans(texts, starts):
    return {"text": texts, "answer_start": starts}


@pytest.mark.parametrize(
    ("form", "row", "words"),
    [
        (NLI, ("p", "h", -1), r"label -1: .*unlabelled.*Splits\(test='validation\*'\)"),
        (NLI, ("p", "h", "neutrall"), "label 'neutrall'"),
        (NLI, (["x"], "h", 0), "text in 'premise'"),
        (Classify("{premise}", NLI.labels), ("  ", 0), "no text"),
        (Tag(TAGS), (["a", "b"], [0]), "2 words and 1 tags"),
        (Tag(TAGS), (["a", "b"], [0, 3]), r"label 3,.*none of O, B-PER, I-PER"),
        (Tag(TAGS), (["a", ""], [0, 0]), "empty"),
        (Tag(TAGS), ("a b", [0, 0]), "list"),
        (Answer(), qa(spans(["Ada"], [1])), "'Ada' at 1, where the context says 'da '"),
        (Answer(), qa(spans(["Ada"], ["0"])), "starts at '0'"),
        (Answer(), qa(spans(["Ada", "Ada"], [0])), "2 answers and 1 starts"),
        (Answer(), qa({"texts": ["Ada"]}), "answer without"),
        (Answer(), qa("Babbage"), "'Babbage', which is not in its context"),
        (Answer(), qa("Ada", context=" "), "no question"),
        (Answer(), qa(spans([], [])), r"no answer;.*unanswerable=True"),
    ],
)
def test_a_bad_row_is_refused_with_what_is_wrong(form, row, words):
    with pytest.raises(ValueError, match=words) as caught:
        form.example(row, "x.csv:1")
    assert "\n" not in str(caught.value)


def test_bad_rows_and_empty_parts_are_named(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    source = lay(tmp_path, train=sentences(40), one=sentences(1), bad=sentences(2, label=7))
    refused(Task("nli", NLI, source, Splits(test="bad*")), r"'nli': bad.jsonl:1 has the label 7")
    refused(Task("x", NLI, source, Splits(test="empty*")), r"test part")
    refused(Task("x", NLI, source, Splits("one*", "", "train*")), r"train part.*cut at 0.05")
    refused(Task("x", NLI, source, Splits("train*", "empty*", "train*")), r"validation part")


# ---------------------------------------------------------------- token classification


def test_tags_are_read_as_numbers_and_as_names(tmp_path):
    named = [{"words": ["Ada", "Lovelace", "wrote"], "ner_tags": ["B-PER", "I-PER", "O"]}] * 3
    numbered = [{"tokens": ["Ada", "Lovelace", "wrote"], "tags": [1, 2, 0]}] * 3
    write(tmp_path / "dataset" / "train00.json", numbered[:2])
    write(tmp_path / "dataset" / "train01.json", numbered[2:])
    write(tmp_path / "dataset" / "valid.json", numbered)
    write(tmp_path / "dataset" / "test.jsonl.zst", named)
    form = Tag(TAGS, words="tokens|words", tags="tags|ner_tags")
    made = load(Task("ner", form, str(tmp_path / "dataset"), Splits(validation="valid*")), documents="all")
    one = TaggedSentence(("Ada", "Lovelace", "wrote"), (1, 2, 0))
    assert (made.train, made.validation, made.test) == ([one] * 3, [one] * 3, [one] * 3)


# ---------------------------------------------------------------- question answering


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        (spans(["Ada", "a countess"], [17, 25]), [("Ada", 17), ("a countess", 25)]),
        (spans("notes", 10), [("notes", 10)]),
        ([{"text": "Ada", "answer_start": 17}], [("Ada", 17)]),
        ("Ada", [("Ada", 0)]),
        *((none, []) for none in (spans([], []), None)),
    ],
)
def test_answers_are_read_in_every_way_they_are_written(answers, found, tmp_path):
    row = {"question": "Who?", "context": CONTEXT, "answers": answers}
    source = lay(tmp_path, train=[row] * 20, test=[row | {"id": "7"}, row])
    named, other = load(Task("qa", Answer(unanswerable=not found), source), documents="all").test
    expected = tuple(AnswerSpan(*span) for span in found)
    assert named == Question("7", "Question: Who?\nContext: ", CONTEXT, expected)
    assert other.name == "test.jsonl:2", "called by its place"


# ---------------------------------------------------------------- retrieval


def documents(count):
    return [{"_id": f"d{n}", "title": f"t{n}" if n % 2 else "", "text": f"x{n}"} for n in range(count)]


def asks(count):
    return [{"_id": f"q{n}", "text": f"y{n}"} for n in range(count)]


def judge(path, rows, header="query-id\tcorpus-id\tscore\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "".join("\t".join(map(str, row)) + "\n" for row in rows))


def beir(folder, *, train=(), test=(), count=20):
    write(folder / "corpus.jsonl", documents(count))
    write(folder / "queries.jsonl", asks(count))
    if train:
        judge(folder / "qrels" / "train.tsv", train)
    judge(folder / "qrels" / "test.tsv", test)
    return folder


IR = Retrieve(document="Document: {title}. {text}")
TESTED = Splits("", "", "qrels/test*", cut=0.5, cut_from="test")
QRELS = Splits("qrels/train*", "", "qrels/test*", cut=0.5)
SOME = [("q1", "d1", 1), ("q2", "d2", 2), ("q2", "d3", 0), ("q3", "d3", 0), ("q4", "d9", 1)]


def test_judged_documents_and_pairs_of_the_train_judgments(tmp_path):
    train = [("q5", "d11", 1), ("q6", "d12", 1), ("q5", "d13", 0), ("q6", "d14", 2)]
    task = Task("ir", IR, str(beir(tmp_path, train=train, test=SOME)), QRELS)
    made = load(task, documents="judged")
    first, rest = cut(2, QRELS)  # the queries of train: q5 and q6
    kept, left = f"q{5 + first[0]}", f"q{5 + rest[0]}"
    assert made.validation.names == (kept,)
    assert [one.query for one in made.train] == [f"Query: y{left[1:]}"] * len(made.train)
    assert len(made.train) == sum(query == left and grade >= 1 for query, _, grade in train)
    validated = {document for query, document, _ in train if query == kept}
    assert set(made.test.library.names) == validated | {"d1", "d2", "d3", "d9"}
    assert made.test.library is made.validation.library
    assert list(made.test.library.names) == sorted(made.test.library.names, key=lambda name: int(name[1:]))
    assert made.test.names == ("q1", "q2", "q4")  # nothing is relevant to q3
    at = {name: place for place, name in enumerate(made.test.library.names)}
    assert made.test.judged == ({at["d1"]: 1}, {at["d2"]: 2, at["d3"]: 0}, {at["d9"]: 1})
    assert made.test.library.texts[at["d1"]] == "Document: t1. x1"
    assert made.test.library.texts[at["d2"]] == "Document: . x2"
    assert made.test.queries[0] == "Query: y1"
    every = load(task, documents="all").test
    assert every.library.names == tuple(f"d{n}" for n in range(20)), "the whole corpus in its order"
    assert every.judged[0] == {1: 1}


def test_a_large_collection_is_read_from_files_as_from_memory(tmp_path, monkeypatch):
    train = [("q5", "d11", 1), ("q6", "d12", 1)]
    folder = beir(tmp_path, train=train, test=SOME)
    task = Task("ir", IR, str(folder), QRELS)
    small = load(task, documents="all")
    monkeypatch.setattr("biphase.tasks.load.LARGE_BYTES", 0)
    monkeypatch.setattr("biphase.tasks.collection.BLOCK", 7)
    large = load(task, documents="all")
    assert large.train == small.train
    for one, other in ((large.validation, small.validation), (large.test, small.test)):
        assert (one.names, one.queries, one.judged) == (other.names, other.queries, other.judged)
    library = large.test.library
    assert not isinstance(library.texts, tuple)
    assert (tuple(library.names), tuple(library.texts)) == (
        small.test.library.names,
        small.test.library.texts,
    )
    assert library.texts[-1] == small.test.library.texts[-1]
    assert library.texts[3:5] == list(small.test.library.texts[3:5])
    write(folder / "corpus.jsonl", documents(20) + documents(5)[4:])
    refused(task, r"corpus.jsonl:21.*'d4'", "all")


def test_queries_of_the_test_are_cut_in_the_order_they_appear(tmp_path):
    order = ["q3", "q1", "q7", "q5", "q9", "q0"]
    test = [(query, f"d{query[1:]}", 1) for query in order] + [("q3", "d4", 1)]
    task = Task("ir", IR, str(beir(tmp_path, test=test)), TESTED, trained_on="msmarco")
    made = load(task, documents="judged")
    parts = tuple(tuple(order[place] for place in places) for places in cut(6, TESTED))
    assert (made.validation.names, made.test.names, made.train) == (*parts, [])
    few = load(replace(task, splits=replace(TESTED, rows=(0, 1, 2))), documents="judged")
    assert (len(few.validation), len(few.test)) == (1, 2)
    assert few.test.library == made.test.library


def test_pairs_are_relevant_judgments_or_rows_of_files_that_fill_the_templates(tmp_path):
    train = [("q1", "d1", 2), ("q1", "d2", 1), ("q2", "d1", 2)]
    folder = beir(tmp_path, train=train, test=SOME)
    judge(folder / "qrels" / "validation.tsv", [("q9", "d9", 1)])
    splits = Splits("qrels/train*", "qrels/validation*", "qrels/test*")
    first, last = Pair("Query: y1", "Document: t1. x1"), Pair("Query: y2", "Document: t1. x1")
    for grade, expected in ((1, [first, Pair("Query: y1", "Document: . x2"), last]), (2, [first, last])):
        task = Task("ir", replace(IR, relevant=grade), str(folder), splits)
        assert load(task, documents="judged").train == expected

    rows = [{"query": f"a{n}", "positive": f"b{n}", "negative": "c"} for n in range(4)]
    write(folder / "triplet" / "train.parquet", rows)
    task = Task("ir", replace(IR, pairs="triplet/train*"), str(folder), replace(splits, rows=(3, 0, 0)))
    pairs = [Pair(f"Query: a{n}", f"Document: . b{n}") for n in range(3)]
    assert load(task, documents="judged").train == pairs
    for blank in ("", " "):
        write(folder / "triplet" / "train.parquet", [rows[0], {"query": "a", "positive": blank}])
        refused(task, r"parquet:2.*text.*'positive\|document'")


@pytest.mark.parametrize(
    "raw",
    [
        "q1 0 d1 1\nq2 0 d2 2\n",
        "q1\t0\td1\t1\nq2\t0\td2\t2\n",
        "q1\td1\t1\r\nq2\td2\t2\r\n",
        "corpus-id\tscore\tquery-id\nd1\t1\tq1\nd2\t2\tq2\n",
        "query-id\tcorpus-id\tscore\nq1\td1\t1\nq1\td1\t1\nq2\td2\t2",
    ],
    ids=["trec", "trec with tabs", "no header", "another order", "twice the same"],
)
def test_judgments_are_read_in_every_way_they_are_written(raw, tmp_path):
    folder = beir(tmp_path, test=SOME)
    (folder / "qrels" / "test.tsv").write_bytes(raw.encode())
    splits = Splits("", "qrels/test*", "qrels/test*")
    made = load(Task("ir", IR, str(folder), splits, trained_on="x"), documents="judged")
    assert made.test.names == ("q1", "q2")
    assert made.test.judged == ({0: 1}, {1: 2})


def long_rows(*queries):
    """As in MLDR: the query's text, and its documents with theirs, stand beside the judgment."""
    passages = {"negative_passages": [{"docid": "doc-9", "text": "z"}]}
    return [
        {"query_id": query, "query": f"about {query}", "positive_passages": [{"docid": f"doc-{n}", "text": "z"}], **passages}
        for n, query in enumerate(queries)
    ]  # fmt: skip


def test_mldr_says_queries_and_judgments_in_one(tmp_path):
    write(tmp_path / "dev.jsonl.gz", long_rows("v1"))
    write(tmp_path / "test.jsonl.gz", long_rows("t1", "t2"))
    write(tmp_path / "corpus.jsonl.gz", [{"docid": f"doc-{n}", "text": f"x{n}"} for n in range(5)])
    task = replace(CATALOG["mldr_en"], source=str(tmp_path))
    made = load(task, documents="judged")
    assert made.test.queries == ("Query: about t1", "Query: about t2")
    assert made.test.library.texts == ("Document: x0", "Document: x1"), "negative passages are not judged"
    assert made.test.judged == ({0: 1}, {1: 1})
    assert len(load(task, documents="all").test.library.names) == 5
    write(tmp_path / "dev.jsonl.gz", long_rows("t2"))
    write(tmp_path / "test.jsonl.gz", [row | {"query": "another"} for row in long_rows("t2")])
    refused(task, r"two parts.*'t2'.*other texts")
    write(tmp_path / "test.jsonl.gz", long_rows("t1", "t1"))
    refused(task, r"test.jsonl.gz:2.*second query.*'t1'")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("q1", "d99", 1)], r"qrels/test.tsv:7 judges document 'd99',.*corpus"),
        ([("q99", "d1", 1)], r"qrels/test.tsv:7 judges query 'q99',.*queries"),
        ([("q1", "d1", "x")], r"qrels/test.tsv:7.*grade.*'x';.*whole number"),
        ([("q1", "d5", 0.5)], r"qrels/test.tsv:7.*grade.*'0.5'"),
        ([("q1", "d1", 2)], r"qrels/test.tsv:7.*'d1'.*'q1' as 2,.*earlier row.*1"),
        ([("q1", "d1")], r"qrels/test.tsv:7 has 2.*columns.*3"),
        ([("", "d1", 1)], r"qrels/test.tsv:7.*id.*''"),
        ("a\tb\tc\n1\t2\t3\n", r"test.tsv:1.*header nor"),
        ("q1\td1\t0\n", r"relevant document"),
    ],
)
def test_a_bad_judgment_is_named(rows, words, tmp_path):
    folder = beir(tmp_path, test=SOME if isinstance(rows, str) else SOME + rows)
    if isinstance(rows, str):
        (folder / "qrels" / "test.tsv").write_text(rows)
    refused(Task("ir", IR, str(folder), TESTED, trained_on="x"), words, "judged")


@pytest.mark.parametrize("blank", ["", "  ", None])
def test_a_judged_query_without_text_is_named(blank, tmp_path):
    folder, queries = beir(tmp_path, test=SOME), asks(12)
    task = Task("ir", IR, str(folder), TESTED, trained_on="x")
    queries[5]["text"] = blank  # nobody judges it
    write(folder / "queries.jsonl", queries)
    assert load(task, documents="judged").test
    queries[2]["text"] = blank
    write(folder / "queries.jsonl", queries)
    refused(task, "query 'q2' is judged and has no text", "judged")


@pytest.mark.parametrize("documents", ["judged", "all"])
def test_a_few_judged_documents_may_have_no_text_but_not_more(documents, tmp_path):
    folder = beir(tmp_path, test=SOME)
    task = Task("ir", IR, str(folder), TESTED, trained_on="x")
    assert load(task, documents=documents).test
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    write(folder / "corpus.jsonl", [row | {"title": "", "text": None} for row in rows])
    refused(task, "judged documents have no text", documents)


# ---------------------------------------------------------------- whatever files hold

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "answer_start", "docid", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FORMS = {
    "SC": (NLI, ("premise", "hypothesis", "label")),
    "TC": (Tag(TAGS), ("tokens", "tags")),
    "QA": (Answer(), ("question", "context", "answers", "id")),
    "IR": (Retrieve(queries="", corpus="test*"), ("query_id", "query", "positive_passages", "docid", "text")),
    "qrels": (Retrieve(queries="test*", corpus="test*"), ("query-id", "corpus-id", "score", "text", "_id")),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(list(FORMS)))
def test_whatever_the_rows_hold_it_is_read_or_refused_in_one_line(tmp_path, data, kind):
    form, columns = FORMS[kind]
    row = st.fixed_dictionaries(dict.fromkeys(columns, ANYTHING))
    source = lay(tmp_path, test=data.draw(st.lists(row, min_size=1, max_size=4)))
    task = Task("x", form, source, Splits("test*", "test*", "test*"))
    said = ""
    try:
        load(task, documents="all")
    except DataError as wrong:
        said = str(wrong)
    assert "\n" not in said


# ---------------------------------------------------------------- the tasks that ship, and speed


@pytest.mark.parametrize("name", [name for name in CATALOG if name.endswith("-mini")])
def test_the_tasks_that_ship_load(name):
    made = load(CATALOG[name], documents="judged")
    assert min(len(made.train), len(made.validation), len(made.test)) >= 20
