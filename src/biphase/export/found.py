"""Which result of a store a few digits mean: a state, or the leaf of a fine-tuned model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from biphase.errors import SpecError
from biphase.files import Store
from biphase.metadata import read_state
from biphase.records import decode
from biphase.specs import Pretrain
from biphase.study.leaves import published, read_leaf
from biphase.study.model_names import SHORTEST_PREFIX, refuse_receipt


@dataclass(frozen=True)
class SavedState:
    """A state of the store and the run that made it."""

    key: str
    run: Pretrain
    step: int
    about: dict[str, Any]  # what its state.json says


@dataclass(frozen=True)
class SavedLeaf:
    """The scores of a fine-tuned model."""

    key: str
    about: dict[str, Any]  # what its leaf.json says


def find(digits: str, store: Store) -> SavedState | SavedLeaf:
    """The one result of the store whose key begins so."""
    if not re.fullmatch(rf"[0-9a-f]{{{SHORTEST_PREFIX},}}", digits):
        raise SpecError(
            f"{digits!r} is no key: type the first {SHORTEST_PREFIX} or more digits of one that biphase plan shows"
        )
    states = store.named(store.states, digits)
    leaves = published(store, digits)
    if len(states) + len(leaves) != 1:
        several = len(states) + len(leaves)
        if not several:
            refuse_receipt(digits, store)
        said = f"{several} results begin with it; type more digits" if several else "there is no such result"
        raise SpecError(f"{digits} names no one result of {store.root}: {said}")
    return state(states[0], store) if states else leaf(leaves[0], store)


def state(key: str, store: Store) -> SavedState:
    about = read_state(store.states / key)
    return SavedState(key, decode(about["run"]), int(about["progress"]["step"]), about)


def leaf(key: str, store: Store) -> SavedLeaf:
    return SavedLeaf(key, read_leaf(store, key))
