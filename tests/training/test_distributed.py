"""Several processes: the same global batches and masks, the same weights up to rounding, resumable with any count.

What needs no second process is at the end; sharding in one process is in test_sharding.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import store_with
from families.tiny import with_head
from safetensors.torch import load_file

from biphase import Size
from biphase.errors import SpecError
from biphase.study.costs import shape_of_size
from biphase.study.many_gpus import Load, ShardingOption, collectives
from biphase.training.options import Sharding

CPU, CUDA = torch.device("cpu"), torch.device("cuda")

STAGES = "Stage(Mix({CLM(): 2, drawn: 1}, weights={CLM(): 2}), 25), Stage(MLM(0.4), 25)"
STUDY = """
from biphase import (
    BPE, CATALOG, CLM, MLM, MNTP, WSD, Chunks, Contrastive, Corpus, Mix, Muon, Pretrain, Size, Stage, Study,
    Uniform,
)

drawn = MNTP(Uniform(0.1, 0.9), weight="1/ratio")
tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
study = Study("ranks", runs=(Pretrain(
    "two", start=tiny, corpus=Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl"),
    stages=({stages}), packing=Chunks(32, shortest=4), batch_tokens=256,
    schedule=WSD(peak=3e-3, warmup=5, decay=10), heldout_every=25, heldout_tokens=512,
),))
"""


DRIVER = Path(__file__).with_name("rank_driver.py")
EXCHANGE = Path(__file__).with_name("exchange_driver.py")


def typed(*commands):
    """Each command is a number of processes, a study, a store, and options; all are forks of one process."""
    words = [[word if isinstance(word, int) else str(word) for word in one] for one in commands]
    done = subprocess.run(
        [sys.executable, DRIVER, json.dumps(words)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def biphase(study: Path, store: Path, processes: int, *more: str) -> None:
    command = [sys.executable, "-m", "biphase", "run", study, "--store", store, "--quiet"]
    command += ["--processes", str(processes)]
    done = subprocess.run(
        [*command, *more],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


def end(store: Path):
    """Weights, moments and lines of the run's last state."""
    states = list((store / "checkpoints").iterdir())
    last = max(
        states, key=lambda place: json.loads((place / "checkpoint.json").read_text())["progress"]["step"]
    )
    lines = [
        json.loads(line) for place in states for line in (place / "metrics.jsonl").read_text().splitlines()
    ]
    labels = {line["step"]: line["labels"] for line in lines if "labels" in line}
    heldout = {line["step"]: line["heldout"] for line in lines if "heldout" in line}
    return load_file(last / "model.safetensors"), load_file(last / "optimizer.safetensors"), labels, heldout


@pytest.fixture
def study(corpus, tmp_path):
    path = tmp_path / "study.py"
    path.write_text(STUDY.format(source=corpus.source, stages=STAGES))
    return path


def apart(one, two):
    return max((one[name] - two[name]).abs().max().item() for name in one)


@pytest.mark.campaign
def test_two_and_three_processes_agree_with_one(study, tmp_path):
    biphase(study, tmp_path / "one", 1)
    weights, _, labels, heldout = end(tmp_path / "one")
    for count in (2, 3):  # eight rows over three processes: shares of unequal size
        biphase(study, tmp_path / str(count), count)
        others = end(tmp_path / str(count))
        assert others[2] == labels, "the same masks give the same number of labels at every step"
        assert apart(weights, others[0]) <= 1e-5
        for step, losses in heldout.items():
            assert others[3][step] == pytest.approx(losses, abs=1e-4)


@pytest.mark.campaign
def test_a_run_resumes_with_another_number_of_processes(study, tmp_path):
    biphase(study, tmp_path / "one", 1)
    for number, count in enumerate((2, 1, 3, 2)):  # each goes on for a moment, from where the last stopped
        last = number == 3
        biphase(study, tmp_path / "mixed", count, "--checkpoint", "3", *([] if last else ["--for", "0.05s"]))
    one, mixed = end(tmp_path / "one"), end(tmp_path / "mixed")
    assert mixed[2] == one[2]
    assert apart(one[0], mixed[0]) <= 1e-5


def test_three_processes_stop_and_go_on_to_the_same_bits(study, tmp_path):
    """Sums over three depend on the order and on what a bucket holds, here also where layers are frozen."""
    text = study.read_text().replace("Stage(MLM(0.4), 25)", "Stage(MLM(0.4), 25, freeze='layers[0]')")
    study.write_text(text.replace("heldout_every=25", "heldout_every=25, optimizer=Muon()"))
    calm, stopped = str(tmp_path / "calm"), str(tmp_path / "stopped")
    stops = ([3, study, stopped, "--stop-after", often] for often in ("18", "14"))
    typed([3, study, calm], *stops, [3, study, stopped])
    one, two = end(Path(calm)), end(Path(stopped))
    for calmly, in_parts in zip(one[:2], two[:2], strict=True):
        assert apart(calmly, in_parts) == 0
    assert one[2] == two[2]


