"""The check on a CPU, with what may go wrong on a GPU: a kernel for varying lengths, and no memory for a measurement."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from lmm_r1.models.packed import attention
from lmm_r1.models.packed.varlen_kernel import varlen_kernel

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_check

pytestmark = pytest.mark.slow

SMALL = ["--device", "cpu", "--scale", "0.01", "--repeats", "1"]


PREFIX_WAYS = [f"{layout}/{logits}" for layout in ("padded", "packed", "shared") for logits in ("chunked", "whole")]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: tuple[torch.Tensor, torch.Tensor], scale: Any
) -> torch.Tensor:
    """Causal attention (T, H, D) of each sequence, whose last query stands at its last key."""
    assert query.shape[1] % key.shape[1] == 0
    outputs = []
    for index in range(len(ends[0]) - 1):
        parts = [
            tensor[ends[side][index] : ends[side][index + 1]].transpose(0, 1)[None]
            for tensor, side in ((query, 0), (key, 1), (value, 1))
        ]
        length, keys = parts[0].shape[2], parts[1].shape[2]
        mask = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
        output = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def with_groups(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """PyTorch 2.13's kernel."""
    assert window_size == (-1, 0)
    assert enable_gqa or query.shape[1] == key.shape[1]
    return attend(query, key, value, (cu_seq_q, cu_seq_k), scale)


def results_of(file, *flags: str, ends_with: int | None = None) -> dict[str, Any]:
    """Run the check; return the results of its stages, none of which left anything out."""
    command = [*SMALL, "--output", str(file), *flags]
    if ends_with is None:
        gpu_check.main(command)
    else:
        with pytest.raises(SystemExit) as ended:
            gpu_check.main(command)
        assert ended.value.code == ends_with
    stages = json.loads(file.read_text())["stages"]
    assert [stage["left_out"] for stage in stages.values()] == [[]] * len(stages)
    return {stage: entry["results"] for stage, entry in stages.items()}


@pytest.fixture
def pretended_gpu(monkeypatch) -> Iterator[None]:
    """PyTorch says what an H100 can do, and the kernel is chosen anew."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *given: (9, 0))
    varlen_kernel.cache_clear()
    yield
    varlen_kernel.cache_clear()


def test_with_a_kernel_all_results_are_there(tmp_path, monkeypatch, pretended_gpu):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", with_groups)
    monkeypatch.setattr(
        attention,
        "kernel_for",
        lambda query, *given, **settings: varlen_kernel() if query.dtype == torch.bfloat16 else None,
    )
    results = results_of(tmp_path / "result.json", "--stages", "b")["b"]
    assert list(results) == PREFIX_WAYS
    for result in results.values():
        differences = result["differences"]
        assert len([part for part in differences if part.startswith("prefix of ")]) == 2
        assert len([part for part in differences if part.startswith("weights of ")]) == 2
        assert 0 < max(differences.values()) < 0.05
