"""The model of a saved state, as it is used from then on: evaluated, exported."""

from __future__ import annotations

from biphase.data.shards import Shards
from biphase.files import Store
from biphase.keys import acts, last_rope_base, origin_step
from biphase.metadata import read_state
from biphase.models.adapters import merge_adapter
from biphase.models.backbone import LanguageModel
from biphase.models.rope import set_rope_base
from biphase.specs import Pretrain
from biphase.training import checkpoint
from biphase.training.starting import starting_model


def model_of_state(run: Pretrain, state: str | None, store: Store, shards: Shards) -> LanguageModel:
    """The state of the run with that key, or its start where there is none: adapters merged, positions as trained."""
    model = starting_model(run, shards)
    step = 0
    if state is not None:
        taken = checkpoint.load_weights(store, state, model).step
        # A run's first state is the last one of the run it goes on from, which counts from its own beginning.
        began = read_state(store.states / state)["origin_step"]
        step = began + taken - origin_step(run)
    base = _rope_base(run, step)
    if base:
        set_rope_base(model.model, base)
    if run.adapter:
        merge_adapter(model)
    return model


def _rope_base(run: Pretrain, step: int) -> float:
    felt = [act.rope_base for act in acts(run) if act.first < step]
    if felt:
        return felt[-1]
    return last_rope_base(run.start) if isinstance(run.start, Pretrain) else 0.0
