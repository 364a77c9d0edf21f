"""Settings of generation: episodes, speculative decoding and chat."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from lmm_r1 import dotted
from lmm_r1.config.checks import agent_options, check_eager, check_thought
from lmm_r1.config.ppo import AgentConfig, ThoughtConfig
from lmm_r1.config.shared import JsonText
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable

AGENT_VERIFIER = "agent"
"""Verifiers called `agent:PART` judge by a part of the reward that the environment gives."""


@dataclass(frozen=True, kw_only=True)
class EpisodeFlags:
    agent: str | None = None
    """An environment that answers the model's turns: one by name (crop, tool, sokoban, ...), or FILE.py:CLASS of your own;
    None is single responses."""
    agent_options: JsonText | None = None
    """Arguments of the environment's class, as a JSON object."""
    agent_max_turns: int = AgentConfig.max_turns
    """Turns of the model in an episode; each is of max_new_tokens at most, and all with the prompt of max_model_len."""
    agent_max_images: int = AgentConfig.max_images
    """Images that the environment may show in an episode, beside those of the prompt."""
    agent_answer_s: float = AgentConfig.answer_s
    """Seconds that the environment may take to answer a turn; beyond them the episode fails."""
    agent_last_turn_regex: str | None = AgentConfig.last_turn_regex
    """What the last turn that may be must match, where the environment gives it no form; training may have had it, too."""
    agent_thought: ThoughtConfig = field(default_factory=ThoughtConfig)
    """Budget forcing: the thought of each turn made longer, or shorter."""


EPISODE_FLAGS = tuple(own.name for own in fields(EpisodeFlags))


def check_episodes(flags: EpisodeFlags, *, backend: str, vllm: str) -> None:
    """Raise UserError where the flags of episodes do not go together.

    Args:
        backend: the flag that names what generates, with its value.
        vllm: the same where that is vLLM.
    """
    if flags.agent is None:
        refuse_episode_flags(flags, because="it is for episodes; give --agent, too")
        return
    if backend != vllm:
        raise UserError(f"--agent {flags.agent} with {backend}: episodes are played on vLLM alone; take {vllm}")
    for name, least in (("agent_max_turns", 1), ("agent_max_images", 0)):
        if getattr(flags, name) < least:
            raise UserError(f"--{name} {getattr(flags, name)} must be at least {least}")
    if not flags.agent_answer_s > 0:
        raise UserError(f"--agent_answer_s {flags.agent_answer_s:g} must be above 0")
    agent_options(episode_limits(flags), flag="--agent_options")
    check_thought(flags.agent_thought, prefix="--agent_thought.")
    try:
        re.compile(flags.agent_last_turn_regex or "")
    except re.error as error:
        given = f"--agent_last_turn_regex {flags.agent_last_turn_regex}"
        raise UserError(f"{given} is no regular expression: {error}") from error


def refuse_episode_flags(flags: EpisodeFlags, *, because: str) -> None:
    """Raise UserError for the first of these flags that is given, where no episode is played."""
    for name in dotted.leaf_types(EpisodeFlags):
        if (given := dotted.get(flags, name)) != dotted.get(EpisodeFlags(), name):
            raise UserError(f"--{name} {given}: {because}")


def episode_limits(flags: EpisodeFlags) -> AgentConfig:
    """Return how far episodes go; nothing is learnt from them, so that one which a limit ends counts as it is."""
    return AgentConfig(
        options=flags.agent_options,
        max_turns=flags.agent_max_turns,
        max_images=flags.agent_max_images,
        answer_s=flags.agent_answer_s,
        last_turn_regex=flags.agent_last_turn_regex,
        thought=flags.agent_thought,
        overturn="keep",
    )


def reward_part(verifier: str) -> str | None:
    """Return the part of the environment's reward that a verifier `agent:PART` judges by; None for every other verifier."""
    name, separator, part = verifier.partition(":")
    return part if name == AGENT_VERIFIER and separator else None


LONGEST_CONVERSATION = 8192
"""Tokens of a conversation where `max_model_len` is None; never more than the model takes."""
POSITIVE = ("max_model_len", "tensor_parallel_size")
NOT_NEGATIVE = ("max_images", "max_videos")


@dataclass(frozen=True, kw_only=True)
class ChatConfig(EpisodeFlags):
    model: str
    """The checkpoint (a folder or a name on the hub), or an adapter's folder."""
    adapter: Path | None = None
    """LoRA adapter to merge into the model."""
    backend: Literal["vllm", "transformers"] = "vllm"
    """What generates: vLLM, or plain transformers, which starts faster and takes every architecture."""
    system: str | None = None
    """System prompt; None leaves it to the checkpoint's chat template."""
    load: Path | None = None
    """Conversation to go on with, written by /save; of its settings those stay that no flag changes."""
    temperature: float = 0.7
    """Sampling temperature; 0 decodes greedily."""
    top_p: float = 0.95
    """Nucleus of the sampling."""
    max_new_tokens: int = 2048
    """Longest answer in tokens; of an episode, its longest turn."""
    max_model_len: int | None = None
    """Longest conversation in tokens, the answer included; None is 8192, or with longrope as long as short factors hold."""
    max_images: int = 8
    """Most images in one conversation."""
    max_videos: int = 0
    """Most videos in one conversation, for models that take videos."""
    agent_pictures: Path | None = None
    """Folder to write the pictures to that the environment shows; None writes none."""
    history: Path | None = Path("~/.lmm_r1_history")
    """File with what was typed at the prompt, for the arrow keys; None keeps no history."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the model; auto takes that of the weights."""
    tensor_parallel_size: int = 1
    """GPUs over which vLLM splits the model."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for vLLM; None is what its responses need, as far as it is free when the engine starts."""
    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs: it starts sooner and decodes more slowly; without CUDA there are none in any case; None does so for small models only."""
    seed: int = 0
    """Seed of the sampling."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint brings along."""


def check(config: ChatConfig) -> None:
    """Raise UserError for a number that no conversation can be had with; `Sampling` checks those that /set changes."""
    for name in POSITIVE:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be 1 or more")
    for name in NOT_NEGATIVE:
        if getattr(config, name) < 0:
            raise UserError(f"--{name} {getattr(config, name)}: must be 0 or more")
    check_eager(config.enforce_eager, backend=f"--backend {config.backend}", uses_vllm=config.backend == "vllm")
    check_episodes(config, backend=f"--backend {config.backend}", vllm="--backend vllm")
    if config.agent_pictures is not None:
        if config.agent is None:
            raise UserError(f"--agent_pictures {config.agent_pictures}: it is for episodes; give --agent, too")
        check_creatable(config.agent_pictures, flag="--agent_pictures")
        if config.agent_pictures.is_file():
            raise UserError(f"--agent_pictures {config.agent_pictures} is a file; name a folder")
    if config.gpu_memory_utilization is not None and not 0 < config.gpu_memory_utilization <= 1:
        raise UserError(f"--gpu_memory_utilization {config.gpu_memory_utilization}: must be above 0 and at most 1")
