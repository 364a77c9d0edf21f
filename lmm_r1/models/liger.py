"""Liger's fused kernels for norms and feed-forward layers (https://arxiv.org/abs/2410.10989), where they are installed."""

from __future__ import annotations

from importlib.metadata import version

from transformers import PreTrainedModel

from lmm_r1 import cpu
from lmm_r1.errors import UserError

FLAG = "--ds.use_liger_kernel"
# Not taken: positions are those of packed sequences, which its rotary embedding does not know, and the log-probs of a
# sequence are computed in pieces here already, with media tokens banned, which its fused loss does not do.
_LEFT_OUT = ("rope", "cross_entropy", "fused_linear_cross_entropy")


def use_liger(model: PreTrainedModel) -> None:
    """Put Liger's kernels into a model; raises UserError where there are none for this machine or this architecture."""
    if not cpu.has_cuda():
        raise UserError(f"{FLAG}: Liger's kernels are Triton's, which run on GPUs alone; leave it out")
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise UserError(
            f"{FLAG}: Liger is not installed ({error}); install it with `pip install liger-kernel`, or leave it out"
        ) from error
    known, name = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, model.config.model_type
    if name not in known:
        raise UserError(
            f"{FLAG}: Liger {version('liger-kernel')} has no kernels for {name}; leave it out, or take an architecture "
            f"that it has: {', '.join(sorted(known))}"
        )
    monkey_patch._apply_liger_kernel_to_instance(model=model, **dict.fromkeys(_LEFT_OUT, False))
