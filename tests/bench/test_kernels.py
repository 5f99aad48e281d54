"""Kernels find their kind by name; the head's products by their shapes; all times add up to the step."""

import pytest
import torch

from biphase.bench.measure import BLOCKS, HEAD, OTHER, breakdown, kind_of, sorted_out

NAMES = [
    (BLOCKS, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"),
    (BLOCKS, "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"),
    (BLOCKS, "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>"),
    (BLOCKS, "aten::addmm"),
    (BLOCKS, "aten::bmm"),
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


@pytest.mark.parametrize(("kind", "name"), NAMES, ids=[name[:40] for _, name in NAMES])
def test_kernels_find_their_kind(kind, name):
    assert kind_of(name) == kind


def test_the_head_is_what_multiplies_by_the_vocabulary_and_shares_add_up():
    times = {("nvjet_a", True): 2_000.0, ("nvjet_a", False): 4_000.0, ("_swiglu", True): 1_000.0}
    found = sorted_out(times, steps=2)
    assert found.by_kind == {BLOCKS: 2.0, HEAD: 1.0, "swiglu": 0.5}
    assert list(found.by_kind) == [BLOCKS, HEAD, "swiglu"]
    assert found.total == 3.5
    assert found.longest[0] == ("nvjet_a", 3.0)


def test_a_profiled_step_shows_both_products():
    vocab, hidden = torch.randn(300, 64), torch.randn(512, 64)
    inner = torch.randn(64, 64)

    def steps():
        for _ in range(3):
            (hidden @ inner) @ vocab.T

    found = breakdown(steps, torch.device("cpu"), vocab=300)
    assert {BLOCKS, HEAD} <= set(found.by_kind)
    assert found.by_kind[HEAD] > 0
