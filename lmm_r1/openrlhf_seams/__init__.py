"""Every OpenRLHF name that this project subclasses, replaces or uses, why, and the signature it relies on.

A contract test compares the signatures with the installed OpenRLHF. Upstream code finds some names as globals of its
own modules; `install` puts ours in their place, in the worker processes that run that code.
"""

from __future__ import annotations

import functools
import importlib

from lmm_r1.openrlhf_seams import deepspeed, engines, loop, models, workers
from lmm_r1.openrlhf_seams.seam import Seam, resolve

SEAMS: tuple[Seam, ...] = (*models.SEAMS, *workers.SEAMS, *engines.SEAMS, *deepspeed.SEAMS, *loop.SEAMS)


def install(*, trust_remote_code: bool, share_prefix: bool, freeze_visual_encoder: bool, max_len: int) -> None:
    """Put our names in the place of those that upstream's worker code looks up; may be called again.

    Only in processes that hold models. `init_device_mesh` is left to `cpu.prepare_training`.

    Args:
        freeze_visual_encoder: of value models, which upstream hands on to the policy alone.
        max_len: tokens of the run's longest sample.
    """
    both = {"trust_remote_code": trust_remote_code, "share_prefix": share_prefix, "max_len": max_len}
    built = {
        path: functools.partial(resolve(path), **both, **settings)
        for path, settings in (
            ("lmm_r1.models.actor:KitActor", {"ban_media_tokens": True}),
            ("lmm_r1.models.value_model:KitValueModel", {"freeze_visual_encoder": freeze_visual_encoder}),
        )
    }
    for seam in SEAMS:
        if seam.how != "replaced" or seam.ours.startswith("lmm_r1.cpu:"):
            continue
        module, name = seam.upstream.split(":")
        ours = built[seam.ours] if seam.ours in built else resolve(seam.ours)
        setattr(importlib.import_module(module), name, ours)
