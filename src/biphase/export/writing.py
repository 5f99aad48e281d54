"""Write a trained model as files that plain transformers loads, and verify that its outputs are unchanged.

Verification compares hidden states or logits token by token. The reference comes from the trained model with biphase's
attention, as in fine-tuning. The other side is loaded from the folder by plain transformers: each text alone without a
mask, and some texts padded in one batch. The longest text exceeds any attention window of the model, as far as its
context allows.

`write_model` first tries a class with a masked-LM head (models/native.py), then the model's own class with a
configuration that makes its attention bidirectional. It tries the possible configurations, reads the folder back each
time, and keeps only one that agrees.

transformers 4 silently ignores configuration fields that it does not know, such as `is_causal`, and would run such a
model as a decoder. It does check the `format` in the header of a weights file and refuses an unknown one, while version
5 does not check it. So the header of such files names the required version.
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
from biphase.models.encoder import Encoder, TextHead, pack
from biphase.models.hub import quietly, windows_of
from biphase.store import read_json, write_json

# The largest allowed difference of a token's vector, relative to its norm. Summation order alone gives about 1e-6.
TOLERANCE = 5e-5
LONGEST = 256  # tokens of the longest probe text, unless a window requires more
BEYOND = 32  # tokens beyond the widest window


@dataclass(frozen=True)
class Probes:
    """Texts, shortest first, and the trained model's outputs for them."""

    texts: tuple[np.ndarray, ...]
    numbers: tuple[
        Tensor, ...
    ]  # of each text: (tokens, n) hidden states or logits; or (n,) logits of the text


def probe_texts(config: Any, words: ExportedTokenizer) -> tuple[np.ndarray, ...]:
    """Texts of several lengths made of random tokens."""
    longest = min(words.context, max(LONGEST, max(windows_of(config).values(), default=0) + BEYOND))
    plain = np.array([number for number in range(words.vocab) if number not in words.special])
    draw = np.random.default_rng(0)
    lengths = sorted({min(length, longest) for length in (1, 3, 8, 21, 55)} | {longest})
    return tuple(draw.choice(plain, length).astype(np.int64) for length in lengths)


@torch.no_grad()
def ours(encoder: Encoder, texts: tuple[np.ndarray, ...]) -> Probes:
    """The trained encoder's hidden states of the texts."""
    device = next(encoder.parameters()).device
    hidden = []
    for text in texts:
        packed = pack([text], varlen=False).to(device)
        read = encoder(packed.ids, packed.positions, packed.pattern).flatten(0, 1)
        hidden.append(read[packed.at].float().cpu())
    return Probes(texts, tuple(hidden))


@torch.no_grad()
def ours_tuned(model: TaskModel, texts: tuple[np.ndarray, ...]) -> Probes:
    """The logits of a fine-tuned model's head, per text or per token."""
    said = [model(pack([text], varlen=False)).float() for text in texts]
    per_text = isinstance(model.head, TextHead)
    return Probes(texts, tuple(one[0] if per_text else one for one in said))


@torch.no_grad()
def ours_logits(model: LanguageModel, texts: tuple[np.ndarray, ...]) -> Probes:
    """The trained model's logits of the shorter texts; logits of long texts would need too much memory."""
    few = tuple(text for text in texts if len(text) < LONGEST) or texts[:1]
    said = []
    for text in few:
        packed = pack([text], varlen=False).to(model.head.device)
        logits = model.logits(packed.ids, packed.positions, packed.pattern).flatten(0, 1)
        said.append(logits[packed.at].float().cpu())
    return Probes(few, tuple(said))


@torch.no_grad()
def deviation(probes: Probes, read: Callable[..., Tensor], *, pad: int) -> float:
    """The largest difference of any vector; `read` calls a transformers model and returns the compared tensor."""
    worst = 0.0
    for texts, ids, mask in _inputs(probes, pad):
        said = read(input_ids=ids, **({} if mask is None else {"attention_mask": mask})).float().cpu()
        for row, text in enumerate(texts):
            theirs = said[row] if said.ndim == 2 else said[row, : len(probes.texts[text])]
            worst = max(worst, _apart(probes.numbers[text], theirs))
    return worst


