"""The row files of a training, read as its settings say; without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.preferences import DPOConfig, KTOConfig, PRMConfig, RMConfig
from lmm_r1.config.shared import SequenceConfig, named_reading, row_reading
from lmm_r1.config.supervised import SFTConfig
from lmm_r1.data.files import RowFile, read_row_file
from lmm_r1.data.preferences import PREFERENCE, STEPS, UNPAIRED, JudgedFile, RowKind, read_judged_file
from lmm_r1.data.reading import RowReading
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
    given |= {"reading": replace(reading, plain_template=template), "bad_rows": config.data.bad_rows}
    return read_row_file(path, answer_required=needs_answer, skip_by=SKIP_BAD_ROWS, **given)


def plain_template(config: SFTConfig) -> str | None:
    """Return the template of plain-text prompts, with {} for the prompt; None applies the chat template."""
    data = config.data
    if data.apply_chat_template:
        return None
    if data.output_key is not None:
        return data.input_template or "{}"
    return "{}" if config.model.pretrain_mode_enable else None


JudgedConfig = DPOConfig | RMConfig | KTOConfig | PRMConfig


def read_judged(config: JudgedConfig, path: str, **given: Any) -> JudgedFile[Any]:
    """Return the judged rows of a file; further arguments and errors are those of `read_judged_file`."""
    kind, reading = _judged_reading(config)
    return read_judged_file(path, kind, reading=reading, bad_rows=config.data.bad_rows, skip_by=SKIP_BAD_ROWS, **given)


def _judged_reading(config: JudgedConfig) -> tuple[RowKind[Any, Any], RowReading]:
    if isinstance(config, DPOConfig | RMConfig):
        pairs = config.data
        reading = named_reading(pairs, prompt=pairs.prompt_key, prefix="--data.")
        names = replace(reading.names, chosen=pairs.chosen_key, rejected=pairs.rejected_key, prompt_key="prompt_key")
        return PREFERENCE, replace(reading, names=names, plain_template=_template(pairs, column=pairs.prompt_key))
    data = config.data
    reading = named_reading(data, prompt=data.input_key, answer=data.label_key, prefix="--data.")
    if isinstance(config, PRMConfig):
        tag = config.data.step_tag or config.model.placeholder_token
        return STEPS, replace(reading, names=replace(reading.names, step_tag=tag, step_flag="--data.step_tag"))
    names = replace(reading.names, response=config.data.output_key)
    return UNPAIRED, replace(reading, names=names, plain_template=_template(data, column=data.input_key))


def _template(data: SequenceConfig, *, column: str | None) -> str | None:
    """Return the template of plain prompts in judged rows, with {} for the prompt; None applies the chat template.

    As in OpenRLHF, text in a named column is used as it is unless a chat template is requested.
    """
    return None if column is None or data.apply_chat_template else data.input_template or "{}"
