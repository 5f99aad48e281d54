"""New models of any configuration: both attention directions, training, resuming, export, counts, and refusals.

Configurations are those of `families.build`, as a study gives them: the content of a config.json.
"""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from families.build import VOCAB, WINDOW, Family, small_config
from families.checks import (
    check_directions,
    check_exported,
    check_kill_and_resume,
    check_own_forward,
    check_segments,
    check_training,
    export_end,
    run_of,
)
from families.tiny import refused

from biphase import CLM, CONFIGS, MLM, SIZES, WSD, Config, Pretrain, Rows, Stage, Study, modernbert
from biphase.errors import BiphaseError, SpecError
from biphase.keys import Identities, checkpoint_key
from biphase.models.backbone import from_scratch, probe
from biphase.study.costs import flops_per_token, shape_of_config, shape_of_size

TINY = modernbert(
    "tiny", layers=4, hidden=32, heads=2, ffn=48, precision="fp32",
    local_attention=2 * WINDOW, max_position_embeddings=64,
)  # fmt: skip
PAD = 2


def config_of(family: Family, **fields) -> Config:
    """A family's small configuration as a record."""
    content = small_config(family).to_diff_dict() | {"model_type": family.model_type} | fields
    return Config(str(family), {name: value for name, value in content.items() if value is not None}, "fp32")


def new(config, *, seed=0, length=32, vocab=VOCAB):
    return from_scratch(config, vocab=vocab, mask_id=1, pad_id=PAD, length=length, seed=seed).eval()


SHAPES = {
    "modernbert": (TINY, False),
    **{name: (config_of(Family(name, masked=True)), False) for name in ("bert", "roberta", "eurobert")},
    **{
        name: (config_of(Family(name)), True)
        for name in ("gemma3_text", "qwen2", "mistral", "gpt2", "gpt_neox", "opt", "cohere2", "olmo2")
    },
}


@pytest.mark.parametrize(("config", "decoder"), SHAPES.values(), ids=SHAPES)
def test_a_new_model_follows_the_attention_pattern(config, decoder):
    """Causal, both ways and across packed texts, with the windows of its layers; in one direction as its own class."""
    model = new(config)
    probe(model, vocab=VOCAB)
    check_own_forward(model, copy.deepcopy(model.model), causal=decoder)
    check_directions(model)
    check_segments(model)


