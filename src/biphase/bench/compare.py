"""Run `biphase bench`: biphase first, then each peer, one after another on an otherwise idle device.

The peer is transformers' Trainer, compiled or not. It runs in bf16 under autocast, with fused AdamW and sdpa, on the same
model shape and the same tokens. Options that its users usually leave at their defaults stay there.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
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

from biphase.bench import measure
from biphase.bench.cases import (
    OURS,
    BenchRequest,
    Case,
    CaseMaker,
    Compared,
    FinetuneCase,
    JobCase,
    PretrainCase,
    Report,
    Timing,
    defaults_of,
    save,
)
from biphase.bench.measure import CONTEXT, MASK, RATE, TUNING_RATE, Dataset, StepClock
from biphase.errors import TrainingError
from biphase.models.backbone import config_fields
from biphase.models.encoder import TextHead, TokenHead, initialise
from biphase.objectives import IGNORE
from biphase.presets import SIZES
from biphase.protocol import micro_rows
from biphase.specs import AdamW
from biphase.store import Store
from biphase.study import devices
from biphase.text import counted
from biphase.training import distributed

# ---------------------------------------------------------------- Trainer


COMPILED = "trainer-compiled"
# Compiled, transformers' encoders build a mask that masks nothing, which disables the fast attention kernels. Whole
# rows need no mask, so the peer gets this variant and is measured at its best.
MASKLESS = "sdpa-without-mask"
AttentionInterface.register(MASKLESS, sdpa_attention_forward)
AttentionMaskInterface.register(MASKLESS, lambda *parts, **named: None)


def arguments(case: Case, device: torch.device, *, peer: str, batch: int, rate: float) -> TrainingArguments:
    """The Trainer's arguments: precision, optimizer, one device, and no output."""
    adam = AdamW()
    options = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=batch,
        max_steps=case.warm + case.steps,
        use_cpu=device.type == "cpu",
        bf16=case.precision != "fp32",
        torch_compile=peer == COMPILED,
        optim="adamw_torch_fused",
        learning_rate=rate,
        lr_scheduler_type="constant",
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_epsilon=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=adam.clip,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    if options.device.type == "cuda":
        options._n_gpu = 1  # else the Trainer uses DataParallel if there are several GPUs
    return options


class MarkSteps(TrainerCallback):
    """Marks a clock at the end of each step."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.clock.mark()


def time_trainer(trainer: Trainer, device: torch.device, warm: int, *, tokens: float, path: str) -> Timing:
    """Run a trainer and time its steps."""
    clock = StepClock(device)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MarkSteps(clock))
    trainer.train()
    return clock.measured(warm, tokens=tokens, path=path)


Rows = list[dict[str, Tensor]]  # ids and labels of each row or text


def labelled(ids: Any, labels: Tensor) -> Rows:
    return [{"input_ids": text, "labels": label} for text, label in zip(ids, labels, strict=True)]


def masked_rows(case: PretrainCase) -> Rows:
    """Rows masked before the clock starts; for CLM unshifted, since Llama shifts labels itself."""
    stream, objective = measure.stream_of(case, whole_rows=True), measure.objective_of(case)
    batch = stream.batch(objective, torch.arange(stream.rows), step=0)
    if objective.causal:
        return labelled(batch.ids, batch.ids)
    labels = torch.full((batch.ids.numel(),), IGNORE)
    labels[batch.label_at] = batch.labels
    return labelled(batch.ids, labels.view_as(batch.ids))


def peer_config(case: PretrainCase | FinetuneCase, length: int) -> dict[str, Any]:
    fields = config_fields(SIZES[case.size], vocab=case.vocab, length=length)
    return {**fields, "attn_implementation": "sdpa"}


def peer_model(case: PretrainCase) -> nn.Module:
    """The transformers model of a case: EuroBERT for MLM, Llama for CLM."""
    config = peer_config(case, case.length)
    torch.manual_seed(0)
    if case.objective == "mlm":
        config["attn_implementation"] = MASKLESS
        return EuroBertForMaskedLM(EuroBertConfig(**config, mask_token_id=MASK))
    return LlamaForCausalLM(LlamaConfig(**config, use_cache=False))


def pretrain(case: PretrainCase, device: torch.device, *, peer: str) -> Timing:
    """Time the Trainer's pretraining, on whole rows whatever our packing: it has no other."""
    options = arguments(case, device, peer=peer, batch=case.rows, rate=RATE)
    data: Any = masked_rows(case)  # any sequence will do
    trainer = Trainer(peer_model(case), options, train_dataset=data)
    return time_trainer(trainer, device, case.warm, tokens=case.rows * case.length, path=f"{case.rows} rows")


