"""The model card: read back by huggingface_hub, with recipe, data, card.losses and card.scores, and nothing interpreted."""

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from biphase import CLM, MLM, LoRA, Stage
from biphase.errors import SpecError
from biphase.export import card
from biphase.export.card import Base, Card, escaped, grids_of
from biphase.export.folder import find
from biphase.export.writing import Written
from biphase.specs import Hub, Kept, Merge, Pretrain


@pytest.fixture
def checkpoint(trained):
    return find(trained.results["masked"], trained.store)


def read(folder):
    """The card as the hub reads it: its front matter and its text."""
    loaded = ModelCard.load(folder / "README.md")
    return loaded.data.to_dict(), loaded.text


def test_the_card_of_a_checkpoint(folder, trained):
    front, text = read(folder)
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["biphase", "sentence-transformers", "feature-extraction"],
    }
    grid = kinds(trained.store, trained.results["masked"])
    for line in (
        "| masked, steps 1 to 4 | clm |",
        "| masked, steps 5 to 12 | mlm 40% |",
        "| tokens | 3.07k |",
        "| schedule | WSD(peak=0.003, warmup=2, decay=3) |",
        f"| key | {trained.results['masked']} |",
        "| corpus | tiny |",
        "| source | train.jsonl |",  # and no folder of this machine
        f"| kinds | accuracy | {grid.test_score()} | standard | {grid.rate:g} | 2 |",
    ):
        assert line in text.splitlines(), line
    assert "| facts-too | ndcg@10 |" in text
    assert text.count("\n| masked 40% |") == 1
    assert str(trained.store.root) not in text


@pytest.mark.parametrize(
    ("name", "fills", "limit"),
    [("masked", True, ""), ("early", False, "position early"), ("causal", False, "next token")],
)
def test_fill_mask_is_offered_only_if_its_answers_mean_something(name, fills, limit, export):
    front, text = read(export(name))
    assert (front["pipeline_tag"] == "fill-mask") == ('pipeline("fill-mask"' in text) == fills
    assert [fact for fact in ("position early", "next token") if fact in text] == ([limit] if limit else [])


def test_outside_text_is_escaped():
    evil = "x\n---\nlicense: mine\n# <script>|`*_[a](b)"
    assert escaped(evil) == "x --- license: mine \\# &lt;script&gt;\\|\\`\\*\\_\\[a\\](b)"
    base = Base(("a/b\nc: d",), (evil,), "mit")
    text = Card(evil, evil, "fill-mask", Written("", 0.0, {}, ""), [], [], base=base).text()
    loaded = ModelCard(text)
    assert loaded.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["biphase"],
        "license": "mit",
        "base_model": "a/b\nc: d",
    }
    assert loaded.text.startswith(f"\n# {escaped(evil)}\n")
    assert "<script>" not in text


def test_sources_are_named_without_folders():
    for source, name in (("/some/where/data.jsonl", "data.jsonl"), ("./folder/model", "model")):
        assert card.without_folders(source) == name
    for source in ("hf://a/b@c/d.parquet", "owner/name"):
        assert card.without_folders(source) == source


def test_the_recipe_of_a_checkpoint_before_the_end_and_of_unusual_runs(checkpoint):
    early = replace(checkpoint, step=6)
    assert (card.titled(early), card.titled(checkpoint)) == ("masked, step 6", "masked")
    stages = (Stage(CLM(), 4), Stage(MLM(0.4), 8, rope_base=160_000.0))
    unusual = replace(checkpoint.run, stages=stages, freeze="embeddings")
    object.__setattr__(unusual, "adapter", LoRA(rank=4))  # which a run from scratch may not have
    assert [row for row in card.recipe(early).rows if "step" in row[0]][-1] == (
        "masked, steps 5 to 6",
        "mlm 40%",
    )
    rows = dict(card.recipe(replace(checkpoint, run=unusual)).rows)
    assert rows["masked, steps 5 to 12"] == "mlm 40%, rope_base 160000.0"
    assert (rows["adapter"][:4], rows["freeze"]) == ("LoRA", "embeddings")
    assert card.describe_start(Hub("./m", windows="full")) == "m, sliding windows opened"


