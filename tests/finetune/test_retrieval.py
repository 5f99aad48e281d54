"""Search is exact and ranks ties by number, whatever the blocks; the loss is InfoNCE, whatever the memory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.attention import AttentionPattern
from biphase.finetune import families
from biphase.finetune.encoder import TaskBatch
from biphase.finetune.families import Retrieval, family_of, search
from biphase.finetune.trial import FineTuner, batches_of, rows_of
from biphase.specs import Retrieve, Splits, Task
from biphase.tasks.load import Examples, Library, Pair, Search

WORDS = [
    "cat", "dog", "teacher", "river", "student", "house", "mountain", "boat", "garden", "shadow", "road", "bird",
]  # fmt: skip


# ---------------------------------------------------------------- search


def brute_force(queries, documents, kept):
    """All scores, sorted: highest first, then by number."""
    scores = queries @ documents.T
    ranked = [sorted(range(len(documents)), key=lambda at: (-row[at], at)) for row in scores.tolist()]
    return [one[:kept] for one in ranked], scores.tolist()


def whole_numbers(draw, rows, width, spread):
    """Small integers: their products are exact, and often equal."""
    return torch.from_numpy(draw.integers(-spread, spread + 1, (rows, width))).float()


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    queries=st.integers(1, 5),
    documents=st.integers(1, 60),
    kept=st.integers(1, 70),
    block=st.integers(1, 70),
    spread=st.sampled_from([1, 3, 50]),
    scores=st.sampled_from([1, 40, 10_000]),
)
def test_search_is_a_full_sort_whatever_the_blocks_and_their_order(
    seed, queries, documents, kept, block, spread, scores
):
    draw = np.random.default_rng(seed)
    asked, there = whole_numbers(draw, queries, 3, spread), whole_numbers(draw, documents, 3, spread)
    order, embedded = torch.from_numpy(draw.permutation(documents)), []

    def embed(numbers):
        embedded.extend(numbers.tolist())
        return there[numbers]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "SCORES", scores)  # the bound on memory, by which the queries are split
        found = search(asked, documents, embed, order, kept=kept, block=block).tolist()
    assert embedded == order.tolist(), "every document once, in the order asked for"
    wanted, scores = brute_force(asked, there, kept)
    for mine, right, row in zip(found, wanted, scores, strict=True):
        assert len(mine) == len(set(mine)) == min(kept, documents)
        assert mine == sorted(mine, key=lambda at: (-row[at], at)), "best first, equal ones by number"
        last = row[right[-1]]
        # Where the last score is shared, any of those that share it may be left out; all else is certain.
        assert [at for at in mine if row[at] > last] == [at for at in right if row[at] > last]
        assert all(row[at] >= last for at in mine)
        if kept >= documents:
            assert mine == right


# ---------------------------------------------------------------- loss


def pairs_task(tokenization, *, pairs=12, batch=6, protocol="standard", **fields):
    """Queries and documents that share no word: which belong together must be learned."""
    made = [
        Pair(f"Query: {WORDS[k]}", f"Document: {'on and ' * (k % 4)}{WORDS[(5 * k + 3) % 12]}")
        for k in range(pairs)
    ]
    library = Library(tuple(str(k) for k in range(pairs)), tuple(one.document for one in made))
    judged = tuple({k: 1} for k in range(pairs))
    part = Search(library, library.names, tuple(one.query for one in made), judged)
    task = Task("pairs", Retrieve(), "./nowhere", Splits(), batch=batch, **fields)
    return family_of(task, Examples(made, part, part), tokenization, protocol=protocol)


def mean_state(model, ids):
    ids = torch.from_numpy(ids.astype(np.int64))[None]
    return model.encoder(ids, torch.arange(ids.shape[1])[None], AttentionPattern(False))[0].mean(0)


def by_hand(tuner, some, rows):
    """-log of each pair's share among all documents of the batch: cosines over a temperature of 0.05."""
    model = tuner.fresh(some, 0)

    queries, documents = (torch.stack([mean_state(model, side[row]) for row in rows]) for side in some.inputs)
    total = torch.zeros(())
    for number, query in enumerate(queries):
        similar = torch.stack([F.cosine_similarity(query, one, dim=0) for one in documents]) * 20
        total = total - (similar[number] - similar.logsumexp(0))
    return model, total / len(rows)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tokens", [10_000, 60, 1], ids=["at once", "in parts", "text by text"])
def test_the_loss_is_infonce_over_the_batch_also_where_memory_asks_for_parts(
    tokens, encoder, tokenization, options
):
    some = pairs_task(tokenization)
    tuner = FineTuner(encoder(), options(train_tokens=tokens))
    rows = rows_of(some, 0, 1)
    model, wanted = by_hand(tuner, some, rows)
    wanted.backward()
    theirs = gradients(model)

    model = tuner.fresh(some, 0).train()
    model.zero_grad()
    (batch,) = batches_of(some, 0, 1, tuner.options)
    assert len(batch.inputs) in {10_000: {1}, 60: range(3, 8), 1: {12}}[tokens]
    assert batch.count == 6
    loss = some.loss_sum(model, batch) / batch.count
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
    for name, gradient in gradients(model).items():
        assert (gradient - theirs[name]).abs().max() < 1e-5 * theirs[name].abs().max(), name


def test_the_similarities_are_fp32_where_the_layers_compute_in_bf16(encoder, options):
    """Under autocast a product of unit vectors would be rounded to bf16, and then divided by 0.05."""
    vectors = torch.nn.functional.normalize(
        torch.randn(16, 32, generator=torch.Generator().manual_seed(0)), dim=-1
    )

    class Given(torch.nn.Module):
        def forward(self, packed):
            return vectors

    batch = TaskBatch((None,), torch.arange(16), 8)
    plain = Retrieval.loss_sum(None, Given(), batch)
    with torch.autocast("cpu", torch.bfloat16):
        cast = Retrieval.loss_sum(None, Given(), batch)
    assert torch.equal(plain, cast)
