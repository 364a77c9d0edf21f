"""A supervised run between its start and its end, as each of its processes has it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from lmm_r1.config import SupervisedConfig
from lmm_r1.host.strategy import KitStrategy
from lmm_r1.lifecycle.stopping import StopRequests
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.actor import KitActor
from lmm_r1.models.loading import trained_settings
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


def load_policy(session: Session[Any], *, share_prefix: bool = False) -> KitActor:
    """Return the model that is trained, as it is loaded."""
    config = session.config
    settings = trained_settings(config, share_prefix=share_prefix)
    return KitActor(model_path(config), settings, ds_config=session.strategy.get_ds_train_config())


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


def prepare_policy(session: Session[Any], *, share_prefix: bool = False) -> KitActor:
    """Return the model that is trained, under DeepSpeed."""
    return prepare_trained(session, load_policy(session, share_prefix=share_prefix))


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
