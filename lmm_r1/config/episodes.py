"""The flags of every command that plays episodes outside of training, and which of them go together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from lmm_r1 import dotted
from lmm_r1.config.checks import agent_options, check_thought
from lmm_r1.config.ppo import AgentConfig, ThoughtConfig
from lmm_r1.config.shared import JsonText
from lmm_r1.errors import UserError

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
