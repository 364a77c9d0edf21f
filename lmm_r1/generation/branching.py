"""Episodes of a group that share their first turns, and the rollout of a run's episodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmm_r1.agents.environment import Episode, load_environment
from lmm_r1.agents.openrlhf_agent import ExecutorAgent, load_agent
from lmm_r1.config.declared import json_object
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.episodes import EpisodeRollout, episode_seed
from lmm_r1.generation.executors import ExecutorRollout
from lmm_r1.generation.group import GroupSettings, Opening

if TYPE_CHECKING:
    from lmm_r1.generation.episodes import _Play

# Probability that branches diverge before a turn, if no turn is given.
PARTING = 0.5


@dataclass(kw_only=True)
class _Fork:
    """The point at which the branches of a trunk diverge."""

    passed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the branches have diverged, or the trunk has ended."""
    copies: list[tuple[Episode | None, _Play]] = field(default_factory=list)
    """States from which the other branches continue; empty if the trunk ended before the fork."""


class BranchingRollout(EpisodeRollout):
    """Generates groups in which `GroupSettings.branches` episodes at a time share their first turns.

    Shared turns are the same ids, segments and media. If a trunk ends before its branches diverge, the others are played
    from the prompt, so that a group is always complete.
    """

    async def sampled(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings
    ) -> AsyncGenerator[Sample, None]:
        """Yield the group's episodes, without rewards, as they end; raises UserError also if one cannot be copied."""
        if settings.branches == 1:
            async with aclosing(super().sampled(engine, opening, settings)) as samples:
                async for sample in samples:
                    yield sample
            return
        count, branches = settings.sampling.n_samples, settings.branches
        forks = [_Fork() for _ in range(0, count, branches)]
        tasks = []
        for number in range(count):
            goes_on = self._branch if number % branches else self._trunk
            made = goes_on(engine, opening, settings, number=number, fork=forks[number // branches])
            tasks.append(asyncio.create_task(made))
        try:
            async with aclosing(self._as_they_end(tasks)) as samples:
                async for sample in samples:
                    yield sample
        finally:
            for fork in forks:
                for episode, played in fork.copies:
                    await self._closed(episode, played)

    async def _trunk(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings, *, number: int, fork: _Fork
    ) -> Sample:
        """Play one branch, and start the other branches of its tree where they diverge."""
        seed = episode_seed(opening, settings, number=number)
        draw = random.Random(seed)
        episode, play = self._begun(opening, seed=seed, number=number)

        def part() -> None:
            if fork.passed.is_set() or not self._part_before(play.turns, draw):
                return
            for _ in range(settings.branches - 1):
                fork.copies.append((self._copied(episode, opening), play.branched()))
            fork.passed.set()

        try:
            return await self._played(engine, episode, play, settings, before_turn=part)
        finally:
            fork.passed.set()

    async def _branch(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings, *, number: int, fork: _Fork
    ) -> Sample:
        await fork.passed.wait()
        if not fork.copies:
            return await self._episode(engine, opening, settings, number=number)
        episode, play = fork.copies.pop()
        play.number = number
        return await self._played(engine, episode, play, settings)

    def _part_before(self, turn: int, draw: random.Random) -> bool:
        if self.limits.branch_turn is not None:
            return turn == self.limits.branch_turn
        return turn > 0 and (turn == self.limits.max_turns - 1 or draw.random() < PARTING)

    def _copied(self, episode: Episode | None, opening: Opening) -> Episode | None:
        try:
            return None if episode is None else episode.branch()
        except Exception as error:  # the user's own code, which may raise anything
            raise UserError(
                f"{self._place_of(opening.row)}: its episodes cannot branch, because they cannot be copied ({error}); give them a "
                "method `branch` that returns a copy, or leave --agent.branches out"
            ) from error


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """What plays the episodes of a run."""

    name: str | None
    """`--train.agent`; None for a file in OpenRLHF's form."""
    func_path: str | None
    """`--train.agent_func_path`."""
    settings: AgentConfig

    def rollout(self, **group: Any) -> EpisodeRollout:
        """Return the rollout of its episodes, with the arguments of a `GroupRollout`; raises UserError if it cannot be made."""
        if self.func_path is None:
            assert self.name is not None, "one of the two is given"
            options = json_object(self.settings.options, flag="--agent.options")
            environment = load_environment(self.name, options=options)
            return BranchingRollout(environment=environment, limits=self.settings, **group)
        agent = load_agent(self.func_path)
        if isinstance(agent, ExecutorAgent):
            return ExecutorRollout(environment=agent, limits=self.settings, **group)
        return BranchingRollout(environment=agent, limits=self.settings, **group)
