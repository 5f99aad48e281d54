"""What can go wrong, as situations a caller may want to catch.

    BiphaseError
      ├─ SpecError     the study does not make sense          → the file, the field, the nearest name
      ├─ DataError     a corpus, tokenizer or shard is absent, malformed or changed
      ├─ StoreError    a folder of the store is damaged, or belongs to something else
      ├─ ModelError    a model cannot do what is asked of it
      ├─ TrainingError a run cannot go on (non-finite losses, a machine that lacks something)
      └─ ClusterError  Slurm is not here, does not answer or refuses

Each message is one line that says what is wrong and where, and ends with what to type next.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class BiphaseError(Exception):
    """Any refusal of biphase's own; the command line prints it as one line and exits with 2."""


class SpecError(BiphaseError):
    """The study does not make sense."""


class DataError(BiphaseError):
    """A corpus, tokenizer or shard is absent, malformed or changed."""


class StoreError(BiphaseError):
    """A folder of the store is damaged, or belongs to something else."""


class ModelError(BiphaseError):
    """A model cannot do what is asked of it."""


class TrainingError(BiphaseError):
    """A run cannot go on."""


class ClusterError(BiphaseError):
    """Slurm is not here, does not answer or refuses."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint that ends a refusal of `name`: the closest known name, or all of them."""
    names = [str(one) for one in known]
    close = get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def one_line(error: BaseException) -> str:
    """What went wrong, as one line: a refusal in its own words, anything else with its kind."""
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, BiphaseError) else f"{type(error).__name__}: {text}"


def no_safetensors(source: str) -> str:
    """The refusal of a model whose weights could only be read as a pickle."""
    return (
        f"{source} has no safetensors; pickled weights (pytorch_model.bin) can run code when they are read, so biphase "
        'never reads them; if you trust them, type python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained({source!r}).save_pretrained('safe')\" (an encoder: AutoModelForMaskedLM), copy its tokenizer's "
        "files to ./safe, and give that folder"
    )
