"""From hidden states to logits, read off a model instead of known by its name.

Families differ in what stands behind the trunk: a matrix alone, a layer before it, a bias, scaled logits, capped ones.
All are   logits = cap·tanh(scale·(W·f(hidden) + b) / cap)   with parts that may be missing. `f` is the model's own code
with its trunk and its last matrix taken out; scale and cap are measured by feeding that matrix's place with known
numbers. So the loss can run on labelled positions only, a slice of logits at a time, for all of them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from biphase.errors import ModelError

SMALL, LARGE = 1e-3, 1e6  # far below and far above any cap
CLOSE = 1e-4


class _Hidden(BaseModelOutputWithPastAndCrossAttentions):
    """What a trunk gives: hidden states, and of everything else that a family looks for, nothing."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Trunk(nn.Module):
    """In the trunk's place: the hidden states are what it is given. Its parts are itself, its numbers the trunk's."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = [trunk]  # in a list: not a module of this one

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["trunk"][0], name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
        return _Hidden(last_hidden_state=inputs_embeds)


class _Matrix(nn.Module):
    """In the last matrix's place: keeps what it is given, and gives what it is told, or the same."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self.told: Tensor | None = None
        self.weight, self.bias = [weight], [bias]  # some heads look at them

    def forward(self, hidden: Tensor) -> Tensor:
        self.given = hidden
        return hidden if self.told is None else self.told


class Output:
    """The way from hidden states to logits of one model. Holds no weights of its own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        name = type(model).__name__
        if not isinstance(self._last, nn.Linear):
            raise ModelError(
                f"{name} has no matrix that turns hidden states into words; give a language model"
            )
        if model.base_model is model:
            raise ModelError(f"{name} is not split into a trunk and a head, so it cannot be trained here")
        self.shell, self.matrix = _without_ends(model, self._last)
        self.scale, self.cap, self.transforms = 1.0, None, False
        if not self.weight.is_meta:  # a model of which only the shape is wanted has no numbers
            self.scale, self.cap = self._measured(name)
            self.transforms = not torch.equal(*self._through_transform())

    @property
    def _last(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def weight(self) -> Tensor:
        return self._last.weight

    @property
    def bias(self) -> Tensor | None:
        """As the loss takes it: scaled like the logits."""
        bias = self._last.bias
        return None if bias is None else bias * self.scale

    def rows(self, hidden: Tensor) -> Tensor:
        """What the last matrix is multiplied with, scaled. (P, d) → (P, d')"""
        if self.transforms:
            self._run(hidden)
            assert self.matrix.given is not None
            hidden, self.matrix.given = self.matrix.given[0], None
        return hidden if self.scale == 1 else hidden * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """All logits of some rows: for probes and for looking at a few words."""
        logits = nn.functional.linear(self.rows(hidden), self.weight, self.bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def _run(self, rows: Tensor) -> Tensor:
        # A mask, lest a family look for padding among ids that are not there.
        ones = torch.ones(1, len(rows), dtype=torch.long, device=rows.device)
        return self.shell(inputs_embeds=rows[None], attention_mask=ones).logits[0]

    @torch.no_grad()
    def _through_transform(self) -> tuple[Tensor, Tensor]:
        """Rows before and after what stands between the trunk and the last matrix, without dropout."""
        between = any(True for _ in self.shell.parameters())  # weights of its own, so its own width as well
        width = self.model.config.hidden_size if between else self._last.in_features
        rows = torch.linspace(-1, 1, 2 * width, device=self.weight.device).view(2, -1)
        was_training = self.shell.training
        self.shell.eval()
        try:
            self._run(rows)
            assert self.matrix.given is not None
            return rows, self.matrix.given[0]
        finally:
            self.matrix.given = None
            self.shell.train(was_training)

    @torch.no_grad()
    def _measured(self, name: str) -> tuple[float, float | None]:
        """The scale and the cap that logits go through after the last matrix."""
        before, _ = self._through_transform()

        def after(values: list[float]) -> Tensor:
            self.matrix.told = torch.tensor(values, dtype=torch.float32, device=before.device)[
                None, None
            ].expand(1, len(before), -1)
            try:
                return self._run(before)[0].float()
            finally:
                self.matrix.told = self.matrix.given = None

        small, large = after([SMALL, LARGE]).tolist()
        scale = small / SMALL
        cap = None if not scale or abs(large / LARGE / scale - 1) < CLOSE else large
        values = [-700.0, -30.0, -3.0, -0.5, 0.0, 0.1, 2.0, 50.0, 900.0]
        plain = torch.tensor(values, device=before.device) * scale
        expected = plain if cap is None else cap * torch.tanh(plain / cap)
        if not scale or not torch.allclose(after(values), expected, rtol=CLOSE, atol=CLOSE):
            raise ModelError(
                f"{name} does something with its logits that is neither a scale nor a cap; it cannot be trained here"
            )
        # What fp32 made of a number such as 1 / 8 or 0.0625 is that number again.
        return float(f"{scale:.6g}"), None if cap is None else float(f"{cap:.6g}")


def _without_ends(model: Any, last: nn.Module) -> tuple[Any, _Matrix]:
    """A copy of the model's shell that shares its weights, with stand-ins for its trunk and its last matrix."""
    trunk, matrix = model.base_model, _Matrix(last.weight, last.bias)  # ty: ignore[invalid-argument-type]

    def copied(module: nn.Module) -> nn.Module:
        if module is trunk:
            return _Trunk(trunk)
        if module is last:
            return matrix
        if not any(one is trunk or one is last for one in module.modules()):
            return module
        shell = copy.copy(module)
        shell._modules = {name: one and copied(one) for name, one in module._modules.items()}
        return shell

    return copied(model), matrix
