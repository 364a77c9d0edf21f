"""The plan at the start of a run: it chooses open settings by memory, is printed, and refuses a run that cannot fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

from PIL import Image
from rich.console import Console

from lmm_r1 import cpu, dotted
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, SFTConfig, SupervisedConfig, unplanned
from lmm_r1.config.hardware import shared_counts
from lmm_r1.config.model_checks import EIGHT_BIT, why_not_during_generation
from lmm_r1.config.resolve import UNPLANNED
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, images_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import encode_row
from lmm_r1.planning.estimates import Machine, PlanImage, machine_of, on_other_machines
from lmm_r1.planning.pass_memory import Unpredictable, ordinary_token
from lmm_r1.planning.plan import Plan, gib, summary
from lmm_r1.planning.ppo_plan import TOKEN_STEP, counts_tokens, ordinary_tokens, plan_ppo, stage_of
from lmm_r1.planning.supervised_plan import plan_supervised
from lmm_r1.quiet import is_verbose

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
        replan: returns the plan of other settings.
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
        changes: possible changes, the cheapest first.
    """

    def missing(changes: Sequence[Change]) -> int | None:
        settings = {name: value for change in changes for name, value in change.settings.items()}
        try:
            return replan(dotted.replace(config, settings)).shortage
        except UserError:
            # The flags exclude each other.
            return None

    taken: list[Change] = []
    shortage = plan.shortage
    for change in changes:
        # A later value of a flag replaces an earlier one.
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
    """Yield changes of flags that are not set and that cost only time, the cheapest first."""
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
    """Yield changes that a run does not have yet, ordered by their cost in time and then in training quality."""
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
    """Yield changes of the place of weights and optimizer states that a run does not have yet."""
    if (
        isinstance(config, PPOConfig)
        and config.train.colocate_all
        and not config.ds.enable_sleep
        and stage_of(config) != 0
        and not _in_8_bits(config)
    ):
        yield Change(settings={"ds.enable_sleep": True})
    # Over the GPUs of a model; one GPU has nobody to share with.
    several = any(model.gpus > 1 for device in plan.devices for model in device.models)
    judges = isinstance(config, SFTConfig) and config.eval.reward is not None
    if several and stage_of(config) != 3 and not config.ds.load_in_4bit and not judges:
        yield Change(settings={"ds.zero_stage": 3})
    if (
        (several or stage_of(config) == 3)
        and isinstance(config, PPOConfig | DPOConfig)
        and config.needs_reference_model
        and not config.ref.offload
    ):
        yield Change(settings={"ref.offload": True})
    if not config.ds.adam_offload and not _in_8_bits(config):
        yield Change(settings={"ds.adam_offload": True})


def _in_8_bits(config: PPOConfig | SupervisedConfig) -> bool:
    """Return whether the optimizer state is in 8 bits, which stays on the GPU."""
    trained = (config.actor, config.critic) if isinstance(config, PPOConfig) else (config,)
    return any(one.optim in EIGHT_BIT for one in trained)


def _engine_changes(config: PPOConfig) -> Iterator[Change]:
    if config.train.colocate_all and not config.vllm.enable_sleep:
        yield Change(settings={"vllm.enable_sleep": True})
    yield from _smaller_shares(config.vllm.gpu_memory_utilization)


def _smaller_shares(given: float | None) -> Iterator[Change]:
    """Yield smaller shares of a GPU's memory for the engine, if its share was set."""
    for share in SHARES:
        if given is not None and share < given:
            yield Change(settings={"vllm.gpu_memory_utilization": share})


# In the order in which they are printed. Where all of them take turns on the GPUs, the counts follow.
CHOSEN = (
    "train.colocate_all",
    "vllm.enable_sleep",
    "vllm.gpu_memory_utilization",
    "actor.gradient_checkpointing_enable",
    "actor.gradient_checkpointing_layers",
    "model.gradient_checkpointing_enable",
    "model.gradient_checkpointing_layers",
    "ds.enable_sleep",
    "ds.zero_stage",
    "ref.offload",
    "ds.adam_offload",
)
# Part of its share that an engine on shared GPUs may lose to reference passes during generation.
LEFT_TO_REFERENCE = 0.1


