"""Loading models and tokenizers from the hub or a folder, as transformers' own classes with our attention.

Neither remote code nor pickles are loaded. No architecture is named: the configuration says which class loads a model,
`refuse_unsuited` rejects what the configuration shows to be unsupported, and probes check the rest before training.
`language_model` loads a model with its head, `trunk` without, `load_tokenizer` the tokenizer beside it.

The paper's own checkpoints (`eurobert`) use custom code on the hub (`SLModel`, model_type `sl_model`), which is a Llama
block without a causal mask: EuroBERT under another name. Their config and weights are mapped by name to transformers'
EuroBERT, and unknown names are rejected. Besides the names of that class, those of the training code are known
(`blocks`, fused `qkv_proj`, `fc_1`), since the converter between the two was never published. The direction
(`is_causal`) is ignored, because it is an argument here, and so is the pooling, because our heads pool by the mean as
the paper's do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import tempfile
import unicodedata
from collections.abc import Callable, Generator, Mapping, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertModel,
    GenerationConfig,
    LlamaTokenizer,
    PreTrainedConfig,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import find_adapter_config_file, is_peft_available
from transformers.utils import logging as told

from biphase.attention import NAME, without_attention_dropout
from biphase.errors import ModelError, no_safetensors, one_line
from biphase.specs import Hub


@contextlib.contextmanager
def quietly() -> Generator[None]:
    """Silence transformers' warnings and progress bars inside the context."""
    level, bars = told.get_verbosity(), told.is_progress_bar_enabled()
    told.set_verbosity_error()
    told.disable_progress_bar()
    try:
        yield
    finally:
        told.set_verbosity(level)
        if bars:
            told.enable_progress_bar()


# ---------------------------------------------------------------- sliding windows


def windows_of(config: Any) -> dict[str, int]:
    """Return the window sizes in a configuration, by field name."""
    return {
        name: value
        for name, value in config.to_dict().items()
        if re.search("window|chunk|local_attention", name)
        and not re.search("pattern|layers", name)  # these say which layers have a window
        and isinstance(value, int)
        and not isinstance(value, bool)
        and value > 1
    }


def narrowest(config: Any) -> int | None:
    """Return the narrowest window of any layer; None if there is none."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and not any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds):
        return None
    return min(windows_of(config).values(), default=None)


def as_decoder(config: Any) -> None:
    """Undo the settings by which an export makes plain transformers read a decoder bidirectionally.

    Here the direction is an argument. transformers counts a bidirectional window without the token itself and a causal
    one with it; we count both with it.
    """
    if vars(config).get("is_causal", True):
        return
    del config.is_causal
    for name in windows_of(config):
        setattr(config, name, getattr(config, name) + 1)  # getattr may differ from `to_dict`


# ---------------------------------------------------------------- the paper's checkpoints as EuroBERT


MODEL_TYPE = "sl_model"
HEAD = "lm_head.weight"
STORED = (torch.bfloat16, torch.float16, torch.float32)

# Config fields that determine the model. An absent one has the default of the published class, which is EuroBERT's.
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "tie_word_embeddings", "attention_bias",
    "attention_dropout", "mlp_bias",
)  # fmt: skip
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters")
ROPE_BASE = 250_000.0  # the default, the only one that differs from EuroBERT's
# Config fields that do not affect the backbone's output.
BESIDE = {
    "auto_map", "torch_dtype", "pretraining_tp", "is_causal", "is_decoder", "classifier_pooling", "retrieval_pooling",
    "bos_token", "eos_token", "pad_token", "mask_token",
}  # fmt: skip

# Names in the code that trained the models → EuroBERT's names.
TRAINED_AS = {
    "embedding": "embed_tokens",
    "blocks": "layers",
    "final_layernorm": "norm",
    "attn": "self_attn",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "out_proj": "o_proj",
    "fc_1": "gate_proj",
    "fc_2": "up_proj",
    "proj": "down_proj",
}
FUSED = "qkv_proj"


def is_published(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to the paper's custom class."""
    classes = config.get("auto_map")
    named = classes.get("AutoConfig") if isinstance(classes, Mapping) else None
    return config.get("model_type") == MODEL_TYPE or str(named).split(".")[-1] == "SLModelConfig"


