"""Kernels by kind, and their shares of the time."""

import pytest
from gpu_stages.kernels import group_of, shares
from helpers.tables import table


@pytest.mark.parametrize(("kernel", "group"), table("benchmarks/kernels", "a_kernels_name_says_what_it_does"))
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
