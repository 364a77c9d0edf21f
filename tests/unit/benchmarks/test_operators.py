"""How operators and their bytes are counted on tensors without memory."""

import pytest
import torch
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
