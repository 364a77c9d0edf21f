"""A checkpoint as a command names it, its parts loaded on demand, and dataset rows as its kit takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmm_r1.config.shared import RowReadingConfig
from lmm_r1.data.images import image_size, load_image
from lmm_r1.data.messages import ImagePart, Row, TextPart, VideoPart, images_of, videos_of
from lmm_r1.data.videos import DEFAULT_FPS, Video, load_video, video_size
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import chat_ids, placed
from lmm_r1.lmm_kits.kit import Config, EncodedPrompt, LmmKit, Processor
from lmm_r1.lmm_kits.plain_text import as_plain_prompt, text_ids
from lmm_r1.lmm_kits.registry import kit_of

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lmm_r1.data.videos import Video

# Added to the logits of banned tokens by the model that is trained, where engines have minus infinity: at every
# temperature the exponential of both is 0, and products with it stay numbers.
BAN_BIAS = -1e9


@dataclass(frozen=True)
class Checkpoint:
    """A folder or a hub name; each part is loaded when it is first asked for, and kept.

    Every part raises UserError where the checkpoint does not have it.
    """

    path: str
    trust_remote_code: bool = False
    chat_template: str | None = None
    """Takes the place of its own."""

    @cached_property
    def kit(self) -> LmmKit:
        return kit_of(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def config(self) -> Config:
        return self.kit.load_config(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def processor(self) -> Processor:
        if self.chat_template is None:
            return self.kit.load_processor(self.path, trust_remote_code=self.trust_remote_code)
        return self.kit.load_processor(
            self.path, trust_remote_code=self.trust_remote_code, chat_template=self.chat_template
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.kit.tokenizer_of(self.processor)

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """The ids that must never be sampled, sorted."""
        return self.kit.banned_token_ids(self.config, self.tokenizer)

    def load_model(self, *, dtype: torch.dtype, attn_implementation: str, **kwargs: Any) -> PreTrainedModel:
        """Load the model, which is not kept; `kwargs` go to `from_pretrained`."""
        return self.kit.load_model(
            self.path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=self.trust_remote_code,
            **kwargs,
        )


def encode_row(row: Row, *, kit: LmmKit, processor: Any, add_generation_prompt: bool) -> EncodedPrompt:
    """Return the row's encoded messages; raises UserError, with the row's place, for media that cannot be taken.

    With a generation prompt, what the row says that a response begins with stands behind it.
    """
    if row.plain:
        token_ids = [token for part in plain_ids(row, kit=kit, processor=processor) for token in part]
        return EncodedPrompt.of_text(token_ids)
    images, videos = _media_of(row)
    with placed(row.location):
        encoded = kit.encode(
            processor, row.messages, images=images, videos=videos, add_generation_prompt=add_generation_prompt
        )
        if add_generation_prompt and row.prefill:
            encoded = _begun(encoded, row.prefill, kit=kit, processor=processor)
    if images:
        scales = kit.image_scales(processor, encoded, sizes=[image.size for image in images])
        encoded = replace(encoded, image_scales=scales)
    return encoded


def outlined_row(row: Row, *, kit: LmmKit, processor: Any, add_generation_prompt: bool) -> EncodedPrompt:
    """Return what `encode_row` does without reading any pixels: its ids have one placeholder per image and video.

    Raises what `encode_row` does for a conversation that the chat template or the kit refuses, and for media that are
    missing or of a size that the processor refuses. What only decoding shows stays for `encode_row`.
    """
    if row.plain:
        return encode_row(row, kit=kit, processor=processor, add_generation_prompt=add_generation_prompt)
    for image in images_of(row.messages):
        _check_size(image, image_size(image, location=row.location), row, kit=kit, processor=processor)
    videos = []
    for video in videos_of(row.messages):
        size = video_size(video, location=row.location)
        _check_size(video, size, row, kit=kit, processor=processor)
        videos.append(_blank_video(size or (1, 1)))
    with placed(row.location):
        ids = kit.render(processor, row.messages, add_generation_prompt=add_generation_prompt, videos=videos)
        outline = replace(EncodedPrompt.of_text(ids), videos=videos)
        if add_generation_prompt and row.prefill:
            outline = _begun(outline, row.prefill, kit=kit, processor=processor)
    return outline


def _check_size(
    part: ImagePart | VideoPart, size: tuple[int, int] | None, row: Row, *, kit: LmmKit, processor: Any
) -> None:
    if size is not None:
        with placed(row.location):
            kit.check_size(processor, part, width=size[0], height=size[1])


def _blank_video(size: tuple[int, int]) -> Video:
    """Return two black frames, which take no memory; a template that writes times needs some."""
    import numpy as np

    width, height = size
    return Video(frames=np.broadcast_to(np.uint8(0), (2, height, width, 3)), fps=DEFAULT_FPS)


def bordered_ids(row: Row, *, kit: LmmKit, processor: Any) -> tuple[list[int], int]:
    """Return a conversation's ids with borders at the texts of turns with media, and the border's id.

    Raises what `encode_row` raises.
    """
    images, videos = _media_of(row)
    return kit.encode_bordered(processor, row.messages, images=images, videos=videos)


def _media_of(row: Row) -> tuple[list[Image.Image], list[Video]]:
    images = [load_image(part, location=row.location) for part in images_of(row.messages)]
    return images, [load_video(part, location=row.location) for part in videos_of(row.messages)]


def _begun(encoded: EncodedPrompt, prefill: str, *, kit: LmmKit, processor: Any) -> EncodedPrompt:
    """Return the prompt with the beginning of the response behind it, as if the model had written it."""
    ids = text_ids(kit, processor, prefill)
    return replace(encoded, token_ids=[*encoded.token_ids, *ids], engine_token_ids=[*encoded.engine_token_ids, *ids])


def check_pixel_bounds(rows: RowReadingConfig, checkpoint: Checkpoint, *, model: str, prefix: str = "--") -> None:
    """Raise UserError for a bound on the pixels of images that the model's processor cannot keep to.

    Args:
        rows: the flags, of which `prefix` stands in front.
        model: the flag that names the checkpoint, with its value.
    """
    given = {name: bound for name in ("min_pixels", "max_pixels") if (bound := getattr(rows, name)) is not None}
    if not given:
        return
    limits = checkpoint.kit.pixel_limits(checkpoint.processor)
    for name, bound in given.items():
        if limits is None:
            raise UserError(
                f"{prefix}{name} {bound}: {model} is a {checkpoint.kit.model_type}, which leaves no choice of the size "
                "of an image; leave it out"
            )
        if not limits[0] <= bound <= limits[1]:
            raise UserError(
                f"{prefix}{name} {bound} is not within {limits[0]} and {limits[1]}, the bounds that the image processor "
                f"of {model} has itself"
            )


def plain_ids(row: Row, *, kit: LmmKit, processor: Any) -> list[list[int]]:
    """Return the ids of each message of a plain row: those of a response end with the end token.

    Texts are tokenized one by one, so that a prompt has the ids that it has when the model is to continue it.
    Raises UserError, with the row's place, for a text that holds a media token.
    """
    tokenizer = kit.tokenizer_of(processor)
    parts = []
    for message in row.messages:
        if message.role == "assistant":
            text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
            parts.append([*text_ids(kit, processor, text), tokenizer.eos_token_id])
        else:
            reading, text = as_plain_prompt(kit, processor, message)
            parts.append(list(chat_ids(kit.tokenizer_of(reading), text)))
    if not kit.placeholder_ids(processor).isdisjoint(token for part in parts for token in part):
        raise UserError(f"{row.location}: the text holds a media token; take it out of the row")
    return parts


def check_images_taken(rows: Sequence[Row], *, kit: LmmKit, model: str) -> None:
    """Raise UserError at the first row with an image or a video that the kit's models cannot take."""
    for row in rows:
        if images_of(row.messages) and not kit.takes_images:
            raise UserError(
                f"{row.location}: the row has an image, but {model} is a plain language model; "
                "give a multimodal model or leave such rows out"
            )
        if videos_of(row.messages) and not kit.takes_videos:
            raise UserError(
                f"{row.location}: the row has a video, but {model} takes none; "
                "give a model that does (lmm-r1 kits lists them), or leave such rows out"
            )
