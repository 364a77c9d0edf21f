"""The row files of a training, read as its settings say; without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.preferences import DPOConfig, RMConfig
from lmm_r1.config.shared import named_reading, row_reading
from lmm_r1.config.supervised import SFTConfig
from lmm_r1.data.files import RowFile, read_row_file
from lmm_r1.data.preferences import PairFile, read_pairs
from lmm_r1.data.training_rows import SKIP_BAD_ROWS


def read_conversations(config: PPOConfig | SFTConfig, path: str, *, held_out: bool = False, **given: Any) -> RowFile:
    """Return the rows of a file for RL, SFT or distillation; further arguments and errors are those of `read_row_file`.

    Args:
        held_out: the rows are for evaluation.
    """
    reading = row_reading(config.data, prefix="--data.")
    if isinstance(config, PPOConfig):
        template = config.data.input_template or None
        # An environment that gives the rewards itself may know what is right without an answer.
        needs_answer = not config.train.plays or config.reward.remote_url is not None
    else:
        reading = replace(reading, names=replace(reading.names, response=config.data.output_key))
        template = plain_template(config)
        needs_answer = held_out and config.eval.reward is not None
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


def read_judged(config: DPOConfig | RMConfig, path: str, **given: Any) -> PairFile:
    """Return the pairs of a file for DPO or a reward model; further arguments and errors are those of `read_pairs`."""
    data = config.data
    reading = named_reading(data, prompt=data.prompt_key, prefix="--data.")
    names = replace(reading.names, chosen=data.chosen_key, rejected=data.rejected_key, prompt_key="prompt_key")
    # As in OpenRLHF, text in a named column is used as it is unless a chat template is requested.
    is_plain = data.prompt_key is not None and not data.apply_chat_template
    reading = replace(reading, names=names, plain_template=data.input_template or "{}" if is_plain else None)
    return read_pairs(path, reading=reading, skip_by=SKIP_BAD_ROWS, **({"bad_rows": data.bad_rows} | given))
