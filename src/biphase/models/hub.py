"""Loading models and tokenizers from the hub or a folder, as transformers' own classes with our attention.

Neither remote code nor pickles are loaded. No architecture is named: the configuration says which class loads a model,
`refuse_unsuited` rejects what the configuration shows to be unsupported, and probes check the rest before training.
`language_model` loads a model with its head, `trunk` without, `load_tokenizer` the tokenizer beside it. `new_model`
builds one from a configuration alone, with random weights.

The paper's own checkpoints use custom code on the hub (`SLModel`, model_type `sl_model`), which is a Llama block without
a causal mask: EuroBERT under another name. `published_config` translates their configuration, and their weights load as
EuroBERT's. Its defaults differ from EuroBERT's in the rope base only. The direction (`is_causal`) is an argument here,
and our heads pool by the mean as the paper's do.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import importlib.util
import json
import re
import tempfile
import unicodedata
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    EuroBertConfig,
    LlamaTokenizer,
    PretrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import is_peft_available
from transformers.utils import logging as transformers_logging

from biphase.attention import NAME, without_attention_dropout
from biphase.errors import BiphaseError, ModelError, no_safetensors, one_line
from biphase.remote import refusing, snapshot
from biphase.specs import Config, Hub


@contextlib.contextmanager
def quietly() -> Generator[None]:
    """Silence transformers' warnings and progress bars inside the context."""
    log = transformers_logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


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


ROPE_BASE = 250_000.0  # the default of the published class


def is_published(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to the paper's custom class."""
    classes = config.get("auto_map")
    custom = classes.get("AutoConfig") if isinstance(classes, Mapping) else None
    return config.get("model_type") == "sl_model" or str(custom).split(".")[-1] == "SLModelConfig"


def published_config(config: Mapping[str, Any]) -> EuroBertConfig:
    """Return the EuroBERT config of a published model."""
    rotary = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rotary.setdefault("rope_theta", config.get("rope_theta") or ROPE_BASE)
    rotary.setdefault("rope_type", rotary.pop("type", "default"))
    own = EuroBertConfig().to_dict().keys() - PretrainedConfig().to_dict().keys()
    fields: dict[str, Any] = {name: value for name, value in config.items() if name in own}
    fields |= {"rope_parameters": rotary, "classifier_pooling": "mean", "use_cache": False}
    return EuroBertConfig(**fields)


# ---------------------------------------------------------------- loading


_EXPERTS = re.compile(r"(num|n)_\w*experts|moe_num_experts")
_SWITCHES = ("is_moe", "enable_moe_block")  # False in one of these means that there are no experts
_KINDS = ("layer_types", "layers_block_type")


def language_model(hub: Hub) -> Any:
    """Load a model with its language-model head in fp32."""
    config = _config(hub)
    return _loaded(hub, _family(config, hub.source), config)


def trunk(hub: Hub) -> Any:
    """Load a model without its head in fp32."""
    return _loaded(hub, AutoModel, _config(hub))


def new_model(start: Config, *, vocab: int, mask_id: int = 0, pad_id: int = 0) -> Any:
    """Build a model with its language-model head in fp32; its class draws the weights from torch's generator."""
    source = f"Config {start.name!r}"
    try:
        with quietly():
            config = _new_config(start, source, vocab=vocab, mask_id=mask_id, pad_id=pad_id)
            model = _family(config, source)._model_mapping[type(config)](config).float()
    except ModelError:
        raise
    except Exception as wrong:  # wrong values and types, attention that cannot be replaced: many types
        _refuse_fixed_attention(wrong, source)
        raise ModelError(
            f"{source} cannot be built ({one_line(wrong)}); correct its fields, or give another architecture"
        ) from None
    table = model.get_input_embeddings()
    if getattr(table, "padding_idx", None) is not None:
        with torch.no_grad():  # torch sets it to zero, but it is often the end token too, which texts contain
            table.weight[pad_id] = torch.randn_like(table.weight[pad_id]) * table.weight.std()
    return model


def _new_config(start: Config, source: str, *, vocab: int, mask_id: int, pad_id: int) -> Any:
    """Return a model's configuration for a tokenizer of `vocab` ids; raise ModelError if it is unsupported."""
    fields = start.fields
    kind = fields.pop("model_type")
    if kind not in CONFIG_MAPPING:
        hint = difflib.get_close_matches(str(kind), CONFIG_MAPPING, n=1, cutoff=0)[0]
        raise ModelError(f"{source}: transformers has no model_type {kind!r}; did you mean {hint!r}?")
    known = {*CONFIG_MAPPING[kind]().to_dict(), *CONFIG_MAPPING[kind].attribute_map}
    for name in fields.keys() - known:  # transformers ignores what it does not know, also in published files
        if close := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            raise ModelError(f"{source}: {kind} has no field {name!r}; did you mean {close[0]!r}?")
    config = AutoConfig.for_model(kind, **fields, vocab_size=vocab, use_cache=False)
    # In a few families the pad token also decides where positions begin.
    ours = {"mask_token_id": mask_id, "pad_token_id": pad_id}
    for name in [name for name in config.to_dict() if name.endswith("_token_id")]:
        with contextlib.suppress(Exception):  # a few configurations require a number
            setattr(config, name, 0)
            setattr(config, name, ours.get(name))
    without_attention_dropout(config)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        as_decoder(config)
    refuse_unsuited(config, source)
    config._attn_implementation = NAME
    return config


def refuse_unsuited(config: Any, source: str) -> None:
    """Raise ModelError if the configuration shows an unsupported model.

    Unsupported are encoder-decoders, multimodal models, mixtures of experts and layers other than attention.
    """
    fields = _fields(config)
    if fields.get("is_encoder_decoder"):
        raise ModelError(f"{source} is an encoder and a decoder; give a model that is one of them")
    if isinstance(getattr(config, "text_config", None), PretrainedConfig):
        raise ModelError(f"{source} reads more than text; give the folder of its text model alone")
    experts = [name for name, value in fields.items() if _EXPERTS.fullmatch(name) and _above_one(value)]
    if experts and not any(fields.get(name) is False for name in _SWITCHES):
        raise ModelError(
            f"{source} is a mixture of experts ({experts[0]}={fields[experts[0]]}), whose routing would be trained "
            "without the losses that balance it; give a dense model"
        )
    kinds = {str(kind) for name in _KINDS for kind in getattr(config, name, None) or ()}  # may be a property
    others = sorted(kind for kind in kinds if not re.fullmatch("(?!.*(linear|compressed)).*attention", kind))
    if others:
        raise ModelError(
            f"{source} has layers that are not attention over tokens ({', '.join(others)}): they only read "
            "forwards and across texts; give a model of attention layers"
        )


def _fields(config: Any) -> dict[str, Any]:
    """Return all fields of a configuration, including those of nested configurations."""
    parts = [part for part in (*vars(config).values(), config) if isinstance(part, PretrainedConfig)]
    return {name: value for part in parts for name, value in part.to_dict().items()}


def _above_one(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_above_one, value))
    return isinstance(value, int) and value > 1


