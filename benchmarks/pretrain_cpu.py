"""Pretraining on this CPU beside transformers' Trainer: same model, same tokens, one run.

    python benchmarks/pretrain_cpu.py                     8m, vocabulary 32k, rows of 512, batch 8, MLM 40%
    python benchmarks/pretrain_cpu.py --objective clm

Both train EuroBERT of the same shape in fp32 with AdamW and clipping on whole rows of the same random tokens.
The Trainer gets its batches masked beforehand; ours are masked on the way, as always. Runs alternate, and the
median of each is compared, so that a machine that slows down slows both.
"""

import argparse
import statistics
import tempfile
import time

import numpy as np
import torch
from transformers import EuroBertConfig, EuroBertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

from biphase import CLM, MLM, SIZES, AdamW, Rows
from biphase.attention import pattern_of
from biphase.data.stream import Stream, load_ahead
from biphase.models.backbone import from_scratch
from biphase.objectives import Vocabulary
from biphase.training import distributed, optimizer
from biphase.training.loop import Hooks, PlainStep, train

MASK = 3


class RandomTokens:
    """Tokens drawn once, in place of a corpus."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        self.data = np.random.default_rng(0).integers(4, vocab, (rows, length), dtype=np.uint16)

    def __len__(self) -> int:
        return self.data.size

    def rows(self, indices: np.ndarray, length: int) -> np.ndarray:
        return self.data[indices]


def stream_of(options: argparse.Namespace) -> Stream:
    tokens = RandomTokens(options.batch * (options.steps + 1), options.length, options.vocab)
    words = Vocabulary.of(options.vocab, MASK, (0, 1, 2))
    return Stream(tokens, Rows(options.length), 0, 1, words)


def ours(options: argparse.Namespace) -> float:
    """Tokens per second of biphase."""
    size, stream = SIZES[options.size], stream_of(options)
    model = from_scratch(size, vocab=options.vocab, mask_id=MASK, length=options.length, seed=0)
    objective = MLM(0.4) if options.objective == "mlm" else CLM()
    ranks = distributed.Ranks(0, 1, torch.device("cpu"))

    def make(step):
        draws = torch.arange(step * options.batch, (step + 1) * options.batch)
        return [stream.batch(objective, draws, step=step)]

    times = []
    step = PlainStep(
        optimizer.build(model, AdamW()),
        lambda batch: model.loss_sum(batch, pattern_of(batch, varlen=False)),
        clip=1.0,
        gradients=distributed.Replicated(list(model.parameters()), ranks),
    )
    batches = load_ahead(make, 0, options.steps + 1, loaders=1)
    hooks = Hooks(after=(lambda done: times.append(time.perf_counter()),))
    train(step, batches, first=0, rate=lambda step: 5e-4, ranks=ranks, hooks=hooks)
    return options.steps * options.batch * options.length / (times[-1] - times[0])


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args, job, control, **rest):
        self.times.append(time.perf_counter())


class Masked(torch.utils.data.Dataset):
    """Rows that were masked (or shifted) before the clock starts."""

    def __init__(self, options: argparse.Namespace) -> None:
        stream = stream_of(options)
        objective = MLM(0.4) if options.objective == "mlm" else CLM()
        batch = stream.batch(objective, torch.arange(stream.rows), step=0)
        labels = torch.full((batch.ids.numel(),), -100)
        labels[batch.label_at] = batch.labels
        self.ids, self.labels = batch.ids, labels.view_as(batch.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def theirs(options: argparse.Namespace) -> float:
    """Tokens per second of the Trainer. For CLM its labels are shifted beforehand: the same work, the same head."""
    size = SIZES[options.size]
    torch.manual_seed(0)
    config = EuroBertConfig(
        vocab_size=options.vocab, hidden_size=size.hidden, intermediate_size=size.ffn, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, max_position_embeddings=options.length,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, mask_token_id=MASK, attn_implementation="sdpa",
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(), per_device_train_batch_size=options.batch, max_steps=options.steps + 1, use_cpu=True,
        learning_rate=5e-4, adam_beta2=0.95, adam_epsilon=1e-5, weight_decay=0.1, max_grad_norm=1.0,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    trainer = Trainer(
        EuroBertForMaskedLM(config), arguments, train_dataset=Masked(options), callbacks=[clock]
    )
    trainer.train()
    return options.steps * options.batch * options.length / (clock.times[-1] - clock.times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="8m", choices=SIZES)
    parser.add_argument("--objective", default="mlm", choices=["mlm", "clm"])
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="timed steps a run, after one that is not timed")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    speeds = {"biphase": [], "Trainer": []}
    for number in range(options.runs):
        for name, measure in (("biphase", ours), ("Trainer", theirs)):
            speeds[name].append(measure(options))
            print(f"run {number + 1}  {name:<8} {speeds[name][-1]:8.0f} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print(f"\n{options.size}, {options.objective}, vocabulary {options.vocab:,}, rows of {options.length}, batch {options.batch}, "
          f"{torch.get_num_threads()} threads, median of {options.runs}")  # fmt: skip
    for name, value in medians.items():
        print(f"  {name:<8} {value:8.0f} tokens/s")
    print(f"  ratio    {medians['biphase'] / medians['Trainer']:8.2f}")


if __name__ == "__main__":
    main()