def test_pairs_over_processes_are_those_of_one_and_a_stop_changes_no_bit(study, tmp_path):
    stage = (
        "Stage(Contrastive(CATALOG['scifact-mini'], batch=7, length=16, temperature=0.1, heldout=0.1), 12)"
    )
    study.write_text(study.read_text().replace(STAGES, f"Stage(CLM(), 13), {stage}"))
    one, two, stopped = (tmp_path / name for name in ("one", "two", "stopped"))
    typed([1, study, one], [2, study, two], [2, study, stopped, "--stop-after", "18"], [2, study, stopped])
    (weights, _, labels, heldout), (others, moments, *lines) = end(one), end(two)
    assert set(labels.values()) > {7}, "a step has as many labels as pairs"
    assert lines[0] == labels
    assert apart(weights, others) <= 1e-5
    for step, losses in heldout.items():
        assert lines[1][step] == pytest.approx(losses, abs=1e-4)
    assert "contrastive" in heldout[25]
    same = end(stopped)
    assert all(torch.equal(others[name], same[0][name]) for name in others)
    assert all(torch.equal(moments[name], same[1][name]) for name in moments)


@pytest.fixture(scope="module")
def exchanged():
    """What two processes exchanged and when, by case: tests/training/exchange_driver.py."""
    done = subprocess.run([sys.executable, EXCHANGE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_gradients_that_are_summed_during_the_backward_pass_are_those_of_whole_passes(exchanged):
    assert all(rank["same"] for ranks in exchanged.values() for rank in ranks)


def test_buckets_are_the_same_in_every_step_and_process_and_begin_before_the_backward_pass_ends(exchanged):
    for case, ranks in exchanged.items():
        sizes = [[size for size, _ in step] for rank in ranks for step in rank["steps"]]
        assert sizes == [sizes[0]] * 4, case
        assert sum(sizes[0][:-1]) == ranks[0]["bytes"], "all gradients, and then the loss"
        # A gradient that this process has not holds back its bucket and those after it.
        waits = [case == "head in one process" and rank == 1 for rank in (0, 1)]
        for rank, wait in zip(ranks, waits, strict=True):
            *early, lowest, loss = (before_end for _, before_end in rank["steps"][-1])
            # With a frozen embedding the lowest block's gradients are the last ones.
            sure = len(early) // 2 if case == "embeddings frozen" else len(early)
            assert early[:sure] == [not wait] * sure, case
            assert not lowest
            assert not loss


@pytest.mark.campaign
def test_frozen_layers_and_merges_agree_in_several_processes_cut_or_not(study, tmp_path):
    text = study.read_text().replace(
        "Stage(MLM(0.4), 25))", "Stage(MLM(0.4), 25, freeze='layers[0]', layer_decay=0.5))"
    )
    merge = "Pretrain('mean', Merge(Kept(two, 10), two), stages=Stage(CLM(), 5), schedule=WSD(1e-3, 1, 1), heldout_tokens=512)"
    text = text.replace("BPE, CATALOG,", "BPE, CATALOG, Kept, Merge,").replace(
        'study = Study("ranks", runs=(Pretrain(', "two = Pretrain("
    )
    study.write_text(text.replace("),))", f")\nmean = {merge}\nstudy = Study('ranks', runs=(two, mean))"))
    stores = [tmp_path / name for name in ("one", "two", "cut")]
    typed([1, study, stores[0]], [2, study, stores[1]], [2, study, stores[2], "--shard", "full"])
    ends = [{place.name: place for place in (store / "checkpoints").iterdir()} for store in stores]
    assert len(ends[0]) == 7  # step 10, the phase, the decay, the end; the merge; its decay, its end
    for other in ends[1:]:
        assert other.keys() == ends[0].keys()
        for key, place in ends[0].items():
            assert apart(*(load_file(each / "model.safetensors") for each in (place, other[key]))) <= 1e-5


# ---------------------------------------------------------------- weights cut over processes


def agree(store, other):
    (weights, _, labels, heldout), others = end(store), end(other)
    assert others[2] == labels, "the same masks give the same number of labels at every step"
    assert apart(weights, others[0]) <= 1e-5
    for step, losses in heldout.items():
        assert others[3][step] == pytest.approx(losses, abs=1e-4)


@pytest.fixture
def fresh(shards, tmp_path):
    """Makes stores that have the corpus already."""

    def make(name):
        return store_with(shards, tmp_path / name).root

    return make


def test_a_sharded_run_agrees_and_goes_on_from_its_parts_to_the_same_bits(study, fresh):
    one, calm, left, stopped = map(fresh, ("one", "calm", "left", "stopped"))
    on_the_way = ("--shard", "full", "--stop-after", "20")
    typed(
        [1, study, one],
        [2, study, calm, "--shard", "full"],
        [2, study, left, *on_the_way],
        [2, study, stopped, *on_the_way],
        [2, study, stopped, "--shard", "full"],
    )
    agree(one, calm)
    parts = {path.name for path in left.glob("checkpoints/*/model*")}
    assert parts == {f"model-{rank}-of-2.{kind}" for rank in (0, 1) for kind in ("safetensors", "json")}
    for calmly, in_parts in zip(end(calm)[:2], end(stopped)[:2], strict=True):
        assert apart(calmly, in_parts) == 0
    assert not list(stopped.glob("attempts/*"))


@pytest.mark.campaign
def test_sharded_in_groups_or_unevenly_is_not_sharded_up_to_rounding(study, tmp_path):
    """Eight rows in micro-batches of one over three processes: one of them has a row less, and reads a silent one."""
    one, uneven, groups = (tmp_path / name for name in ("one", "uneven", "groups"))
    typed(
        [1, study, one],
        [3, study, uneven, "--shard", "full", "--micro-batch", "1", "--recompute"],
        [4, study, groups, "--shard", "hybrid:2", "--checkpoint", "3"],
    )
    for other in (uneven, groups):
        agree(one, other)


@pytest.mark.campaign
def test_a_run_goes_on_with_any_number_of_processes_sharded_or_not(study, tmp_path):
    one, mixed = tmp_path / "one", tmp_path / "mixed"
    ways = ((2, "full"), (1, "none"), (4, "hybrid:2"), (3, "none"), (4, "full"), (2, "none"))
    typed([1, study, one])
    for processes, shard in ways:
        typed([processes, study, mixed, "--shard", shard, "--checkpoint", "2", "--stop-after", "11"])
    typed([3, study, mixed, "--shard", "full"])
    agree(one, mixed)


@pytest.mark.campaign
@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_processes_send_the_bytes_that_a_plan_says(study, fresh, tmp_path, shard):
    text, commands = study.read_text().replace("decay=10", "decay=1").replace("warmup=5", "warmup=1"), []
    for steps in (3, 8):  # held-out text, which is read without being learnt, counts the same in both
        path = tmp_path / f"{steps}.py"
        path.write_text(text.replace(STAGES, f"Stage(CLM(), {steps}),"))
        options = ("--shard", shard, "--micro-batch", "2", "--count", tmp_path / f"{steps}.json")
        commands.append([2, path, fresh(str(steps)), *options])
    typed(*commands)
    few, more = (json.loads((tmp_path / f"{steps}.json").read_text()) for steps in (3, 8))
    vocab = len(end(tmp_path / "3")[0]["lm_head.weight"])
    shape = shape_of_size(Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64), vocab)
    load = Load(shape, "fp32", rows=4, micro_rows=2, length=32, labelled=1.0)
    planned = collectives(load, ShardingOption(shard, 1 if shard == "none" else 2), 2)
    # Of gradients, all but the last during the backward pass; of weights and gradients.
    names = {"none": ["sum", "last sum"], "full": ["gather", "cut"]}[shard]
    assert {name for name in more if more[name] > few[name]} == set(names)
    for name, collective in zip(names, planned, strict=True):
        assert (more[name] - few[name]) / 5 == pytest.approx(collective.sent, rel=0.01)


ADAPTED = """
from biphase import MLM, WSD, AdamW, Chunks, Corpus, Hub, LoRA, Pretrain, Pretrained, Stage, Study

text = Corpus("tiny", {source!r}, Pretrained({folder!r}), heldout="heldout.jsonl")
study = Study("adapted", runs=(Pretrain(
    "adapted", start=Hub({folder!r}), corpus=text,
    stages=(Stage(MLM(0.4), 12),), packing=Chunks(32, shortest=4), batch_tokens=256, precision={precision!r},
    schedule=WSD(peak=3e-3, warmup=2, decay=3), heldout_every=6, heldout_tokens=64, {more}
),))
"""
WITHOUT_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0
)


