"""What to change in a run that does not fit, from what costs least to what costs most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, SupervisedConfig
from lmm_r1.config.adapter_checks import EIGHT_BIT
from lmm_r1.errors import UserError
from lmm_r1.planning.plan import Plan, gib
from lmm_r1.planning.ppo_plan import TOKEN_STEP

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)
SHARES = (0.7, 0.5, 0.4, 0.3, 0.2)
LORA_RANK = 64


@dataclass(frozen=True, kw_only=True)
class Change:
    """Flags that leave more memory."""

    settings: dict[str, object]

    def __str__(self) -> str:
        return " ".join(_flag(name, value) for name, value in self.settings.items())


def _flag(name: str, value: object) -> str:
    if value is True:
        return f"--{name}"
    return f"--{name} {value}"


def refuse_excess(config: Config, plan: Plan, *, replan: Callable[[Config], Plan]) -> None:
    """Raise UserError for a plan that does not fit, with the flags that make it fit.

    Args:
        replan: makes the plan of other settings.
    """
    found = plan.excesses()
    if not found:
        return
    changes, missing = fitting_changes(config, plan, replan=replan)
    said = f"the run cannot fit: {'; '.join(found)}"
    if missing == 0:
        raise UserError(f"{said}. It fits with {' '.join(map(str, changes))}")
    tried = f"; even with {' '.join(map(str, changes))} {gib(missing)} are missing" if changes else ""
    raise UserError(f"{said}{tried}: take more GPUs, a machine with more memory, or a smaller model")


def fitting_changes(config: Config, plan: Plan, *, replan: Callable[[Config], Plan]) -> tuple[Sequence[Change], int]:
    """Return the changes that make a run fit together, none of them needlessly, and how many bytes are missing then."""

    def missing(changes: Sequence[Change]) -> int | None:
        settings = {name: value for change in changes for name, value in change.settings.items()}
        try:
            return replan(dotted.replace(config, settings)).shortage
        except UserError:
            # Two flags that exclude each other.
            return None

    taken: list[Change] = []
    shortage = plan.shortage
    changes = list(_changes(config, plan))
    for change in changes:
        # A later value of a flag takes the place of an earlier one.
        tried = [one for one in taken if one.settings.keys() != change.settings.keys()] + [change]
        left = missing(tried)
        if left is not None and left < shortage:
            taken, shortage = tried, left
        if shortage == 0:
            return _least(taken, changes, fits=lambda some: missing(some) == 0), 0
    return taken, shortage


def _least(
    taken: Sequence[Change], changes: Sequence[Change], *, fits: Callable[[Sequence[Change]], bool]
) -> list[Change]:
    """Return of changes that fit those that are needed, each with the first value that is enough."""
    kept = list(taken)
    # What costs most is done without first.
    for change in reversed(taken):
        without = [one for one in kept if one is not change]
        values = [one for one in changes if one.settings.keys() == change.settings.keys()]
        # In the place of the change, so that the order stays that of what costs least.
        place = kept.index(change)
        options = [without, *([*without[:place], value, *without[place:]] for value in values)]
        kept = next(option for option in options if fits(option))
    return kept


def _changes(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Change]:
    """Yield changes that a run does not have yet, by what they cost in time, and then in what is learnt."""
    on_gpu = plan.machine.gpu_bytes is not None
    if isinstance(config, PPOConfig):
        if config.train.async_enable and config.train.async_queue_size > 1:
            yield Change(settings={"train.async_queue_size": 1})
        if on_gpu:
            yield from _engine_changes(config)
        if not config.actor.gradient_checkpointing_enable:
            yield Change(settings={"actor.gradient_checkpointing_enable": True})
        given, fitting = config.train.max_tokens_per_gpu, plan.fitting_tokens
        if given is not None and fitting is not None and TOKEN_STEP <= fitting < given:
            yield Change(settings={"train.max_tokens_per_gpu": fitting})
        if on_gpu and config.train.colocate_all and not config.ds.enable_sleep and not _in_8_bits(config):
            yield Change(settings={"ds.enable_sleep": True})
    else:
        if on_gpu and isinstance(config, KDConfig) and config.rollout.on_policy_share:
            yield from _smaller_shares(config.vllm.gpu_memory_utilization)
        if not config.model.gradient_checkpointing_enable:
            yield Change(settings={"model.gradient_checkpointing_enable": True})
    if on_gpu and config.ds.zero_stage < 3 and not config.ds.load_in_4bit:
        yield Change(settings={"ds.zero_stage": 3})
    if on_gpu and isinstance(config, PPOConfig | DPOConfig) and _has_reference(config) and not config.ref.offload:
        yield Change(settings={"ref.offload": True})
    if on_gpu and not config.ds.adam_offload and not _in_8_bits(config):
        yield Change(settings={"ds.adam_offload": True})
    if plan.fitting_tokens is not None and TOKEN_STEP <= plan.fitting_tokens < plan.longest:
        yield Change(settings={"data.max_len": plan.fitting_tokens})
    if config.ds.lora.rank == 0:
        yield Change(settings={"ds.lora.rank": LORA_RANK})


def _in_8_bits(config: PPOConfig | SupervisedConfig) -> bool:
    """Say whether an optimizer's state is in 8 bits, which stays on the GPU."""
    trained = (config.actor, config.critic) if isinstance(config, PPOConfig) else (config,)
    return any(one.optim in EIGHT_BIT for one in trained)


def _has_reference(config: PPOConfig | DPOConfig) -> bool:
    """Say whether a second model is loaded that is not trained."""
    return config.algo.kl.init_coef > 0 if isinstance(config, PPOConfig) else config.needs_reference_model


def _engine_changes(config: PPOConfig) -> Iterator[Change]:
    if config.train.colocate_all and not config.vllm.enable_sleep:
        yield Change(settings={"vllm.enable_sleep": True})
    yield from _smaller_shares(config.vllm.gpu_memory_utilization)


def _smaller_shares(given: float) -> Iterator[Change]:
    """Yield less of a GPU's memory for the engine on it."""
    for share in SHARES:
        if share < given:
            yield Change(settings={"vllm.gpu_memory_utilization": share})
