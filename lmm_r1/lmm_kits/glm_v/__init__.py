"""What the kits of GLM-4.1V to 4.6V share: M-RoPE like Qwen-VL's; each step of a video is an image, with its second behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import (
    Glm4vProcessor,
    Glm46VProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from lmm_r1.data.messages import Message, TextPart, VideoPart
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import chat_of, check_typed_media, load_image_processor
from lmm_r1.lmm_kits.kit import EncodedPrompt
from lmm_r1.lmm_kits.qwen_vl import IMAGE, VIDEO, QwenVlKit, check_marks
from lmm_r1.lmm_kits.qwen_vl.frames import bounded_steps, image_limits

END_OF_TURN = "<|user|>"
END_OF_ANSWER = "</answer>"
WRITTEN_ROLES = frozenset({"system", "user", "assistant"})
# Releases before GLM-4.6V have the first. They differ in how they write the seconds of a video: 4, or 4.0 seconds.
PROCESSORS = (Glm4vProcessor, Glm46VProcessor)


class GlmVKit(QwenVlKit):
    """A kit of the family states its classes, and what vLLM is told of its language model.

    The placeholders of a video are those of images, between two markers.
    """

    writes_thousandths = True
    spoken_tokens = ("<|begin_of_box|>", "<|end_of_box|>")
    engine_class: ClassVar[str]
    """The name under which `engine_plugin` has the class of `engine_model`."""
    engine_text_config: ClassVar[Mapping[str, Any]]
    """What vLLM asks of the language model's config that transformers' class does not have."""
    media_tokens = (
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|image|>",
        "<|video|>",
    )
    vision_prefixes = (
        "model.visual.embeddings.",
        "model.visual.patch_embed.",
        "model.visual.post_conv_layernorm.",
        "model.visual.blocks.",
        "model.visual.post_layernorm.",
    )
    projector_prefixes = ("model.visual.downsample.", "model.visual.merger.")

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> ProcessorMixin:
        """Load processor and tokenizer, whose end token is what stands behind an assistant's turn.

        The chat template has no end of a turn: the model ends its own with the token that opens the user's. Released
        tokenizers name `<|endoftext|>`, which ends a document.
        """
        processor = load_image_processor(path, processor_class=PROCESSORS, chat_template=chat_template)
        tokenizer, template = processor.tokenizer, str(processor.chat_template)
        if str(tokenizer.eos_token) not in template and END_OF_TURN in template:
            tokenizer.eos_token = END_OF_TURN
        return processor

    def chat_text(self, processor: ProcessorMixin, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return a conversation as the chat template writes it; raises UserError where it leaves out a message."""
        check_typed_media(messages, media_tokens=self.media_tokens)
        text = processor.apply_chat_template(
            [_with_one_text(turn) for turn in chat_of(messages)],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        check_marks(processor, text, messages)
        _check_roles(messages, text)
        end = processor.tokenizer.eos_token
        # A finished answer ends as it does where the user goes on.
        if not add_generation_prompt and messages[-1].role == "assistant" and not text.endswith(end):
            text += end
        return text

    def bounded_video(self, processor: ProcessorMixin, video: Video, part: VideoPart) -> Video:
        return bounded_steps(processor, video, part)

    def pixel_limits(self, processor: ProcessorMixin) -> tuple[int, int]:
        """Return half of what the processor's settings say, which counts an image as the two frames of a step."""
        lowest, highest = image_limits(processor)
        frames = processor.image_processor.temporal_patch_size
        return -(-lowest // frames), highest // frames

    def image_ends(self, config: PretrainedConfig) -> tuple[int, int]:
        return config.image_start_token_id, config.image_end_token_id

    def token_types(self, config: PretrainedConfig, token_ids: torch.Tensor) -> torch.Tensor:
        placeholders = token_ids == config.image_token_id
        opened = (token_ids == config.video_start_token_id).cumsum(-1)
        closed = (token_ids == config.video_end_token_id).cumsum(-1)
        types = torch.zeros_like(token_ids, dtype=torch.int32)
        types[placeholders & (opened == closed)] = IMAGE
        types[placeholders & (opened > closed)] = VIDEO
        return types

    def spoken_end_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Return the tag that ends an answer: one token, at which the release's generation config ends responses, too."""
        token = tokenizer.convert_tokens_to_ids(END_OF_ANSWER)
        return frozenset() if token is None or token == tokenizer.unk_token_id else frozenset({token})

    def grids_as_images(self, grids: torch.Tensor) -> torch.Tensor:
        """Return one grid for each step of each video (S, 3): the tower looks positions up image by image."""
        steps = grids.repeat_interleave(grids[:, 0], dim=0)
        steps[:, 0] = 1
        return steps

    def engine_arguments(self, config: PretrainedConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
        """Return vLLM's limits, and for rows with videos the class of `engine_model`, which takes several."""
        limits = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        overrides: dict[str, Any] = {"text_config": dict(self.engine_text_config)}
        if max_videos:
            overrides["architectures"] = [self.engine_class]
        return {**limits, "hf_overrides": overrides}

    def engine_media(self, encoded: EncodedPrompt) -> dict[str, list[Any]]:
        """Return images, and videos with their times, whose frames vLLM is to take as they are."""
        media = super().engine_media(encoded)
        if "video" in media:
            media["video"] = [(frames, {**times, "do_sample_frames": False}) for frames, times in media["video"]]
        return media


def _with_one_text(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join the texts of a turn: of several parts the released template writes Python's own form, but in the user's turns."""
    content = turn["content"]
    if isinstance(content, str) or any(part["type"] != "text" for part in content):
        return turn
    return {**turn, "content": "".join(part["text"] for part in content)}


def _check_roles(messages: Sequence[Message], text: str) -> None:
    """Raise UserError where the template passes over a message: the released one knows three roles."""
    for message in messages:
        parts = [part.text.strip() for part in message.parts if isinstance(part, TextPart)]
        if message.role not in WRITTEN_ROLES and not all(part in text for part in parts):
            raise UserError(
                f"the checkpoint's chat template does not write a message of the role {message.role}; give it the role "
                "user, or take the row out"
            )
