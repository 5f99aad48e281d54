"""Backbones are transformers' own classes; the attention, the loss and the direction are ours.

`LanguageModel` is a thin view of such a model: the trunk gives hidden states, the head runs on labelled positions
only. The same weights serve causal and masked training, import and export.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EuroBertConfig, EuroBertForMaskedLM

from biphase.batch import Batch
from biphase.errors import ModelError, one_line
from biphase.loss import cross_entropy_sum
from biphase.models import hub as hub_models
from biphase.models.attention import NAME, Sight
from biphase.models.encoder import Encoder, context_of, refuse_own_attention
from biphase.models.fused.weights import Joined
from biphase.models.hub_tokenizer import refuse_larger
from biphase.models.layers import recompute_layers, stack_of
from biphase.models.output import Output
from biphase.models.probe import probe_own, probe_sight
from biphase.models.rope import rope_base_of
from biphase.randomness import salt
from biphase.slices import words_of_a_row
from biphase.specs import Hub, Size


class LanguageModel(nn.Module):
    """A transformers model as trunk and head."""

    def __init__(self, model: Any, *, windows: bool = True) -> None:
        super().__init__()
        self.model = model
        # In a list: a second name for the same weights, not a second module.
        self.reader = [Encoder(model.base_model, context=context_of(model.base_model), windows=windows)]
        self.output = Output(model)
        self.head_copy: Joined | None = None  # of the last matrix in 16 bits, where it is kept
        self.note = ""  # for whoever trains it

    @property
    def head(self) -> Tensor:
        return self.output.weight

    def compile_trunk(self, *, by_block: bool = False) -> None:
        """Compile the layers. Shapes are fixed by the data: one graph per direction, each with and without gradients."""
        # All models of a process share dynamo's limit of graphs per function, and graphs are used again by the next
        # model of the same shape. Past the limit compiled code would silently become eager: so raise it, and say so.
        dynamo: Any = torch._dynamo.config
        dynamo.recompile_limit = 64
        dynamo.fail_on_recompile_limit_hit = True
        if by_block:  # between blocks weights come and go
            for block in stack_of(self.model.base_model)[1]:
                block.compile(dynamic=False)
        else:
            self.reader[0].call = [torch.compile(self.model.base_model, dynamic=False)]

    def prepare(
        self,
        device: torch.device,
        precision: str,
        *,
        compiled: bool | None = None,
        cut: bool = False,
        recompute: bool = False,
    ) -> str:
        """Choose how to compute on `device`, once the weights are there.

        "fused" on a GPU in 16 or 8 bits where the family is known; else "compiled" on a GPU; else "plain". `compiled` asks
        for the compiler, or forbids it. Weights that are `cut` over processes, and layers that `recompute` what they need
        again, leave out the first.
        """
        self.head_copy = None
        in_eight = precision == "fp8"  # which the compiler does not know how to do
        if in_eight and (cut or recompute):
            raise ModelError(
                f"precision='fp8' cannot be had with --{'shard' if cut else 'recompute'}; leave that out, or say precision='bf16'"
            )
        suits = not (cut or recompute or compiled)
        if (in_eight or suits) and self.reader[0].prepare(device, precision) == "fused":
            fused = self.reader[0].fused
            assert fused is not None
            weight = self.model.get_output_embeddings().weight
            words = words_of_a_row(len(weight), device.type)
            self.head_copy = Joined(weight, dtype=fused.dtype, rows=words)
            fused.watch(self.head_copy)
            return "fused"
        by_compiler = compiled or (compiled is None and device.type == "cuda")
        if recompute:
            recompute_layers(self.reader[0], compiled=by_compiler)
        if by_compiler:
            self.compile_trunk(by_block=cut)
            return "compiled"
        return "plain"

    def copies(self) -> dict[int, Tensor]:
        """Copies of its weights in 16 bits, by the address of the weight."""
        return self.reader[0].copies()

    def refresh(self, copied: bool = False) -> None:
        """The weights have changed: make anew what was made of them; their 16-bit copies unless `copied` already."""
        self.reader[0].refresh(copied)

    def _apply(self, *args: Any, **kwargs: Any) -> LanguageModel:
        """Moved or cast: copies of the weights are no longer theirs."""
        self.reader[0].fused = self.head_copy = None
        return super()._apply(*args, **kwargs)

    def hidden(self, ids: Tensor, positions: Tensor, sight: Sight) -> Tensor:
        """(B, T) → (B, T, d)"""
        return self.reader[0](ids, positions, sight)

    def logits(self, ids: Tensor, positions: Tensor, sight: Sight) -> Tensor:
        """(B, T) → (B, T, V)"""
        hidden = self.hidden(ids, positions, sight)
        return self.output.logits(hidden.flatten(0, 1)).view(*ids.shape, -1)

    def forward(
        self, ids: Tensor, positions: Tensor, sight: Sight, label_at: Tensor, labels: Tensor
    ) -> Tensor:
        """The sum of the losses at the labelled positions."""
        output, fused = self.output, self.reader[0].fused
        if fused is None or self.head_copy is None:
            rows, head = self.hidden(ids, positions, sight).flatten(0, 1)[label_at], None
        else:
            rows, head = fused(ids, positions, sight, only=label_at), self.head_copy.whole
        return cross_entropy_sum(
            output.rows(rows), output.weight, labels, bias=output.bias, cap=output.cap, head=head
        )

    def loss_sum(self, batch: Batch, sight: Sight) -> Tensor:
        return self(batch.ids, batch.positions, sight, batch.label_at, batch.labels)


def from_scratch(size: Size, *, vocab: int, mask_id: int, length: int, seed: int) -> LanguageModel:
    """A new model of `size`, its weights a function of the seed alone (drawn on the CPU, in fp32)."""
    config = EuroBertConfig(
        vocab_size=vocab,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=length,
        initializer_range=size.init_std,
        rms_norm_eps=size.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_base},
        tie_word_embeddings=size.tied,
        # With a pad token, torch would freeze its embedding at zero, and the paper's pad token is the end token.
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        mask_token_id=mask_id,
    )
    config._attn_implementation = NAME
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(salt(seed, "weights"))
        return LanguageModel(EuroBertForMaskedLM(config).float())


@dataclass(frozen=True)
class Words:
    """What a model must know of the tokenizer it is trained with."""

    vocab: int
    mask: int
    mask_is_new: bool = True  # no text the model has read had this token
    spare: frozenset[int] = frozenset()  # special tokens that no text has


def from_hub(hub: Hub, words: Words | None, *, length: int, stretched: bool = False) -> LanguageModel:
    """An existing model, in fp32, with our attention. A mask token it has never read gets the mean embedding.

    `words`: of the tokenizer it is trained with; None leaves its vocabulary as it is. `stretched`: the base of its
    rotary positions changes, so rows may be longer than it was made for.
    """
    made = hub_models.language_model(hub)
    # A pad token's embedding would get no gradient, and the pad token is often the end token.
    made.get_input_embeddings().padding_idx = None
    refuse_own_attention(made.base_model, hub.source)
    longest = context_of(made.base_model)
    if length > longest and stretched and rope_base_of(made):
        made.config.max_position_embeddings = length
    elif length > longest:
        raise ModelError(
            f"{hub.source} reads at most {longest:,} tokens, rows have {length:,}; say packing=Chunks({longest}) "
            f"(adapt --length {longest}), or change its positions: Stage(…, rope_base=…) (adapt --rope-base …)"
        )
    try:
        if words is not None:
            rows = made.get_input_embeddings().weight.shape[0]
            refuse_larger(words.vocab, words.spare | {words.mask}, rows, hub.source)
            _grow(made, words)
        return LanguageModel(made, windows=hub.windows == "symmetric")
    except ModelError:
        raise
    except Exception as wrong:  # a head made for other purposes fails in its own way
        raise ModelError(
            f"{hub.source} ({type(made).__name__}) cannot be trained here ({one_line(wrong)}); give another model"
        ) from None


def _grow(model: Any, words: Words) -> None:
    """Make room for added tokens; each row that is new is the exact mean of those that were there before.

    No chance, so every process agrees. A mask token in a slot that the vocabulary kept free is new, too.
    """
    had = model.get_input_embeddings().weight.shape[0]
    before = {name: len(table) for name, table in model.named_parameters() if table.ndim}
    if words.vocab > had:
        model.resize_token_embeddings(words.vocab, mean_resizing=False)
    new = list(range(had, words.vocab))
    if words.mask_is_new and words.mask < had:
        new.append(words.mask)
    if not new:
        return
    head = model.get_output_embeddings()
    ends = [model.get_input_embeddings().weight, getattr(head, "weight", None), getattr(head, "bias", None)]
    # A family may have more tables of words than these, and lets them grow by itself.
    grown = [one for name, one in model.named_parameters() if one.ndim and len(one) != before.get(name)]
    old = torch.ones(max(had, words.vocab), dtype=torch.bool)
    old[new] = False
    with torch.no_grad():
        tables = {id(one): one for one in (*ends, *grown) if one is not None and len(one) == len(old)}
        for table in tables.values():
            table[~old] = table[old].mean(0)


@torch.no_grad()
def probe(model: LanguageModel, *, vocab: int) -> None:
    """Refuse a model that cannot be causal, bidirectional and segment-blind by argument, or is not what its class is."""
    was_training = model.training
    model.eval()
    about: dict[str, Any] = {"vocab": vocab, "name": type(model.model).__name__, "device": model.head.device}
    try:
        probe_sight(model.hidden, **about, causal=True)
        probe_own(model.model, model.logits, **about)
    finally:
        model.train(was_training)
