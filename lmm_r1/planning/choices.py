"""The plan at the start of a run: it chooses open settings by memory, is printed, and refuses a run that cannot fit."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

from PIL import Image
from rich.console import Console

from lmm_r1 import cpu, dotted
from lmm_r1.config import KDConfig, PPOConfig, SupervisedConfig, model_path, unplanned
from lmm_r1.config.declared import has_effect
from lmm_r1.config.hardware import shared_counts
from lmm_r1.config.resolve import UNPLANNED
from lmm_r1.data.images import image_size
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, images_of
from lmm_r1.data.training_rows import AnyRow
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import encode_row
from lmm_r1.planning.estimates import PlanImage, machine_of
from lmm_r1.planning.pass_memory import Unpredictable, ordinary_token
from lmm_r1.planning.plan import Plan, summary
from lmm_r1.planning.ppo_plan import counts_tokens, ordinary_tokens, plan_ppo
from lmm_r1.planning.remedies import Remedy, fitting_remedies, open_remedies, refuse_excess, settings_of
from lmm_r1.planning.supervised_plan import plan_supervised
from lmm_r1.quiet import is_verbose

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)


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
    5. what costs more time: see `remedies.open_remedies`.
    With all of that chosen, the reference runs during generation if there is memory for it.
    Without a GPU nothing is chosen but what a run needs to fit.

    Args:
        replan: returns the plan of other settings.
        share_gpus: returns the counts with which models and engines share a machine's GPUs.
    """
    found, plan = _on_these_gpus(config, replan=replan)
    if plan.shortage and isinstance(found, PPOConfig) and found.train.colocate_all is None:
        try:
            shared, shared_plan = _on_these_gpus(dotted.replace(found, share_gpus(found)), replan=replan)
        except UserError:
            # One of them must have GPUs of its own.
            shared_plan = plan
        if shared_plan.shortage == 0:
            found, plan = shared, shared_plan
    return _with_reference_ahead(found, plan, replan=replan)


def _with_reference_ahead(config: Config, plan: Plan, *, replan: Callable[[Config], Plan]) -> tuple[Config, Plan]:
    """Return the settings with reference passes during generation, if these take little memory from other uses."""
    if not isinstance(config, PPOConfig) or config.ref.during_generation is not None or plan.machine.gpu_bytes is None:
        return config, plan
    if has_effect("ref.during_generation", config):
        ahead = dotted.replace(config, {"ref.during_generation": True})
        found = replan(ahead)
        before, after = plan.engine_share or 0.0, found.engine_share or 0.0
        same_passes = (found.fitting_tokens or 0) >= (plan.fitting_tokens or 0)
        if found.shortage == 0 and same_passes and after >= (1 - LEFT_TO_REFERENCE) * before:
            return ahead, found
    return dotted.replace(config, {"ref.during_generation": False}), plan


def _on_these_gpus(config: Config, *, replan: Callable[[Config], Plan]) -> tuple[Config, Plan]:
    """Return the settings as `chosen` does, with models and engines on the GPUs that they have."""
    roomy, plan = _with_room(config, replan=replan)
    if plan.shortage == 0:
        return roomy, plan
    taken, missing = fitting_remedies(roomy, plan, replan=replan, remedies=list(open_remedies(roomy, plan)))
    if missing or not taken:
        return roomy, plan
    # With them less may have to be computed twice.
    return _with_room(dotted.replace(config, settings_of(taken)), replan=replan)


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
    return f"chosen to fit: {Remedy(settings=named, cost='')}" if named else None


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

    def tried(layers: int | None) -> Config:
        names = (f"{group}.gradient_checkpointing_enable", f"{group}.gradient_checkpointing_layers")
        return dotted.replace(config, dict(zip(names, (True, layers), strict=True)))

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


def _is_roomy(config: PPOConfig | SupervisedConfig, plan: Plan) -> bool:
    """Return whether a run fits with passes of the usual size."""
    if not isinstance(config, PPOConfig):
        wanted = config.train.micro_batch_size * config.data.max_len
    else:
        # Those that a flag names are in the plan.
        counted = counts_tokens(config) and config.train.max_tokens_per_gpu is None
        wanted = ordinary_tokens(config) if counted else 0
    return plan.shortage == 0 and (plan.fitting_tokens or 0) >= wanted


