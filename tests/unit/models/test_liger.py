"""Which modules get one of Liger's kernels; the kernels themselves are stand-ins that compute by the formulas."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.tiny_models import make_actor
from torch.nn.functional import gelu, silu
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.glm4v.modeling_glm4v import apply_rotary_pos_emb as interleaved
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from lmm_r1.models import liger
from lmm_r1.models.liger import fuse, use_liger

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
Calls = list[tuple[str, tuple[Any, ...]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the stand-ins of Liger's functions are called with beside tensors."""
    found: Calls = []

    def stand_in(module: str, name: str, compute: Callable[..., Any]) -> None:
        def apply(*inputs: Any) -> Any:
            found.append((name, tuple(value for value in inputs if not isinstance(value, torch.Tensor))))
            return compute(*inputs)

        full = f"liger_kernel.ops.{module}"
        sys.modules.setdefault(full, ModuleType(full))
        setattr(sys.modules[full], f"Liger{name}Function", type(name, (), {"apply": staticmethod(apply)}))

    for module in ("rms_norm", "geglu", "swiglu", "rope", "qwen2vl_mrope"):
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{module}", ModuleType(module))
    stand_in("rms_norm", "RMSNorm", normed)
    stand_in("geglu", "GELUMul", lambda gate, up: gelu(gate, approximate="tanh") * up)
    stand_in("swiglu", "SiLUMul", lambda gate, up: silu(gate) * up)
    stand_in("swiglu", "FusedGateUpSiLUMul", lambda both, in_place: silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1])
    stand_in("rope", "Rope", None)
    stand_in("qwen2vl_mrope", "Qwen2VLMRope", None)
    for cached in (liger._norm_forward, liger._gated_forward, liger._rotating_forward, liger._rotation):
        cached.cache_clear()
    yield found
    for cached in (liger._norm_forward, liger._gated_forward, liger._rotating_forward, liger._rotation):
        cached.cache_clear()


def normed(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casting: int, in_place: bool
) -> torch.Tensor:
    wide = hidden.float() * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + eps)
    if casting == liger.ONCE:
        return (wide * (offset + weight.float())).to(hidden.dtype)
    return (offset + weight) * wide.to(hidden.dtype)


@pytest.mark.parametrize(
    ("norm", "called"),
    [
        (LlamaRMSNorm(16, eps=1e-5), (1e-5, 0.0, liger.TWICE, False)),
        (Gemma3RMSNorm(16, eps=1e-6), (1e-6, 1.0, liger.ONCE, False)),
    ],
)
def test_a_norm_is_called_with_its_epsilon_offset_and_rounding(calls, norm, called):
    torch.nn.init.normal_(norm.weight)
    norm.to(torch.bfloat16)
    hidden = torch.randn(3, 16, dtype=torch.bfloat16)
    expected, name = norm(hidden), type(norm).__name__
    assert fuse(norm) == Counter({"norms": 1})
    assert torch.equal(norm(hidden), expected)
    assert calls == [("RMSNorm", called)]
    assert (type(norm).__name__, [*norm.state_dict()]) == (name, ["weight"])


@pytest.mark.parametrize(
    ("layer", "kernel"),
    [
        (LlamaMLP(LlamaConfig(**SIZES)), "SiLUMul"),
        (LlamaMLP(LlamaConfig(**SIZES, mlp_bias=True)), "SiLUMul"),
        (Gemma3MLP(Gemma3TextConfig(**SIZES)), "GELUMul"),
        (Phi3MLP(Phi3Config(**SIZES, pad_token_id=0)), "FusedGateUpSiLUMul"),
    ],
)
def test_a_gated_layer_keeps_its_projections_and_what_it_computes(calls, layer, kernel):
    hidden = torch.randn(2, 3, 16)
    expected, names = layer(hidden), [*layer.state_dict()]
    assert fuse(layer) == Counter({"feed-forward layers": 1})
    torch.testing.assert_close(layer(hidden), expected)
    assert ([name for name, _ in calls], [*layer.state_dict()]) == ([kernel], names)


def test_a_rotation_is_known_by_what_it_computes():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as whole
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_multimodal_rotary_pos_emb as sections
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision as patches

    functions = (whole, sections, patches, interleaved, silu)
    kinds = [liger._kind_of_rotation(function) for function in functions]
    assert kinds == ["heads", "sections", "patches", None, None]


@pytest.fixture
def folder(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("qwen2_5_vl")


def test_without_a_gpu_no_module_is_replaced(folder, calls):
    actor = make_actor(folder, use_liger_kernel=True)
    assert all(module.forward.__module__ != liger.__name__ for module in actor.model.modules())


def test_on_a_gpu_kernels_are_the_default_and_the_flag_leaves_them_out(folder, calls, monkeypatch, caplog):
    monkeypatch.setattr(liger.cpu, "has_cuda", lambda: True)
    monkeypatch.setattr(liger, "_failure", lambda device: None)
    with caplog.at_level("INFO"):
        fused = make_actor(folder)
    # Two vision layers and two of text with two norms each, the merger's and the last one.
    assert "Liger's kernels: 10 norms, 4 rotary embeddings, 4 feed-forward layers" in caplog.text
    plain = make_actor(folder, use_liger_kernel=False)
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert sum(module.forward.__module__ == liger.__name__ for module in fused.model.modules()) == 14
    assert not any(module.forward.__module__ == liger.__name__ for module in plain.model.modules())


def test_where_the_package_is_missing_the_model_stays_and_the_log_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setattr(liger.cpu, "has_cuda", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    monkeypatch.delitem(sys.modules, "liger_kernel.ops.swiglu", raising=False)
    liger._failure.cache_clear()
    norm = LlamaRMSNorm(16)
    use_liger(norm)
    liger._failure.cache_clear()
    assert type(norm) is LlamaRMSNorm
    assert "`pip install liger-kernel`" in caplog.text


def test_a_kernel_that_does_not_run_leaves_the_model_as_it_is(calls, monkeypatch, caplog):
    def fail(*inputs: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(sys.modules["liger_kernel.ops.swiglu"].LigerSiLUMulFunction, "apply", fail)
    monkeypatch.setattr(liger.cpu, "has_cuda", lambda: True)
    monkeypatch.setattr(liger.torch, "device", lambda kind: torch.zeros(1).device)
    liger._failure.cache_clear()
    norm = LlamaRMSNorm(16)
    use_liger(norm)
    liger._failure.cache_clear()
    assert type(norm) is LlamaRMSNorm
    assert "slower without Liger's kernels: Failed to find C compiler" in caplog.text