def chosen(
    config: Config, *, replan: Callable[[Config], Plan], share_gpus: Callable[[PPOConfig], Mapping[str, object]]
) -> tuple[Config, Plan]:
    """Return the settings with all that memory decides chosen, and their plan, which need not fit.

    Each of these is taken only if those before it are not enough:
    1. models and engines have groups of GPUs of their own, unless they are too few or too small for that;
    2. nothing is computed twice, and the passes of an update are large (`ordinary_tokens`);
    3. engines free their memory while models train;
    4. as few layers as possible compute their activations again;
    5. what costs more time: see `advice.remedies`.
    With all of that chosen, the reference runs during generation if there is memory for it.
    Without a GPU nothing is chosen but what a run needs to fit.

    Args:
        replan: returns the plan of other settings.
        share_gpus: returns the counts with which models and engines share a machine's GPUs.
    """
    config, plan = _on_gpus(config, replan=replan, share_gpus=share_gpus)
    return _with_reference_ahead(config, plan, replan=replan)


def _on_gpus(
    config: Config, *, replan: Callable[[Config], Plan], share_gpus: Callable[[PPOConfig], Mapping[str, object]]
) -> tuple[Config, Plan]:
    """Return the settings with models and engines on GPUs of their own, or on the same ones if they do not fit so."""
    config, plan = _on_these_gpus(config, replan=replan)
    if _fits(plan) or not (isinstance(config, PPOConfig) and config.train.colocate_all is None):
        return config, plan
    try:
        shared, found = _on_these_gpus(dotted.replace(config, share_gpus(config)), replan=replan)
    except UserError:
        # One of them must have GPUs of its own.
        return config, plan
    return (shared, found) if _fits(found) else (config, plan)


def _with_reference_ahead(config: Config, plan: Plan, *, replan: Callable[[Config], Plan]) -> tuple[Config, Plan]:
    """Return the settings with reference passes during generation, if these take little memory from other uses."""
    if not isinstance(config, PPOConfig) or config.ref.during_generation is not None or plan.machine.gpu_bytes is None:
        return config, plan
    if why_not_during_generation(config) is None:
        ahead = dotted.replace(config, {"ref.during_generation": True})
        found = replan(ahead)
        before, after = plan.engine_share or 0.0, found.engine_share or 0.0
        same_passes = (found.fitting_tokens or 0) >= (plan.fitting_tokens or 0)
        if _fits(found) and same_passes and after >= (1 - LEFT_TO_REFERENCE) * before:
            return ahead, found
    return dotted.replace(config, {"ref.during_generation": False}), plan


def _on_these_gpus(config: Config, *, replan: Callable[[Config], Plan]) -> tuple[Config, Plan]:
    """Return the settings as `chosen` does, with models and engines on the GPUs that they have."""
    roomy, plan = _with_room(config, replan=replan)
    if _fits(plan):
        return roomy, plan
    changes, missing = fitting_changes(roomy, plan, replan=replan, changes=list(remedies(roomy, plan)))
    if missing or not changes:
        return roomy, plan
    # With them less may have to be computed twice.
    return _with_room(
        dotted.replace(config, {flag: value for change in changes for flag, value in change.settings.items()}),
        replan=replan,
    )


def filled(config: Config, plan: Plan) -> Config:
    """Return settings that were chosen without anything open: what the plan has found, and else what they always were."""
    found: dict[str, object] = {}
    has_engine = isinstance(config, PPOConfig | KDConfig) and config.vllm.gpu_memory_utilization is None
    if has_engine and plan.engine_share is not None:
        found["vllm.gpu_memory_utilization"] = plan.engine_share
    if isinstance(config, PPOConfig):
        if counts_tokens(config):
            found |= {"train.max_tokens_per_gpu": plan.pass_tokens, "rollout.max_tokens_per_gpu": plan.log_prob_tokens}
    return unplanned(dotted.replace(config, found))


