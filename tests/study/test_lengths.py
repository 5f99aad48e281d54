"""How long the texts of tasks are: the table against the data that ships, ratios against tokenizers, and what is not known."""

import json
from dataclasses import replace

import pytest

from biphase.catalog import CATALOG
from biphase.specs import Classify, Splits, Task
from biphase.study import costs
from biphase.study.costs import TABLE, Sizes, TextLengths, characters_per_token, sizes_of

MINIS = ("sources-mini", "wikiann-mini", "squadshifts-mini", "scifact-mini")


@pytest.mark.parametrize("name", MINIS)
@pytest.mark.parametrize("documents", ["judged", "all"])
def test_the_table_says_what_reading_the_files_finds(name, documents):
    listed, read = sizes_of(CATALOG[name], documents), costs._read(CATALOG[name], documents)
    assert listed is not None
    assert listed == read


def test_the_table_has_every_task_of_the_catalog_but_one():
    known = json.loads(TABLE.read_text())["tasks"]
    assert set(CATALOG) - set(known) == {"record"}
    assert set(known) <= set(CATALOG)
    assert all(entry["from"] for entry in known.values())
    assert sizes_of(CATALOG["record"], "judged") is None


def test_parts_are_as_the_catalog_cuts_them():
    sizes = sizes_of(CATALOG["mnli"], "judged")
    assert sizes is not None
    assert [one.rows for one in (*sizes.train, *sizes.scored)] == [373_066, 19_636, 9_815]


def test_a_task_that_borrows_a_model_is_only_scored_and_searched_where_it_is_asked():
    judged, every = (sizes_of(CATALOG["nq"], documents) for documents in ("judged", "all"))
    assert judged is not None
    assert every is not None
    assert judged.train == ()
    assert [one.rows for one in judged.scored] == [1_726, 1_726, 4_200]
    assert every.scored[2].rows == 2_681_468


def test_the_same_data_at_another_commit_or_trained_longer_is_known_and_other_data_is_not():
    sst2 = CATALOG["sst2"]
    same = replace(sst2, steps=7, source=sst2.source.replace("@bcdc", "@abcd"))
    assert sizes_of(same, "judged") == sizes_of(sst2, "judged")
    fewer = sizes_of(replace(sst2, splits=replace(sst2.splits, rows=(100, 0, 50))), "judged")
    assert fewer is not None
    assert (fewer.train[0].rows, fewer.scored[0].rows, fewer.scored[1].rows) == (100, 3_368, 50)
    assert sizes_of(replace(sst2, splits=replace(sst2.splits, cut=0.5)), "judged") is None
    assert sizes_of(replace(sst2, source="hf://else/glue@1/sst2"), "judged") is None
    assert sizes_of(replace(sst2, form=Classify("It: {sentence}", ("a", "b"))), "judged") is None


def own(folder, rows):
    for part in ("train", "validation", "test"):
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Task("own", Classify("{text}", ("no", "yes")), str(folder), Splits(validation="validation*"))


def test_own_files_are_read(tmp_path):
    task = own(tmp_path, [{"text": "x" * n, "label": n % 2} for n in range(1, 21)])
    tens = TextLengths(20, (2, 4, 6, 8, 10, 12, 14, 16, 18, 20))
    assert sizes_of(task, "judged") == Sizes((tens,), (tens, tens))


def test_own_files_that_are_large_or_wrong_are_not_known(tmp_path, monkeypatch):
    task = own(tmp_path, [{"text": "some", "label": 1}])
    with monkeypatch.context() as smaller:
        smaller.setattr(costs, "LARGEST", 10)
        assert sizes_of(task, "judged") is None
    (tmp_path / "test.jsonl").write_text('{"text": "some", "label": "perhaps"}\n')
    assert sizes_of(task, "judged") is None


def test_a_larger_vocabulary_has_longer_tokens_up_to_a_bound():
    ratios = [characters_per_token(vocab) for vocab in (300, 2_048, 8_192, 32_768, 128_256, 256_000)]
    assert ratios == sorted(ratios)
    assert ratios[0] >= 1
    assert ratios[1] == pytest.approx(2.85)
    assert ratios[-2] == ratios[-1] == 4.5


def test_tokens_are_cut_at_the_limit_and_windows_cover_all():
    texts = TextLengths(10, (45.0, 4_500.0))  # 11 and 1,001 tokens
    assert texts.tokens(128_256, 2_028) == pytest.approx(506)
    assert texts.tokens(128_256, 500) == pytest.approx((11 + 500) / 2)
    count, mean = texts.windows(128_256, 500)
    assert count == (1 + 3) / 2  # 500 + 375 + 126 more
    assert mean == pytest.approx((11 + 1_001 + 2 * 125) / 4)
    assert texts.windows(128_256, 2_028) == (1, pytest.approx(506))
