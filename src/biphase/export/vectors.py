"""Test vectors of an exported folder: a few texts with what the trained model computes for them, and their check.

`writing.vectors_of` makes them from the model in memory, so they do not depend on what was written. `check` loads the
folder with a tool's own code, computes them again and names what differs. Nothing of biphase that loads or builds models
is imported here: `verify` runs this module in a fresh process for each tool, where no attention function or class of
ours is registered. docs/export.md describes the files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from biphase.errors import ModelError, SpecError, one_line
from biphase.store import write_json

FOLDER = "vectors"  # not beside the weights: some servers load every *.safetensors there
FORMAT = 1
# The largest allowed difference of a row, relative to its norm, by the type that the tool computes in. In fp32 another
# order of sums gives about 1e-6, and up to 4e-4 for the worst token of a real model of 30 layers.
TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
EMBEDDINGS = (
    "embeddings",
    "query_embeddings",
    "document_embeddings",
)  # without a prompt, and with those of ST's names


def apart(right: np.ndarray, found: np.ndarray) -> float:
    """The largest difference of a row, relative to its norm, or to the median norm if that is larger."""
    if found.shape != right.shape or not np.isfinite(found).all():
        return float("inf")
    norms = np.linalg.norm(right, axis=-1)
    share = np.linalg.norm(found - right, axis=-1) / np.maximum(norms, np.median(norms)).clip(1e-12)
    return float(share.max())


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class Vectors:
    """The content of vectors.json, and the tensors beside it by name."""

    about: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def texts(self) -> list[str]:
        return [each["text"] for each in self.about["texts"]]

    @property
    def ids(self) -> list[list[int]]:
        return [each["ids"] for each in self.about["texts"]]

    def select(self, name: str, outputs: Iterable[np.ndarray]) -> np.ndarray:
        """The recorded rows and columns of an output: of each text (tokens, n), or (n,) if it is one of the text."""
        columns = self.about["outputs"][name]["columns"]
        rows = [
            output[None] if output.ndim == 1 else output[text["positions"]]
            for output, text in zip(outputs, self.about["texts"], strict=False)
        ]
        return np.concatenate(rows)[:, slice(None) if columns is None else columns]

    def moved(self, tensors: dict[str, np.ndarray]) -> float | None:
        """How far the states at the last common token of the first two texts are apart; None without states.

        A token after it differs, so this is 0 for causal attention.
        """
        first, second = (text["positions"] for text in self.about["texts"][:2])
        for name in self.about["outputs"]:
            rows = tensors.get(name)
            if rows is not None and len(rows) > len(self.about["texts"]):  # of tokens, not of texts
                at = self.about["common_position"]
                pair = rows[[first.index(at), len(first) + second.index(at)]]
                return apart(pair[:1], pair[1:])
        return None

    def save(self, folder: Path) -> None:
        (folder / FOLDER).mkdir()
        write_json(folder / FOLDER / "vectors.json", {"format": FORMAT} | self.about)
        # safetensors writes the memory as it lies, and selecting columns may transpose it.
        tensors = {name: np.ascontiguousarray(rows) for name, rows in self.tensors.items()}
        save_file(tensors, folder / FOLDER / "vectors.safetensors")


def read(folder: Path) -> Vectors:
    """The test vectors of a folder; refuse a folder without them."""
    place = folder / FOLDER
    if not (place / "vectors.json").is_file():
        raise SpecError(
            f"{folder} has no {FOLDER}/vectors.json, so there is nothing to verify it with; type a folder that "
            "biphase export wrote, or export it again"
        )
    try:
        about = json.loads((place / "vectors.json").read_text(encoding="utf-8"))
        vectors = Vectors(about, load_file(place / "vectors.safetensors"))
        known = about["format"] == FORMAT
        for name, output in about["outputs"].items() if known else ():
            if not re.fullmatch(r"AutoModel(For\w+)?", output["class"]) or name not in vectors.tensors:
                raise ValueError(f"output {name!r}")
    except Exception as wrong:  # files from outside: many types
        raise ModelError(
            f"{place} cannot be read ({one_line(wrong)[:200]}); export the folder again"
        ) from None
    if not known:
        raise SpecError(
            f"{place} has format {about['format']}, and this version reads {FORMAT}; update biphase"
        )
    return vectors


# ---------------------------------------------------------------- tools


@dataclass(frozen=True)
class Reading:
    """What a tool computed."""

    tensors: dict[
        str, np.ndarray
    ]  # by the names of the vectors; "NAME, padded" is of texts in a padded batch
    dtype: str = "float32"
    states: list[np.ndarray] = field(default_factory=list)  # of all tokens, to tell how a tool pools them
    failed: str = ""  # what could not be computed


Run = Callable[[np.ndarray, np.ndarray | None], np.ndarray]  # ids, mask → an output


def _check_ids(vectors: Vectors, encode: Callable[[str], list[int]]) -> None:
    for text, right in zip(vectors.texts, vectors.ids, strict=True):
        found = [int(number) for number in encode(text)]
        if found != right:
            at = next((n for n, (a, b) in enumerate(zip(found, right, strict=False)) if a != b), None)
            at = min(len(found), len(right)) if at is None else at
            raise ModelError(
                f"tokens: {text[:40]!r} is read as {len(found)} tokens, {found[at : at + 5]} from position {at} on; the "
                f"model was trained with {len(right)}, {right[at : at + 5]} there"
            )


def _tokenizer(folder: Path, vectors: Vectors) -> Any:
    """The tokenizer as transformers loads it, which gives the recorded ids."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as wrong:  # tokenizer classes raise many types
        raise ModelError(f"tokens: the tokenizer cannot be loaded ({one_line(wrong)[:200]})") from None
    _check_ids(vectors, lambda text: tokenizer(text, truncation=True)["input_ids"])
    for name, right in vectors.about["special"].items():
        if (found := getattr(tokenizer, f"{name}_id")) != right:
            raise ModelError(f"tokens: {name} is {found}, and the model was trained with {right}")
    return tokenizer


