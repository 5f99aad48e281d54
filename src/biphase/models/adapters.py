"""LoRA adapters (peft) and frozen embeddings.

The checkpoints of a LoRA run contain the model with separate adapter matrices. When the model is evaluated or exported,
they are merged, which gives a plain model of its original class.
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
    """Add LoRA matrices, initialized from the seed, and freeze all other parameters."""
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
            # GPT-2 stores its matrices transposed; peft handles that and warns each time.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            torch.manual_seed(salt(seed, "adapter"))
            inject_adapter_in_model(config, trunk)
    except ValueError as wrong:
        raise ModelError(f"LoRA(targets={spec.targets}): {one_line(wrong)}") from None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def _refuse_unknown(trunk: Any, spec: LoRA) -> None:
    """Raise ModelError if a target is not the name of a matrix: peft ignores a wrong name beside a right one.

    Embeddings are not allowed: with a tied head, merging would also change the head, which was trained without it.
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
    """Merge the adapter matrices into the weights, and make all parameters trainable."""
    trunk: Any = model.model.base_model
    merge_adapters(trunk)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def freeze_embeddings(model: LanguageModel) -> None:
    """Freeze the embedding, and with it a tied head."""
    embedding: Any = model.model.get_input_embeddings()
    assert isinstance(embedding, nn.Module)
    for parameter in embedding.parameters():
        parameter.requires_grad_(False)
