"""What vLLM is told, on machines with and without a GPU: one answer for training and for everything outside of it."""

import atexit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.scripted_engines import ENGINE
from transformers import Gemma4TextConfig, Qwen3Config

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.config.shared import Speculation
from lmm_r1.generation import engine_arguments as engine_arguments_module
from lmm_r1.generation import ray_engines, vllm_engine
from lmm_r1.generation.engine_arguments import (
    GIB,
    SPARE_CACHE,
    WORKSPACE,
    engine_bytes,
    kv_bytes_per_token,
    share_of,
)
from lmm_r1.generation.vllm_engine import VllmEngine
from lmm_r1.lmm_kits import Checkpoint


@pytest.fixture
def checkpoint(tiny_checkpoint: Callable[[str], Path]) -> str:
    return str(tiny_checkpoint("qwen2_5_vl"))


def outside_of_training(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool, **settings: Any
) -> dict[str, Any]:
    """What chats, evaluations and batch inference give to vLLM, and what its workers are asked for."""
    given: dict[str, Any] = {}

    def load(**arguments: Any) -> SimpleNamespace:
        given.update(arguments)
        return SimpleNamespace(llm_engine=SimpleNamespace(collective_rpc=asked))

    def asked(method: str, timeout: float | None, arguments: tuple, keywords: dict | None) -> None:
        given[method] = arguments

    monkeypatch.setattr(cpu, "has_cuda", lambda: has_cuda)
    monkeypatch.setattr(vllm_engine, "LLM", load)
    with monkeypatch.context() as patch:
        patch.setattr(atexit, "register", lambda leave: given.update(leaves=leave.__name__))
        VllmEngine(checkpoint, replace(ENGINE, **settings))
    return given


def in_training(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool, **settings: object
) -> dict[str, Any]:
    monkeypatch.setattr(cpu, "has_cuda", lambda: has_cuda)
    same = {
        "actor.model_name_or_path": checkpoint,
        "ds.param_dtype": "fp32",
        "data.max_len": ENGINE.max_model_len,
        "vllm.gpu_memory_utilization": ENGINE.gpu_memory_utilization,
        "vllm.enforce_eager": ENGINE.enforce_eager,
    }
    config = dotted.replace(PPOConfig(), {**same, **settings})
    return ray_engines._engine_arguments(config, share=1, max_images=ENGINE.max_images, max_videos=0)


@pytest.mark.parametrize(
    ("arguments_of", "flag"), [(outside_of_training, "enforce_eager"), (in_training, "vllm.enforce_eager")]
)
def test_cuda_graphs_are_used_where_there_is_cuda(arguments_of, flag, checkpoint, monkeypatch):
    on_gpu = arguments_of(checkpoint, monkeypatch, has_cuda=True, **{flag: False})
    assert on_gpu["enforce_eager"] is False
    assert "block_size" not in on_gpu, "vLLM's own"
    on_cpu = arguments_of(checkpoint, monkeypatch, has_cuda=False, **{flag: False})
    assert on_cpu["enforce_eager"] is True
    assert on_cpu["block_size"] == 32


@pytest.mark.parametrize("has_cuda", [True, False], ids=["GPU", "CPU"])
def test_engines_of_a_run_and_all_others_are_told_the_same(has_cuda, checkpoint, monkeypatch):
    outside = outside_of_training(checkpoint, monkeypatch, has_cuda=has_cuda)
    training = in_training(checkpoint, monkeypatch, has_cuda=has_cuda)
    # The seed is each engine's own, and how it gets new weights.
    extension = "worker_extension_cls"
    assert outside.keys() - training.keys() == {"seed", "ban_tokens", "leaves"}
    shared = outside.keys() & training.keys() - {extension}
    assert {name: training[name] for name in shared} == {name: outside[name] for name in shared}
    assert outside[extension] == "lmm_r1.generation.worker_extension.FileWeights"
    # Weights reach a run's engines by broadcast on GPUs, and by files without.
    by = "BucketWeights" if has_cuda else "FileWeights"
    assert training[extension] == f"lmm_r1.generation.worker_extension.{by}"
    assert training["scheduler_cls"] == "lmm_r1.generation.worker_extension.picture_scheduler"
    assert not outside["use_tqdm_on_load"]
    assert outside["limit_mm_per_prompt"]["image"] == ENGINE.max_images


@pytest.mark.parametrize("settings", [{}, {"train.async_enable": True}], ids=["in turn", "async"])
def test_engines_of_several_workers_send_them_all_pictures_too(settings, checkpoint, monkeypatch):
    told = in_training(checkpoint, monkeypatch, has_cuda=True, **{"vllm.tensor_parallel_size": 2, **settings})
    assert told["scheduler_cls"] == "lmm_r1.generation.worker_extension.picture_scheduler"


def test_weights_reach_a_runs_engines_by_broadcast_on_gpus_and_by_files_without(checkpoint, monkeypatch):
    by_broadcast = in_training(checkpoint, monkeypatch, has_cuda=True)["worker_extension_cls"]
    assert by_broadcast == "lmm_r1.generation.worker_extension.BucketWeights"
    by_files = in_training(checkpoint, monkeypatch, has_cuda=False)["worker_extension_cls"]
    assert by_files == "lmm_r1.generation.worker_extension.FileWeights"


