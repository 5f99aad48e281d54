"""Contrastive stages: the pairs of each step, their loss, and what is held out of them.

`PairStream` holds the pairs of an objective in tokens. Like the rows of a corpus, the pairs of a step are a function of
the seed and of the step alone: step s, counted from the root of the run, has the pairs [s·batch, (s + 1)·batch) of a
stream that repeats all pairs in a new order each epoch. So a resumed run, and any number of processes, trains on the
same batches.

The negatives of a query are the positives of all other pairs of the step, whatever the micro-batches and processes. Each
process embeds the texts of its own pairs and gathers the embeddings of the others; it computes the loss of all queries,
whose gradient reaches its own texts alone. The sum of gradients over processes is then the gradient of the whole loss.
Texts of more than a micro-batch are computed again in the backward pass, so memory does not limit the batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from biphase.data.shards import Shards
from biphase.data.tokenizer import literal, load_saved
from biphase.errors import DataError
from biphase.models.backbone import LanguageModel
from biphase.models.encoder import EmbeddingHead, PackedTexts, embed_texts, pack, similarities
from biphase.objectives import LossTerm
from biphase.presets import sources_of
from biphase.randomness import permute, salt
from biphase.specs import Contrastive, Pretrain
from biphase.tasks.collection import Ragged
from biphase.tasks.encode import Tokenization, by_length, encode_texts
from biphase.tasks.load import Pair, load_pairs
from biphase.training.distributed import Ranks

HEAD = EmbeddingHead()


@dataclass(frozen=True)
class PairBatch:
    """This process's pairs of a step, as many packed inputs as memory requires."""

    inputs: tuple[PackedTexts, ...]
    order: Tensor  # from the texts of all inputs to the queries, then the positives
    first: int  # of the step's pairs, the first of this process
    count: int
    samples: Tensor  # (count,) sample indices
    same: Tensor  # (pairs of the step, 2) numbers of the texts; equal texts have one number
    temperature: float
    buffer: None = None
    graph_key: None = None

    @property
    def term(self) -> LossTerm:
        return LossTerm(self.count)

    def to(self, device: torch.device) -> PairBatch:
        """Return itself: the texts are moved when they are embedded."""
        return self

    def logits(self, model: LanguageModel, ranks: Ranks) -> Tensor:
        """Return the similarities of all queries of the step with all positives; −inf for those that do not count."""

        def embed(packed: PackedTexts) -> Tensor:
            return HEAD(model.encoder(packed.ids, packed.positions, packed.pattern), packed)

        inputs = [packed.to(ranks.device) for packed in self.inputs]
        own = embed_texts(embed, inputs, self.order.to(ranks.device))
        queries, positives = (self._gathered(side, ranks) for side in own.chunk(2))
        # Another text is no negative if it is the same text, or if the query has it as a positive too.
        alike = (self.same[:, None] == self.same[None]).any(-1).fill_diagonal_(False)
        return similarities(queries, positives, self.temperature).masked_fill(
            alike.to(ranks.device), float("-inf")
        )

    def loss_sum(self, model: LanguageModel, ranks: Ranks) -> Tensor:
        """Return the summed loss of this process's queries, with the gradient of the loss of all queries."""
        logits = self.logits(model, ranks)
        losses = F.cross_entropy(logits, torch.arange(len(logits), device=ranks.device), reduction="none")
        whole, mine = losses.sum(), losses[self.first : self.first + self.count].sum()
        return whole + (mine - whole).detach()

    def _gathered(self, own: Tensor, ranks: Ranks) -> Tensor:
        """Return the embeddings of the whole step; only this process's have gradients."""
        if ranks.world == 1:
            return own
        every = own.new_zeros(len(self.same), own.shape[1])
        every[self.first : self.first + self.count] = own.detach()
        dist.all_reduce(every)  # adding zeros changes no bit
        return torch.cat([every[: self.first], own, every[self.first + self.count :]])


