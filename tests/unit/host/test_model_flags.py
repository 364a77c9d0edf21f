"""What flags say of a model reaches the place where it is loaded, its optimizer and DeepSpeed."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from helpers.sessions import session_of

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, PPOConfig, RMConfig, SFTConfig
from lmm_r1.config.supervised import KDConfig
from lmm_r1.errors import UserError
from lmm_r1.host import strategy
from lmm_r1.host.strategy import make_strategy, to_openrlhf_args
from lmm_r1.models.loading import LoadSettings, load_settings, trained_settings
from lmm_r1.rl import workers
from lmm_r1.supervised import start as supervised_start

LOADED = {
    "ds.attn_implementation": "eager",
    "ds.experts_implementation": "batched_mm",
    "ds.param_dtype": "fp16",
    "ds.packing_samples": True,
}
LORA = {"ds.lora.rank": 3, "ds.lora.alpha": 5, "ds.lora.dropout": 0.25, "ds.lora.target_modules": ("q_proj",)}
IN_4BIT = {"ds.load_in_4bit": True, "ds.use_liger_kernel": True}
OPTIMIZER = {
    "optim": "muon",
    "muon.lr": 0.5,
    "muon.momentum": 0.75,
    "adam.lr": 0.125,
    "adam.vision_lr": 0.25,
    "adam.betas": (0.5, 0.75),
    "adam.eps": 0.5,
    "adam.weight_decay": 0.25,
    "lr_scheduler": "linear",
    "lr_warmup_ratio": 0.5,
    "min_lr_ratio": 0.25,
    "max_norm": 2.0,
}
ADAPTER_KINDS = ("use_rslora",)
CHECKPOINTING = ("gradient_checkpointing_enable", "gradient_checkpointing_reentrant")


class Prepared(Exception):
    """Ends a worker's start where its model and the settings of its optimizer are handed over."""


class Model(torch.nn.Module):
    """Keeps what it is built and changed with."""

    mean = std = 0.0
    model = None

    def __init__(self, *names: Any, **settings: Any) -> None:
        super().__init__()
        self.names, self.settings = names, settings
        # Our models take their settings as one object.
        for given in names:
            if isinstance(given, LoadSettings):
                lora = {f"lora_{name}": value for name, value in vars(given.lora).items()}
                self.settings = vars(given) | vars(given.lora) | lora | settings

    def gradient_checkpointing_enable(self, kwargs: Any = None, *, gradient_checkpointing_kwargs: Any = None) -> None:
        self.checkpointing = kwargs or gradient_checkpointing_kwargs


class Strategy(SimpleNamespace):
    def get_ds_train_config(self) -> str:
        return "to train"

    def get_ds_eval_config(self, *, offload: bool) -> str:
        return f"offloaded: {offload}"

    def prepare(self, given: Any) -> None:
        raise Prepared(given)


WORKERS = {
    "actor": workers.KitPolicyActor,
    "critic": workers.KitCriticActor,
    "ref": workers.KitReferenceActor,
    "reward": workers.KitRewardActor,
}


