"""Backbones: the paper's shapes to the unit, weights a function of the seed, losses equal to transformers' own."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM

from biphase import SIZES
from biphase.attention import AttentionPattern
from biphase.data.stream import positions_of
from biphase.errors import ModelError
from biphase.models.backbone import LanguageModel, TokenizerInfo, from_hub, from_scratch
from biphase.objectives import Batch, Vocabulary, apply
from biphase.specs import CLM, MLM, Hub, Size

TINY = Size("t", 2, 32, 4, 2, 48, "fp32")
WORDS = Vocabulary.of(64, mask_id=3, special_ids=(0, 1))


@pytest.mark.parametrize(
    ("name", "trained"),
    [("210m", 310_266_624), ("610m", 755_625_600), ("1b", 1_409_482_944), ("2b", 2_403_092_736)],
)
def test_the_papers_models_have_their_parameters(name, trained):
    with torch.device("meta"):
        model = from_scratch(SIZES[name], vocab=128_256, mask_id=128_002, length=2048, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == trained


def test_weights_are_a_function_of_the_seed():
    one, same, other = (from_scratch(TINY, vocab=64, mask_id=3, length=16, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head, other.head)


def test_building_a_model_leaves_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    from_scratch(TINY, vocab=64, mask_id=3, length=16, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_matrices_are_drawn_with_the_papers_spread_and_norms_are_one():
    model = from_scratch(SIZES["1m"], vocab=512, mask_id=3, length=16, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert (parameter == 1).all(), name


def test_every_embedding_is_trained_even_the_end_tokens():
    model = from_scratch(TINY, vocab=64, mask_id=3, length=16, seed=0)
    assert model.model.base_model.embed_tokens.padding_idx is None


def test_head_and_embedding_are_shared_only_if_asked():
    untied = from_scratch(TINY, vocab=64, mask_id=3, length=16, seed=0)
    assert untied.head is not untied.model.get_input_embeddings().weight
    tied = from_scratch(Size("t", 2, 32, 4, 2, 48, "fp32", tied=True), vocab=64, mask_id=3, length=16, seed=0)
    assert tied.head is tied.model.get_input_embeddings().weight


def batch_of(objective):
    ids = torch.randint(4, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    asked = apply(objective, ids, None, torch.arange(3), seed=0, step=0, vocabulary=WORDS)
    flat = asked.labels.flatten()
    label_at = (flat >= 0).nonzero().flatten()
    dense = asked.labels
    batch = Batch(
        asked.ids,
        positions_of(None, 3, 16),
        None,
        None,
        label_at,
        flat[label_at],
        len(label_at),
        asked.causal,
        torch.arange(3),
    )
    return batch, dense


def test_the_masked_loss_and_its_gradients_equal_transformers_own():
    ours = from_scratch(TINY, vocab=64, mask_id=3, length=16, seed=0)
    batch, dense = batch_of(MLM(0.4))
    loss = ours.loss_sum(batch, AttentionPattern(False)) / batch.count
    grads = torch.autograd.grad(loss, list(ours.parameters()))
    ours.model.set_attn_implementation("sdpa")
    theirs = ours.model(input_ids=batch.ids, labels=dense).loss
    their_grads = torch.autograd.grad(theirs, list(ours.parameters()))
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    for one, two in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_the_causal_loss_and_its_gradients_equal_transformers_own():
    ours = from_scratch(TINY, vocab=64, mask_id=3, length=16, seed=0)
    batch, _ = batch_of(CLM())
    loss = ours.loss_sum(batch, AttentionPattern(True)) / batch.count
    grads = dict(
        zip(
            (n for n, _ in ours.named_parameters()),
            torch.autograd.grad(loss, list(ours.parameters())),
            strict=True,
        )
    )
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, rms_norm_eps=1e-5, **shape))
    llama.load_state_dict(ours.model.state_dict())
    theirs = llama(input_ids=batch.ids, labels=batch.ids).loss
    theirs.backward()
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    for name, parameter in llama.named_parameters():
        torch.testing.assert_close(grads[f"model.{name}"], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_local_decoder_loads_and_grows_a_mask_token(tmp_path):
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "decoder")
    model = from_hub(Hub(str(tmp_path / "decoder")), TokenizerInfo(61, mask=60), length=16)
    assert model.head.shape[0] == 61
    assert isinstance(model, LanguageModel)


SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def decoder(vocab=60, *, tied=False):
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab, **SHAPE, **NO_ENDS, num_key_value_heads=2, tie_word_embeddings=tied)
    )


def biased(vocab=60):
    return PhiForCausalLM(PhiConfig(vocab_size=vocab, **SHAPE, **NO_ENDS))


def bert(vocab=60):
    return BertForMaskedLM(BertConfig(vocab_size=vocab, **SHAPE))


def begun(make, words, folder, **more):
    """A folder with that model, and what a run starts with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)  # so that biases are not 0
    model.save_pretrained(folder)
    return model, from_hub(Hub(str(folder)), words, **{"length": 16} | more)


