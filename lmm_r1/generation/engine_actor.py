"""The Ray actor around one vLLM engine: groups in, scored samples out, and its caches emptied with every update."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

from lmm_r1 import cpu, loading
from lmm_r1.agents.openrlhf_agent import ExecutorAgent, load_agent
from lmm_r1.agents.registry import load_environment
from lmm_r1.config.checks import agent_options
from lmm_r1.config.ppo import AgentConfig, RewardConfig
from lmm_r1.data.messages import Row
from lmm_r1.generation import media_store, picture_store
from lmm_r1.generation.branching import BranchingRollout
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.engine_weights import EngineWeights, tokens_under_way
from lmm_r1.generation.episodes import EpisodeRollout
from lmm_r1.generation.executors import ExecutorRollout
from lmm_r1.generation.group import GroupRollout, GroupSettings, RefusedPrompt, SampledGroup
from lmm_r1.generation.in_process_engine import InProcessEngine
from lmm_r1.generation.speculation import Guesses, guesses_so_far
from lmm_r1.generation.weight_bucket import WeightSlot
from lmm_r1.scoring.sources import make_scorer

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
            samples = await self.groups.in_thread(picture_store.put_pictures, samples)
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
