"""The small tasks that ship with the package: clean between parts, and attributed."""

import json
from itertools import combinations

import pyarrow
import pytest

from biphase.data.corpus import ASSETS

KEPT_APART = {"sources": ("document", "text"), "wikiann": ("tokens",), "squadshifts": ("context", "title")}


def rows(path) -> list[dict]:
    with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd") as stream:
        return [json.loads(line) for line in stream.read().decode().split("\n") if line]


@pytest.mark.parametrize("task", KEPT_APART)
def test_no_document_is_in_two_parts_of_a_task_or_in_the_corpus_and_its_licences_are_named(task):
    parts = [rows(ASSETS / "tasks" / task / f"{part}.jsonl.zst") for part in ("train", "validation", "test")]
    for column in KEPT_APART[task]:
        values = [{str(row[column]).lower() for row in part} for part in parts]
        assert [one & other for one, other in combinations(values, 2)] == [set(), set(), set()]
    if task == "sources":
        corpus = "\n".join(one["text"] for one in rows(ASSETS / "corpus.jsonl.zst"))
        assert not any(row["text"] in corpus for part in parts for row in part)
    (line,) = [
        line
        for line in (ASSETS / "ATTRIBUTION.md").read_text().splitlines()
        if line.startswith(f"| `{task}`")
    ]
    assert "CC BY" in line
    assert " / ".join(str(len(part)) for part in parts) in line