def ends(model):
    """The tables that have a row for each word: embedding, head, and the head's bias where there is one."""
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    bias = model.get_output_embeddings().bias
    return tables if bias is None else [*tables, bias]


GROWING = {"llama": decoder, "tied": lambda: decoder(tied=True), "phi": biased, "bert": bert}
GROW = pytest.mark.parametrize("make", GROWING.values(), ids=GROWING)


@GROW
def test_an_added_mask_is_the_mean_of_the_rows_that_were_there(make, tmp_path):
    model, started = begun(make, TokenizerInfo(61, mask=60), tmp_path)
    for before, after in zip(ends(model), ends(started.model), strict=True):
        assert len(after) == 61
        assert torch.equal(after[:60], before)
        assert torch.equal(after[60], before.mean(0))
    assert started.model.config.vocab_size == 61
    ids, places = torch.tensor([[5, 60, 7, 59]]), torch.arange(4)[None]
    assert started.logits(ids, places, AttentionPattern(False)).shape == (1, 4, 61)


@GROW
def test_a_slot_the_vocabulary_kept_free_is_the_mean_of_the_others(make, tmp_path):
    """Its row was never trained: whatever it holds is chance, and does not enter the mean."""
    model, started = begun(make, TokenizerInfo(60, mask=17), tmp_path)
    others = torch.arange(60) != 17
    for before, after in zip(ends(model), ends(started.model), strict=True):
        assert torch.equal(after[others], before[others])
        assert torch.equal(after[17], before[others].mean(0))


@GROW
def test_a_mask_among_padded_rows_leaves_the_size_as_it_is(make, tmp_path):
    """Tables are often a little larger than the tokenizer: the new token takes a row that is there."""
    model, started = begun(make, TokenizerInfo(55, mask=54), tmp_path)
    others = torch.arange(60) != 54
    for before, after in zip(ends(model), ends(started.model), strict=True):
        assert len(after) == 60
        assert torch.equal(after[others], before[others])
        assert torch.equal(after[54], before[others].mean(0))


@GROW
def test_a_mask_token_of_its_own_is_left_as_it_was_trained(make, tmp_path):
    model, started = begun(make, TokenizerInfo(60, mask=17, mask_is_new=False), tmp_path)
    for before, after in zip(ends(model), ends(started.model), strict=True):
        assert torch.equal(after, before)


@pytest.mark.parametrize("words", [TokenizerInfo(63, mask=62), TokenizerInfo(62, mask=17, mask_is_new=False)])
def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(words, tmp_path):
    with pytest.raises(ModelError, match="60 embeddings and its tokenizer 62") as refused:
        begun(decoder, words, tmp_path)
    assert "resize_token_embeddings(62)" in str(refused.value)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_head_that_is_the_embedding_stays_so_when_it_grows(tied, tmp_path):
    _, started = begun(lambda: decoder(tied=tied), TokenizerInfo(61, mask=60), tmp_path)
    embedding = started.model.get_input_embeddings().weight
    assert (started.head is embedding) == tied
    names = [name for name, _ in started.named_parameters()]
    assert ("model.lm_head.weight" in names) == (not tied)


def test_the_end_token_learns_also_where_it_pads(tmp_path):
    def padded():
        more = {"pad_token_id": 2, "bos_token_id": None, "eos_token_id": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=60, **SHAPE, **more))

    _, started = begun(padded, TokenizerInfo(61, mask=60), tmp_path)
    ids, places = torch.tensor([[5, 2, 7, 60]]), torch.arange(4)[None]
    started.hidden(ids, places, AttentionPattern(False)).sum().backward()
    assert started.model.get_input_embeddings().weight.grad[2].abs().sum() > 0


def test_rows_may_be_longer_than_a_model_was_made_for_only_where_its_rotary_base_changes(tmp_path):
    _, started = begun(decoder, TokenizerInfo(60, mask=59), tmp_path, length=128, stretched=True)
    assert started.model.config.max_position_embeddings == 128
    assert started.reader[0].context == 128
    with pytest.raises(ModelError, match="reads at most 64 tokens"):
        begun(decoder, TokenizerInfo(60, mask=59), tmp_path, length=128)
    with pytest.raises(ModelError, match="reads at most 64 tokens"):
        begun(bert, TokenizerInfo(60, mask=59), tmp_path / "learned", length=128, stretched=True)


def test_an_absent_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded"):
        from_hub(Hub(str(tmp_path)), TokenizerInfo(61, mask=60), length=16)


def test_weights_in_pickle_are_refused(tmp_path):
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    torch.save(LlamaForCausalLM(config).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        from_hub(Hub(str(tmp_path)), TokenizerInfo(60, mask=59), length=16)
