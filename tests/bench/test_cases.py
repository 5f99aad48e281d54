"""What is measured where nothing is said, what can be said, and what is refused."""

from dataclasses import replace

import pytest

from biphase.bench.cases import LIKE, PEERS, PLACES, BenchRequest, Maker
from biphase.errors import SpecError
from biphase.presets import SIZES


def test_a_gpu_measures_the_papers_model_and_a_cpu_a_tiny_one():
    gpu, cpu = (Maker(BenchRequest(), kind, rows=24).pretrain() for kind in ("cuda", "cpu"))
    assert (gpu.size, gpu.vocab, gpu.length, gpu.rows, gpu.steps) == ("210m", 128_256, 2_048, 24, 20)
    assert (gpu.precision, cpu.precision) == ("bf16", "fp32")
    assert (cpu.size, cpu.vocab, cpu.length) == ("8m", 2_048, 128)
    assert cpu.steps < gpu.steps


def test_rows_that_are_typed_hold_for_both_sides_and_else_the_trainer_has_twelve():
    usual, typed = (Maker(BenchRequest(rows=rows), "cuda", rows=24) for rows in (0, 32))
    assert (usual.pretrain().rows, usual.peer_rows()) == (24, 12)
    assert (typed.pretrain().rows, typed.peer_rows()) == (32, 32)


def test_peers_are_the_devices_the_typed_ones_or_none():
    place = PLACES["cuda"]
    assert BenchRequest().peers(place) == PEERS
    assert BenchRequest(against=("trainer", "trainer")).peers(place) == ("trainer",)
    assert BenchRequest(against=("none",)).peers(place) == ()


def test_scale_covers_what_a_cost_model_must_tell_apart():
    for kind in PLACES:
        made = Maker(BenchRequest(subject="scale"), kind, rows=4).scale()
        seen = {(case.size, case.objective, case.packing) for case in made.pretrain}
        usual = PLACES[kind].scale[0]
        assert {(usual, "mlm", "chunks"), (usual, "clm", "chunks"), (usual, "mlm", "rows")} <= seen
        assert {case.size for case in made.pretrain} == set(PLACES[kind].scale)
        assert {size for size, _, _ in seen} <= set(SIZES)
        assert len(made.finetune) == 2 * len(LIKE)
        assert {case.size for case in made.score} == {case.size for case in made.finetune}


def test_scale_in_8_bits_is_pretraining_alone():
    eight, sixteen = (
        Maker(BenchRequest(subject="scale", save=True, precision=one), "cuda", rows=4).scale()
        for one in ("fp8", "bf16")
    )
    assert {case.precision for case in eight.pretrain} == {"fp8"}
    assert [replace(case, precision="bf16") for case in eight.pretrain] == sixteen.pretrain
    assert eight.finetune == eight.score == []


def test_what_was_not_typed_is_as_usual():
    made = Maker(BenchRequest(), "cuda", rows=4).pretrain()
    assert (made.objective, made.ratio, made.packing) == ("mlm", 0.4, "chunks")


def test_a_step_of_several_micro_batches_counts_the_tokens_of_all():
    made = Maker(BenchRequest(rows=3, micro_batches=4), "cpu", rows=8).pretrain()
    assert made.tokens == 4 * 3 * made.length
    assert "4 micro-batches a step" in made.title
    scale = Maker(BenchRequest(subject="all", micro_batches=4), "cuda", rows=8).scale()
    assert {one.micro_batches for one in scale.pretrain} == {1}


def test_words_and_length_are_the_users_own_for_pretraining():
    made = Maker(BenchRequest(vocab=49_153, length=512), "cuda", rows=8).pretrain()
    assert (made.vocab, made.length, made.tokens) == (49_153, 512, 8 * 512)


def test_deterministic_steps_stand_alone():
    asked = BenchRequest(deterministic=True)
    assert asked.peers(PLACES["cuda"]) == ()
    assert Maker(asked, "cuda", rows=8).pretrain().title.endswith(", deterministic")


def test_scale_of_one_size_has_the_cases_of_that_size():
    made = Maker(BenchRequest(subject="scale", size="610m"), "cuda", rows=4).scale()
    assert [case.size for case in made.pretrain] == ["610m"]
    assert made.finetune == made.score == []
    with pytest.raises(SpecError, match="'1b' is not known; known: 210m"):
        Maker(BenchRequest(subject="scale", size="1b"), "cuda", rows=4).scale()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"vocab": 3}, "--vocab is 3; give 64 to 1,048,576"),
        ({"length": -1}, "--length is -1"),
        ({"deterministic": True, "against": ("trainer",)}, "leave out --against"),
        ({"subject": "scale", "vocab": 128}, "--vocab means nothing to bench scale"),
        ({"subject": "pretrian"}, "did you mean 'pretrain'"),
        ({"size": "211m"}, "did you mean '210m'"),
        ({"objective": "mntp"}, "--objective 'mntp' is not known"),
        ({"packing": "row"}, "did you mean 'rows'"),
        ({"precision": "fp16"}, "--precision 'fp16' is not known"),
        ({"against": ("optimus",)}, "--against 'optimus' is not known"),
        ({"against": ("none", "trainer")}, "stands alone"),
        ({"ratio": 1.0}, "usual: --ratio 0.4"),
        ({"rows": -1}, "must not be negative"),
        ({"steps": -1}, "must not be negative"),
        ({"micro_batches": -1}, "must not be negative"),
        ({"subject": "scale", "micro_batches": 2}, "type bench pretrain --micro-batches 2$"),
        ({"save": True}, "type bench scale --save"),
        ({"subject": "scale", "save": True, "size": "210m"}, "leave out --size"),
        ({"ratio": 0.0}, "usual: --ratio 0.4"),
        ({"subject": "finetune", "precision": "fp8"}, "fp8 is for pretraining"),
        ({"subject": "all", "precision": "fp8"}, "fp8 is for pretraining"),
        ({"subject": "finetune", "rows": 4}, "nothing to bench finetune; .* type bench pretrain --rows 4"),
        ({"subject": "finetune", "objective": "mlm"}, "type bench pretrain --objective mlm"),
        ({"subject": "retrieval", "rows": 4}, "--rows means nothing to bench retrieval"),
        ({"subject": "retrieval", "profile": True}, "leave it out, or type bench pretrain --profile$"),
        ({"subject": "retrieval", "ratio": 0.4}, "--ratio means nothing to bench retrieval"),
        ({"subject": "scale", "packing": "rows"}, "--packing means nothing to bench scale"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(said, words):
    with pytest.raises(SpecError, match=words) as refused:
        BenchRequest(**said)
    assert "\n" not in str(refused.value)
