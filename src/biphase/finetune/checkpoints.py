"""Checkpoints of a trial: a fine-tuning that is stopped goes on from the last one, to the same bits on a CPU.

    store/unfinished/<key of the training>-<step>/
      model.safetensors       all weights; of an embedding of which only the words that occur are trained, that table
      optimizer.safetensors   AdamW's moments and step counts
      trial.json              the step, the losses so far, skipped steps, seconds

Dropout and the order of examples are functions of the step, so nothing else has to be kept. A checkpoint is published
like any result, whole or not at all, and replaces the one before it; it is removed when the scores are published.
Weights and moments are restored in place, since captured CUDA graphs read them there.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from biphase.errors import StoreError, one_line
from biphase.files import Store, debris, publish, read_verified, verify, write_json
from biphase.training.tensors import Coming, Tensors, write

TRIAL = "trial.json"
WORTH_KEEPING = 10.0  # seconds of work; a shorter trial starts again sooner than it is written and read


class Checkpoints:
    """Those of one trial, for whoever holds its lease."""

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        steps: int = 0,  # save every so many steps, also of a short trial; 0: by time
        seconds: float = 600.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.store, self.key, self.say = store, key, say
        self.every_steps, self.every_seconds = steps, seconds
        self.saved = 0  # the step of the last one that was written or read
        self.saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Is a checkpoint to be saved after the step that follows `step` steps?"""
        if self.every_steps:
            return (step + 1) % self.every_steps == 0
        return time.monotonic() - self.saved_at > self.every_seconds

    def save(
        self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], about: dict[str, Any]
    ) -> bool:
        """Publish a checkpoint, unless there is too little to keep. True if this step is in the store."""
        step = about["step"]
        if self.saved == step:
            return True
        if not self.every_steps and about["seconds"] < WORTH_KEEPING:
            return False
        name = f"trial-{self.key}"
        for left in self.store.attempts.glob(f"{name}-*"):  # by a worker that was killed
            shutil.rmtree(left, ignore_errors=True)
        with self.store.attempt(name) as folder:
            known = {
                f"{kind}.safetensors": write(folder / f"{kind}.safetensors", _coming(tensors))
                for kind, tensors in (("model", weights), ("optimizer", moments))
            }
            write_json(folder / TRIAL, {"key": self.key, "threads": torch.get_num_threads(), **about})
            publish(folder, self.store.unfinished / f"{self.key}-{step}", known)
        self.saved, self.saved_at = step, time.monotonic()
        for place in self._places():
            if place.name != f"{self.key}-{step}":
                self.store.discard(place)
        return True

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Put the last checkpoint into these tensors; gives what `save` was told beside them. None: start anew.

        On a CPU the rest is computed with as many threads as before: sums in another order would be other bits.
        """
        both = {"model": weights, "optimizer": moments}
        for place in self._places():
            try:
                about = self._checked(place, both)
            except (StoreError, SafetensorError, OSError, KeyError, TypeError, ValueError) as wrong:
                self.say(f"  note: {place} cannot be gone on from ({one_line(wrong)}); it is removed")
                self.store.discard(place)
                continue
            for kind, tensors in both.items():
                with Tensors(place, kind) as saved, torch.no_grad():
                    for name, one in tensors.items():
                        one.copy_(saved.whole(name))
            self.saved, self.saved_at = about["step"], time.monotonic()
            on_cpu = all(one.device.type == "cpu" for one in weights.values())
            if on_cpu and 0 < about["threads"] <= (os.cpu_count() or 1):
                torch.set_num_threads(about["threads"])
            return about
        return None

    def discard(self) -> None:
        """The trial is done: its checkpoints go."""
        for place in self._places():
            self.store.discard(place)

    def _places(self) -> list[Path]:
        """Checkpoints of this trial, the latest first; whether they are whole is seen when they are read."""
        steps = {
            int(step): place
            for place in self.store.unfinished.glob(f"{self.key}-*")
            if (step := place.name.rpartition("-")[2]).isdecimal()
        }
        return [steps[step] for step in sorted(steps, reverse=True)]

    def _checked(self, place: Path, both: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """What a checkpoint says, after comparing all of it with the tensors it would be put into."""
        if not self.store.has(place):
            raise StoreError(debris(place))
        verify(place)
        about = json.loads(read_verified(place, TRIAL))
        if f"{about['key']}-{about['step']}" != place.name:
            raise StoreError(f"it is the checkpoint {about['key']}-{about['step']}")
        for kind, tensors in both.items():
            with Tensors(place, kind) as saved:
                wanted = {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}
                if {name: (saved.shapes[name], saved.dtypes[name]) for name in saved.shapes} != wanted:
                    raise StoreError("its tensors are those of another kind of device or another model")
        return about


def _coming(tensors: Mapping[str, Tensor]) -> dict[str, Coming]:
    return {
        name: Coming(tuple(one.shape), one.dtype, lambda one=one: one.detach().cpu())
        for name, one in tensors.items()
    }