def running(model: Any, fields: Sequence[str]) -> Run:
    """An output of a model of transformers: a field of what it returns, or several, stacked."""
    import torch

    @torch.no_grad()
    def run(ids: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        inputs = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
        result = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})
        parts = [result[name].float().numpy() for name in fields]
        return np.stack(parts, axis=-1) if len(parts) > 1 else parts[0]

    return run


def both_ways(run: Run, texts: Sequence[Any], pad: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """An output of each text alone without a mask; and the same, the first and the last text in one padded batch."""
    alone = [run(np.array([text]), None)[0] for text in texts]
    ends = texts[0], texts[-1]  # either may be the longer one: outputs of long texts are not always recorded
    mask = np.array([[n < len(text) for n in range(max(map(len, ends)))] for text in ends], np.int64)
    padded = np.full_like(mask, pad)
    for row, text in enumerate(ends):
        padded[row, : len(text)] = text
    first, last = (
        one if one.ndim == 1 else one[: len(text)] for one, text in zip(run(padded, mask), ends, strict=True)
    )
    return alone, [first, *alone[1:-1], last]


def _outputs(vectors: Vectors, name: str, run: Run) -> dict[str, np.ndarray]:
    """The recorded rows of an output, of texts that are read alone and in a padded batch."""
    texts = vectors.ids[: vectors.about["outputs"][name]["texts"]]
    alone, batch = both_ways(run, texts, vectors.about["special"]["pad_token"])
    return {name: vectors.select(name, alone), f"{name}, padded": vectors.select(name, batch)}


def _transformers(folder: Path, vectors: Vectors) -> Reading:
    import transformers

    _tokenizer(folder, vectors)
    tensors: dict[str, np.ndarray] = {}
    dtype = "float32"
    for name, output in vectors.about["outputs"].items():
        try:
            model = getattr(transformers, output["class"]).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        except Exception as wrong:  # model classes raise many types; the states may say more
            if not tensors:
                raise
            return Reading(
                tensors, dtype, failed=f"{output['class']} cannot be loaded: {one_line(wrong)[:200]}"
            )
        model.eval()
        dtype = str(model.dtype).removeprefix("torch.")
        tensors |= _outputs(vectors, name, running(model, output["fields"]))
    return Reading(tensors, dtype)


def _onnx(folder: Path, vectors: Vectors) -> Reading:
    import onnxruntime

    _tokenizer(folder, vectors)
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    given = {one.name for one in session.get_outputs()}
    tensors: dict[str, np.ndarray] = {}
    for name, output in vectors.about["outputs"].items():
        if not given.issuperset(output["fields"]):
            continue  # the graph has one of them

        def run(ids: Any, mask: Any, fields: Any = output["fields"]) -> np.ndarray:
            mask = np.ones_like(ids) if mask is None else mask
            result: Any = session.run(fields, {"input_ids": ids, "attention_mask": mask})
            return result[0]

        tensors |= _outputs(vectors, name, run)
    return Reading(tensors)


def _refuse_code(folder: Path) -> None:
    """Raise for what sentence-transformers would run: before version 6, code and pickles of a local folder."""
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    for name in (module["type"] for module in modules):
        if not name.startswith("sentence_transformers."):
            raise ModelError(
                f"modules.json names {name}, a class outside sentence-transformers, which is not run"
            )
    if not any(folder.glob("*.safetensors")):
        raise ModelError("there is no *.safetensors beside its config.json, and pickled weights are not read")


def _sentence_transformers(folder: Path, vectors: Vectors) -> Reading:
    from sentence_transformers import SentenceTransformer

    _refuse_code(folder)
    model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    encode = getattr(model, "preprocess", None) or model.tokenize  # the name before version 6
    _check_ids(vectors, lambda text: encode([text])["input_ids"][0].tolist())
    options = {"batch_size": 2, "show_progress_bar": False}  # two texts, one of them padded
    states = model.encode(vectors.texts, output_value="token_embeddings", **options)
    states = [one.float().numpy() for one in states]
    for text, ids, state in zip(vectors.texts, vectors.ids, states, strict=True):
        if len(state) != len(ids):
            raise ModelError(f"prompts: {text[:40]!r} gets {len(state)} vectors for its {len(ids)} tokens")
    calls = dict(zip(EMBEDDINGS, (model.encode, model.encode_query, model.encode_document), strict=True))
    found = {name: np.asarray(call(vectors.texts, **options), np.float32) for name, call in calls.items()}
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Reading({"hidden_states, padded": vectors.select("hidden_states", states), **found}, dtype, states)


def _mteb(folder: Path, vectors: Vectors) -> Reading:
    import mteb
    from datasets import Dataset
    from mteb.models import SentenceTransformerEncoderWrapper
    from mteb.types import PromptType
    from torch.utils.data import DataLoader

    _refuse_code(folder)
    model: Any = SentenceTransformerEncoderWrapper(str(folder), device="cpu")
    task = mteb.get_task("SciFact").metadata  # of any retrieval task: it decides which prompts apply
    texts: Any = Dataset.from_dict({"text": vectors.texts})
    inputs = DataLoader(texts, batch_size=2)
    found = {
        name: model.encode(
            inputs, task_metadata=task, hf_split="test", hf_subset="default", prompt_type=kind,
            batch_size=2, show_progress_bar=False,
        )
        for name, kind in zip(EMBEDDINGS, (None, PromptType.query, PromptType.document), strict=True)
    }  # fmt: skip
    dtype = str(next(model.model.parameters()).dtype).removeprefix("torch.")
    return Reading({name: np.asarray(rows, np.float32) for name, rows in found.items()}, dtype)


# With the package that must be installed.
TOOLS: dict[str, tuple[str, Callable[[Path, Vectors], Reading]]] = {
    "transformers": ("transformers", _transformers),
    "sentence-transformers": ("sentence_transformers", _sentence_transformers),
    "onnx": ("onnxruntime", _onnx),
    "mteb": ("mteb", _mteb),
}


def why_not(tool: str, folder: Path, vectors: Vectors) -> str:
    """Why a tool cannot check a folder; empty if it can."""
    if tool not in TOOLS:
        return f"type one of {', '.join(TOOLS)}"
    if tool == "onnx" and not (folder / "onnx" / "model.onnx").is_file():
        return f"{folder} has no onnx/model.onnx; export it with --onnx"
    if tool in ("sentence-transformers", "mteb") and "embeddings" not in vectors.tensors:
        return f"{folder} was not exported as a sentence-transformers model; leave it out"
    if find_spec(TOOLS[tool][0]) is None:
        return f"it is not installed; type pip install {TOOLS[tool][0].replace('_', '-')}"
    return ""


# ---------------------------------------------------------------- verdict


@dataclass(frozen=True)
class Result:
    """What a tool's check found; it passes if nothing differs."""

    tool: str
    version: str
    differs: str = ""
    dtype: str = ""
    tolerance: float = 0.0
    attention: str = ""
    measured: tuple[dict[str, Any], ...] = ()  # name, relative, absolute, cosine

    def describe(self) -> str:
        """The lines that `biphase verify` prints."""
        head = f"{'FAIL' if self.differs else 'pass'}  {self.tool} {self.version}"
        if self.differs:
            head += f": {self.differs}"
        else:
            head += f", {self.dtype}: tokens are equal, attention is {self.attention}"
        lines = (
            f"      {one['name']:<22} differ by {one['relative']:.1e} of their size ({self.tolerance:.0e} allowed), at "
            f"most {one['absolute']:.1e}; cosine {one['cosine']:.6f}"
            for one in self.measured
        )
        return "\n".join((head, *lines))


def check(folder: Path, tool: str) -> Result:
    """Load a folder with a tool in this process, and compare."""
    package, compute = TOOLS[tool]
    version = ""
    try:
        version = import_module(package).__version__
        vectors = read(folder)
        reading = compute(folder, vectors)
        measured = tuple(_measure(name, vectors, rows) for name, rows in reading.tensors.items())
    except ModelError as found:  # nothing further can be compared
        return Result(tool, version, str(found))
    except Exception as wrong:  # tools raise many types
        return Result(tool, version, f"it cannot be loaded or run: {one_line(wrong)[:300]}")
    allowed = TOLERANCE.get(reading.dtype, TOLERANCE["float32"])
    plain = {name.removesuffix(", padded"): rows for name, rows in reading.tensors.items()}
    moved, trained = vectors.moved(plain), vectors.moved(vectors.tensors)
    causal = moved is not None and trained is not None and moved < trained / 10
    attention = "not visible in these outputs" if moved is None else "causal" if causal else "bidirectional"
    differs = _diagnose(vectors, reading, measured, allowed, causal=causal)
    return Result(tool, version, differs, reading.dtype, allowed, attention, measured)


def _measure(name: str, vectors: Vectors, found: np.ndarray) -> dict[str, Any]:
    right = vectors.tensors[name.removesuffix(", padded")]
    if found.shape != right.shape:
        raise ModelError(f"{name} has shape {found.shape} instead of {right.shape}")
    norms = np.linalg.norm(right, axis=-1) * np.linalg.norm(found, axis=-1)
    cosine = ((right * found).sum(-1) / norms.clip(1e-12)).min()
    return {
        "name": name,
        "relative": apart(right, found),
        "absolute": float(np.abs(found - right).max()),
        "cosine": float(cosine),
    }


def _diagnose(
    vectors: Vectors, reading: Reading, measured: tuple[dict[str, Any], ...], allowed: float, *, causal: bool
) -> str:
    """What differs, as one line; empty if nothing does."""
    if causal:
        return (
            "causal attention: a later token does not change the states before it; the model was trained with "
            "bidirectional attention"
        )
    wrong = {one["name"]: one for one in measured if not one["relative"] <= allowed}
    if not wrong:
        return reading.failed
    worst = max(wrong.values(), key=lambda one: one["relative"])
    size = f"{worst['name']} differ by {worst['relative']:.0e} of their size"
    if wrong.keys() <= {*EMBEDDINGS[1:]}:
        right = {
            name: prompt for name, prompt in vectors.about["prompts"].items() if f"{name}_embeddings" in wrong
        }
        return (
            f"prompts: {size}, and embeddings without a prompt agree; the prompts must be {json.dumps(right)}"
        )
    states = [one for one in measured if one["name"] not in EMBEDDINGS]
    if states and not any(one["name"] in wrong for one in states):
        return f"pooling: {size}, and the states of the tokens agree; {_pooled(vectors, reading)}"
    if worst["relative"] <= TOLERANCE["bfloat16"]:
        return (
            f"dtype: {size}, as 16-bit rounding does, but it was loaded as {reading.dtype}: the weights were rounded, or "
            "changed a little"
        )
    if all(name.endswith(", padded") for name in wrong) and len(states) > 1:
        return f"padding: {size}, and texts that are read alone agree; the attention mask is ignored"
    what = "weights" if states else "weights, attention or pooling"
    return f"{what}: {size} (cosine {worst['cosine']:.4f})"


def _pooled(vectors: Vectors, reading: Reading) -> str:
    found = reading.tensors["embeddings"]
    unit = found / np.linalg.norm(found, axis=1, keepdims=True).clip(1e-12)
    ways: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "the mean, not of length 1": lambda rows: rows.mean(0),
        "the first token's (cls)": lambda rows: rows[0],
        "the last token's": lambda rows: rows[-1],
        "the largest numbers' (max)": lambda rows: rows.max(0),
    }
    for name, pool in ways.items():
        pooled = np.stack([pool(rows) for rows in reading.states])
        if apart(pooled / np.linalg.norm(pooled, axis=1, keepdims=True), unit) <= TOLERANCE["float16"]:
            return f"an embedding is {name}; it must be the mean of all tokens, of length 1"
    return "an embedding must be the mean of all tokens, of length 1"


def verify(folder: Path, tool: str) -> Result:
    """`check` in a fresh process, without the network."""
    command = [sys.executable, "-P", "-m", "biphase.export.vectors", str(folder), tool]
    alone = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Result(tool, "", f"its process ended with code {done.returncode}: {last[:300]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print("\n" + json.dumps(asdict(check(Path(sys.argv[1]), sys.argv[2]))))
