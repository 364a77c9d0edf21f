"""The Ray actor around one vLLM engine: groups in, scored samples out, and its caches emptied with every update."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from lmm_r1 import cpu, loading
from lmm_r1.agents.environment import Episode
from lmm_r1.agents.openrlhf_agent import ExecutorAgent, load_agent
from lmm_r1.agents.registry import load_environment
from lmm_r1.config.checks import agent_options
from lmm_r1.config.ppo import AgentConfig, RewardConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.generation import media_store
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.engine_arguments import Guesses, guesses_so_far
from lmm_r1.generation.episodes import EpisodeRollout, episode_seed
from lmm_r1.generation.executors import ExecutorRollout
from lmm_r1.generation.group import GroupRollout, GroupSettings, Opening, RefusedPrompt, SampledGroup
from lmm_r1.generation.request import EngineWeights, tokens_under_way
from lmm_r1.generation.vllm_engine import InProcessEngine
from lmm_r1.generation.weight_bucket import WeightSlot
from lmm_r1.host.openrlhf_engines import RolloutRayActor
from lmm_r1.scoring.sources import make_scorer

if TYPE_CHECKING:
    from lmm_r1.generation.episodes import _Play


# Chance that the branches part before a turn where no turn is asked for.
PARTING = 0.5


@dataclass(kw_only=True)
class _Fork:
    """Where the branches of one trunk part."""

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
        """Play an episode, and let the others of its tree go on from where they part; it is itself one of them."""
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


# Threads that encode prompts and what environments show, on GPUs; each has a processor of its own.
ENCODERS = 4


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
            environment = load_environment(self.name, options=agent_options(self.settings))
            return BranchingRollout(environment=environment, limits=self.settings, **room)
        agent = load_agent(self.func_path)
        if isinstance(agent, ExecutorAgent):
            return ExecutorRollout(environment=agent, limits=self.settings, **room)
        return BranchingRollout(environment=agent, limits=self.settings, **room)


class KitRolloutActor(RolloutRayActor.__ray_metadata__.modified_class):
    """OpenRLHF's rollout actor with the prompt encoded once per group by the kit."""

    # Ray waits for it, as for OpenRLHF's own.
    async def __init__(  # type: ignore[misc]
        self,
        *,
        reward: RewardConfig | None,
        reward_function: Callable[..., Any] | None = None,
        agent: AgentSpec | None = None,
        beside_models: bool = False,
        **engine_arguments: Any,
    ) -> None:
        """Args: beside_models: it generates while models are trained."""
        self.llm: TokenEngine
        in_thread: Callable[..., Awaitable[Any]]
        loading.done()
        if beside_models:
            cpu.take_cores("engines")
        # Which updates of the run its weights have had.
        self.weights = EngineWeights()
        self.paused = False
        if cpu.engine_process():
            await super().__init__(**engine_arguments)
            in_thread = partial(asyncio.get_running_loop().run_in_executor, ThreadPoolExecutor(max_workers=ENCODERS))
        else:
            self.llm = engine = self._started_in_process(**engine_arguments)
            in_thread = engine.call
        codec = PromptCodec.of(
            engine_arguments["model"],
            trust_remote_code=engine_arguments["trust_remote_code"],
        )
        await self.llm.collective_rpc("ban_tokens", args=(codec.banned_token_ids,))
        room: dict[str, Any] = {
            "codec": codec,
            "scorer": None if reward is None else make_scorer(reward, given=reward_function),
            "in_thread": in_thread,
            "store": media_store.put,
            "weights": self.weights,
        }
        guesses = "speculative_config" in engine_arguments
        self.groups = GroupRollout(**room) if agent is None else agent.rollout(**room, guesses=guesses)

    def _started_in_process(
        self, *, num_gpus: float, full_determinism: bool, bundle_indices: list[int] | None, **arguments: Any
    ) -> InProcessEngine:
        """Return the engine that `AsyncLLM.from_engine_args` would build, in this process."""
        import vllm
        from packaging import version
        from vllm.v1.engine.llm_engine import LLMEngine

        self._configure_device_env(arguments["distributed_executor_backend"], bundle_indices, num_gpus)
        self._configure_vllm_env(version, vllm, full_determinism)
        make_engine = partial(LLMEngine.from_engine_args, vllm.AsyncEngineArgs(**arguments))
        return InProcessEngine(make_engine, own_thread=True)

    async def generate_group(self, row: Row, settings: GroupSettings) -> SampledGroup:
        """Return the scored samples of one prompt; see `GroupRollout.run`."""
        try:
            samples = await self.groups.run(self.llm, row, settings, weight_version=self.weights.version)
        except RefusedPrompt as error:
            return SampledGroup(samples=[], refused=str(error))
        if settings.pictures:
            samples = await self.groups.in_thread(media_store.put_pictures, samples)
        return SampledGroup(samples=samples)

    async def load_weights_from(self, folder: str) -> None:
        """Load new weights from files (machines without CUDA)."""
        await self.llm.collective_rpc("load_weights_from", args=(folder,))

    async def receive_bucket(self, slots: Sequence[WeightSlot]) -> None:
        """Load new weights that the trainer broadcasts."""
        await self.llm.collective_rpc("receive_bucket", args=(slots,))

    async def open_bucket(self, slots: Sequence[WeightSlot], handles: Mapping[str, bytes]) -> None:
        """Load new weights that the trainer holds on the same GPUs."""
        await self.llm.collective_rpc("open_bucket", args=(slots, handles))

    async def pause_generation(self) -> None:
        """Let every request wait where it is while the weights are replaced, until `resume_generation`."""
        self.paused = True
        await self.llm.pause_generation(mode="keep", clear_cache=False)

    async def resume_generation(self) -> None:
        """Let the requests go on: what they have read and written so far is computed again, with the new weights."""
        self.paused = False
        await self.llm.resume_generation()

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of the GPUs; requests that wait meanwhile begin anew from what they have written."""
        engine: Any = self.llm  # only on GPUs, and there vLLM's own
        # Its own mode is to abort.
        await engine.sleep(level=level, mode="keep" if self.paused else "abort")

    async def reset_caches(self, *, keep_images: bool) -> None:
        """Forget everything computed with the old weights, once per update: prefixes, image features, processed images.

        Stale image features are served silently on a GPU; a stale prefix is served silently everywhere.

        Args:
            keep_images: the update changed no weight that image features are made with.
        """
        if await self.llm.reset_prefix_cache(reset_running_requests=self.paused) is False:
            # vLLM warns of it in its log and goes on, with keys and values of the old weights.
            raise RuntimeError("the engine still had requests when its weights were replaced")
        if not keep_images:
            await self.llm.reset_encoder_cache()
        # Processed images, of which no weight is a part, stay in a pause: a request on its way to the engine may count on one.
        if not (keep_images or self.paused):
            await self.llm.reset_mm_cache()
        self.weights.replaced(tokens_under_way(self.llm) if self.paused else {})

    def guesses_so_far(self) -> Guesses:
        """Return how many tokens the engine has guessed ahead, and how many of them were taken."""
        return guesses_so_far()

    def set_weight_version(self, version: int) -> None:
        """Say how many updates the weights have had with which the run goes on."""
        self.weights.version = version


RolloutActor = ray.remote(KitRolloutActor)
