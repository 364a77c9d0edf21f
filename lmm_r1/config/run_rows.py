"""How settings say that rows are read, and the row files of a training; without torch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmm_r1.config.declared import check_ranges
from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.shared import IMAGES, RowReadingConfig, RowsConfig, text_given
from lmm_r1.config.supervised import DPOConfig, RMConfig, SFTConfig
from lmm_r1.data.files import RowFile, read_row_file
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.media_access import media_limits
from lmm_r1.data.messages import NO_PROMPT, PreferenceRow, Row
from lmm_r1.data.preferences import read_pairs
from lmm_r1.data.reading import PromptTemplate, RowReading, shipped_prompt
from lmm_r1.data.training_rows import SKIP_BAD_ROWS
from lmm_r1.errors import UserError


def row_reading(config: RowsConfig, *, prefix: str = "--", asked_only: bool = False) -> RowReading:
    """Return how the flags say that rows of prompts are read; takes and raises what `named_reading` does."""
    reading = named_reading(config, prompt=config.input_key, answer=config.label_key, prefix=prefix)
    return replace(reading, names=replace(reading.names, asked_only=asked_only))


def named_reading(
    config: RowReadingConfig, *, prompt: str | None, answer: str | None = None, prefix: str = "--"
) -> RowReading:
    """Return how the flags say that rows are read.

    Args:
        prompt: the column with the prompt, and `answer` that with the right answer; None takes the format's.
        prefix: prefix of the flags' names on this command line.

    Raises:
        UserError: a folder or file is missing, a bound makes no sense, or the template is broken.
    """
    media_limits()
    lowest, highest = config.min_pixels, config.max_pixels
    check_ranges(config, prefix=prefix)
    if lowest is not None and highest is not None and lowest > highest:
        raise UserError(f"{prefix}min_pixels {lowest} must not be above {prefix}max_pixels {highest}")
    if config.image_dir is not None and not Path(config.image_dir).is_dir():
        raise UserError(f"{prefix}image_dir {config.image_dir}: no such folder; check the path")
    template, default_prompt = config.prompt_template, shipped_prompt(config.system_prompt)
    system_prompt = None if default_prompt or config.system_prompt == NO_PROMPT else config.system_prompt
    return RowReading(
        format=config.format,
        names=ColumnNames(
            prompt=prompt,
            answer=answer,
            images=None if config.image_key == IMAGES else config.image_key,
            datasource=config.datasource_key,
            prefix=prefix,
        ),
        image_dir=None if config.image_dir is None else Path(os.path.abspath(config.image_dir)),
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        system_prompt=text_given(system_prompt, flag=f"{prefix}system_prompt"),
        default_prompt=default_prompt,
        prompt_template=(
            None
            if template is None
            else PromptTemplate(
                text_given(template, flag=f"{prefix}prompt_template") or "", flag=f"{prefix}prompt_template"
            )
        ),
    )


def read_conversations(config: PPOConfig | SFTConfig, path: str, **given: Any) -> RowFile[Row]:
    """Return the rows of a file for RL, SFT or distillation; further arguments and errors are those of `read_row_file`."""
    reading = row_reading(config.data, prefix="--data.")
    if isinstance(config, PPOConfig):
        template = config.data.input_template or None
        # An environment that gives the rewards itself may know what is right without an answer.
        needs_answer = not config.train.plays or config.reward.remote_url is not None
    else:
        reading = replace(reading, names=replace(reading.names, response=config.data.output_key))
        template = plain_template(config)
        needs_answer = False
    given = {"bad_rows": config.data.bad_rows, "answer_required": needs_answer} | given
    return read_row_file(path, reading=replace(reading, plain_template=template), skip_by=SKIP_BAD_ROWS, **given)


def plain_template(config: SFTConfig) -> str | None:
    """Return the template of plain-text prompts, with {} for the prompt; None applies the chat template."""
    data = config.data
    if data.apply_chat_template:
        return None
    if data.output_key is not None:
        return data.input_template or "{}"
    return "{}" if config.model.pretrain_mode_enable else None


def read_judged(config: DPOConfig | RMConfig, path: str, **given: Any) -> RowFile[PreferenceRow]:
    """Return the pairs of a file for DPO or a reward model; further arguments and errors are those of `read_pairs`."""
    data = config.data
    reading = named_reading(data, prompt=data.prompt_key, prefix="--data.")
    names = replace(reading.names, chosen=data.chosen_key, rejected=data.rejected_key, prompt_key="prompt_key")
    # As in OpenRLHF, text in a named column is used as it is unless a chat template is requested.
    is_plain = data.prompt_key is not None and not data.apply_chat_template
    reading = replace(reading, names=names, plain_template=data.input_template or "{}" if is_plain else None)
    return read_pairs(path, reading=reading, skip_by=SKIP_BAD_ROWS, **({"bad_rows": data.bad_rows} | given))
