"""The card says what happened, and what comes from outside does nothing in it."""

import json
import shutil
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from biphase import CLM, MLM, LoRA, Stage
from biphase.errors import SpecError
from biphase.export.card import (
    Base,
    Card,
    base_of,
    describe_start,
    escaped,
    grids_of,
    losses,
    recipe_lines,
    scores,
    titled,
    trial_for_task,
    without_folders,
)
from biphase.export.folder import find
from biphase.specs import Hub, Pretrain
from biphase.store import Store, publish, write_json


def text_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_front_matter_is_what_the_hub_reads(folder):
    said = ModelCard.load(folder / "README.md").data
    assert (said.library_name, said.pipeline_tag) == ("transformers", "fill-mask")
    assert said.tags == ["biphase", "sentence-transformers", "feature-extraction"]
    assert said.license is None


def test_the_card_tells_recipe_data_losses_and_scores(folder, trained):
    text = text_of(folder)
    assert "| masked, steps 1 to 4 | clm |" in text
    assert "| masked, steps 5 to 12 | mlm 40% |" in text
    assert "| tokens | 3.07k in all, 256 a step |" in text
    assert "0.003 after a warmup of 2 steps, down in a line to 0 over the last 3 steps" in text
    assert f"| key | `{trained.results['masked']}` |" in text
    assert "| corpus | tiny |" in text
    assert "| source | train.jsonl |" in text  # and no folder of this machine
    last = next(one for one in grids_of(trained.results["masked"], trained.store) if one.task == "kinds")
    assert f"| kinds | accuracy | {last.test_score()} | standard | {last.rate:g} | 2 |" in text
    assert "| facts-too | ndcg@10 |" in text
    heldout = [line for line in text.splitlines() if line.startswith("| masked 40% |")]
    assert len(heldout) == 1
    assert str(trained.store.root) not in text


def test_each_objective_has_its_limits(export):
    assert "It answers one position early" in text_of(export("early"))
    assert "It was trained last to predict the next token" in text_of(export("causal"))
    for words in ("one position early", "trained last to predict"):
        assert words not in text_of(export("masked"))


def test_what_comes_from_outside_is_told_and_not_interpreted(trained):
    evil = "x\n---\nlicense: mine\n# <script>|`*_[a](b)"
    assert escaped(evil) == "x --- license: mine \\# &lt;script&gt;\\|\\`\\*\\_\\[a\\](b)"
    made = Card(evil, "s", "fill-mask", "transformers", [], [], [], base=Base("a/b\nc: d", evil, "mit"))
    front = made.text().split("---\n")[1]
    assert [line.split(":")[0] for line in front.splitlines()] == [
        "library_name", "pipeline_tag", "tags", "license", "base_model",
    ]  # fmt: skip
    assert "<script>" not in made.text()
    state = find(trained.results["masked"], trained.store)
    run = replace(state.run, name="a|b<i>")
    assert "| a\\|b&lt;i&gt;, steps 1 to 4 | clm |" in recipe_lines(replace(state, run=run))


def test_places_of_this_machine_are_told_by_their_last_name():
    assert without_folders("/some/where/data.jsonl") == "data.jsonl"
    assert without_folders("./folder/model") == "model"
    assert without_folders("hf://a/b@c/d.parquet") == "hf://a/b@c/d.parquet"
    assert without_folders("owner/name") == "owner/name"


def test_a_state_on_the_way_says_so(trained):
    state = find(trained.results["masked"], trained.store)
    early = replace(state, step=6)
    assert titled(early) == "masked, step 6"
    assert titled(state) == "masked"
    told = "\n".join(recipe_lines(early))
    assert "steps 5 to 6 | mlm 40%" in told
    assert "not decayed" in told


def test_adapters_frozen_parts_and_longer_positions_are_told(trained):
    state = find(trained.results["masked"], trained.store)
    stages = (Stage(CLM(), 4), Stage(MLM(0.4), 8, rope_base=160_000.0))
    run = replace(state.run, stages=stages, freeze="embeddings")
    object.__setattr__(run, "adapter", LoRA(rank=4))  # which a run from scratch may not have
    told = "\n".join(recipe_lines(replace(state, run=run)))
    assert "LoRA of rank 4, alpha 32, merged here" in told
    assert "| frozen | embeddings |" in told
    assert "mlm 40%, rotary base 160,000" in told


def test_without_measurements_the_card_says_none():
    assert losses({}) == ["None were measured."]
    assert "not been fine-tuned" in scores([])[0]


