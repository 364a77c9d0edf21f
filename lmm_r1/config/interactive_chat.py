"""Every flag of `lmm-r1 interactive_chat`, and which values they take."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmm_r1.config.checks import check_eager
from lmm_r1.config.episodes import EpisodeFlags, check_episodes
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable

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
