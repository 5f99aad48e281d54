"""The four small tasks that ship with the package: complete, sound, clean between parts, and attributed."""

import json
from itertools import combinations

import pyarrow
import pytest

from biphase.data.corpus import ASSETS

TASKS = ASSETS / "tasks"
PARTS = ("train", "validation", "test")
ROWS = {"sources": (402, 102, 102), "wikiann": (800, 100, 100), "squadshifts": (400, 100, 100)}
LICENCES = {
    "sources": ("CC BY-SA 3.0", "CC BY 4.0", "CC0", "public domain"),
    "wikiann": ("CC BY-SA 3.0",),
    "squadshifts": ("CC BY 4.0", "CC BY-SA 3.0"),
    "scifact": ("CC BY 4.0", "ODC-By 1.0"),
}
TAGS = {"O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"}


def content(path) -> str:
    with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd") as stream:
        return stream.read().decode()


def rows(path) -> list[dict]:
    return [json.loads(line) for line in content(path).split("\n") if line]


def parts(task) -> dict[str, list[dict]]:
    return {part: rows(TASKS / task / f"{part}.jsonl.zst") for part in PARTS}


def judgments(part) -> list[tuple[str, str, str]]:
    head, *lines = content(TASKS / "scifact" / "qrels" / f"{part}.tsv.zst").splitlines()
    assert head == "query-id\tcorpus-id\tscore"
    return [(query, document, score) for query, document, score in (line.split("\t") for line in lines)]


def words(text) -> int:
    return len(text.split())


def test_only_the_files_of_the_four_tasks_are_there_and_they_are_small():
    three = {f"{task}/{part}.jsonl.zst" for task in ROWS for part in PARTS}
    beir = {"corpus.jsonl.zst", "queries.jsonl.zst", *(f"qrels/{part}.tsv.zst" for part in PARTS)}
    files = [path for path in TASKS.rglob("*") if path.is_file()]
    assert {path.relative_to(TASKS).as_posix() for path in files} == three | {
        f"scifact/{one}" for one in beir
    }
    assert sum(path.stat().st_size for path in files) < 400_000


@pytest.mark.parametrize("task", LICENCES)
def test_the_attribution_names_licences_rows_and_novels(task):
    attribution = (ASSETS / "ATTRIBUTION.md").read_text("utf-8")
    (line,) = (line for line in attribution.splitlines() if line.startswith(f"| `{task}`"))
    assert [licence for licence in LICENCES[task] if licence not in line] == []
    assert f"- **{task}**: " in attribution
    if task in ROWS:
        counts = tuple(map(len, parts(task).values()))
        assert counts == ROWS[task]
        assert " / ".join(map(str, counts)) in line
    if task == "sources":
        books = [row["document"] for part in parts(task).values() for row in part if row["label"] == "books"]
        assert [book for book in books if book.split("/")[0] not in attribution] == []


def work(row):
    """The document of a text; of a novel's chapter, the novel."""
    return row["document"].split("/")[0] if row["label"] == "books" else row["document"]


@pytest.mark.parametrize(
    ("task", "value"),
    [
        ("sources", work),
        ("wikiann", lambda row: " ".join(row["tokens"]).lower()),
        ("squadshifts", lambda row: row["context"]),
        ("squadshifts", lambda row: row["title"]),
    ],
)
def test_no_document_is_in_two_parts_of_a_task(task, value):
    values = [{value(row) for row in part} for part in parts(task).values()]
    assert [one & other for one, other in combinations(values, 2)] == [set(), set(), set()]


# ---------------------------------------------------------------- sources


def test_sources_are_texts_of_40_to_80_words_all_different_and_as_many_of_each_label():
    texts = [row["text"] for some in parts("sources").values() for row in some]
    assert all(40 <= words(text) <= 80 and "\n" not in text for text in texts)
    assert len(set(texts)) == len(texts)
    for some in parts("sources").values():
        labels = [row["label"] for row in some]
        assert {labels.count(one) for one in ("wikipedia", "elife-digest", "books")} == {len(some) / 3}


def test_nothing_of_sources_is_in_the_corpus_that_is_pretrained_on():
    corpus = rows(ASSETS / "corpus.jsonl.zst")
    names, text = {one["id"] for one in corpus}, "\n".join(one["text"] for one in corpus)
    for some in parts("sources").values():
        assert [row["document"] for row in some if row["document"] in names or row["text"] in text] == []


def test_the_label_of_a_held_out_document_is_its_source():
    heldout = {one["id"]: one for one in rows(ASSETS / "heldout.jsonl.zst")}
    known = [row for some in parts("sources").values() for row in some if row["document"] in heldout]
    assert len({row["document"] for row in known}) == 52
    for row in known:
        document = heldout[row["document"]]
        assert row["label"] == document["source"]
        assert row["text"].split(". ")[0] in document["text"]


# ---------------------------------------------------------------- the other three


def test_wikiann_has_a_valid_tag_for_each_word():
    for some in parts("wikiann").values():
        for row in some:
            tags = row["ner_tags"]
            assert len(row["tokens"]) == len(tags) > 0
            assert all(row["tokens"])
            assert set(tags) <= TAGS
            for before, tag in zip(["O", *tags], tags, strict=False):
                assert tag[:2] != "I-" or before in ("B" + tag[1:], tag)
        assert {tag for row in some for tag in row["ner_tags"]} == TAGS


def test_every_answer_of_squadshifts_stands_where_it_is_said_to():
    for some in parts("squadshifts").values():
        assert len({row["id"] for row in some}) == len(some)
        for row in some:
            assert row["question"] == row["question"].strip() != ""
            assert words(row["context"]) <= 90
            assert row["answers"]["text"]
            for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True):
                assert row["context"][start : start + len(text)] == text != ""


def test_every_judgment_of_scifact_names_a_query_and_a_document_that_are_there():
    corpus = rows(TASKS / "scifact" / "corpus.jsonl.zst")
    documents = [row["_id"] for row in corpus]
    queries = [row["_id"] for row in rows(TASKS / "scifact" / "queries.jsonl.zst")]
    judged = {part: judgments(part) for part in PARTS}
    asked = {part: {query for query, _, _ in some} for part, some in judged.items()}
    assert len(set(documents)) == len(documents) == 400
    assert (len(judged["train"]), len(asked["validation"]), len(asked["test"])) == (250, 60, 60)
    assert sorted(queries) == sorted(query for some in asked.values() for query in some)  # each in one part
    assert {document for some in judged.values() for _, document, _ in some} < set(documents)
    assert {score for some in judged.values() for _, _, score in some} == {"1"}
    assert all(row["title"] and 0 < words(row["text"]) <= 60 for row in corpus)
