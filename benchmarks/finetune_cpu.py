"""Fine-tuning on this CPU beside transformers' Trainer: same weights, same examples in the same order, one run.

    python benchmarks/finetune_cpu.py                      a new 8m on short sentences that ship with biphase
    python benchmarks/finetune_cpu.py --data FOLDER        on its train.parquet, with columns sentence and label
    python benchmarks/finetune_cpu.py --model FOLDER       an existing model with its tokenizer

Both classify texts in fp32: mean of the hidden states, Linear-GELU-Linear, AdamW, a linear schedule, clipping. The
Trainer finds its texts in tokens and in order, pads each batch to its longest text (DataCollatorWithPadding), and
neither evaluates, saves nor logs; biphase goes its usual way. The losses of both are compared step by step, so what
is timed is one training done twice (a model with dropout draws differently in both). Runs alternate, and the medians
are compared, so that a machine that slows down slows both. Making the model, the tokens and the first step is not
timed.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from biphase import BPE, CATALOG, SIZES, Classify, Corpus, Finetune, Hub, Pretrained, Splits, Tag, Task
from biphase.data import tokenizer
from biphase.finetune.encoder import TuningOptions, encoder_of_hub
from biphase.finetune.families import TextClassification
from biphase.finetune.trial import FineTuner, batches_of, rows_of
from biphase.models.backbone import from_scratch
from biphase.models.heads import TextHead
from biphase.tasks.load import Examples, LabelledText, TaggedSentence, load

RATE, SEED, LENGTH = 1e-4, 0, 512
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@dataclass(frozen=True)
class Case:
    """What both train: a model folder, a dataset in its tokens, and how."""

    folder: str
    family: TextClassification
    bench: FineTuner
    spec: Finetune

    def rows(self, step: int) -> list[int]:
        return rows_of(self.family, step, SEED).tolist()


@dataclass(frozen=True)
class Run:
    """What one measurement gives."""

    seconds: float  # of all steps but the first
    losses: dict[int, float]  # by step, counted from 1


def prepare(options: argparse.Namespace, scratch: str) -> Case:
    task = Task(
        "benchmark",
        Classify("{sentence}", ("no", "yes")),
        ".",
        Splits(test="train*"),
        steps=options.steps + 1,
        batch=options.batch,
    )
    texts = texts_of(task, options.data)
    texts = texts[: len(texts) - len(texts) % options.batch]  # so that no epoch ends with a smaller batch
    if not options.model:
        write_model(options, texts, Path(scratch))
    spec = Finetune((task,), lrs=(RATE,), seeds=(SEED,), protocol="standard", precision="fp32")
    folder = str(Path(options.model or scratch).resolve())
    subject = encoder_of_hub(Hub(folder), spec)
    family = TextClassification(
        task, Examples(texts, texts[:1], texts[:1]), subject.tokenization, protocol="standard"
    )
    setting = TuningOptions.of(torch.device("cpu"), "fp32", varlen=False)
    return Case(folder, family, FineTuner(subject.encoder, setting), spec)


def texts_of(task: Task, folder: str) -> list[LabelledText]:
    """The sentences of a folder; else short ones of Wikipedia, and whether each names a person."""
    if folder:
        return [
            one for one in load(task.at(folder), documents="judged").train if isinstance(one, LabelledText)
        ]
    tagged = CATALOG["wikiann-mini"]
    assert isinstance(tagged.form, Tag)
    person = tagged.form.labels.index("B-PER")
    sentences = load(tagged, documents="judged").train
    return [
        LabelledText(" ".join(one.words), int(person in one.tags))
        for one in sentences
        if isinstance(one, TaggedSentence)
    ]


def write_model(options: argparse.Namespace, texts: list[LabelledText], folder: Path) -> None:
    """A model with random weights and its tokenizer, as transformers loads them."""
    if options.tokenizer:
        words = tokenizer.load(Corpus("benchmark", ".", Pretrained(options.tokenizer)))
    else:
        words = tokenizer.train(Corpus("benchmark", ".", BPE(2_048)), [one.text for one in texts], print)
    vocab, size = max(options.vocab, words.vocab), SIZES[options.size]
    model = from_scratch(size, vocab=vocab, mask_id=words.special.mask, length=LENGTH, seed=SEED)
    model.model.save_pretrained(folder)
    words.save(folder)


def ours(case: Case) -> Run:
    times: list[float] = []
    _, trained = case.bench.finetune(
        case.family, case.spec, lr=RATE, seed=SEED, tell=lambda step, steps: times.append(time.perf_counter())
    )
    return Run(times[-1] - times[0], trained.losses)


class Classifier(nn.Module):
    """The same arithmetic on padded batches, with the very same first weights."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.trunk = AutoModel.from_pretrained(case.folder, dtype=torch.float32, attn_implementation="sdpa")
        head = case.bench.fresh(case.family, SEED).head
        assert isinstance(head, TextHead)
        self.dense, self.out = head.dense, head.out
        self.losses: list[torch.Tensor] = []

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].to(hidden.dtype)
        pooled = (hidden * real).sum(1) / real.sum(1)
        logits = self.out(nn.functional.gelu(self.dense(pooled)))
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.detach())
        return {"loss": loss, "logits": logits}


