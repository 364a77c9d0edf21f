"""The plan at the start of a run: it chooses open settings by memory, is printed, and refuses a run that cannot fit."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from PIL import Image
from rich.console import Console

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, PPOConfig, SupervisedConfig, model_path, unplanned
from lmm_r1.config.declared import has_effect
from lmm_r1.config.hardware import shared_counts
from lmm_r1.config.resolve import UNPLANNED
from lmm_r1.config.shared import EIGHT_BIT
from lmm_r1.data.images import image_size
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, images_of
from lmm_r1.data.training_rows import AnyRow
from lmm_r1.errors import ListedError, UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import encode_row
from lmm_r1.quiet import is_verbose
from lmm_r1.tools.planning.pass_memory import Unpredictable, ordinary_token
from lmm_r1.tools.planning.plan import Plan, PlanImage, gib, machine_of, summary
from lmm_r1.tools.planning.run_plan import TOKEN_STEP, plan_ppo, plan_supervised, stage_of

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=PPOConfig | SupervisedConfig)
SHARES = (0.7, 0.5, 0.4, 0.3, 0.2)


class Remedy(NamedTuple):
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
        {"actor.freeze_visual_encoder": True, "model.freeze_visual_encoder": True},
        "The vision tower is not trained; the features of each image are computed once and cached.",
    ),
    Remedy({"algo.kl.init_coef": 0.0}, "No penalty keeps the policy near the initial model."),
    Remedy(
        {"actor.optim": "adamw_8bit", "critic.optim": "adamw_8bit", "optim": "adamw_8bit"},
        "The moments of AdamW are rounded to 8 bits.",
    ),
    Remedy({"ds.lora.rank": 64}, "Only adapters are trained; the initial model under them is the reference."),
    Remedy(
        {"ds.lora.rank": 64, "ds.load_in_4bit": True},
        "Only adapters are trained, on a language model that is rounded to 4 bits (QLoRA).",
    ),
    *(
        Remedy({"data.max_pixels": pixels}, "Images are scaled down, so that small details are lost.")
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
    if not (found := plan.excesses()):
        return
    taken, missing = fitting_remedies(config, plan, replan=replan)
    sentence, flags, lines = f"the run cannot fit: {'; '.join(found)}", " ".join(map(str, taken)), list[str]()
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
    config: Config, plan: Plan, *, replan: Callable[[Config], Plan], remedies: Iterable[Remedy] | None = None
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
    for remedy in _remedies(config, plan) if remedies is None else remedies:
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


def _remedies(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Remedy]:
    """Yield remedies that a run does not have yet, first those that cost time, then `HARMFUL`."""
    yield from _slower(config, plan)
    for remedy in HARMFUL:
        if needed := _changed(config, remedy.settings):
            yield remedy._replace(settings=needed)


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


def _slower(config: PPOConfig | SupervisedConfig, plan: Plan) -> Iterator[Remedy]:
    """Yield remedies that cost only time and that a run does not have yet, the cheapest first."""
    on_gpu, rl = plan.machine.gpu_bytes is not None, config if isinstance(config, PPOConfig) else None
    takes_turns = rl is not None and on_gpu and rl.train.colocate_all
    if rl and takes_turns and not rl.vllm.enable_sleep:
        yield Remedy({"vllm.enable_sleep": True}, "The engines move their weights out and back in each step.")
    most = rl.vllm.gpu_memory_utilization or 0.0 if rl and on_gpu else 0.0
    for share in (one for one in SHARES if one < most):
        yield Remedy({"vllm.gpu_memory_utilization": share}, "Fewer responses are generated at a time.")
    group, trained = ("actor", config.actor) if isinstance(config, PPOConfig) else ("model", config.model)
    if not trained.gradient_checkpointing_enable or trained.gradient_checkpointing_layers is not None:
        every = f"{group}.gradient_checkpointing_"
        cost = "All activations are computed twice: an update takes about a third longer."
        yield Remedy({f"{every}enable": True, f"{every}layers": None}, cost)
    if rl and TOKEN_STEP <= plan.fitting_tokens < (rl.train.max_tokens_per_gpu or 0):
        yield Remedy({"train.max_tokens_per_gpu": plan.fitting_tokens}, "Passes of the update are smaller.")
    if not on_gpu:
        return
    # Such a state stays on the GPU.
    optimizers = (config.actor, config.critic) if isinstance(config, PPOConfig) else (config,)
    in_8_bits = any(one.optim in EIGHT_BIT for one in optimizers)
    if rl and takes_turns and not rl.ds.enable_sleep and stage_of(config) != 0 and not in_8_bits:
        yield Remedy({"ds.enable_sleep": True}, "Optimizer states wait in host memory while responses are generated.")
    # Over the GPUs of a model; one GPU has nobody to share with.
    several = any(model.gpus > 1 for device in plan.devices for model in device.models)
    if several and stage_of(config) != 3 and not config.ds.load_in_4bit:
        yield Remedy({"ds.zero_stage": 3}, "The GPUs exchange weights in every pass.")
    has_reference = isinstance(config, PPOConfig | DPOConfig) and config.needs_reference_model
    if has_reference and (several or stage_of(config) == 3) and not dotted.get(config, "ref.offload"):
        yield Remedy({"ref.offload": True}, "The reference's weights come from host memory.")
    if not config.ds.adam_offload and not in_8_bits:
        yield Remedy({"ds.adam_offload": True}, "AdamW and its states are on the CPU, whose updates are slower.")


# In the order in which they are printed. Where all of them take turns on the GPUs, the counts follow.
CHOSEN = (
    *("train.colocate_all", "vllm.enable_sleep", "vllm.gpu_memory_utilization"),
    *(f"{group}.gradient_checkpointing_{what}" for group in ("actor", "model") for what in ("enable", "layers")),
    *("ds.enable_sleep", "ds.zero_stage", "ref.offload", "ds.adam_offload"),
)


def chosen(
    config: Config, *, replan: Callable[[Config], Plan], share_gpus: Callable[[PPOConfig], Mapping[str, object]]
) -> tuple[Config, Plan]:
    """Return the settings with all that memory decides chosen, and their plan, which need not fit.

    Each of these is taken only if those before it are not enough:
    1. models and engines have groups of GPUs of their own, unless they are too few or too small for that;
    2. nothing is computed twice, and the passes of an update are large (`ordinary_tokens`);
    3. engines free their memory while models train;
    4. as few layers as possible compute their activations again;
    5. what costs more time: see `_slower`.
    Without a GPU nothing is chosen but what a run needs to fit.

    Args:
        replan: returns the plan of other settings.
        share_gpus: returns the counts with which models and engines share a machine's GPUs.
    """
    found, plan = _on_these_gpus(config, replan=replan)
    if plan.shortage and isinstance(found, PPOConfig) and found.train.colocate_all is None:
        # One of them may need GPUs of its own.
        with suppress(UserError):
            shared = _on_these_gpus(dotted.replace(found, share_gpus(found)), replan=replan)
            found, plan = shared if shared[1].shortage == 0 else (found, plan)
    return found, plan


def _on_these_gpus(config: Config, *, replan: Callable[[Config], Plan]) -> tuple[Config, Plan]:
    """Return the settings as `chosen` does, with models and engines on the GPUs that they have."""
    roomy, plan = _with_room(config, replan=replan)
    if plan.shortage == 0:
        return roomy, plan
    opened = [one for one in _slower(roomy, plan) if all(dotted.get(roomy, flag) is None for flag in one.settings)]
    taken, missing = fitting_remedies(roomy, plan, replan=replan, remedies=opened)
    if missing or not taken:
        return roomy, plan
    # With them less may have to be computed twice.
    return _with_room(dotted.replace(config, settings_of(taken)), replan=replan)


def filled(config: Config, plan: Plan) -> Config:
    """Return settings that were chosen without anything open: what the plan has found, and else what they always were."""
    found: dict[str, object] = {}
    if isinstance(config, PPOConfig):
        if config.vllm.gpu_memory_utilization is None and plan.engine_share is not None:
            found["vllm.gpu_memory_utilization"] = plan.engine_share
        if plan.pass_tokens is not None:
            found |= {"train.max_tokens_per_gpu": plan.pass_tokens, "rollout.max_tokens_per_gpu": plan.log_prob_tokens}
    return unplanned(dotted.replace(config, found))


def choices_line(given: Config, config: Config) -> str | None:
    """Return a line with the flags, open in what was given, whose values differ from those without a plan; None without any."""
    known = dotted.leaf_types(type(config))
    values = {flag: dotted.get(config, flag) for flag in CHOSEN if flag in known and dotted.get(given, flag) is None}
    named = {flag: value for flag, value in values.items() if value not in (None, False, UNPLANNED.get(flag))}
    return f"chosen to fit: {Remedy(settings=named, cost='')}" if named else None


def _with_room(config: Config, *, replan: Callable[[Config], Plan]) -> tuple[Config, Plan]:
    """Return the settings with sleeping engines and recomputed layers if that makes room, and their plan."""
    sleeps = isinstance(config, PPOConfig) and config.train.colocate_all and config.vllm.enable_sleep is None
    plan = replan(config)
    if plan.machine.gpu_bytes is None:
        return config, plan
    for asleep in (False, True) if sleeps else ():
        config = dotted.replace(config, {"vllm.enable_sleep": asleep})
        if (plan := replan(config)).is_roomy:
            break
    group = "actor" if isinstance(config, PPOConfig) else "model"
    every = f"{group}.gradient_checkpointing_"
    if plan.is_roomy or dotted.get(config, f"{every}enable") is not None:
        return config, plan

    def tried(layers: int | None) -> tuple[Config, Plan]:
        some = dotted.replace(config, {f"{every}enable": True, f"{every}layers": layers})
        return some, replan(some)

    layers, best = checkpoint_of(config).config.get_text_config().num_hidden_layers, tried(None)
    # The fewest layers that are enough.
    few, enough = 0, layers if best[1].is_roomy else 1
    while enough - few > 1:
        middle = (few + enough) // 2
        if (some := tried(middle))[1].is_roomy:
            enough, best = middle, some
        else:
            few = middle
    return best


def planned(config: Config, *, console: Console, rows: Sequence[Row] = ()) -> Config:
    """Return the settings of a run with open ones chosen by memory, the same in every process, and print the plan.

    Raises UserError for a run that cannot fit. Runs on a Ray cluster are not checked: its machines are not known here.
    """
    on_cluster = isinstance(config, PPOConfig) and os.environ.get("RAY_ADDRESS")
    if on_cluster or config.train.memory_check == "off":
        return unplanned(config)
    try:
        machine = machine_of(gpu_gib=None, host_gib=None)
    except UserError as error:
        logger.warning("the run's memory is not checked: %s", error)
        return unplanned(config)
    image = _image_of(rows, checkpoint_of(config))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))

    def replan(changed: Config) -> Plan:
        if isinstance(changed, PPOConfig):
            return plan_ppo(changed, machine, image=image)
        return plan_supervised(changed, machine, processes=processes, per_machine=here, image=image)

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
    for row in (row for row in rows if len(images_of(row.messages)) == 1):
        # An error is reported when the row is used; the run may continue without it.
        with suppress(UserError):
            encoded = encode_row(row, kit=checkpoint.kit, processor=checkpoint.processor, add_generation_prompt=True)
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
    side, kit = max(28, round(pixels**0.5)), checkpoint.kit
    picture = Image.new("RGB", (side, side))
    message = Message(role="user", parts=(ImagePart(picture), TextPart("?")))
    encoded = kit.encode(checkpoint.processor, [message], images=[picture], videos=(), add_generation_prompt=True)
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
        areas = ((image.max_pixels, math.prod(size)) for image, size in sizes if size)
        return sum(min(area, bound or area) for bound, area in areas)

    return max(map(pixels, rows), default=0)


def checkpoint_of(config: PPOConfig | SupervisedConfig) -> Checkpoint:
    """Return the checkpoint of the model that a run trains."""
    return Checkpoint(model_path(config), trust_remote_code=config.train.trust_remote_code)
