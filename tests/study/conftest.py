"""A tiny study that is fine-tuned whole: three results, three tasks of which one borrows, two rates, two seeds.

And tiny models in the folders that transformers writes.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from common import store_with, toys, write_task

from biphase import CATALOG, CLM, MLM, Classify, Finetune, Retrieve, Splits, Stage, Study, Task
from biphase.store import Store
from biphase.study.plan import identities, make_plan, save_plan


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="session")
def grid(toy_folder: Path) -> Finetune:
    """What each result is fine-tuned on: 2 × 2 × 2 fine-tunings, 3 × 2 × 2 trials."""
    own = Task(
        "toys",
        Classify("{text}", ("beast", "place")),
        str(toy_folder),
        Splits(validation="validation*"),
        steps=3,
        batch=8,
    )
    facts = replace(
        CATALOG["scifact-mini"],
        name="facts",
        steps=3,
        batch=4,
        splits=replace(CATALOG["scifact-mini"].splits, rows=(16, 6, 8)),
    )
    plain = replace(
        facts,
        name="facts-untitled",
        form=Retrieve(),
        splits=replace(facts.splits, train=""),
        trained_on="facts",
    )
    return Finetune(
        (own, facts, plain),
        lrs=(1e-3, 4e-3),
        seeds=(0, 1),
        protocol="standard",
        precision="fp32",
        documents="judged",
    )


@pytest.fixture
def study(tiny_run, grid: Finetune) -> Study:
    both = tiny_run("both", Stage(CLM(), 4), Stage(MLM(0.4), 4))
    return Study("tuned", (tiny_run("clm", Stage(CLM(), 8), keep=(4,)), both), grid)


@pytest.fixture
def plan(study: Study, store: Store):
    made = make_plan(study, identities(store))
    save_plan(made, store)
    return made


@pytest.fixture
def worker():
    """Makes a worker of a plan on this CPU: `worker(plan, store, printed, stop=…)`."""
    import torch

    from biphase.study.worker import Worker
    from biphase.training.distributed import Ranks
    from biphase.training.options import RuntimeOptions

    def make(plan, store, printed=None, *, wanted=None, evaluated=None, **options):
        return Worker(
            plan,
            store,
            identities(store),
            Ranks(0, 1, torch.device("cpu")),
            RuntimeOptions(quiet=True, loaders=0, **options),
            wanted=set(plan.jobs) if wanted is None else wanted,
            evaluated=evaluated,
            say=([] if printed is None else printed).append,
        )

    return make


@pytest.fixture(scope="session")
def _finished_store(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_with(shards, tmp_path_factory.mktemp("finished"))


@pytest.fixture
def finished(plan, store: Store, worker, _finished_store: Store) -> Store:
    """The store of the plan after all its work; the work itself is done once, and copied for each test."""
    if not _finished_store.checkpoints.exists():
        save_plan(plan, _finished_store)
        worker(plan, _finished_store).work()
    for kind in ("checkpoints", "trials"):
        shutil.copytree(getattr(_finished_store, kind), getattr(store, kind), dirs_exist_ok=True)
    return store


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained models of two architectures, each with a tokenizer beside it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import (
        BertConfig,
        BertModel,
        EuroBertConfig,
        EuroBertModel,
        PreTrainedTokenizerFast,
        logging,
    )

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([row["text"] for row in toys(40)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    logging.disable_progress_bar()
    made = {}
    for name, model, config in (
        ("bert", BertModel, BertConfig(**shape)),
        ("eurobert", EuroBertModel, EuroBertConfig(**shape, head_dim=16)),
    ):
        torch.manual_seed(0)
        made[name] = tmp_path_factory.mktemp("models") / name
        model(config).save_pretrained(made[name])
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="[PAD]",
            cls_token="[CLS]",
            sep_token="[SEP]",
            mask_token="[MASK]",
        ).save_pretrained(made[name])
    return made