class PaddedModel(nn.Module):
    """Our heads and losses on padded batches."""

    def __init__(self, case: FinetuneCase) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = peer_config(case, CONTEXT)
        self.trunk = EuroBertModel(EuroBertConfig(**config, mask_token_id=MASK))
        width, labels = config["hidden_size"], case.lengths.labels
        self.head = TextHead(width, labels) if labels else TokenHead(width, 2)
        initialise(self.head, std=config["initializer_range"], seed=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if isinstance(self.head, TextHead):
            real = attention_mask[..., None].to(hidden.dtype)
            pooled = (hidden * real).sum(1) / real.sum(1)
            logits = self.head.out(F.gelu(self.head.dense(pooled)))
            return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}
        bounds = self.head.out(hidden).float().masked_fill(attention_mask[..., None] == 0, float("-inf"))
        losses = [F.cross_entropy(bounds[..., which], labels[:, which]) for which in (0, 1)]
        return {"loss": sum(losses, torch.zeros_like(losses[0])) / 2, "logits": bounds}


def labelled_texts(data: Dataset) -> Rows:
    return labelled([torch.from_numpy(ids) for ids in data.ids], torch.from_numpy(data.labels))


def padded(examples: Rows) -> dict[str, Any]:
    """A batch padded to its longest text."""
    texts = [example["input_ids"] for example in examples]
    return {
        "input_ids": pad_sequence(texts, batch_first=True, padding_value=measure.PAD),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        "labels": torch.stack([example["labels"] for example in examples]),
    }


def finetune(case: FinetuneCase, device: torch.device, *, peer: str) -> Timing:
    """Time the Trainer's fine-tuning, on padded batches."""
    data = Dataset(case)
    options = arguments(case, device, peer=peer, batch=case.batch, rate=TUNING_RATE)
    texts: Any = labelled_texts(data)
    trainer = Trainer(PaddedModel(case), options, train_dataset=texts, data_collator=padded)
    return time_trainer(trainer, device, case.warm, tokens=data.tokens, path="padded")


# ---------------------------------------------------------------- run


VERSIONED = ("triton", "accelerate")  # other packages that affect the results
WHOLE_ROWS = "the Trainer's attention spans whole rows, which is more work; --packing rows makes it equal"
ADVICE = {"pretrain": "type fewer --rows, or a smaller --size", "finetune": "type a smaller --size"}
MANY_ROWS = 1_152  # rows of 2,048 in a step of the 210m preset, from which the micro-batch is derived


def report_of(device: torch.device, command: str) -> Report:
    """An empty report with the device, date and versions."""
    versions = distributed.machine(device)
    title = versions.pop("device")
    name = devices.short_name(title)  # to type after --device: "h200" for "NVIDIA H200"
    if device.type == "cpu":
        title, name = f"{title}, {counted(torch.get_num_threads(), 'thread')}", "cpu"
    for package in VERSIONED:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Report(title, name, datetime.now().astimezone().date().isoformat(), versions, command)


def run(
    request: BenchRequest, store: Store, *, device: torch.device, command: str, tell: Callable[[str], None]
) -> Report:
    """Measure everything requested; save it if requested and if any case succeeded."""
    length = request.length or defaults_of(device.type).length
    maker = CaseMaker(request, device.type, micro_rows(distributed.memory_of(device), MANY_ROWS, length))
    peers, precision = request.peers(maker.defaults), maker.common["precision"]
    if peers and find_spec("accelerate") is None:
        raise TrainingError(
            "transformers' Trainer needs the package accelerate; type pip install accelerate, or --against none"
        )
    if poor := distributed.poor_precision(device, precision, "--precision"):
        tell(f"note: {poor}")
    report = report_of(device, command)
    advice = ADVICE.get(request.workload, "this case is left out")
    for case in maker.cases():
        tell(f"{case.title}: biphase …")
        sides = {OURS: measure.ours(device, advice, partial(_ours, case, device, request, report))}
        for peer in peers:
            tell(f"{case.title}: {peer} …")
            sides[peer] = measure.theirs(device, partial(_theirs, case, device, peer, maker.peer_rows))
        whole = peers and isinstance(case, PretrainCase) and case.packing != "rows"
        report.compared.append(Compared(case, sides, WHOLE_ROWS if whole else ""))
    if request.save and report.measured:
        report.saved = str(save(report, store))
    elif request.save:
        tell("nothing was saved: no case fits into the memory of this device")
    return report


def _ours(case: Case, device: torch.device, request: BenchRequest, report: Report) -> Timing:
    """Measure a case on our side, with a profile if requested."""
    profile = partial(report.profiles.__setitem__, case.title) if request.profile else None
    match case:
        case JobCase():
            return measure.measure_job(case)
        case PretrainCase():
            return measure.measure_pretraining(case, device, profile=profile)
        case FinetuneCase():
            return measure.measure_finetuning(case, device, profile=profile)
        case _:
            return measure.measure_encoding(case, device)


def _theirs(case: Case, device: torch.device, peer: str, rows: int) -> Timing:
    if isinstance(case, PretrainCase):
        return pretrain(replace(case, rows=rows), device, peer=peer)
    if isinstance(case, FinetuneCase):
        return finetune(case, device, peer=peer)
    raise TypeError(f"no peer measures {case.kind}")