def prepared(role: str, flags: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a role's start hands to DeepSpeed."""
    for module, name in ((supervised_start, "KitActor"), (workers, "KitActor"), (workers, "KitValueModel")):
        monkeypatch.setattr(module, name, Model)
    monkeypatch.setattr(workers, "Checkpoint", lambda *given, **settings: SimpleNamespace(processor=None))
    is_sft = role == "sft"
    given = {"ds.param_dtype": "fp32"} | ({"model.model_name_or_path": "m"} if is_sft else {})
    config = dotted.replace(SFTConfig() if is_sft else PPOConfig(), given | flags)
    own = Strategy(args=to_openrlhf_args(config), config=config)
    if is_sft:
        start = partial(supervised_start.prepare_policy, session_of(config, own, steps=7))
    else:
        worker = object.__new__(WORKERS[role])
        worker._setup_distributed = partial(setattr, worker, "strategy")
        start = partial(
            worker.init_model_from_pretrained, own, "m", *{"actor": (7, None), "critic": (7,)}.get(role, ())
        )
    with pytest.raises(Prepared) as end:
        start()
    return end.value.args[0]


@pytest.mark.parametrize(("role", "group"), [("sft", ""), ("actor", "actor."), ("critic", "critic.")])
def test_a_trained_model_is_loaded_and_optimized_as_its_flags_say(role, group, monkeypatch):
    own = "model." if role == "sft" else "actor."
    flags = LOADED | LORA | IN_4BIT | {f"{group}{name}": value for name, value in OPTIMIZER.items()}
    flags |= {f"{own}{name}": True for name in CHECKPOINTING} | {f"{own}gradient_checkpointing_layers": 7}
    model, settings = prepared(role, flags, monkeypatch)
    assert model.names[0] == "m"
    loaded = {name.split(".")[1]: value for name, value in LOADED.items()}
    loaded |= {"lora_rank": 3, "lora_alpha": 5, "lora_dropout": 0.25, "target_modules": ("q_proj",)}
    loaded["load_in_4bit"] = True
    assert loaded.items() <= model.settings.items()
    assert model.checkpointing == {"use_reentrant": True}
    assert model.settings["checkpointed_layers"] == 7
    flat = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    flat |= {f"{kind}.{name}": value for kind in ("muon", "adam") for name, value in settings[kind].items()}
    assert flat == OPTIMIZER | {"scheduler_steps": 7}


@pytest.mark.parametrize("role", ["ref", "reward"])
def test_a_model_that_is_not_trained_is_loaded_and_offloaded_as_its_flags_say(role, monkeypatch):
    assert prepared(role, LOADED | LORA | IN_4BIT, monkeypatch).settings["load_in_4bit"] is True
    model = prepared(role, LOADED | {f"{role}.offload": True}, monkeypatch)
    assert {name.split(".")[1]: value for name, value in LOADED.items()}.items() <= model.settings.items()
    assert (model._offload, model.settings["ds_config"]) == (True, "offloaded: True")
    assert prepared(role, LOADED, monkeypatch).settings["ds_config"] == "offloaded: False"


def test_critic_and_reward_model_have_a_head_of_this_name_and_normalize_where_asked(monkeypatch):
    flags = {"ds.value_head_prefix": "v_head", "reward.normalize_enable": True}
    critic, _ = prepared("critic", flags, monkeypatch)
    for model in (critic, prepared("reward", flags, monkeypatch)):
        assert {"value_head_prefix": "v_head", "normalize_reward": True}.items() <= model.settings.items()


def test_what_is_frozen_reaches_the_model_of_supervised_training(monkeypatch):
    flags = {"model.freeze_prefix": ("lm_head.",), "data.max_len": 77, "ds.image_cache_gib": 0.5}
    flags |= {"model.freeze_visual_encoder": True, "ds.param_dtype": "fp32"}
    model, _ = prepared("sft", flags, monkeypatch)
    given = {"freeze_prefix": ("lm_head.",), "max_len": 77, "image_cache_gib": 0.5, "trained": True}
    assert (given | {"freeze_visual_encoder": True}).items() <= model.settings.items()
    for config_class in (DPOConfig, RMConfig, KDConfig):
        config = dotted.replace(config_class(), flags)
        assert trained_settings(config).freeze_visual_encoder
        assert not load_settings(config).freeze_visual_encoder


def test_the_kind_of_adapters_and_ligers_kernels_reach_the_model_of_supervised_training(monkeypatch):
    given = LORA | {
        "ds.lora.use_rslora": True,
        "ds.use_liger_kernel": False,
        "ds.param_dtype": "fp32",
    }
    model, _ = prepared("sft", given, monkeypatch)
    assert {**dict.fromkeys(ADAPTER_KINDS, True), "use_liger_kernel": False}.items() <= model.settings.items()


DS = {
    "ds.zero_stage": (3, lambda config: config["zero_optimization"]["stage"]),
    "ds.adam_offload": (True, lambda config: config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"),
    "ds.zpg": (4, lambda config: config["zero_optimization"]["zero_hpz_partition_size"]),
    "ds.overlap_comm": (True, lambda config: config["zero_optimization"].get("overlap_comm", False)),
    "ds.grad_accum_dtype": ("bf16", lambda config: config["data_types"]["grad_accum_dtype"]),
    "ds.deepcompile": (True, lambda config: config["compile"]["deepcompile"]),
    "ds.use_universal_ckpt": (True, lambda config: config["checkpoint"]["load_universal"]),
    "ds.param_dtype": ("fp16", lambda config: "fp16" if config["fp16"]["enabled"] else None),
}


@pytest.mark.parametrize("config_class", [PPOConfig, SFTConfig])
@pytest.mark.parametrize("flag", DS)
def test_deepspeed_is_told_what_the_flag_says(flag, config_class):
    value, told = DS[flag]
    default = make_strategy(config_class()).get_ds_train_config()
    changed = dotted.replace(config_class(), {flag: value})
    assert told(make_strategy(changed).get_ds_train_config()) == value != told(default)


class Initialized(Exception):
    """Ends the making of an engine where DeepSpeed gets its config."""


def optimizer_of(monkeypatch: pytest.MonkeyPatch, **flags: object) -> dict[str, Any]:
    """DeepSpeed's config of a supervised run's optimizer."""

    def end(**given: Any) -> None:
        raise Initialized(given)

    monkeypatch.setattr(deepspeed, "initialize", end)
    config = dotted.replace(SFTConfig(), {name.replace("__", "."): value for name, value in flags.items()})
    args = to_openrlhf_args(config)
    cfg = {
        **{name: getattr(config, name) for name in OPTIMIZER if "." not in name},
        "muon": vars(args.muon),
        "adam": vars(args.adam),
        "scheduler_steps": 10,
    }
    with pytest.raises(Initialized) as found:
        make_strategy(config)._ds_init_train_model(torch.nn.Linear(2, 2), cfg)
    return found.value.args[0]["config"]


def test_adamw_takes_its_settings_and_gradients_are_clipped(monkeypatch):
    given = {"adam__lr": 0.5, "adam__betas": (0.5, 0.75), "adam__eps": 0.25, "adam__weight_decay": 0.125}
    told = optimizer_of(monkeypatch, **given, max_norm=3.0)
    assert told["optimizer"]["type"] == "AdamW"
    wanted = {"lr": 0.5, "betas": [0.5, 0.75], "eps": 0.25, "weight_decay": 0.125}
    assert wanted.items() <= told["optimizer"]["params"].items()
    assert told["gradient_clipping"] == 3.0


def test_muon_takes_its_settings_and_those_of_adamw_for_the_rest(monkeypatch):
    given = {"muon__lr": 0.5, "muon__momentum": 0.75, "adam__lr": 0.25}
    told = optimizer_of(monkeypatch, **given, optim="muon", max_norm=0.0)
    assert told["optimizer"]["type"] == "Muon"
    wanted = {"muon_lr": 0.5, "momentum": 0.75, "adam_lr": 0.25}
    assert wanted.items() <= told["optimizer"]["params"].items()


def test_adamw_in_8_bits_takes_adamws_settings_and_pages_are_refused_without_cuda(monkeypatch):
    told = optimizer_of(monkeypatch, adam__lr=0.5, optim="adamw_8bit")
    assert told["optimizer"]["params"]["lr"] == 0.5
    with pytest.raises(UserError, match="paged_adamw_8bit: pages are memory that CUDA moves, .* take adamw_8bit"):
        optimizer_of(monkeypatch, optim="paged_adamw_8bit")


def test_randomness_and_device_of_a_process_are_those_of_the_flags(monkeypatch):
    calls: list[tuple[str, object]] = []

    class Begun(Exception):
        pass

    def begin(**given: Any) -> None:
        raise Begun

    monkeypatch.setattr(strategy, "prepare_training", lambda: None)
    monkeypatch.setattr(strategy, "set_seed", lambda seed: calls.append(("seed", seed)))
    monkeypatch.setattr(strategy, "enable_full_determinism", lambda seed: calls.append(("deterministic", seed)))
    monkeypatch.setattr(strategy.cpu, "own_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: calls.append(("device", rank)))
    monkeypatch.setattr(deepspeed, "init_distributed", begin)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for flags in ({"train.seed": 7, "local_rank": 3}, {"train.seed": 8, "train.full_determinism_enable": True}):
        config = dotted.replace(SFTConfig(), flags)
        with pytest.raises(Begun):
            make_strategy(config).setup_distributed()
        monkeypatch.setenv("LOCAL_RANK", "0")
    assert calls == [("seed", 7), ("device", 3), ("deterministic", 8), ("device", 0)]
