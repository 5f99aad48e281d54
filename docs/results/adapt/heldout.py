"""Held-out losses of every model of the study, each objective read in both directions. Usage: heldout.py STORE"""

import json
import sys
from pathlib import Path

import torch

from biphase import CLM, MLM, MNTP
from biphase.attention import AttentionPattern, segment_mask
from biphase.data.shards import Shards
from biphase.data.stream import heldout_stream
from biphase.store import Store
from biphase.study.load import load
from biphase.study.plan import identities, make_plan
from biphase.training.pretrain import model_of_checkpoint

ROWS, AT_A_TIME = 256, 16
store = Store(sys.argv[1])
known = identities(store)
plan = make_plan(load(Path(__file__).parent / "study.py").study, known)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
found = {}
for name, key in plan.results.items():
    run = plan.jobs[key].run
    shards = Shards.open(store.shards / known.data(run))
    model = model_of_checkpoint(run, key, store, shards).to(device).eval()
    stream = heldout_stream(shards, run.packing)
    for objective, word in (
        (CLM(), "causal"),
        (MLM(0.4), "masked 40%"),
        (MNTP(0.4), "masked 40%, one before"),
    ):
        for causal in (True, False):
            if objective.causal and not causal:
                continue  # it would see what it is asked for
            total, labels = 0.0, 0
            for draws in torch.arange(min(ROWS, stream.rows)).split(AT_A_TIME):
                batch = stream.batch(objective, draws, step=0).to(device)
                pattern = AttentionPattern(causal, mask=segment_mask(batch.segments, causal=causal))
                with torch.no_grad():
                    total += float(model.loss_sum(batch, pattern))
                labels += batch.count
            found.setdefault(name, {})[f"{word}, read {'causally' if causal else 'both ways'}"] = (
                total / labels
            )
print(json.dumps(found, indent=1))