def eurobert(
    config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[EuroBertConfig, dict[str, Tensor]]:
    """Convert a published model to EuroBERT: return its config, and fp32 weights named as in EuroBertForMaskedLM.

    The head may be absent, as in an export of the backbone alone; everything else must be present and fit.
    """
    native = _published_config(config)
    if native.num_hidden_layers > len(weights):  # before building a model of that size
        raise ModelError(
            f"the config says {native.num_hidden_layers:,} layers and there are {len(weights):,} weights; "
            "download the model again"
        )
    try:
        with torch.device("meta"):
            wanted = {
                name: tuple(one.shape) for name, one in EuroBertForMaskedLM(native).state_dict().items()
            }
    except Exception as wrong:  # inconsistent sizes raise many types
        raise _no_model(wrong) from None
    placed = _placed(native, weights, wanted)
    lacking = [name for name in wanted if name not in placed and name != HEAD]
    if lacking:
        raise ModelError(
            f"{len(lacking)} of the model's weights are missing, {lacking[0]} among them; download the model again"
        )
    if native.tie_word_embeddings and HEAD in placed:
        if not torch.equal(placed[HEAD], placed["model.embed_tokens.weight"]):
            raise ModelError(
                f"the config ties the head to the embedding and {HEAD} is another; set tie_word_embeddings to false"
            )
        placed[HEAD] = placed["model.embed_tokens.weight"]
    return native, placed


def _published_config(config: Mapping[str, Any]) -> EuroBertConfig:
    """Return the EuroBERT config of a published model."""
    generic = PreTrainedConfig().to_dict() | GenerationConfig().to_dict()
    for name, value in config.items():
        known = name in SHAPE or name in ROTARY or name in BESIDE or name in generic or name.startswith("_")
        if value and not known:  # a falsy field has no effect
            raise ModelError(
                f"the config's field {name!r} is none of the published models', so what it does here is unknown; "
                "remove it if it changes nothing"
            )
    try:
        rotary = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        rotary.setdefault("rope_theta", config.get("rope_theta") or ROPE_BASE)
        rotary.setdefault("rope_type", rotary.pop("type", "default"))
        shape = {name: config[name] for name in SHAPE if name in config}
        return EuroBertConfig(**shape, rope_parameters=rotary, classifier_pooling="mean", use_cache=False)
    except Exception as wrong:  # transformers' validation raises many types
        raise _no_model(wrong) from None


def _no_model(wrong: Exception) -> ModelError:
    return ModelError(f"the config describes no model ({one_line(wrong)}); download its config.json again")


def _placed(
    native: EuroBertConfig, weights: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return all weights in fp32 under EuroBERT's names; raise ModelError for an unknown name or a wrong shape."""
    placed: dict[str, Tensor] = {}
    for said, tensor in weights.items():
        if tensor.dtype not in STORED:
            raise ModelError(
                f"weight {said!r} is stored as {str(tensor.dtype).removeprefix('torch.')}; "
                "only bf16, fp16 and fp32 are read: give the model as it was published"
            )
        for name, part in _parts(native, said, tensor):
            if name not in wanted:
                raise ModelError(
                    f"weight {said!r} has no place in EuroBERT; give a checkpoint of the paper, without other heads"
                )
            if name in placed:
                raise ModelError(f"weight {said!r} is there twice, under two names; remove one of them")
            if tuple(part.shape) != wanted[name]:
                raise ModelError(
                    f"weight {said!r} gives {name} the shape {list(part.shape)}, and the config asks for "
                    f"{list(wanted[name])}; look at config.json"
                )
            placed[name] = part.float()
    return placed


def _parts(native: EuroBertConfig, said: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return a weight with its name in EuroBERT; a fused qkv matrix is split into three."""
    words = said.removeprefix("model.").split(".")
    words = [TRAINED_AS.get(word, word) for word in words]
    name = ".".join(words if words[0] == "lm_head" else ["model", *words])
    if FUSED not in words:
        return [(name, tensor)]
    shape: Any = native  # Any: the annotations allow None, but transformers fills in the values
    heads, kv_heads, width = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    rows = [heads * width, kv_heads * width, kv_heads * width]
    if tensor.ndim == 0 or tensor.shape[0] != sum(rows):
        raise ModelError(
            f"weight {said!r} has the shape {list(tensor.shape)}, and the config asks for {sum(rows)} rows: "
            f"{rows[0]} of queries, {rows[1]} of keys and of values; look at config.json"
        )
    names = [name.replace(FUSED, one) for one in ("q_proj", "k_proj", "v_proj")]
    return list(zip(names, tensor.split(rows), strict=True))


# ---------------------------------------------------------------- loading


_EXPERTS = re.compile(r"(num|n)_\w*experts|moe_num_experts")
_ATTENTION = re.compile(r"attention$")
_SWITCHES = ("is_moe", "enable_moe_block")  # False in one of these means that there are no experts
_LINEAR = re.compile("linear|compressed")
_KINDS = ("layer_types", "layers_block_type")


def language_model(hub: Hub) -> Any:
    """Load a model with its language-model head in fp32."""
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
    """Load a model without its head in fp32."""
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
    """Raise ModelError if the configuration shows an unsupported model.

    Unsupported are encoder-decoders, multimodal models, mixtures of experts and layers other than attention.
    """
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
    kinds = {str(kind) for name in _KINDS for kind in getattr(config, name, None) or ()}  # may be a property
    others = sorted(kind for kind in kinds if not _ATTENTION.search(kind) or _LINEAR.search(kind))
    if others:
        raise ModelError(
            f"{source} has layers that are not attention over tokens ({', '.join(others)}): they only read "
            "forwards and across texts; give a model of attention layers"
        )


def _said(config: Any) -> dict[str, Any]:
    """Return all fields of a configuration, including those of nested configurations."""
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
    """Return whether a model is a masked language model, by its `architectures`.

    A model type that has a masked class counts as masked unless it was saved as a decoder.
    """
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
    """Return the configuration and weights of a GGUF file; cached, since the conversion is slow.

    The weights are memory-mapped from a deleted temporary file, which disappears with the process however it ends.
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
    """Raise ModelError if a model's files refer to files outside its folder, which its hash would not cover."""
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
    """Return whether a folder has a LoRA adapter.

    Raises ModelError if transformers would ignore it, unpickle it, or load its base model from elsewhere.
    """
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
    more["ignore_mismatched_sizes"] = True  # mismatches are reported below, with their names

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
        model._hf_peft_config_loaded = False  # else save_pretrained would write the adapter only
        if any(type(module).__module__.startswith("peft.") for module in model.modules()):
            raise ModelError(
                f"{hub.source}: its adapter replaces whole modules; merge it (peft: merge_and_unload, save_pretrained) "
                "and give that folder"
            )
    return model


def merge_adapters(model: Any) -> None:
    """Merge peft adapters into the weights they modify, and remove them."""
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
        # Progress bars are for downloads only, and we report errors ourselves.
        with quietly() if hub.local else contextlib.nullcontext():
            return load()
    except ModelError:
        raise
    except Exception as wrong:  # absent, damaged, wrong shapes, a missing package: many types
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
    """Return the configuration and weights of one of the paper's models, or None if it is another model."""
    if hub.gguf:
        return None
    try:
        raw, _ = PretrainedConfig.get_config_dict(**hub.address)
    except (OSError, ValueError, AttributeError):
        return None  # loading it will report the error
    if not isinstance(raw, dict) or not is_published(raw):
        return None
    try:
        return eurobert(raw, load_file(_weights_file(hub)))
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


# ---------------------------------------------------------------- tokenizers


# Packages that a tokenizer conversion may need: PyPI name → import name.
CONVERTING = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf", "tiktoken": "tiktoken"}
PIECES = 500  # vocabulary entries by which a conversion is checked


def load_tokenizer(hub: Hub) -> Any:
    """Load the tokenizer beside a model; a conversion from SentencePiece is checked against the original."""
    address: Any = hub.address
    try:
        with quietly():
            made: Any = AutoTokenizer.from_pretrained(**address, trust_remote_code=False)
            known = made.backend_tokenizer.get_vocab(with_added_tokens=False)
            if known.keys() <= set(made.all_special_tokens):
                raise ValueError(
                    "its vocabulary is empty"
                )  # transformers' result for a folder without a tokenizer
            file = str(getattr(made, "vocab_file", None) or "")
            if hub.gguf or not file.endswith(".model") or has_tokenizer_json(hub) or _reads_as(file, made):
                return made
            # Without a tokenizer_config.json transformers omits the space before the first word.
            made = LlamaTokenizer.from_pretrained(**address)
        if _reads_as(file, made):
            return made
        why = f"transformers cuts text into other pieces than {Path(file).name}"
    except Exception as wrong:  # absent, damaged, without a fast version: many types
        if "trust_remote_code" in str(wrong):
            raise needs_code(hub.source) from None
        needed = [name for name, package in CONVERTING.items() if find_spec(package) is None]
        if needed and not has_tokenizer_json(hub):
            raise ModelError(
                f"{hub.source}: converting its tokenizer needs {' and '.join(needed)}; type: pip install {' '.join(needed)}"
            ) from None
        why = one_line(wrong)
    raise ModelError(
        f"{hub.source} has no tokenizer that can be loaded ({why}); put its tokenizer.json beside it"
    )


def has_tokenizer_json(hub: Hub) -> bool:
    """Return whether a model has a tokenizer.json, so that no conversion is needed.

    Also True if the hub does not answer: loading it will report that.
    """
    if hub.local:
        return (Path(hub.source).expanduser() / "tokenizer.json").is_file()
    try:
        hf_hub_download(hub.source, "tokenizer.json", revision=hub.revision)
    except Exception as wrong:  # offline, refused, absent: many types
        return not isinstance(wrong, EntryNotFoundError) or isinstance(wrong, LocalEntryNotFoundError)
    return True


def refuse_larger(vocab: int, spare: Set[int | None], rows: int, source: str) -> None:
    """Raise ModelError if a tokenizer of `vocab` ids is too large for an embedding of `rows` vocab rows.

    `spare` ids occur in no text, so they need no row.
    """
    needed = next((number + 1 for number in reversed(range(vocab)) if number not in spare), 0)
    if needed > rows:
        raise ModelError(
            f"{source} has {rows:,} embeddings and its tokenizer {needed:,} tokens; give the tokenizer that belongs to the "
            f"model, or make room first, in Python: model.resize_token_embeddings({needed}), model.save_pretrained(FOLDER)"
        )


def _reads_as(file: str, made: Any) -> bool:
    """Return whether a converted tokenizer gives the same pieces as the SentencePiece model it was made from."""
    from sentencepiece import SentencePieceProcessor

    own: Any = SentencePieceProcessor(model_file=file)
    special = (own.is_control, own.is_unknown, own.is_byte, own.is_unused)
    plain = [number for number in range(own.get_piece_size()) if not any(is_(number) for is_ in special)]
    # Leave out pieces that NFKC changes: few conversions reproduce a model's own normalization rules.
    jobs = [one for number in plain if unicodedata.is_normalized("NFKC", one := own.id_to_piece(number))]
    unknown = (
        " ☃" if any(map(own.is_byte, range(own.get_piece_size()))) else ""
    )  # byte fallback splits it into bytes
    text = own.decode(jobs[:PIECES]) + unknown
    theirs = made.backend_tokenizer.encode(text, add_special_tokens=False)
    return theirs.tokens == own.encode(text, out_type=str)
