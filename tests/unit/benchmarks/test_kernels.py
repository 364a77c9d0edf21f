"""Kernels by kind, and their shares of the time."""

import pytest
from gpu_stages.kernels import group_of, shares

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...> >", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __nv_bfloat16, float>", "matmul"),
        (
            "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, cutlass::bfloat16_t>>",
            "attention",
        ),
        (
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
            "attention",
        ),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        (
            "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
            "copy",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<...>", "copy"),
        ("void at::native::indexFuncLargeIndex<c10::BFloat16, long>", "copy"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
            "norm/elementwise",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>",
            "norm/elementwise",
        ),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float>", "norm/elementwise"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void (anonymous namespace)::distribution_of_tokens", "other"),
    ],
)
def test_a_kernels_name_says_what_it_does(kernel, group):
    assert group_of(kernel) == group


def test_shares_are_those_of_all_kernels_and_the_largest_are_named():
    times = {"gemm": 600.0, "flash_fwd": 300.0, "Memcpy DtoH": 100.0}
    found = shares(times, {"gemm": 2, "flash_fwd": 1, "Memcpy DtoH": 4})
    assert found["busy_s"] == 0.001
    assert found["started"] == 7
    assert found["by_group"] == {
        "attention": 0.3,
        "matmul": 0.6,
        "communication": 0.0,
        "copy": 0.1,
        "norm/elementwise": 0.0,
        "other": 0.0,
    }
    assert found["top"][0] == {"kernel": "gemm", "group": "matmul", "share": 0.6, "started": 2}
    assert [entry["kernel"] for entry in found["top"]] == ["gemm", "flash_fwd", "Memcpy DtoH"]


def test_no_more_than_fifteen_kernels_are_named_and_none_without_any():
    many = {f"kernel {index}": float(index) for index in range(20)}
    found = shares(many, dict.fromkeys(many, 1))
    assert [entry["kernel"] for entry in found["top"]] == [f"kernel {index}" for index in range(19, 4, -1)]
    assert shares({}, {})["by_group"]["matmul"] == 0.0
