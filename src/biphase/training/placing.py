"""A model with its weights, brought to where it is trained: whole in each process, or cut over all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from biphase.models.adapters import freeze_embeddings
from biphase.models.backbone import LanguageModel
from biphase.specs import Pretrain
from biphase.training import optimizer
from biphase.training.devices import Ranks
from biphase.training.manner import Manner
from biphase.training.sharding import Sharded
from biphase.training.tensors import Rows


@dataclass(frozen=True)
class Placed:
    """What takes the steps."""

    path: str  # "fused", "compiled" or "plain"
    optimizer: torch.optim.AdamW
    sharded: Sharded | None
    parameters: list[nn.Parameter]  # that the optimizer has: whole ones, or this process's rows
    rows: dict[str, Rows]  # what this process has of every parameter, frozen ones included, under its name


def place(model: LanguageModel, run: Pretrain, ranks: Ranks, manner: Manner) -> Placed:
    """Bring `model` to its device, and choose how it is computed there."""
    if run.freeze == "embeddings":
        freeze_embeddings(model)
    model.train()
    if manner.sharding.kind != "none" and ranks.world > 1:
        # Compiled by blocks and on the host: each block comes to the device when it is cut, and only its rows stay.
        path = model.prepare(
            ranks.device, run.precision, compiled=manner.compiled, recompute=manner.recompute, cut=True
        )
        sharded = Sharded(model, manner.sharding, ranks, run.precision)
        learned = sharded.learned()
        adam = optimizer.build(model, run.optimizer, learned)
        return Placed(path, adam, sharded, list(learned.values()), sharded.rows())
    path = model.to(ranks.device).prepare(
        ranks.device, run.precision, compiled=manner.compiled, recompute=manner.recompute
    )
    # Frozen ones too: a run that goes on from this one may train them again, with the moments they had.
    rows = {name: Rows.all_of(one) for name, one in model.model.named_parameters()}
    learned = [one for one in model.model.parameters() if one.requires_grad]
    return Placed(path, optimizer.build(model, run.optimizer), None, learned, rows)