def choices_line(given: Config, config: Config) -> str | None:
    """Return a line with the chosen flags that differ from their values without a plan; None without any.

    Args:
        given: the settings as they were.
    """
    known = dotted.leaf_types(type(config))
    values = {flag: dotted.get(config, flag) for flag in CHOSEN if flag in known and dotted.get(given, flag) is None}
    named = {flag: value for flag, value in values.items() if value not in (None, False, UNPLANNED.get(flag))}
    return f"chosen to fit: {Change(settings=named)}" if named else None


def _with_room(config: Config, *, replan: Callable[[Config], Plan]) -> tuple[Config, Plan]:
    """Return the settings with sleeping engines and recomputed layers if that makes room, and their plan."""
    plan = replan(config)
    if plan.machine.gpu_bytes is None:
        return config, plan
    sleeps = isinstance(config, PPOConfig) and config.train.colocate_all and config.vllm.enable_sleep is None
    for asleep in (False, True) if sleeps else (None,):
        config = config if asleep is None else dotted.replace(config, {"vllm.enable_sleep": asleep})
        if _is_roomy(config, plan := replan(config)):
            return config, plan
    group = "actor" if isinstance(config, PPOConfig) else "model"
    if dotted.get(config, f"{group}.gradient_checkpointing_enable") is not None:
        return config, plan
    tried = partial(_with_recomputing, config, group)
    most = _language_layers(config)
    if not _is_roomy(every := tried(None), plan := replan(every)):
        return every, plan
    # The fewest layers that are enough.
    few, enough = 0, most
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if _is_roomy(some := tried(middle), replan(some)) else (middle, enough)
    config = every if enough == most else tried(enough)
    return config, replan(config)


def _with_recomputing(config: Config, group: str, layers: int | None) -> Config:
    return dotted.replace(
        config, {f"{group}.gradient_checkpointing_enable": True, f"{group}.gradient_checkpointing_layers": layers}
    )


def _fits(plan: Plan) -> bool:
    return plan.shortage == 0


def _is_roomy(config: PPOConfig | SupervisedConfig, plan: Plan) -> bool:
    """Return whether a run fits with passes of the usual size."""
    return _fits(plan) and (plan.fitting_tokens or 0) >= _wanted_tokens(config)


def _wanted_tokens(config: PPOConfig | SupervisedConfig) -> int:
    """Return the tokens that a pass of the update should hold."""
    if not isinstance(config, PPOConfig):
        return config.train.micro_batch_size * config.data.max_len
    # Those that a flag names are in the plan.
    counted = counts_tokens(config) and config.train.max_tokens_per_gpu is None
    return ordinary_tokens(config) if counted else 0


def _language_layers(config: PPOConfig | SupervisedConfig) -> int:
    path = config.actor.model_name_or_path if isinstance(config, PPOConfig) else config.model.model_name_or_path
    assert path is not None, "required by config.resolve"
    checkpoint = Checkpoint(path, trust_remote_code=config.train.trust_remote_code)
    return checkpoint.config.get_text_config().num_hidden_layers


Supervised = TypeVar("Supervised", bound=SupervisedConfig)

logger = logging.getLogger(__name__)


def planned_ppo(config: PPOConfig, *, console: Console, rows: Sequence[Row] = ()) -> PPOConfig:
    """Return the settings of an RL run with open ones chosen by memory, and print the plan.

    Raises UserError for a run that cannot fit. Runs on a Ray cluster are not checked: its machines are not known here.
    """
    if config.ref.during_generation is None and not cpu.has_cuda():
        # The reference would take cores from the engines.
        config = dotted.replace(config, {"ref.during_generation": False})
    machine = None if on_other_machines(os.environ) else _this_machine(config)
    if machine is None:
        return unplanned(config)
    image = _image_of(rows, _checkpoint(config))
    return _planned(config, console, replan=lambda changed: plan_ppo(changed, machine, image=image))


def planned_supervised(
    config: Supervised, *, console: Console, processes: int, per_machine: int, rows: Sequence[Row] = ()
) -> Supervised:
    """Return the settings of a supervised run as `planned_ppo` does; every process chooses the same."""
    machine = _this_machine(config)
    if machine is None:
        return unplanned(config)
    image = _image_of(rows, _checkpoint(config))

    def replan(changed: Supervised) -> Plan:
        return plan_supervised(changed, machine, processes=processes, per_machine=per_machine, image=image)

    return _planned(config, console, replan=replan)


