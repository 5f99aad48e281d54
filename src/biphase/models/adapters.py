"""LoRA through peft: small matrices beside those of a trunk that stays as it is.

While such a run trains, its states hold the model with the matrices beside its own. Whoever uses or exports it gets
them merged: a plain model of its own class.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from biphase.errors import ModelError, one_line
from biphase.models.backbone import LanguageModel
from biphase.models.hub import merge_adapters
from biphase.randomness import salt
from biphase.specs import LoRA


def add_adapter(model: LanguageModel, spec: LoRA, *, seed: int) -> None:
    """Put the matrices in, drawn from the seed alone; everything else is frozen."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ModelError("LoRA needs the package peft; type: pip install peft") from None
    trunk: Any = model.model.base_model
    _refuse_unknown(trunk, spec)
    targets = list(spec.targets) or "all-linear"
    config = LoraConfig(r=spec.rank, lora_alpha=spec.alpha, target_modules=targets)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # GPT-2 keeps its matrices the other way round; peft sees it, and says so each time.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            torch.manual_seed(salt(seed, "adapter"))
            inject_adapter_in_model(config, trunk)
    except ValueError as wrong:
        raise ModelError(f"LoRA(targets={spec.targets}): {one_line(wrong)}") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _refuse_unknown(trunk: Any, spec: LoRA) -> None:
    """Each target must be a matrix: peft would pass over a wrong name beside a right one.

    An embedding is none: where it is the head as well, merging would change the head, which was not trained so.
    """
    matrices = [name for name, module in trunk.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    unknown = [one for one in spec.targets if not any(f".{name}".endswith(f".{one}") for name in matrices)]
    if unknown:
        known = sorted({name.rpartition(".")[2] for name in matrices})
        raise ModelError(
            f"LoRA(targets={spec.targets}): {type(trunk).__name__} has no matrix called {unknown[0]}; "
            f"it has {', '.join(known)}"
        )


def merge_adapter(model: LanguageModel) -> None:
    """Add the matrices to those they stand beside, and take them out."""
    trunk: Any = model.model.base_model
    merge_adapters(trunk)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def freeze_embeddings(model: LanguageModel) -> None:
    """Keep the embedding as it is; a head that is the same matrix stays with it."""
    embedding: Any = model.model.get_input_embeddings()
    assert isinstance(embedding, nn.Module)
    for parameter in embedding.parameters():
        parameter.requires_grad_(False)
