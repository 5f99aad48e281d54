"""What an exported folder holds: the class a model is written as, its tokenizer, ONNX, and what old versions refuse."""

import json
import subprocess
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path

import numpy as np
import pytest
import torch
from common import python_with
from families import tiny
from families.build import Family, build
from families.checks import check_plain_transformers, check_start
from safetensors import safe_open
from tokenizers import AddedToken
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from biphase.data.tokenizer import Special, Tokenizer, load_saved
from biphase.errors import ModelError
from biphase.export import writing
from biphase.export.card import trial_for_task
from biphase.export.checkpoint import export_checkpoint, write_encoder
from biphase.export.folder import find
from biphase.export.tuned import export_tuned
from biphase.export.writing import LEAST, Readback, WrittenForm, ours, recorded_texts

VOCAB = 320
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}


def untrained(family, *, windows=True, by=0.15, **fields):
    """A model in which every weight matters, with our attention."""
    pad = {} if family == "gpt2" else {"pad_token_id": 2}
    model = tiny.with_head(family, **TOKENS | pad | fields)
    return tiny.ours(tiny.stirred(model, by) if by else model, windows=windows)


@pytest.fixture(scope="session")
def tokenizer(shards):
    return writing.tokenizer_of(load_saved(shards / "tokenizer"), bos=False, context=60)


def config_in(folder):
    return json.loads((folder / "config.json").read_text())


def refused(call, *args, error=ModelError, **options):
    """The message of a refusal, which is one line."""
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- class


FACTORS = {
    "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.4, "logits_scaling": 2.5,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 12, "tie_word_embeddings": True}),
        ("granite", FACTORS),
        ("gemma", {"head_dim": 12}),  # 1 + weight in norms, scaled embeddings
        ("ernie4_5", {"use_bias": True}),  # interleaved rotary pairs
        ("smollm3", {"no_rope_layers": [1, 1]}),
    ],
)
def test_a_llama_in_any_notation_becomes_eurobert(family, fields, tokenizer, tmp_path):
    model = untrained(family, **fields)
    written = write_encoder(model, tokenizer, tmp_path)
    assert (written.architecture, written.native, written.edits) == ("EuroBertForMaskedLM", True, {})
    check_plain_transformers(model, tmp_path)
    check_plain_transformers(model, tmp_path, attn_implementation="eager")
    check_start(model, tmp_path, VOCAB, 1)


PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
        ("smollm3", {"no_rope_layers": [0, 0, 0, 0]}),
        ("glm", {"head_dim": 8}),  # half of each head is rotated
        ("phi3", PARTIAL),
    ],
)
def test_a_difference_that_weak_weights_hide_is_found(family, fields, tokenizer, tmp_path):
    """As initialized, attention is so even that positions hardly show in the outputs."""
    weak = {"num_hidden_layers": 4, "initializer_range": 1e-3, "by": 0}
    model = untrained(family, **weak, **fields)
    written = write_encoder(model, tokenizer, tmp_path)
    assert (written.architecture, written.native) == (type(model.model).__name__, False)
    assert written.edits == {"is_causal": False, "use_cache": False}
    assert not (tmp_path / "generation_config.json").exists()
    with pytest.raises(ValueError, match="AutoModelForMaskedLM"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def weights_format(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.metadata()["format"]


AS_DECODER = TOKENS | {"max_position_embeddings": 67, "is_decoder": True, "pad_token_id": 2}


@pytest.mark.parametrize(
    ("family", "fields", "decoder"),
    [
        ("bert", {}, False),
        ("roberta", AS_DECODER, True),  # a decoder whose family has a masked class gets it
        ("modernbert", {"local_attention": 12, "cls_token_id": 0, "sep_token_id": 0}, False),
    ],
)
def test_encoders_keep_their_class_and_decoders_of_their_family_get_it(
    family, fields, decoder, tokenizer, tmp_path
):
    if decoder:
        causal = AutoModelForCausalLM.from_config(tiny.config(family, **fields))
        model = tiny.ours(tiny.stirred(causal, 0.15))
    else:
        model = untrained(family, **fields)
    written = write_encoder(model, tokenizer, tmp_path)
    assert written.architecture.lower() == f"{family}formaskedlm"
    assert (written.native, written.edits) == (False, {})
    check_plain_transformers(model, tmp_path)
    old = family != "modernbert"  # whose rope base transformers 4 looks for in another field
    assert (weights_format(tmp_path) == "pt", written.needs == "") == (old, old)


def test_gpt2_reads_both_ways_by_its_configuration(tokenizer, tmp_path):
    model = untrained("gpt2")
    written = write_encoder(model, tokenizer, tmp_path)
    assert written.edits["is_causal"] is False
    check_plain_transformers(model, tmp_path)
    assert f"transformers>={LEAST}" in weights_format(tmp_path)  # which transformers 4 refuses
    assert LEAST in written.needs
    (declared,) = (line for line in requires("biphase") if line.startswith("transformers"))
    assert f">={LEAST}" in declared


# ---------------------------------------------------------------- windows


def test_a_window_to_both_sides_reaches_as_far_as_it_was_trained_to(tokenizer, tmp_path):
    model = untrained("mistral", sliding_window=6)
    assert write_encoder(model, tokenizer, tmp_path).architecture == "MistralForCausalLM"
    # transformers counts a bidirectional window without the token itself.
    assert config_in(tmp_path)["sliding_window"] == 5
    check_plain_transformers(model, tmp_path)
    check_start(model, tmp_path, VOCAB, 1, causal=(False,))
    (tmp_path / "config.json").write_text(json.dumps(config_in(tmp_path) | {"sliding_window": 6}))
    with pytest.raises(AssertionError, match="hidden states"):
        check_plain_transformers(model, tmp_path)


@pytest.mark.parametrize(("family", "native"), [("mistral", True), ("cohere2", False)])
def test_opened_windows_stay_open(family, native, tokenizer, tmp_path):
    model = untrained(family, windows=False, sliding_window=6)
    assert write_encoder(model, tokenizer, tmp_path).native is native  # without windows Mistral is a Llama
    check_plain_transformers(model, tmp_path)


# ---------------------------------------------------------------- verification


def test_a_model_that_differs_is_refused_and_leaves_nothing(tokenizer, tmp_path):
    model = untrained("llama")
    texts = tuple(recorded_texts(tokenizer, model.model.config).values())
    hidden = Readback(AutoModel, texts, ours(model.encoder, texts))
    wrong = tuple(numbers + 1 for numbers in ours(model.logits, texts))
    logits = Readback(AutoModelForCausalLM, texts, wrong, ("logits",))
    for form in (  # causal as it came; a head that means something else
        WrittenForm(model.model, (hidden,)),
        WrittenForm(model.model, (hidden, logits), ({"is_causal": False},)),
    ):
        message = refused(writing.write_model, tmp_path, [form], tokenizer, title="Llama")
        assert "LlamaForCausalLM" in message
        assert "differs" in message
        assert not list(tmp_path.iterdir())


def test_the_deviation_is_that_of_the_worst_token():
    texts = (np.array([5]), np.array([5, 6, 7]))
    right = Readback(AutoModel, texts, (torch.ones(1, 4), torch.ones(3, 4)))

    def wrong(at, by, *, padded):
        def run(ids, mask):
            numbers = np.ones((*ids.shape, 4), np.float32)
            assert (mask is None) == (len(ids) == 1)
            if len(ids) > 1:
                numbers[0, 1:] = np.nan  # padding does not count
            if padded == (len(ids) > 1) and ids.shape[1] == 3:
                numbers[-1, at] += by
            return numbers

        return run

    for padded in (True, False):  # a model may err in one of them only
        assert writing.deviation(right, wrong(2, 0.0, padded=padded), pad=0) == 0
        assert writing.deviation(right, wrong(2, 0.5, padded=padded), pad=0) == pytest.approx(0.5)
        assert writing.deviation(right, wrong(1, np.nan, padded=padded), pad=0) == float("inf")
    assert writing.TOLERANCE < 1e-3


# ---------------------------------------------------------------- tokenizer


BOS = 320


@pytest.fixture
def saved(shards):
    """The tokenizer of the tiny corpus, with a begin token whose name means something in a template."""
    loaded = load_saved(shards / "tokenizer")
    loaded.model.add_special_tokens([AddedToken("$A:1 <bos>", normalized=False, special=True)])
    special = loaded.special
    ids = (*special.ids, BOS)
    return Tokenizer(loaded.model, Special(special.eos, special.mask, special.pad, BOS, ids, "own"), BOS + 1)


def written_tokenizer(saved, folder, *, rule="own", **options):
    with_rule = replace(saved, special=replace(saved.special, mask_rule=rule))
    tokenizer = writing.tokenizer_of(with_rule, **{"bos": False, "context": 16} | options)
    writing.write_tokenizer(tokenizer, folder)
    return tokenizer


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_gets_the_special_tokens_of_training(bos, saved, tmp_path):
    written_tokenizer(saved, tmp_path, bos=bos)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    eos = saved.special.eos
    for text in writing.TEXTS:
        inner = saved.model.encode(text, add_special_tokens=False).ids
        assert loaded(text)["input_ids"] == [*([BOS] if bos else []), *inner, eos]
    assert loaded.bos_token == "$A:1 <bos>"
    truncated = loaded("the cat sees the river. " * 9, truncation=True)["input_ids"]
    assert (len(truncated), truncated[-1]) == (16, eos)
    pair = loaded("the cat", "the river")
    assert pair["input_ids"].count(eos) == 2
    assert "token_type_ids" not in pair
    assert saved.special.mask in loaded("the <|mask|>")["input_ids"]  # special tokens may be spelled there
    back = load_saved(tmp_path)
    assert (back.special, back.vocab) == (saved.special, saved.vocab)


@pytest.mark.parametrize("rule", ["own", "added"])
def test_a_mask_of_ours_takes_the_space_before_it(rule, saved, tmp_path):
    tokenizer = written_tokenizer(saved, tmp_path, rule=rule, trained_here=rule == "own")
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    before, masked, after = (
        loaded(text, add_special_tokens=False)["input_ids"]
        for text in ("the cat", "the cat <|mask|> the river", " the river")
    )
    assert masked == [*before, saved.special.mask, *after]
    assert loaded("the cat <|mask|>")["input_ids"] == tokenizer.ids("the cat", mask=True)


# ---------------------------------------------------------------- ONNX


BATCH = [
    "the cat sees the river",
    "a dog",
    "every student paints its own shadow. the old house likes two birds",
]


@pytest.fixture(scope="module")
def with_graph(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph") / "out"
    checkpoint = find(trained.results["masked"], trained.store)
    exported = export_checkpoint(checkpoint, trained.store, folder, onnx=True, say=lambda text: None)
    assert "ONNX" in exported.describe()
    return folder


def graph_of(folder):
    import onnxruntime

    return onnxruntime.InferenceSession(folder / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])


def compare_graph(folder, model, output, texts):
    inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="np")
    theirs = graph_of(folder).run([output], dict(inputs))[0]
    with torch.no_grad():
        right = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})[output].numpy()
    real = inputs["attention_mask"].astype(bool) if right.ndim == 3 else np.ones(len(right), bool)
    assert np.allclose(theirs[real], right[real], atol=1e-5)