class InOrder(torch.utils.data.Dataset):
    """The examples of all steps, one after another."""

    def __init__(self, case: Case) -> None:
        ids, labels = case.family.ids["train"], case.family.labels["train"]
        rows = [row for step in range(case.family.steps) for row in case.rows(step)]
        self.examples = [{"input_ids": ids[row].tolist(), "label": int(labels[row])} for row in rows]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args, job, control, **rest):
        self.times.append(time.perf_counter())


def theirs(case: Case) -> Run:
    adam, model, clock = case.spec.optimizer, Classifier(case), Clock()
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(), per_device_train_batch_size=case.family.task.batch, use_cpu=True,
        max_steps=case.family.steps, learning_rate=RATE, warmup_steps=case.spec.warmup, lr_scheduler_type="linear",
        adam_beta1=adam.betas[0], adam_beta2=adam.betas[1], adam_epsilon=adam.eps, weight_decay=adam.weight_decay,
        max_grad_norm=adam.clip, train_sampling_strategy="sequential", dataloader_num_workers=0,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    words: Any = AutoTokenizer.from_pretrained(case.folder)
    words.pad_token = words.pad_token or words.eos_token  # whatever it is, it is masked
    trainer = Trainer(
        model,
        arguments,
        train_dataset=InOrder(case),
        data_collator=DataCollatorWithPadding(words),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = {step: float(loss) for step, loss in enumerate(model.losses, 1)}
    return Run(clock.times[-1] - clock.times[0], losses)


def padding(case: Case) -> dict[str, float]:
    """The share of what is computed that is no text, in the timed steps."""
    steps, lengths = range(1, case.family.steps), case.family.ids["train"].lengths
    text = sum(int(lengths[case.rows(step)].sum()) for step in steps)
    packed = sum(
        one.inputs[0].ids.numel()
        for step in steps
        for one in batches_of(case.family, step, SEED, case.bench.options)
    )
    padded = sum(len(case.rows(step)) * int(lengths[case.rows(step)].max()) for step in steps)
    return {"biphase": 1 - text / packed, "Trainer": 1 - text / padded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="8m", choices=SIZES, help="of the new model")
    parser.add_argument(
        "--vocab", type=int, default=32_000, help="its embeddings, if its tokenizer has fewer"
    )
    parser.add_argument(
        "--tokenizer", default="", help="folder with its tokenizer.json; else a BPE of the texts"
    )
    parser.add_argument("--model", default="", help="folder of an existing model, instead of a new one")
    parser.add_argument("--data", default="", help="folder with train.parquet: sentence, label (0 or 1)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--steps", type=int, default=16, help="timed steps a run, after one that is not timed"
    )
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {"biphase": [], "Trainer": []}
    with tempfile.TemporaryDirectory() as scratch:
        case = prepare(options, scratch)
        apart = 0.0
        for number in range(options.runs):
            runs = {"biphase": ours(case), "Trainer": theirs(case)}
            apart = max(
                apart,
                *(abs(loss - runs["Trainer"].losses[step]) for step, loss in runs["biphase"].losses.items()),
            )
            for name, run in runs.items():
                speeds[name].append(options.steps * options.batch / run.seconds)
                print(f"run {number + 1}  {name:<8} {speeds[name][-1]:8.1f} examples/s", flush=True)
    lengths, shares = case.family.ids["train"].lengths, padding(case)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    print(f"\n{options.model or options.size}, {len(lengths):,} texts of {lengths.mean():.1f} tokens (median "
          f"{statistics.median(lengths):.0f}, longest {lengths.max()}), batch {options.batch}, {options.steps} steps, "
          f"{torch.get_num_threads()} threads, median of {options.runs}")  # fmt: skip
    for name, value in medians.items():
        print(f"  {name:<8} {value:8.1f} examples/s   padding {shares[name]:4.0%}")
    print(f"  ratio    {medians['biphase'] / medians['Trainer']:8.2f}")
    print(f"  losses of the same step differ by at most {apart:.0e}")


if __name__ == "__main__":
    main()