@pytest.fixture
def adapting(corpus, shards, tmp_path):
    """Makes studies that go on from a tiny model of a family, with the tokenizer of the tiny corpus."""

    def make(family, *, precision="fp32", more="", **fields):
        folder = tmp_path / "model"
        layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 3}
        model = with_head(family, seed=1, vocab_size=320, **layers, **WITHOUT_DROPOUT, **fields)
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text((shards / "tokenizer" / "tokenizer.json").read_text())
        (tmp_path / "study.py").write_text(
            ADAPTED.format(folder=str(folder), source=corpus.source, precision=precision, more=more)
        )
        return tmp_path / "study.py"

    return make


@pytest.mark.parametrize("start", ["scratch", "adapter of a hub model"])
def test_every_process_begins_with_the_weights_of_the_first(study, adapting, tmp_path, start):
    study.write_text(study.read_text().replace(STAGES, "Stage(CLM(), 15),"))
    path = study if start == "scratch" else adapting("llama", more="adapter=LoRA(4)")
    one, own = tmp_path / "one", tmp_path / "own"
    typed([2, path, one], [2, path, own, "--own-seeds"])
    assert apart(end(one)[0], end(own)[0]) == 0


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("bert", {}),  # its head transforms what it is given, and has a bias
        ("gpt2", {}),  # its layers learn from elsewhere who may see whom
        ("llama", {"more": "adapter=LoRA(4)"}),
        ("llama", {"more": "freeze='embeddings'"}),
        ("llama", {"more": "optimizer=AdamW(layer_decay=0.7)"}),
    ],
    ids=str,
)
def test_every_kind_of_model_may_be_sharded(adapting, tmp_path, family, fields):
    path, one, cut = adapting(family, **fields), tmp_path / "one", tmp_path / "cut"
    typed([1, path, one], [3, path, cut, "--shard", "full", "--recompute", "--checkpoint", "5"])
    agree(one, cut)


