"""What every engine is: how it is loaded, what it is asked for, and how each row went."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
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
    """None is what its responses need, as far as it is free."""
    enforce_eager: bool | None
    """Run vLLM without CUDA graphs; None depends on the size of the model."""
    seed: int
    trust_remote_code: bool
    speculation: Speculation | None = None
    """How vLLM guesses tokens ahead; None where it does not."""
    responses: int = 256
    """That are under way together: enough to keep the engine busy, few enough that rows end nearly in order."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How responses are sampled; temperature 0 takes the likeliest token."""

    n_samples: int
    temperature: float
    top_p: float
    max_new_tokens: int | None
    """None: whatever the prompt leaves of the longest sequence."""
    top_k: int = -1
    """How many of the likeliest tokens are sampled from; -1 takes all."""
    seed: int | None = None
    """The same seed gives the same responses; None draws from the engine's own seed."""

    def greedy(self) -> SamplingSettings:
        """Return how the one response is generated that takes the likeliest token each time."""
        return replace(self, n_samples=1, temperature=0.0, top_p=1.0, top_k=-1)


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """Which environment answers the turns of a checkpoint outside of training, and how far its episodes go."""

    agent: str
    """As `load_environment` takes it."""
    limits: AgentConfig
    seed: int
    """Of the sampling: with it each turn is drawn alike again, whatever is played beside it."""
    pictures: Literal["whole", "small"]
    """How the pictures come along that an environment has shown: as they are, with the prompt, or small, to look at."""

    def environment(self) -> Environment:
        """Return the environment; raises UserError where it cannot be had."""
        from lmm_r1.agents.registry import load_environment

        return load_environment(self.agent, options=json_object(self.limits.options, flag="--agent_options"))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one row went: its completions, or why it could not be taken."""

    index: int
    row: Row | None = None
    """None for a record that is no row."""
    completions: tuple[Completion, ...] = ()
    reason: str | None = None
    """One sentence with the row's place; None where there are completions."""
    seconds: float = 0.0
    """From the moment the engine got the prompt to its last completion."""

    def with_images(self, change: Callable[[ImagePart], ImagePart]) -> Outcome:
        """Return it with each picture changed that its episodes have shown."""
        completions = (
            one if one.played is None else replace(one, played=one.played.with_images(change))
            for one in self.completions
        )
        return replace(self, completions=tuple(completions))


class TokenEngine(Protocol):
    """A vLLM engine as it is used in training and outside of it: `AsyncLLM`, or `InProcessEngine`."""

    def generate(
        self, prompt: TokensPrompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield what comes of a request, as its parameters' `output_kind` asks for; leaving early aborts it."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every vLLM worker and return their results."""

    async def pause_generation(
        self, *, mode: Literal["keep"], wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Let every request wait where it is."""

    async def resume_generation(self) -> None:
        """Let the requests go on that wait."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the keys and values of earlier prompts; those of running requests too, which are computed again."""

    async def reset_encoder_cache(self) -> None:
        """Forget the features of images and videos."""

    async def reset_mm_cache(self) -> None:
        """Forget processed images and videos."""


class Responder(Protocol):
    """Generates responses to many rows, with one engine or several."""

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield how each (index, row) went, in the order in which they end; one bad row stops no other."""

    def close(self) -> None:
        """Free the memory for what comes next."""


class Engine(Responder, Protocol):
    """One checkpoint in this process."""

    def stream(
        self, row: Row, sampling: SamplingSettings, *, on_text: Callable[[str], None], should_stop: Callable[[], bool]
    ) -> Completion:
        """Return one response, handing on its text as it grows; raises UserError for a row that cannot be taken."""


Backend = Literal["vllm", "transformers"]
# What can be done with a kit that vLLM does not have.
FINE_TUNE = "it can be fine-tuned with lmm-r1 train_sft"
PLAIN_TRANSFORMERS = "generate through plain transformers (--eval_task generate, --backend transformers)"


def prepare_process() -> None:
    """Set what vLLM and PyTorch read when they are imported; for a process that runs engines itself."""
    # What torch says of thread binding would stand between the lines of the command.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from lmm_r1 import cpu

    cpu.prepare_process()
    # No process of its own for the engine, which would import vLLM once more.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def check_backend(backend: Backend, kit: LmmKit, *, model: str, instead: str = PLAIN_TRANSFORMERS) -> None:
    """Raise UserError where the backend has no class for the kit's models.

    Args:
        model: the flag and the path, for the message.
        instead: what can be done, for the message.
    """
    if backend == "vllm" and kit.engine_refusal is not None:
        raise UserError(f"{model}: vLLM cannot generate with this architecture ({kit.engine_refusal}); {instead}")


def make_engine(backend: Backend, path: str, settings: EngineSettings) -> Engine:
    """Return the checkpoint's engine; raises UserError where it cannot be had in this backend."""
    check_backend(backend, kit_of(path, trust_remote_code=settings.trust_remote_code), model=path)
    if backend == "vllm":
        from lmm_r1.generation.vllm_engine import VllmEngine

        quiet.done_loading()
        return VllmEngine(path, settings)
    from lmm_r1.generation.transformers_engine import TransformersEngine

    quiet.done_loading()
    return TransformersEngine(path, settings)


def playing(engine: Engine, episodes: EpisodeSettings | None) -> Responder:
    """Return an engine that plays episodes on another one, or that one where there are none to play; raises as `playing_engine`."""
    return engine if episodes is None else playing_engine(engine, episodes)


def playing_engine(engine: Engine, episodes: EpisodeSettings) -> EpisodeEngine:
    """Return an engine that plays episodes on another one.

    Raises UserError where the environment cannot be had, or the checkpoint's chat template knows no turns.
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
    """Return the base model and the adapter of what was given: a folder that is an adapter names its base itself.

    Raises UserError for an adapter that names none, and where two adapters are given.
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
            f"{path}: this adapter does not name its base model; give the model, and this as --adapter {path}"
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
