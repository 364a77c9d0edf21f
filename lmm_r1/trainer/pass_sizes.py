"""How large samples are for the passes of models, and what a pass may hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import RayActorGroup

from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import MOST_PASS_TOKENS
from lmm_r1.data.prefix_tree import TreeSample, prefix_tree
from lmm_r1.data.sample import media_before
from lmm_r1.trainer.micro_batches import PassLimits, SampleSize, SharedTokens


def prompt_tokens(sample: Experience) -> int:
    """Return how many tokens of a sample without padding stand before its first loss token; all where it has none."""
    first = sample.action_mask.flatten().nonzero().flatten()[:1]
    # The action mask is about the token after each.
    return int(first) + 1 if len(first) else sample.sequences.numel()


def data_parallel_size(group: RayActorGroup) -> int:
    """Return how many workers of a group get samples of their own."""
    return len(group._actor_handlers) // group.duplicate_actors


def pass_limits(config: PPOConfig, settings: Any, *, share_prefix: bool) -> PassLimits:
    """Return what one pass may hold by `--rollout.*` or `--train.*`; tokens count per group of GPUs that share a pass."""
    by_tokens = config.train.dynamic_batch_enable
    most = config.train.max_tokens_per_gpu
    given = MOST_PASS_TOKENS if most is None else most
    tokens = given if settings.max_tokens_per_gpu is None else settings.max_tokens_per_gpu
    gpus = config.ds.tensor_parallel_size * config.ds.ulysses_size
    return PassLimits(
        samples=None if by_tokens else settings.micro_batch_size,
        tokens=tokens * gpus if by_tokens or share_prefix else None,
        share_prefix=share_prefix,
    )


def sample_sizes(samples: Sequence[Experience]) -> list[SampleSize]:
    """Return what matters of experiences of one sample each, without padding; groups have prompt and media in common."""
    groups: dict[Hashable, list[int]] = {}
    prompts = []
    for index, sample in enumerate(samples):
        token_ids, prompt = sample.sequences.flatten(), prompt_tokens(sample)
        key = (token_ids[:prompt].numpy().tobytes(), media_before(sample.mm_train_inputs[0], prompt))
        groups.setdefault(key, []).append(index)
        prompts.append(prompt)
    sizes = [
        SampleSize(
            index=index,
            group=number,
            prompt=prompts[index],
            response=samples[index].sequences.numel() - prompts[index],
            shared=shared,
        )
        for number, members in enumerate(groups.values())
        for index, shared in zip(
            members, _shared([samples[index] for index in members], prompt=prompts[members[0]]), strict=True
        )
    ]
    return sorted(sizes, key=attrgetter("index"))


def _shared(group: Sequence[Experience], *, prompt: int) -> list[tuple[SharedTokens, ...]]:
    """Return of each sample of a group the nodes behind the prompt that it has in common with others."""
    rows = [
        TreeSample(
            token_ids=sample.sequences.flatten().numpy(),
            media=media if isinstance(media := sample.mm_train_inputs[0], tuple) else (),
        )
        for sample in group
    ]
    shared: list[list[SharedTokens]] = [[] for _ in group]
    for number, node in enumerate(prefix_tree(rows, known=prompt)):
        tokens = node.end - max(node.start, prompt)
        if tokens and len(node.samples) > 1:
            for member in node.samples:
                shared[member].append(SharedTokens(node=number, tokens=tokens))
    return [tuple(parts) for parts in shared]
