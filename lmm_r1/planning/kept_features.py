"""The host's memory that a model's process takes for features of images, which it makes with weights that stay."""

from __future__ import annotations

from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.planning.estimates import WIDTHS, ModelSettings, PlanImage
from lmm_r1.planning.machine import GIB

# So many images a process is taken to see at most, where the limit is not reached before.
MOST_IMAGES = 10_000


def kept_bytes(settings: ModelSettings, image: PlanImage | None, *, limit_gib: float, keeps: bool) -> int:
    """Return what a process may keep of images: up to the limit, with a token's width for each token of a prompt.

    A model is taken to keep them where some of its weights are frozen by their names: which, only the loaded one tells.

    Args:
        keeps: whether it keeps them whatever is frozen, as one that is not trained.
    """
    frozen = settings.freeze_visual_encoder or settings.freeze_prefix or settings.lora_rank
    if image is None or not (frozen or keeps):
        return 0
    checkpoint = Checkpoint(settings.path, trust_remote_code=settings.trust_remote_code)
    width = checkpoint.config.get_text_config().hidden_size * WIDTHS[settings.param_dtype]
    return min(int(limit_gib * GIB), MOST_IMAGES * len(image.token_ids) * width)
