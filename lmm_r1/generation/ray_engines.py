"""The engines of a run, in Ray actors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from lmm_r1 import cpu, dotted, quiet
from lmm_r1.cluster.nodes import Reservation, reserve
from lmm_r1.config import PPOConfig
from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.resolve import UNPLANNED
from lmm_r1.config.rewards import GivenFunctions
from lmm_r1.data.messages import Row
from lmm_r1.generation import media_store
from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.engine_arguments import Guesses, engine_arguments, guesses_so_far
from lmm_r1.generation.executors import AgentSpec
from lmm_r1.generation.group import GroupRollout, GroupSettings, RefusedPrompt, SampledGroup
from lmm_r1.generation.request import EngineWeights, PromptCodec, tokens_under_way
from lmm_r1.generation.weight_bucket import WeightSlot
from lmm_r1.host.openrlhf import RolloutRayActor
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.scoring.sources import make_scorer

if TYPE_CHECKING:
    from lmm_r1.generation.vllm_engine import InProcessEngine

logger = logging.getLogger(__name__)
# Threads that encode prompts and environments' answers on GPUs; each has its own processor.
ENCODERS = 4


class KitRolloutActor(RolloutRayActor.__ray_metadata__.modified_class):
    """OpenRLHF's rollout actor with the prompt encoded once per group by the kit."""

    # Ray waits for it, as for OpenRLHF's own.
    async def __init__(  # type: ignore[misc]
        self,
        *,
        reward: RewardConfig | None,
        functions: GivenFunctions | None = None,
        agent: AgentSpec | None = None,
        temperature: float = 1.0,
        **engine_arguments: Any,
    ) -> None:
        """Args:
        temperature: the policy's temperature, at which log-probs are reported.
        """
        self.llm: TokenEngine
        in_thread: Callable[..., Awaitable[Any]]
        quiet.done_loading()
        # The number of updates that its weights have had.
        self.weights = EngineWeights()
        self.paused = False
        if cpu.engine_process():
            await super().__init__(**engine_arguments)
            in_thread = partial(asyncio.get_running_loop().run_in_executor, ThreadPoolExecutor(max_workers=ENCODERS))
        else:
            self.llm = engine = self._started_in_process(**engine_arguments)
            in_thread = engine.call
        codec = PromptCodec.of(engine_arguments["model"], trust_remote_code=engine_arguments["trust_remote_code"])
        await self.llm.collective_rpc("ban_tokens", args=(codec.banned_token_ids, temperature))
        room: dict[str, Any] = {
            "codec": codec,
            "scorer": None if reward is None else make_scorer(reward, given=functions),
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

        from lmm_r1.generation.vllm_engine import InProcessEngine

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
        """Pause all requests while the weights are replaced, until `resume_generation`."""
        self.paused = True
        await self.llm.pause_generation(mode="keep", clear_cache=False)

    async def resume_generation(self) -> None:
        """Resume the requests; their tokens so far are recomputed with the new weights."""
        self.paused = False
        await self.llm.resume_generation()

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of the GPUs; paused requests later recompute their tokens so far."""
        engine: Any = self.llm  # only on GPUs, and there vLLM's own
        # vLLM's default mode aborts requests.
        await engine.sleep(level=level, mode="keep" if self.paused else "abort")

    async def reset_caches(self, *, keep_images: bool) -> None:
        """Drop everything computed with the old weights, once per update: prefixes, image features, processed images.

        Stale image features are served silently on a GPU; a stale prefix is served silently everywhere.

        Args:
            keep_images: whether the update left the weights that compute image features unchanged.
        """
        if await self.llm.reset_prefix_cache(reset_running_requests=self.paused) is False:
            # vLLM only logs a warning and continues with keys and values of the old weights.
            raise RuntimeError("the engine still had requests when its weights were replaced")
        if not keep_images:
            await self.llm.reset_encoder_cache()
        # In a pause, keep processed images, which no weight affects: a request on its way to the engine may need one.
        if not (keep_images or self.paused):
            await self.llm.reset_mm_cache()
        self.weights.replaced(tokens_under_way(self.llm) if self.paused else {})

    def guesses_so_far(self) -> Guesses:
        """Return how many tokens the engine has drafted, and how many of them were accepted."""
        return guesses_so_far()

    def set_weight_version(self, version: int) -> None:
        """Set the number of updates that the weights of a resumed run have had."""
        self.weights.version = version


RolloutActor = ray.remote(KitRolloutActor)


ENGINE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# GPU share of an engine, and of a model's worker, if they share a GPU.
COLOCATED_SHARE = 0.2


def create_engines(
    config: PPOConfig,
    *,
    shared: Reservation | None,
    max_images: int,
    max_videos: int,
    reward: GivenFunctions | None = None,
) -> list[Any]:
    """Start `--vllm.num_engines` engine actors, in `shared` or on their own GPUs, and return their handles.

    Args:
        reward: the reward functions that are not in a file; Ray sends them.
    """
    tensor_parallel = config.vllm.tensor_parallel_size
    gpus = shared or reserve(config.vllm.gpus)
    share = COLOCATED_SHARE if shared is not None else 1
    # With tensor parallelism the actor itself holds no GPU: vLLM's own Ray workers do.
    actor_share = share if tensor_parallel == 1 else 0
    arguments = _engine_arguments(config, share=share, max_images=max_images, max_videos=max_videos)
    arguments["functions"] = reward
    engines = []
    for index in range(config.vllm.engines):
        first = index * tensor_parallel
        bundles = list(gpus.bundles[first : first + tensor_parallel]) if tensor_parallel > 1 else None
        placement = gpus.place(first, placement_group_capture_child_tasks=True)
        options = {"num_cpus": actor_share, "num_gpus": actor_share, "scheduling_strategy": placement}
        engines.append(
            RolloutActor.options(**options).remote(**arguments, bundle_indices=bundles, seed=config.train.seed + index)
        )
    return engines


def without_sleep(config: PPOConfig) -> PPOConfig:
    """Return the configuration without `--vllm.enable_sleep` if there is no CUDA, where vLLM refuses it.

    Without CUDA the memory share is not planned either: it applies to the host's memory, of which engines need little.
    """
    if cpu.has_cuda():
        return config
    if config.vllm.enable_sleep:
        logger.warning("--vllm.enable_sleep is off: without CUDA there is no GPU memory to free")
    settings: dict[str, object] = {"vllm.enable_sleep": False}
    if config.vllm.gpu_memory_utilization is None:
        settings["vllm.gpu_memory_utilization"] = UNPLANNED["vllm.gpu_memory_utilization"]
    return dotted.replace(config, settings)


def settle_engines(config: PPOConfig, engines: Sequence[Any]) -> None:
    """Wait until all engines are ready, and put them to sleep if enabled, before models are loaded on their GPUs.

    A starting engine measures the free memory, and vLLM asserts that no other process frees any in the meantime.
    """
    # Answered after the constructor, which loads the model and sets up the cache.
    ray.get([engine.__ray_ready__.remote() for engine in engines])
    if config.vllm.enable_sleep:
        ray.get([engine.sleep.remote() for engine in engines])


def _engine_arguments(config: PPOConfig, *, share: float, max_images: int, max_videos: int) -> dict[str, object]:
    path, trust_remote_code = config.actor.model_name_or_path, config.train.trust_remote_code
    assert path is not None, "resolve_ppo requires it"
    assert config.ds.param_dtype is not None, "resolve_ppo fills it in"
    assert config.vllm.gpu_memory_utilization is not None, "chosen by the plan"
    checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
    train = config.train
    return {
        **engine_arguments(
            path,
            kit=checkpoint.kit,
            config=checkpoint.config,
            trust_remote_code=trust_remote_code,
            dtype=ENGINE_DTYPES[config.ds.param_dtype],
            max_model_len=config.data.max_len,
            max_images=max_images,
            max_videos=max_videos,
            tensor_parallel_size=config.vllm.tensor_parallel_size,
            gpu_memory_utilization=config.vllm.gpu_memory_utilization,
            enforce_eager=config.vllm.enforce_eager,
            speculation=config.vllm.speculation,
        ),
        "enable_prefix_caching": config.vllm.enable_prefix_caching,
        "enable_sleep_mode": bool(config.vllm.enable_sleep),
        "distributed_executor_backend": "uni" if config.vllm.tensor_parallel_size == 1 else "ray",
        # Only its name: the module loads vLLM's engine, which the driver does not need.
        "worker_extension_cls": f"lmm_r1.generation.worker_extension.{'Bucket' if cpu.has_cuda() else 'File'}Weights",
        # Log-probs of the policy as the trainer computes them, before top_p and top_k.
        "logprobs_mode": "raw_logprobs",
        "temperature": config.rollout.temperature,
        "max_logprobs": 1,
        "num_gpus": share,
        "full_determinism": config.train.full_determinism_enable,
        "reward": config.reward if config.reward.remote_url else None,
        "agent": (
            AgentSpec(name=train.agent, func_path=train.agent_func_path, settings=config.agent)
            if train.plays
            else None
        ),
    }
