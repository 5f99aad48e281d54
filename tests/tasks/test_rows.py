"""Rows of files: every kind gives the same, and what is wrong is named with its place."""

import gzip
import itertools
import json

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from biphase.errors import DataError
from biphase.tasks.files import column_names, read_rows

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\x00"), max_size=20)


def write(path, rows):
    """Rows as a file of the kind its name says."""
    kind, _, packed = path.name.split(".", 1)[1].partition(".")
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    if kind in ("jsonl", "json"):
        raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    elif kind == "csv":
        sink = pyarrow.BufferOutputStream()
        arrow_csv.write_csv(pyarrow.Table.from_pylist(rows), sink)
        raw = sink.getvalue().to_pybytes()
    else:
        raw = "".join("\t".join(line) + "\n" for line in (rows[0], *(row.values() for row in rows))).encode()
    if packed == "gz":
        raw = gzip.compress(raw)
    elif packed == "zst":
        raw = pyarrow.Codec("zstd").compress(raw, asbytes=True)
    path.write_bytes(raw)
    return path


def table(*paths, wanted=("a",), optional=(), only=None):
    """All rows by column, and their places."""
    rows = list(read_rows("task 'x'", paths, wanted, optional=optional, only=only))
    columns = {name: [row[at] for _, row in rows] for at, name in enumerate((*wanted, *optional))}
    return columns, [place for place, _ in rows]


KINDS = ["parquet", "jsonl", "json.gz", "jsonl.zst", "csv", "csv.gz", "tsv", "tsv.zst"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_rows(kind, tmp_path):
    rows = [{"a": f"text {n}", "b": str(n), "c": "x"} for n in range(5)]
    path = write(tmp_path / f"train.{kind}", rows)
    columns, places = table(path, wanted=("b", "a"))
    assert columns == {"b": ["0", "1", "2", "3", "4"], "a": [row["a"] for row in rows]}
    first = 2 if kind.startswith(("csv", "tsv")) else 1
    assert places[0] == f"train.{kind}:{first}"
    assert column_names("task 'x'", path) == ("a", "b", "c")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8))
def test_any_text_comes_back_as_it_was(tmp_path, values):
    rows = [{"a": one, "b": f"x{two}"} for one, two in values]
    for kind in ("parquet", "jsonl", "jsonl.zst", "csv"):
        columns, _ = table(write(tmp_path / f"train.{kind}", rows), wanted=("a", "b"))
        assert columns == {"a": [row["a"] for row in rows], "b": [row["b"] for row in rows]}, kind


def test_files_follow_one_another_and_a_row_may_lack_what_is_optional(tmp_path):
    paths = [write(tmp_path / f"train{n:02}.jsonl", [{"a": n, "id": 7}, {"a": -n}]) for n in (1, 2)]
    places = ["train01.jsonl:1", "train01.jsonl:2", "train02.jsonl:1", "train02.jsonl:2"]
    assert table(*paths, optional=("id",)) == ({"a": [1, -1, 2, -2], "id": [7, None, 7, None]}, places)
    for kind in ("parquet", "csv"):
        path = write(tmp_path / f"x.{kind}", [{"a": "1"}, {"a": "2"}])
        assert table(path, optional=("id",))[0] == {"a": ["1", "2"], "id": [None, None]}
    with pytest.raises(DataError, match=r"train01.jsonl:2.*column.*'id'"):
        table(*paths, wanted=("id",))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_a_missing_column_is_named_with_the_nearest(kind, tmp_path):
    path = write(tmp_path / f"train.{kind}", [{"sentence": "x", "label": "1"}])
    with pytest.raises(DataError, match=rf"task 'x': train.{kind}.*'sentense'.*'sentence'"):
        table(path, wanted=("sentense",))


@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "csv"])
def test_only_the_rows_that_are_wanted_are_kept_with_their_places(kind, tmp_path):
    rows = [{"id": n if kind != "csv" else str(n), "a": str(n * n)} for n in range(9)]
    path = write(tmp_path / f"x.{kind}", rows)
    columns, places = table(path, wanted=("id|_id", "a"), only=("id|_id", {"3", "7"}))
    assert columns["a"] == ["9", "49"]
    shift = 2 if kind == "csv" else 1
    assert places == [f"x.{kind}:{3 + shift}", f"x.{kind}:{7 + shift}"]


CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP I-ORG
rejects VBZ B-VP O

Peter NNP I-NP I-PER
Blackburn NNP I-NP I-PER
Ann NNP I-NP B-PER
""".replace("\n", "\r\n")
ENTITIES = {
    "tokens|words": [["EU", "rejects"], ["Peter", "Blackburn", "Ann"]],
    "tags|ner_tags": [["B-ORG", "O"], ["B-PER", "I-PER", "B-PER"]],
}
NUMBERED = """1\tAda\tB-PER\t-\t-
2\t#\tO\t-\t-

