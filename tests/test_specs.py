"""A study that makes no sense is refused when it is written, in words that help."""

from dataclasses import replace

import pytest

from biphase.catalog import CATALOG, TASKS
from biphase.errors import SpecError
from biphase.presets import SIZES
from biphase.specs import (
    BPE,
    CLM,
    MLM,
    MNTP,
    WSD,
    AdamW,
    Answer,
    Chunks,
    Classify,
    Corpus,
    Cosine,
    Finetune,
    Hub,
    Linear,
    LoRA,
    Pretrain,
    Pretrained,
    Retrieve,
    Rows,
    Size,
    Splits,
    Stage,
    Study,
    Tag,
    Task,
)

SHORT = {"corpus": "builtin", "batch_tokens": 128, "packing": Rows(64), "schedule": WSD(warmup=1, decay=2)}


def run(name="run", start=SIZES["1m"], *, steps=10, **fields):
    return Pretrain(name, start=start, **(SHORT | {"stages": (Stage(CLM(), steps),)} | fields))


def size(**fields):
    return Size(**({"name": "x", "layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "ffn": 128} | fields))


TWO = Classify("{text}", ("bad", "good"))
LENT = CATALOG["msmarco"], CATALOG["nq"]


def task(form=TWO, source="./data", **fields):
    return Task("t", form, source, **fields)


REFUSED = {
    "size without layers": (lambda: size(layers=0), "Size.layers must be at least 1, it is 0"),
    "size with a negative ffn": (lambda: size(ffn=-1), "Size.ffn must be at least 1"),
    "hidden that heads do not divide": (
        lambda: size(hidden=65),
        r"hidden \(65\) must be heads.*try hidden=128",
    ),
    "odd head width": (lambda: size(hidden=66), "even head width"),
    "key heads that do not divide": (
        lambda: size(heads=4, kv_heads=3),
        r"kv_heads \(3\) must divide heads \(4\)",
    ),
    "unknown precision of a size": (lambda: size(precision="fp16"), "'fp32' or 'bf16' or 'fp8', not 'fp16'"),
    "hub without a model": (lambda: Hub(""), "Hub needs a model"),
    "hub on a branch": (lambda: Hub("gpt2", revision="main"), "is a branch and moves"),
    "hub with a file that is no gguf": (
        lambda: Hub("./m", gguf="model.safetensors"),
        "gguf is the name of a file there, as 'model.Q4_1.gguf'",
    ),
    "hub with half windows": (lambda: Hub("./m", windows="half"), "windows must be 'symmetric' or 'full'"),
    "rotary base below 1": (
        lambda: Stage(MLM(0.4), 5, rope_base=0.5),
        "Stage.rope_base must be at least 1, it is 0.5",
    ),
    "rotary base that is negative": (lambda: Stage(MLM(0.4), 5, rope_base=-1.0), "must be at least 1"),
    "layers that do not learn": (lambda: AdamW(layer_decay=0.0), r"layer_decay must lie in \(0, 1\]"),
    "layers below that learn faster": (lambda: AdamW(layer_decay=1.1), r"layer_decay must lie in \(0, 1\]"),
    "LoRA without a rank": (lambda: LoRA(rank=0), "LoRA.rank must be at least 1"),
    "LoRA without a scale": (lambda: LoRA(alpha=0), "LoRA.alpha must be at least 1"),
    "LoRA of a model from scratch": (
        lambda: run(adapter=LoRA()),
        "LoRA adapts a model that can do something",
    ),
    "a run that drops its parent's adapter": (
        lambda: Pretrain(
            "on", run(start=Hub("./m"), adapter=LoRA()), stages=(Stage(CLM(), 5),), adapter=LoRA(rank=2)
        ),
        "'run' was trained with another adapter; give both the same",
    ),
    "something frozen that has no name": (lambda: run(freeze="head"), "'nothing' or 'embeddings'"),
    "hub with a gguf elsewhere": (lambda: Hub("./m", gguf="../x.gguf"), "the name of a file there"),
    "tokenizer without a revision": (
        lambda: Pretrained("gpt2"),
        r"needs a revision: type Pretrained\('gpt2'",
    ),
    "too few entries": (
        lambda: BPE(256),
        "BPE.vocab is 256; 256 bytes and the special tokens need at least 300",
    ),
    "corpus without a source": (lambda: Corpus("c", "", BPE(300)), "Corpus 'c' needs a source"),
    "negative tokens": (lambda: Corpus("c", "./c", BPE(300), tokens=-1), "must not be negative, it is -1"),
    "unpinned hub corpus": (lambda: Corpus("c", "hf://a/b/*", BPE(300)), "does not pin its content"),
    "hub corpus without a glob": (
        lambda: Corpus("c", "hf://a/b@1", BPE(300)),
        "type hf://owner/name@revision/glob",
    ),
    "chunks too short to cut": (
        lambda: Chunks(20),
        r"Chunks.length \(20\) must be at least twice shortest \(12\)",
    ),
    "chunks of nothing": (lambda: Chunks(20, 0), "must be at least twice shortest"),
    "row of one token": (lambda: Rows(1), "Rows.length must be at least 2, it is 1"),
    "ratio in percent": (lambda: MLM(40.0), "lies between 0 and 1, not 40; did you mean 0.4?"),
    "ratio zero": (lambda: MLM(0.0), "MLM: a masking ratio lies between 0 and 1, not 0"),
    "ratio far off": (lambda: MNTP(400.0), "MNTP: a masking ratio lies between 0 and 1, not 400$"),
    "ratio of the wrong kind": (
        lambda: MLM("40%"),
        "MLM.ratio must be a number or Linear or Cosine, not '40%'",
    ),
    "linear in percent": (lambda: Linear(0.4, 20, 5), "Linear: .* did you mean 0.2"),
    "cosine without steps": (lambda: Cosine(0.4, 0.2, 0), "Cosine.steps must be at least 1"),
    "cosine from nothing": (lambda: Cosine(0, 0.2, 5), "Cosine: a masking ratio"),
    "shares that do not sum": (lambda: MLM(0.4, (0.8, 0.1, 0.2)), "three shares that sum to 1"),
    "a negative share": (lambda: MNTP(0.4, (1.2, -0.2, 0)), "MNTP.replace must be three shares"),
    "two shares": (lambda: MLM(0.4, (0.9, 0.1)), "MLM.replace must be 3 values"),
    "stage without steps": (lambda: Stage(CLM(), 0), "Stage.steps must be at least 1, it is 0"),
    "stage with a class": (lambda: Stage(CLM, 5), "Stage.objective must be CLM or MNTP or MLM"),
    "peak zero": (lambda: WSD(0), "WSD.peak must lie between 0 and 1, it is 0.0; the paper's is 5e-4"),
    "warmup as a share above one": (
        lambda: WSD(warmup=1.5),
        "WSD.warmup must be a count of steps or a share below 1",
    ),
    "negative decay": (lambda: WSD(decay=-1), "WSD.decay must be a count of steps"),
    "beta one": (lambda: AdamW((0.9, 1.0)), r"AdamW.betas must lie in \[0, 1\)"),
    "eps zero": (lambda: AdamW(eps=0), "AdamW.eps and clip must be positive"),
    "clip zero": (lambda: AdamW(clip=0), "AdamW.eps and clip must be positive"),
    "run with a slash": (lambda: run("a/b"), "a name is one word without slashes"),
    "run without a name": (lambda: run(""), "a name is one word without slashes"),
    "run without a corpus": (lambda: run(corpus=None), "Pretrain 'run' needs a corpus: corpus='fineweb-edu'"),
    "run from a size's name": (
        lambda: run(start="610m"),
        "Pretrain.start must be Size or Hub or Pretrain, not '610m'",
    ),
    "schedule of the wrong kind": (lambda: run(schedule=5e-4), "Pretrain.schedule must be WSD, not 0.0005"),
    "schedule longer than the run": (
        lambda: run(steps=2),
        r"warmup \(1\) and decay \(2\) are longer than its 2 steps",
    ),
    "the paper's warmup in a short run": (
        lambda: run(schedule=WSD()),
        r"warmup \(2,000\) and decay \(2,000\)",
    ),
    "batch that is no whole rows": (
        lambda: run(batch_tokens=100),
        "whole rows of 64 tokens; try batch_tokens=128",
    ),
    "batch of nothing": (lambda: run(batch_tokens=0), "try batch_tokens=64"),
    "keep after the end": (
        lambda: run(keep=(11,)),
        r"keep=11 is not a step between its start and its end \(10\)",
    ),
    "keep at the end": (lambda: run(keep=(10,)), "keep=10 is not a step"),
    "keep at the start": (lambda: run(keep=(0,)), "keep=0 is not a step"),
    "negative seed": (lambda: run(seed=-1), r"seed must lie in \[0, 2³¹\), it is -1"),
    "huge seed": (lambda: run(seed=2**31), "seed must lie in"),
    "no held-out steps": (lambda: run(heldout_every=0), "heldout_every must be at least 1"),
    "unknown field": (lambda: run(sed=1), "Pretrain has no field 'sed'; did you mean 'seed'?"),
    "moments without a past": (lambda: run(optimizer_state="reset"), "this one has none to continue"),
    "data without a past": (lambda: run(data="restart"), "this one has none to continue"),
    "hub start without a warmup": (
        lambda: run(start=Hub("./m"), schedule=WSD(decay=2)),
        r"starts from a hub model with new moments: state its warmup, e.g. schedule=WSD\(peak=1e-4, warmup=0.05\)",
    ),
    "going on from a run that trains nothing": (
        lambda: run("b", run("a", stages=())),
        "'a' trains nothing, so start from its start instead",
    ),
    "data that goes on under another seed": (
        lambda: run("b", run("a"), seed=1),
        "cannot go on where 'a' stopped, because seed differs; say data='restart'",
    ),
    "data that goes on in other rows": (
        lambda: run("b", run("a"), packing=Rows(32)),
        "because packing differs; say data='restart'",
    ),
    "data that goes on in another corpus": (
        lambda: run("b", run("a"), corpus="fineweb-edu"),
        "because corpus differs; say data='restart'",
    ),
    "an objective in place of a stage": (
        lambda: run(stages=CLM()),
        r"Pretrain.stages must be a tuple of Stage, not CLM\(\); .*Stage\(objective, steps\)",
    ),
    "objectives in place of stages": (
        lambda: run(stages=(CLM(), MLM(0.4))),
        r"Pretrain.stages must be a tuple of Stage, .*Stage\(objective, steps\)",
    ),
    "a number of steps in place of a stage": (lambda: run(stages=1_000), "Pretrain.stages .* not 1000"),
    "unknown family": (
        lambda: task("NER"),
        "Task.form must be Classify or Tag or Answer or Retrieve, not 'NER'",
    ),
    "task without a place": (lambda: Task("t", TWO), "missing .*'source'; it takes name, form, source"),
    "task without a source": (lambda: task(source=""), "Task 't' needs a source: a folder, a file, or hf://"),
    "task with a slash": (lambda: Task("a/b", TWO, "x"), "Task: a name is one word without slashes"),
    "task without steps": (lambda: task(steps=0), "Task 't': steps and batch must be at least 1"),
    "task without a batch": (lambda: task(batch=0), "Task 't': steps and batch must be at least 1"),
    "negative epochs": (lambda: task(epochs=-1), "epochs not negative"),
    "nothing to train on": (
        lambda: task(splits=Splits(train="")),
        "Task 't' has no train part; .*trained_on='…'",
    ),
    "retrieval with nothing to train on": (
        lambda: task(Retrieve(), splits=Splits(train="")),
        "Task 't' has no train part",
    ),
    "task on a branch": (lambda: task(source="hf://a/b@main/x"), "'main' is a branch and moves"),
    "judgments on a branch": (
        lambda: task(Retrieve(), splits=Splits(test="hf://a/b@master/test*")),
        "'master' is a branch and moves",
    ),
    "pin of a local task": (lambda: task().pin("123"), "Task 't' is not on the hub, its source is './data'"),
    "no test part": (lambda: Splits(test=""), "Splits.test names no files"),
    "nothing cut off": (lambda: Splits(cut=0), "Splits.cut is 0; .*a share between 0 and 1"),
    "cut in percent": (lambda: Splits(cut=5), "Splits.cut is 5; .*a share between 0 and 1"),
    "cut from elsewhere": (
        lambda: Splits(cut_from="dev"),
        "Splits.cut_from must be 'train' or 'test', not 'dev'",
    ),
    "negative rows": (lambda: Splits(rows=(1, -1, 0)), r"Splits.rows must not be negative, .*\(1, -1, 0\)"),
    "rows of two parts": (lambda: Splits(rows=(1, 1)), "Splits.rows must be 3 values"),
    "text without a column": (
        lambda: Classify("text", ("a", "b")),
        "Classify.text: 'text' must name columns and nothing else, e.g. '{sentence}'",
    ),
    "column without a name": (lambda: Classify("{}", ("a", "b")), "'{}' must name columns"),
    "numbered column": (lambda: Classify("{0}", ("a", "b")), "'{0}' must name columns"),
    "column with a format": (lambda: Classify("{text:>5}", ("a", "b")), "must name columns and nothing else"),
    "column with a conversion": (lambda: Classify("{text!r}", ("a", "b")), "must name columns and nothing"),
    "template that never ends": (
        lambda: Classify("{text", ("a", "b")),
        r"'{text' is no template \(.*\); write {column}",
    ),
    "one label": (lambda: Classify("{text}", ("a",)), "Classify.labels must be at least two, all different"),
    "a label twice": (lambda: Classify("{text}", ("a", "a")), "Classify.labels must be at least two"),
    "tags without O": (lambda: Tag(("B-PER", "I-PER")), "Tag.labels must be O, B-… and I-…, not without O"),
    "tags in another scheme": (
        lambda: Tag(("O", "PER", "S-LOC")),
        "not PER, S-LOC; write them in IOB2",
    ),
    "a tag twice": (lambda: Tag(("O", "O")), "Tag.labels must be at least two, all different"),
    "no question": (lambda: Answer(text="Question: "), "Answer.text: 'Question: ' must name columns"),
    "the context twice": (
        lambda: Answer(text="{question} {context}"),
        "Answer.text must name {question} and nothing else",
    ),
    "query without a column": (lambda: Retrieve(query="query"), "Retrieve.query: 'query' must name columns"),
    "document without a column": (lambda: Retrieve(document="{}"), "Retrieve.document: '{}' must name"),
    "everything relevant": (lambda: Retrieve(relevant=0), "Retrieve.relevant must be at least 1, it is 0"),
    "half a pair": (lambda: Retrieve(pair=("query",)), "Retrieve.pair must be 2 values"),
    "no tasks": (lambda: Finetune(()), "Finetune.tasks must be distinct and not empty"),
    "a task twice": (lambda: Finetune(TASKS[:1] * 2), "Finetune.tasks must be distinct and not empty"),
    "two tasks of one name": (
        lambda: Finetune((task(), task(source="./other"))),
        "Finetune.tasks has two tasks of one name; rename one",
    ),
    "a rate twice": (lambda: Finetune(TASKS, lrs=(1e-5, 1e-5)), "Finetune.lrs must be distinct"),
    "a rate of zero": (lambda: Finetune(TASKS, lrs=(0,)), "Finetune.lrs must lie between 0 and 1"),
    "a rate of one": (lambda: Finetune(TASKS, lrs=(1e-5, 1.0)), "Finetune.lrs must lie between 0 and 1"),
    "no seeds": (lambda: Finetune(TASKS, seeds=()), "Finetune.seeds must be distinct and not empty"),
    "negative seed of a fine-tuning": (
        lambda: Finetune(TASKS, seeds=(-1,)),
        r"Finetune.seeds must lie in \[0, 2³¹\)",
    ),
    "huge seed of a fine-tuning": (lambda: Finetune(TASKS, seeds=(2**31,)), "Finetune.seeds must lie in"),
    "negative length": (lambda: Finetune(TASKS, length=-1), "Finetune.length must not be negative"),
    "all warmup": (lambda: Finetune(TASKS, warmup=1.0), "warmup a share below 1"),
    "warmup in steps": (lambda: Finetune(TASKS, warmup=100), "warmup a share below 1"),
    "unknown precision of a fine-tuning": (
        lambda: Finetune(TASKS, precision="fp16"),
        "'pure-bf16' or 'bf16' or 'fp32', not 'fp16'",
    ),
    "unknown documents": (lambda: Finetune(TASKS, documents="some"), "'judged' or 'all', not 'some'"),
    "a borrower without its lender": (
        lambda: Finetune(LENT[1]),
        "'nq' is scored with the model of 'msmarco', which is not among Finetune.tasks; known: nq",
    ),
    "a misspelt lender": (
        lambda: Finetune((LENT[0], replace(LENT[1], trained_on="msmarko"))),
        "did you mean 'msmarco'?",
    ),
    "a lender of another family": (
        lambda: Finetune((CATALOG["squad"], task(trained_on="squad"))),
        "'t' cannot be scored with the model of 'squad': that one must be trained itself and be of the family SC",
    ),
    "a lender that borrows": (
        lambda: Finetune((*LENT, task(Retrieve(), trained_on="nq"))),
        "'t' cannot be scored with the model of 'nq': that one must be trained itself",
    ),
    "a task that lends to itself": (
        lambda: Finetune(task(trained_on="t")),
        "that one must be trained itself",
    ),
    "a lender of other labels": (
        lambda: Finetune((CATALOG["sst2"], task(trained_on="sst2"))),
        "'t' has other labels than 'sst2'.*the same labels, in the same order",
    ),
    "a lender of labels in another order": (
        lambda: Finetune((Task("l", replace(TWO, labels=("good", "bad")), "x"), task(trained_on="l"))),
        "'t' has other labels than 'l'",
    ),
    "a seed twice": (lambda: Finetune(TASKS, seeds=(1, 1)), "Finetune.seeds must be distinct and not empty"),
    "no learning rates": (lambda: Finetune(TASKS, lrs=()), "Finetune.lrs must be distinct and not empty"),
    "unknown protocol": (lambda: Finetune(TASKS, protocol="mine"), "'paper' or 'standard', not 'mine'"),
    "study without runs": (lambda: Study("s", ()), "Study 's' has no runs"),
    "study with a slash": (lambda: Study("a/b", (run(),)), "Study: a name is one word without slashes"),
    "study without a name": (lambda: Study("", (run(),)), "Study: a name is one word"),
    "two runs of one name": (
        lambda: Study("s", (run(), run(seed=1))),
        "two results called 'run'; rename one",
    ),
    "a kept step of another's name": (
        lambda: Study("s", (run(keep=(5,)), run("run-5", seed=1))),
        "two results called 'run-5'",
    ),
    "a run that is no run": (lambda: Study("s", ("run",)), "Study.runs must be a tuple of Pretrain"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused_in_one_helpful_line(case):
    make, words = REFUSED[case]
    with pytest.raises(SpecError, match=words) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_the_recipe_of_the_paper_is_the_default():
    made = Pretrain("p", SIZES["610m"], "fineweb-edu", (Stage(CLM(), 42_000),))
    assert made.schedule == WSD(5e-4, 2_000, 2_000)
    assert made.optimizer == AdamW((0.9, 0.95), 1e-5, 0.1, 1.0)
    assert (made.batch_tokens, made.packing, made.precision, made.seed) == (
        2_359_296,
        Chunks(2048, 12),
        "bf16",
        42,
    )
    assert made.rows_per_step == 1_152
    assert MLM(0.4).replace == (1.0, 0.0, 0.0)


def test_a_small_size_brings_its_own_precision():
    assert run().precision == "fp32"
    assert run(start=Hub("./m")).precision == "bf16"
    assert run(precision="bf16").precision == "bf16"


def test_shares_become_steps_when_the_run_is_made():
    made = run(steps=200, schedule=WSD(warmup=0.05, decay=0.1))
    assert (made.schedule.warmup, made.schedule.decay) == (10, 20)
    assert replace(made, name="again").schedule == made.schedule


def test_a_run_that_goes_on_inherits_what_it_does_not_say():
    first = run(optimizer=AdamW(eps=1e-8), seed=7, precision="bf16")
    then = Pretrain("then", first, stages=(Stage(MLM(0.4), 5),))
    for field in ("corpus", "optimizer", "batch_tokens", "packing", "precision", "seed"):
        assert getattr(then, field) == getattr(first, field)
    assert then.schedule == WSD(first.schedule.peak, 0, first.schedule.decay)
    assert (then.optimizer_state, then.data) == ("keep", "continue")


def test_a_restart_may_change_the_data():
    then = run("b", run("a"), seed=1, packing=Rows(32), corpus="fineweb-edu", data="restart")
    assert (then.seed, then.packing) == (1, Rows(32))


def test_one_stage_need_not_be_a_tuple():
    assert run(stages=Stage(CLM(), 9)).stages == (Stage(CLM(), 9),)


def test_a_run_without_stages_needs_no_schedule():
    assert Pretrain("as-is", Hub("./m"), "builtin").steps == 0


@pytest.mark.parametrize(
    ("source", "local"), [("./m", True), ("/m", True), ("~/m", True), ("gpt2", False), ("org/m", False)]
)
def test_a_path_is_told_from_a_hub_name(source, local):
    assert Hub(source, revision="1").local is local
    assert Pretrained(source, revision="1").local is local


def test_a_tokenizer_file_is_local_and_a_pinned_hub_corpus_is_not():
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


def test_one_task_need_not_be_a_tuple():
    assert Finetune(task()).tasks == (task(),)


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
    assert Finetune(TASKS, seeds=range(2)).seeds == (0, 1)


def test_a_hub_model_needs_no_commit_and_says_where_it_is():
    assert Hub("owner/name").revision == ""
    assert Hub("owner/name", revision="abc").address == {
        "pretrained_model_name_or_path": "owner/name",
        "revision": "abc",
    }
    assert Hub("./m", gguf="a.gguf").address == {"pretrained_model_name_or_path": "m", "gguf_file": "a.gguf"}


def test_what_is_adapted_and_frozen_is_taken_from_the_run_before():
    first = run(start=Hub("./m"), adapter=LoRA(rank=4), freeze="embeddings")
    on = Pretrain("on", first, stages=(Stage(CLM(), 5),), schedule=WSD(warmup=0, decay=2))
    assert (on.adapter, on.freeze) == (LoRA(rank=4), "embeddings")
    assert (run().adapter, run().freeze) == (None, "nothing")
