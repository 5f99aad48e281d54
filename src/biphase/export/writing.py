"""Write the files of an exported folder, and verify each: weights and configuration, tokenizer, prompts, ONNX.

**Model.** Verification compares hidden states or logits token by token. The reference comes from the trained model with
biphase's attention, as in fine-tuning. The other side is loaded from the folder by plain transformers: each text of
`recorded_texts` alone without a mask, and two padded in one batch. `write_model` first tries a class with a masked-LM
head (models/native.py), then the model's own class with a configuration that makes its attention bidirectional. It
tries the possible configurations, reads the folder back each time, and keeps only one that agrees.

transformers 4 silently ignores configuration fields that it does not know, such as `is_causal`, and would run such a
model as a decoder. It does check the `format` in the header of a weights file and refuses an unknown one, while version
5 does not check it. So the header of such files names the required version.

**Tokenizer.** `write_tokenizer` writes it with the special tokens that biphase puts around a text (a begin token if the
corpus had one, the end token) as its template, so `tokenizer(text)` gives the ids that the model was trained with.
The test vectors verify this. The one difference: in transformers a text may spell a special token, such as "<|mask|>"
for fill-mask.

**sentence-transformers.** `write_sentences` writes the files that make a folder a sentence-transformers model (mean
pooling, normalization, prompts), with the names that every version of sentence-transformers reads. They are plain JSON,
because an export must not need that package.

**ONNX.** `write_onnx` writes the model as a graph with free batch size and length.

**Test vectors.** `vectors_of` records what the trained model computes for the same texts (vectors.py). They are written
into the folder, and `verify_vectors` computes them again with transformers and onnxruntime before the folder is kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import processors
from torch import Tensor, nn
from transformers import AutoModel

from biphase.data.corpus import TOKENIZER_FILES
from biphase.data.tokenizer import Tokenizer, unknown_id
from biphase.errors import ModelError, SpecError, one_line
from biphase.export.vectors import EMBEDDINGS, Run, Vectors, apart, both_ways, check, running
from biphase.finetune.encoder import TaskModel
from biphase.models.encoder import TextHead, pack
from biphase.models.hub import load_tokenizer, missing_weights, quietly, windows_of
from biphase.specs import Hub, Retrieve
from biphase.store import read_json, write_json
from biphase.tasks.encode import Tokenization
from biphase.version import code_version

# ---------------------------------------------------------------- tokenizer


NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEXTS = (
    "the cat sat on the mat",
    "the red cat sat on the mat",  # with the first: does the first word notice what follows it?
    "Café déjà vu: 3,141.59 € (about 10%)!",
    "two  spaces,\ttabs\nand lines",
    "日本語 and עברית and 🙂",
    "a",
)


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer, the ids around every text, and the maximum length."""

    model: Any  # of the `tokenizers` library
    named: dict[str, int]  # special tokens by transformers' names; always has a pad token
    before: tuple[int, ...]
    after: tuple[int, ...]
    context: int
    mask_is_ours: bool = False  # the mask token was added by biphase, so no training text contains it

    @property
    def pad(self) -> int:
        return self.named["pad_token"]

    @property
    def token_ids(self) -> dict[str, Any]:
        """The special token ids as a model's configuration names them."""
        names = ("pad_token", "bos_token", "eos_token", "mask_token")
        return {f"{name}_id": self.named.get(name) for name in names}

    @property
    def native_ids(self) -> dict[str, Any]:
        """As `token_ids`, for EuroBERT, whose configuration requires a mask token."""
        return self.token_ids | {"mask_token_id": self.named.get("mask_token", self.pad)}

    def ids(self, text: str, *, mask: bool = False) -> list[int]:
        """The ids of a text as biphase encodes it, cut at the longest text; with `mask`, a mask token follows it."""
        inner = self.model.encode(text, add_special_tokens=False).ids + [self.named["mask_token"]] * mask
        return [*self.before, *inner[: self.context - len(self.before) - len(self.after)], *self.after]


def tokenizer_of(
    tokenizer: Tokenizer, *, bos: bool, context: int, trained_here: bool = False
) -> ExportedTokenizer:
    """The tokenizer of a model trained here.

    `bos`: documents of its corpus begin with a begin token. `trained_here`: the tokenizer was also trained by biphase.
    """
    special = tokenizer.special
    named = {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "unk_token": unknown_id(tokenizer.model),
        "pad_token": special.pad,
        "mask_token": special.mask,
    }
    return ExportedTokenizer(
        tokenizer.model,
        {name: number for name, number in named.items() if number is not None},
        (special.bos,) if bos and special.bos is not None else (),
        (special.eos,),
        context,
        mask_is_ours=trained_here or special.mask_rule != "own",
    )