def _inputs(probes: Probes, pad: int) -> Iterator[tuple[list[int], Tensor, Tensor | None]]:
    """Each text alone; then the shortest, a middle and the longest as one padded batch."""
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
    """The largest difference of a token's vector, relative to its norm; infinite if any value is not finite."""
    if not bool(theirs.isfinite().all()):
        return float("inf")
    share = (ours - theirs).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-12)
    return float(share.max())


# ---------------------------------------------------------------- writing


CONFIG = "config.json"
LEAST = "5.17"  # the lowest version of transformers that exports are tested with
NEW_FIELDS = ("is_causal", "rope_parameters")  # fields that transformers 4 ignores
FORMAT = f"one for transformers>={LEAST}, which older versions would read wrongly"
Edits = dict[str, Any]


@dataclass(frozen=True)
class Readback:
    """What a written model must return when loaded by one of transformers' auto classes."""

    auto: Any  # AutoModel, AutoModelForMaskedLM, …
    probes: Probes
    numbers: Callable[[Any], Tensor]  # extracts the compared tensor from the model's output


@dataclass(frozen=True)
class Form:
    """One way to write a model: a class that holds its weights, and possible edits of its configuration."""

    model: Any
    asked: tuple[Readback, ...]
    tries: tuple[Edits, ...] = ({},)
    native: bool = False  # written as EuroBERT, whatever its original class


@dataclass(frozen=True)
class Written:
    """How a model was written."""

    architecture: str  # the class that wrote it
    native: bool
    deviation: float  # the largest difference found
    edits: Edits  # of its configuration, to make attention bidirectional
    attention: str  # the only implementation that agrees; empty: any
    marked: bool = False  # the weights have a header that transformers 4 refuses

    @property
    def needs(self) -> str:
        """The required version of transformers and what older ones do, as a sentence; empty if any works."""
        if not (self.native or self.marked):
            return ""
        older = "5.0 and 5.1 read it forwards only" if self.edits else ""
        return f"It needs transformers {LEAST} or later: 4.x refuses it{', ' if older else ''}{older}."


def write_model(folder: Path, forms: Iterable[Form], words: ExportedTokenizer, *, title: str) -> Written:
    """Write the first form that agrees with the trained model, with its token ids in its configuration."""
    seen: list[str] = []
    for form in forms:
        _save(form.model, folder, words.token_ids)
        found = _best(folder, form, words.pad, seen)
        if found is not None:
            # Older versions refuse EuroBERT by its name.
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


def _best(folder: Path, form: Form, pad: int, seen: list[str]) -> tuple[float, Edits, str] | None:
    """The configuration edits under which the folder agrees best; None if it agrees under none."""
    plain = read_json(folder / CONFIG)
    for attention in ("", "eager"):
        said = {"attn_implementation": attention} if attention else {}
        agreeing: list[tuple[float, Edits]] = []
        for edits in form.tries:
            write_json(folder / CONFIG, plain | edits | said)
            try:
                apart = max(_reread(folder, one, pad, eager=not attention) for one in form.asked)
            except Exception as wrong:  # model classes raise many types
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
    """The difference between the folder's model and the trained one, with default and with eager attention."""
    model = load(folder, asked.auto)

    def read(**inputs: Tensor) -> Tensor:
        return asked.numbers(model(**inputs))

    apart = deviation(asked.probes, read, pad=pad)
    if eager and apart <= TOLERANCE:
        model.set_attn_implementation("eager")
        apart = max(apart, deviation(asked.probes, read, pad=pad))
    return apart


def load(folder: Path, auto: Any = AutoModel, **more: Any) -> Any:
    """Load a folder's model as a user would, in fp32 and evaluation mode; raise if weights are missing."""
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


# ---------------------------------------------------------------- result


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    written: Written
    onnx: bool
    note: str = ""

    def words(self) -> str:
        """The lines that `biphase export` prints."""
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
