"""How to load what was exported, as lines that a reader can copy."""

from __future__ import annotations

import json

from biphase.export.sentences import Prompts
from biphase.export.writing import LEAST, Written
from biphase.models.native import is_masked

FOLDER = "FOLDER"  # a reader puts the folder or the repository there


def loading(written: Written, prompts: Prompts, *, fills: bool, onnx: bool) -> list[str]:
    """Blocks of Python for an encoder; `fills`: its head has learnt to fill masks."""
    blocks = [hidden_states() + ("\n" + both_ways() if written.edits else "")]
    if fills:
        blocks.append(fill_mask() if is_masked(written.architecture) else fill_mask_here())
    blocks.append(embeddings(prompts))
    return [*blocks, *([graph()] if onnx else [])]


def hidden_states() -> str:
    return "\n".join(
        (
            "from transformers import AutoModel, AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{FOLDER}")',
            f'model = AutoModel.from_pretrained("{FOLDER}")',
            'hidden = model(**tokenizer("A text.", return_tensors="pt")).last_hidden_state',
        )
    )


def both_ways() -> str:
    return "\n".join(
        (
            'other = model(**tokenizer("A word.", return_tensors="pt")).last_hidden_state',
            f"assert hidden[0, 0].ne(other[0, 0]).any(), \"it reads forwards only: pip install 'transformers>={LEAST}'\"",
        )
    )


def fill_mask_here() -> str:
    return "\n".join(
        (
            "import biphase  # transformers has no class with a masked head for it",
            "",
            f'model = biphase.load("{FOLDER}")',
            'model.fill_mask(f"The cat {model.mask_token} on the mat.")',
        )
    )


def fill_mask() -> str:
    return "\n".join(
        (
            "from transformers import pipeline",
            "",
            f'fill = pipeline("fill-mask", model="{FOLDER}")',
            'fill(f"The cat {fill.tokenizer.mask_token} on the mat.")',
        )
    )


def embeddings(prompts: Prompts) -> str:
    return "\n".join(
        (
            "from sentence_transformers import SentenceTransformer",
            "",
            f'model = SentenceTransformer("{FOLDER}")',
            f'queries = model.encode(["Who sat on the mat?"], prompt_name="query")  # {json.dumps(prompts.query)} before each',
            f'documents = model.encode(["The cat sat on the mat."], prompt_name="document")  # {json.dumps(prompts.document)}',
            "model.similarity(queries, documents)",
        )
    )


def pipeline(kind: str) -> str:
    return "\n".join(
        ("from transformers import pipeline", "", f'pipeline("{kind}", model="{FOLDER}")("A text.")')
    )


def answers() -> str:
    return "\n".join(
        (
            "from transformers import AutoModelForQuestionAnswering, AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{FOLDER}")',
            f'model = AutoModelForQuestionAnswering.from_pretrained("{FOLDER}")',
            'said = model(**tokenizer("…", return_tensors="pt"))  # start_logits and end_logits of each token',
        )
    )


def graph(output: str = "last_hidden_state") -> str:
    return "\n".join(
        (
            "import onnxruntime",
            "from transformers import AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{FOLDER}")',
            f'session = onnxruntime.InferenceSession("{FOLDER}/onnx/model.onnx")',
            'inputs = tokenizer(["A text."], padding=True, return_tensors="np")',
            f"{output} = session.run(None, dict(inputs))[0]",
        )
    )
