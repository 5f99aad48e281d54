"""The same steps with transformers' Trainer: bf16 under autocast, fused AdamW, sdpa, compiled or not.

It trains the same shape on the same tokens. What its users usually leave as it is stays as it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from biphase.batch import IGNORE
from biphase.bench.cases import FinetuneCase, PretrainCase
from biphase.bench.clock import Measured, StepClock
from biphase.bench.pretrain import RATE, objective_of
from biphase.bench.tokens import MASK, PAD, Dataset, stream_of
from biphase.errors import TrainingError
from biphase.models.heads import TextHead, TokenHead, initialise
from biphase.presets import SIZES
from biphase.specs import CLM, AdamW

COMPILED = "trainer-compiled"
# Compiled, transformers' encoders build a mask that hides nothing, and lose the fast kernels by it. Whole rows need none,
# so the peer is spared it: it is measured at its best.
MASKLESS = "sdpa-without-mask"
AttentionInterface.register(MASKLESS, sdpa_attention_forward)
AttentionMaskInterface.register(MASKLESS, lambda *parts, **named: None)


def refuse_missing(package: str, peer: str) -> None:
    if find_spec(package) is None:
        name = package.replace("_", "-")
        raise TrainingError(f"{peer} needs the package {name}; type pip install {name}, or --against none")


def arguments(case: Any, device: torch.device, *, peer: str, batch: int, rate: float) -> dict[str, Any]:
    """What the Trainer is told: the arithmetic, the optimizer, and to be silent."""
    adam = AdamW()
    return {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": batch,
        "max_steps": case.warm + case.steps,
        "use_cpu": device.type == "cpu",
        "bf16": case.precision != "fp32",
        "torch_compile": peer == COMPILED,
        "optim": "adamw_torch_fused",
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": adam.betas[0],
        "adam_beta2": adam.betas[1],
        "adam_epsilon": adam.eps,
        "weight_decay": adam.weight_decay,
        "max_grad_norm": adam.clip,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def use_one_gpu(said: TrainingArguments) -> None:
    """Where there are several, a Trainer would spread its batch over all of them."""
    if said.device.type == "cuda":
        said._n_gpu = 1


class Ticks(TrainerCallback):
    """Tells a clock when a step is done."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.clock.mark()


def timed(trainer: Trainer, device: torch.device, warm: int, *, tokens: float, path: str) -> Measured:
    """Let a trainer train."""
    clock = StepClock(device)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Ticks(clock))
    trainer.train()
    return clock.measured(warm, tokens=tokens, path=path)


# ---------------------------------------------------------------- pretraining


class Rows(torch.utils.data.Dataset):
    """Rows that were masked before the clock starts; for CLM as they are, since Llama shifts them itself."""

    def __init__(self, case: PretrainCase) -> None:
        stream, objective = stream_of(case, whole_rows=True), objective_of(case)
        batch = stream.batch(objective, torch.arange(stream.rows), step=0)
        self.ids = batch.ids
        if isinstance(objective, CLM):
            self.labels = batch.ids
            return
        labels = torch.full((batch.ids.numel(),), IGNORE)
        labels[batch.label_at] = batch.labels
        self.labels = labels.view_as(batch.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def shape(size_name: str, vocab: int, length: int) -> dict[str, Any]:
    size = SIZES[size_name]
    return {
        "vocab_size": vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": length,
        "initializer_range": size.init_std,
        "rms_norm_eps": size.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_base},
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }


def peer_model(case: PretrainCase) -> nn.Module:
    like = shape(case.size, case.vocab, case.length)
    torch.manual_seed(0)
    if case.objective == "mlm":
        like["attn_implementation"] = MASKLESS
        return EuroBertForMaskedLM(EuroBertConfig(**like, mask_token_id=MASK))
    return LlamaForCausalLM(LlamaConfig(**like, use_cache=False))


def pretrain(case: PretrainCase, device: torch.device, *, peer: str, rows: int) -> Measured:
    """Whole rows, whatever our packing: the Trainer has no other."""
    case = replace(case, rows=rows)
    said = TrainingArguments(
        **arguments(case, device, peer=peer, batch=rows, rate=RATE),
        gradient_accumulation_steps=case.micro_batches,
    )
    use_one_gpu(said)
    trainer = Trainer(peer_model(case), said, train_dataset=Rows(case))
    return timed(trainer, device, case.warm, tokens=case.tokens, path=f"{rows} rows")


# ---------------------------------------------------------------- fine-tuning


class Padded(nn.Module):
    """Our heads and losses on padded batches."""

    def __init__(self, case: FinetuneCase, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        like = shape(case.size, case.vocab, length)
        self.trunk = EuroBertModel(EuroBertConfig(**like, mask_token_id=MASK))
        width, labels = like["hidden_size"], case.lengths.labels
        self.head = TextHead(width, labels) if labels else TokenHead(width, 2)
        initialise(self.head, std=like["initializer_range"], seed=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if isinstance(self.head, TextHead):
            real = attention_mask[..., None].to(hidden.dtype)
            pooled = (hidden * real).sum(1) / real.sum(1)
            logits = self.head.out(F.gelu(self.head.dense(pooled)))
            return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}
        places = self.head.out(hidden).float().masked_fill(attention_mask[..., None] == 0, float("-inf"))
        losses = [F.cross_entropy(places[..., which], labels[:, which]) for which in (0, 1)]
        return {"loss": sum(losses, torch.zeros_like(losses[0])) / 2, "logits": places}


class Texts(torch.utils.data.Dataset):
    def __init__(self, data: Dataset) -> None:
        self.ids = [torch.from_numpy(ids) for ids in data.ids]
        self.labels = torch.from_numpy(data.labels)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def padded(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as wide as its longest text."""
    texts = [one["input_ids"] for one in examples]
    return {
        "input_ids": pad_sequence(texts, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        "labels": torch.stack([one["labels"] for one in examples]),
    }


def finetune(case: FinetuneCase, device: torch.device, *, peer: str, rate: float, length: int) -> Measured:
    data = Dataset(case)
    collate: Callable[[list[Any]], dict[str, Any]] = padded
    said = TrainingArguments(**arguments(case, device, peer=peer, batch=case.batch, rate=rate))
    use_one_gpu(said)
    trainer = Trainer(Padded(case, length), said, train_dataset=Texts(data), data_collator=collate)
    return timed(trainer, device, case.warm, tokens=data.tokens, path="padded")
