"""The verbs `tokenize`, `doctor`, `validate` and `bench`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typer import Argument, Option

from biphase.cli.app import DEFAULT_STORE, AsJson, StoreFolder, app, give, show, tell, with_store
from biphase.errors import SpecError

if TYPE_CHECKING:
    from biphase.store import Store


@app.command()
def tokenize(
    corpus: str = Argument(
        ..., metavar="CORPUS|STUDY", help="corpus by name, a file, a folder, hf://…, or a study's .py"
    ),
    store_folder: StoreFolder = DEFAULT_STORE,
    tokenizer: str = Option(
        "", help="bpe:32000 trains one; or a folder, a tokenizer.json, or owner/name@revision"
    ),
    text: str = Option("", help="column or field with the text"),
    heldout: str = Option("", help="file, folder or pattern to hold out, beside the corpus"),
    from_folder: Path | None = Option(None, "--from", help="local copy of a hub corpus"),
    processes: int = Option(0, min=0, help="0: one per core"),
) -> None:
    """Tokenize a corpus, or those of a study, in parallel. Stop it at any time; the same command resumes."""
    import time

    from biphase.data.corpus import shards_key, write_link
    from biphase.data.shards import Shards
    from biphase.data.tokenize import tokenize as make_shards
    from biphase.leases import Leases
    from biphase.store import Store
    from biphase.study.describe import shards_text
    from biphase.study.load import corpus_named, load
    from biphase.study.plan import corpora_of

    if corpus.endswith(".py"):
        if tokenizer or text or heldout or from_folder:
            raise SpecError(f"{corpus} says how its corpora are read; type: biphase tokenize {corpus}")
        corpora = corpora_of(load(Path(corpus)).study)
    else:
        corpora = [corpus_named(corpus, tokenizer=tokenizer, text=text, heldout=heldout)]
    store = Store.open(store_folder)
    leases = Leases(store.leases)
    for each in corpora:
        if from_folder is not None:
            write_link(each, store, from_folder)
        key = shards_key(each, store)
        while (lease := leases.take(f"shards-{key}")) is None:
            time.sleep(1)  # another process is making them
        with lease:
            folder = make_shards(each, store, processes=processes, report=tell, lost=lambda: lease.lost)
        show(shards_text(Shards.open(folder), folder))


@app.command()
def doctor(store_folder: StoreFolder = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Check this machine, its packages and the store, and print the command that fixes each problem."""
    from dataclasses import asdict

    from biphase.doctor import examine, render
    from biphase.store import Store

    diagnoses = examine(Store.open(store_folder))
    give(as_json, lambda: [asdict(diagnosis) for diagnosis in diagnoses], lambda: render(diagnoses))
    sys.exit(1 if any(diagnosis.ok is False for diagnosis in diagnoses) else 0)


@app.command()
def validate(
    store_folder: StoreFolder = DEFAULT_STORE,
    processes: int = Option(1, min=1, help="processes on each machine, as of `run`"),
    nodes: int = Option(1, min=1, help="machines; type the command on each"),
    node: int = Option(0, min=0, help="with --nodes: which of them this is, from 0"),
    head: str = Option(
        "",
        metavar="HOST:PORT",
        help="with --nodes: address of node 0, and the first of five free ports there",
    ),
    link: float = Option(0.0, min=0, help="GB/s that sums must reach half of; default: as known of the GPUs"),
    study: bool = Option(True, "--study/--no-study", help="run the small study, killed, resumed and sharded"),
    slurm: Path | None = Option(None, metavar="PROFILE", help="submit it as one Slurm job by this TOML file"),
    as_json: AsJson = False,
) -> None:
    """Test the machines, links and shared folder that a run will use. Leaves nothing in the store."""
    import os

    from biphase import validate
    from biphase.cluster.machines import Machines
    from biphase.store import Store

    store = Store.open(store_folder)
    if slurm:
        show(_submit_validation(store, slurm, link, study=study, as_json=as_json))
        return
    machines = Machines.named(nodes, node, head)
    validation = validate.Validation(store, processes, machines, link, study, tell)
    if validate.RESULT in os.environ:
        validation.group()
    rows = validation.check()
    give(as_json, lambda: validation.facts(rows), lambda: validation.page(rows))
    sys.exit(1 if any(row.ok is False for row in rows) else 0)


def _submit_validation(store: Store, profile: Path, link: float, *, study: bool, as_json: bool) -> str:
    from biphase.cluster import slurm

    root = store.root.resolve()
    arguments = ["validate", "--store", str(root), "--link", str(link)]
    arguments += [] if study else ["--no-study"]
    arguments += ["--json"] if as_json else []
    id, script = slurm.submit(slurm.read_profile(profile), store, "validate", jobs=1, arguments=arguments)
    return f"submitted job {id}; the page will be in {script.with_name(script.stem)}-0.log"


@app.command()
def bench(
    subject: Literal["pretrain", "finetune", "job", "scale"] | None = Argument(
        None, help="what to measure; default: pretrain, or scale with --save", show_default=False
    ),
    store_folder: StoreFolder = DEFAULT_STORE,
    size: str = Option("", help="model size; default: 210m on a GPU, 8m on a CPU"),
    objective: Literal["mlm", "clm"] | None = Option(None, help="pretrain; default: mlm"),
    ratio: float | None = Option(
        None, min=0.01, max=0.99, help="pretrain: share of masked tokens; default: 0.4"
    ),
    packing: Literal["chunks", "rows", "documents"] | None = Option(None, help="pretrain; default: chunks"),
    rows: int = Option(0, min=0, help="pretrain, scale: rows per micro-batch; 0: chosen by memory"),
    vocab: int | None = Option(
        None, min=64, max=2**20, help="pretrain; default: 128,256 on a GPU, 2,048 on a CPU"
    ),
    length: int | None = Option(
        None, min=64, max=2**20, help="pretrain: tokens per row; default: 2,048 on a GPU, 128 on a CPU"
    ),
    steps: int = Option(0, min=0, help="measured steps; 0: 20 on a GPU, 3 on a CPU; of job 600 and 12"),
    against: list[str] | None = Option(
        None, help="trainer, trainer-compiled or none; may be repeated [default: both on a GPU]"
    ),
    precision: Literal["bf16", "fp32"] | None = Option(None, help="default: bf16 on a GPU, fp32 on a CPU"),
    profile: bool = Option(False, "--profile", help="show where the time of a step goes"),
    save: bool = Option(False, "--save", help="keep the measurements of scale in STORE/devices, for `plan`"),
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine trains and encodes, beside transformers' Trainer."""
    from biphase.bench.cases import BenchRequest
    from biphase.store import Store

    request = BenchRequest(
        workload=subject or ("scale" if save else "pretrain"), size=size, objective=objective, ratio=ratio,
        packing=packing, rows=rows, vocab=vocab, length=length, steps=steps, against=tuple(against or ()),
        precision=precision, profile=profile, save=save,
    )  # fmt: skip
    from biphase.bench.measure import run
    from biphase.training.distributed import exit_now, join

    command, device = shlex.join(["biphase", *sys.argv[1:]]), join().device
    report = run(request, Store.open(store_folder), device=device, command=command, tell=tell)
    study = with_store(Path("STUDY"), store_folder)
    give(as_json, report.facts, lambda: report.describe(study))
    code = 0 if report.measured else 1
    if device.type == "cuda":
        exit_now(code)  # torch.compile's worker processes, which the peers started, take long to end
    if code:
        sys.exit(code)
