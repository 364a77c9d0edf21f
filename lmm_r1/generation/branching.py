"""Episodes of a group that have their first turns in common, and what plays the episodes of a run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmm_r1.agents.environment import Episode
from lmm_r1.agents.openrlhf_agent import ExecutorAgent, load_agent
from lmm_r1.agents.registry import load_environment
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

# Chance that the branches part before a turn where no turn is asked for.
PARTING = 0.5


@dataclass(kw_only=True)
class _Fork:
    """The point at which the branches of a trunk diverge."""

    passed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the branches have parted, or the trunk has ended before."""
    copies: list[tuple[Episode | None, _Play]] = field(default_factory=list)
    """What the other branches go on from, until they take it; stays empty where the trunk ends before."""


class BranchingRollout(EpisodeRollout):
    """Generates groups of episodes of which `GroupSettings.branches` at a time have their first turns in common.

    What they have in common are the same ids, segments and media. Where a trunk ends before its branches part, the
    others are played from the prompt on, so that a group is always whole.
    """

    async def sampled(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings
    ) -> AsyncGenerator[Sample, None]:
        """Yield the group's episodes, without rewards, as they end; raises UserError also where one cannot be copied."""
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
        """Play an episode, and start the other branches of its tree where they diverge; it is one of them."""
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
        except Exception as error:  # the user's own code, and what `copy` meets in it, which may raise anything
            raise UserError(
                f"{self._place_of(opening.row)}: its episodes cannot branch, as one cannot be copied ({error}); give them a "
                "method `branch` that returns a copy, or leave --agent.branches out"
            ) from error


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """Which environment answers the policy's turns, and how far its episodes go."""

    name: str | None
    """As `--train.agent` has it; None where there is a file in OpenRLHF's form."""
    func_path: str | None = None
    """As `--train.agent_func_path` has it."""
    settings: AgentConfig

    def rollout(self, **room: Any) -> EpisodeRollout:
        """Return what plays its episodes; raises UserError where the environment cannot be made.

        Args:
            room: what a `GroupRollout` takes.
        """
        if self.func_path is None:
            assert self.name is not None, "one of the two is given"
            environment = load_environment(
                self.name, options=json_object(self.settings.options, flag="--agent.options")
            )
            return BranchingRollout(environment=environment, limits=self.settings, **room)
        agent = load_agent(self.func_path)
        if isinstance(agent, ExecutorAgent):
            return ExecutorRollout(environment=agent, limits=self.settings, **room)
        return BranchingRollout(environment=agent, limits=self.settings, **room)
