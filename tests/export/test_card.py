"""The model card: read back by huggingface_hub, with recipe, data, card.losses and card.scores, and nothing interpreted."""

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries

from biphase.errors import SpecError
from biphase.export import card
from biphase.export.card import Base, Card, escaped, grids_of, recipe
from biphase.export.folder import SavedCheckpoint
from biphase.export.writing import Written
from biphase.presets import SIZES
from biphase.specs import CLM, WSD, Blend, Corpus, Hub, Pretrain, Pretrained, Stage


def read(folder):
    """The card as the hub reads it: its front matter and its text."""
    loaded = ModelCard.load(folder / "README.md")
    return loaded.data.to_dict(), loaded.text


def test_the_card_of_a_checkpoint(folder, trained):
    front, text = read(folder)
    (index,) = front.pop("model-index")
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["biphase", "sentence-transformers", "feature-extraction"],
    }
    grid = kinds(trained.store, trained.results["masked"])
    scored = next(one for one in index["results"] if one["dataset"]["name"] == "kinds")
    (metric,) = scored["metrics"]
    assert (index["name"], scored["task"]["type"]) == ("masked", "text-classification")
    assert (metric["type"], metric["value"]) == ("accuracy", float(grid.test_score().split()[0]))
    assert grid.test_score() in metric["name"]
    assert not (folder / ".eval_results").exists(), "of data that is not on the hub"
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


def test_no_folder_of_this_machine_is_in_a_card():
    first, second = (Corpus(name, f"home/me/{name}.csv", Pretrained("./t")) for name in ("web", "code"))
    stages = Stage(CLM(), 4), Stage(CLM(), 4, corpus=Blend({first: 1, second: 3}))
    run = Pretrain("run", SIZES["1m"], first, stages, WSD(1e-3, warmup=0, decay=0))
    about = {"progress": {"machine": {}, "tokens": 8, "seconds": 1.0}, "epochs": 1.0}
    told = recipe(SavedCheckpoint("key", run, 8, about)).rows
    assert ("run, steps 5 to 8", "clm, corpus 75% code + 25% web") in told
    assert "home" not in str(told)
    assert card.without_folders(first.source) == "web.csv"


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


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: apache-2.0", "apache-2.0"),
        ("license: [a, b]", ""),
        ("license: {", ""),
        (None, ""),  # no card
    ],
)
def test_the_licence_of_the_base_is_that_of_its_card(front, licence, tmp_path):
    if front is not None:
        (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# A model\n")
    base = card.base_of(Pretrain("as-it-is", start=Hub(str(tmp_path))))
    assert (base.models, base.names, base.licence) == ((), (tmp_path.name,), licence)


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


def test_scores_on_datasets_of_the_hub_are_written_as_it_reads_them(changeable, model, tmp_path):
    commit = "a" * 40
    source = f"hf://nyu-mll/glue@{commit}/sst2"
    for trial in kinds(changeable, model).trials.values():
        changeable.change(trial.key, lambda about: about["task"].update(source=source))
    grid = kinds(changeable, model)
    Card("x", "x", "encoder", Written("", 0.0, {}, ""), [], [], grids=[grid]).write(tmp_path)
    (index,) = read(tmp_path)[0]["model-index"]
    placed = {"type": "nyu-mll/glue", "config": "sst2", "split": "test", "revision": commit, "name": "kinds"}
    assert index["results"][0]["dataset"] == placed
    (entry,) = parse_eval_result_entries(
        yaml.safe_load((tmp_path / ".eval_results" / "kinds.yaml").read_text())
    )
    assert (entry.dataset_id, entry.task_id, entry.dataset_revision) == ("nyu-mll/glue", "sst2", commit)
    assert entry.value == index["results"][0]["metrics"][0]["value"]
    assert grid.test_score() in entry.notes


def test_an_incomplete_grid_and_wrong_names_are_refused(changeable, model, trained):
    changeable.discard(changeable.trials / kinds(changeable, model).trials[1e-2, 1].key)
    assert kinds(changeable, model).test_score() == "incomplete"
    assert "missing" in refused(model, "kinds", changeable)
    assert "'kinds'" in refused(model, "kind", changeable)
    assert "biphase evaluate" in refused(trained.results["early"], "kinds", changeable)


def test_only_trials_made_in_the_same_way_are_one_grid(changeable, model):
    """Fields that an older trial lacks have their defaults; causal trials are no scores of an encoder."""
    grid = kinds(changeable, model)
    key = grid.trials[grid.rate, 1].key

    def forget(about):
        del about["finetune"]["causal"]
        del about["finetune"]["optimizer"]["layer_decay"]

    for edit, left in (
        (forget, [len(grid.trials)]),
        (lambda about: about["finetune"].update(length=16), [1, len(grid.trials) - 1]),
        (lambda about: about["finetune"].update(causal=True), [len(grid.trials) - 1]),
    ):
        changeable.change(key, edit)
        found = [len(other.trials) for other in grids_of(model, changeable) if other.task == "kinds"]
        assert sorted(found) == left
        if len(left) > 1:
            assert "2 ways" in refused(model, "kinds", changeable)