def tokenizer_of_hub(hub: Hub, encoded: Tokenization) -> ExportedTokenizer:
    """The tokenizer of a hub model that was fine-tuned directly, whose texts were encoded in this way."""
    loaded = load_tokenizer(hub)
    model = loaded.backend_tokenizer
    model.no_truncation()
    model.no_padding()
    before, after = encoded.before, encoded.after
    named = {name: int(number) for name in NAMES if (number := getattr(loaded, f"{name}_id")) is not None}
    named.setdefault("pad_token", next(iter([*after, *before, *named.values(), 0])))
    return ExportedTokenizer(model, named, before, after, encoded.length)


def write_tokenizer(tokenizer: ExportedTokenizer, folder: Path) -> None:
    """Write the tokenizer's files into a folder."""
    content = json.loads(tokenizer.model.to_str())
    for token in content["added_tokens"]:
        if tokenizer.mask_is_ours and token["id"] == tokenizer.named["mask_token"]:
            # In "the cat <mask> on" the space belongs to the masked word, as in training, where the mask replaced it.
            token["lstrip"] = True
    model = BackendTokenizer.from_str(json.dumps(content))
    model.post_processor = _template(tokenizer)
    model.save(str(folder / TOKENIZER_FILES[0]))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: model.id_to_token(number) for name, number in tokenizer.named.items()},
        "model_max_length": tokenizer.context,
        "padding_side": "right",
        "truncation_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(folder / TOKENIZER_FILES[1], config)


def _template(tokenizer: ExportedTokenizer) -> Any:
    # Aliases, because a token's text may contain characters with a meaning in a template.
    alias = {number: f"t{number}" for number in (*tokenizer.before, *tokenizer.after)}
    before, after = ([alias[number] for number in ids] for ids in (tokenizer.before, tokenizer.after))
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, "$B", *after],
        special_tokens=[
            {"id": name, "ids": [number], "tokens": [tokenizer.model.id_to_token(number)]}
            for number, name in alias.items()
        ],
    )


# ---------------------------------------------------------------- sentence-transformers


class Prompts(NamedTuple):
    """The prefixes of queries and documents."""

    query: str
    document: str


def prompts_of(form: Retrieve) -> Prompts:
    """The text before the first column in a retrieval task's templates."""
    return Prompts(*(template.split("{", 1)[0] for template in (form.query, form.document)))


def write_sentences(folder: Path, *, width: int, context: int, prompts: Prompts) -> None:
    """Write the sentence-transformers files beside the model's."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    others = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    files = {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": context, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": prompts._asdict(),
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": width,
            "pooling_mode_mean_tokens": True,
            **{f"pooling_mode_{name}": False for name in others},
            "include_prompt": True,
        },
    }
    # Normalize has no configuration, so it has no folder: the hub would not keep an empty one.
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        write_json(folder / name, content)


# ---------------------------------------------------------------- model


# The largest allowed difference of a token's vector, relative to its norm. Summation order alone gives about 1e-6.
TOLERANCE = 5e-5
FAR = 1_024  # tokens of the longest text, unless a window requires more or the context is shorter
BEYOND = 32  # tokens beyond the widest window


def recorded_texts(
    tokenizer: ExportedTokenizer, config: Any, prompt: str = "", *, fills: bool = False
) -> dict[str, np.ndarray]:
    """The texts by which models are compared, with their token ids after a prompt.

    The last one is longer than any attention window, as far as the context allows. `fills`: the folder has a class that
    fills masks, so a text with a mask token is among them.
    """
    texts = {text: (text, False) for text in TEXTS}
    if fills and tokenizer.mask_is_ours:  # it takes the space before it: the model never saw that space alone
        texts[f"the cat {tokenizer.model.id_to_token(tokenizer.named['mask_token'])}"] = "the cat", True
    longest = min(tokenizer.context, max(FAR, max(windows_of(config).values(), default=0) + BEYOND))
    far = TEXTS[0]
    for number in range(longest):
        if len(tokenizer.ids(far)) < longest:
            far += f". {number} {TEXTS[0]}"
    texts |= {far: (far, False)}
    return {name: np.array(tokenizer.ids(prompt + text, mask=mask)) for name, (text, mask) in texts.items()}


@dataclass(frozen=True)
class Readback:
    """What a written model must return when loaded by one of transformers' auto classes."""

    auto: Any  # AutoModel, AutoModelForMaskedLM, …
    texts: tuple[np.ndarray, ...]  # the longest last
    # The trained model's outputs: of each text (tokens, n), or (n,) if they are one for the text.
    numbers: tuple[Tensor, ...]
    fields: tuple[str, ...] = ("last_hidden_state",)  # the compared ones; several are stacked


