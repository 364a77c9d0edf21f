"""The check on a CPU, with what may go wrong on a GPU: kernels of other signatures, and no memory for a measurement."""

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
from gpu_stages.policy import Policy
from gpu_stages.subject import Subject

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


def without_groups(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """PyTorch 2.11's kernel."""
    assert window_size == (-1, 0)
    assert query.shape[1] == key.shape[1]
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


@pytest.mark.parametrize("kernel", [with_groups, without_groups])
def test_with_either_signature_of_the_kernel_all_results_are_there(kernel, tmp_path, monkeypatch, pretended_gpu):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(attention, "_takes_varlen", lambda query, *given, **settings: query.dtype == torch.bfloat16)
    results = results_of(tmp_path / "result.json", "--stages", "b")["b"]
    assert list(results) == PREFIX_WAYS
    header = json.loads((tmp_path / "result.json").read_text())
    assert ("enable_gqa" in header["varlen_attn"]) == (kernel is with_groups)
    for result in results.values():
        differences = result["differences"]
        assert len([part for part in differences if part.startswith("prefix of ")]) == 2
        assert len([part for part in differences if part.startswith("weights of ")]) == 2
        assert 0 < max(differences.values()) < 0.05


def test_without_memory_for_one_way_the_others_are_measured(tmp_path, monkeypatch):
    given = Policy.log_probs

    def log_probs(self, *arguments, **settings):
        if (settings["layout"], settings["logits"]) == ("shared", "whole"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 19.00 GiB")
        return given(self, *arguments, **settings)

    monkeypatch.setattr(Policy, "log_probs", log_probs)
    results = results_of(tmp_path / "result.json", "--stages", "c")["c"]
    layouts = ("shared", "packed", "padded")
    assert list(results) == [
        f"{layout}/{logits}/{vision}"
        for logits in ("chunked", "whole")
        for layout in layouts
        for vision in ("flash_windows", "loop")
    ]
    for name, result in results.items():
        if name.startswith("shared/whole/"):
            assert result["error"].startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 19.00 GiB (")
            continue
        assert result["seconds"] > 0
        assert result["peak_gib"] >= 0
        assert result["utilisation"] is None
        assert sum(result["kernels"]["by_group"].values()) == pytest.approx(1, abs=1e-3)
        assert result["kernels"]["by_group"]["matmul"] > 0


def test_the_largest_pass_is_the_largest_that_has_memory(tmp_path, monkeypatch):
    def update(self, batch, *, layout, logits):
        if len(batch.sequences) > (3 if logits == "chunked" else 1):
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Subject, "update", update)
    results = results_of(tmp_path / "result.json", "--stages", "d")["d"]
    assert [name for name in results if not name.startswith("largest")] == [
        f"{tokens}/{way}"
        for tokens in (8192, 16384, 32768)
        for way in ("shared/chunked", "packed/chunked", "shared/whole")
    ]
    rows = {name: result["rows"] for name, result in results.items() if name.startswith("largest")}
    assert rows == {"largest/shared/chunked": 3, "largest/packed/chunked": 3, "largest/shared/whole": 1}
    found = results["largest/shared/chunked"]
    assert found["bounded_by"] == "memory"
    (fitting,) = [entry for entry in found["tried"] if entry["rows"] == 3]
    assert fitting["fits"]
    assert fitting["unique_tokens"] == found["unique_tokens"]
    assert all(entry["fits"] == (entry["rows"] <= 3) for entry in found["tried"])


def test_kits_that_disagree_or_fail_end_the_check_with_code_1_and_all_results(tmp_path, monkeypatch):
    results = results_of(tmp_path / "result.json", "--stages", "a", "--kits", "llm", "no_kit", ends_with=1)["a"]
    assert results["parity/llm"]["judgement"] == "agrees"
    assert results["parity/no_kit"]["error"].startswith("UserError: no kit for model_type 'no_kit'")
    rates = [result["tflops"] for name, result in results.items() if name.startswith("matmul/")]
    assert len(rates) == 6
    assert results["copy/on_device"]["gb_per_s"] > 0