def test_onnxruntime_gives_the_hidden_states(with_graph):
    session = graph_of(with_graph)
    assert [tensor.name for tensor in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert session.get_inputs()[0].shape == ["batch", "length"]
    assert [tensor.name for tensor in session.get_outputs()] == ["last_hidden_state"]
    for texts in (BATCH[:1], BATCH[1:2], BATCH, BATCH * 3):
        compare_graph(with_graph, AutoModel.from_pretrained(with_graph), "last_hidden_state", texts)
    card = (with_graph / "README.md").read_text()
    assert "onnxruntime.InferenceSession" in card
    assert "- onnx\n" in card.split("---")[1]


@pytest.mark.campaign
def test_a_classifier_has_a_graph_of_its_logits(trained, tmp_path):
    from transformers import AutoModelForSequenceClassification

    trial = trial_for_task(trained.results["masked"], "kinds", trained.store)
    export_tuned(trial, trained.store, tmp_path / "out", onnx=True, say=lambda text: None)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    compare_graph(tmp_path / "out", model, "logits", BATCH)


# ---------------------------------------------------------------- transformers 4
# The old version is installed once, with pip, into an environment of its own below ~/.cache; torch is that of the tests.
# Where it cannot be installed the test fails: nothing else shows that old versions do not read an encoder as a decoder.


OLD = "4.57.6"
DECODERS = ("qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "gpt2", "gpt_neox", "olmo2", "llama")
ENCODERS = ("bert", "roberta", "modernbert")

# For each folder: why it was refused, or its hidden states of two texts that differ in the last token.
LOOK = """
import json, sys, torch, transformers
assert transformers.__version__ == sys.argv[1], transformers.__version__
results = {}
for folder in sys.argv[2:]:
    try:
        model = transformers.AutoModel.from_pretrained(folder).eval()
    except Exception as wrong:
        results[folder] = f"{type(wrong).__name__}: {wrong}"
        continue
    with torch.no_grad():
        results[folder] = model(torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])).last_hidden_state.tolist()
print(json.dumps(results))
"""


@pytest.fixture(scope="session")
def old_python():
    """A Python that imports the old transformers, and everything else from this environment."""
    return python_with(f"transformers=={OLD}")


@pytest.mark.campaign
def test_transformers_4_refuses_what_it_would_read_causally(old_python, tokenizer, tmp_path):
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    right, written = {}, {}
    for family in (*map(Family, DECODERS), *(Family(name, masked=True) for name in ENCODERS)):
        model = build(family)
        folder = tmp_path / family.model_type
        folder.mkdir()
        written[str(folder)] = write_encoder(tiny.ours(model), tokenizer, folder)
        model.set_attn_implementation("eager")
        right[str(folder)] = model.base_model(ids)[0] if family.masked else None
    command = [old_python, "-c", LOOK, OLD, *written]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for folder, result in json.loads(done.stdout.splitlines()[-1]).items():
        if written[folder].needs:
            assert isinstance(result, str), f"{folder} is read, and should not be"
            assert f"transformers>={LEAST}" in result or "eurobert" in result, result
        else:  # an encoder whose configuration the old version knows
            assert torch.allclose(torch.tensor(result), right[folder], atol=1e-4), folder
    assert [Path(folder).name for folder in written if not written[folder].needs] == ["bert", "roberta"]
    assert sum(export.marked for export in written.values()) >= 8
