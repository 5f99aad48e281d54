"""On a CUDA device: steps as graphs are the steps taken the plain way, mix with them, begin anew, and never wait.

And where only the words that occur are trained, the others decay as they would have.

Graphs pad their batches, so matrix products may be cut otherwise and 16-bit results rounded otherwise: trajectories
agree within `CLOSE` of the loss over 40 steps at a rate that learns, not to the bit.
"""

import math
import warnings
from dataclasses import replace

import pytest
import torch

from biphase import CATALOG, SIZES, AdamW, Choose, Finetune, MultiLabel, Regress
from biphase.data.tokenizer import train as train_tokenizer
from biphase.finetune.encoder import TuningOptions
from biphase.finetune.families import family_of
from biphase.finetune.trial import Checkpoints, FineTuner, batches_of, score
from biphase.models.backbone import from_scratch
from biphase.models.encoder import Encoder
from biphase.presets import CORPORA
from biphase.store import Store
from biphase.tasks.encode import Tokenization
from biphase.tasks.load import Examples, load
from biphase.training.loop import Graphs
from biphase.training.optimizer import linear_rate

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NAMES = [
    "sources-mini",
    "wikiann-mini",
    "squadshifts-mini",
    "scifact-mini",
    "numbers",
    "label sets",
    "choices",
]
EVERY = pytest.mark.parametrize("name", NAMES)
STEPS, RATE, CLOSE = 40, 3e-4, 0.05
SLOW = {"choices": 1e-4}  # at 3e-4 its few examples are learnt by heart, and rounding decides the last steps


@pytest.fixture(scope="module")
def reading():
    from biphase.data.corpus import resolve
    from biphase.data.documents import texts_of

    corpus = CORPORA["builtin"]
    made = train_tokenizer(corpus, texts_of(corpus, resolve(corpus).train), print)
    return Tokenization(made.model, (), (made.special.eos,), 250, "test")


def spec_of(name, protocol="standard"):
    return Finetune(CATALOG.get(name, CATALOG["sources-mini"]), protocol=protocol)


FORMS = {
    "numbers": Regress("{text}"),
    "label sets": MultiLabel("{text}", ("a book", "long", "short")),
    "choices": Choose("{choice}", answer="answer"),
}


def made_of(form, rows):
    """Examples of another family, made of classified texts; of the choices, two to four, one is from a book."""
    for number, row in enumerate(rows):
        if isinstance(form, Regress):
            yield form.example([row.text, float(row.label)], "here")
        elif isinstance(form, MultiLabel):
            size = "long" if len(row.text) > 500 else "short"
            yield form.example([row.text, [size, "a book"] if row.label == 2 else [size]], "here")
        elif row.label == 2:
            others = [one.text[:200] for one in rows[number:] + rows if one.label != 2][: 1 + number % 3]
            yield form.example([[row.text[:200], *others], 0], "here")


def family(name, reading, *, protocol="standard", **fields):
    task = replace(spec_of(name).tasks[0], **({"steps": STEPS, "batch": 16} | fields))
    examples = load(task, documents=spec_of(name, protocol).documents)
    if name in FORMS:
        form = FORMS[name]
        parts = (list(made_of(form, rows)) for rows in (examples.train, examples.validation, examples.test))
        task, examples = replace(task, name=name.replace(" ", "-"), form=form), Examples(*parts)
    return family_of(task, examples, reading, protocol=protocol)


def bench_of(precision="bf16", **fields):
    """A new model on the device; with graphs=False every step is taken the plain way, by the same kernels."""
    with torch.random.fork_rng():
        model = from_scratch(SIZES["8m"], vocab=2_048, mask_id=1, length=256, seed=0)
    encoder = Encoder(model.model.base_model, context=256)
    bench = FineTuner(encoder, replace(TuningOptions.of(CUDA, precision, varlen=True), **fields))
    assert bench.encoder.graphable
    return bench


def losses(trained):
    assert trained.finished
    assert trained.skipped == 0
    return torch.tensor(list(trained.losses.values()))


def assert_close(one, other):
    """Within a share of the loss at the start."""
    assert len(one) == len(other) == STEPS
    assert (one - other).abs().max() < CLOSE * one[0], (one, other)


@EVERY
@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
def test_trajectories_are_those_of_plain_steps(name, precision, reading):
    some, spec, rate = family(name, reading), spec_of(name), SLOW.get(name, RATE)
    bench = bench_of(precision)
    by_graph = losses(bench.finetune(some, spec, lr=rate, seed=1, loaders=1)[1])
    assert bench.grid.graphs.captured, "no step was a graph"
    assert (bench.grid.rows is None) == (precision == "pure-bf16")
    plain = losses(bench_of(precision, graphs=False).finetune(some, spec, lr=rate, seed=1)[1])
    assert_close(by_graph, plain)
    assert by_graph[-5:].mean() < by_graph[:5].mean()