def _planned(config: Config, console: Console, *, replan: Callable[[Config], Plan]) -> Config:
    try:
        found, plan = chosen(config, replan=replan, share_gpus=shared_counts)
    except Unpredictable as error:
        logger.warning("the memory of this model's passes cannot be predicted (%s); it is not checked", error)
        return unplanned(config)
    complete = filled(found, plan)
    tell(plan, console, chosen=choices_line(config, complete))
    judge(found, plan, replan=replan)
    return complete


def judge(config: Config, plan: Plan, *, replan: Callable[[Config], Plan]) -> None:
    """Raise UserError for a plan that does not fit; only warn if `--train.memory_check` is not `refuse`.

    Args:
        replan: makes the plan of other settings.
    """
    try:
        refuse_excess(config, plan, replan=replan)
    except UserError as error:
        if config.train.memory_check == "refuse":
            raise UserError(f"{error}; or begin all the same with --train.memory_check warn") from error
        logger.warning("%s", error)


def _this_machine(config: PPOConfig | SupervisedConfig) -> Machine | None:
    """Return this machine; None if memory is not checked or the GPUs' memory is not known."""
    if config.train.memory_check == "off":
        return None
    try:
        return machine_of(gpu_gib=None, host_gib=None)
    except UserError as error:
        logger.warning("the run's memory is not checked: %s", error)
        return None


def _image_of(rows: Sequence[Row], checkpoint: Checkpoint) -> PlanImage | None:
    """Return the first row with one image that can be encoded, as the run will encode it; None without such a row."""
    for row in rows:
        if len(images_of(row.messages)) != 1:
            continue
        try:
            encoded = encode_row(row, kit=checkpoint.kit, processor=checkpoint.processor, add_generation_prompt=True)
        except UserError:
            # It is reported when the row is used; the run may continue without it.
            continue
        return PlanImage(token_ids=tuple(encoded.token_ids), media=encoded.media)
    return None


def tell(plan: Plan, console: Console, *, chosen: str | None) -> None:
    """Print the memory of a plan and the settings that it chose; also its passes, if that is asked for."""
    memory, *passes = summary(plan)
    for line in [memory, *(passes if is_verbose() else []), *([] if chosen is None else [chosen])]:
        console.print(line)


@lru_cache(maxsize=8)
def plan_image(checkpoint: Checkpoint, *, pixels: int) -> PlanImage:
    """Return a prompt with one square image of this many pixels, as the checkpoint's processor encodes it.

    If there is only a config, the kit creates the image's tokens without a processor.
    """
    if not any(Path(checkpoint.path).glob("*processor_config.json")) and Path(checkpoint.path).is_dir():
        ids, media = checkpoint.kit.blank_image(checkpoint.config, pixels=pixels)
        return PlanImage(token_ids=(*ids, ordinary_token(checkpoint)), media=media)
    side = max(28, round(pixels**0.5))
    picture = Image.new("RGB", (side, side))
    message = Message(role="user", parts=(ImagePart(picture), TextPart("?")))
    encoded = checkpoint.kit.encode(
        checkpoint.processor, [message], images=[picture], videos=(), add_generation_prompt=True
    )
    return PlanImage(token_ids=tuple(encoded.token_ids), media=encoded.media)


def _checkpoint(config: PPOConfig | SupervisedConfig) -> Checkpoint:
    path = config.actor.model_name_or_path if isinstance(config, PPOConfig) else config.model.model_name_or_path
    assert path is not None, "required by config.resolve"
    return Checkpoint(path, trust_remote_code=config.train.trust_remote_code)


@contextmanager
def unpredictable_refused(path: str) -> Iterator[None]:
    """Raise UserError for a model that does not run on tensors without memory."""
    try:
        yield
    except Unpredictable as error:
        raise UserError(
            f"{path}: the memory of this model's passes cannot be predicted ({error}); start the run with a small "
            "--train.max_tokens_per_gpu instead"
        ) from error
