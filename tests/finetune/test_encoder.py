"""The encoder under test: its tokenizer's template, its length, its attention pattern, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from biphase import CATALOG
from biphase.errors import ModelError, SpecError
from biphase.finetune.encoder import encoder_of_hub, packs
from biphase.specs import Finetune, Hub
from biphase.tasks.collection import Ragged
from biphase.tasks.encode import encode_texts

SPEECH = [
    "the old house sees a small boat",
    "every student paints the garden",
    "a b c [ ] < / > s S E P C L | _",
]
SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"]
CONTEXT = 100


def spec(protocol="standard", **fields):
    return Finetune((CATALOG["sources-mini"],), protocol=protocol, **fields)


def word_pieces(template=None):
    """A WordPiece vocabulary as BERT's, with a template around a text."""
    model = Model(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer(lowercase=False)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    model.train_from_iterator(SPEECH, trainer)
    if template:
        known = [(token, model.token_to_id(token)) for token in SPECIAL]
        model.post_processor = processors.TemplateProcessing(single=template, special_tokens=known)
    return model


def marks(template=None):
    """A Unigram vocabulary as XLM-R's, which holds "</s>" as a token like any other."""
    letters = [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz</>"]
    pieces = [("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), *letters]
    model = Model(models.Unigram(pieces, 2))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    model.add_special_tokens(["<s>", "</s>", "<unk>"])
    if template:
        known = [("<s>", 0), ("</s>", 1)]
        model.post_processor = processors.TemplateProcessing(single=template, special_tokens=known)
    return model


@pytest.fixture
def hub(tmp_path):
    """Makes a folder with a tiny model and a tokenizer."""

    def make(tokenizer, **named):
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(vocab_size=200, max_position_embeddings=CONTEXT, **shape)
        BertModel(config).save_pretrained(tmp_path)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(tmp_path)
        return Hub(str(tmp_path))

    return make


def ids(tokenization, text):
    return encode_texts(tokenization, [text])[0].tolist()


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("protocol", "template", "named", "around"),
    [
        ("standard", "[CLS] $A [SEP]", {}, (["[CLS]"], ["[SEP]"])),
        ("standard", "[CLS] $A", {"eos_token": "[SEP]"}, (["[CLS]"], ["[SEP]"])),
        ("standard", "[CLS] [MASK] $A [SEP] [SEP]", {}, (["[CLS]", "[MASK]"], ["[SEP]", "[SEP]"])),
        ("standard", None, {"eos_token": "[SEP]"}, ([], ["[SEP]"])),
        ("paper", "[CLS] $A", {"eos_token": "[SEP]"}, ([], ["[SEP]"])),
        ("paper", "[CLS] $A [SEP]", {}, (["[CLS]"], ["[SEP]"])),
    ],
)
def test_the_tokenizers_own_template_is_found_and_the_end_token_follows_where_it_has_no_end(
    hub, protocol, template, named, around
):
    tokenization = encoder_of_hub(hub(word_pieces(template), **named), spec(protocol)).tokenization
    sides = tokenization.before, tokenization.after
    assert tuple([tokenization.tokenizer.id_to_token(token) for token in side] for side in sides) == around


def test_a_text_is_read_as_transformers_own_tokenizer_reads_it_but_special_tokens_stay_text(hub):
    where = hub(word_pieces("[CLS] $A [SEP]"))
    theirs = PreTrainedTokenizerFast.from_pretrained(where.source)
    tokenization = encoder_of_hub(where, spec()).tokenization
    for text in (*SPEECH, "naïve ünknown 中", "x" * 30):
        assert ids(tokenization, text) == theirs(text)["input_ids"]
    read = ids(tokenization, "the [SEP] house [CLS][MASK]")
    assert (read[0], read[-1]) == (1, 2)
    assert not set(read[1:-1]) & {1, 2, 3, 4}


def test_a_tokenizer_with_more_words_than_the_model_has_embeddings_is_refused(hub):
    tokenizer = word_pieces("[CLS] $A [SEP]")
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<{number}>" for number in range(size, 200)])
    tokenizer.add_special_tokens(["<extra>"])
    assert encoder_of_hub(hub(tokenizer), spec()).tokenization.length, "no text gives a special token"
    tokenizer.add_tokens(["boathouse"])
    with pytest.raises(ModelError, match=r"200.*embeddings.*202"):
        encoder_of_hub(hub(tokenizer), spec())


@pytest.mark.parametrize("named", [{}, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}])
def test_special_tokens_in_the_vocabulary_stay_text_too(hub, named):
    plain = marks()
    plain.encode_special_tokens = True
    assert 1 in plain.encode("a</s>b").ids, "what would be read if nothing were done"
    tokenization = encoder_of_hub(hub(marks("<s> $A </s>"), **named), spec()).tokenization
    assert (tokenization.before, tokenization.after) == ((0,), (1,))
    read = ids(tokenization, "a</s>b <s>")
    assert not set(read[1:-1]) & {0, 1}
    assert read[1:-1] == [plain.token_to_id(one) for one in ("▁", *"a</s>b", "▁", *"<s>")]
    for text in ("the house", "x y the", "ü"):
        assert ids(tokenization, text)[1:-1] == plain.encode(text, add_special_tokens=False).ids


# ---------------------------------------------------------------- length


def test_the_longest_input_is_a_little_less_than_the_context_unless_said(hub):
    where = hub(word_pieces("[CLS] $A [SEP]"))
    path = f"{where.source}/tokenizer.json"
    saved = Model.from_file(path)
    saved.enable_truncation(5)  # saved with a tokenizer, both are switched off
    saved.enable_padding(length=12)
    saved.save(path)
    usual = encoder_of_hub(where, spec()).tokenization
    assert usual.length == 99
    assert len(ids(usual, "the")) == 3
    assert encoder_of_hub(where, spec()).tokenization.identity == usual.identity
    for length in (7, CONTEXT):
        tokenization = encoder_of_hub(where, spec(length=length)).tokenization
        assert len(ids(tokenization, "the house " * 80)) == tokenization.length == length
        assert tokenization.identity != usual.identity


@pytest.mark.parametrize(
    ("length", "facts"), [(CONTEXT + 1, r"Finetune\.length is 101.*say length=100"), (2, "no room")]
)
def test_a_length_beyond_the_context_or_without_room_for_text_is_refused(hub, length, facts):
    with pytest.raises(SpecError, match=facts):
        encoder_of_hub(hub(word_pieces("[CLS] $A [SEP]")), spec(length=length))


# ---------------------------------------------------------------- what is missing or odd


def test_a_tokenizer_that_cannot_read_a_plain_text_is_refused_in_one_line(hub):
    with pytest.raises(ModelError, match="tokenizer cannot") as refused:
        encoder_of_hub(hub(Model(models.WordLevel({"the": 0, "house": 1}))), spec())
    assert "\n" not in str(refused.value)


# ---------------------------------------------------------------- models trained here


TEXTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (9, 4, 12, 1)]


def hidden(encoder, texts, options):
    """The hidden states of each text, as fine-tuning packs them."""
    found = {}
    with torch.no_grad():
        for chosen, packed in packs(Ragged.from_lists(texts), np.arange(len(texts)), options, 10_000):
            states = encoder(packed.ids, packed.positions, packed.pattern).flatten(0, 1)[packed.at]
            for number, text in enumerate(chosen):
                found[int(text)] = states[packed.owner == number]
    return found


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_a_text_is_read_as_if_alone_and_a_later_token_is_seen_only_both_ways(encoder, options, causal):
    model, how = encoder().eval(), replace(options(), causal=causal)
    changed = [text.copy() for text in TEXTS]
    changed[2][7] = 200
    before, after = hidden(model, TEXTS, how), hidden(model, changed, how)
    for number, text in enumerate(TEXTS):
        assert torch.allclose(before[number], hidden(model, [text], how)[0], atol=1e-5)
        assert torch.equal(before[number], after[number]) == (number != 2), "no text sees another"
    moved = (before[2] - after[2]).abs().amax(-1) > 0
    assert moved[7:].all()
    assert moved[:7].any() != causal
