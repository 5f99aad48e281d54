"""`biphase adapt` as a user types it: a decoder from a folder, continued by masking, on tiny real models."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from biphase import CATALOG, CLM, MLM, MNTP, Finetune, Hub, LoRA, Pretrained, Stage
from biphase.data.shards import Shards
from biphase.records import decode
from biphase.store import Store, read_json
from biphase.study.build import AdaptOptions, CorpusOptions, adaptation
from biphase.study.plan import identities, make_plan, save_plan
from biphase.text import si
from biphase.training.pretrain import model_of_checkpoint

WAYS = ("--batch", "8", "--length", "32", "--heldout-tokens", "512", "--lr", "3e-3", "--quiet")


@pytest.fixture
def text(corpus):
    """The corpus as it is said on the command line."""
    return ("--corpus", corpus.source, "--heldout", corpus.heldout)


@pytest.fixture
def home(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def adapt(verb, text, home):
    """Adapt for a few steps: gives what was printed and told."""

    def typed(model, *more, steps=6, code=0):
        command = ("adapt", model, *text, "--store", home.root, "--steps", steps, *WAYS, *more)
        ended, out, told = verb(*command)
        assert ended == code, told
        return out, told

    return typed


def states(store):
    return {place.name: read_json(place / "checkpoint.json") for place in store.checkpoints.iterdir()}


def end_of(out):
    """The key that the export line names, as a whole state."""
    return re.search(r"The encoder: biphase export ([0-9a-f]{8}) FOLDER", out)[1]


def run_of(store, digits):
    (about,) = (about for key, about in states(store).items() if key.startswith(digits))
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


def weights(store):
    """Every tensor file of every state."""
    return {
        path.relative_to(store.checkpoints): path.read_bytes()
        for path in store.checkpoints.rglob("*.safetensors")
    }


def model_of(store, run, key):
    shards = Shards.open(store.shards / identities(store).data(run))
    return model_of_checkpoint(run, key, store, shards)


# ---------------------------------------------------------------- what it says


def test_the_table_has_the_losses_before_the_first_step_and_after_the_last(adapt, llama, home):
    out, told = adapt(llama)
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
    assert "2 training jobs, 0 done" in told


def test_before_the_first_step_it_is_the_model_that_was_given(adapt, llama, home):
    from transformers import AutoModelForCausalLM

    out, _ = adapt(llama, steps=1)
    run, key = run_of(home, end_of(out))
    shards = Shards.open(home.shards / identities(home).data(run))
    rows = torch.from_numpy(shards.heldout.span(0, 16 * 32).astype(np.int64)).view(16, 32)
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        logits = model(rows).logits[:, :-1]
    own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    # Their rows are not cut where ours are, and ours have one word more, the mask: near, not equal.
    assert heldout(home, key)[0]["clm"] == pytest.approx(float(own), abs=0.05)


def test_the_same_command_again_computes_nothing(adapt, llama, home):
    first, _ = adapt(llama)
    stamps = {path: path.stat().st_mtime_ns for path in home.checkpoints.rglob("*")}
    again, told = adapt(llama)
    assert "2 training jobs, 2 done" in told
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in home.checkpoints.rglob("*")} == stamps


def test_for_a_program_it_is_json_with_the_same_losses(adapt, llama, home):
    read = json.loads(adapt(llama, "--json")[0])
    (losses,) = read["heldout"].values()
    key = next(state["key"] for state in read["jobs"] if state["results"])
    assert read["key"] == key, "what to export"
    assert losses == {str(step): values for step, values in heldout(home, key).items()}
    assert {state["standing"] for state in read["jobs"]} == {"done"}


def test_the_speed_that_is_told_is_that_of_the_steps(verb, llama, text, home):
    command = ("adapt", llama, *text, "--store", home.root, "--steps", 4, *WAYS[:-1], "--decay", 0)
    code, _, told = verb(*command)
    assert code == 0, told
    (state,) = states(home).values()
    assert f"{si(4 * 8 * 32 / state['progress']['seconds'])}tok/s" in told.splitlines()[-1]


def test_stopped_by_the_clock_it_says_how_to_go_on_and_shows_no_table(adapt, llama, home):
    out, _ = adapt(llama, "--for", "0.001s", steps=50)
    assert "To go on: biphase adapt" in out
    assert "before" not in out
    assert "biphase export" not in out


def test_its_plan_is_a_study_like_any_other(adapt, llama, home, verb, monkeypatch):
    adapt(llama)
    (plan,) = home.studies.glob("*/plan.json")
    monkeypatch.chdir("/")
    code, out, told = verb("run", plan, "--store", home.root, "--quiet")
    assert code == 0, told
    assert "all 2 training jobs are done" in out
    assert "2 training jobs, 2 done" in told


# ---------------------------------------------------------------- options


def test_mntp_asks_one_position_before(adapt, llama, home):
    out, _ = adapt(llama, "--objective", "mntp", "--ratio", "0.3")
    run, key = run_of(home, end_of(out))
    assert run.stages == (Stage(MNTP(0.3), 6),)
    rows = table(out)
    measured = heldout(home, key)
    assert rows["masked, one before 30%"] == tuple(round(measured[step]["mntp30"], 3) for step in (0, 6))
    lines = out[out.index("before     after") :].split("\n\n")[0].splitlines()[1:]
    assert len({line.rindex(".") for line in lines}) == 1, "the numbers stand below one another"


def test_lora_trains_small_matrices_and_leaves_the_model_as_it_is(adapt, llama, home):
    out, _ = adapt(llama, "--lora", "4")
    run, key = run_of(home, end_of(out))
    assert run.adapter == LoRA(rank=4, alpha=8)
    before, after = load_file(llama / "model.safetensors"), model_of(home, run, key).state_dict()
    names = [name for name in after if name.endswith("embed_tokens.weight")]
    assert len(names) == 1
    assert torch.equal(after[names[0]][:320], before["model.embed_tokens.weight"])
    assert table(out)["masked 40%"][1] < table(out)["masked 40%"][0]


def test_frozen_embeddings_stay_and_the_rest_learns(adapt, llama, home):
    out, _ = adapt(llama, "--freeze-embeddings")
    run, key = run_of(home, end_of(out))
    assert run.freeze == "embeddings"
    before = load_file(llama / "model.safetensors")
    after = model_of(home, run, key).model.state_dict()
    assert torch.equal(after["model.embed_tokens.weight"][:320], before["model.embed_tokens.weight"])
    new = after["model.embed_tokens.weight"][320]  # the mask token, which the tokenizer lacked
    assert torch.allclose(new, before["model.embed_tokens.weight"].mean(0), atol=1e-6)
    other = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(after[other], before[other])


def test_lower_layers_learn_less_where_it_is_said(adapt, llama, home):
    moved = {}
    before = load_file(llama / "model.safetensors")
    for share in ("1.0", "0.1"):
        out, _ = adapt(llama, "--layer-decay", share)
        run, key = run_of(home, end_of(out))
        assert run.optimizer.layer_decay == float(share)
        after = model_of(home, run, key).model.state_dict()
        moved[share] = [
            float((after[name] - before[name]).abs().mean())
            for name in (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
        ]
    assert moved["0.1"][0] < 0.3 * moved["0.1"][1]
    assert moved["1.0"][0] > 0.6 * moved["1.0"][1]


def test_windows_are_kept_to_both_sides_or_opened(adapt, decoder, home):
    narrow = decoder("Mistral", sliding_window=3)
    losses = {}
    for windows in ("symmetric", "full"):
        out, _ = adapt(narrow, "--windows", windows, steps=2)
        run, key = run_of(home, end_of(out))
        assert run.start.windows == windows
        losses[windows] = heldout(home, key)[0]
    assert losses["symmetric"]["clm"] == losses["full"]["clm"], "forwards, a window is what it was"
    assert losses["symmetric"]["mlm40"] != losses["full"]["mlm40"]


def test_another_base_of_the_positions_lets_rows_be_longer(adapt, llama, home):
    out, _ = adapt(llama, "--rope-base", "50000", "--length", "128", steps=2)
    run, key = run_of(home, end_of(out))
    assert (run.stages[0].rope_base, run.packing.length) == (50_000.0, 128)
    assert model_of(home, run, key).model.config.rope_parameters["rope_theta"] == 50_000.0
    _, told = adapt(llama, "--length", "128", steps=2, code=2)
    assert "reads at most 64 tokens, rows have 128" in told.splitlines()[-1]


def test_before_and_after_are_fine_tuned_alike(llama, corpus, home, verb):
    small = replace(CATALOG["sources-mini"], steps=2, batch=4)
    small = replace(small, splits=replace(small.splits, rows=(16, 8, 8)))
    grid = Finetune((small,), lrs=(1e-3,), seeds=(0,), protocol="standard", precision="fp32")
    wishes = AdaptOptions(steps=2, length=32, batch_rows=8, heldout_tokens=512)
    study = adaptation(
        str(llama), CorpusOptions(corpus.source, heldout=corpus.heldout), wishes, home,
        gguf="", windows="symmetric", finetune=grid,
    )  # fmt: skip
    plan = make_plan(study, identities(home))
    save_plan(plan, home)
    code, out, told = verb("run", home.studies / study.name / "plan.json", "--store", home.root, "--quiet")
    assert code == 0, told
    rows = [
        line.split()[0] for line in out.splitlines() if "sources-mini" in line and "!" not in line.split()[0]
    ]
    assert rows == ["llama", "llama-mlm"]
    assert "and 2 fine-tunings are done" in out


def test_tasks_on_the_command_line_are_asked_of_both(adapt, llama, home):
    _, told = adapt(llama, "--tasks", "sources-mini", "--lrs", "1e-3", "--seeds", "0", "--for", "0.001s")
    assert "2 fine-tunings, 0 done" in told
    (place,) = home.studies.glob("*/plan.json")
    study = decode(read_json(place)["study"])
    assert [run.name for run in study.runs] == ["llama", "llama-mlm"]
    assert study.runs[0].stages == ()
    assert study.finetune.tasks[0].name == "sources-mini"


def test_the_guide_names_every_option_and_no_other():
    import typer

    from biphase.cli import app

    guide = (Path(__file__).parents[2] / "docs" / "adapt.md").read_text()
    table = guide[guide.index("## Options") : guide.index("## In a study file")]
    shown = {
        name for row in re.findall(r"^\| (`--.*?) \|", table, re.M) for name in re.findall(r"--[a-z-]+", row)
    }
    more = re.findall(r"--[a-z-]+", table[table.index("`--tasks NAMES`") :])
    command = typer.main.get_command(app).commands["adapt"]
    has = {one for option in command.params for one in option.opts if one.startswith("--")}
    assert shown | set(more) == has - {"--store", "--help"}


# ---------------------------------------------------------------- which models


def test_a_state_goes_on_from_its_key_with_its_own_losses_before(adapt, verb, llama, home):
    first = end_of(adapt(llama)[0])
    code, out, told = verb("adapt", first, "--steps", 4, "--store", home.root, "--objective", "mntp", *WAYS)
    assert code == 0, told
    run, key = run_of(home, end_of(out))
    parent, _ = run_of(home, first)
    assert (run.start.name, run.start.steps, run.corpus) == (parent.name, 6, parent.corpus)
    assert (run.optimizer_state, run.data) == ("reset", "restart")
    measured = heldout(home, key)
    rows = table(out)
    assert rows["masked 40%"] == tuple(round(measured[step]["mlm40"], 3) for step in (6, 10))
    assert "4 training jobs, 2 done" in told


def test_on_another_text_before_is_measured_on_that_text(adapt, verb, llama, home, tmp_path):
    first = end_of(adapt(llama)[0])
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(json.dumps({"text": f"{n} times {n} is {n * n}. " * 4}) + "\n" for n in range(400))
    )
    shutil.copy(other, tmp_path / "held.jsonl")
    ways = ("--steps", 2, "--store", home.root, *WAYS, "--lr", "1e-9", "--warmup", 0, "--decay", 0)
    code, out, told = verb("adapt", first, "--corpus", other, "--heldout", "held.jsonl", *ways)
    assert code == 0, told
    for was, now in table(out).values():  # nothing was learnt, so nothing may seem so
        assert was == pytest.approx(now, abs=2e-3)


def test_an_adapter_goes_on_only_if_it_is_said(adapt, verb, llama, home):
    first = end_of(adapt(llama, "--lora", 2)[0])
    code, _, told = verb("adapt", first, "--steps", 2, "--store", home.root, *WAYS)
    assert code == 2
    assert "was trained with LoRA of rank 2: type --lora 2 to go on" in told
    code, _, told = verb("adapt", first, "--steps", 2, "--store", home.root, *WAYS, "--lora", 2)
    assert code == 0, told


def test_a_model_whose_tokenizer_was_trained_on_its_text_goes_on_with_that_text_alone(
    tiny_run, corpus, store, tmp_path, verb
):
    code, _, told = verb(
        "run", make_plan_of(tiny_run("base", Stage(CLM(), 6)), store), "--store", store.root, "--quiet"
    )
    assert code == 0, told
    (key,) = (key for key, about in states(store).items() if about["progress"]["step"] == 6)
    command = ("adapt", key[:8], "--steps", 2, "--store", store.root, *WAYS)
    code, out, told = verb(*command, "--corpus", corpus.source, "--heldout", corpus.heldout)
    assert code == 0, told
    run, _ = run_of(store, end_of(out))
    assert identities(store).data(run) == identities(store).data(run.start)
    other = tmp_path / "other.txt"
    other.write_text("".join(f"zebras quickly jump {n} fences\n" for n in range(400)))
    code, _, told = verb(*command, "--corpus", other)
    assert code == 2
    assert "the tokenizer of 'base' was trained on its own text" in told
    assert "biphase adapt ./folder --corpus" in told
    code, _, told = verb(*command, "--heldout", corpus.heldout)
    assert code == 2
    assert "--text, --heldout and --tokens are of a --corpus; say which one too" in told


def make_plan_of(run, store):
    from biphase import Study

    plan = make_plan(Study("base", (run,)), identities(store))
    save_plan(plan, store)
    return store.studies / "base" / "plan.json"


def test_documents_begin_as_the_model_knows_them(adapt, llama, words, home, tmp_path):
    folder = tmp_path / "begins"
    shutil.copytree(llama, folder)
    begin = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    template = {
        "type": "TemplateProcessing", "single": [begin, one], "pair": [begin, one, two],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [2], "tokens": ["<|pad|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(words | {"post_processor": template}))
    named = read_json(folder / "tokenizer_config.json") | {"bos_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    firsts = {}
    for model in (folder, llama):
        out, _ = adapt(model, steps=1)
        run, _ = run_of(home, end_of(out))
        shards = Shards.open(home.shards / identities(home).data(run))
        ids = shards.train.span(0, 2_000)
        ends = np.flatnonzero(ids == 0)[:-1]
        firsts[run.corpus.bos] = {int(ids[0]), *ids[ends + 1].tolist()}
    assert firsts[True] == {2}
    assert 2 not in firsts[False]


def test_a_tokenizer_in_an_older_form_is_converted_once_and_kept(adapt, llama, words, home, tmp_path):
    folder = tmp_path / "older"
    shutil.copytree(llama, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(words["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in words["model"]["merges"])
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
    assert read_json(kept / "tokenizer.json")["model"]["vocab"] == words["model"]["vocab"]
    assert not (folder / "tokenizer.json").exists(), "nothing is written beside the model"


def test_a_gguf_is_the_model_that_it_was_made_from(adapt, llama, gguf_folder, home, monkeypatch):
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


def test_an_unsuited_model_is_refused_in_one_line_that_says_why(adapt, decoder, home):
    experts = decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    out, told = adapt(experts, code=2)
    assert "is a mixture of experts (num_local_experts=4)" in told.splitlines()[-1]
    assert "Traceback" not in told
    assert out == ""
    assert not home.checkpoints.exists() or not list(home.checkpoints.iterdir())
    assert not home.shards.exists(), "it is refused before its text is tokenized"


def test_a_tokenizer_with_more_tokens_than_the_model_has_embeddings_is_refused(
    adapt, llama, words, home, tmp_path
):
    shutil.copytree(llama, tmp_path / "small")
    larger = json.loads(json.dumps(words))
    larger["model"]["vocab"] |= {"one more": 320, "and another": 321}
    (tmp_path / "small" / "tokenizer.json").write_text(json.dumps(larger))
    _, told = adapt(tmp_path / "small", code=2)
    line = told.splitlines()[-1]
    assert "320 embeddings" in line
    assert "322 tokens" in line
    assert "resize_token_embeddings(322)" in line
    assert not home.shards.exists(), "it is refused before its text is tokenized"


def test_a_model_without_a_masked_class_says_so_before_it_is_trained(adapt, decoder):
    _, told = adapt(decoder("Qwen3", head_dim=8), steps=1)
    (note,) = (line for line in told.splitlines() if "Qwen3ForCausalLM" in line)
    assert "biphase.load(FOLDER).fill_mask" in note
    assert told.index(note) < told.index("1/1  mlm")
    assert "masked-language-model class" not in adapt(decoder(), steps=1)[1]


# ---------------------------------------------------------------- killed


def test_killed_and_typed_again_it_ends_in_the_same_bits(llama, text, tmp_path, verb):
    stores = {name: Store(tmp_path / name) for name in ("calm", "killed")}
    command = ["adapt", llama, *text, "--steps", 200, "--decay", "0.9", *WAYS]
    code, _, told = verb(*command, "--store", stores["calm"].root)
    assert code == 0, told
    words = [*map(str, command), "--store", str(stores["killed"].root)]
    child = subprocess.Popen(
        [sys.executable, "-m", "biphase", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not list(stores["killed"].checkpoints.glob("*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    _, said = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL, said
    assert len(list(stores["killed"].checkpoints.glob("*/manifest.json"))) == 1
    code, _, told = verb(*words)
    assert code == 0, told
    assert "2 training jobs, 1 done" in told
    assert weights(stores["killed"]) == weights(stores["calm"])
    assert len(weights(stores["calm"])) >= 4
