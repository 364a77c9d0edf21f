"""Flags that make a run fit, in order of their harm: the fewest that are enough, and the refusal that names them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, SFTConfig, SupervisedConfig
from lmm_r1.config.declared import has_effect
from lmm_r1.config.shared import EIGHT_BIT
from lmm_r1.errors import ListedError, UserError
from lmm_r1.planning.pass_memory import Unpredictable
from lmm_r1.planning.plan import Plan, gib, summary
from lmm_r1.planning.ppo_plan import TOKEN_STEP, stage_of

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)
_TWICE = "All activations are computed twice: an update takes about a third longer."
SHARES = (0.7, 0.5, 0.4, 0.3, 0.2)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Flags that leave more memory."""

    settings: dict[str, object]
    cost: str
    """What it costs, in a sentence."""

    def __str__(self) -> str:
        """Return the flags as they are typed; what is None is left to its default."""
        typed = {name: f"{value:g}" if isinstance(value, float) else value for name, value in self.settings.items()}
        return " ".join(f"--{name}" if v is True else f"--{name} {v}" for name, v in typed.items() if v is not None)


# What changes the result of a training, the least harmful first; of each, those flags apply that a run has.
HARMFUL = (
    Remedy(
        settings={"actor.freeze_visual_encoder": True, "model.freeze_visual_encoder": True},
        cost="The vision tower is not trained; the features of each image are computed once and cached.",
    ),
    Remedy(settings={"algo.kl.init_coef": 0.0}, cost="No penalty keeps the policy near the initial model."),
    Remedy(
        settings={"actor.optim": "adamw_8bit", "critic.optim": "adamw_8bit", "optim": "adamw_8bit"},
        cost="The moments of AdamW are rounded to 8 bits.",
    ),
    Remedy(
        settings={"ds.lora.rank": 64}, cost="Only adapters are trained; the initial model under them is the reference."
    ),
    Remedy(
        settings={"ds.lora.rank": 64, "ds.load_in_4bit": True},
        cost="Only adapters are trained, on a language model that is rounded to 4 bits (QLoRA).",
    ),
    *(
        Remedy(settings={"data.max_pixels": pixels}, cost="Images are scaled down, so that small details are lost.")
        for pixels in (802_816, 401_408, 200_704)
    ),
    *(
        Remedy(
            settings={"data.max_len": tokens, "rollout.max_new_tokens": tokens // 2},
            cost=f"A prompt with its images and its response have at most {tokens} tokens together.",
        )
        for tokens in (1024, 512)
    ),
)


def refuse_excess(
    config: Config,
    plan: Plan,
    *,
    replan: Callable[[Config], Plan],
    command: Callable[[Sequence[Remedy]], str] | None = None,
) -> None:
    """Raise ListedError for a plan that does not fit, with the flags that make it fit, what they cost, and the plan then.

    It is a warning if `--train.memory_check` is not `refuse`.

    Args:
        replan: returns the plan of other settings.
        command: returns a command line with remedies, which the error then ends with.
    """
    found = plan.excesses()
    if not found:
        return
    taken, missing = fitting_remedies(config, plan, replan=replan, remedies=list(_remedies(config, plan)))
    sentence, flags = f"the run cannot fit: {'; '.join(found)}", " ".join(map(str, taken))
    lines: list[str] = []
    if missing:
        tried = f"; even with {flags} {gib(missing)} are missing" if taken else ""
        sentence += f"{tried}: take more GPUs, a machine with more memory, or a smaller model"
    else:
        sentence += f". It fits with {flags}"
        lines = [f"{remedy}: {remedy.cost}" for remedy in taken]
        lines += summary(replan(dotted.replace(config, settings_of(taken))))
        lines += [] if command is None else [command(taken)]
    if config.train.memory_check == "refuse":
        raise ListedError(f"{sentence}; or begin all the same with --train.memory_check warn", lines)
    logger.warning("%s", ListedError(sentence, lines))


def settings_of(remedies: Sequence[Remedy]) -> dict[str, object]:
    """Return the flags of remedies together; of one that several have, the last value."""
    return {name: value for remedy in remedies for name, value in remedy.settings.items()}


def fitting_remedies(
    config: Config, plan: Plan, *, replan: Callable[[Config], Plan], remedies: Sequence[Remedy] | None = None
) -> tuple[Sequence[Remedy], int]:
    """Return the remedies that are needed to make a run fit, and how many bytes are missing with them.

    Args:
        remedies: those that are tried, in this order; None tries all.
    """

    def missing(some: Sequence[Remedy]) -> int | None:
        changed = dotted.replace(config, settings_of(some))
        if changed.ds.load_in_4bit and not has_effect("ds.load_in_4bit", changed):
            return None
        try:
            return replan(changed).shortage
        except (UserError, Unpredictable):
            # The flags exclude each other, for example.
            return None

    taken: list[Remedy] = []
    shortage = plan.shortage
    for remedy in list(_remedies(config, plan)) if remedies is None else remedies:
        if shortage == 0:
            break
        # A later value of a flag replaces an earlier one.
        tried = [one for one in taken if one.settings.keys() != remedy.settings.keys()] + [remedy]
        left = missing(tried)
        if left is not None and left < shortage:
            taken, shortage = tried, left
    # What costs most is done without first.
    for remedy in reversed(taken if shortage == 0 else ()):
        without = [one for one in taken if one is not remedy]
        taken = without if missing(without) == 0 else taken
    return taken, shortage


def open_remedies(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Remedy]:
    """Yield remedies whose flags are not set and that cost only time, the cheapest first."""
    if plan.machine.gpu_bytes is None:
        # With a GPU it is chosen before.
        group = "actor" if isinstance(config, PPOConfig) else "model"
        if dotted.get(config, f"{group}.gradient_checkpointing_enable") is None:
            yield Remedy(settings={f"{group}.gradient_checkpointing_enable": True}, cost=_TWICE)
        return
    found = _of_states(config, plan)
    yield from (remedy for remedy in found if all(dotted.get(config, flag) is None for flag in remedy.settings))


def _remedies(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Remedy]:
    """Yield remedies that a run does not have yet, first those that cost time, then `HARMFUL`."""
    on_gpu = plan.machine.gpu_bytes is not None
    if on_gpu and isinstance(config, PPOConfig) and config.train.colocate_all and not config.vllm.enable_sleep:
        cost = "The engines move their weights out and back in each step."
        yield Remedy(settings={"vllm.enable_sleep": True}, cost=cost)
    if on_gpu and isinstance(config, PPOConfig | KDConfig):
        shares = (share for share in SHARES if share < (config.vllm.gpu_memory_utilization or 0.0))
        for share in shares:
            cost = "Fewer responses are generated at a time."
            yield Remedy(settings={"vllm.gpu_memory_utilization": share}, cost=cost)
    group, trained = ("actor", config.actor) if isinstance(config, PPOConfig) else ("model", config.model)
    if not trained.gradient_checkpointing_enable or trained.gradient_checkpointing_layers is not None:
        every: dict[str, object] = {
            f"{group}.gradient_checkpointing_enable": True,
            f"{group}.gradient_checkpointing_layers": None,
        }
        yield Remedy(settings=every, cost=_TWICE)
    fitting = plan.fitting_tokens or 0
    if isinstance(config, PPOConfig) and TOKEN_STEP <= fitting < (config.train.max_tokens_per_gpu or 0):
        yield Remedy(settings={"train.max_tokens_per_gpu": fitting}, cost="Passes of the update are smaller.")
    if on_gpu:
        yield from _of_states(config, plan)
    for remedy in HARMFUL:
        if needed := _changed(config, remedy.settings):
            yield replace(remedy, settings=needed)


def _changed(config: PPOConfig | SupervisedConfig, settings: dict[str, object]) -> dict[str, object]:
    """Return of settings those that have an effect in a run and are not there yet; a number that is smaller stays."""
    known = dotted.leaf_types(type(config))
    own = {flag: value for flag, value in settings.items() if flag in known}
    changed = dotted.replace(config, own)
    return {
        flag: value
        for flag, value in own.items()
        if has_effect(flag, changed)
        and (now := dotted.get(config, flag)) != value
        and not (type(now) is type(value) is int and 0 < now <= value)
    }


def _of_states(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Remedy]:
    """Yield other places of weights and optimizer states that a run does not have yet."""
    trained = (config.actor, config.critic) if isinstance(config, PPOConfig) else (config,)
    # Such a state stays on the GPU.
    in_8_bits = any(one.optim in EIGHT_BIT for one in trained)
    if (
        isinstance(config, PPOConfig)
        and config.train.colocate_all
        and not config.ds.enable_sleep
        and stage_of(config) != 0
        and not in_8_bits
    ):
        yield Remedy(
            settings={"ds.enable_sleep": True},
            cost="Optimizer states wait in host memory while responses are generated.",
        )
    # Over the GPUs of a model; one GPU has nobody to share with.
    several = any(model.gpus > 1 for device in plan.devices for model in device.models)
    judges = isinstance(config, SFTConfig) and config.eval.reward is not None
    if several and stage_of(config) != 3 and not config.ds.load_in_4bit and not judges:
        yield Remedy(settings={"ds.zero_stage": 3}, cost="The GPUs exchange weights in every pass.")
    if (
        (several or stage_of(config) == 3)
        and isinstance(config, PPOConfig | DPOConfig)
        and config.needs_reference_model
        and not config.ref.offload
    ):
        yield Remedy(settings={"ref.offload": True}, cost="The reference's weights come from host memory.")
    if not config.ds.adam_offload and not in_8_bits:
        yield Remedy(
            settings={"ds.adam_offload": True},
            cost="AdamW's states are in host memory and the CPU computes the updates, more slowly.",
        )