@pytest.mark.parametrize(("config", "decoder"), SHAPES.values(), ids=SHAPES)
def test_weights_depend_on_the_seed_alone_and_no_token_begins_as_zero(config, decoder):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, same, other = (new(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.head, other.head)
    table = first.model.get_input_embeddings()
    assert (table.weight.norm(dim=1) > 0.1 * table.weight.norm(dim=1).mean()).all()
    table(torch.tensor([PAD])).sum().backward()
    assert table.weight.grad[PAD].any(), "the pad token is often the end token, which texts contain"


@pytest.mark.parametrize("name", ["modernbert", "gemma3_text"])
def test_a_new_model_goes_the_whole_way(name, corpora, tmp_path):
    """Trained causally and then masked, killed and resumed to the same bits, exported, and read by transformers."""
    corpus = corpora[True]
    stages = Stage(CLM(), 10), Stage(MLM(0.4), 20)
    run = replace(run_of(tmp_path, corpus.corpus), start=SHAPES[name][0], stages=stages, heldout_every=10)
    once, twice = (corpus.store(tmp_path / folder) for folder in ("once", "twice"))
    check_training(run, once)
    check_kill_and_resume(run, twice, as_in=once)
    kinds = {"modernbert": "ModernBertForMaskedLM", "gemma3_text": "Gemma3ForCausalLM"}
    assert export_end(run, once, tmp_path / "exported") == kinds[name]
    check_exported(run, once, tmp_path / "exported")


def test_a_study_from_the_command_line(corpora, tmp_path, study_file, verb):
    def typed(config):
        run = run_of(tmp_path, corpora[True].corpus)
        run = replace(run, start=config, stages=(Stage(MLM(0.4), 2),), schedule=WSD(1e-3, 0, 0))
        path = study_file(Study("shape", run))
        return [verb(name, path, "--store", tmp_path / "s") for name in ("plan", "run")]

    (planned, tree, _), (ran, said, _) = typed(TINY)
    assert (planned, ran) == (0, 0)
    assert "FLOPs" in tree
    assert "the shape of" not in tree
    assert "masked 40%" in said
    code, _, told = typed(Config("mine", {"model_type": "mixtral"}, "fp32"))[1]
    assert code == 2
    assert told.strip().splitlines()[-1].startswith("error: Config 'mine' is a mixture of experts")
    assert "Traceback" not in told


UNSUITED = {
    "no such field": ({"model_type": "modernbert", "hiden_size": 32}, ["hiden_size", "hidden_size"]),
    "no such type": ({"model_type": "modernbertt"}, ["'modernbertt'", "'modernbert'"]),
    "experts": ({"model_type": "mixtral"}, ["mixture of experts"]),
    "recurrence": ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1}, ["not attention"]),
    "encoder and decoder": ({"model_type": "t5"}, ["an encoder and a decoder"]),
    "pictures": ({"model_type": "vit"}, ["language-model head"]),
    "fixed attention": ({"model_type": "gpt_neo", "hidden_size": 32, "num_heads": 2, "num_layers": 2, "attention_types": [[["global"], 2]]}, ["both directions"]),
    "own attention": ({"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}, ["both directions"]),
    "widths": ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, ["30", "4"]),
    "keys": ({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 3, "num_hidden_layers": 1, "intermediate_size": 32}, ["heads"]),
    "too short": ({"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 16}, ["16", "Chunks(16)", "max_position_embeddings"]),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "facts"), UNSUITED.values(), ids=UNSUITED)
def test_a_configuration_that_does_not_suit_is_refused_in_one_line(fields, facts):
    def probed():
        probe(new(Config("mine", fields, "fp32")), vocab=VOCAB)

    message = refused(probed, error=BiphaseError)
    assert all(fact in message for fact in facts), message


def test_a_config_is_read_from_a_dict_a_file_or_a_folder_without_what_the_tokenizer_decides(tmp_path):
    content = json.loads(str(TINY.config)) | {"vocab_size": 7, "pad_token_id": 3, "transformers_version": "5"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    for given in (content, str(tmp_path), str(tmp_path / "config.json"), json.dumps(content)):
        assert Config("tiny", given, "fp32") == TINY


NO_CONFIGURATION = {
    "model_type": {"hidden_size": 32}, "nowhere.json": "./nowhere.json", "JSON": "{not json",
    "auto_map": {"model_type": "llama", "auto_map": {"AutoModel": "code.Mine"}},
}  # fmt: skip


@pytest.mark.parametrize("fact", NO_CONFIGURATION)
def test_what_is_no_configuration_is_refused(fact):
    assert fact in refused(Config, "mine", NO_CONFIGURATION[fact], error=SpecError)


def test_keys_depend_on_the_configuration_and_not_on_its_name():
    known = Identities(data=lambda run: "text", hub=lambda hub: "")

    def key(config):
        run = Pretrain("r", start=config, corpus="builtin", stages=Stage(CLM(), 9), schedule=WSD(1e-3, 0, 0))
        return checkpoint_key(run, 9, known)

    assert key(TINY) == key(replace(TINY, name="other"))
    wider = replace(TINY, config=TINY.fields | {"intermediate_size": 64})
    assert key(TINY) != key(wider)


@pytest.mark.parametrize("name", CONFIGS)
def test_named_configurations_have_the_parameters_of_their_names(name):
    """Small ones are named by their blocks, published ones by all parameters, with a vocabulary of 50,368."""
    millions = {"base": 149e6, "large": 395e6, "1b": 1e9}  # as their papers say
    word = name.split("-")[1]
    shape = shape_of_config(CONFIGS[name], 50_368)
    counted = shape.blocks if word in ("1m", "8m", "30m") else shape.parameters
    expected = millions.get(word) or float(word[:-1]) * 1e6
    assert counted == pytest.approx(expected, rel=0.12 if word == "8m" else 0.05)
    assert shape.windowed == shape.layers - math.ceil(shape.layers / 3)


@pytest.mark.parametrize("vocab", [VOCAB, 48])  # 48 is a width too
@pytest.mark.parametrize("name", SHAPES)
def test_planned_parameters_are_those_of_the_model(name, vocab):
    shape = shape_of_config(SHAPES[name][0], vocab)
    model = new(SHAPES[name][0], vocab=vocab)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())


def test_flops_of_a_configuration_are_those_of_the_same_size_and_windows_save_some():
    size, length = SIZES["1m"], 1_024
    fields = {
        "model_type": "eurobert", "num_hidden_layers": size.layers, "hidden_size": size.hidden,
        "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "intermediate_size": size.ffn,
    }  # fmt: skip
    same = shape_of_config(Config("same", fields), 2_048)
    assert replace(same, context=None) == shape_of_size(size, 2_048)
    tiny = shape_of_config(TINY, VOCAB)
    assert (tiny.layers, tiny.windowed, tiny.window) == (4, 2, 2 * WINDOW - 1)
    for causal in (0.0, 1.0):
        windowed, full = (
            flops_per_token(shape, Rows(length), causal=causal, labelled=0.4)
            for shape in (tiny, replace(tiny, windowed=0))
        )
        saved = 3 * 4 * tiny.width * tiny.windowed * (length - tiny.window) * (1 - causal / 2)
        assert full - windowed == pytest.approx(saved)
