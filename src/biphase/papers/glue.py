"""Protocols of three papers on GLUE, as `Finetune` records: `PRESETS` by name; docs/evaluation.md compares them.

Splits, templates, heads and metrics are those of the catalog: validation is 5% of train and the public
validation part is reported, where these papers choose and report on the public validation part. Every task
starts from the pretrained model; RoBERTa's leaderboard entry and ModernBERT start RTE, MRPC and STS-B from the
model of MNLI.
"""

from __future__ import annotations

from dataclasses import replace

from biphase.catalog import CATALOG
from biphase.records import ByName
from biphase.specs import AdamW, Finetune, Task


def _on_glue(**lengths: tuple[int, int]) -> tuple[Task, ...]:
    """Return tasks with these epochs and this batch each."""
    return tuple(replace(CATALOG[name], epochs=each[0], batch=each[1]) for name, each in lengths.items())


_GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")
_NO_CLIPPING = 1e6  # no norm of gradients is that large

# Devlin et al. 2019 (arXiv:1810.04805), section 4.1: batch 32, 3 epochs, the best of four rates on dev. Warmup, weight
# decay, ε and β2 are those of its code: run_classifier.py and optimization.py of google-research/bert (eedf571).
BERT_GLUE = Finetune(
    _on_glue(**dict.fromkeys(_GLUE_TASKS, (3, 32))),
    lrs=(2e-5, 3e-5, 4e-5, 5e-5),
    protocol="standard",
    warmup=0.1,
    optimizer=AdamW(betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01),
)

# Liu et al. 2019 (arXiv:1907.11692), section 5.1 and table 10: batch 16 or 32 (here 32), at most 10 epochs with early
# stopping on dev, three rates, warmup 6%, weight decay 0.1, five seeds; β2 and ε are those of its pretraining (table 9).
# Gradients are not clipped in its code: examples/roberta/README.glue.md of facebookresearch/fairseq (1ffc48f).
ROBERTA_GLUE = Finetune(
    _on_glue(**dict.fromkeys(_GLUE_TASKS, (10, 32))),
    lrs=(1e-5, 2e-5, 3e-5),
    protocol="standard",
    warmup=0.06,
    optimizer=AdamW(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1, clip=_NO_CLIPPING),
    best_epoch=True,
)

# Warner et al. 2024 (arXiv:2412.13663), appendix E.1 and table 6 (base): four rates, epochs by task, early
# stopping. Batches, β2, ε and no clipping are those of its code, src/evals/glue_jobs.py of AnswerDotAI/ModernBERT
# (8c57a0f), warmup that of its yamls/finetuning/glue. Its weight decays, most of them 5e-6, are subtracted per step at the peak rate without being
# multiplied by it; at a rate of 5e-5 that is torch's 0.1.
MODERNBERT_GLUE = Finetune(
    _on_glue(
        cola=(5, 32),
        sst2=(2, 16),
        mrpc=(10, 32),
        stsb=(10, 32),
        qqp=(10, 16),
        mnli=(1, 64),
        qnli=(2, 16),
        rte=(3, 16),
    ),
    lrs=(1e-5, 3e-5, 5e-5, 8e-5),
    protocol="standard",
    warmup=0.06,
    optimizer=AdamW(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1, clip=_NO_CLIPPING),
    best_epoch=True,
)

PRESETS = ByName(
    "preset",
    {"bert-glue": BERT_GLUE, "roberta-glue": ROBERTA_GLUE, "modernbert-glue": MODERNBERT_GLUE},
)
