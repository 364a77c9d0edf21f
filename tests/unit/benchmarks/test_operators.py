"""What an update does, counted by hand: operators and their bytes, kernels by kind, and operations."""

import pytest
import torch
from gpu_stages.kernels import group_of as kernel_group
from gpu_stages.kernels import shares
from gpu_stages.operations import GroupWork, ModelSizes, useful_operations
from gpu_stages.operators import OperatorCount, group_of, kernel
from helpers.tables import table


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_each_operator_counts_with_its_inputs_and_outputs_and_views_count_nothing():
    left, right = meta(4, 6), meta(6, 8)
    with OperatorCount() as count:
        product = left @ right
        (product.view(8, 4).t() + 1).float()
    assert count.started == {"mm": 1, "add": 1, "_to_copy": 1}
    # Two bytes each: 24 + 48 + 32 numbers; 32 + 32; 32, and 32 of four bytes.
    assert count.bytes == {"mm": 208, "add": 128, "_to_copy": 192}
    found = count.result()
    assert (found["started"], found["by_group"]["matmul"]["started"]) == (3, 1)


def test_numbers_that_an_expanded_dimension_repeats_count_once():
    with OperatorCount() as count:
        meta(1, 6).expand(4, 6) * meta(4, 6)
    assert count.bytes == {"mul": 2 * (6 + 24 + 24)}


def test_a_fused_kernel_counts_once_forwards_and_once_backwards():
    count = OperatorCount()
    norm = kernel(count, "liger norm", outputs=1, gradients=2)
    hidden, weight = meta(4, 6).requires_grad_(), meta(6).requires_grad_()
    with count:
        norm.apply(hidden, weight, 1e-6).backward(meta(4, 6))
    assert {name: started for name, started in count.started.items() if "liger" in name} == {
        "liger norm forward": 1,
        "liger norm backward": 1,
    }
    # Input, weight and output; the same with the output's gradient, and both gradients.
    assert count.bytes["liger norm forward"] == 2 * (24 + 6 + 24)
    assert count.bytes["liger norm backward"] == 2 * (24 + 6 + 24 + 24 + 6)
    assert (hidden.grad.shape, weight.grad.shape) == ((4, 6), (6,))


@pytest.mark.parametrize(
    ("operator", "group"), table("benchmarks/operators", "test_operators_are_grouped_by_their_names")
)
def test_operators_are_grouped_by_their_names(operator, group):
    assert group_of(operator) == group


@pytest.mark.parametrize(("kernel", "group"), table("benchmarks/kernels", "a_kernels_name_says_what_it_does"))
def test_a_kernels_name_says_what_it_does(kernel, group):
    assert kernel_group(kernel) == group


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


# One number each, so that every part of a sum shows.
SIZES = ModelSizes(
    text_weights=100,
    head_weights=50,
    text_layers=2,
    text_width=8,
    patch_weights=10,
    merged_weights=40,
    patches_per_token=4,
    whole_layers=1,
    window_layers=3,
    vision_width=4,
    window_patches=2,
)


def test_a_group_of_text_counts_its_prompt_once():
    group = GroupWork(prompt=3, responses=(2, 1))
    # 6 tokens and 3 targets; the prompt sees 1 + 2 + 3, the responses (3 + 1) + (3 + 2) and 3 + 1.
    weights, pairs = 6 * 100 + 3 * 50, 6 + 9 + 4
    assert group.tokens == 6
    assert useful_operations(SIZES, [group]) == 6 * weights + 12 * 2 * 8 * pairs == 8148


def test_an_image_counts_per_patch_and_per_pair_of_patches_in_its_windows():
    group = GroupWork(prompt=1, responses=(1,), images=(8,))
    weights = 2 * 100 + 1 * 50 + 8 * 10 + 2 * 40
    # 8 patches see 8 in one layer, and 2 in three others.
    assert useful_operations(SIZES, [group]) == 6 * weights + 12 * (2 * 8 * (1 + 2) + 4 * 8 * (8 + 3 * 2)) == 8412


def test_an_image_smaller_than_a_window_sees_itself_alone():
    one, none = (GroupWork(prompt=1, responses=(1,), images=images) for images in ((1,), ()))
    assert useful_operations(SIZES, [one]) - useful_operations(SIZES, [none]) == 6 * (10 + 10) + 12 * 4 * 4 == 312
