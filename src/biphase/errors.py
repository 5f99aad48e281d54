"""The exceptions that biphase raises on purpose.

Each message is one line that says what is wrong and where, and ends with what to type next.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class BiphaseError(Exception):
    """Base class of biphase's own errors; the command line prints it as one line and exits with status 2."""


class SpecError(BiphaseError):
    """The study is invalid; the message names the file, the field and the nearest known name."""


class DataError(BiphaseError):
    """A corpus, tokenizer or shard is absent, malformed or changed."""


class StoreError(BiphaseError):
    """A folder of the store is damaged, or belongs to another result."""


class ModelError(BiphaseError):
    """A model does not support what is requested."""


class TrainingError(BiphaseError):
    """A run cannot continue: nonfinite losses, or a missing hardware feature."""


class ClusterError(BiphaseError):
    """Slurm is not installed, does not answer or rejects a request."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown `name`: the closest known name, or all of them."""
    names = [str(other) for other in known]
    close = get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def one_line(error: BaseException) -> str:
    """Return an error's message as one line; errors that are not biphase's own get their class name in front."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, BiphaseError) else f"{type(error).__name__}: {text}"


def no_safetensors(source: str) -> str:
    """Return the error message for a model whose weights exist only as a pickle."""
    return (
        f"{source} has no safetensors; pickled weights (pytorch_model.bin) can run code when they are read, so biphase "
        'never reads them; if you trust them, type python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained({source!r}).save_pretrained('safe')\" (an encoder: AutoModelForMaskedLM), copy its tokenizer's "
        "files to ./safe, and give that folder"
    )