@dataclass(frozen=True)
class PairStream:
    """The pairs of a contrastive objective in tokens: those that are trained on in the order of steps, and those held out."""

    objective: Contrastive
    seed: int
    texts: tuple[Ragged, Ragged]  # queries and positives
    same: np.ndarray  # (pairs, 2) numbers of the texts
    trained: np.ndarray  # the pairs to train on
    heldout: np.ndarray
    budget: int  # most tokens of an input
    varlen: bool

    @classmethod
    def of(
        cls, objective: Contrastive, run: Pretrain, shards: Shards, *, budget: int, varlen: bool
    ) -> PairStream:
        """Read and encode the pairs. A text gets the tokens that documents of the corpus have before and after them."""
        pairs, out = read_pairs(objective, run.name)
        saved = load_saved(shards.tokenizer)
        before = (saved.special.bos,) if sources_of(run)[0].bos and saved.special.bos is not None else ()
        saved.model.encode_special_tokens = True
        tokenization = Tokenization(
            literal(saved.model, saved.control_ids, str(shards.tokenizer)),
            before, (saved.special.eos,), objective.length, "",
        )  # fmt: skip
        sides = [pair.query for pair in pairs], [pair.document for pair in pairs]
        numbers: dict[str, int] = {}
        same = [[numbers.setdefault(text, len(numbers)) for text in side] for side in sides]
        return cls(
            objective,
            run.seed,
            (encode_texts(tokenization, sides[0]), encode_texts(tokenization, sides[1])),
            np.array(same).T,
            np.flatnonzero(~out),
            # In an order of its own: neighbours in a file are often alike, and sources follow each other.
            np.flatnonzero(out)[permute(torch.arange(out.sum()), int(out.sum()), salt(0, "pairs")).numpy()],
            budget,
            varlen,
        )

    @property
    def tokens_per_step(self) -> float:
        """The mean number of tokens of a step."""
        return sum(float(side.lengths[self.trained].mean()) for side in self.texts) * self.objective.batch

    def at(self, step: int) -> tuple[np.ndarray, Tensor]:
        """Return the pairs of a step, counted from the root, and their sample indices."""
        samples = torch.arange(step * self.objective.batch, (step + 1) * self.objective.batch)
        index, epochs = samples % len(self.trained), samples // len(self.trained)
        for epoch in epochs.unique().tolist():
            here = epochs == epoch
            index[here] = permute(index[here], len(self.trained), salt(self.seed, "pairs", epoch))
        return self.trained[index.numpy()], samples

    def tokens(self, step: int) -> int:
        """Return the number of tokens of a step."""
        return sum(int(side.lengths[self.at(step)[0]].sum()) for side in self.texts)

    def batch(self, step: int, rank: int, world: int) -> PairBatch:
        """Return what process `rank` of `world` embeds of a step."""
        return self._batch(*self.at(step), rank, world)

    def _batch(self, pairs: np.ndarray, samples: Tensor, rank: int, world: int) -> PairBatch:
        first, until = len(pairs) * rank // world, len(pairs) * (rank + 1) // world
        own = [side[pair] for side in self.texts for pair in pairs[first:until]]
        groups = by_length(np.array([len(text) for text in own]), self.budget)
        return PairBatch(
            tuple(pack([own[number] for number in group], varlen=self.varlen) for group in groups),
            torch.from_numpy(np.argsort(np.concatenate(groups))),
            first,
            until - first,
            samples[first:until],
            torch.from_numpy(self.same[pairs]),
            self.objective.temperature,
        )

    @torch.no_grad()
    def measure(self, model: LanguageModel, ranks: Ranks, most: int) -> dict[str, float]:
        """Return the loss and the accuracy on at most `most` held-out pairs, in pools as large as a batch.

        Accuracy is the share of queries that are most similar to their own positive. A rest smaller than a pool is left
        out, unless there is no other.
        """
        size = min(self.objective.batch, len(self.heldout))
        pools = max(1, min(most, len(self.heldout)) // size) if size > 1 else 0
        alone, totals = Ranks(0, 1, ranks.device), [0.0, 0.0]
        for pool in range(ranks.rank, pools, ranks.world):
            pairs = self.heldout[pool * size : (pool + 1) * size]
            logits = self._batch(pairs, torch.from_numpy(pairs), 0, 1).logits(model, alone)
            own = torch.arange(size, device=ranks.device)
            totals[0] += float(F.cross_entropy(logits, own, reduction="sum"))
            totals[1] += float((logits.argmax(1) == own).sum())
        loss, right = map(ranks.sum_float, totals)
        return {"loss": loss / (pools * size), "accuracy": right / (pools * size)} if pools else {}


def read_pairs(objective: Contrastive, run: str) -> tuple[list[Pair], np.ndarray]:
    """Return an objective's pairs, and which of them are held out; `run`: its name. Too few are refused."""
    pairs = [pair for source in objective.pairs for pair in load_pairs(source)]
    out = np.array([_held_out(pair, objective.heldout) for pair in pairs])
    if (count := int((~out).sum())) < objective.batch:
        raise DataError(
            f"{run}: {objective.label} need more than the {count:,} pairs to train on; say "
            f"Contrastive(…, batch={max(2, count // 2)}), or add pairs"
        )
    return pairs, out


def _held_out(pair: Pair, share: float) -> bool:
    """Whether a pair is held out, by its query, so that no query is on both sides."""
    return int.from_bytes(hashlib.sha256(pair.query.encode()).digest()[:4]) < share * 2**32
