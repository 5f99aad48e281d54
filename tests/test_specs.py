"""Records of a study: what is refused, the defaults, what a run inherits, schedules and phases."""

import math
from dataclasses import fields, is_dataclass, replace

import pytest

from biphase import specs
from biphase.catalog import CATALOG, TASKS
from biphase.errors import SpecError
from biphase.presets import SIZES
from biphase.records import decode, encode
from biphase.specs.objectives import CLM, MLM, MNTP, Cosine, Linear, Mix, Uniform
from biphase.specs.sources import BPE, Chunks, Corpus, Hub, Pretrained, Rows, Size
from biphase.specs.study import Finetune
from biphase.specs.tasks import Classify, Tag, Task
from biphase.specs.training import WSD, AdamW, Alternate, Kept, LoRA, Merge, Phase, Pretrain, Stage, layers_of

SHORT = {"corpus": "builtin", "batch_tokens": 128, "packing": Rows(64), "schedule": WSD(warmup=1, decay=2)}


def run(name="run", start=SIZES["1m"], *, steps=10, **fields):
    return Pretrain(name, start=start, **(SHORT | {"stages": (Stage(CLM(), steps),)} | fields))


def size(**fields):
    return Size(**({"name": "x", "layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 128} | fields))


TWO = Classify("{text}", ("bad", "good"))
LENT = CATALOG["msmarco"], CATALOG["nq"]
PAIRS = specs.Pairs("./pairs.jsonl")


def task(form=TWO, source="./data", **fields):
    return Task("t", form, source, **fields)


# An expression, and facts that its message must contain, separated by spaces.
REFUSED = {
    "size(hidden=65)": "(65) hidden=128",
    "size(hidden=66)": "even head",
    "size(heads=4, kv_heads=3)": "kv_heads (3) (4)",
    "Hub('')": "needs model",
    "Hub('gpt2', revision='main')": "branch moves",
    "Hub('./m', gguf='model.safetensors')": "'model.Q4_1.gguf'",
    "Stage(MLM(0.4), 5, rope_base=0.5)": "Stage.rope_base 1 0.5",
    "WSD(1)": "WSD.peak 0 1 5e-4",
    "AdamW((0.9, 1.0))": "AdamW.betas 0 1",
    "BPE(299)": "BPE.vocab 300 299",
    "run(seed=2**31)": "Pretrain.seed 'run' 2,147,483,648",
    "Finetune(TASKS, lrs=(1e-5, 1.0))": "Finetune.lrs 0 1",
    "run(adapter=LoRA())": "LoRA",
    "Pretrain('on', run(start=Hub('./m'), adapter=LoRA()), stages=(Stage(CLM(), 5),), adapter=LoRA(rank=2))": "'run' adapter",
    "Hub('./m', gguf='../x.gguf')": "'../x.gguf'",
    "Pretrained('gpt2')": "revision Pretrained('gpt2'",
    "Corpus('c', '', BPE(300))": "'c'",
    "Corpus('c', 'hf://a/b/*', BPE(300))": "pin hf://owner/name@revision/glob",
    "Corpus('c', 'hf://a/b@1', BPE(300))": "hf://owner/name@revision/glob",
    "Chunks(20)": "Chunks.length (20) (12)",
    "MLM(40.0)": "0 1 40 mean 0.4",
    "MLM(0.0)": "MLM 0 1",
    "MNTP(400.0)": "MNTP 0 1 400",
    "Linear(0.4, 20, 5)": "Linear 0.2",
    "MLM(Cosine(0, 0.2, 5))": "Cosine 0 1",
    "Uniform(0.5, 0.2)": "Uniform 0.5 0.2",
    "MNTP(0.3, mean_span=5)": "MNTP.mean_span unit='span'",
    "Mix({CLM(): 1})": "Mix({CLM(): 3, MNTP(0.3): 1})",
    "Mix(CLM())": "Mix.shares dict CLM()",
    "Mix({CLM(): 1, MLM(0.4): 0})": "Mix 0",
    "Mix({CLM(): Linear(1, 0, 5), MLM(0.4): Linear(0.5, 0, 5)})": "Mix 0",
    "Mix({CLM(): 1, MLM(0.4): 1}, weights={MLM(0.3): 2})": "Mix.weights mlm 30%",
    "Mix({CLM(): 1, MLM(0.4): 1}, weights={CLM(): 0})": "Mix.weights 0",
    "Stage(CLM(), 5, epochs=2)": "Stage.steps steps=5 epochs=2",
    "Alternate((CLM(), 4), unit='rows')": "Alternate.unit 'epochs' 'rows'",
    "Alternate(CLM(), 4)": "Alternate((CLM(), 4), (MLM(0.4), 16))",
    "Alternate((CLM(), 4), (MLM(0.4), 16), rounds=60)": "120 100 Mix({CLM(): 1, MLM(0.4): 4})",
    "Pretrain('b', run('a', stages=Stage(CLM(), epochs=1)), stages=Stage(CLM(), 2))": "'b' 'a' schedule=WSD(",
    "MLM(0.4, (0.8, 0.1, 0.2))": "MLM.replace",
    "MLM(0.4, (0.9, 0.1))": "MLM.replace 3",
    "Stage(CLM(), 0)": "Stage.steps 1 0",
    "Stage(CLM, 5)": "Stage.objective CLM MNTP MLM",
    "WSD(warmup=1.5)": "WSD.warmup 1",
    "WSD(decay=-1)": "WSD.decay",
    "Stage(CLM(), 5, freeze='layer 3')": "Stage.freeze 'layer 'embeddings' 'layers[:12]'",
    "run(stages=Stage(CLM(), 10, freeze='layers[:9]'))": "Stage.freeze 'layers[:9]' 4 'layers[:4]'",
    "run(stages=Stage(CLM(), 10, freeze='layers[4]'))": "Stage.freeze 'layers[4]' 4",
    "run(stages=Stage(CLM(), 10, freeze='layers[3:3]'))": "Stage.freeze 'layers[3:3]' 4",
    "run('a/b')": "'a/b' slashes",
    "run(corpus=None)": "'run' corpus corpus='fineweb-edu'",
    "run(start='610m')": "Pretrain.start '610m'",
    "run(schedule=5e-4)": "Pretrain.schedule WSD 0.0005",
    "run(steps=2)": "(1) (2) 2",
    "run(schedule=WSD())": "(2,000)",
    "run(batch_tokens=100)": "64 batch_tokens=128",
    "run(batch_tokens=0)": "batch_tokens=64",
    "run(keep=(11,))": "keep=(11,) (10)",
    "run(keep=(10,))": "keep=(10,)",
    "run(keep=(0,))": "keep=(0,)",
    "run(keep=(5, 5))": "keep=(5, different",
    "run(heldout_tokens=8)": "heldout_tokens 64",
    "Merge(run())": "Merge Kept(b, 200)",
    "Merge(run('a'), run('a'))": "Merge different",
    "Merge((run('a'), 0.5), run('b'))": "Merge weight Merge((a, 0.5), (b, 0.5))",
    "Merge((run('a'), 0.5), (run('b'), 0.6))": "(0.5, 0.6) 1",
    "Merge(run('a'), run('b', start=SIZES['2m']))": "'b' 'a' shape",
    "Merge(run('a', start=Hub('./m')), run('b', start=Hub('./n', windows='full')))": "'b' 'a' shape",
    "Merge(run('a', stages=Stage(CLM(), epochs=2)), run('b'))": "'a' epochs Stage(CLM(), 1_000)",
    "Pretrain('m', Merge(*(run(n, Hub(f'./{n}'), stages=()) for n in 'ab')), stages=Stage(CLM(), 5))": "'m' warmup=0.05",
    "Merge(run('a'), 3)": "Merge.parts 3",
    "Kept(run(), 11)": "'run' 10 11",
    "Pretrain('m', Merge(run('a'), run('b', seed=1)), stages=(Stage(CLM(), 5),), schedule=WSD(1e-3, 1, 1))": "seed data='restart'",
    "Pretrain('m', Merge(run('a'), run('b')), adapter=LoRA())": "LoRA Merge",
    "Contrastive(())": "Contrastive Contrastive(Pairs('./pairs.jsonl'))",
    "Contrastive(CATALOG['sst2'])": "'sst2' Pairs('./pairs.jsonl'",
    "Contrastive(CATALOG['nq'])": "'nq' training pairs",
    "Pairs('')": "Pairs Pairs('./pairs.jsonl'",
    "Pairs('hf://a/b@main/x')": "'main'",
    "Stage(Contrastive(Pairs('./p')), epochs=1)": "Stage.epochs Stage(Contrastive(…), 500)",
    "run(stages=Stage(Contrastive(Pairs('./p')), 10))": "'run' Stage(MLM(0.4), 1_000)",
    "run(stages=(Stage(CLM(), 5), Stage(Contrastive(Pairs('./p')), 5)))": "'run' Contrastive.length 128 length=64",
    "run(start=Hub('./m'), optimizer=Muon(), adapter=LoRA(), schedule=WSD(1e-4, 1, 2))": "LoRA optimizer=AdamW()",
    "run('b', run('a'), optimizer=Muon())": "'a' AdamW Muon optimizer_state='reset'",
    "run(sed=1)": "'sed' 'seed'",
    "run(optimizer_state='reset')": "optimizer_state continue",
    "run(data='restart')": "data continue",
    "run(start=Hub('./m'), schedule=WSD(decay=2))": "warmup=0.05",
    "run('b', run('a', stages=()))": "'a'",
    "run('b', run('a'), seed=1)": "'a' seed data='restart'",
    "run('b', run('a'), corpus='fineweb-edu')": "corpus data='restart'",
    "run(stages=CLM())": "Pretrain.stages CLM()",
    "run(stages=1000)": "Pretrain.stages 1000",
    "task('NER')": "Task.form 'NER'",
    "Task('t', TWO)": "'source'",
    "task(source='')": "'t' source hf://",
    "Task('a/b', TWO, 'x')": "'a/b'",
    "task(steps=0)": "'t' 1",
    "task(splits=Splits(train=''))": "'t' trained_on='…'",
    "task(Retrieve(), splits=Splits(train=''))": "'t'",
    "task(source='hf://a/b@main/x')": "'main'",
    "task().pin('123')": "'t' './data'",
    "Splits(test='')": "Splits.test",
    "Splits(cut=0)": "Splits.cut 0 1",
    "Splits(cut=5)": "Splits.cut 5 0 1",
    "Classify('text', ('a', 'b'))": "Classify.text 'text' e.g. '{sentence}'",
    "Classify('{}', ('a', 'b'))": "'{}'",
    "Classify('{text:>5}', ('a', 'b'))": "'{text:>5}'",
    "Classify('{text!r}', ('a', 'b'))": "'{text!r}'",
    "Classify('{text', ('a', 'b'))": "'{text' {column}",
    "Classify('{text}', ('a',))": "Classify.labels",
    "Classify('{text}', ('a', 'a'))": "Classify.labels",
    "Tag(('B-PER', 'I-PER'))": "Tag.labels B-… I-…",
    "Tag(('O', 'PER', 'S-LOC'))": "PER S-LOC IOB2",
    "Tag(('O', 'O'))": "Tag.labels",
    "Answer(text='Question: ')": "Answer.text 'Question:",
    "Answer(text='{question} {context}')": "Answer.text {question}",
    "Retrieve(query='query')": "Retrieve.query 'query'",
    "Retrieve(document='{}')": "Retrieve.document '{}'",
    "Finetune(())": "Finetune.tasks",
    "Finetune((task(), task(source='./other')))": "Finetune.tasks",
    "Finetune(TASKS, lrs=(1e-5, 1e-5))": "Finetune.lrs",
    "Finetune(TASKS, seeds=())": "Finetune.seeds",
    "Finetune(LENT[1])": "'nq' 'msmarco' Finetune.tasks known",
    "Finetune((LENT[0], replace(LENT[1], trained_on='msmarko')))": "'msmarco'",
    "Finetune((CATALOG['squad'], task(trained_on='squad')))": "'t' 'squad' SC",
    "Finetune((*LENT, task(Retrieve(), trained_on='nq')))": "'t' 'nq'",
    "Finetune(task(trained_on='t'))": "trained",
    "Finetune((CATALOG['sst2'], task(trained_on='sst2')))": "'t' 'sst2'",
    "Finetune((Task('l', replace(TWO, labels=('good', 'bad')), 'x'), task(trained_on='l')))": "'t' 'l'",
    "Study('s', ())": "'s'",
    "Study('a/b', (run(),))": "'a/b'",
    "Study('s', (run(), run(seed=1)))": "'run'",
    "Study('s', (run(keep=(5,)), run('run-5', seed=1)))": "'run-5'",
}


RANGED = [
    *(size(), BPE(300), Corpus("c", "./c", BPE(300)), PAIRS, Chunks(), Rows(), Linear(0.4, 0.2, 5)),
    *(Cosine(0.4, 0.2, 5), MLM(0.3, unit="span"), MNTP(0.3, unit="span"), specs.Contrastive(PAIRS)),
    *(Stage(CLM(), 5), WSD(), AdamW(), specs.Muon(), LoRA(), run(), specs.Discard(), Finetune(TASKS)),
    *(specs.Study("s", run()), specs.Splits(), specs.Retrieve(), task(), specs.Claim("c", "says", "a", "b")),
]


def ranges_of(kind):
    return {each.name: each.metadata["range"] for each in fields(kind) if "range" in each.metadata}


@pytest.mark.parametrize("made", RANGED, ids=lambda made: type(made).__name__)
def test_a_number_outside_its_range_is_refused_in_one_line_that_names_record_field_and_value(made):
    for field, allowed in ranges_of(made).items():
        outside = allowed.above, allowed.below, allowed.least - 1, allowed.most + 1
        for number in filter(math.isfinite, outside):
            value = getattr(made, field)
            wrong = (*value[1:], number) if isinstance(value, tuple) else number
            with pytest.raises(SpecError) as refused:
                replace(made, **{field: wrong})
            message = str(refused.value)
            assert f"{type(made).__name__}.{field}" in message
            assert str(number) in message
            assert allowed.hint in message
            assert "\n" not in message


def test_every_record_with_a_range_is_tried():
    kinds = [kind for kind in vars(specs).values() if is_dataclass(kind)]
    assert {kind for kind in kinds if ranges_of(kind)} == {type(made) for made in RANGED}


@pytest.mark.parametrize("expression", REFUSED)
def test_an_invalid_record_is_refused_in_one_line_that_names_the_field(expression):
    with pytest.raises(SpecError) as refused:
        eval(expression, vars(specs) | globals())
    message = str(refused.value)
    assert "\n" not in message
    assert all(fact in message for fact in REFUSED[expression].split()), message


# ---------------------------------------------------------------- runs


def test_a_run_takes_its_precision_from_its_size():
    assert run().precision == "fp32"
    assert run(start=Hub("./m")).precision == run(precision="bf16").precision == "bf16"


def test_only_a_merge_of_untrained_hub_models_needs_a_warmup():
    hub, trained = Pretrain("hub", Hub("./m"), "builtin"), run("trained", Hub("./m"))
    fields = {"stages": Stage(CLM(), 5), "batch_tokens": 128, "packing": Rows(64), "data": "restart"}
    mean = Pretrain("mean", Merge(Kept(trained, 0), trained), schedule=WSD(decay=1), **fields)
    assert mean.schedule.warmup == 0
    said = Pretrain(
        "said", Merge(hub, run("b", Hub("./b"), stages=())), schedule=WSD(warmup=0.2, decay=1), **fields
    )
    assert said.schedule.warmup == 1


def test_a_merge_has_no_optimizer_state_to_reset():
    merge, fields = Merge(run("a"), run("b", data="continue", keep=(5,))), {"stages": Stage(CLM(), 5)}
    fields["schedule"] = WSD(1e-3, 1, 1)
    assert Pretrain("m", merge, optimizer_state="reset", **fields) == Pretrain("m", merge, **fields)


def test_a_run_that_a_merge_reaches_on_several_paths_is_in_its_lineage_once():
    first = run("a", steps=10)
    one = Pretrain("one", Merge(first, Kept(first, 5)))
    two = Pretrain("two", Merge(one, Kept(first, 5)))
    last = Pretrain("last", Merge(one, two))
    assert last.lineage == (first, one, two, last)
    assert (last.origin_step, last.origin_sample) == (10, 20)


def test_shares_become_steps_when_the_run_is_made():
    made = run(steps=200, schedule=WSD(warmup=0.05, decay=0.1))
    assert (made.schedule.warmup, made.schedule.decay) == (10, 20)
    assert replace(made, name="again").schedule == made.schedule


def test_a_run_inherits_from_the_run_it_continues():
    first = run(optimizer=AdamW(eps=1e-8), seed=7, precision="bf16")
    then = Pretrain("then", first, stages=(Stage(MLM(0.4), 5),))
    for field in ("corpus", "optimizer", "batch_tokens", "packing", "precision", "seed"):
        assert getattr(then, field) == getattr(first, field)
    assert then.schedule == WSD(first.schedule.peak, 0, first.schedule.decay)
    assert (then.optimizer_state, then.data) == ("keep", "continue")
    restarted = run("b", first, seed=1, packing=Rows(32), corpus="fineweb-edu", data="restart")
    assert (restarted.seed, restarted.packing) == (1, Rows(32))
    adapted = run(start=Hub("./m"), adapter=LoRA(rank=4), freeze="embeddings")
    on = Pretrain("on", adapted, stages=(Stage(CLM(), 5),), schedule=WSD(warmup=0, decay=2))
    assert (on.adapter, on.freeze) == (LoRA(rank=4), "embeddings")
    assert (first.adapter, first.freeze) == (None, "nothing")


def test_a_run_may_have_one_stage_or_none_and_results_on_the_way():
    assert run(stages=Stage(CLM(), 9)).stages == (Stage(CLM(), 9),)
    assert Pretrain("as-is", Hub("./m"), "builtin").steps == 0
    assert run(keep=(3, 7)).results == {"run-3": 3, "run-7": 7, "run": 10}


def rates(made, *steps):
    return [made.learning_rate(step) for step in steps]


def test_the_learning_rate_at_the_corners_of_a_run():
    usual = run(steps=100, schedule=WSD(0.5, 10, 10))
    assert rates(usual, 0, 9, 10, 89, 90, 95, 99) == pytest.approx([0.05, *[0.5] * 4, 0.25, 0.05])
    paper = run(steps=42_000, schedule=WSD())
    assert rates(paper, 0, 1_999, 40_000, 41_999) == pytest.approx([2.5e-7, 5e-4, 5e-4, 2.5e-7])
    on = Pretrain("on", start=paper, stages=Stage(MLM(0.4), 2_000))  # from the peak on, all decay
    assert rates(on, 0, 1_000) == pytest.approx([5e-4, 2.5e-4])
    assert rates(run(steps=100, schedule=WSD(0.1, 0, 0)), 0, 50, 99) == [0.1] * 3
    two = run(stages=(Stage(CLM(), 95), Stage(MLM(0.4), 5)), schedule=WSD(0.1, 0, 10))
    assert rates(two, 90, 94, 95, 99) == pytest.approx([0.1, 0.06, 0.05, 0.01])


@pytest.mark.parametrize(
    ("shape", "left"),
    [
        ("linear", lambda gone: 1 - gone),
        ("cosine", lambda gone: 0.5 * (1 + math.cos(math.pi * gone))),
        ("1-sqrt", lambda gone: 1 - gone**0.5),
    ],
)
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_decay_of_each_shape_falls_from_the_peak_to_its_floor(shape, left, floor):
    made = run(steps=50, schedule=WSD(0.2, 5, 40, shape=shape, floor=floor))
    for step in range(10, 50):
        share = left((step - 10) / 40)
        assert made.learning_rate(step) == pytest.approx(0.2 * (floor + (1 - floor) * share), rel=1e-12)
    assert made.learning_rate(50) == pytest.approx(0.2 * floor, abs=1e-15)  # reached after the last step


def test_a_warmup_rises_from_the_share_at_which_the_run_before_ended_and_its_form_goes_on():
    before = run(steps=20, schedule=WSD(0.2, 0, 10, shape="cosine", floor=0.1, warmup_from=0.1))
    on = Pretrain("on", before, stages=Stage(CLM(), 20), schedule=WSD(0.2, 4, 0, warmup_from=0.1))
    assert rates(on, 0, 1, 2, 3, 4) == pytest.approx([0.065, 0.11, 0.155, 0.2, 0.2])
    assert before.learning_rate(20) == pytest.approx(0.02)
    assert Pretrain("on", before, stages=Stage(CLM(), 20)).schedule == replace(before.schedule, warmup=0)


def test_a_stage_may_have_its_own_peak_also_inside_warmup_and_decay():
    stages = (Stage(CLM(), 10), Stage(CLM(), 10, peak=0.1), Stage(MLM(0.4), 10))
    made = run(stages=stages, schedule=WSD(0.2, 12, 14))
    expected = [0.2 * 10 / 12, 0.1 * 11 / 12, 0.1, 0.1 * 11 / 14, 0.2 * 10 / 14]
    assert rates(made, 9, 10, 12, 19, 20) == pytest.approx(expected)
    assert [phase.peak for phase in made.phases] == [0.0, 0.1, 0.0]
    same = run(stages=(Stage(CLM(), 10), Stage(CLM(), 10, peak=0.2)), schedule=WSD(0.2, 0, 0))
    assert same.phases == (Phase(CLM(), 0, 20),)  # the schedule's peak said again is none of its own


@pytest.mark.parametrize(
    ("freeze", "layers"),
    [
        ("layers[:2]", {0, 1}), ("layers[0:2]", {0, 1}), ("layers[2:]", {2, 3, 4}), ("layers[:]", {0, 1, 2, 3, 4}),
        ("layers[-2:]", {3, 4}), ("layers[1:-1]", {1, 2, 3}), ("layers[3]", {3}), ("layers[-1]", {4}),
        ("embeddings", set()), (("layers[4]", "embeddings", "layers[:1]"), {0, 4}),
    ],
)  # fmt: skip
def test_frozen_layers_are_named_as_python_slices(freeze, layers):
    assert layers_of(Stage(CLM(), 5, freeze=freeze).freeze, 5) == layers


def test_what_a_stage_freezes_ends_with_it_and_what_the_run_freezes_is_not_said_twice():
    frozen = Stage(CLM(), 5, freeze=("layers[0:2]", "embeddings"), layer_decay=0.9)
    made = run(stages=(frozen, Stage(CLM(), 5)))
    assert [phase.freeze for phase in made.phases] == [("embeddings", "layers[:2]"), ()]
    assert [phase.layer_decay for phase in made.phases] == [0.9, 0.0]
    assert run(stages=frozen, freeze="embeddings").phases[0].freeze == ("layers[:2]",)
    assert run(stages=frozen, optimizer=AdamW(layer_decay=0.9)).phases[0].layer_decay == 0.0


def test_equal_neighbouring_stages_are_one_phase_unless_a_schedule_restarts():
    falling = MLM(Linear(0.4, 0.2, 5))
    stages = (Stage(CLM(), 3), Stage(CLM(), 4), Stage(falling, 3), Stage(falling, 3))
    made = run(stages=stages)
    assert made.phases == (Phase(CLM(), 0, 7), Phase(falling, 7, 10), Phase(falling, 10, 13))
    assert [made.phase_at(step).first for step in (0, 6, 7, 9, 10, 12)] == [0, 0, 7, 7, 10, 10]


def test_a_rope_base_holds_until_another_is_given_also_in_the_runs_after():
    first, second = Stage(CLM(), 10, rope_base=5e4), Stage(CLM(), 10, rope_base=6e4)
    assert run(stages=(first, Stage(CLM(), 10))).phases == (Phase(CLM(), 0, 20, 5e4),)
    made = run(stages=(first, second))
    assert made.phases == (Phase(CLM(), 0, 10, 5e4), Phase(CLM(), 10, 20, 6e4))
    on = Pretrain("on", made, stages=(Stage(MLM(0.4), 8),))
    assert [made.rope_base_after(step) for step in (0, 1, 10, 11, 20)] == [0, 5e4, 5e4, 6e4, 6e4]
    assert on.initial_rope_base == on.phases[0].rope_base == 6e4


def test_steps_and_samples_add_up_along_a_chain_of_runs():
    first = run(steps=20)
    then = run("then", first, steps=8)
    last = run("last", then, steps=4, batch_tokens=256)
    after = run("after", last, steps=4)
    restarted = replace(after, data="restart")
    chain = (first, then, last, after, restarted)
    assert [one.origin_step for one in chain] == [0, 20, 28, 32, 32]
    assert [one.origin_sample for one in chain] == [0, 40, 56, 72, 0]
    assert all(one.root is first for one in chain)
    assert after.lineage == (first, then, last, after)
    assert first.decay_start == 18


# ---------------------------------------------------------------- objectives


@pytest.mark.parametrize(
    ("objective", "label", "column"),
    [
        (CLM(), "clm", "clm"),
        (MLM(0.4), "mlm 40%", "mlm40"),
        (MLM(0.125), "mlm 12.5%", "mlm12.5"),
        (MNTP(0.2), "mntp 20%", "mntp20"),
        (MLM(0.15, (0.8, 0.1, 0.1)), "mlm 15% 80/10/10", "mlm 15% 80/10/10"),
        (MLM(Linear(0.4, 0.2, 9)), "mlm 40→20%", "mlm40→20"),
        (MNTP(Cosine(0.3, 0.15, 9)), "mntp 30→15%", "mntp30→15"),
        (MLM(Uniform(0, 1)), "mlm 0–100%", "mlm 0–100%"),
        (MLM(0.3, unit="word"), "mlm 30% words", "mlm 30% words"),
        (MLM(0.3, unit="span"), "mlm 30% spans of 3", "mlm 30% spans of 3"),
        (
            MNTP(Uniform(0.1, 1), weight="1/ratio"),
            "mntp 10–100% weighted 1/ratio",
            "mntp 10–100% weighted 1/ratio",
        ),
    ],
)
def test_an_objective_has_a_label_for_people_and_one_for_columns(objective, label, column):
    assert (objective.label, objective.column) == (label, column)
    assert objective.causal == (objective == CLM())


def test_a_mixture_is_named_by_its_shares_and_what_differs_from_plain_means():
    assert Mix({MNTP(0.3): 1, CLM(): 3}).label == "mix 75% clm + 25% mntp 30%"
    falling = {CLM(): Linear(1, 0, 9), MLM(0.4): 1}
    assert (
        Mix(falling, weights={CLM(): 2}, mean_over="labels").label
        == "mix 50→0% clm ×2 + 50→100% mlm 40%, mean over labels"
    )


def test_equal_mixtures_are_equal_however_they_are_written():
    wanted = Mix({CLM(): 3, MNTP(0.3): 1})
    assert Mix({MNTP(0.3): 0.5, CLM(): 1.5}, weights={CLM(): 1}) == wanted
    assert decode(encode(wanted)) == wanted
    assert Mix(((CLM(), 3), (MNTP(0.3), 1))) == wanted


def test_alternating_stages_are_ordinary_stages():
    turns = Alternate((CLM(), 4), (MLM(0.4), 16), rounds=2)
    assert turns == (Stage(CLM(), 4), Stage(MLM(0.4), 16)) * 2
    assert run(stages=turns).stages == tuple(turns)
    assert run(stages=(*Alternate((CLM(), 1), (CLM(), 2)), Stage(MLM(0.4), 7))).phases[0].until == 3
    assert Alternate((CLM(), 0.5), unit="epochs") == (Stage(CLM(), epochs=0.5),)


def test_epochs_become_steps_and_add_up_to_whole_passes():
    """A third of an epoch of 100 rows in steps of two rows is 16.67 steps."""
    written = run(
        stages=Alternate((CLM(), 1 / 3), (MLM(0.4), 1 / 3), (CLM(), 4 / 3), unit="epochs"),
        schedule=WSD(1e-3, warmup=0.1, decay=0.25),
        keep=(70,),
    )
    made = written.in_steps(100 * 64 + 63)
    assert [stage.steps for stage in made.stages] == [17, 16, 67]
    assert not any(stage.epochs for stage in made.stages)
    assert (made.schedule.warmup, made.schedule.decay) == (10, 25)
    assert made.in_steps(1) is made
    with pytest.raises(SpecError, match=r"keep=\(70,\)"):
        written.in_steps(30 * 64)


@pytest.mark.parametrize(
    ("ratio", "step", "value"),
    [
        (0.3, 500, 0.3),
        (Linear(0.4, 0.2, steps=10), 0, 0.4),
        (Linear(0.4, 0.2, steps=10), 5, 0.3),
        (Linear(0.4, 0.2, steps=10), 99, 0.2),
        (Cosine(0.5, 0.1, steps=8), 0, 0.5),
        (Cosine(0.5, 0.1, steps=8), 4, 0.3),
        (Cosine(0.5, 0.1, steps=8), 2, 0.1 + 0.4 * (1 + math.cos(math.pi / 4)) / 2),
        (Cosine(0.5, 0.1, steps=8), 8, 0.1),
    ],
)
def test_ratio_schedules_at_their_corners(ratio, step, value):
    assert MLM(ratio).ratio_at(step) == pytest.approx(value)
    assert MNTP(ratio).at(step) == MNTP(MNTP(ratio).ratio_at(step))
    assert CLM().ratio_at(step) is None


# ---------------------------------------------------------------- models, corpora, tasks


def test_a_path_is_told_from_a_hub_name():
    for source, local in (("./m", True), ("/m", True), ("~/m", True), ("gpt2", False), ("org/m", False)):
        assert Hub(source, revision="1").local is local
        assert Pretrained(source, revision="1").local is local
    assert Pretrained("tokenizer.json").local
    assert Corpus("c", "hf://a/b@1/x/*.parquet", BPE(300)).hub
    assert not Corpus("c", "./c.txt", BPE(300)).hub


def test_a_task_may_borrow_whose_labels_are_the_same_in_any_family():
    lender = Task("lender", Tag(("O", "B-X", "I-X")), "./a")
    borrower = Task("borrower", Tag(("O", "B-X", "I-X"), words="words"), "./b", trained_on="lender")
    grid = Finetune((borrower, lender), lrs=(1e-4,), seeds=(0,))
    assert grid.lender(borrower) is lender
    assert grid.lender(lender) is lender
    assert (grid.finetunings, grid.scores) == (1, 2)


def test_the_protocol_says_precision_and_documents_unless_they_are_said():
    assert (Finetune(TASKS).precision, Finetune(TASKS).documents) == ("pure-bf16", "judged")
    standard = Finetune(TASKS, protocol="standard")
    assert (standard.precision, standard.documents) == ("bf16", "all")
    mixed = Finetune(TASKS, protocol="standard", precision="fp32", documents="judged")
    assert (mixed.precision, mixed.documents) == ("fp32", "judged")


def test_a_task_is_pinned_and_moved_without_changing_anything_else():
    hub = Task("t", TWO, "hf://owner/name@1/some/folder")
    assert hub.pin("2").source == "hf://owner/name@2/some/folder"
    assert Task("t", TWO, "hf://owner/name").pin("2").source == "hf://owner/name@2"
    assert replace(hub.pin("2"), source=hub.source) == hub
    moved = CATALOG["scifact"].at("data/scifact")
    assert moved.source == "./data/scifact"
    assert (moved.splits.train, moved.splits.validation, moved.splits.test) == (
        "qrels/train*",
        "",
        "qrels/test*",
    )
    assert CATALOG["msmarco"].at("~/x").form.pairs == "pairs*"
    assert CATALOG["sst2"].at("/x").splits == CATALOG["sst2"].splits


def test_tasks_that_borrow_a_model_train_none():
    grid = Finetune(TASKS)
    assert (grid.finetunings, grid.scores) == (10 * 30, 12 * 30)
    assert Finetune(task(), seeds=range(2)).finetunings == 6 * 2, "one task need not be a tuple"
