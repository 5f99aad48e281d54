"""Exact search of all documents: no index, no approximation, in blocks of bounded memory.

Documents are embedded block by block, longest last, scored against all queries and forgotten; only the best `KEPT`
of each query are carried on. So what is held at a time is the queries, one block of documents, and one block of scores
of at most `SCORES` numbers (256 MiB), however large the collection is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KEPT = 100
DOCUMENTS = 2**16  # of a block
SCORES = 2**26


def search(
    queries: Tensor,
    documents: int,
    embed: Callable[[Tensor], Tensor],
    order: Tensor | None = None,
    *,
    kept: int = KEPT,
    block: int = DOCUMENTS,
) -> Tensor:
    """The numbers of the best documents of each query, best first. (Q, d) → (Q, min(kept, documents))

    `embed` gives the embeddings of documents by their numbers, which it is asked for in `order`. Equal scores rank
    by number, so the answer does not depend on blocks; only where more than `kept` documents tie at the very end may
    the device choose which of them are left out.
    """
    device = queries.device
    order = torch.arange(documents) if order is None else order
    best = torch.empty(len(queries), 0, device=device)
    found = torch.empty(len(queries), 0, dtype=torch.long, device=device)
    for numbers in order.split(block):
        vectors = embed(numbers)
        there = numbers.to(device)
        rows = max(1, SCORES // len(numbers))
        scores, places = [], []
        for some in queries.split(rows):
            top = (some @ vectors.T).topk(min(kept, len(numbers)), dim=1)
            scores.append(top.values)
            places.append(there[top.indices])
        best, found = torch.cat([best, torch.cat(scores)], 1), torch.cat([found, torch.cat(places)], 1)
        # By number first and then, stably, by score: what is equal stays in the order of numbers.
        by_number = found.argsort(dim=1)
        best, found = best.gather(1, by_number), found.gather(1, by_number)
        ranked = best.argsort(dim=1, descending=True, stable=True)[:, :kept]
        best, found = best.gather(1, ranked), found.gather(1, ranked)
    return found