@torch.no_grad()
def ours(read: Callable[..., Tensor], texts: tuple[np.ndarray, ...]) -> tuple[Tensor, ...]:
    """The hidden states or logits that the trained model, called as `read`, gives for each token of the texts."""
    numbers = []
    for text in texts:
        packed = pack([text], varlen=False)
        numbers.append(packed.tokens(read(packed.ids, packed.positions, packed.pattern)).float())
    return tuple(numbers)


@torch.no_grad()
def ours_tuned(model: TaskModel, texts: tuple[np.ndarray, ...]) -> tuple[Tensor, ...]:
    """The logits of a fine-tuned model's head, per text or per token."""
    logits = [model(pack([text], varlen=False)).float() for text in texts]
    per_text = isinstance(model.head, TextHead)
    return tuple(rows[0] if per_text else rows for rows in logits)


def deviation(readback: Readback, run: Run, *, pad: int) -> float:
    """The largest difference of any vector that `run` computes."""
    right = [numbers.numpy() for numbers in readback.numbers]
    ways = both_ways(run, readback.texts, pad)
    return max(apart(*pair) for found in ways for pair in zip(right, found, strict=True))


CONFIG = "config.json"
LEAST = "5.17"  # the lowest version of transformers that exports are tested with
NEW_FIELDS = {"is_causal", "rope_parameters"}  # fields that transformers 4 ignores
FORMAT = f"one for transformers>={LEAST}, which older versions would read wrongly"
Edits = dict[str, Any]


@dataclass(frozen=True)
class WrittenForm:
    """One way to write a model: a class that holds its weights, and possible edits of its configuration."""

    model: Any
    readbacks: tuple[Readback, ...]
    tries: tuple[Edits, ...] = ({},)


@dataclass(frozen=True)
class Written:
    """How a model was written."""

    architecture: str  # the class that wrote it
    deviation: float  # the largest difference found
    edits: Edits  # of its configuration, to make attention bidirectional
    attention: str  # the only implementation that agrees; empty: any
    marked: bool = False  # the weights have a header that transformers 4 refuses

    @property
    def native(self) -> bool:
        """Whether it is EuroBERT, whatever its original class."""
        return self.architecture.startswith("EuroBert")

    @property
    def needs(self) -> str:
        """The required version of transformers and what older ones do, as a sentence; empty if any works."""
        if not (self.native or self.marked):
            return ""
        older = ", 5.0 and 5.1 read it forwards only" if self.edits else ""
        return f"It needs transformers {LEAST} or later: 4.x refuses it{older}."


def write_model(
    folder: Path, forms: Iterable[WrittenForm], tokenizer: ExportedTokenizer, *, title: str
) -> Written:
    """Write the first form that agrees with the trained model, with its token ids in its configuration."""
    differences: list[str] = []
    for form in forms:
        _save(form.model, folder, tokenizer.token_ids)
        best = _best(folder, form, tokenizer.pad, differences)
        if best is not None:
            written = Written(type(form.model).__name__, *best)
            # Older versions refuse EuroBERT by its name.
            if written.native or not read_json(folder / CONFIG).keys() & NEW_FIELDS:
                return written
            _refuse_old_versions(folder)
            load(folder, form.readbacks[0].auto)
            return replace(written, marked=True)
        for path in (*folder.glob("*.safetensors*"), folder / CONFIG):
            path.unlink(missing_ok=True)
    why = "; ".join(dict.fromkeys(differences)) or "transformers has no class that computes the same"
    raise ModelError(f"{title} cannot be exported: {why}")


def _save(model: Any, folder: Path, fields: Edits) -> None:
    for name, value in fields.items():
        if hasattr(model.config, name):
            with contextlib.nullcontext() if value is not None else contextlib.suppress(Exception):
                setattr(model.config, name, value)  # a few configurations do not allow None for a token
    with quietly():
        model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # an encoder does not generate


def _refuse_old_versions(folder: Path) -> None:
    """Rewrite the weights with a header that transformers 4 refuses."""
    for path in folder.glob("*.safetensors"):
        marked = path.with_suffix(".marked")
        save_file(load_file(path), marked, metadata={"format": FORMAT})
        marked.replace(path)


