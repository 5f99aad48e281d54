"""Does what was written read as what was trained? Hidden states of the same tokens, compared number by number.

Ours come from the trained model with our attention, as fine-tuning reads. Theirs come from the folder through plain
transformers: each text alone and without a mask, and some of them padded in one batch. The longest text is longer than
any window of the model's layers, as far as its context allows.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from biphase.errors import ModelError, one_line
from biphase.export.tokenizer import ExportedTokenizer
from biphase.finetune.encoder import TaskModel
from biphase.models.backbone import LanguageModel
from biphase.models.encoder import Encoder, pack
from biphase.models.heads import TextHead
from biphase.models.hub import quietly, windows_of
from biphase.store import read_json, write_json

# The most that a token's vector may differ, as a share of its length. Sums in another order come to about 1e-6.
TOLERANCE = 5e-5
LONGEST = 256  # of the probe texts, where no window asks for more
BEYOND = 32  # tokens more than the widest window


@dataclass(frozen=True)
class Probes:
    """Texts, shortest first, and what the trained model makes of them."""

    texts: tuple[np.ndarray, ...]
    numbers: tuple[
        Tensor, ...
    ]  # of each text: (tokens, n) hidden states or logits; or (n,) logits of the text


def probe_texts(config: Any, words: ExportedTokenizer) -> tuple[np.ndarray, ...]:
    """Texts of several lengths, of words drawn at random."""
    longest = min(words.context, max(LONGEST, max(windows_of(config).values(), default=0) + BEYOND))
    plain = np.array([number for number in range(words.vocab) if number not in words.special])
    draw = np.random.default_rng(0)
    lengths = sorted({min(length, longest) for length in (1, 3, 8, 21, 55)} | {longest})
    return tuple(draw.choice(plain, length).astype(np.int64) for length in lengths)


@torch.no_grad()
def ours(encoder: Encoder, texts: tuple[np.ndarray, ...]) -> Probes:
    """What the trained model makes of the texts."""
    device = next(encoder.parameters()).device
    hidden = []
    for text in texts:
        packed = pack([text], varlen=False).to(device)
        read = encoder(packed.ids, packed.positions, packed.pattern).flatten(0, 1)
        hidden.append(read[packed.at].float().cpu())
    return Probes(texts, tuple(hidden))


@torch.no_grad()
def ours_tuned(model: TaskModel, texts: tuple[np.ndarray, ...]) -> Probes:
    """What a fine-tuned model's head says of the texts, or of each of their tokens."""
    said = [model(pack([text], varlen=False)).float() for text in texts]
    per_text = isinstance(model.head, TextHead)
    return Probes(texts, tuple(one[0] if per_text else one for one in said))


@torch.no_grad()
def ours_logits(model: LanguageModel, texts: tuple[np.ndarray, ...]) -> Probes:
    """What the trained model's head makes of the shorter texts: a vocabulary of numbers for every token is much."""
    few = tuple(text for text in texts if len(text) < LONGEST) or texts[:1]
    said = []
    for text in few:
        packed = pack([text], varlen=False).to(model.head.device)
        logits = model.logits(packed.ids, packed.positions, packed.pattern).flatten(0, 1)
        said.append(logits[packed.at].float().cpu())
    return Probes(few, tuple(said))


@torch.no_grad()
def deviation(probes: Probes, read: Callable[..., Tensor], *, pad: int) -> float:
    """The largest difference of any vector; `read` is a transformers model's forward, as numbers of one kind."""
    worst = 0.0
    for texts, ids, mask in _inputs(probes, pad):
        said = read(input_ids=ids, **({} if mask is None else {"attention_mask": mask})).float().cpu()
        for row, text in enumerate(texts):
            theirs = said[row] if said.ndim == 2 else said[row, : len(probes.texts[text])]
            worst = max(worst, _apart(probes.numbers[text], theirs))
    return worst


