"""The clock, the isolation of a measurement, the profile, and the tokens that both sides are given."""

import warnings

import numpy as np
import pytest
import torch

from biphase.bench import measure
from biphase.bench.cases import OTHER, FinetuneCase, Lengths, PretrainCase, kind_of
from biphase.bench.measure import MASK, Dataset, StepClock
from biphase.errors import BiphaseError
from biphase.finetune.families import family_of
from biphase.finetune.trial import batches_of, rows_of

CPU = torch.device("cpu")


# ---------------------------------------------------------------- clock


def test_warm_up_is_not_counted_and_one_slow_step_does_not_move_the_median():
    clock = StepClock(CPU)
    clock.marks = list(clock.began + np.cumsum([60.0, 60.0, 1.0, 1.0, 7.0]))
    timing = clock.measured(2, tokens=100)
    assert timing.seconds == pytest.approx(1.0)
    assert timing.mean_seconds == pytest.approx(3.0)
    assert timing.tokens_per_second == pytest.approx(100.0)


# ---------------------------------------------------------------- isolation


def failing(error):
    def fail():
        print("chatter")
        warnings.warn("more chatter", UserWarning, stacklevel=1)
        torch._dynamo.config.recompile_limit += 7
        raise error

    return fail


def test_a_failure_is_a_result_its_output_goes_to_stderr_and_the_compiler_is_restored(capsys):
    limit = torch._dynamo.config.recompile_limit
    assert measure.theirs(CPU, failing(ValueError("no\nway"))).facts() == {"failed": "ValueError: no way"}
    full = failing(torch.OutOfMemoryError("CUDA out of memory"))
    assert measure.theirs(CPU, full).failed == "out of memory"
    output = capsys.readouterr()
    assert output.out == ""
    assert "chatter" in output.err
    with pytest.warns(UserWarning, match="more chatter"):
        assert measure.ours(CPU, "type fewer --rows", full).failed == "out of memory; type fewer --rows"
    with pytest.raises(BiphaseError, match="our own refusal"):
        measure.theirs(CPU, failing(BiphaseError("our own refusal")))
    assert torch._dynamo.config.recompile_limit == limit


# ---------------------------------------------------------------- profile


KERNELS = [
    ("GEMMs", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"),
    ("GEMMs", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"),
    ("GEMMs", "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>"),
    ("GEMMs", "aten::addmm"),
    ("GEMMs", "aten::bmm"),
    ("attention", "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>"),
    ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"),
    ("attention", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80"),
    ("optimizer", "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>"),
    ("optimizer", "aten::_fused_adamw_"),
    ("norm", "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_4"),
    ("norm", "_add_norm_backward"),
    ("rotary", "_rotate"),
    ("rotary", "triton_poi_fused_add_cat_mul_neg_slice_3"),
    ("swiglu", "_swiglu_backward"),
    ("swiglu", "triton_poi_fused_mul_silu_7"),
    ("loss", "_softmax_error"),
    ("loss", "void at::native::nll_loss_forward_reduce_cuda_kernel_2d<float>"),
    ("copies", "Memcpy HtoD (Pinned -> Device)"),
    ("copies", "void at::native::bfloat16_copy_kernel_cuda"),
    (OTHER, "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"),
]


def test_the_kind_of_a_kernel_by_its_name():
    assert [(kind_of(name), name) for _, name in KERNELS] == KERNELS


# ---------------------------------------------------------------- the same tokens on both sides


COMMON = {"size": "1m", "vocab": 200, "precision": "fp32"}
SHORT = pytest.mark.parametrize(
    "lengths",
    [Lengths("classes", 9, 20, 3.0, 3), Lengths("answers", 24, 40, 5.0, 0)],
    ids=lambda lengths: lengths.name,
)


def tuning(lengths):
    return FinetuneCase(**COMMON, lengths=lengths, batch=4, steps=1, warm=1)


def pretraining(objective, packing="chunks"):
    shape = {"ratio": 0.4, "length": 64, "rows": 3, "steps": 2, "warm": 3}
    return PretrainCase(**COMMON, **shape, objective=objective, packing=packing)


def family_in(data, length):
    tokenization = measure.tokenization_of(200, length)
    return family_of(data.task(), data.examples(), tokenization, protocol="standard")


@SHORT
def test_a_padded_batch_has_our_loss_with_the_same_weights(lengths):
    case = tuning(lengths)
    data = Dataset(case)
    family, finetuner = family_in(data, measure.CONTEXT), measure.finetuner_of(case, CPU)
    model = finetuner.fresh(family, 0)
    peer = measure.PaddedModel(case)
    peer.trunk.load_state_dict(model.encoder.trunk.state_dict())
    peer.head.load_state_dict(model.head.state_dict())
    (batch,) = batches_of(family, 0, 0, finetuner.options)
    texts = measure.labelled([torch.from_numpy(ids) for ids in data.ids], torch.from_numpy(data.labels))
    theirs = peer(**measure.padded([texts[row] for row in rows_of(family, 0, 0)]))["loss"]
    ours = family.loss_sum(model, batch) / batch.count
    assert theirs.item() == pytest.approx(ours.item(), abs=1e-5)


def test_the_trainers_rows_are_masked_as_ours():
    case = pretraining("mlm", packing="rows")
    rows = measure.masked_rows(case)
    batch = measure.stream_of(case).batch(measure.objective_of(case), torch.arange(3), step=0)
    assert torch.equal(torch.stack([rows[row]["input_ids"] for row in range(3)]), batch.ids)
    labels = torch.cat([rows[row]["labels"] for row in range(3)])
    assert torch.equal((labels != -100).nonzero().flatten(), batch.label_at)
    assert torch.equal(labels[batch.label_at], batch.labels)
    assert (batch.ids == MASK).sum() == batch.count


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_the_trainers_model_has_our_loss_with_the_same_weights(objective):
    case = pretraining(objective, packing="rows")
    ours = measure.PretrainingSide(case, CPU)
    (batch,) = ours.batches(0)
    peer = measure.peer_model(case)
    peer.load_state_dict(ours.model.model.state_dict())
    rows = measure.masked_rows(case)
    at = [next(n for n in range(len(rows)) if torch.equal(rows[n]["input_ids"], ids)) for ids in batch.ids]
    inputs = {name: torch.stack([rows[n][name] for n in at]) for name in ("input_ids", "labels")}
    torch.testing.assert_close(ours.loss_sum(batch) / batch.count, peer(**inputs).loss)
    assert (objective == "clm") == torch.equal(rows[0]["input_ids"], rows[0]["labels"])  # Llama shifts itself
