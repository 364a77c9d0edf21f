"""A supervised run between its start and its end, as each of its processes has it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from lmm_r1.config import SupervisedConfig
from lmm_r1.host.strategy import KitStrategy
from lmm_r1.lifecycle.stopping import StopRequests
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.actor import KitActor
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.value_model import KitValueModel
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Trackers

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


@dataclass(frozen=True, kw_only=True)
class Session(Generic[ConfigT]):
    """What its models and its loop are made with."""

    config: ConfigT
    checkpoint: Checkpoint
    """Of the model that is trained."""
    strategy: KitStrategy
    folder: RunFolder
    stops: StopRequests
    trackers: Trackers
    steps: int
    """Updates of the whole run, over which the learning rate follows its schedule."""


def model_path(config: SupervisedConfig) -> str:
    """Return the checkpoint that the run trains."""
    path = config.model.model_name_or_path
    assert path is not None, "required by config.resolve"
    return path


def load_settings(config: SupervisedConfig, *, trained: bool = False) -> dict[str, Any]:
    """Return how every model of a run is loaded, by the names of `LoadSettings`."""
    return {
        "trained": trained,
        "image_cache_gib": config.ds.image_cache_gib,
        "attn_implementation": config.ds.attn_implementation,
        "param_dtype": config.ds.param_dtype,
        "packing_samples": config.ds.packing_samples,
        "experts_implementation": config.ds.experts_implementation,
        "trust_remote_code": config.train.trust_remote_code,
        "max_len": config.data.max_len,
        "load_in_4bit": config.ds.load_in_4bit,
        "use_liger_kernel": config.ds.use_liger_kernel,
    }


def trained_settings(config: SupervisedConfig, strategy: KitStrategy) -> dict[str, Any]:
    """Return how the model that is trained is loaded."""
    return {
        **load_settings(config, trained=True),
        "ds_config": strategy.get_ds_train_config(),
        "lora_rank": config.ds.lora.rank,
        "lora_alpha": config.ds.lora.alpha,
        "lora_dropout": config.ds.lora.dropout,
        "target_modules": config.ds.lora.target_modules,
        "use_dora": config.ds.lora.use_dora,
        "use_rslora": config.ds.lora.use_rslora,
        "freeze_prefix": config.model.freeze_prefix,
        "checkpointed_layers": config.model.gradient_checkpointing_layers,
    }


def load_policy(session: Session[Any], **own: Any) -> KitActor:
    """Return the model that is trained, as it is loaded.

    Args:
        own: how a trainer loads it beside.
    """
    config = session.config
    return KitActor(model_path(config), **trained_settings(config, session.strategy), **own)


def prepare_trained(session: Session[Any], model: KitActor | KitValueModel) -> Any:
    """Return a loaded model with its optimizer under DeepSpeed, which is around all of a value model.

    Raises UserError where it does not run on packed sequences.
    """
    config, strategy = session.config, session.strategy
    if config.model.gradient_checkpointing_enable:
        model.gradient_checkpointing_enable({"use_reentrant": config.model.gradient_checkpointing_reentrant})
    prepared, _, _ = strategy.prepare((model, _optimizer_settings(config, steps=session.steps)))
    run = None if prepared is model else prepared
    check_packing(model, run=run, group=strategy.ring_attn_group, longest=config.data.max_len)
    if config.model.aux_loss_coef:
        prepared.balance_experts()
    return prepared


def prepare_policy(session: Session[Any], **own: Any) -> KitActor:
    """Return the model that is trained, under DeepSpeed; the arguments are those of `load_policy`."""
    return prepare_trained(session, load_policy(session, **own))


def _optimizer_settings(config: SupervisedConfig, *, steps: int) -> dict[str, Any]:
    """Return the optimizer and its schedule over so many steps, as the strategy takes them."""
    return {
        "optim": config.optim,
        "muon": asdict(config.muon),
        "adam": asdict(config.adam),
        "lr_scheduler": config.lr_scheduler,
        "lr_warmup_ratio": config.lr_warmup_ratio,
        "min_lr_ratio": config.min_lr_ratio,
        "max_norm": config.max_norm,
        "scheduler_steps": steps,
    }
