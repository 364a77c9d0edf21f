"""Whether vLLM can roll out a kit's models, and what a run does where it computes other log-probs than the trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Message, Row, TextPart, images_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit

logger = logging.getLogger(__name__)
CORRECTION = "algo.advantage.is_correction_level"


def check_turn_end(kit: LmmKit, processor: Any, *, path: str, model: str) -> None:
    """Raise UserError where no token ends a turn of the chat template, so that responses would run on to their limit.

    Args:
        path: of the checkpoint.
        model: the flag and the path, for the message.
    """
    tokenizer = kit.tokenizer_of(processor)
    question = Message(role="user", parts=(TextPart("?"),))
    answer = Message(role="assistant", parts=(TextPart("Yes."),))
    before = kit.render(processor, [question], add_generation_prompt=True)
    through = kit.render(processor, [question, answer], add_generation_prompt=False)
    same = next((place for place, pair in enumerate(zip(before, through, strict=False)) if pair[0] != pair[1]), None)
    turn = through[len(before) if same is None else same :]
    if _end_tokens(path, tokenizer).isdisjoint(turn):
        raise UserError(
            f"{model}: the chat template writes an answer as {tokenizer.decode(turn)!r}, in which none of the tokens that "
            f"end a response stands ({tokenizer.eos_token}), so that no response would end; give the tokenizer the end of "
            "a turn as one token, its eos_token, and teach it to the model with lmm-r1 train_sft"
        )


def _end_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids at which vLLM ends a response: the tokenizer's, and those of the checkpoint's generation config."""
    try:
        listed = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        listed = None  # not every checkpoint has one
    return {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}


def disagrees(kit: LmmKit) -> bool:
    """Say whether the engine of this machine cannot agree with the trainer on rows with images or videos."""
    return kit.engine_disagreement is not None and not cpu.has_cuda()


def with_correction(config: PPOConfig, *, kit: LmmKit, rows: Sequence[Row]) -> PPOConfig:
    """Return the configuration with the mismatch correction on where the engine cannot agree with the trainer.

    That is so for image rows of a kit with `engine_disagreement`, on vLLM's CPU backend; the run warns of it once.
    """
    if not disagrees(kit) or not any(images_of(row.messages) for row in rows):
        return config
    corrected = config.algo.advantage.is_correction_level
    if corrected == "off":
        corrected = "token"
        config = dotted.replace(config, {CORRECTION: corrected})
    logger.warning("%s; its samples are corrected for that (--%s %s)", kit.engine_disagreement, CORRECTION, corrected)
    return config