def _language_layers(config: PPOConfig | SupervisedConfig) -> int:
    return checkpoint_of(config).config.get_text_config().num_hidden_layers


logger = logging.getLogger(__name__)


def planned(config: Config, *, console: Console, rows: Sequence[Row] = ()) -> Config:
    """Return the settings of a run with open ones chosen by memory, the same in every process, and print the plan.

    Raises UserError for a run that cannot fit. Runs on a Ray cluster are not checked: its machines are not known here.
    """
    plan: Callable[..., Plan] = plan_ppo
    if isinstance(config, SupervisedConfig):
        processes = int(os.environ.get("WORLD_SIZE", 1))
        per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        plan = partial(plan_supervised, processes=processes, per_machine=per_machine)
    elif config.ref.during_generation is None and not cpu.has_cuda():
        # The reference would take cores from the engines.
        config = dotted.replace(config, {"ref.during_generation": False})
    if isinstance(config, PPOConfig) and os.environ.get("RAY_ADDRESS"):
        return unplanned(config)
    if config.train.memory_check == "off":
        return unplanned(config)
    try:
        machine = machine_of(gpu_gib=None, host_gib=None)
    except UserError as error:
        logger.warning("the run's memory is not checked: %s", error)
        return unplanned(config)
    image = _image_of(rows, checkpoint_of(config))

    def replan(changed: Config) -> Plan:
        return plan(changed, machine, image=image)

    try:
        found, found_plan = chosen(config, replan=replan, share_gpus=shared_counts)
    except Unpredictable as error:
        logger.warning("the memory of this model's passes cannot be predicted (%s); it is not checked", error)
        return unplanned(config)
    complete = filled(found, found_plan)
    memory, *passes = summary(found_plan)
    for line in (memory, *(passes if is_verbose() else ()), choices_line(config, complete)):
        if line is not None:
            console.print(line)
    refuse_excess(found, found_plan, replan=replan)
    return complete


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


# A side of it is a whole number of patches for every kit.
_WHOLE_PATCHES = 224


def image_tokens(checkpoint: Checkpoint, *, pixels: int) -> int:
    """Return the tokens of an image of this many pixels; as its sides are not known, in proportion to a square image's."""
    side = _WHOLE_PATCHES * max(1, round(pixels**0.5 / _WHOLE_PATCHES))
    ((_, count),) = Counter(plan_image(checkpoint, pixels=side**2).token_ids).most_common(1)
    return round(count * pixels / side**2)


def fitting_pixels(checkpoint: Checkpoint, config: PPOConfig | SupervisedConfig, *, pixels: int) -> int:
    """Return the pixels to which a run scales a prompt's images if they do not fit: in RL, they leave half of `--data.max_len`."""
    pixels, length = min(pixels, config.data.max_pixels or pixels), config.data.max_len
    room = length - (isinstance(config, PPOConfig) and config.rollout.max_new_tokens or 1)
    tokens = image_tokens(checkpoint, pixels=pixels) if pixels else 0
    return pixels if tokens <= room else pixels * min(room, length // (1 + isinstance(config, PPOConfig))) // tokens


def most_pixels(rows: Iterable[AnyRow]) -> int:
    """Return the pixels of the images of the row that has most, as its bounds scale them; 0 without any."""

    def pixels(row: AnyRow) -> int:
        sizes = ((image, image_size(image, location=row.location)) for image in images_of(row.messages))
        shown = ((image.max_pixels, width * height) for image, size in sizes if size for width, height in [size])
        return sum(min(area, bound or area) for bound, area in shown)

    return max(map(pixels, rows), default=0)


def checkpoint_of(config: PPOConfig | SupervisedConfig) -> Checkpoint:
    """Return the checkpoint of the model that a run trains."""
    return Checkpoint(model_path(config), trust_remote_code=config.train.trust_remote_code)