def _inputs(probes: Probes, pad: int) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
    """Each text alone; and the shortest, one between and the longest side by side, padded."""
    for number, text in enumerate(probes.texts):
        yield [number], torch.from_numpy(text)[None], None
    last = len(probes.texts) - 1
    few = sorted({0, (last + 1) // 2, last})
    ids = torch.full((len(few), len(probes.texts[last])), pad)
    mask = torch.zeros_like(ids)
    for row, number in enumerate(few):
        text = torch.from_numpy(probes.texts[number])
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    yield few, ids, mask


def _apart(ours: Tensor, theirs: Tensor) -> float:
    """Of the token that differs most: the length of the difference, as a share of the vector's."""
    if not bool(theirs.isfinite().all()):
        return float("inf")
    share = (ours - theirs).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-12)
    return float(share.max())


# ---------------------------------------------------------------- writing
# A trained model → files that plain transformers loads, with the same hidden states; or a refusal that says why.
#
# First as a class with a masked head (`models/native.py`). Else as the class it has, with a configuration that makes it
# read in both directions: what may be said there is tried, and the folder is read again each time. Only what agrees is kept.
#
# transformers 4 passes over fields that it does not know, `is_causal` among them, and would read such a folder as a decoder
# without a word. It does look at the `format` in the header of a weights file and refuses one that it does not know; version
# 5 does not look. So the header names the version that is needed.


CONFIG = "config.json"
LEAST = "5.17"  # of transformers: the least version that exports are tested with
NEW_FIELDS = ("is_causal", "rope_parameters")  # what transformers 4 passes over
FORMAT = f"one for transformers>={LEAST}, which older versions would read wrongly"
Edits = dict[str, Any]


@dataclass(frozen=True)
class Readback:
    """What a written model must give: the numbers of the trained one, through one of transformers' own loaders."""

    auto: Any  # AutoModel, AutoModelForMaskedLM, …
    probes: Probes
    numbers: Callable[[Any], Tensor]  # of what it returns


@dataclass(frozen=True)
class Form:
    """One way to write a model: a class that holds its weights, and what its configuration may say."""

    model: Any
    asked: tuple[Readback, ...]
    tries: tuple[Edits, ...] = ({},)
    native: bool = False  # as EuroBERT, whatever it was


@dataclass(frozen=True)
class Written:
    """How a model stands in its folder."""

    architecture: str  # the class that wrote it
    native: bool
    deviation: float  # the largest difference that was seen
    edits: Edits  # of its configuration, to read in both directions
    attention: str  # "" where any will do, or the only one that agrees
    marked: bool = False  # so that transformers 4 refuses it

    @property
    def needs(self) -> str:
        """Which version of transformers it needs, and what older ones do with it; "" where any will do."""
        if not (self.native or self.marked):
            return ""
        older = "5.0 and 5.1 read it forwards only" if self.edits else ""
        return f"It needs transformers {LEAST} or later: 4.x refuses it{', ' if older else ''}{older}."


def write_model(folder: Path, forms: Iterable[Form], words: ExportedTokenizer, *, title: str) -> Written:
    """Write the first form that agrees with the trained model, with its tokens in its configuration."""
    seen: list[str] = []
    for form in forms:
        _save(form.model, folder, words.token_ids)
        found = _best(folder, form, words.pad, seen)
        if found is not None:
            # EuroBERT is refused by its name.
            marked = not form.native and any(name in read_json(folder / CONFIG) for name in NEW_FIELDS)
            if marked:
                _refuse_old_versions(folder)
                load(folder, form.asked[0].auto)
            return Written(type(form.model).__name__, form.native, *found, marked)
        for path in (*folder.glob("*.safetensors*"), folder / CONFIG):
            path.unlink(missing_ok=True)
    why = "; ".join(dict.fromkeys(seen)) or "transformers has no class that computes the same"
    raise ModelError(f"{title} cannot be exported: {why}")


def _save(model: Any, folder: Path, fields: Edits) -> None:
    for name, value in fields.items():
        if hasattr(model.config, name):
            with contextlib.nullcontext() if value is not None else contextlib.suppress(Exception):
                setattr(model.config, name, value)  # a few configurations do not let a token be None
    with quietly():
        model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # an encoder generates nothing


def _refuse_old_versions(folder: Path) -> None:
    """Write the weights again under a header that transformers 4 does not take."""
    for path in folder.glob("*.safetensors"):
        marked = path.with_suffix(".marked")
        save_file(load_file(path), marked, metadata={"format": FORMAT})
        marked.replace(path)


def _best(folder: Path, form: Form, pad: int, seen: list[str]) -> tuple[float, Edits, str] | None:
    """The edits of the configuration under which the folder agrees best; None if it agrees under none."""
    plain = read_json(folder / CONFIG)
    for attention in ("", "eager"):
        said = {"attn_implementation": attention} if attention else {}
        agreeing: list[tuple[float, Edits]] = []
        for edits in form.tries:
            write_json(folder / CONFIG, plain | edits | said)
            try:
                apart = max(_reread(folder, one, pad, eager=not attention) for one in form.asked)
            except Exception as wrong:  # a class may refuse a field, or fail in its forward, in its own way
                seen.append(f"{plain['architectures'][0]}: {one_line(wrong)[:200]}")
                continue
            if apart <= TOLERANCE:
                agreeing.append((apart, edits))
            else:
                how = json.dumps(edits)[1:-1] or "its own configuration"
                seen.append(
                    f"{plain['architectures'][0]} with {how} differs by {apart:.0e} of its numbers' size"
                )
        if agreeing:
            apart, edits = min(agreeing, key=lambda one: one[0])
            write_json(folder / CONFIG, plain | edits | said)
            return apart, edits, attention
    return None


def _reread(folder: Path, asked: Readback, pad: int, *, eager: bool) -> float:
    """How far the folder's model is from the trained one: as it loads by itself, and with the plainest attention."""
    model = load(folder, asked.auto)

    def read(**inputs: Tensor) -> Tensor:
        return asked.numbers(model(**inputs))

    apart = deviation(asked.probes, read, pad=pad)
    if eager and apart <= TOLERANCE:
        model.set_attn_implementation("eager")
        apart = max(apart, deviation(asked.probes, read, pad=pad))
    return apart


def load(folder: Path, auto: Any = AutoModel, **more: Any) -> Any:
    """A model of a folder, as anybody would load it, ready to be asked."""
    with quietly():
        model, said = auto.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **more,
        )
    lacking = sorted(name for name in said["missing_keys"] if not name.startswith("pooler."))
    if lacking:
        raise ModelError(f"{lacking[0]} is not among its weights")
    return model.eval()


