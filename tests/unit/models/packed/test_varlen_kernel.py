"""Which kernel for sequences of varying length a GPU gets, by what is installed, and what each is called with."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.varlen_kernels import Calls, flash_attn, of_torch, without_groups, without_windows

from lmm_r1.models.packed.varlen_kernel import Stretches, varlen_kernel


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of the generation before Hopper, as far as is asked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    varlen_kernel.cache_clear()
    yield
    varlen_kernel.cache_clear()
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def install_torch(monkeypatch: pytest.MonkeyPatch, make: Callable[[Calls], Callable[..., torch.Tensor]]) -> Calls:
    calls: Calls = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", make(calls))
    return calls


def install_flash_attn(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn(calls)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", ModuleType("flash_attn_2_cuda"))
    return calls


def install_flash_attn_3(monkeypatch: pytest.MonkeyPatch, register: Callable[[], object]) -> None:
    """Let PyTorch's registry run `register` where it would load flash_attn_interface."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace() if name == "flash_attn_interface" else find(name)
    )
    monkeypatch.setitem(torch.nn.attention._registry._FLASH_ATTENTION_IMPLS, "FA3", register)


def attend(*, heads: int, key_heads: int, causal: bool, window: int | None) -> torch.Tensor:
    """Attend over sequences of two queries on three keys, and of one query on one key."""
    generator = torch.Generator().manual_seed(0)
    stretches = Stretches(
        query_ends=torch.tensor([0, 2, 3], dtype=torch.int32),
        key_ends=torch.tensor([0, 3, 4], dtype=torch.int32),
        longest_query=2,
        longest_key=3,
    )
    queries, keys, values = (
        torch.randn(tokens, count, 8, generator=generator)
        for tokens, count in ((3, heads), (4, key_heads), (4, key_heads))
    )
    kernel = varlen_kernel()
    return kernel.attend(queries, keys, values, stretches, causal=causal, window=window, scaling=0.3)


@pytest.mark.parametrize(
    ("make", "heads", "causal", "window", "called"),
    [
        (of_torch, (4, 2), True, None, {"window_size": (-1, 0), "enable_gqa": True, "heads": (4, 2)}),
        (of_torch, (2, 2), True, 3, {"window_size": (2, 0), "enable_gqa": False, "heads": (2, 2)}),
        (of_torch, (2, 2), False, None, {"window_size": (-1, -1), "enable_gqa": False, "heads": (2, 2)}),
        (without_groups, (4, 2), True, 3, {"window_size": (2, 0), "heads": (4, 4)}),
        (without_groups, (3, 1), False, None, {"window_size": (-1, -1), "heads": (3, 3)}),
        (without_windows, (6, 2), True, None, {"is_causal": True, "heads": (6, 6)}),
        (without_windows, (2, 2), False, None, {"is_causal": False, "heads": (2, 2)}),
    ],
)
def test_a_kernel_of_pytorch_is_called_with_what_its_release_takes(monkeypatch, make, heads, causal, window, called):
    calls = install_torch(monkeypatch, make)
    attend(heads=heads[0], key_heads=heads[1], causal=causal, window=window)
    assert calls == [called]


@pytest.mark.parametrize("make", [without_groups, without_windows])
def test_keys_are_repeated_such_that_each_query_head_finds_its_own(monkeypatch, make):
    settings: dict[str, Any] = {"heads": 6, "key_heads": 2, "causal": True, "window": None}
    install_torch(monkeypatch, of_torch)
    expected = attend(**settings)
    varlen_kernel.cache_clear()
    install_torch(monkeypatch, make)
    assert torch.equal(attend(**settings), expected)


def test_flash_attn_goes_before_pytorchs_where_it_is_compiled(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    others = install_torch(monkeypatch, of_torch)
    calls = install_flash_attn(monkeypatch)
    attend(heads=4, key_heads=2, causal=True, window=3)
    attend(heads=2, key_heads=2, causal=False, window=None)
    assert calls == [
        {"causal": True, "window_size": (2, 0), "heads": (4, 2)},
        {"causal": False, "window_size": (-1, -1), "heads": (2, 2)},
    ]
    assert not others
    # Once in a process.
    assert [record.message for record in caplog.records] == [
        "attention over packed sequences and windows of images: flash-attn 2"
    ]


@pytest.mark.parametrize(
    ("dtype", "widths", "window", "taken"),
    [
        (torch.bfloat16, (80, 80), None, True),
        (torch.float16, (256, 256), 4, True),
        (torch.float32, (80, 80), None, False),
        (torch.bfloat16, (20, 20), None, False),
        (torch.bfloat16, (264, 264), None, False),
        (torch.bfloat16, (128, 64), None, False),
    ],
)
def test_it_takes_half_precision_and_heads_of_up_to_256(dtype, widths, window, taken):
    query, value = (torch.zeros(1, 1, 1, width, dtype=dtype) for width in widths)
    assert varlen_kernel().takes(query, value, window=window) is taken


def test_flash_attention_3_comes_before_flash_attn_2_and_computes_the_same(monkeypatch):
    older, newer = install_flash_attn(monkeypatch), install_torch(monkeypatch, of_torch)
    expected = attend(heads=4, key_heads=2, causal=True, window=None)
    assert (len(older), len(newer)) == (1, 0)

    install_flash_attn_3(monkeypatch, lambda: SimpleNamespace(remove=lambda: None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    varlen_kernel.cache_clear()
    torch.testing.assert_close(attend(heads=4, key_heads=2, causal=True, window=None), expected)
    assert (len(older), len(newer)) == (1, 1)
