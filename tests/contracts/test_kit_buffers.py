"""Whatever is not trained (rotary frequencies, positions, scales) is that of a plain load under every ZeRO stage."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.commands_here import destroy_engines, one_process
from helpers.launched_ranks import constant_adam
from helpers.tables import by_turns
from helpers.tiny_models import flat_actor, flat_value_model
from helpers.value_models import save_reward_model

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, get_kit
from lmm_r1.models.actor import KitActor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OPTIMIZER = constant_adam({"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}, steps=1)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, in which DeepSpeed takes all precisions, whatever the processor."""
    from deepspeed.accelerator import get_accelerator

    with one_process(), pytest.MonkeyPatch.context() as patch:
        accelerator = type(get_accelerator())
        patch.setattr(accelerator, "supported_dtypes", lambda self: list(DTYPES.values()))
        patch.setattr(accelerator, "is_fp16_supported", lambda self: True)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield


@pytest.fixture(autouse=True)
def freed_engines() -> Iterator[None]:
    yield
    destroy_engines()


def strategy_of(*, stage: int, precision: str) -> Any:
    from lmm_r1.host.strategy import make_strategy

    flags = {"ds.zero_stage": stage, "ds.param_dtype": precision, "train.batch_size": 1, "train.micro_batch_size": 1}
    strategy = make_strategy(dotted.replace(SFTConfig(), flags))
    strategy.setup_distributed()
    return strategy


def actor_of(folder: Path, strategy: Any, *, precision: str = "bf16") -> KitActor:
    """A policy as a run loads it that trains it."""
    settings = {"attn_implementation": "sdpa", "param_dtype": precision, "max_len": 64}
    return flat_actor(str(folder), ds_config=strategy.get_ds_train_config(), **settings)


def plain_model(kit_name: str, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return get_kit(kit_name).load_model(str(folder), dtype=dtype, attn_implementation="sdpa", trust_remote_code=False)


def assert_same_buffers(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    found, expected = dict(model.named_buffers()), dict(plain.named_buffers())
    assert found.keys() == expected.keys()
    assert {name: value.dtype for name, value in found.items()} == {
        name: value.dtype for name, value in expected.items()
    }
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def tensor_attributes(model: torch.nn.Module) -> list[str]:
    return [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize(("name", "stage", "precision"), by_turns(KITS, [*product((1, 2, 3), DTYPES)], turns=6))
def test_buffers_are_those_of_a_plain_load(name, stage, precision, tiny_checkpoint, one_rank):
    folder = tiny_checkpoint(name)
    strategy = strategy_of(stage=stage, precision=precision)
    actor = actor_of(folder, strategy, precision=precision)
    plain = plain_model(name, folder, DTYPES[precision])
    assert_same_buffers(actor.model, plain)
    # What a model keeps outside of its buffers would be nobody's to compare.
    assert tensor_attributes(plain) == tensor_attributes(actor.model) == []
    actor, _, _ = strategy.prepare((actor, OPTIMIZER))
    assert_same_buffers(actor.model.module, plain)
    weights = {weight.dtype for weight in actor.model.module.parameters()}
    assert weights == {DTYPES[precision]}


@pytest.mark.parametrize("kind", ["reference", "critic", "reward"])
@pytest.mark.parametrize("name", ["llm", "qwen2_5_vl"])
def test_models_that_are_run_and_value_models_have_them_too(name, kind, tiny_checkpoint, tmp_path, one_rank):
    folder = tiny_checkpoint(name)
    strategy = strategy_of(stage=3, precision="bf16")
    settings = {"attn_implementation": "sdpa", "param_dtype": "bf16"}
    plain = plain_model(name, folder, torch.bfloat16)
    if kind == "critic":
        model = flat_value_model(
            str(folder), kind, ds_config=strategy.get_ds_train_config(), value_head_prefix="score", **settings
        )
        inner = strategy.prepare((model, OPTIMIZER))[0].module.model
    elif kind == "reward":
        path = save_reward_model(folder, tmp_path / "reward")
        model = flat_value_model(
            str(path), kind, ds_config=strategy.get_ds_eval_config(), value_head_prefix="score", **settings
        )
        inner = strategy.prepare(model).module.model
    else:
        model = flat_actor(str(folder), ds_config=strategy.get_ds_eval_config(), **settings)
        inner = strategy.prepare(model).model.module
    assert_same_buffers(inner, plain)


def test_frequencies_of_another_head_size_and_base_are_exact(tiny_checkpoint, tmp_path, one_rank):
    """Of 48 dimensions per head and a base of 1,000,000: 1,000,000 ** (-2 i / 48)."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("llm"))
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=144,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    strategy = strategy_of(stage=3, precision="bf16")
    actor = actor_of(tmp_path, strategy)
    frequencies = strategy.prepare((actor, OPTIMIZER))[0].model.module.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    by_hand = [1.0, 0.5623413, 0.3162278, 0.1778279, 0.1, 0.05623413, 0.03162278, 0.01778279, 0.01, 0.005623413]
    assert frequencies[:10].tolist() == pytest.approx(by_hand, rel=1e-6)
    assert frequencies.shape == (24,)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_stored_buffer_is_merged_from_the_shards_of_a_bf16_run_as_it_was(stage, tiny_checkpoint, tmp_path, one_rank):
    """Of a mixture whose routers have a bias, which is no number of bf16."""

    from lmm_r1.checkpoints.merging import load_trained, read_weights

    folder = tiny_checkpoint("glm4v_moe")
    strategy = strategy_of(stage=stage, precision="bf16")
    actor = actor_of(folder, strategy)
    actor, _, _ = strategy.prepare((actor, OPTIMIZER))
    actor.model.save_checkpoint(str(tmp_path), tag="step")
    weights = read_weights(tmp_path / "step")
    found = load_trained(str(folder), weights, lora_alpha=None, dtype=torch.float32, trust_remote_code=False)
    plain = plain_model("glm4v_moe", folder, torch.float32)
    assert_same_buffers(found, plain)
    stored = {name for name, _ in plain.named_buffers()} & plain.state_dict().keys()
    assert stored == {"model.language_model.layers.1.mlp.gate.e_score_correction_bias"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_stops_where_a_buffer_is_rounded_in_preparation(stage, tiny_checkpoint, one_rank):
    strategy = strategy_of(stage=stage, precision="bf16")
    actor = actor_of(tiny_checkpoint("llm"), strategy)
    # DeepSpeed's own setting for it.
    original = strategy.get_ds_train_config
    strategy.get_ds_train_config = lambda *args, **kwargs: {
        **original(*args, **kwargs),
        "data_types": {"buffer_dtype": "bf16", "grad_accum_dtype": "fp32"},
    }
    message = r"after the model was prepared by DeepSpeed, its buffer model.rotary_emb.inv_freq is not that of a plain"
    with pytest.raises(UserError, match=message):
        strategy.prepare((actor, OPTIMIZER))
