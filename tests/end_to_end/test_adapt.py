"""`biphase adapt` as a user types it: a decoder from a folder, continued by masking, on tiny real models."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from biphase import CLM, MLM, MNTP, Hub, LoRA, Pretrained, Stage, Study
from biphase.data.shards import Shards
from biphase.records import decode
from biphase.store import Store, read_json
from biphase.study.plan import identities, make_plan, save_plan
from biphase.training.pretrain import model_of_checkpoint

OPTIONS = ("--batch", "8", "--length", "32", "--heldout-tokens", "512", "--lr", "3e-3", "--quiet")


@pytest.fixture
def text(corpus):
    """The corpus as it is said on the command line."""
    return ("--corpus", corpus.source, "--heldout", corpus.heldout)


@pytest.fixture
def home(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def adapt(verb, text, home):
    """Adapt for a few steps: gives what was printed and err."""

    def typed(model, *more, steps=6, code=0):
        command = ("adapt", model, *text, "--store", home.root, "--steps", steps, *OPTIONS, *more)
        ended, out, err = verb(*command)
        assert ended == code, err
        return out, err

    return typed


def checkpoints(store):
    return {place.name: read_json(place / "checkpoint.json") for place in store.checkpoints.iterdir()}


def end_of(out):
    """Return the key in the export line."""
    return re.search(r"The encoder: biphase export ([0-9a-f]{8}) FOLDER", out)[1]


def run_of(store, digits):
    (about,) = (about for key, about in checkpoints(store).items() if key.startswith(digits))
    return decode(about["run"]), about["key"]


def table(out):
    """The rows of the table of losses before and after."""
    rows = out[out.index("before     after") :].splitlines()[1:]
    return {
        line.rsplit(None, 2)[0].strip(): tuple(map(float, line.split()[-2:]))
        for line in rows[: rows.index("")]
    }


def heldout(store, key):
    lines = map(json.loads, (store.checkpoints / key / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["heldout"] for line in lines if "heldout" in line}


def model_of(store, run, key):
    shards = Shards.open(store.shards / identities(store).data(run.corpus))
    return model_of_checkpoint(run, key, store, shards)


# ---------------------------------------------------------------- what it says


def test_the_table_has_losses_before_and_after(adapt, llama, home):
    out, err = adapt(llama)
    run, key = run_of(home, end_of(out))
    assert (run.start, run.steps) == (Hub(str(llama.resolve())), 6)
    assert run.stages == (Stage(MLM(0.4), 6),)
    measured = heldout(home, key)
    assert sorted(measured) == [0, 1, 2, 3, 4, 5, 6]
    expected = {
        words: tuple(round(measured[step][name], 3) for step in (0, 6))
        for words, name in (("causal", "clm"), ("masked 40%", "mlm40"))
    }
    assert table(out) == expected
    before, after = expected["masked 40%"]
    assert after < before - 0.3, "it learns"
    assert f"What it is good for: biphase evaluate {key[:8]} --tasks sst2 --store {home.root}" in out
    assert f"biphase export {key[:8]} FOLDER --store {home.root}" in out
    assert "0 of 2 training jobs" in err
    read = json.loads(adapt(llama, "--json")[0])
    assert read["key"] == key, "what to export"
    assert list(read["heldout"].values()) == [{str(step): values for step, values in measured.items()}]
    assert {job["standing"] for job in read["jobs"]} == {"done"}


def test_with_pairs_the_losses_before_are_of_the_model_as_it_came(adapt, llama, home, tmp_path):
    rows = [{"query": f"who sees {n}", "positive": f"the cat sees {n}"} for n in range(80)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--pairs", tmp_path / "pairs.jsonl", "--pair-steps", 2, "--pair-batch", 4)
    out, _ = adapt(llama, *options, steps=2)
    key = re.search(r"The embedding model: biphase export ([0-9a-f]{8}) FOLDER", out)[1]
    measured = heldout(home, run_of(home, key)[1])
    assert table(out)["masked 40%"] == tuple(round(measured[step]["mlm40"], 3) for step in (0, 4))
    assert table(out)["contrastive"] == tuple(round(measured[step]["contrastive"], 3) for step in (2, 4))


def test_the_same_command_and_its_plan_compute_nothing_again(adapt, llama, home, verb, monkeypatch):
    first, _ = adapt(llama)
    stamps = {path: path.stat().st_mtime_ns for path in home.checkpoints.rglob("*")}
    again, err = adapt(llama)
    assert "all 2 training jobs" in err
    assert again == first
    (plan,) = home.studies.glob("*/plan.json")
    monkeypatch.chdir("/")
    code, out, err = verb("run", plan, "--store", home.root, "--quiet")
    assert code == 0, err
    assert "all 2 training jobs are done" in out
    assert {path: path.stat().st_mtime_ns for path in home.checkpoints.rglob("*")} == stamps


# ---------------------------------------------------------------- options


def test_every_option_reaches_the_run(adapt, decoder, home):
    model = decoder("Mistral", sliding_window=3)
    options = (
        "--objective",
        "mntp",
        "--ratio",
        "0.3",
        "--lora",
        "4",
        "--layer-decay",
        "0.5",
        "--windows",
        "full",
    )
    out, _ = adapt(model, *options, "--rope-base", "50000", "--length", "128", "--freeze-embeddings", steps=2)
    run, key = run_of(home, end_of(out))
    assert run.stages == (Stage(MNTP(0.3), 2, rope_base=50_000.0),)
    assert (run.adapter, run.optimizer.layer_decay) == (LoRA(rank=4, alpha=8), 0.5)
    assert (run.start.windows, run.packing.length, run.freeze) == ("full", 128, "embeddings")
    measured = heldout(home, key)
    assert table(out)["masked, one before 30%"] == tuple(
        round(measured[step]["mntp30"], 3) for step in (0, 2)
    )
    lines = out[out.index("before     after") :].split("\n\n")[0].splitlines()[1:]
    assert len({line.rindex(".") for line in lines}) == 1, "the numbers stand below one another"
    _, err = adapt(model, "--length", "128", steps=2, code=2)  # longer than its context
    assert all(number in err.splitlines()[-1] for number in ("64", "128"))


def test_tasks_option_fine_tunes_both_models(adapt, llama, home):
    _, err = adapt(llama, "--tasks", "sources-mini", "--lrs", "1e-3", "--seeds", "0", "--for", "0.001s")
    assert "0 of 2 fine-tunings" in err
    (place,) = home.studies.glob("*/plan.json")
    study = decode(read_json(place)["study"])
    assert [run.name for run in study.runs] == ["llama", "llama-mlm"]
    assert study.runs[0].stages == ()
    assert study.finetune.tasks[0].name == "sources-mini"


# ---------------------------------------------------------------- which models


def test_a_checkpoint_is_continued_by_its_key(adapt, verb, llama, home):
    first = end_of(adapt(llama)[0])
    code, out, err = verb("adapt", first, "--steps", 4, "--store", home.root, "--objective", "mntp", *OPTIONS)
    assert code == 0, err
    run, key = run_of(home, end_of(out))
    parent, _ = run_of(home, first)
    assert (run.start.name, run.start.steps, run.corpus) == (parent.name, 6, parent.corpus)
    assert (run.optimizer_state, run.data) == ("reset", "restart")
    measured = heldout(home, key)
    rows = table(out)
    assert rows["masked 40%"] == tuple(round(measured[step]["mlm40"], 3) for step in (6, 10))
    assert "2 of 4 training jobs" in err


def test_a_lora_checkpoint_is_continued_only_with_lora(adapt, verb, llama, home):
    first = end_of(adapt(llama, "--lora", 2)[0])
    code, _, err = verb("adapt", first, "--steps", 2, "--store", home.root, *OPTIONS)
    assert code == 2
    assert "--lora 2" in err
    code, _, err = verb("adapt", first, "--steps", 2, "--store", home.root, *OPTIONS, "--lora", 2)
    assert code == 0, err


def test_a_model_with_its_own_tokenizer_reads_any_corpus_by_it(tiny_run, corpus, store, tmp_path, verb):
    save_plan(make_plan(Study("base", (tiny_run("base", Stage(CLM(), 6)),)), identities(store)), store)
    plan = store.studies / "base" / "plan.json"
    code, _, err = verb("run", plan, "--store", store.root, "--quiet")
    assert code == 0, err
    (key,) = (key for key, about in checkpoints(store).items() if about["progress"]["step"] == 6)
    command = ("adapt", key[:8], "--steps", 2, "--store", store.root, *OPTIONS)
    code, out, err = verb(*command, "--corpus", corpus.source, "--heldout", corpus.heldout)
    assert code == 0, err
    run, _ = run_of(store, end_of(out))
    assert identities(store).data(run.corpus) == identities(store).data(run.start.corpus)
    other = tmp_path / "other.txt"
    other.write_text("".join(f"zebras quickly jump {n} fences\n" for n in range(400)))
    code, out, err = verb(*command, "--corpus", other)
    assert code == 0, err
    run, _ = run_of(store, end_of(out))
    assert run.corpus.source == str(other)
    assert run.corpus.reader == run.start.corpus.reader
    code, _, err = verb(*command, "--heldout", corpus.heldout)
    assert code == 2
    assert "--corpus" in err


def test_documents_begin_with_the_model_s_bos_token(adapt, llama, tokenizer_json, home, tmp_path):
    folder = tmp_path / "begins"
    shutil.copytree(llama, folder)
    begin = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {
        "type": "TemplateProcessing", "single": [begin, one], "pair": [begin, one, two],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [2], "tokens": ["<|pad|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json | {"post_processor": template}))
    named = read_json(folder / "tokenizer_config.json") | {"bos_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    firsts = {}
    for model in (folder, llama):
        out, _ = adapt(model, steps=1)
        run, _ = run_of(home, end_of(out))
        shards = Shards.open(home.shards / identities(home).data(run.corpus))
        ids = shards.train.span(0, 2_000)
        ends = np.flatnonzero(ids == 0)[:-1]
        firsts[run.corpus.bos] = {int(ids[0]), *ids[ends + 1].tolist()}
    assert firsts[True] == {2}
    assert 2 not in firsts[False]


def test_a_slow_tokenizer_is_converted_once(adapt, llama, tokenizer_json, home, tmp_path):
    folder = tmp_path / "older"
    shutil.copytree(llama, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(tokenizer_json["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in tokenizer_json["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    names = dict.fromkeys(("eos_token", "bos_token", "unk_token"), "<|end_of_text|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    ended = set()
    for _ in range(2):
        out, _ = adapt(folder, steps=1)
        run, key = run_of(home, end_of(out))
        ended.add(key)
    assert len(ended) == 1
    (kept,) = (home.root / "tokenizers").iterdir()
    assert run.corpus.tokenizer == Pretrained(str(kept.resolve()))
    assert read_json(kept / "tokenizer.json")["model"]["vocab"] == tokenizer_json["model"]["vocab"]
    assert not (folder / "tokenizer.json").exists(), "nothing is written beside the model"


def test_a_gguf_file_equals_its_source_model(adapt, llama, gguf_folder, home, monkeypatch):
    import transformers.modeling_gguf_pytorch_utils as theirs

    convert, converted = theirs.load_gguf_checkpoint, []

    def noted(*args, return_tensors=False, **more):
        converted.extend([True] * return_tensors)
        return convert(*args, return_tensors=return_tensors, **more)

    monkeypatch.setattr(theirs, "load_gguf_checkpoint", noted)
    out, _ = adapt(gguf_folder, "--gguf", "tiny.gguf", steps=2)
    assert len(converted) == 1, "for all of its training jobs"
    run, key = run_of(home, end_of(out))
    assert run.start == Hub(str(gguf_folder), gguf="tiny.gguf")
    plain, _ = adapt(llama, steps=2)
    _, other = run_of(home, end_of(plain))
    assert heldout(home, key)[0]["clm"] == pytest.approx(heldout(home, other)[0]["clm"], abs=0.02)
    began = model_of(home, run, None).model.state_dict()
    for name, value in load_file(llama / "model.safetensors").items():
        assert torch.equal(began[name][: len(value)], value), name


def test_experts_and_a_tokenizer_larger_than_the_embeddings_are_refused_before_tokenizing(
    adapt, decoder, llama, tokenizer_json, home, tmp_path
):
    shutil.copytree(llama, tmp_path / "small")
    larger = json.loads(json.dumps(tokenizer_json))
    larger["model"]["vocab"] |= {"one more": 320, "and another": 321}
    (tmp_path / "small" / "tokenizer.json").write_text(json.dumps(larger))
    for model, facts in (
        (decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2), ["num_local_experts=4"]),
        (tmp_path / "small", ["320 embeddings", "322 tokens", "resize_token_embeddings(322)"]),
    ):
        out, err = adapt(model, code=2)
        assert all(fact in err.splitlines()[-1] for fact in facts)
        assert "Traceback" not in err
        assert out == ""
        assert not home.shards.exists()
        assert not home.checkpoints.exists()


# ---------------------------------------------------------------- what it refuses


CORPUS = ("--corpus", "{corpus}", "--heldout", "{heldout}")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("{llama}",), "--corpus builtin"),
        (("{llama}", "--corpus", "./absent.jsonl"), "./absent.jsonl"),
        (("{llama}", *CORPUS[:2], "--heldout", "absent.jsonl"), "absent.jsonl"),
        (("{llama}", *CORPUS, "--objective", "mln"), "'mlm'"),
        (("{llama}", *CORPUS, "--windows", "half"), "'symmetric' or 'full'"),
        (("{llama}", *CORPUS, "--layer-decay", "0"), "layer_decay"),
        (("{llama}", *CORPUS, "--rope-base", "0.5"), "rope_base"),
        (("{llama}", *CORPUS, "--tasks", "nowhere"), "'nowhere'"),
        (("{llama}", *CORPUS, "--gguf", "a.gguf"), "a.gguf"),
        (("{llama}", *CORPUS, "--gguf", "../a.gguf"), "gguf"),
        (("{empty}", *CORPUS), "config.json"),
        (("{gguf}", *CORPUS), "--gguf tiny.gguf"),
        (("{gguf}", *CORPUS, "--gguf", "absent.gguf"), "--gguf tiny.gguf"),
        (("./nowhere", *CORPUS), "'./nowhere'"),
        (("org/model@main", *CORPUS), "'main'"),
        (("org/model", *CORPUS), "org/model"),
        (("abcdef12", *CORPUS), "abcdef12"),
    ],
    ids=lambda value: " ".join(value[:1] + value[-2:]) if isinstance(value, tuple) else "",
)
def test_a_wrong_option_or_model_is_refused(refused, llama, gguf_folder, corpus, tmp_path, arguments, facts):
    (tmp_path / "empty").mkdir()
    paths = {
        "llama": llama, "gguf": gguf_folder, "empty": tmp_path / "empty", "corpus": corpus.source,
        "heldout": corpus.heldout,
    }  # fmt: skip
    assert facts in refused("adapt", *(word.format(**paths) for word in arguments), "--steps", 2)
    assert not (tmp_path / "store" / "studies").exists(), "nothing was begun"