def edits_for(config: Any, *, windows: bool) -> tuple[Edits, ...]:
    """What a configuration may say so that a decoder reads in both directions.

    transformers counts a window to both sides without the token itself, and one to the past with it; so a window that
    is to reach as far as it did is one less. `windows`: they hold; else they are to be as wide as the longest text.
    """
    both = {"is_causal": False, "use_cache": False}
    fields = windows_of(config)
    if not fields:
        return (both,)
    if not windows:
        longest = max(int(getattr(config, "max_position_embeddings", 0) or 0), *fields.values()) + 1
        return (both | dict.fromkeys(fields, longest),)
    return both | {name: width - 1 for name, width in fields.items()}, both


# ---------------------------------------------------------------- exported
# What an export leaves behind, for whoever asked.


@dataclass(frozen=True)
class Exported:
    folder: Path
    written: Written
    onnx: bool
    note: str = ""

    def words(self) -> str:
        attention = (
            f" (with attn_implementation={self.written.attention!r})" if self.written.attention else ""
        )
        more = " and ONNX" if self.onnx else ""
        note = f"\n{self.note}" if self.note else ""
        needs = f"\n{self.written.needs}" if self.written.needs else ""
        return (
            f"{self.folder}: {self.written.architecture}{more}; read again by transformers{attention}, its numbers "
            f"differ by at most {self.written.deviation:.0e} of their size{note}{needs}"
        )