def test_where_there_is_no_room_for_graphs_steps_are_taken_the_plain_way(reading, monkeypatch):
    some, spec = family(NAMES[0], reading), spec_of(NAMES[0])
    wanted = losses(bench_of(graphs=False).finetune(some, spec, lr=RATE, seed=1)[1])

    def too_large(self, plain, batch):
        torch.cuda.set_stream(self.stream)  # as a capture that failed leaves it
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Graphs, "_capture", too_large)
    bench, here = bench_of(), torch.cuda.current_stream()
    assert_close(losses(bench.finetune(some, spec, lr=RATE, seed=1)[1]), wanted)
    assert bench.grid.graphs.full
    assert torch.cuda.current_stream() == here


def moments_of(bench):
    """First moments and counts by the names of the weights; of words that are not trained they are zero."""
    found = {}
    for (key, weight), one in zip(bench.grid.model.named_parameters(), bench.grid.parameters, strict=True):
        state = bench.grid.adam.state[one]
        mean = state["exp_avg"].float()
        if one is not weight:
            words = bench.grid.rows
            mean = torch.zeros_like(weight).index_copy(0, words.ids, mean[:-1])
        found[key] = mean, state["step"].item()
    return found


@EVERY
@pytest.mark.parametrize("sparse_rows", [True, False])
def test_one_step_moves_the_weights_as_a_plain_one(name, sparse_rows, reading):
    """The first update, and the moments after it: a step that is not finite or not clipped would show."""
    some, spec = family(name, reading, steps=1), spec_of(name)
    found = []
    for fields in ({"sparse_rows": sparse_rows}, {"sparse_rows": False, "graphs": False}):
        bench = bench_of(**fields)
        before = {key: value.clone() for key, value in bench.encoder.state_dict().items()}
        model, _ = bench.finetune(some, replace(spec, warmup=0.0), lr=1e-3, seed=1)
        moved = {key: value - before[key] for key, value in model.encoder.state_dict().items()}
        found.append((moved, moments_of(bench)))
    (moved, optimizer_state), (wanted, plain) = found
    for key, value in wanted.items():
        if value.is_floating_point() and value.abs().max() > 0:
            near = torch.nn.functional.cosine_similarity(moved[key].flatten(), value.flatten(), dim=0)
            assert near > 0.95, key
    assert optimizer_state.keys() == plain.keys()
    for key, (second, steps) in plain.items():
        first, taken = optimizer_state[key]
        assert taken == steps == 1, key
        if (name, key) == ("choices", "head.out.bias"):
            continue  # all choices get the same bias, so that its gradient is rounding errors alone
        assert (first - second).norm() < 0.1 * second.norm() + 1e-8, key