@pytest.mark.parametrize("has_cuda", [True, False], ids=["GPU", "CPU"])
def test_engines_are_told_how_to_guess_tokens(has_cuda, checkpoint, monkeypatch):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    flags = {"vllm.speculative_tokens": 3}
    assert in_training(checkpoint, monkeypatch, has_cuda=has_cuda, **flags)["speculative_config"] == config
    guesses = Speculation(tokens=3)
    outside = outside_of_training(checkpoint, monkeypatch, has_cuda=has_cuda, speculation=guesses)
    assert outside["speculative_config"] == config
    assert "speculative_config" not in outside_of_training(checkpoint, monkeypatch, has_cuda=has_cuda)


@pytest.mark.parametrize("speculation", [None, Speculation(tokens=3)], ids=["plain", "guessing"])
def test_the_workers_of_all_engines_ban_tokens(speculation, checkpoint, monkeypatch):
    banned = Checkpoint(checkpoint).banned_token_ids
    assert banned, "the media tokens at least"
    outside = outside_of_training(checkpoint, monkeypatch, has_cuda=True, speculation=speculation)
    assert outside["ban_tokens"] == (banned,)


def test_keys_and_values_of_layers_that_differ_are_added_up_and_those_of_other_layers_count_once():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    text = Gemma4TextConfig(
        num_hidden_layers=4, layer_types=kinds, num_key_value_heads=2, head_dim=8, attention_k_eq_v=True,
        num_global_key_value_heads=1, global_head_dim=32, num_kv_shared_layers=2,
    )  # fmt: skip
    # 2 x 8 of the first layer and 1 x 32 of the second, keys and values, of 2 bytes; the others take theirs.
    assert kv_bytes_per_token(text, width=2) == 2 * 2 * (16 + 32)


def test_an_engine_needs_weights_workspace_and_the_cache_of_its_responses():
    config = Qwen3Config(
        num_hidden_layers=2, num_key_value_heads=1, head_dim=8, hidden_size=16, intermediate_size=32, vocab_size=100
    )
    # Keys and values of 2 layers, 8 numbers of 2 bytes each.
    assert kv_bytes_per_token(config, width=2) == 64
    settings: dict[str, Any] = {"weights": 1000, "width": 2, "max_len": 50}
    # 64 x 50 x 10 of the cache; logits 8 x 100 x 10; a prefill of 500 tokens, 2 x (4 x 16 + 2 x 32) bytes each.
    needed = 1000 + 32_000 + 8_000 + 128_000 + WORKSPACE + SPARE_CACHE
    assert engine_bytes(config, **settings, responses=10, gpu_bytes=24 * GIB) == needed
    # On a small GPU vLLM has 256 responses at a time, on a large one 1,024.
    few, many = (engine_bytes(config, **settings, responses=9999, gpu_bytes=size * GIB) for size in (24, 80))
    assert many - few == 768 * (64 * 50 + 800) + 256 * (16384 - 8192)
    halved = engine_bytes(config, **settings, responses=10, gpu_bytes=24 * GIB, gpus=2)
    assert halved == needed - (1000 + 32_000 + 128_000) // 2


def test_a_share_is_what_is_needed_and_never_more_than_there_is_room_for():
    assert share_of(4 * GIB, room=79 * GIB, gpu_bytes=80 * GIB) == 0.05
    assert share_of(60 * GIB, room=30 * GIB, gpu_bytes=80 * GIB) == 0.37
    assert share_of(200 * GIB, room=80 * GIB, gpu_bytes=80 * GIB) == 0.92


@pytest.mark.parametrize(("free", "share"), [(140, 0.04), (6, 0.03)])
def test_a_small_model_takes_little_of_a_large_card_and_what_others_leave(checkpoint, free, share, monkeypatch):
    asked: list[list[str]] = []

    def run(command: list[str], **settings: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout=f"143771, {free * 1024}\n")

    monkeypatch.setattr(engine_arguments_module.subprocess, "run", run)
    monkeypatch.setattr(cpu, "own_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    given = outside_of_training(checkpoint, monkeypatch, has_cuda=True, gpu_memory_utilization=None)
    # 3 + 2 GiB, and next to nothing of a tiny model's; a GiB stays free of what is left.
    assert given["gpu_memory_utilization"] == share
    assert asked[0][-1] == "--id=3"


def test_a_share_that_is_named_is_taken_as_it_is_and_without_a_gpu_none_is_asked_for(checkpoint, monkeypatch):
    monkeypatch.setattr(engine_arguments_module, "gpu_memory", lambda: pytest.fail("nobody asks for the memory"))
    assert outside_of_training(checkpoint, monkeypatch, has_cuda=True)["gpu_memory_utilization"] == 0.5
    monkeypatch.setattr(cpu, "own_cuda", lambda: False)
    given = outside_of_training(checkpoint, monkeypatch, has_cuda=False, gpu_memory_utilization=None)
    assert given["gpu_memory_utilization"] == 0.85
