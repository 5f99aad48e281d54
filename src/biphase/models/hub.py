"""Models from the hub or a folder, as transformers' own classes with our attention. No remote code, no pickle.

No architecture is named here: which class loads a model is what its configuration says, and what it may do is found by
looking (`refuse_unsuited`) and by probes that run before any training.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    EuroBertForMaskedLM,
    EuroBertModel,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import find_adapter_config_file, is_peft_available

from biphase.errors import ModelError, no_safetensors, one_line
from biphase.models import published
from biphase.models.attention import NAME, without_attention_dropout
from biphase.models.silence import quietly
from biphase.models.windows import as_decoder
from biphase.specs import Hub

_EXPERTS = re.compile(r"(num|n)_\w*experts|moe_num_experts")
_ATTENTION = re.compile(r"attention$")
_SWITCHES = ("is_moe", "enable_moe_block")  # with which some families say that they have no experts after all
_LINEAR = re.compile("linear|compressed")
_KINDS = ("layer_types", "layers_block_type")


def language_model(hub: Hub) -> Any:
    """A model with its head, in fp32."""
    if (own := _published(hub)) is not None:
        config, weights = own
        if "lm_head.weight" not in weights:
            raise ModelError(f"{hub.source} has no head, so it can be evaluated but not trained further")
        return _filled(EuroBertForMaskedLM, config, weights)
    config = _config(hub)
    refuse_unsuited(config, hub.source)
    masked = _masked(config)
    family = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    if type(config) not in (MODEL_FOR_MASKED_LM_MAPPING if masked else MODEL_FOR_CAUSAL_LM_MAPPING):
        raise ModelError(
            f"{hub.source} ({config.model_type}) has no language-model head; give a decoder or an encoder"
        )
    return _loaded(hub, family, config)


def trunk(hub: Hub) -> Any:
    """A model without its head, in fp32."""
    if (own := _published(hub)) is not None:
        config, weights = own
        inner = {
            name.removeprefix("model."): one for name, one in weights.items() if name.startswith("model.")
        }
        return _filled(EuroBertModel, config, inner)
    config = _config(hub)
    refuse_unsuited(config, hub.source)
    return _loaded(hub, AutoModel, config)


def refuse_unsuited(config: Any, source: str) -> None:
    """What a configuration says that no probe need find out."""
    said = _said(config)
    if said.get("is_encoder_decoder"):
        raise ModelError(f"{source} is an encoder and a decoder; give a model that is one of them")
    if isinstance(getattr(config, "text_config", None), PretrainedConfig):
        raise ModelError(f"{source} reads more than text; give the folder of its text model alone")
    experts = [name for name, value in said.items() if _EXPERTS.fullmatch(name) and _above_one(value)]
    if experts and not any(said.get(name) is False for name in _SWITCHES):
        raise ModelError(
            f"{source} is a mixture of experts ({experts[0]}={said[experts[0]]}), whose routing would be trained "
            "without the losses that balance it; give a dense model"
        )
    kinds = {str(kind) for name in _KINDS for kind in getattr(config, name, None) or ()}  # some work it out
    others = sorted(kind for kind in kinds if not _ATTENTION.search(kind) or _LINEAR.search(kind))
    if others:
        raise ModelError(
            f"{source} has layers that are not attention over tokens ({', '.join(others)}): they only read "
            "forwards and across texts; give a model of attention layers"
        )


def _said(config: Any) -> dict[str, Any]:
    """All that a configuration says, the words of its parts among them."""
    said: dict[str, Any] = {}
    for part in (*vars(config).values(), config):
        if isinstance(part, PretrainedConfig):
            said |= part.to_dict()
    return said


def _above_one(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_above_one(one) for one in value)
    return isinstance(value, int) and value > 1


def _masked(config: Any) -> bool:
    """Is it a masked language model? As its weights were saved; a type that can be both, if nothing is said."""
    masked_classes = set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values())
    if any(name in masked_classes for name in config.architectures or ()):
        return type(config) in MODEL_FOR_MASKED_LM_MAPPING
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not _saved_as_decoder(config)


def _saved_as_decoder(config: Any) -> bool:
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return causal is not None and causal.__name__ in (config.architectures or ())


def _config(hub: Hub) -> Any:
    if hub.gguf:
        config = copy.deepcopy(_converted(hub)[0])
    else:
        config = _tried(hub, lambda: AutoConfig.from_pretrained(**hub.address, trust_remote_code=False))
    without_attention_dropout(config)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        as_decoder(config)
    return config


@functools.cache
def _converted(hub: Hub) -> tuple[Any, dict[str, torch.Tensor]]:
    """Configuration and weights of a GGUF file. It is converted once in a process, which takes long.

    The weights lie in a file without a name, which is gone with the process, however that ends.
    """

    def convert() -> tuple[Any, dict[str, torch.Tensor]]:
        config = AutoConfig.from_pretrained(**hub.address, trust_remote_code=False)
        family = AutoModelForMaskedLM if _masked(config) else AutoModelForCausalLM
        model = family.from_pretrained(**hub.address, dtype=torch.float32, trust_remote_code=False)
        with tempfile.TemporaryDirectory(prefix="biphase-gguf-") as folder:
            save_model(model, f"{folder}/weights")
            return config, load_file(f"{folder}/weights")

    return _tried(hub, convert)


def _refuse_climbing(hub: Hub) -> None:
    """A model's files name those beside it: what lies elsewhere is no part of what was hashed."""
    folder = Path(hub.source).expanduser()
    named: list[tuple[str, str]] = []
    for path in folder.glob("*.index.json"):
        weights = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        named += [(path.name, name) for name in weights]
    said = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("transformers_weights")
    named += [("config.json", said)] if said else []
    for where, name in named:
        if Path(name).name != name:
            raise ModelError(f"{where} names {name!r}, which is not a file beside it")