@EVERY
def test_graphs_and_plain_steps_mix_at_will(name, reading):
    """Of its sizes only the smaller half is left: the other steps go the plain way between graphs."""
    some, spec = family(name, reading), spec_of(name)
    bench = bench_of()
    bench.finetune(some, spec, lr=RATE, seed=2)
    buckets = bench.grid.buckets
    widths = buckets.widths
    assert len(widths) > 1
    bench.grid = replace(bench.grid, buckets=replace(buckets, widths=widths[: len(widths) // 2]))
    whole = [batches_of(some, step, 1, bench.options, bench.grid.buckets) for step in range(STEPS)]
    ways = [len(micro) == 1 and micro[0].width > 0 for micro in whole]
    assert 3 < sum(ways) < STEPS - 3
    mixed = losses(bench.finetune(some, spec, lr=RATE, seed=1)[1])
    assert_close(mixed, losses(bench_of(graphs=False).finetune(some, spec, lr=RATE, seed=1)[1]))


def test_a_fine_tuning_in_company_is_one_alone(reading):
    """Other rates, seeds and tasks before it leave nothing behind: weights, head, moments, counts, 16-bit copies."""
    some, other = family("sources-mini", reading), family("wikiann-mini", reading)
    spec, others = spec_of("sources-mini"), spec_of("wikiann-mini")

    def outcome(bench):
        model, trained = bench.finetune(some, spec, lr=RATE, seed=1)
        scored = score(model, some, bench.options)["test"].metrics["accuracy"]
        counts = {int(state["step"]) for state in bench.grid.adam.state.values()}
        return losses(trained), scored, counts

    alone = outcome(bench_of())
    bench = bench_of()
    bench.finetune(some, spec, lr=5e-3, seed=2)
    graphs = dict(bench.grid.graphs.captured)
    again = outcome(bench)
    assert all(bench.grid.graphs.captured[width] is one for width, one in graphs.items()), "captured anew"
    bench.finetune(other, others, lr=5e-3, seed=3)
    after_another = outcome(bench)
    for one in (again, after_another):
        assert_close(one[0], alone[0])
        assert abs(one[1] - alone[1]) < 0.05
        assert one[2] == alone[2] == {STEPS}


def test_warming_up_and_capturing_change_nothing(reading):
    """At a rate of 0 a run whose every size is captured leaves weights that were never touched."""
    some, spec = family("sources-mini", reading), spec_of("sources-mini")
    bench = bench_of()
    came = {key: value.clone() for key, value in bench.encoder.state_dict().items()}
    model, trained = bench.finetune(some, spec, lr=0.0, seed=1)
    assert len(bench.grid.graphs.captured) > 1
    assert all(torch.equal(came[key], value) for key, value in model.encoder.state_dict().items())
    assert all(int(state["step"]) == STEPS for state in bench.grid.adam.state.values())
    assert trained.skipped == 0


def test_a_step_without_finite_numbers_is_skipped_inside_a_graph(reading):
    some, spec = family("sources-mini", reading), spec_of("sources-mini")
    bench = bench_of()
    bench.finetune(some, spec, lr=RATE, seed=1)
    weight = next(one for key, one in bench.encoder.named_parameters() if "embed" in key)
    bench.weights = {
        key: torch.full_like(value, float("nan")) if value.shape == weight.shape else value
        for key, value in bench.weights.items()
    }
    _, trained = bench.finetune(some, spec, lr=RATE, seed=1)
    assert trained.skipped == STEPS
    assert all(int(state["step"]) == 0 for state in bench.grid.adam.state.values())
    assert not any(state["exp_avg"].any() for state in bench.grid.adam.state.values())
    assert (bench.grid.rows.table[-1] == 1).all(), "words that do not occur have decayed"


@EVERY
@pytest.mark.parametrize("sparse_rows", [True, False])
def test_a_stopped_fine_tuning_goes_on_in_the_graphs_that_were_captured(name, sparse_rows, reading, tmp_path):
    """Weights, 16-bit copies, moments, counts and the decay of other words, in the memory that graphs read."""
    some, spec = family(name, reading), spec_of(name)
    wanted = losses(bench_of(sparse_rows=sparse_rows).finetune(some, spec, lr=RATE, seed=1)[1])
    bench, asked = bench_of(sparse_rows=sparse_rows), iter(range(STEPS))
    checkpoints = Checkpoints(Store(tmp_path), "f" * 32, steps=STEPS)
    _, stopped = bench.finetune(
        some, spec, lr=RATE, seed=1, checkpoints=checkpoints, stop=lambda: next(asked) >= 14
    )
    assert (stopped.steps, checkpoints.saved) == (15, 15)
    graphs = dict(bench.grid.graphs.captured)
    bench.finetune(some, spec, lr=5e-3, seed=2)  # another trial on the same memory
    for one in (bench, bench_of(sparse_rows=sparse_rows)):
        again = Checkpoints(Store(tmp_path), "f" * 32)
        model, trained = one.finetune(some, spec, lr=RATE, seed=1, checkpoints=again)
        assert again.saved == 15
        assert_close(losses(trained), wanted)
        assert {int(state["step"]) for state in one.grid.adam.state.values()} == {STEPS}
        assert not any(value.isnan().any() for value in model.state_dict().values())
    assert all(bench.grid.graphs.captured[width] is one for width, one in graphs.items()), "captured anew"


@EVERY
def test_no_step_waits_for_the_device(name, reading):
    some, spec = family(name, reading), spec_of(name)
    bench = bench_of()
    bench.finetune(some, spec, lr=RATE, seed=1, loaders=1)  # sizes are captured, kernels built

    with warnings.catch_warnings():  # it says once that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default")

    def tell(step, steps):
        torch.cuda.set_sync_debug_mode("error" if 0 < step < steps else "default")

    try:
        _, trained = bench.finetune(some, spec, lr=RATE, seed=1, loaders=1, tell=tell)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trained.finished


def test_memory_does_not_grow_from_one_fine_tuning_to_the_next(reading):
    some, spec = family("sources-mini", reading), spec_of("sources-mini")
    bench, held = bench_of(), []
    for seed in (1, 1, 1):
        bench.finetune(some, spec, lr=RATE, seed=seed)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[2] <= held[1]


# ---------------------------------------------------------------- only the words that occur


@EVERY
def test_other_words_decay_once_a_step_whether_captured_or_replayed(name, reading):
    """Idle steps before a capture would show, and what an earlier fine-tuning left."""
    decay = 1.0
    some, spec = family(name, reading), replace(spec_of(name), optimizer=AdamW(weight_decay=decay))
    bench = bench_of()
    came = bench.weights["trunk.embed_tokens.weight"]
    rates = [linear_rate(step, STEPS, peak=RATE, warmup=spec.warmup) for step in range(STEPS)]
    kept = math.prod(1 - rate * decay for rate in rates)
    assert kept < 0.999
    for seed in (1, 1, 2):
        model, trained = bench.finetune(some, spec, lr=RATE, seed=seed)
        assert trained.skipped == 0
        others = torch.ones(len(came), dtype=torch.bool, device=CUDA)
        others[bench.grid.rows.ids] = False
        assert others.any()
        now = model.encoder.trunk.embed_tokens.weight.detach()
        torch.testing.assert_close(now[others], came[others] * kept, rtol=1e-5, atol=0)
        assert not torch.allclose(now[~others], came[~others] * kept, rtol=1e-3)
