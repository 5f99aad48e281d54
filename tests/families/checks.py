"""The checks that a family passes on its way from a folder on disk to an encoder on disk.

`examine` does all of them. Who attends to whom is found by changing one token at a time; training and resuming go
through the real machinery; exports are read back by plain transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from families.build import CONTEXT, VOCAB, CannotBuild, Family, build, reaches
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.utils.logging import disable_progress_bar

from biphase import MLM, WSD, Chunks, Corpus, Hub, Pretrain, Stage
from biphase.attention import NAME, AttentionPattern, segment_mask
from biphase.data.shards import Shards
from biphase.data.tokenizer import load_saved
from biphase.errors import ModelError
from biphase.export.checkpoint import export_checkpoint, write_encoder
from biphase.export.folder import SavedCheckpoint, find
from biphase.export.writing import tokenizer_of
from biphase.keys import checkpoint_key
from biphase.models.backbone import LanguageModel, TokenizerInfo, from_hub, probe
from biphase.store import Store
from biphase.study.plan import identities
from biphase.training import checkpoint
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining, model_of_checkpoint, starting_model

if TYPE_CHECKING:
    from families.conftest import TokenizedCorpus

# ---------------------------------------------------------------- attention


LENGTH = 24  # longer than two layers of windows reach
SEGMENTS = (5, 11, 8)
CLOSE = 2e-5  # of the largest number


def texts(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


def positions_in(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= CLOSE * theirs.abs().max().clamp(min=1))


@torch.no_grad()
def check_own_forward(model: LanguageModel, own: Any, *, causal: bool) -> None:
    """Our logits are those of transformers' own forward with its own attention.

    The one that is written out: its others leave out caps and sinks in some versions.
    """
    ids = texts(2)
    own.set_attn_implementation("eager")
    theirs = own(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    ours = model.logits(ids, positions_in(ids), AttentionPattern(causal))[..., :VOCAB]
    assert close(ours, theirs), f"logits differ by {(ours - theirs).abs().max():.1e}"


@torch.no_grad()
def check_directions(model: LanguageModel) -> None:
    """At every position: the output depends on exactly the tokens that direction and windows allow."""
    layers = reaches(model.model.config)
    patterns = {
        "causal": (AttentionPattern(causal=True), layers),
        "both ways": (AttentionPattern(causal=False), layers),
        "both ways, windows opened": (AttentionPattern(causal=False, windows=False), [None] * len(layers)),
    }
    for name, (pattern, reach) in patterns.items():
        changed = _changed_by(model, pattern)
        wrong = (changed != _allowed(reach, causal=pattern.causal)).nonzero().tolist()
        assert not wrong, f"{name}: token {wrong[0][0]} at {wrong[0][1]}: {bool(changed[tuple(wrong[0])])}"


@torch.no_grad()
def check_segments(model: LanguageModel) -> None:
    """Packed segments are blind to one another and read as if each stood alone, positions from 0."""
    ids = texts(1, sum(SEGMENTS))
    numbers = torch.repeat_interleave(torch.arange(len(SEGMENTS)), torch.tensor(SEGMENTS))[None]
    positions = torch.cat([torch.arange(length) for length in SEGMENTS])[None]
    for causal in (True, False):
        pattern = AttentionPattern(causal, mask=segment_mask(numbers, causal=causal))
        together = model.hidden(ids, positions, pattern)
        for number in range(len(SEGMENTS)):
            here = numbers[0] == number
            alone = model.hidden(ids[:, here], positions_in(ids[:, here]), AttentionPattern(causal))
            assert close(together[:, here], alone), f"segment {number} reads otherwise than alone"
            changed = torch.where(here, (ids + 1) % VOCAB, ids)
            moved = (model.hidden(changed, positions, pattern) != together).any(-1)[0]
            assert not moved[~here].any(), f"segment {number} is seen by another"


def _changed_by(model: LanguageModel, pattern: AttentionPattern) -> Tensor:
    """True where a change of the token (row) changes the output at a position (column)."""
    ids = texts(1)
    plain = model.hidden(ids, positions_in(ids), pattern)
    rows = []
    for at in range(LENGTH):
        changed = ids.clone()
        changed[0, at] = (ids[0, at] + 1) % VOCAB
        rows.append((model.hidden(changed, positions_in(ids), pattern) != plain).any(-1)[0])
    return torch.stack(rows)


def _allowed(layers: list[int | None], *, causal: bool) -> Tensor:
    """What layers of these reaches let through, one after the other."""
    positions = torch.arange(LENGTH)
    ahead = positions[None, :] - positions[:, None]  # of the position (column) after the changed token (row)
    reached = torch.eye(LENGTH, dtype=torch.bool)
    for reach in layers:
        near = torch.ones_like(reached) if reach is None else ahead.abs() <= reach
        passes = near & (ahead >= 0) if causal else near
        reached = (reached.float() @ passes.float()) > 0
    return reached


# ---------------------------------------------------------------- training


STEPS, SAVED, KILLED = 30, 10, 14


class Killed(Exception):
    """Stands for the end of the process."""


def run_of(folder: Path, corpus: Corpus) -> Pretrain:
    """Masked training of the model in `folder`."""
    return Pretrain(
        "adapted",
        start=Hub(str(folder)),
        corpus=corpus,
        stages=(Stage(MLM(0.4), STEPS),),
        packing=Chunks(32, shortest=8),
        batch_tokens=16 * 32,
        schedule=WSD(peak=1e-2, warmup=3, decay=5),
        precision="fp32",
        heldout_every=STEPS,
        heldout_tokens=512,
        seed=7,
    )


def train(run: Pretrain, store: Store, *, killed: bool = False) -> None:
    """To the end; or to step `KILLED`, the last checkpoint some steps behind."""
    calls = iter(range(STEPS + 1))

    def stop() -> bool:
        if killed and next(calls) == KILLED:
            raise Killed
        return False

    job = Pretraining(
        run,
        run.steps,
        store=store,
        shards=shards_in(store),
        identities=identities(store),
        ranks=Ranks(0, 1, torch.device("cpu")),
        needed=set,
        flops_per_token=None,
        options=RuntimeOptions(loaders=0, checkpoint_steps=SAVED, quiet=True, stop=stop),
    )
    job.train()


def check_training(run: Pretrain, store: Store) -> None:
    """The loss falls, on what is trained on and on held-out text."""
    train(run, store)
    lines = checkpoint.metrics_of(store, last_checkpoint(run, store))
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < first - 0.1, f"the loss goes from {first:.3f} to {last:.3f}"
    heldout = [line["heldout"] for line in lines if "heldout" in line]
    assert heldout[-1]["mlm40"] < heldout[0]["mlm40"], "the held-out loss does not fall"


def check_kill_and_resume(run: Pretrain, store: Store, *, as_in: Store) -> None:
    """Killed between two checkpoints and begun again, a run ends in the same bits as in the store `as_in`."""
    try:
        train(run, store, killed=True)
    except Killed:
        pass
    else:
        raise AssertionError("it was not killed")
    on_the_way = checkpoint.nearest(run, STEPS, store, identities(store))
    assert on_the_way is not None
    assert on_the_way[0] == SAVED
    train(run, store)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            load_file(each.checkpoints / last_checkpoint(run, each) / name) for each in (store, as_in)
        )
        assert ours.keys() == theirs.keys()
        assert not [weight for weight in ours if not torch.equal(ours[weight], theirs[weight])], name


def shards_in(store: Store) -> Shards:
    return Shards.open(next(store.shards.iterdir()))


def last_checkpoint(run: Pretrain, store: Store) -> str:
    return checkpoint_key(run, run.steps, identities(store))


# ---------------------------------------------------------------- export


SHORT = 9  # tokens of the second text, the rest of its row is padding


def export_end(run: Pretrain, store: Store, folder: Path) -> str:
    """Export the end of the run; gives the class it was written as."""
    result = find(last_checkpoint(run, store), store)
    assert isinstance(result, SavedCheckpoint)
    return export_checkpoint(result, store, folder, onnx=False, say=lambda text: None).written.architecture


def opened(model: Any, tokenizer: Path, folder: Path) -> str:
    """The class that a model is written as where its windows were opened, or were never switched on."""
    model.set_attn_implementation(NAME)
    exported = tokenizer_of(load_saved(tokenizer), bos=False, context=CONTEXT)
    folder.mkdir()
    return write_encoder(LanguageModel(model, windows=False).eval(), exported, folder).architecture


def check_exported(run: Pretrain, store: Store, folder: Path) -> None:
    """Plain transformers gives the hidden states of the trained model, and as a start it goes on from there."""
    shards = shards_in(store)
    trained = model_of_checkpoint(run, last_checkpoint(run, store), store, shards).eval()
    check_plain_transformers(trained, folder)
    check_start(trained, folder, shards.vocab, shards.mask_id)


@torch.no_grad()
def check_plain_transformers(trained: LanguageModel, folder: Path, **options: Any) -> None:
    """The folder gives the hidden states of a long text alone, and of two texts padded in one batch."""
    ids, mask = texts(2), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, SHORT:] = 0
    model = AutoModel.from_pretrained(folder, **options).eval()
    padded = model(input_ids=ids, attention_mask=mask).last_hidden_state
    alone = model(input_ids=ids[:1]).last_hidden_state
    for theirs, own in ((alone, ids[:1]), (padded[:1], ids[:1]), (padded[1:, :SHORT], ids[1:, :SHORT])):
        ours = trained.hidden(own, positions_in(own), AttentionPattern(causal=False))
        assert close(ours, theirs), "the folder gives other hidden states"


@torch.no_grad()
def check_start(
    trained: LanguageModel, folder: Path, vocab: int, mask_id: int, causal: Any = (True, False)
) -> None:
    """A run that starts from the folder computes what the model computes."""
    again = from_hub(Hub(str(folder)), TokenizerInfo(vocab, mask_id, mask_is_new=False), length=32).eval()
    probe(again, vocab=vocab)
    ids = texts(2)
    for way in causal:
        ours, theirs = (
            model.logits(ids, positions_in(ids), AttentionPattern(way)) for model in (again, trained)
        )
        assert close(ours, theirs), "as a start, the folder gives other logits"


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Verdict:
    """What became of a family."""

    family: str
    kind: str  # the class of its model
    became: str  # passed, not exported, refused or not built
    why: str = ""
    exported: str = ""  # the class it was written as

    @property
    def row(self) -> str:
        cells = (self.family, self.kind, self.became, self.exported, self.why)
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


INTERNAL = ("Error", "object has no attribute", "Traceback", "NoneType")  # what no user should have to read


def examine(family: Family, corpus: TokenizedCorpus, folder: Path) -> Verdict:
    """All checks, in order. What is not as it should be is an AssertionError, what the product refuses a verdict."""
    disable_progress_bar()
    try:
        built = build(family)
    except CannotBuild as wrong:
        return Verdict(str(family), "", "not built", str(wrong))
    kind = type(built).__name__
    start = _saved(built, corpus, folder / "start")
    run = run_of(start, corpus.corpus)
    try:
        model = starting_model(run, Shards.open(corpus.shards), probed=True).eval()
    except ModelError as wrong:
        return Verdict(str(family), kind, "refused", _reason(wrong, built, start))
    assert not _experts(built), "a mixture of experts is not refused"
    own = (AutoModelForMaskedLM if family.masked else AutoModelForCausalLM).from_pretrained(start)
    check_own_forward(model, own, causal=not family.masked)
    check_directions(model)
    check_segments(model)
    once, twice = (corpus.store(folder / name) for name in ("once", "twice"))
    check_training(run, once)
    check_kill_and_resume(run, twice, as_in=once)
    try:
        exported = export_end(run, once, folder / "exported")
    except ModelError as wrong:
        return Verdict(str(family), kind, "not exported", str(wrong))
    check_exported(run, once, folder / "exported")
    if any(reaches(built.config)) and not family.masked:
        otherwise = opened(built, corpus.shards / "tokenizer", folder / "opened")
        exported += "" if otherwise == exported else f"; without windows {otherwise}"
    return Verdict(str(family), kind, "passed", exported=exported)


def _saved(model: Any, corpus: TokenizedCorpus, folder: Path) -> Path:
    """A folder as the hub has it."""
    model.save_pretrained(folder)
    for file in corpus.tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _reason(wrong: ModelError, model: Any, folder: Path) -> str:
    """The one line of a refusal, which must be one that a user understands."""
    line = str(wrong).replace(str(folder), "it")
    assert "\n" not in line
    assert not [part for part in INTERNAL if part in line], f"the reason is not clear: {line}"
    if _experts(model):
        assert "mixture of experts" in line, line
    return line


def _experts(model: Any) -> bool:
    return any("expert" in type(module).__name__.lower() for module in model.modules())
