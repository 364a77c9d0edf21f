"""Whether vLLM can roll out a kit's models, and what a run does where it computes other log-probs than the trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Row, images_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit

logger = logging.getLogger(__name__)
CORRECTION = "algo.advantage.is_correction_level"


def check_engine(kit: LmmKit, *, model: str) -> None:
    """Raise UserError where vLLM has no class for the architecture.

    Args:
        model: the flag and the path, for the message.
    """
    if kit.engine_refusal is not None:
        raise UserError(
            f"{model}: vLLM cannot generate with this architecture ({kit.engine_refusal}); "
            "it can be fine-tuned with lmm-r1 train_sft"
        )


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
