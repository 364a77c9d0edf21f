"""Which names of OpenRLHF are replaced in the processes that hold models, and why.

Upstream's worker code finds these names as globals of its own modules; `install` puts ours in their place. Which further
names are subclassed or used, and the signatures relied on, are data of a contract test (tests/data/openrlhf_names.yaml).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Replacement:
    upstream: str
    """`module:name`, where upstream looks it up."""
    ours: str
    """`module:name` of what takes its place."""
    reason: str


_ACTOR = {
    "ours": "lmm_r1.models.actor:KitActor",
    "reason": "loading, positions and media tensors depend on the architecture: the kit knows them",
}
_VALUE_MODEL = {
    "ours": "lmm_r1.models.value_model:KitValueModel",
    "reason": "upstream knows plain language models alone, and computes no images",
}
_MEDIA = {
    "ours": "lmm_r1.rl.workers:media_per_row",
    "reason": "upstream joins media tensors along dimension 0 for every architecture; the kit joins them",
}
_REPLAY_BUFFER = {
    "ours": "lmm_r1.rl.workers:GroupReplayBuffer",
    "reason": "passes stay as they were planned over all ranks",
}

REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(upstream="openrlhf.trainer.ray.ppo_actor:Actor", **_ACTOR),
    Replacement(upstream="openrlhf.trainer.ray.launcher:Actor", **_ACTOR),
    Replacement(upstream="openrlhf.trainer.ray.ppo_critic:get_llm_for_sequence_regression", **_VALUE_MODEL),
    Replacement(upstream="openrlhf.trainer.ray.launcher:get_llm_for_sequence_regression", **_VALUE_MODEL),
    Replacement(upstream="openrlhf.trainer.ray.ppo_actor:merge_mm_train_inputs", **_MEDIA),
    Replacement(upstream="openrlhf.utils.vlm_utils:merge_mm_train_inputs", **_MEDIA),
    Replacement(upstream="openrlhf.trainer.ray.ppo_actor:NaiveReplayBuffer", **_REPLAY_BUFFER),
    Replacement(upstream="openrlhf.trainer.ray.ppo_critic:NaiveReplayBuffer", **_REPLAY_BUFFER),
    Replacement(
        upstream="openrlhf.trainer.ray.ppo_actor:get_tokenizer",
        ours="lmm_r1.rl.workers:load_processor",
        reason="upstream runs a checkpoint's own code and takes every model with a vision_config for one family",
    ),
    Replacement(
        upstream="openrlhf.trainer.ray.ppo_critic:get_tokenizer",
        ours="lmm_r1.rl.workers:load_processor",
        reason="what is saved beside a critic's weights is the kit's processor, too",
    ),
    Replacement(
        upstream="openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer",
        ours="lmm_r1.rl.workers:KitActorPPOTrainer",
        reason="weights reach the engines without CUDA, and all of the engines' caches are reset",
    ),
    Replacement(
        upstream="openrlhf.trainer.ray.ppo_actor:PolicyLoss",
        ours="lmm_r1.rl.workers:no_loss",
        reason="upstream knows two losses, and refuses the settings of others",
    ),
    Replacement(
        upstream="openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer",
        ours="lmm_r1.rl.critic_workers:KitCriticPPOTrainer",
        reason="upstream hands a critic no media",
    ),
    Replacement(
        upstream="openrlhf.utils.deepspeed.deepspeed:init_device_mesh",
        ours="lmm_r1.cpu:prepare_training",
        reason="upstream names cuda as the device of its mesh; replaced only where there is no CUDA",
    ),
)


def install(
    *,
    trust_remote_code: bool,
    share_prefix: bool,
    freeze_visual_encoder: bool,
    max_len: int,
    freeze_prefix: Sequence[str] = (),
    use_liger_kernel: bool = True,
    use_dora: bool = False,
    use_rslora: bool = False,
    image_cache_gib: float = 0.0,
    checkpointed_layers: int | None = None,
    trained: bool = True,
) -> None:
    """Put our names in the place of those that upstream's worker code looks up; may be called again.

    Only in processes that hold models. `init_device_mesh` is left to `cpu.prepare_training`.

    Args:
        freeze_visual_encoder: of value models, which upstream hands on to the policy alone.
        max_len: tokens of the run's longest sample.
        freeze_prefix: of the names of weights that are not trained, of policy and value models.
        use_liger_kernel: of value models, to which upstream does not hand it on.
        use_dora, use_rslora: of models that get adapters, whose kinds upstream does not know.
        image_cache_gib: of all models, for features of their images.
        checkpointed_layers: how many layers gradient checkpointing is for; None is all.
        trained: whether the process trains its model.
    """
    both: dict[str, Any] = {"trust_remote_code": trust_remote_code, "share_prefix": share_prefix, "max_len": max_len}
    both["use_liger_kernel"] = use_liger_kernel
    both |= {name: True for name, on in {"use_dora": use_dora, "use_rslora": use_rslora}.items() if on}
    if image_cache_gib:
        both |= {"image_cache_gib": image_cache_gib, "trained": trained}
    if checkpointed_layers is not None:
        both["checkpointed_layers"] = checkpointed_layers
    if freeze_prefix:
        both["freeze_prefix"] = tuple(freeze_prefix)
    built = {
        path: functools.partial(resolve(path), **both, **settings)
        for path, settings in (
            (_ACTOR["ours"], {"ban_media_tokens": True}),
            (_VALUE_MODEL["ours"], {"freeze_visual_encoder": freeze_visual_encoder}),
        )
    }
    for replacement in REPLACEMENTS:
        if replacement.ours.startswith("lmm_r1.cpu:"):
            continue
        module, name = replacement.upstream.split(":")
        ours = built[replacement.ours] if replacement.ours in built else resolve(replacement.ours)
        setattr(importlib.import_module(module), name, ours)


def resolve(path: str) -> Callable[..., Any]:
    """Return the object at `module:name` or `module:class.method`; a Ray actor class gives the class inside it."""
    module, _, names = path.partition(":")
    target: Any = importlib.import_module(module)
    for name in names.split("."):
        target = getattr(target, name)
        if hasattr(target, "__ray_metadata__"):
            target = target.__ray_metadata__.modified_class
    return target