def test_losses_before_and_after():
    table = card.losses({0: {"clm": 3.0, "mlm40": 9.0}, 5: {"clm": 4.0, "mlm40": 2.0, "mntp40": 1.0}})
    assert table.heads[1:] == ("at step 0", "at step 5")
    assert [row[1:] for row in table.rows] == [("3.0000", "4.0000"), ("9.0000", "2.0000"), ("", "1.0000")]
    assert card.losses({}).note
    assert card.scores([]).note


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: apache-2.0", "apache-2.0"),
        ("license: [a, b]", ""),
        ("license: 'evil\\n---'", ""),
        ("tags: [x]", ""),
        ("license: {", ""),
        (None, ""),  # no card
    ],
)
def test_the_licence_of_the_base_is_that_of_its_card(front, licence, tmp_path):
    if front is not None:
        (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# A model\n")
    base = card.base_of(Pretrain("as-it-is", start=Hub(str(tmp_path))))
    assert (base.models, base.names, base.licence) == ((), (tmp_path.name,), licence)


def test_a_merge_of_published_models_names_each_and_no_licence(checkpoint, tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    starts = Hub(str(tmp_path)), Hub("owner/one", revision="1" * 40), Hub("owner/two", revision="2" * 40)
    runs = [replace(checkpoint.run, name=f"r{n}", start=start) for n, start in enumerate(starts)]
    run = Pretrain("mean", Merge(runs[1], Kept(runs[0], 4), runs[2]))
    base = card.base_of(run)
    assert base == Base(("owner/one", "owner/two"), ("owner/one", "owner/two", tmp_path.name), "")
    text = Card("mean", "", "fill-mask", Written("", 0.0, {}, ""), [], [], base=base).text()
    assert ModelCard(text).data.to_dict()["base_model"] == ["owner/one", "owner/two"]
    assert "license:" not in text
    assert all(escaped(name) in text.split("## Licence")[1] for name in base.names)
    rows = card.recipe(replace(checkpoint, run=run, step=0)).rows
    assert [how.split(" ")[0] for what, how in rows if what == "start"] == list(base.names)


# ---------------------------------------------------------------- card.scores of a store


@pytest.fixture
def model(trained):
    return trained.results["masked"]


def kinds(store, model):
    return next(grid for grid in grids_of(model, store) if grid.task == "kinds")


def refused(*args):
    with pytest.raises(SpecError) as caught:
        card.trial_for_task(*args)
    return str(caught.value)


def test_the_rate_is_chosen_by_validation_scores_alone(changeable, model):
    for (lr, _), trial in kinds(changeable, model).trials.items():
        changeable.change(
            trial.key, lambda about, lr=lr: about["scores"]["validation"].update(accuracy=1 - lr)
        )
        changeable.change(trial.key, lambda about, lr=lr: about["scores"]["test"].update(accuracy=lr))
    assert kinds(changeable, model).rate == 1e-3
    chosen = card.trial_for_task(model, "kinds", changeable)
    assert (chosen.about["lr"], chosen.about["seed"]) == (1e-3, 0)


def test_an_incomplete_grid_and_wrong_names_are_refused(changeable, model, trained):
    changeable.discard(changeable.trials / kinds(changeable, model).trials[1e-2, 1].key)
    assert kinds(changeable, model).test_score() == "incomplete"
    assert "missing" in refused(model, "kinds", changeable)
    assert "'kinds'" in refused(model, "kind", changeable)
    assert "biphase evaluate" in refused(trained.results["early"], "kinds", changeable)


def test_different_options_are_different_grids(changeable, model):
    for (_, seed), trial in kinds(changeable, model).trials.items():
        if seed == 1:
            changeable.change(trial.key, lambda about: about["finetune"].update(length=16))
    assert "2 ways" in refused(model, "kinds", changeable)


def test_causal_trials_are_no_scores_and_absent_fields_have_their_defaults(changeable, model):
    grid = kinds(changeable, model)

    def forget(about):  # as a trial older than these fields
        del about["finetune"]["causal"]
        del about["finetune"]["optimizer"]["layer_decay"]

    changeable.change(grid.trials[grid.rate, 1].key, forget)
    assert [other.trials.keys() for other in grids_of(model, changeable) if other.task == "kinds"] == [
        grid.trials.keys()
    ]
    changeable.change(grid.trials[grid.rate, 1].key, lambda about: about["finetune"].update(causal=True))
    assert len(kinds(changeable, model).trials) == len(grid.trials) - 1
