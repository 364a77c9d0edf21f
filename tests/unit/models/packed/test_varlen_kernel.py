"""Which kernel for sequences of varying length a GPU gets, by what is installed, and what each is called with."""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.varlen_kernels import Calls, flash_attn, of_torch

from lmm_r1.models.packed.layout import Stretches, kernel_for, varlen_kernel


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of the generation before Hopper, as far as is asked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    varlen_kernel.cache_clear()
    yield
    varlen_kernel.cache_clear()
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


def install_torch(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls: Calls = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch(calls))
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
    ("heads", "causal", "window", "called"),
    [
        ((4, 2), True, None, {"window_size": (-1, 0), "enable_gqa": True, "heads": (4, 2)}),
        ((2, 2), True, 3, {"window_size": (2, 0), "enable_gqa": False, "heads": (2, 2)}),
        ((2, 2), False, None, {"window_size": (-1, -1), "enable_gqa": False, "heads": (2, 2)}),
    ],
)
def test_pytorchs_kernel_is_called_with_what_it_takes(monkeypatch, heads, causal, window, called):
    calls = install_torch(monkeypatch)
    attend(heads=heads[0], key_heads=heads[1], causal=causal, window=window)
    assert calls == [called]


def test_flash_attn_goes_before_pytorchs_where_it_is_compiled(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    others = install_torch(monkeypatch)
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
    ("dtype", "widths", "given", "taken"),
    [
        (torch.bfloat16, (80, 80), {}, True),
        (torch.float16, (256, 256), {}, True),
        (torch.float32, (80, 80), {}, False),
        (torch.bfloat16, (20, 20), {}, False),
        (torch.bfloat16, (264, 264), {}, False),
        (torch.bfloat16, (128, 64), {}, False),
        (torch.bfloat16, (80, 80), {"dropout": 0.1}, False),
        (torch.bfloat16, (80, 80), {"is_cuda": False}, False),
        (torch.bfloat16, (80, 80), {"capability": (7, 0)}, False),
    ],
)
def test_it_takes_half_precision_on_gpus_without_dropout_and_heads_of_up_to_256(
    dtype, widths, given, taken, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: given.get("capability", (8, 0)))
    query, value = (
        SimpleNamespace(is_cuda=given.get("is_cuda", True), dtype=dtype, shape=(1, 1, 1, width)) for width in widths
    )
    assert (kernel_for(query, value, dropout=given.get("dropout", 0.0)) is not None) is taken


def test_flash_attention_3_comes_before_flash_attn_2_and_computes_the_same(monkeypatch):
    older, newer = install_flash_attn(monkeypatch), install_torch(monkeypatch)
    expected = attend(heads=4, key_heads=2, causal=True, window=None)
    assert (len(older), len(newer)) == (1, 0)

    install_flash_attn_3(monkeypatch, lambda: SimpleNamespace(remove=lambda: None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    varlen_kernel.cache_clear()
    torch.testing.assert_close(attend(heads=4, key_heads=2, causal=True, window=None), expected)
    assert (len(older), len(newer)) == (1, 1)
