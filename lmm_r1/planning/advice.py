"""What to change in a run that does not fit, from what costs least to what costs most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, SFTConfig, SupervisedConfig
from lmm_r1.config.adapter_checks import EIGHT_BIT
from lmm_r1.errors import UserError
from lmm_r1.planning.plan import Plan, gib
from lmm_r1.planning.ppo_plan import TOKEN_STEP, stage_of

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)
SHARES = (0.7, 0.5, 0.4, 0.3, 0.2)
LORA_RANK = 64


@dataclass(frozen=True, kw_only=True)
class Change:
    """Flags that leave more memory."""

    settings: dict[str, object]

    def __str__(self) -> str:
        return " ".join(_flag(name, value) for name, value in self.settings.items() if value is not None)


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
    changes, missing = fitting_changes(config, plan, replan=replan, changes=list(_changes(config, plan)))
    said = f"the run cannot fit: {'; '.join(found)}"
    if missing == 0:
        raise UserError(f"{said}. It fits with {' '.join(map(str, changes))}")
    tried = f"; even with {' '.join(map(str, changes))} {gib(missing)} are missing" if changes else ""
    raise UserError(f"{said}{tried}: take more GPUs, a machine with more memory, or a smaller model")


def fitting_changes(
    config: Config, plan: Plan, *, replan: Callable[[Config], Plan], changes: Sequence[Change]
) -> tuple[Sequence[Change], int]:
    """Return the changes that make a run fit together, none of them needlessly, and how many bytes are missing then.

    Args:
        changes: that may be made, by what they cost.
    """

    def missing(changes: Sequence[Change]) -> int | None:
        settings = {name: value for change in changes for name, value in change.settings.items()}
        try:
            return replan(dotted.replace(config, settings)).shortage
        except UserError:
            # Two flags that exclude each other.
            return None

    taken: list[Change] = []
    shortage = plan.shortage
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


def remedies(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Change]:
    """Yield changes that cost time alone, of flags that nobody has named, by what they cost."""
    on_gpu = plan.machine.gpu_bytes is not None
    name = "actor" if isinstance(config, PPOConfig) else "model"
    trained = config.actor if isinstance(config, PPOConfig) else config.model
    if not on_gpu:
        # With a GPU it is chosen before.
        if trained.gradient_checkpointing_enable is None:
            yield Change(settings={f"{name}.gradient_checkpointing_enable": True})
        return
    for change in _of_states(config, plan):
        if all(dotted.get(config, flag) is None for flag in change.settings):
            yield change


def _changes(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Change]:
    """Yield changes that a run does not have yet, by what they cost in time, and then in what is learnt."""
    on_gpu = plan.machine.gpu_bytes is not None
    if isinstance(config, PPOConfig):
        if config.train.async_enable and config.train.async_queue_size > 1:
            yield Change(settings={"train.async_queue_size": 1})
        if on_gpu:
            yield from _engine_changes(config)
        if not config.actor.gradient_checkpointing_enable or config.actor.gradient_checkpointing_layers is not None:
            yield _recomputing("actor")
        given, fitting = config.train.max_tokens_per_gpu, plan.fitting_tokens
        if given is not None and fitting is not None and TOKEN_STEP <= fitting < given:
            yield Change(settings={"train.max_tokens_per_gpu": fitting})
    else:
        if on_gpu and isinstance(config, KDConfig) and config.rollout.on_policy_share:
            yield from _smaller_shares(config.vllm.gpu_memory_utilization)
        if not config.model.gradient_checkpointing_enable or config.model.gradient_checkpointing_layers is not None:
            yield _recomputing("model")
    if on_gpu:
        yield from _of_states(config, plan)
    if plan.fitting_tokens is not None and TOKEN_STEP <= plan.fitting_tokens < plan.longest:
        yield Change(settings={"data.max_len": plan.fitting_tokens})
    if config.ds.lora.rank == 0:
        yield Change(settings={"ds.lora.rank": LORA_RANK})


def _recomputing(group: str) -> Change:
    """Return the change after which all layers compute their activations again."""
    return Change(
        settings={f"{group}.gradient_checkpointing_enable": True, f"{group}.gradient_checkpointing_layers": None}
    )


def _of_states(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Change]:
    """Yield changes of where models' weights and optimizers' states are that a run does not have yet."""
    if (
        isinstance(config, PPOConfig)
        and config.train.colocate_all
        and not config.ds.enable_sleep
        and not _in_8_bits(config)
    ):
        yield Change(settings={"ds.enable_sleep": True})
    # Over the GPUs of a model; one GPU has nobody to share with.
    several = any(model.gpus > 1 for device in plan.devices for model in device.models)
    judges = isinstance(config, SFTConfig) and config.eval.verifier is not None
    if several and stage_of(config) != 3 and not config.ds.load_in_4bit and not judges:
        yield Change(settings={"ds.zero_stage": 3})
    if (
        (several or stage_of(config) == 3)
        and isinstance(config, PPOConfig | DPOConfig)
        and _has_reference(config)
        and not config.ref.offload
    ):
        yield Change(settings={"ref.offload": True})
    if not config.ds.adam_offload and not _in_8_bits(config):
        yield Change(settings={"ds.adam_offload": True})


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


def _smaller_shares(given: float | None) -> Iterator[Change]:
    """Yield less of a GPU's memory for the engine on it, where its share was named."""
    for share in SHARES:
        if given is not None and share < given:
            yield Change(settings={"vllm.gpu_memory_utilization": share})
