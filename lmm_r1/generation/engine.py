"""Settings, protocols and outcomes that all engines share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from lmm_r1 import quiet
from lmm_r1.config.declared import json_object
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.config.shared import Speculation
from lmm_r1.data.messages import ImagePart, Row
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import LmmKit, kit_of

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import RequestOutput

    from lmm_r1.agents.environment import Environment
    from lmm_r1.generation.episode_engine import EpisodeEngine


EngineDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How a checkpoint is loaded."""

    adapter: Path | None
    """A LoRA adapter that is merged into the checkpoint's weights."""
    dtype: EngineDtype
    max_model_len: int
    """Longest prompt and response together, in tokens; never more than the model takes."""
    max_images: int
    max_videos: int
    """Most images and videos in one prompt."""
    batch_rows: int
    """Rows in one batch of the transformers engine; vLLM makes its own."""
    tensor_parallel_size: int
    gpu_memory_utilization: float | None
    """None takes what the responses need, limited by the free memory."""
    enforce_eager: bool | None
    """Run vLLM without CUDA graphs; None depends on the size of the model."""
    seed: int
    trust_remote_code: bool
    speculation: Speculation | None = None
    """Speculative decoding of vLLM; None disables it."""
    responses: int = 256
    """Responses generated at a time: enough to keep the engine busy, few enough that rows end nearly in order."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How responses are sampled; temperature 0 takes the likeliest token."""

    n_samples: int
    temperature: float
    top_p: float
    max_new_tokens: int | None
    """None allows all tokens that the prompt leaves of the longest sequence."""
    top_k: int = -1
    """How many of the likeliest tokens are sampled from; -1 takes all."""
    seed: int | None = None
    """The same seed gives the same responses; None draws from the engine's own seed."""

    def greedy(self) -> SamplingSettings:
        """Return the settings of one greedy response."""
        return replace(self, n_samples=1, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """The environment that answers the turns of a checkpoint outside of training, and the limits of its episodes."""

    agent: str
    """The source that `load_environment` takes."""
    limits: AgentConfig
    seed: int
    """Seed of the sampling. The same seed gives the same turns, whatever else is running."""
    pictures: Literal["whole", "small"]
    """Whether the pictures shown by the environment are kept in full, with the prompt, or small, for people."""

    def environment(self) -> Environment:
        """Return the environment; raises UserError if it cannot be loaded."""
        from lmm_r1.agents.environment import load_environment

        return load_environment(self.agent, options=json_object(self.limits.options, flag="--agent_options"))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The completions of one row, or why it was refused."""

    index: int
    row: Row | None = None
    """None for a record that is not a row."""
    completions: tuple[Completion, ...] = ()
    reason: str | None = None
    """One sentence with the row's location; None if there are completions."""
    seconds: float = 0.0
    """From the request to the last completion."""

    def with_images(self, change: Callable[[ImagePart], ImagePart]) -> Outcome:
        """Return the outcome with each picture of its episodes changed."""
        completions = (
            one if one.played is None else replace(one, played=one.played.with_images(change))
            for one in self.completions
        )
        return replace(self, completions=tuple(completions))


class TokenEngine(Protocol):
    """A vLLM engine, in training and outside of it: `AsyncLLM` or `InProcessEngine`."""

    def generate(
        self, prompt: TokensPrompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request, according to its parameters' `output_kind`; leaving early aborts it."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every vLLM worker and return their results."""

    async def pause_generation(
        self, *, mode: Literal["keep"], wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Pause all requests."""

    async def resume_generation(self) -> None:
        """Resume the paused requests."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop the KV cache of earlier prompts; with `reset_running_requests` also of running ones, which are recomputed."""

    async def reset_encoder_cache(self) -> None:
        """Drop the features of images and videos."""

    async def reset_mm_cache(self) -> None:
        """Drop processed images and videos."""


class Responder(Protocol):
    """Generates responses to many rows, with one engine or several."""

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield the outcome of each (index, row), in the order in which they end; a bad row does not stop the others."""

    def close(self) -> None:
        """Free the memory."""


class Engine(Responder, Protocol):
    """One checkpoint in this process."""

    def stream(
        self, row: Row, sampling: SamplingSettings, *, on_text: Callable[[str], None], should_stop: Callable[[], bool]
    ) -> Completion:
        """Return one response, reporting its text as it grows; raises UserError for a row that the engine refuses."""


def outcomes_in(
    loop: asyncio.AbstractEventLoop,
    rows: Iterable[tuple[int, Row]],
    outcome_of: Callable[[int, Row], Coroutine[Any, Any, Outcome]],
    *,
    at_once: int,
) -> Iterator[Outcome]:
    """Yield the outcome of each (index, row), in the order in which they end, with `at_once` of them in progress.

    Those that end together keep their order. Leaving early cancels the others. Raises what `outcome_of` raises.
    """
    source = iter(rows)
    tasks: list[asyncio.Task[Any]] = []
    ends: set[asyncio.Task[Any]] = set()
    try:
        while True:
            while len(tasks) < at_once and (item := next(source, None)) is not None:
                tasks.append(loop.create_task(outcome_of(*item)))
            if not tasks:
                return
            first = loop.create_task(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
            ends = {first}
            done, _ = loop.run_until_complete(first)
            for task in [task for task in tasks if task in done]:
                tasks.remove(task)
                yield task.result()
    finally:
        # If several failed, one is reported. An interrupt leaves the last wait unfinished.
        end_tasks(loop, [*tasks, *ends])


def end_tasks(loop: asyncio.AbstractEventLoop, tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for them."""
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


Backend = Literal["vllm", "transformers"]
# Advice for kits without vLLM support.
FINE_TUNE = "it can be fine-tuned with lmm-r1 train_sft"
PLAIN_TRANSFORMERS = "generate through plain transformers (--eval_task generate, --backend transformers)"


def prepare_process() -> None:
    """Set the environment variables that vLLM and PyTorch read on import, for a process that runs engines itself."""
    # Otherwise torch prints remarks about thread binding between the lines of the command.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from lmm_r1 import cpu

    cpu.prepare_process()
    # A process of its own for the engine would import vLLM once more.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def check_backend(backend: Backend, kit: LmmKit, *, model: str, instead: str = PLAIN_TRANSFORMERS) -> None:
    """Raise UserError if the backend does not support the kit's models.

    Args:
        model: the flag and the path, for the message.
        instead: advice for the message.
    """
    if backend == "vllm" and kit.engine_refusal is not None:
        raise UserError(f"{model}: vLLM cannot generate with this architecture ({kit.engine_refusal}); {instead}")


def make_engine(backend: Backend, path: str, settings: EngineSettings) -> Engine:
    """Return the checkpoint's engine; raises UserError if this backend does not support it."""
    check_backend(backend, kit_of(path, trust_remote_code=settings.trust_remote_code), model=path)
    if backend == "vllm":
        from lmm_r1.generation.vllm_engine import VllmEngine

        quiet.done_loading()
        return VllmEngine(path, settings)
    from lmm_r1.generation.transformers_engine import TransformersEngine

    quiet.done_loading()
    return TransformersEngine(path, settings)


def playing(engine: Engine, episodes: EpisodeSettings | None) -> Responder:
    """Return an engine that plays episodes on another one, or that one if there are none to play; raises as `playing_engine`."""
    return engine if episodes is None else playing_engine(engine, episodes)


def playing_engine(engine: Engine, episodes: EpisodeSettings) -> EpisodeEngine:
    """Return an engine that plays episodes on another one.

    Raises UserError if the environment cannot be loaded, or the checkpoint's chat template has no turns.
    """
    from lmm_r1.generation.episode_engine import EpisodeEngine
    from lmm_r1.generation.vllm_engine import VllmEngine

    assert isinstance(engine, VllmEngine), "the commands take nothing else with episodes"
    try:
        return EpisodeEngine(engine, episodes)
    except BaseException:
        engine.close()
        raise


ADAPTER_FILE = "adapter_config.json"


def split_adapter(path: str, adapter: Path | None) -> tuple[str, Path | None]:
    """Return the base model and the adapter; the folder of an adapter names its base model itself.

    Raises UserError if the adapter names no base model, or if two adapters are given.
    """
    folder = Path(path)
    if not (folder / ADAPTER_FILE).is_file() or (folder / "config.json").is_file():
        return path, adapter
    if adapter is not None:
        raise UserError(
            f"{path} is an adapter, and --adapter {adapter} names another; give the base model and one of them"
        )
    from lmm_r1.checkpoints.merging import adapter_base

    base = adapter_base(folder)
    if base is None:
        raise UserError(
            f"{path}: this adapter does not name its base model; give the base model, and --adapter {path}"
        )
    return base, folder


@contextlib.contextmanager
def merged_checkpoint(path: str, settings: EngineSettings) -> Iterator[str]:
    """Give the checkpoint's own path, or a temporary folder with the adapter merged in."""
    if settings.adapter is None:
        yield path
        return
    from lmm_r1.checkpoints.merging import load_with_adapter, merge_adapter, write_checkpoint
    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.lmm_kits.checkpoint import torch_dtype

    trust_remote_code = settings.trust_remote_code
    checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
    dtype = torch_dtype(settings.dtype, config=checkpoint.config)
    with tempfile.TemporaryDirectory(prefix="lmm-r1-merged-") as temporary:
        folder = Path(temporary) / "model"
        model = load_with_adapter(path, settings.adapter, dtype=dtype, trust_remote_code=trust_remote_code)
        merge_adapter(model)
        kit, processor = checkpoint.kit, checkpoint.processor
        write_checkpoint(model, kit=kit, processor=processor, output=folder, dtype=dtype, max_shard_size="5GB")
        del model
        yield str(folder)
