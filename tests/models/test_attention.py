"""Law 1: the mask is the model. One token is changed; outputs are compared exactly, on every path."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # this file is also run as a script
from families import tiny

from biphase.attention import CHANGES_THE_SCORES, AttentionPattern, attend, segment_mask
from biphase.errors import ModelError
from biphase.models.backbone import from_scratch, probe
from biphase.specs import Size

T = 24
HALVES = (slice(0, 10), slice(10, T))


def eurobert():
    return from_scratch(Size("t", 2, 32, 4, 2, 48, "fp32"), vocab=64, mask_id=3, length=T, seed=0)


def llama():
    return tiny.language_model("llama")


def qwen3():
    return tiny.language_model("qwen3")


FAMILIES = pytest.mark.parametrize("make", [eurobert, llama, qwen3], ids=lambda make: make.__name__)


def inputs():
    ids = torch.randint(4, 64, (2, T), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(T).expand(2, T)


@torch.no_grad()
def changed_positions(model, pattern, at):
    """Which positions of the first row change with token `at`."""
    ids, positions = inputs()
    changed = ids.clone()
    changed[0, at] = (changed[0, at] + 1) % 64
    before, after = (model.hidden(tokens, positions, pattern) for tokens in (ids, changed))
    assert torch.equal(before[1], after[1]), "another row changed"
    return (before[0] != after[0]).any(-1)


def segments():
    """Two chunks in the first row, three in the second."""
    first = (torch.arange(T) >= 10).long()
    second = (torch.arange(T) >= 5).long() + (torch.arange(T) >= 17).long()
    return torch.stack([first, second])


def masked(causal):
    return AttentionPattern(causal, mask=segment_mask(segments(), causal=causal))


@FAMILIES
def test_a_token_changes_what_may_see_it_and_nothing_else(make):
    """The same model turns both ways and back; within chunks and across whole rows."""
    model = make()
    for causal in (True, False, True):
        for pattern, apart in ((AttentionPattern(causal), False), (masked(causal), True)):
            for at in (4, 12, 15):
                expected = allowed_by(causal, None, apart)[0, :, at]
                assert torch.equal(changed_positions(model, pattern, at), expected)


@pytest.mark.parametrize(
    ("make", "family", "causal"),
    [
        (llama, "llama", True),
        (eurobert, "eurobert", False),
        (eurobert, "llama", True),  # EuroBERT's own class cannot be causal; with our attention it can
    ],
)
@torch.no_grad()
def test_hidden_states_equal_transformers(make, family, causal):
    ours = make()
    theirs = tiny.with_head(family, rms_norm_eps=ours.model.config.rms_norm_eps)
    theirs.config.rope_parameters = ours.model.config.rope_parameters
    theirs = type(theirs)(theirs.config).eval()
    theirs.load_state_dict(ours.model.state_dict())
    theirs.set_attn_implementation("sdpa")
    ids, positions = inputs()
    hidden = ours.hidden(ids, positions, AttentionPattern(causal))
    torch.testing.assert_close(hidden, theirs.model(input_ids=ids).last_hidden_state)


WINDOW = 5
MIXED = ["sliding_attention", "full_attention"]
WINDOWED = {
    "gemma3_text": {"layer_types": MIXED},
    "mistral": {},
    "qwen3": {"use_sliding_window": True, "layer_types": MIXED[::-1]},
}


@pytest.mark.parametrize("family", WINDOWED)
@torch.no_grad()
def test_windows_equal_transformers_and_end_at_the_boundaries_of_chunks(family):
    fields = WINDOWED[family] | {"sliding_window": WINDOW}
    ours = tiny.language_model(family, **fields)
    theirs = tiny.with_head(family, **fields).eval()
    theirs.set_attn_implementation("sdpa")
    probe(ours, vocab=64)
    ids, positions = inputs()

    def close(hidden, right):
        torch.testing.assert_close(hidden, right, rtol=1e-5, atol=1e-5)

    def theirs_of(ids):
        return theirs.base_model(input_ids=ids).last_hidden_state

    right = theirs_of(ids)
    close(ours.hidden(ids, positions, AttentionPattern(True)), right)
    restarted = torch.cat([torch.arange(10), torch.arange(T - 10)])[None]
    pattern = AttentionPattern(True, mask=segment_mask(segments()[:1], causal=True))
    each_alone = torch.cat([theirs_of(ids[:1, half]) for half in HALVES], 1)
    close(ours.hidden(ids[:1], restarted, pattern), each_alone)
    theirs.config.sliding_window = WINDOW + 1
    assert (theirs_of(ids) - right).abs().max() > 1e-3, "the window must matter"


def written_out(query, key, value, allowed, *, softcap=None, sinks=None, scaling=None):
    """One token of one head of one row at a time, in double precision; `allowed` is (B, T, T)."""
    rows, heads, length, width = query.shape
    query, key, value = (tensor.double() for tensor in (query, key, value))
    out = torch.zeros(rows, length, heads, width, dtype=torch.double)
    for row in range(rows):
        for head in range(heads):
            group = head * key.shape[1] // heads
            for at in range(length):
                seen = allowed[row, at].nonzero().flatten()
                scores = key[row, group, seen] @ query[row, head, at] * (scaling or width**-0.5)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                powers = scores.exp()
                total = powers.sum() + (0 if sinks is None else sinks[head].double().exp())
                out[row, at, head] = (powers / total) @ value[row, group, seen]
    return out.float()


def allowed_by(causal, window, apart):
    distance = torch.arange(T)[:, None] - torch.arange(T)[None, :]
    near = distance.abs() < window if window else torch.ones(T, T, dtype=torch.bool)
    if causal:
        near = near & (distance >= 0)
    return near & segment_mask(segments() if apart else torch.zeros(2, T), causal=False)[:, 0]


def pattern_by(causal, how):
    """The segments of both rows: as a mask, as the boundaries of one ragged sequence, or none."""
    boundaries = torch.tensor([0, 10, T, T + 5, T + 17, 2 * T, 2 * T, 2 * T], dtype=torch.int32)
    return {
        "mask": masked(causal),
        # padded with empty segments, as batches have them
        "boundaries": AttentionPattern(causal, boundaries, T),
        "whole": AttentionPattern(causal),
    }[how]


EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.tensor([-1.0, 0.0, 1.0, 2.5])},
    "both": {"softcap": 1.5, "s_aux": torch.tensor([-1.0, 0.0, 1.0, 2.5]), "scaling": 0.7},
}


# Plain attention by boundaries is a kernel of the GPU.
WRITTEN_OUT = [(extra, how) for extra in EXTRAS for how in ("mask", "whole")]
WRITTEN_OUT += [(extra, "boundaries") for extra in EXTRAS if extra != "plain"]
WINDOWS = [(None, True), (1, True), (4, True), (4, False), (3 * T, True)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both-ways"])
@pytest.mark.parametrize(("window", "windows"), WINDOWS)
@pytest.mark.parametrize(("extra", "how"), WRITTEN_OUT)
def test_windows_caps_and_sinks_are_those_of_the_written_out_attention(extra, how, window, windows, causal):
    """A window counts the token itself, to both sides if attention is bidirectional; `windows=False` opens those."""
    more, generator = EXTRAS[extra], torch.Generator().manual_seed(0)
    query = 3 * torch.randn(2, 4, T, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, T, 8, generator=generator)
    pattern = replace(pattern_by(causal, how), windows=windows)
    out, _ = attend(nn.Module(), query, key, value, None, pattern=pattern, sliding_window=window, **more)
    allowed = allowed_by(causal, window if causal or windows else None, apart=how != "whole")
    named = {"sinks" if name == "s_aux" else name: setting for name, setting in more.items()}
    right = written_out(query, key, value, allowed, **named)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("windows", [True, False], ids=["symmetric", "opened"])
def test_a_language_model_keeps_or_opens_the_windows_of_its_layers(windows):
    """Two layers of windows reach eight tokens; opened, they reach everything, but never the future of a causal text."""
    model = tiny.language_model("mistral", windows=windows, sliding_window=WINDOW)
    reach = 2 * (WINDOW - 1)
    moved = changed_positions(model, AttentionPattern(False), at=0)
    assert moved[: reach + 1].all()
    assert moved[reach + 1 :].all() == moved[reach + 1 :].any() == (not windows)
    assert not changed_positions(model, AttentionPattern(True), at=0)[reach + 1 :].any()


@pytest.mark.parametrize("name", CHANGES_THE_SCORES)
@pytest.mark.parametrize("value", [50.0, torch.ones(3, 3)], ids=["number", "matrix"])
def test_an_argument_that_changes_the_scores_is_refused(name, value):
    query = torch.randn(1, 2, T, 8)
    with pytest.raises(ModelError, match=f"{name}=") as refused:
        attend(nn.Module(), query, query, query, None, pattern=AttentionPattern(False), **{name: value})
    assert "\n" not in str(refused.value)


def test_the_mask_alone_is_right():
    mask = segment_mask(torch.tensor([[0, 0, 1]]), causal=True)[0, 0]
    assert mask.tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def compiled_law():
    """Compiled graphs must not bake in a direction or a boundary."""
    model = eurobert()
    model.compile_trunk()
    plain = eurobert()
    ids, positions = inputs()
    for _ in range(2):
        for pattern in (AttentionPattern(True), AttentionPattern(False), masked(True), masked(False)):
            with torch.no_grad():
                torch.testing.assert_close(
                    model.hidden(ids, positions, pattern),
                    plain.hidden(ids, positions, pattern),
                    rtol=1e-4,
                    atol=1e-5,
                )
        assert not changed_positions(model, AttentionPattern(True), at=12)[:12].any()
        assert changed_positions(model, AttentionPattern(False), at=12).all()
        assert not changed_positions(model, masked(False), at=15)[:10].any()
        moved = AttentionPattern(
            False, mask=segment_mask((torch.arange(T) >= 18).long().expand(2, T), causal=False)
        )
        late = changed_positions(model, moved, at=20)
        assert not late[:18].any()
        assert late[18:].all()


@pytest.mark.campaign
def test_one_compiled_model_stays_lawful_across_clm_mlm_clm():
    """In a process of its own: the compiler brings setuptools, which does not go with what other tests import."""
    code = f"import runpy; runpy.run_path({__file__!r})['compiled_law']()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