def _family(config: Any, source: str) -> Any:
    """Return the auto class that loads a model with its head, by its `architectures`; raise ModelError if it has none.

    A model type that has a masked class counts as masked unless it was saved as a decoder.
    """
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    saved_as = set(config.architectures or ())
    decoder = causal is not None and causal.__name__ in saved_as
    if saved_as & set(MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()):
        decoder = False
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decoder
    family: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    if type(config) not in family._model_mapping:
        raise ModelError(
            f"{source} ({config.model_type}) has no language-model head; give a decoder or an encoder"
        )
    return family


def _config(hub: Hub) -> Any:
    """Return a model's configuration; raise ModelError if it is unsupported."""
    config = copy.deepcopy(_converted(hub)[0]) if hub.gguf else _tried(hub, lambda: _read_config(hub))
    without_attention_dropout(config)
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        as_decoder(config)
    refuse_unsuited(config, hub.source)
    return config


def _read_config(hub: Hub) -> Any:
    written = _written_config(hub)
    if is_published(written):
        return published_config(written)
    return AutoConfig.from_pretrained(**address(hub), trust_remote_code=False)


def _written_config(hub: Hub) -> dict[str, Any]:
    """Return the contents of config.json."""
    return PretrainedConfig.get_config_dict(**address(hub))[0]


@functools.cache
def _converted(hub: Hub) -> tuple[Any, dict[str, Tensor]]:
    """Return the configuration and weights of a GGUF file; cached, since the conversion is slow.

    The weights are memory-mapped from a deleted temporary file, which disappears with the process however it ends.
    """

    def convert() -> tuple[Any, dict[str, Tensor]]:
        config = AutoConfig.from_pretrained(**address(hub), trust_remote_code=False)
        model = _family(config, hub.source).from_pretrained(
            **address(hub), dtype=torch.float32, trust_remote_code=False
        )
        with tempfile.TemporaryDirectory(prefix="biphase-gguf-") as folder:
            save_model(model, f"{folder}/weights")
            return config, load_file(f"{folder}/weights")

    return _tried(hub, convert)


