"""What the product promises: fine-tuning here takes the steps that transformers and torch take on padded batches."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    EuroBertConfig,
    EuroBertModel,
    ModernBertConfig,
    ModernBertModel,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_pt_utils import get_parameter_names

from biphase import CATALOG
from biphase.finetune.trial import FineTuner, build_optimizer, rows_of
from biphase.models.encoder import encoder_from_hub
from biphase.specs import AdamW, Finetune, Hub
from biphase.training.optimizer import linear_rate

STEPS, SEED, LR = 5, 3, 2e-3
SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert():
    return BertModel(BertConfig(**SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def eurobert():
    return EuroBertModel(
        EuroBertConfig(**SHAPE, **dict.fromkeys(ENDS), mask_token_id=3, num_key_value_heads=1)
    )


def modernbert():
    more = {"cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "global_attn_every_n_layers": 2}
    return ModernBertModel(ModernBertConfig(**SHAPE, **ENDS, **more))


class Padded(nn.Module):
    """The same model in plain words: a padded batch, a mask, a mean over the mask, two matrices."""

    def __init__(self, trunk, head):
        super().__init__()
        self.trunk, self.dense, self.out = trunk, head.dense, head.out

    def forward(self, ids, mask):
        hidden = self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.out(F.gelu(self.dense(mean)))


def padded(texts):
    mask = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    ids = torch.full_like(mask, 5)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.from_numpy(np.asarray(text, np.int64))
        mask[row, : len(text)] = 1
    return ids, mask


def as_transformers_does_it(model, family, optimizer):
    """Forward, cross-entropy, backward, clip, AdamW, linear schedule; the loss and the norm of each step."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], ["bias"]))  # as its Trainer did for the paper
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if (name in decayed) == decays], "weight_decay": decay}
        for decays, decay in ((True, optimizer.weight_decay), (False, 0.0))
    ]
    adam = torch.optim.AdamW(groups, lr=LR, betas=optimizer.betas, eps=optimizer.eps)
    schedule = get_linear_schedule_with_warmup(adam, math.ceil(0.1 * STEPS), STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        rows = rows_of(family, step, SEED)
        ids, mask = padded([family.ids["train"][row] for row in rows])
        loss = F.cross_entropy(model(ids, mask), torch.from_numpy(family.gold["train"][rows]))
        adam.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip).item())
        adam.step()
        schedule.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("make", [bert, eurobert, modernbert], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("tokens", "micro"),
    [(10_000, {1}), (100, range(3, 9)), (1, {12})],
    ids=["one micro-batch", "several", "a text each"],
)
def test_five_steps_are_those_of_transformers_on_padded_batches(
    make, tokens, micro, two_kinds, options, tmp_path
):
    torch.manual_seed(1)
    trunk = make()
    trunk.save_pretrained(tmp_path)
    family = two_kinds(train=40, steps=STEPS, batch=12)  # the fourth batch ends the epoch, with 4 examples
    spec = Finetune((CATALOG["sources-mini"],), optimizer=AdamW(weight_decay=0.3, clip=0.25), warmup=0.1)
    tuner = FineTuner(encoder_from_hub(Hub(str(tmp_path))), options(train_tokens=tokens))
    assert len(family.batch(rows_of(family, 0, SEED), tuner.options)) in micro

    head = tuner.fresh(family, SEED).head
    plain = Padded(trunk.train(), head)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    wanted, norms = as_transformers_does_it(plain, family, spec.optimizer)
    tuned, trained = tuner.finetune(family, spec, lr=LR, seed=SEED)

    assert trained.finished
    assert (trained.steps, trained.examples, trained.skipped) == (STEPS, 12 * 3 + 4 + 12, 0)
    assert list(trained.losses.values()) == pytest.approx(wanted, abs=1e-5)
    assert max(norms) > spec.optimizer.clip, "clipping must matter"
    theirs = {name.removeprefix("trunk."): value for name, value in plain.state_dict().items()}
    ours = {
        name.removeprefix("encoder.trunk.").removeprefix("head."): value
        for name, value in tuned.state_dict().items()
    }
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=2e-5, msg=name)
        moved = (theirs[name] - start.get(f"trunk.{name}", start.get(name))).abs().max()
        assert moved > 1e-4 or name.endswith("key.bias"), name  # which attention cannot feel


def test_weight_decay_spares_what_the_trainer_spares(two_kinds, options, tmp_path):
    """Biases and LayerNorms; the RMSNorms of the paper's model decayed."""
    for make in (bert, eurobert):
        make().save_pretrained(tmp_path)
        tuner = FineTuner(encoder_from_hub(Hub(str(tmp_path))), options())
        model = tuner.fresh(two_kinds(), 0)
        groups = build_optimizer(model, AdamW(weight_decay=0.3)).param_groups
        decays = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
        wanted = set(get_parameter_names(model, [nn.LayerNorm], ["bias"]))
        assert {name: decays[id(one)] for name, one in model.named_parameters()} == {
            name: 0.3 if name in wanted else 0.0 for name, _ in model.named_parameters()
        }
        if make is eurobert:
            assert "encoder.trunk.norm.weight" in wanted


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25, 0.999])
@pytest.mark.parametrize("steps", [1, 2, 7, 100, 439, 1_000])
def test_the_rate_of_each_step_is_that_of_transformers_linear_schedule(steps, warmup):
    weight = nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([weight], lr=5e-4)
    schedule = get_linear_schedule_with_warmup(sgd, math.ceil(warmup * steps), steps)
    for step in range(steps):
        assert linear_rate(step, steps, peak=5e-4, warmup=warmup) == pytest.approx(
            schedule.get_last_lr()[0], abs=1e-12
        )
        sgd.step()
        schedule.step()
