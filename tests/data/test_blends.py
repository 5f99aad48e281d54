"""Blends: shares that hold at every step, every corpus read on where it stopped, keys, plans, and what is refused."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase import BPE, CLM, MLM, WSD, Blend, Chunks, Corpus, Kept, Merge, Pretrain, Pretrained, Stage, Study
from biphase.data.shards import Shards
from biphase.data.stream import SourceSampler, Stream, floor_sum, heldout_stream, share, training_stream
from biphase.data.tokenize import tokenize
from biphase.errors import DataError, SpecError
from biphase.keys import Identities, checkpoint_key
from biphase.objectives import assign
from biphase.presets import CORPORA, SIZES, sources_of
from biphase.records import decode, encode
from biphase.store import Store
from biphase.study.plan import make_plan

OUTSIDE = Identities(data=lambda corpus: f"data of {corpus.source}", hub=lambda hub: hub.source)
TOKENIZER = Pretrained("./tokenizer")
WEB, CODE, NEWS = (Corpus(name, f"./{name}", TOKENIZER) for name in ("web", "code", "news"))
SPREAD = 4  # rows by which a share of some samples may be off


# ---------------------------------------------------------------- which source a sample reads


def spans_of(seed):
    """Shares of up to five sources in up to three spans, some of them 0 or tiny."""
    chance = random.Random(seed)
    sources, spans, first = chance.randint(2, 5), [], 0
    for _ in range(chance.randint(1, 3)):
        weights = [chance.choice([0, 1e-3, 1, 2, 5, chance.random()]) for _ in range(sources)]
        weights[chance.randrange(sources)] += 1
        spans.append((first, [weight / sum(weights) for weight in weights]))
        first += chance.randint(1, 3_000)
    return spans


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_every_run_of_samples_has_its_shares_and_no_sample_of_a_source_is_skipped_or_repeated(seed):
    spans = spans_of(seed)
    sampler = SourceSampler.of(seed, spans)
    firsts = [first for first, _ in spans] + [spans[-1][0] + 5_000]
    bounds = [*pairwise(firsts)]
    parts = [sampler.locate(torch.arange(*bound)) for bound in bounds]
    sources, inside = (torch.cat(column) for column in zip(*parts, strict=True))
    for number in range(len(spans[0][1])):
        assert torch.equal(inside[sources == number], torch.arange(int((sources == number).sum())))
    for (first, until), (_, shares) in zip(bounds, spans, strict=True):
        for begin in range(first, until, 97):
            some = sources[begin : min(begin + 256, until)]
            counts = torch.bincount(some, minlength=len(shares))
            expected = torch.tensor(shares) * len(some)
            assert (counts - expected).abs().max() < SPREAD
            assert not any(count for count, share in zip(counts, shares, strict=True) if share == 0)
    for samples in (0, 1, firsts[-1] // 3, firsts[-1]):
        assert (
            sampler.counts(samples) == torch.bincount(sources[:samples], minlength=len(spans[0][1])).tolist()
        )
    far = 10**12  # needs no counting
    sources, inside = sampler.locate(torch.arange(far, far + 1_000))
    before, after = sampler.counts(far), sampler.counts(far + 1_000)
    last = int(sources[-1])
    assert [int((sources == n).sum()) + count for n, count in enumerate(before)] == after
    assert int(inside[-1]) == after[last] - 1


def test_sums_of_floors_equal_plain_ones():
    chance = random.Random(0)
    for _ in range(200):
        count, step, offset, modulus = (chance.randint(low, 60) for low in (0, 0, 0, 1))
        plain = sum((step * i + offset) // modulus for i in range(count))
        assert floor_sum(count, step, offset, modulus) == plain


# ---------------------------------------------------------------- streams


@pytest.fixture(scope="module")
def text(tmp_path_factory, corpus, shards):
    """A second corpus, smaller and read with the tokenizer of the first, in a store that has both."""
    folder = tmp_path_factory.mktemp("blend")
    lines = "".join(f'"{n} plus {n * 7 % 13}, is\n{n + n * 7 % 13}"\n' for n in range(300))
    (folder / "sums.csv").write_text(f"body\n{lines}")
    (folder / "sums-heldout.csv").write_text(
        'body\n"1 plus 1, is\n2 and many more words than that, so that rows are full"\n' * 40
    )
    sums = Corpus(
        "sums", str(folder / "sums.csv"), BPE(320, on=corpus), text="body", heldout="sums-heldout.csv"
    )
    store = Store(folder / "store")
    store.shards.mkdir(parents=True)
    (store.shards / shards.name).symlink_to(shards)
    said = []
    made = tokenize(sums, store, processes=1, report=said.append)
    return sums, {corpus: Shards.open(shards), sums: Shards.open(made)}, said


def test_a_bpe_on_another_corpus_is_that_corpus_s_own(text, corpus, tmp_path):
    sums, shards, said = text
    own, other = (shards[one].tokenizer / "tokenizer.json" for one in (corpus, sums))
    assert own.read_bytes() == other.read_bytes()
    assert not any("training" in line for line in said)  # taken from the shards
    alone = tokenize(sums, Store(tmp_path), processes=1, report=said.append)  # which are not in this store
    assert (alone / "tokenizer" / "tokenizer.json").read_bytes() == own.read_bytes()
    assert alone.name == shards[sums].folder.name
    assert any("on tiny" in line for line in said)


def test_a_blend_reads_the_rows_of_each_corpus_in_its_own_order(text, corpus, tiny_run):
    sums, shards, _ = text
    stages = Stage(CLM(), 30), Stage(CLM(), 30, corpus=Blend({corpus: 1, sums: 4}))
    run = tiny_run("run", *stages, corpus=Blend({corpus: 3, sums: 1}))
    stream = training_stream(run, shards)
    steps = [torch.arange(first, first + 8) for first in range(0, 60 * 8, 8)]
    every = torch.cat([stream.ids(samples) for samples in steps])
    alone = {one: Stream.of(shards[one], run.packing, run.seed) for one in shards}
    read = dict.fromkeys(shards, 0)
    for row in every:  # each row is the next one of either corpus
        (found,) = [one for one in shards if torch.equal(alone[one].ids(torch.tensor([read[one]]))[0], row)]
        read[found] += 1
    assert abs(read[sums] - 30 * 8 * (0.25 + 0.8)) < 2 * SPREAD
    recorded = stream.reading(480)
    assert {name: one["epochs"] for name, one in recorded["sources"].items()} == {
        one.name: read[one] / alone[one].rows for one in shards
    }
    assert recorded["epochs"] == max(read[one] / alone[one].rows for one in shards)


def test_a_run_that_begins_on_one_corpus_reads_what_a_plain_run_reads(text, corpus, tiny_run):
    sums, shards, _ = text
    for first in (corpus, sums):
        stages = Stage(MLM(0.4), 6), Stage(MLM(0.4), 6, corpus=Blend({corpus: 1, sums: 1}))
        blended = training_stream(tiny_run("later", *stages, corpus=first), shards)
        plain = training_stream(tiny_run("plain", corpus=first), {first: shards[first]})
        samples = torch.arange(48)
        assert torch.equal(blended.ids(samples), plain.ids(samples))
        for masks in ("dynamic", "static"):  # their checkpoints at step 6 have one key
            ids = [one.batch(MLM(0.4, masks=masks), samples[:8], step=0).ids for one in (blended, plain)]
            assert torch.equal(*ids)


def test_static_masks_are_the_same_in_every_epoch(text, corpus, tiny_run):
    stream = training_stream(tiny_run("plain"), {corpus: text[1][corpus]})
    first, second = (torch.arange(epoch * stream.rows, (epoch + 1) * stream.rows) for epoch in (0, 1))
    order = [stream.index(samples).argsort() for samples in (first, second)]
    for masks, same in (("static", True), ("dynamic", False)):
        shown = [
            stream.batch(MLM(0.4, masks=masks), samples[by], step=0).ids
            for samples, by in zip((first, second), order, strict=True)
        ]
        assert torch.equal(*shown) == same


def test_neither_the_number_of_processes_nor_the_names_of_corpora_change_a_row(text, corpus, tiny_run):
    sums, shards, _ = text
    stream = training_stream(tiny_run("run", corpus=Blend({corpus: 3, sums: 1})), shards)
    step, rows = assign(MLM(0.4), 400, 16, seed=7, step=0), stream.ids(torch.arange(400, 416))
    for world in (2, 3, 5):
        parts = [part.samples for rank in range(world) for part in share(step, rank, world, 3)]
        assert torch.equal(torch.cat([stream.ids(samples) for samples in parts]), rows)
    renamed = replace(sums, name="a")
    run = tiny_run("run", corpus=Blend({corpus: 3, renamed: 1}))
    other = training_stream(run, {renamed: shards[sums], corpus: shards[corpus]})
    assert torch.equal(other.ids(torch.arange(400, 416)), rows)


def test_held_out_rows_of_a_blend_are_those_of_all_its_corpora(text, corpus):
    shards = text[1]
    blended = heldout_stream([*shards.values()], Chunks(32, shortest=4))
    parts = [heldout_stream(one, Chunks(32, shortest=4)) for one in shards.values()]
    assert all(part.rows for part in parts)
    assert blended.rows == sum(part.rows for part in parts)
    rows = {tuple(row) for row in blended.ids(torch.arange(blended.rows)).tolist()}
    for part in parts:
        own = {tuple(row) for row in part.ids(torch.arange(part.rows)).tolist()}
        assert len(rows & own) >= len(own) - SPREAD


def test_corpora_whose_tokenizers_differ_are_not_read_together(text, corpus, tiny_run, tmp_path):
    sums, shards, _ = text
    other = tokenize(
        replace(sums, tokenizer=BPE(310)), Store(tmp_path), processes=1, report=lambda line: None
    )
    with pytest.raises(DataError, match=r"different tokenizers.*sums"):
        training_stream(tiny_run("run"), {corpus: shards[corpus], sums: Shards.open(other)})


# ---------------------------------------------------------------- records and keys


def run(name="run", corpus=WEB, *stages, **fields):
    stages = stages or (Stage(CLM(), 10),)
    fields = {"packing": Chunks(32, shortest=4), "batch_tokens": 256, "schedule": WSD(1e-3, 0, 0)} | fields
    return Pretrain(name, **({"start": SIZES["1m"], "corpus": corpus, "stages": stages} | fields))


def planned(one, identities=OUTSIDE):
    return make_plan(Study("s", runs=(one,)), identities)


def key(one, step=10):
    return checkpoint_key(one, step, OUTSIDE)


def test_equal_blends_have_one_form_and_survive_the_plan():
    blend = Blend({WEB: 3, CODE: 1})
    assert blend == Blend({CODE: 0.25, WEB: 0.75}) == Blend(((CODE, 2), (WEB, 6))) == decode(encode(blend))
    assert Blend(Blend({WEB: 1, CODE: 1, NEWS: 1}).sources) == Blend({WEB: 1, CODE: 1, NEWS: 1})
    assert blend.name == "25% code + 75% web"


def test_the_key_of_a_blend_is_of_its_texts_and_shares_and_of_nothing_else():
    one = key(run(corpus=Blend({WEB: 3, CODE: 1})))
    assert one == key(run(corpus=Blend({replace(CODE, name="a"): 2, WEB: 6})))
    others = [
        Blend({WEB: 3, CODE: 1.1}), Blend({WEB: 1, CODE: 3}), Blend({WEB: 3, NEWS: 1}), Blend({WEB: 3, CODE: 1, NEWS: 1}),
        WEB, CODE,
    ]  # fmt: skip
    assert len({one, *(key(run(corpus=other)) for other in others)}) == 7


def test_a_stage_s_corpus_is_in_the_key_from_its_first_step_on():
    plain = run("plain", WEB, Stage(CLM(), 10), Stage(CLM(), 10))
    hidden = run("hidden", WEB, Stage(CLM(), 10), Stage(CLM(), 10, corpus=Blend({WEB: 1, CODE: 1})))
    assert key(hidden, 10) == key(plain, 10)
    assert key(hidden, 11) != key(plain, 11)
    share = run("share", WEB, Stage(CLM(), 10), Stage(CLM(), 10, corpus=Blend({WEB: 1, CODE: 2})))
    assert key(share, 20) != key(hidden, 20)
    written = run("written", WEB, Stage(CLM(), 10, corpus=WEB), Stage(CLM(), 10, corpus=WEB))
    assert key(written, 20) == key(plain, 20)
    assert "corpus" not in encode(Stage(CLM(), 10))
    assert encode(BPE(300)) == {"kind": "BPE", "vocab": 300}


def test_a_name_stands_for_its_corpus_in_a_blend():
    builtin = CORPORA["builtin"]
    sums = Corpus("sums", "./sums", BPE(2_048, on=builtin))
    named, spelled = (run(corpus=Blend({one: 1, sums: 1})) for one in ("builtin", builtin))
    assert key(named) == key(spelled)
    assert sources_of(named) == (builtin, sums)


def test_a_temperature_becomes_shares_when_the_sizes_are_known():
    sizes = {WEB: 8_000, CODE: 1_000}
    for temperature, expected in ((1, 8 / 9), (3, 2 / 3), (1e6, 1 / 2)):
        blended = run(corpus=Blend({WEB: 1, CODE: 1}, temperature=temperature))
        plan = planned(blended, replace(OUTSIDE, tokens=sizes.__getitem__))
        found = dict(plan.study.runs[0].corpus.sources)
        assert found[WEB] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(SpecError, match=r"temperature.*'code'.*biphase tokenize"):
        planned(blended)


PRIVATE = Corpus("private", "./private", BPE(400))


@pytest.mark.parametrize(
    ("made", "facts"),
    [
        (lambda: Blend({WEB: 1}), ["two or more", "Blend({"]),
        (lambda: Blend({WEB: 1, replace(CODE, name="web"): 1}), ["different names"]),
        (lambda: Blend({WEB: 1, CODE: 0}), ["'code'", "above 0"]),
        (lambda: Blend({WEB: 1, CODE: -1}), ["'code'", "above 0"]),
        (lambda: Blend({WEB: "much", CODE: 1}), ["Blend.sources", "a number"]),
        (lambda: Blend({WEB: 1, CODE: 1}, temperature=-1), ["Blend.temperature", "-1"]),
        (lambda: BPE(500, on=PRIVATE), ["'private'", "500"]),
        (lambda: planned(run(corpus=Blend({WEB: 1, PRIVATE: 1}))), ["'run'", "'web'", "'private'", "BPE(…, on=…)"]),
        (lambda: planned(run(corpus=Blend({WEB: 1, replace(CODE, bos=True): 1}))), ["'code'", "bos"]),
        (lambda: planned(run("a", WEB, Stage(CLM(), 5), Stage(CLM(), 5, corpus=PRIVATE))), ["'private'"]),
        (lambda: planned(run(corpus=Blend({"bulitin": 1, WEB: 1}))), ["'bulitin'", "builtin"]),
        (lambda: planned(run("a", WEB, Stage(CLM(), 5), Stage(CLM(), 5, corpus=replace(CODE, name="web")))), ["one name"]),
        (lambda: run("b", CODE, start=run()), ["corpus", "data='restart'", "Stage(…, corpus=…)"]),
    ],
)  # fmt: skip
def test_what_cannot_be_blended_is_refused_in_one_line(made, facts):
    with pytest.raises(SpecError) as caught:
        made()
    assert "\n" not in str(caught.value)
    assert all(fact in str(caught.value) for fact in facts), str(caught.value)


def test_a_mean_goes_on_where_its_parts_have_read_only_if_they_have_read_alike():
    one = run("one", WEB, Stage(CLM(), 10), Stage(CLM(), 10, corpus=CODE))
    two = run("two", WEB, Stage(CLM(), 10), Stage(CLM(), 10, corpus=NEWS))
    fields = {"stages": Stage(CLM(), 5), "schedule": WSD(1e-3, 0, 0)}
    alike = Pretrain("mean", Merge(Kept(one, 15), Kept(one, 20)), **fields)
    assert alike.reads == (*one.reads, (alike.origin_sample, WEB))
    with pytest.raises(SpecError, match="data='restart'"):
        Pretrain("mean", Merge(one, two), **fields)
    assert Pretrain("mean", Merge(one, two), data="restart", **fields).reads == ((0, WEB),)
    assert Pretrain("mean", Merge(one, two)).stages == ()


# ---------------------------------------------------------------- what a user sees


STUDY = """
from biphase import BPE, MLM, SIZES, WSD, Blend, Chunks, Corpus, Pretrain, Stage, Study