def _has_adapter(hub: Hub) -> bool:
    """Is there an adapter (LoRA)? Refused if transformers would pass over it, unpickle it, or look for its model elsewhere."""
    if not hub.local:
        if find_adapter_config_file(hub.source, revision=hub.revision) is not None:
            raise ModelError(
                f"{hub.source} is an adapter of another model, whose commit it does not say; merge it into its model "
                "(peft: merge_and_unload, save_pretrained) and give that folder"
            )
        return False
    folder = Path(hub.source).expanduser()
    if not (folder / "adapter_config.json").is_file():
        return False
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"{hub.source} has an adapter_config.json without adapter_model.safetensors (pickled ones are not read); "
            "save the adapter as safetensors, or remove adapter_config.json to leave it out"
        )
    if not is_peft_available():
        raise ModelError(f"{hub.source} has an adapter, which needs the package peft; type: pip install peft")
    return True


def _loaded(hub: Hub, family: Any, config: Any) -> Any:
    more: dict[str, Any] = {"attn_implementation": NAME, "dtype": torch.float32, "output_loading_info": True}
    more["ignore_mismatched_sizes"] = True  # they are refused below, with their names

    def load() -> Any:
        if hub.gguf:
            weights = {name: one.clone() for name, one in _converted(hub)[1].items()}
            made = family._model_mapping[type(config)]
            return made.from_pretrained(None, config=config, state_dict=weights, **more)
        if hub.local:
            _refuse_climbing(hub)
        return family.from_pretrained(
            **hub.address, config=config, trust_remote_code=False, use_safetensors=True, **more
        )

    adapted = not hub.gguf and _has_adapter(hub)
    model, said = _tried(hub, load)
    for name, there, wanted in sorted(said["mismatched_keys"]):
        raise ModelError(
            f"{hub.source}: its weight {name} has the shape {tuple(there)}, and its config.json asks for {tuple(wanted)}; "
            "put the config.json that belongs to the weights there"
        )
    lacking = sorted(name for name in said["missing_keys"] if not name.startswith("pooler."))
    if lacking:
        raise ModelError(
            f"{hub.source} lacks {len(lacking)} of its weights, {lacking[0]} among them, which would be random; "
            "give a complete checkpoint"
        )
    model.config.use_cache = False
    if adapted:
        merge_adapters(model)
        model.requires_grad_(True)
        model._hf_peft_config_loaded = False  # else only an adapter would be saved
        if any(type(module).__module__.startswith("peft.") for module in model.modules()):
            raise ModelError(
                f"{hub.source}: its adapter replaces whole modules; merge it (peft: merge_and_unload, save_pretrained) "
                "and give that folder"
            )
    return model


def merge_adapters(model: Any) -> None:
    """Add the matrices of adapters (peft) to those they stand beside, and take them out."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config


def _tried(hub: Hub, load: Callable[[], Any]) -> Any:
    try:
        # A bar is for downloads; and what is wrong is said by us.
        with quietly() if hub.local else contextlib.nullcontext():
            return load()
    except ModelError:
        raise
    except Exception as wrong:  # absent, damaged, of other shapes, a package missing: many kinds
        text = str(wrong)
        if "trust_remote_code" in text:
            raise needs_code(hub.source) from None
        if "does not appear to have a file named model.safetensors" in text:
            raise ModelError(no_safetensors(hub.source)) from None
        if isinstance(wrong, KeyError) and wrong.args == (NAME,):
            raise ModelError(
                f"{hub.source}: its class does not let its attention be replaced, so it cannot be made to read in "
                "both directions; give another model"
            ) from None
        raise ModelError(
            f"{hub.source} cannot be loaded: {one_line(wrong)}; check the name, or give a local folder"
        ) from None


def needs_code(source: str) -> ModelError:
    return ModelError(
        f"{source} needs code of its own (auto_map in its configuration), which biphase never runs; give a model of "
        "a class that transformers has"
    )


# ---------------------------------------------------------------- the paper's own checkpoints


def _published(hub: Hub) -> tuple[Any, dict[str, torch.Tensor]] | None:
    """Configuration and weights of one of the paper's models, whose class is not among transformers' own."""
    if hub.gguf:
        return None
    try:
        raw, _ = PretrainedConfig.get_config_dict(**hub.address)
    except (OSError, ValueError, AttributeError):
        return None  # whoever loads it says what is wrong
    if not isinstance(raw, dict) or not published.is_published(raw):
        return None
    try:
        return published.eurobert(raw, load_file(_weights_file(hub)))
    except (OSError, SafetensorError, ModelError) as wrong:
        raise ModelError(f"{hub.source} cannot be loaded: {one_line(wrong)}; give a complete copy") from None


def _weights_file(hub: Hub) -> Path:
    if hub.local:
        return Path(hub.source).expanduser() / "model.safetensors"
    return Path(hf_hub_download(hub.source, "model.safetensors", revision=hub.revision))


def _filled(family: Any, config: Any, weights: dict[str, torch.Tensor]) -> Any:
    config._attn_implementation = NAME
    model = family(config).float()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing or unexpected:
        raise ModelError(
            f"{(missing or unexpected)[0]} has no place or no weight; this is not one of the paper's models"
        )
    return model
