"""The four small tasks that ship with the package: complete, clean between parts, and attributed.

That their tags, answers and judgments are valid is checked where they are loaded (test_load.py).
"""

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


def rows(path) -> list[dict]:
    with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd") as stream:
        return [json.loads(line) for line in stream.read().decode().split("\n") if line]


def parts(task) -> dict[str, list[dict]]:
    return {part: rows(TASKS / task / f"{part}.jsonl.zst") for part in PARTS}


@pytest.mark.parametrize("task", LICENCES)
def test_the_attribution_names_licences_rows_and_novels(task):
    attribution = (ASSETS / "ATTRIBUTION.md").read_text("utf-8")
    (line,) = (line for line in attribution.splitlines() if line.startswith(f"| `{task}`"))
    assert [licence for licence in LICENCES[task] if licence not in line] == []
    assert f"- **{task}**: " in attribution
    if task in ROWS:
        assert tuple(map(len, parts(task).values())) == ROWS[task]
        assert " / ".join(map(str, ROWS[task])) in line
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
        ("sources", lambda row: row["text"]),
        ("wikiann", lambda row: " ".join(row["tokens"]).lower()),
        ("squadshifts", lambda row: row["context"]),
        ("squadshifts", lambda row: row["title"]),
    ],
)
def test_no_document_is_in_two_parts_of_a_task(task, value):
    values = [{value(row) for row in part} for part in parts(task).values()]
    assert [one & other for one, other in combinations(values, 2)] == [set(), set(), set()]


def test_sources_have_as_many_texts_of_each_label_and_none_of_the_corpus_that_is_pretrained_on():
    corpus = rows(ASSETS / "corpus.jsonl.zst")
    names, text = {one["id"] for one in corpus}, "\n".join(one["text"] for one in corpus)
    for some in parts("sources").values():
        labels = [row["label"] for row in some]
        assert {labels.count(one) for one in ("wikipedia", "elife-digest", "books")} == {len(some) / 3}
        assert all(40 <= len(row["text"].split()) <= 80 for row in some)
        assert [row["document"] for row in some if row["document"] in names or row["text"] in text] == []
