"""`adapt`: an existing decoder (or encoder) continued by masking."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, with_store
from biphase.cli.studies import prepare, work

if TYPE_CHECKING:
    from biphase.specs import Study

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="a folder, owner/name or owner/name@commit, or the first digits of a key"
    ),
]
CorpusName = Annotated[
    str, typer.Option(help="a known corpus, or a file or folder of text, jsonl or parquet")
]
Objective = Annotated[str, typer.Option(help="mlm, or mntp: hidden tokens asked for one position before")]
Rate = Annotated[float, typer.Option(min=0, help="peak learning rate; 0: 2e-4, or 1e-3 with --lora")]
Length = Annotated[int, typer.Option(min=0, help="tokens of a row; 0: the model's context, at most 1,024")]
Windows = Annotated[str, typer.Option(help="sliding windows become symmetric, or full attention")]
Gguf = Annotated[str, typer.Option(metavar="FILE", help="read this GGUF file of the folder or repository")]
Tasks = Annotated[str, typer.Option(help="fine-tune before and after on these tasks, as `evaluate` does")]
TextField = Annotated[str, typer.Option(help="the column or field of the text")]
HeldOut = Annotated[str, typer.Option(help="a held-out file or folder; default: 1 document of 1,000")]
HeldOutTokens = Annotated[
    int, typer.Option(min=0, help="measure held-out losses on so many; 0: 131,072, on a CPU 8,192")
]
Freeze = Annotated[bool, typer.Option("--freeze-embeddings", help="leave them as they are")]
ForTime = Annotated[str, typer.Option("--for", metavar="TIME", help="stop cleanly after e.g. 9m or 2h")]
Tokens = Annotated[int, typer.Option(min=0, help="stop tokenizing after so many; 0: all of the corpus")]


@app.command()
def adapt(
    model: Model,
    corpus: CorpusName = "",
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 1_000,
    store: StoreFolder = DEFAULT_STORE,
    objective: Objective = "mlm",
    ratio: Annotated[float, typer.Option(help="share of tokens that is hidden")] = 0.4,
    lr: Rate = 0.0,
    length: Length = 0,
    batch: Annotated[int, typer.Option(min=0, help="rows of a step; 0: 32")] = 0,
    warmup: Annotated[float, typer.Option(min=0, max=0.99, help="share of the steps")] = 0.05,
    decay: Annotated[float, typer.Option(min=0, max=0.99, help="share of the steps, at the end")] = 0.2,
    lora: Annotated[int, typer.Option(min=0, help="train LoRA adapters of this rank; 0: all weights")] = 0,
    freeze_embeddings: Freeze = False,
    layer_decay: Annotated[float, typer.Option(help="each layer's rate as a share of the one above")] = 1.0,
    rope_base: Annotated[float, typer.Option(min=0, help="base of the rotary positions; 0: as it is")] = 0.0,
    windows: Windows = "symmetric",
    gguf: Gguf = "",
    text: TextField = "",
    heldout: HeldOut = "",
    heldout_tokens: HeldOutTokens = 0,
    tokens: Tokens = 0,
    precision: Annotated[str, typer.Option(help="fp32 or bf16; default: bf16, on a CPU fp32")] = "",
    seed: Annotated[int, typer.Option(help="of the order of the text, the masks and new weights")] = 42,
    tasks: Tasks = "",
    lrs: Annotated[str, typer.Option(help="with --tasks: learning rates, by commas")] = "2e-5,5e-5,1e-4",
    seeds: Annotated[str, typer.Option(help="with --tasks: seeds, by commas, or as 0-4")] = "0-2",
    task_steps: Annotated[int, typer.Option(min=0, help="with --tasks: steps of each; 0: its own")] = 0,
    data: Annotated[Path | None, typer.Option(help="with --tasks: local copies of known tasks")] = None,
    for_time: ForTime = "",
    processes: Annotated[int, typer.Option(min=1, help="train in this many processes (torchrun)")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress while it runs")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an encoder of an existing decoder by masked continued pretraining; a study of one run."""
    from biphase.files import Store
    from biphase.study import launch
    from biphase.study.adaptation import Text, Wishes, adaptation
    from biphase.study.evaluation import finetuning
    from biphase.study.tasks import tasks_named

    limit = launch.seconds(for_time) if for_time else None
    wishes = Wishes(
        steps=steps, objective=objective, ratio=ratio, lr=lr, length=length, batch_rows=batch, warmup=warmup,
        decay=decay, lora=lora, freeze_embeddings=freeze_embeddings, layer_decay=layer_decay, rope_base=rope_base,
        precision=precision, seed=seed, heldout_tokens=heldout_tokens,
    )  # fmt: skip
    asked = tasks_named(tasks, data=data, steps=task_steps) if tasks else ()
    grid = finetuning(asked, lrs, seeds, "standard", "", "", 0) if asked else None
    read = Text(corpus, text, heldout, tokens)
    study = adaptation(model, read, wishes, Store(store), gguf=gguf, windows=windows, finetune=grid)
    _work(study, store, processes, limit=limit, quiet=quiet, as_json=as_json)


def _work(
    study: Study, store: Path, processes: int, *, limit: float | None, quiet: bool, as_json: bool
) -> None:
    from biphase.files import Store
    from biphase.study.adaptation import before_after
    from biphase.study.identities import identities
    from biphase.study.plan import PLAN, make_plan

    where = Store(store)
    fingerprints = identities(where)
    made = make_plan(study, fingerprints)
    presence = prepare(made, where, processes, runs=[state.run for state in made.states.values()])

    from biphase.training.manner import Manner

    at = "" if with_store(Path("x"), store) == "x" else f" --store {shlex.quote(str(store))}"
    work(
        made, where, fingerprints, Manner(quiet=quiet), set(made.states), set(made.results.values()),
        presence=presence, limit=limit, command=shlex.join(["adapt", *sys.argv[2:]]),
        study=with_store(where.studies / made.study.name / PLAN, store), as_json=as_json,
        more=lambda: before_after(made, where, at), more_json=lambda: {"key": made.results[made.study.runs[-1].name]},
    )  # fmt: skip