def _refuse_climbing(hub: Hub) -> None:
    """Raise ModelError if a model's files refer to files outside its folder, which its hash would not cover."""
    folder = folder_of(hub)
    references: list[tuple[str, str]] = []
    for path in folder.glob("*.index.json"):
        weights = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        references += [(path.name, name) for name in weights]
    weights = _written_config(hub).get("transformers_weights")
    references += [("config.json", weights)] if weights else []
    for file, name in references:
        if Path(name).name != name:
            raise ModelError(f"{file} names {name!r}, which is not a file beside it")


def _has_adapter(hub: Hub) -> bool:
    """Return whether a folder has a LoRA adapter.

    Raises ModelError if transformers would ignore it, unpickle it, or load its base model from elsewhere.
    """
    folder = folder_of(hub)
    if not (folder / "adapter_config.json").is_file():
        return False
    if not hub.local:
        raise ModelError(
            f"{hub.source} is an adapter of another model, whose commit it does not say; merge it into its model "
            "(peft: merge_and_unload, save_pretrained) and give that folder"
        )
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(
            f"{hub.source} has an adapter_config.json without adapter_model.safetensors (pickled ones are not read); "
            "save the adapter as safetensors, or remove adapter_config.json to leave it out"
        )
    if not is_peft_available():
        raise ModelError(f"{hub.source} has an adapter, which needs the package peft; type: pip install peft")
    return True


def _refuse_unlike_published(hub: Hub, model: Any, unknown: Sequence[str]) -> None:
    """Raise ModelError for weights that transformers would leave out, or tie, without a word."""
    if unknown:
        raise ModelError(
            f"{hub.source}: its weight {unknown[0]!r} has no place in EuroBERT; give a checkpoint of the paper, without other heads"
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head is not None and head.weight is not embedding.weight:
        raise ModelError(
            f"{hub.source}: its config.json says tie_word_embeddings, and its head differs from the embedding; "
            'write "tie_word_embeddings": false there'
        )


def _loaded(hub: Hub, family: Any, config: Any) -> Any:
    options: dict[str, Any] = {
        "attn_implementation": NAME,
        "dtype": torch.float32,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # mismatches are reported below, with their names
    }

    def load() -> Any:
        if hub.gguf:
            weights = {name: weight.clone() for name, weight in _converted(hub)[1].items()}
            model_class = family._model_mapping[type(config)]
            return model_class.from_pretrained(None, config=config, state_dict=weights, **options)
        _refuse_climbing(hub)
        return family.from_pretrained(
            **address(hub), config=config, trust_remote_code=False, use_safetensors=True, **options
        )

    adapted = not hub.gguf and _has_adapter(hub)
    model, info = _tried(hub, load)
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise ModelError(
            f"{hub.source}: its weight {name} has the shape {tuple(shape)}, and its config.json asks for "
            f"{tuple(expected)}; put the config.json that belongs to the weights there"
        )
    if missing := missing_weights(info):
        raise ModelError(
            f"{hub.source} lacks {len(missing)} of its weights, {missing[0]} among them, which would be random; "
            "give a complete checkpoint (one without a head can be evaluated, but not trained further)"
        )
    head = "lm_head." if family is AutoModel else ()  # what is left out on purpose
    if not hub.gguf and is_published(_written_config(hub)):
        unknown = sorted(name for name in info["unexpected_keys"] if not name.startswith(head))
        _refuse_unlike_published(hub, model, unknown)
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


def missing_weights(info: Mapping[str, Any]) -> list[str]:
    """Return the names of weights that a checkpoint lacks, from transformers' loading info; poolers are not used."""
    return sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))


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
        folder_of(hub)  # with progress bars
        with quietly():
            return load()
    except BiphaseError:
        raise
    except Exception as wrong:  # absent, damaged, wrong shapes, a missing package: many types
        text = str(wrong)
        if "trust_remote_code" in text:
            raise _needs_code(hub.source) from None
        if "no file named model.safetensors" in text:
            raise ModelError(no_safetensors(hub.source)) from None
        _refuse_fixed_attention(wrong, hub.source)
        raise ModelError(
            f"{hub.source} cannot be loaded: {one_line(wrong)}; check the name, or give a local folder"
        ) from None


def _refuse_fixed_attention(wrong: Exception, source: str) -> None:
    """Raise ModelError if a model could not be built because its class has no place for our attention."""
    if isinstance(wrong, KeyError) and wrong.args == (NAME,):
        raise ModelError(
            f"{source}: its class does not let its attention be replaced, so it cannot be made to read in both "
            "directions; give another model"
        ) from None


