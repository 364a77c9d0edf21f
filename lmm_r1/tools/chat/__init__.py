"""The checkpoint of a chat: its engine, and the limits of a conversation with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmm_r1.config.generation import LONGEST_CONVERSATION, ChatConfig, ConversationFlags, episode_limits
from lmm_r1.data.messages import Message, images_of, videos_of
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Engine, EngineSettings, EpisodeSettings

if TYPE_CHECKING:
    from lmm_r1.generation.episode_engine import EpisodeEngine
    from lmm_r1.lmm_kits import Checkpoint


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    engine: Engine
    name: str
    max_images: int
    max_videos: int
    episodes: EpisodeEngine | None = None

    def check_media(self, messages: Sequence[Message], *, more_images: int = 0, more_videos: int = 0) -> None:
        """Raise UserError if a conversation with this many more images or videos could not be answered."""
        images, videos = len(images_of(messages)) + more_images, len(videos_of(messages)) + more_videos
        for kind, count, most in (("image", images, self.max_images), ("video", videos, self.max_videos)):
            if count > most:
                raise UserError(
                    f"{count} {kind}s in the conversation: {self.name} takes {most} here; see --max_{kind}s, and lmm-r1 "
                    "kits for what models take, or start over with /reset"
                )


def model_name(config: ConversationFlags) -> str:
    return config.model if config.adapter is None else f"{config.model} + {config.adapter}"


def engine_settings(config: ConversationFlags, *, responses: int = 1) -> tuple[Checkpoint, EngineSettings]:
    """Return the checkpoint, and how it is loaded for this many responses at a time; raises UserError if it cannot be."""
    from lmm_r1.generation.engine import prepare_process, split_adapter

    # Before transformers is imported, whose torchvision has no CPU build.
    prepare_process()
    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.lmm_kits.checkpoint import check_embeddings, check_weights
    from lmm_r1.models.rope_scaling import short_length

    path, adapter = split_adapter(config.model, config.adapter)
    checkpoint = Checkpoint(path, trust_remote_code=config.trust_remote_code)
    kit = checkpoint.kit
    check_weights(path)
    check_embeddings(checkpoint)
    shown = config.agent_max_images if isinstance(config, ChatConfig) and config.agent is not None else 0
    return checkpoint, EngineSettings(
        adapter=adapter,
        dtype=config.dtype,
        # By default, within what longrope covers by its short factors.
        max_model_len=config.max_model_len
        or min(LONGEST_CONVERSATION, short_length(checkpoint.config) or LONGEST_CONVERSATION),
        max_images=config.max_images + shown if kit.takes_images else 0,
        max_videos=config.max_videos if kit.takes_videos else 0,
        batch_rows=1,
        tensor_parallel_size=config.tensor_parallel_size,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        seed=config.seed,
        trust_remote_code=config.trust_remote_code,
        responses=responses,
    )


def load_model(config: ChatConfig) -> ChatModel:
    """Load the checkpoint; raises UserError if that fails, before the engine starts if possible."""
    from lmm_r1.generation.engine import make_engine, playing_engine

    checkpoint, settings = engine_settings(config)
    kit = checkpoint.kit
    episodes = None
    if config.agent is not None:
        limits = episode_limits(config)
        episodes = EpisodeSettings(agent=config.agent, limits=limits, seed=config.seed, pictures="whole")
        # Check the environment before loading the engine, which takes long.
        episodes.environment()
    engine = make_engine(config.backend, checkpoint.path, settings)
    return ChatModel(
        engine=engine,
        episodes=None if episodes is None else playing_engine(engine, episodes),
        name=model_name(config),
        max_images=config.max_images if kit.takes_images else 0,
        max_videos=settings.max_videos,
    )
