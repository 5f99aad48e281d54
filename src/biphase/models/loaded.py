"""`biphase.load`: a saved model that predicts masked tokens and returns hidden states.

It works for every model that biphase trains, even if transformers has no class with a masked-language-model head for
the model's family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from biphase.attention import AttentionPattern
from biphase.errors import ModelError, SpecError
from biphase.models.backbone import LanguageModel, from_hub, probe
from biphase.models.hub import load_tokenizer
from biphase.specs import Hub


class LoadedModel:
    """A bidirectional language model in fp32 on the CPU, with its tokenizer."""

    def __init__(self, model: LanguageModel, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    @property
    def mask_token(self) -> str:
        token = self.tokenizer.mask_token
        if token is None:
            raise ModelError(
                "the model's tokenizer has no mask token; export an adapted model, which has one"
            )
        return token

    @torch.no_grad()
    def hidden_states(self, text: str) -> Tensor:
        """Return the hidden states of a text, (tokens, width), as `AutoModel` gives them."""
        return self.model.hidden(*self._inputs(text))[0]

    @torch.no_grad()
    def fill_mask(self, text: str, top: int = 5, *, shifted: bool = False) -> list[list[tuple[str, float]]]:
        """Return, for each mask token of the text, the `top` most probable tokens with their probabilities.

        Set `shifted` for a model trained with MNTP, which predicts a token at the position before it.
        """
        ids, positions, pattern = self._inputs(text)
        at = (ids[0] == self.tokenizer.convert_tokens_to_ids(self.mask_token)).nonzero()[:, 0]
        if not len(at):
            raise SpecError(
                f"there is no mask token in {text!r}; write {self.mask_token} where a word is asked for"
            )
        hidden = self.model.hidden(ids, positions, pattern)[0]
        logits = self.model.output.logits(hidden[(at - int(shifted)).clamp(min=0)])
        if not 1 <= top <= logits.shape[-1]:
            raise SpecError(
                f"top={top}: the model knows {logits.shape[-1]:,} tokens; ask for 1 of them or more"
            )
        likely = logits.softmax(-1).topk(top)
        return [
            [(self.tokenizer.decode([token]), share) for token, share in zip(tokens, shares, strict=True)]
            for tokens, shares in zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        ]

    def _inputs(self, text: str) -> tuple[Tensor, Tensor, AttentionPattern]:
        ids = torch.tensor([self.tokenizer(text)["input_ids"]])
        longest = self.model.reader[0].context
        if ids.shape[1] > longest:
            raise SpecError(f"the text has {ids.shape[1]:,} tokens and the model reads {longest:,}; cut it")
        return ids, torch.arange(ids.shape[1])[None], AttentionPattern(causal=False)


def load(folder: str | Path) -> LoadedModel:
    """Load a model from a folder that `biphase export` or transformers wrote; no code in the folder is run."""
    place = Path(folder).expanduser().resolve()
    if not place.is_dir():
        raise ModelError(
            f"there is no folder {folder}; give that of a model, or download one first: hf download NAME --local-dir FOLDER"
        )
    hub = Hub(str(place))
    model = from_hub(hub, None, length=1).eval()
    probe(model, vocab=len(model.head))
    return LoadedModel(model, load_tokenizer(hub))