tiny = Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl")
sums = Corpus("sums", {sums!r}, BPE(320, on=tiny), text="body")
fields = dict(start=SIZES["1m"], packing=Chunks(32, shortest=4), batch_tokens=256, schedule=WSD(1e-3, 1, 1),
    heldout_tokens=512, heldout_every=100)
mixed = Pretrain("mixed", corpus=Blend({{tiny: 3, sums: 1}}), stages=Stage(MLM(0.4), 40), **fields)
end = Pretrain("end", corpus=tiny, stages=(Stage(MLM(0.4), 4), Stage(MLM(0.4), 4, corpus=sums)), **fields)
study = Study("shown", runs=(mixed, end))
"""


def test_plan_results_and_report_say_shares_and_epochs_and_mark_what_repeats(corpus, tmp_path, verb):
    (tmp_path / "sums.csv").write_text("body\n" + "one and two\n" * 30)
    path, store = tmp_path / "study.py", tmp_path / "store"
    path.write_text(STUDY.format(source=corpus.source, sums=str(tmp_path / "sums.csv")))
    code, out, err = verb("plan", path, "--store", store)
    assert code == 0, err
    for fact in ("75% tiny", "25% sums", "50% sums", "mlm 40%, sums"):
        assert fact in out
    code, out, err = verb("run", path, "--store", store, "--quiet")
    assert code == 0, err
    assert "tiny 0." in out
    code, out, err = verb("plan", path, "--store", store)
    sentence = " ".join(out.split("mixed reads")[1].split("end reads")[0].split())
    assert sentence.startswith("25% sums")
    assert sentence.index("epochs: repeated)") < sentence.index("75% tiny")
    assert sentence.count("epochs") == 2
    code, out, err = verb("report", path, "--store", store)
    assert code == 0, err
    rows = (store / "studies" / "shown" / "report" / "report.md").read_text().splitlines()
    (row,) = (row for row in rows if row.startswith("| sums | corpus |"))
    assert ": repeated" in row.split("mixed reads it")[1]
    (row,) = (row for row in rows if row.startswith("| tiny | corpus |"))
    assert "repeated" not in row
    assert "end reads it" in row