# sent_id = 2
1\tLondon\tB-LOC\t-\t-
"""
NAMES = {"tokens": [["Ada", "#"], ["London"]], "tags": [["B-PER", "O"], ["B-LOC"]]}
ROWS = [{"a": "x", "b": 1}, {"a": "y", "b": 2}]
SEPARATED = 'id;review text;a\n1;"one, two; three";x\n2;four;y'
WORDS = '{"words": 1, "data": [{}]}\n{"words": 3, "data": [{}], "tokens": 4}\n'


@pytest.mark.parametrize(
    ("name", "text", "columns", "numbers"),
    [
        ("x.jsonl", '\ufeff{"a": 1}\r\n\n  \n{"a": 2}', {"a": [1, 2]}, [1, 4]),
        ("x.csv", '\ufeffa,b\r\n\r\n"x\r\ny",1\r\nz,2', {"a": ["x\r\ny", "z"]}, [3, 5]),
        ("x.csv", f"a\n{'x' * 300_000}\n", {"a": ["x" * 300_000]}, [2]),  # longer than the csv module likes
        (
            "x.csv",
            '"a;b;c",d|e\n1;2;3,4\n',
            {"a;b;c": ["1;2;3"]},
            [2],
        ),  # a comma goes before other separators
        *(
            (
                "x.csv",
                SEPARATED.replace(";", separator),
                {"review text": [f"one, two{separator} three", "four"], "a": ["x", "y"]},
                [2, 3],
            )
            for separator in ";\t|"
        ),
        ("x.tsv", 'a\tb\n"open\t1\nsay "no"\t2\n', {"a": ['"open', 'say "no"']}, [2, 3]),  # no quotes
        ("x.jsonl", WORDS, {"words|tokens": [1, 3]}, [1, 2]),
        ("x.jsonl", WORDS, {"data|words": [[{}], [{}]]}, [1, 2]),
        (
            "x.jsonl",
            WORDS,
            {"tokens|words": [1, 3]},
            [1, 2],
        ),  # the first that the file has, while it is there
        *(
            ("x.json", "\ufeff" + json.dumps(document, indent=indent), {"a": ["x", "y"]}, [1, 2])
            for document in (ROWS, {"version": 1, "data": ROWS})
            for indent in (None, 1)
        ),
        *((name, CONLL_2003, ENTITIES, [3, 6]) for name in ("eng.train", "train.txt", "train.conll")),
        ("train.tsv", NUMBERED, NAMES, [1, 5]),
        ("train.iob2", f"# sent_id = 1\n# text = Ada #\n{NUMBERED}", NAMES, [3, 7]),
    ],
    ids=itertools.count(),
)
def test_every_layout_is_read(name, text, columns, numbers, tmp_path):
    path = tmp_path / name
    path.write_bytes(text.encode())
    assert table(path, wanted=tuple(columns)) == (columns, [f"{name}:{number}" for number in numbers])
    there = column_names("task 'x'", path)
    assert all(column in there or set(column.split("|")) & set(there) for column in columns)


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', r"x.jsonl:2 is no JSON .*;.*object"),
        ("x.json", b"[1, 2]", r"x.json:1 is no JSON object"),
        ("x.json", b'{\n "a": 1\n}', r"x.json .*one.*object"),
        ("x.json", b'{"data": [{"paragraphs": 1}]}', r"x.json:1 .*SQuAD"),
        ("x.jsonl", b'{"a": "\xff"}\n', r"x.jsonl:1 is not UTF-8"),
        ("x.jsonl", b'{"a": "\\ud800"}\n', r"x.jsonl:1.*surrogate pair"),
        ("x.csv", b"a,b\n1,2\n1,2,3\n", r"x.csv:3 has 3.*columns.*2"),
        ("x.csv", b'a,b\n1,2\n"1"x,2\n', r"x.csv:3 is malformed"),
        ("x.csv", b"a,b\n1,\xff\n", r"x.csv:2 is not UTF-8"),
        ("x.csv", b"", r"x.csv is empty"),
        ("x.txt", b"just a text\nand another\n", r"x.txt:1 .*a.*word.*tag.* \.csv"),
        ("x.conll", b"Ada NNP B-PER\nof O\n", r"x.conll:2 has 2.*columns.*3"),
        ("x.parquet", b"not parquet", r"x.parquet.*cannot.*;.*undamaged copy"),
        ("x.jsonl.zst", b"not zstd", r"x.jsonl.zst.*cannot"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_its_place(name, raw, words, tmp_path):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=words) as caught:
        table(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("indent", "broken"), [(1, False), (None, True)])
def test_squads_own_json_is_a_row_for_each_question(indent, broken, tmp_path):
    asked = [
        {"id": "q1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]},
        {"id": "q2", "question": "When?", "answers": [], "is_impossible": True, "plausible_answers": [{}]},
    ]
    articles = [{"title": "Ada", "paragraphs": [{"context": "Ada wrote.", "qas": asked}]}] * 2
    path = tmp_path / "train-v2.0.json"
    text = json.dumps({"version": "v2.0", "data": articles}, indent=indent)
    path.write_text(text.replace('"v2.0", ', '"v2.0",\n') if broken else text)
    assert column_names("task 'x'", path) == ("id", "title", "context", "question", "answers")
    found, places = table(path, wanted=("question", "context", "answers"), optional=("id",))
    assert found["question"] == ["Who?", "When?"] * 2
    assert found["context"] == ["Ada wrote."] * 4
    assert found["answers"][:2] == [{"text": ["Ada"], "answer_start": [0]}, {"text": [], "answer_start": []}]
    assert found["id"][:2] == ["q1", "q2"]
    assert places[3] == "train-v2.0.json:4"
