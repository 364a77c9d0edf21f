"""Episodes in an evaluation: how they are judged by their environment's reward, and what many of them amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lmm_r1.agents.environment import Environment
from lmm_r1.config.episodes import AGENT_VERIFIER, reward_part
from lmm_r1.data.sample import Played
from lmm_r1.errors import UserError
from lmm_r1.records.responses import JudgedResponse, PlayedEpisode, ShownTurn
from remote_rm.verifier import Score

ENDS = ("over", "turns", "images", "tokens")
"""How an episode can have ended that counts: over, or at a limit. A row whose environment failed is left out."""


@dataclass(frozen=True, kw_only=True)
class EpisodeScores:
    """Episodes over a set of rows; means are over episodes."""

    turns: float
    shown_images: float
    counts: dict[str, float]
    """What the environment counts, per episode: tool calls, malformed calls."""
    rewards: dict[str, float]
    """The parts of the reward that the environment gives."""
    ends: dict[str, float]
    """Shares by the names of `ENDS`."""


def episode_scores(responses: Sequence[JudgedResponse]) -> EpisodeScores | None:
    """Return what the episodes among the responses amount to; None where there are none."""
    episodes = [response.episode for response in responses if response.episode is not None]
    if not episodes:
        return None
    ended = Counter(episode.end for episode in episodes)
    return EpisodeScores(
        turns=fmean(episode.turns for episode in episodes),
        shown_images=fmean(episode.shown_images for episode in episodes),
        counts=_means(episodes, lambda episode: episode.counts),
        rewards=_means(episodes, lambda episode: episode.rewards),
        ends={end: ended[end] / len(episodes) for end in ENDS},
    )


def _means(episodes: Sequence[PlayedEpisode], values: Callable[[PlayedEpisode], dict]) -> dict[str, float]:
    names = dict.fromkeys(name for episode in episodes for name in values(episode))
    return {name: fmean(values(episode).get(name, 0) for episode in episodes) for name in names}


def default_verifiers(environment: Environment, *, otherwise: str) -> tuple[str, ...]:
    """Return what judges episodes where nothing else is asked for: the first part of the environment's own reward."""
    return (f"{AGENT_VERIFIER}:{environment.rewards[0]}",) if environment.rewards else (otherwise,)


def check_reward_parts(verifiers: Sequence[str], environment: Environment) -> None:
    """Raise UserError for a verifier that judges by a part of the reward which the environment does not give."""
    for verifier in verifiers:
        part = reward_part(verifier)
        if part is not None and part not in environment.rewards:
            known = ", ".join(environment.rewards) or "none, so that a verifier such as math is needed"
            raise UserError(f"--verifiers {verifier}: the parts that {environment.name} gives are {known}")


def environment_scores(verifier: str, played: Sequence[Played | None]) -> list[Score]:
    """Return what a verifier `agent:PART` makes of episodes: the part as it was earned."""
    part = reward_part(verifier)
    assert part is not None, f"{verifier} judges responses"
    scores = []
    for one in played:
        assert one is not None, "the checks ask for episodes"
        value = one.rewards[part]
        scores.append(Score(reward=value, score=value, parts={part: value}))
    return scores


def episode_of(played: Played) -> PlayedEpisode:
    """Return an episode as the file of responses holds it; its pictures are files by now."""
    return PlayedEpisode(
        end=played.end,
        turns=played.turns,
        shown_images=played.images,
        rewards=dict(played.rewards),
        counts=dict(played.counts),
        said=tuple(
            ShownTurn(
                role=one.role,
                text=one.text,
                images=tuple(part.source for part in one.images if isinstance(part.source, str)),
            )
            for one in played.said
        ),
    )