def _best(
    folder: Path, form: WrittenForm, pad: int, differences: list[str]
) -> tuple[float, Edits, str] | None:
    """The configuration edits under which the folder agrees best; None if it agrees under none."""
    plain = read_json(folder / CONFIG)
    for attention in ("", "eager"):
        only = {"attn_implementation": attention} if attention else {}
        agreeing: list[tuple[float, Edits]] = []
        for edits in form.tries:
            write_json(folder / CONFIG, plain | edits | only)
            try:
                apart = max(_reread(folder, each, pad, eager=not attention) for each in form.readbacks)
            except Exception as wrong:  # model classes raise many types
                differences.append(f"{plain['architectures'][0]}: {one_line(wrong)[:200]}")
                continue
            if apart <= TOLERANCE:
                agreeing.append((apart, edits))
            else:
                how = json.dumps(edits)[1:-1] or "its own configuration"
                differences.append(
                    f"{plain['architectures'][0]} with {how} differs by {apart:.0e} of its numbers' size"
                )
        if agreeing:
            apart, edits = min(agreeing, key=lambda pair: pair[0])
            write_json(folder / CONFIG, plain | edits | only)
            return apart, edits, attention
    return None


def _reread(folder: Path, readback: Readback, pad: int, *, eager: bool) -> float:
    """The difference between the folder's model and the trained one, with default and with eager attention."""
    model = load(folder, readback.auto)
    run = running(model, readback.fields)
    apart = deviation(readback, run, pad=pad)
    if eager and apart <= TOLERANCE:
        model.set_attn_implementation("eager")
        apart = max(apart, deviation(readback, run, pad=pad))
    return apart


def load(folder: Path, auto: Any = AutoModel, **options: Any) -> Any:
    """Load a folder's model as a user would, in fp32 and evaluation mode; raise if weights are missing."""
    with quietly():
        model, info = auto.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    if missing := missing_weights(info):
        raise ModelError(f"{missing[0]} is not among its weights")
    return model.eval()


def edits_for(config: Any, *, windows: bool) -> tuple[Edits, ...]:
    """The configuration edits that may make a decoder's attention bidirectional.

    transformers counts a bidirectional window without the token itself and a causal one with it, so a window of equal
    reach is one smaller. `windows`: keep the windows; otherwise they are made as wide as the longest text.
    """
    both = {"is_causal": False, "use_cache": False}
    fields = windows_of(config)
    if not fields:
        return (both,)
    if not windows:
        longest = max(int(getattr(config, "max_position_embeddings", 0) or 0), *fields.values()) + 1
        return (both | dict.fromkeys(fields, longest),)
    return both | {name: width - 1 for name, width in fields.items()}, both


# ---------------------------------------------------------------- ONNX


GRAPH = Path("onnx") / "model.onnx"
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
LARGEST = 1_500_000_000  # bytes of weights in the graph's own file; larger weights go into a second file


def check_onnx_packages() -> None:
    """Refuse early if a required package is not installed."""
    missing = [name for name in ONNX_PACKAGES if find_spec(name) is None]
    if missing:
        raise SpecError(f"--onnx needs {' and '.join(missing)}; type pip install {' '.join(missing)}")