def _needs_code(source: str) -> ModelError:
    return ModelError(
        f"{source} needs code of its own (auto_map in its configuration), which biphase never runs; give a model of "
        "a class that transformers has"
    )


# What transformers reads of a repository: configurations, weights and tokenizers at its root, but no second copies of the
# weights in another precision or format.
READ = ("*.json", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.jinja")
NOT_READ = ("*/*", "consolidated*", "model.*.safetensors")


@functools.cache
def folder_of(hub: Hub) -> Path:
    """Return the folder with a model's files; of one on the hub, all are fetched before any is read.

    transformers itself fetches them one by one, and takes a file that the hub fails to send to be absent.
    """
    if hub.local:
        return Path(hub.source).expanduser()
    return _fetched(hub, (hub.gguf,) if hub.gguf else READ, () if hub.gguf else NOT_READ)


def _fetched(hub: Hub, allow: Sequence[str], ignore: Sequence[str] = ()) -> Path:
    with refusing(ModelError, f"{hub.source} cannot be had from the hub", hub.source, "give a local folder"):
        return snapshot(hub.source, hub.revision, allow, ignore=ignore)


def address(hub: Hub) -> dict[str, str]:
    """Return the arguments of transformers' `from_pretrained` that load a model."""
    file = {"gguf_file": hub.gguf} if hub.gguf else {}
    return {"pretrained_model_name_or_path": str(folder_of(hub)), **file}


def hub_file(hub: Hub, name: str) -> Path:
    """Return the path of a model's file, which is downloaded from the hub if needed; it may not exist."""
    return (folder_of(hub) if hub.local else _fetched(hub, (name,))) / name


# ---------------------------------------------------------------- tokenizers


# Packages that a tokenizer conversion may need: PyPI name → import name.
CONVERTING = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf", "tiktoken": "tiktoken"}
PIECES = 500  # vocabulary entries by which a conversion is checked


def load_tokenizer(hub: Hub) -> Any:
    """Load the tokenizer beside a model; a conversion from SentencePiece is checked against the original."""
    where: Any = address(hub)
    try:
        with quietly():
            tokenizer: Any = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
            vocab = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
            if vocab.keys() <= set(tokenizer.all_special_tokens):
                # transformers' result for a folder without a tokenizer
                raise ValueError("its vocabulary is empty")
            file = str(getattr(tokenizer, "vocab_file", None) or "")
            converted = not hub.gguf and file.endswith(".model") and not has_tokenizer_json(hub)
            if not converted or _reads_as(file, tokenizer):
                return tokenizer
            # Without a tokenizer_config.json transformers omits the space before the first word.
            tokenizer = LlamaTokenizer.from_pretrained(**where)
        if _reads_as(file, tokenizer):
            return tokenizer
        why = f"transformers cuts text into other pieces than {Path(file).name}"
    except Exception as wrong:  # absent, damaged, without a fast version: many types
        if "trust_remote_code" in str(wrong):
            raise _needs_code(hub.source) from None
        needed = [name for name, package in CONVERTING.items() if importlib.util.find_spec(package) is None]
        if needed and not has_tokenizer_json(hub):
            raise ModelError(
                f"{hub.source}: converting its tokenizer needs {' and '.join(needed)}; type: pip install {' '.join(needed)}"
            ) from None
        why = one_line(wrong)
    raise ModelError(
        f"{hub.source} has no tokenizer that can be loaded ({why}); put its tokenizer.json beside it"
    )


def has_tokenizer_json(hub: Hub) -> bool:
    """Return whether a model has a tokenizer.json, so that no conversion is needed."""
    return hub_file(hub, "tokenizer.json").is_file()


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


def _reads_as(file: str, tokenizer: Any) -> bool:
    """Return whether a converted tokenizer gives the same pieces as the SentencePiece model it was made from."""
    from sentencepiece import SentencePieceProcessor

    original: Any = SentencePieceProcessor(model_file=file)
    special = (original.is_control, original.is_unknown, original.is_byte, original.is_unused)
    ids = range(original.get_piece_size())
    pieces = [original.id_to_piece(number) for number in ids if not any(check(number) for check in special)]
    # Leave out pieces that NFKC changes: few conversions reproduce a model's own normalization rules.
    pieces = [piece for piece in pieces if unicodedata.is_normalized("NFKC", piece)]
    # Byte fallback splits an unknown character into bytes.
    unknown = " ☃" if any(map(original.is_byte, ids)) else ""
    text = original.decode(pieces[:PIECES]) + unknown
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens == original.encode(
        text, out_type=str
    )