@pytest.mark.parametrize(
    ("front", "licence"),
    [
        ("license: apache-2.0", "apache-2.0"),
        ("license: [a, b]", ""),
        ("license: 'evil\\n---'", ""),
        ("tags: [x]", ""),
        ("license: {", ""),
    ],
)
def test_the_licence_of_the_base_is_that_of_its_card(front, licence, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n# A model\n")
    base = base_of(Pretrain("as-it-is", start=Hub(str(tmp_path))))
    assert (base.model, base.name, base.licence) == ("", tmp_path.name, licence)
    assert ("under the licence" in base.describe()) == bool(licence)


def test_a_base_without_a_card_says_nothing(tmp_path):
    assert base_of(Pretrain("as-it-is", start=Hub(str(tmp_path)))).licence == ""


# ---------------------------------------------------------------- scores of a store


@pytest.fixture
def copied(trained, tmp_path):
    """A store whose leaves may be changed."""
    made = Store(tmp_path / "store")
    shutil.copytree(trained.store.trials, made.trials)
    return made


def change(store, key, edit):
    place = store.trials / key
    about = json.loads((place / "trial.json").read_text())
    edit(about)
    write_json(place / "trial.json", about)
    (place / "manifest.json").unlink()
    moved = store.root / "moved"
    place.rename(moved)
    publish(moved, place)


def kinds(store, model):
    return next(one for one in grids_of(model, store) if one.task == "kinds")


def test_the_rate_is_chosen_by_validation_and_never_by_test(copied, trained):
    model = trained.results["masked"]
    for (lr, _), trial in kinds(copied, model).trials.items():
        change(copied, trial.key, lambda about, lr=lr: about["scores"]["validation"].update(accuracy=1 - lr))
        change(copied, trial.key, lambda about, lr=lr: about["scores"]["test"].update(accuracy=lr))
    assert kinds(copied, model).rate == 1e-3
    chosen = trial_for_task(model, "kinds", copied)
    assert (chosen.about["lr"], chosen.about["seed"]) == (1e-3, 0)


def test_a_grid_with_a_hole_is_not_chosen_from(copied, trained):
    model = trained.results["masked"]
    copied.discard(copied.trials / kinds(copied, model).trials[1e-2, 1].key)
    assert kinds(copied, model).test_score() == "incomplete"
    with pytest.raises(SpecError, match=r"some learning rates or seeds of .* are missing"):
        trial_for_task(model, "kinds", copied)
    with pytest.raises(SpecError, match=r"has no scores on it in .*did you mean 'kinds'"):
        trial_for_task(model, "kind", copied)
    with pytest.raises(SpecError, match="fine-tune it first: biphase evaluate"):
        trial_for_task(trained.results["early"], "kinds", copied)


def test_two_ways_to_fine_tune_are_two_grids(copied, trained):
    model = trained.results["masked"]
    for (_, seed), trial in kinds(copied, model).trials.items():
        if seed == 1:
            change(copied, trial.key, lambda about: about["finetune"].update(length=16))
    with pytest.raises(SpecError, match="in 2 ways; type the key of a trial instead"):
        trial_for_task(model, "kinds", copied)


def test_leaves_that_read_forwards_only_are_no_scores_of_an_encoder(copied, trained):
    model = trained.results["masked"]
    grid = next(one for one in grids_of(model, copied) if one.task == "kinds")
    change(copied, grid.trials[grid.rate, 1].key, lambda about: about["finetune"].update(causal=True))
    again = next(one for one in grids_of(model, copied) if one.task == "kinds")
    assert len(again.trials) == len(grid.trials) - 1


def test_a_leaf_older_than_a_field_belongs_to_the_same_grid(copied, trained):
    model = trained.results["masked"]
    grid = next(one for one in grids_of(model, copied) if one.task == "kinds")

    def forget(about):
        del about["finetune"]["causal"]
        del about["finetune"]["optimizer"]["layer_decay"]

    change(copied, grid.trials[grid.rate, 1].key, forget)
    again = [one for one in grids_of(model, copied) if one.task == "kinds"]
    assert [one.trials.keys() for one in again] == [grid.trials.keys()]


def test_no_card_offers_fill_mask_where_its_answers_mean_nothing(export):
    for name, offered in (("masked", True), ("early", False), ("causal", False)):
        text = text_of(export(name))
        assert ("pipeline_tag: fill-mask" in text, 'pipeline("fill-mask"' in text) == (offered, offered), name


def test_losses_of_before_stand_beside_those_of_after():
    told = losses({0: {"clm": 3.0, "mlm40": 9.0}, 5: {"clm": 4.0, "mlm40": 2.0, "mntp40": 1.0}})
    assert told[0] == "| held-out loss, nats a token | before | at step 5 |"
    assert told[2:] == [
        "| causal | 3.0000 | 4.0000 |", "| masked 40% | 9.0000 | 2.0000 |", "| masked, one before 40% |  | 1.0000 |",
    ]  # fmt: skip


def test_opened_windows_are_told():
    assert describe_start(Hub("./m", windows="full")) == "m, sliding windows opened"
