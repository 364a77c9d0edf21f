"""The plan at the start of a run: it is printed, sets the sizes of passes, and refuses a run that cannot fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from PIL import Image
from rich.console import Console

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig, SupervisedConfig, unplanned
from lmm_r1.config.hardware import shared_counts
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, images_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import encode_row
from lmm_r1.planning.choices import Config, choices_line, chosen, filled, refuse_excess
from lmm_r1.planning.estimates import PlanImage
from lmm_r1.planning.machine import Machine, machine_of, on_other_machines
from lmm_r1.planning.pass_memory import Unpredictable, ordinary_token
from lmm_r1.planning.plan import Plan, summary
from lmm_r1.planning.ppo_plan import plan_ppo
from lmm_r1.planning.supervised_plan import plan_supervised

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
    """Print a plan in one to three lines, and the settings that it chose."""
    for line in [*summary(plan), *([] if chosen is None else [chosen])]:
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