class OneOutput(nn.Module):
    """A model's forward with the graph's inputs and output."""

    def __init__(self, model: Any, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return getattr(self.model(input_ids=input_ids, attention_mask=attention_mask), self.output)


def write_onnx(
    folder: Path, tokenizer: ExportedTokenizer, *, auto: Any = AutoModel, output: str = "last_hidden_state"
) -> None:
    """Write the graph of a folder's model into the folder."""
    plain = OneOutput(load(folder, auto, attn_implementation="eager"), output).eval()
    path = folder / GRAPH
    path.parent.mkdir()
    size = sum(weight.nbytes for weight in plain.parameters())
    axes = {0: "batch", 1: "length"}
    ids = torch.full((2, 7), tokenizer.pad)
    mask = torch.ones_like(ids)
    mask[-1, 4:] = 0
    try:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it notes what other packages lack
        with torch.no_grad(), quietly(), warnings.catch_warnings(action="ignore"):
            program: Any = torch.onnx.export(
                plain,
                (ids, mask),
                input_names=("input_ids", "attention_mask"),
                output_names=(output,),
                dynamic_shapes=(axes, axes),
                dynamo=True,
                verbose=False,
            )
            program.save(path, external_data=size > LARGEST)
    except Exception as wrong:  # the exporter raises many types for unsupported operations
        raise ModelError(
            f"{type(plain.model).__name__} cannot be written as ONNX ({one_line(wrong)[:200]}); leave out --onnx"
        ) from None


# ---------------------------------------------------------------- test vectors


SPREAD = 8  # recorded positions of a text
MOST_NUMBERS = 2**17  # fewer positions of wide models, at least two of each text: the files stay near 1 MB
COLUMNS = 256  # recorded columns of a language-model head's logits
Readbacks = Callable[[tuple[np.ndarray, ...]], dict[str, Readback]]


def vectors_of(
    tokenizer: ExportedTokenizer,
    config: Any,
    readbacks: Readbacks,
    *,
    prompts: Prompts | None = None,
    fills: bool = False,
) -> Vectors:
    """What the trained model computes for a few texts.

    `readbacks` gives its outputs for token ids, the hidden states as "hidden_states". `prompts`: it is a
    sentence-transformers model. `fills`: as for `recorded_texts`.
    """
    texts = recorded_texts(tokenizer, config, fills=fills)
    rows = tuple(texts.values())
    same = min(len(rows[0]), len(rows[1]))
    common = int(np.argmax(rows[0][:same] != rows[1][:same])) - 1  # argmax of no difference returns 0
    if common < 0:
        raise ModelError(f"{TEXTS[0]!r} and {TEXTS[1]!r} have the same tokens; the model cannot be exported")
    found = readbacks(rows)
    widths = {name: one.numbers[0].shape[-1] for name, one in found.items()}
    columns = {
        name: width if name == "hidden_states" else min(width, COLUMNS) for name, width in widths.items()
    }
    count = min(SPREAD, max(2, MOST_NUMBERS // (sum(columns.values()) * len(rows))))
    about = {
        "biphase": code_version(),
        "special": tokenizer.named,
        "prompts": prompts and prompts._asdict(),
        "common_position": common,
        "texts": [
            {
                "text": text,
                "ids": ids.tolist(),
                "positions": sorted({*_spread(len(ids), count), *[common] * (text in TEXTS[:2])}),
            }
            for text, ids in texts.items()
        ],
        "outputs": {
            name: {
                "class": one.auto.__name__,
                "fields": one.fields,
                "texts": len(one.numbers),
                "columns": None if columns[name] == widths[name] else _spread(widths[name], columns[name]),
            }
            for name, one in found.items()
        },
    }
    vectors = Vectors(about, {})
    for name, one in found.items():
        vectors.tensors[name] = vectors.select(name, [numbers.numpy() for numbers in one.numbers])
    for name, prompt in zip(EMBEDDINGS, ("", *prompts), strict=True) if prompts else ():
        prompted = recorded_texts(tokenizer, config, prompt, fills=fills)
        states = readbacks(tuple(prompted.values()))["hidden_states"].numbers
        means = torch.stack([rows.mean(0) for rows in states])
        vectors.tensors[name] = nn.functional.normalize(means, dim=1).numpy()
    return vectors


def _spread(length: int, count: int) -> list[int]:
    """`count` different numbers below `length`, or all, evenly apart, from the first to the last."""
    return [*dict.fromkeys(np.linspace(0, length - 1, count).astype(int).tolist())]


def verify_vectors(folder: Path, vectors: Vectors, *, onnx: bool) -> None:
    """Write the test vectors, and raise if transformers or the ONNX graph computes something else."""
    vectors.save(folder)
    for tool in ("transformers", *["onnx"] * onnx):
        with quietly():  # transformers warns about a context of a few tokens
            result = check(folder, tool)
        if result.differs:
            raise ModelError(
                f"{tool} computes something else than the trained model, which cannot be exported: {result.differs}"
                f"{'; leave out --onnx' if tool == 'onnx' else ''}"
            )


# ---------------------------------------------------------------- result


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    written: Written
    onnx: bool
    note: str = ""

    def describe(self) -> str:
        """The lines that `biphase export` prints."""
        only = self.written.attention
        attention = f" (with attn_implementation={only!r})" if only else ""
        lines = (
            f"{self.folder}: {self.written.architecture}{' and ONNX' if self.onnx else ''}; read again by transformers"
            f"{attention}, its numbers differ by at most {self.written.deviation:.0e} of their size",
            self.note,
            self.written.needs,
        )
        return "\n".join(filter(None, lines))