@pytest.mark.campaign
def test_bf16_is_computed_in_bf16_and_kept_in_fp32(adapting, tmp_path):
    """Weights travel and multiply in bf16, so the two differ by its rounding, and by no more than that."""
    path, plain, cut = adapting("llama", precision="bf16"), tmp_path / "plain", tmp_path / "cut"
    typed([2, path, plain], [2, path, cut, "--shard", "full"])
    (weights, _, labels, heldout), others = end(plain), end(cut)
    assert others[2] == labels
    assert all(one.dtype == torch.float32 for one in others[0].values())
    assert any((one != one.bfloat16().float()).any() for one in others[0].values())
    assert 0 < apart(weights, others[0]) < 0.01
    for step, losses in heldout.items():
        assert others[3][step] == pytest.approx(losses, rel=0.01)


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("text", ["", "half", "full:2", "hybrid:0", "hybrid:x", "none:1"])
def test_other_names_are_refused(text):
    with pytest.raises(SpecError, match="hybrid:4"):
        Sharding.named(text)


def test_groups_divide_the_processes():
    assert Sharding("none").groups_of(8, 8) == 1
    assert Sharding("full").groups_of(8, 4) == 8
    assert Sharding("hybrid").groups_of(8, 4) == 4
    assert Sharding("hybrid", 2).groups_of(8, 4) == 2
    with pytest.raises(SpecError, match="type --shard hybrid:2"):
        Sharding("hybrid", 3).groups_of(8, 8)
    with pytest.raises(SpecError, match="--shard full"):
        Sharding("hybrid").groups_of(8, 8)


# ---------------------------------------------------------------- gradients

# A parameter with a gradient in both processes, in the second alone, and in none.
RANK = """
import json, sys, torch, torch.distributed as dist
from biphase.training import distributed
from biphase.training.distributed import Ranks, Replicated
distributed.BUCKET = 5  # so that the gradients need several buckets
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
both, one, none = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
gradients = Replicated([both, one, none], Ranks(rank, 2, torch.device("cpu")))
found = []
for step in range(2):
    both.grad, one.grad, none.grad = torch.full((3,), 1.0 + rank), torch.ones(3) if rank else None, None
    loss = gradients.total(torch.tensor(2.0 + rank + step)).item()
    found.append([loss, *(None if p.grad is None else p.grad.tolist() for p in (both, one, none))])
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_gradients_are_summed_and_a_parameter_without_any_gets_none(tmp_path):
    """With a zero gradient the optimizer would apply weight decay, which one process alone does not."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    results = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    expected = [[loss, [3.0] * 3, [1.0] * 3, None] for loss in (5.0, 7.0)]
    assert results == [expected, expected]
