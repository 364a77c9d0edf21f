"""The OpenAI chat API's side of a row and of a response."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart, check_asks, videos_of
from lmm_r1.data.sample import Completion, FinishReason
from lmm_r1.errors import UserError

FINISH_REASONS: dict[object, FinishReason] = {"stop": "stop", "eos_token": "stop", "length": "length"}


def openai_messages(row: Row) -> list[dict[str, Any]]:
    """Return a row's messages with its images as PNG data URLs: the pixels that an engine in this process would see.

    Raises:
        UserError: an image cannot be read, or the row holds what the API has no form for.
    """
    if videos_of(row.messages):
        raise UserError(f"{row.location}: the row has a video, and an endpoint takes text and images only")
    if row.prefill:
        raise UserError(
            f"{row.location}: every response begins with the row's prefill, which an endpoint cannot go on from"
        )
    check_asks(row)
    return [{"role": message.role, "content": _content(message, location=row.location)} for message in row.messages]


def completion_of(choice: object, *, num_tokens: int | None, location: str) -> Completion:
    """Return one of a reply's choices as a response.

    Raises:
        UserError: it is none, or it ended in a way that says nothing of the model, through a content filter for instance.
    """
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise UserError(f"{location}: the endpoint's reply has a choice without a message")
    ended = FINISH_REASONS.get(choice.get("finish_reason"))
    if ended is None:
        raise UserError(f"{location}: the endpoint ended the response with {choice.get('finish_reason')!r}")
    text = message.get("content")
    if text is None:
        # A refusal is the model's own answer, and thinking that took all tokens leaves none.
        text = message.get("refusal") or ("" if ended == "length" else None)
    if not isinstance(text, str):
        raise UserError(f"{location}: the endpoint's reply has content that is no text")
    if num_tokens is not None and num_tokens < 0:
        raise UserError(f"{location}: the endpoint's reply counts {num_tokens} tokens")
    return Completion(text=text, num_tokens=num_tokens, finish_reason=ended)


def _content(message: Message, *, location: str) -> str | list[dict[str, Any]]:
    if all(isinstance(part, TextPart) for part in message.parts):
        return "".join(part.text for part in message.parts if isinstance(part, TextPart))
    return [_part(part, location=location) for part in message.parts]


def _part(part: Part, *, location: str) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    assert isinstance(part, ImagePart), "videos are refused before"
    buffer = io.BytesIO()
    _within(load_image(part, location=location), part).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _within(image: Image.Image, part: ImagePart) -> Image.Image:
    """The image with as many pixels as the row asks for: the server has its own image processor, not its limits."""
    pixels = image.width * image.height
    wanted = pixels if part.min_pixels is None else max(pixels, part.min_pixels)
    wanted = wanted if part.max_pixels is None else min(wanted, part.max_pixels)
    if wanted == pixels:
        return image
    scale = math.sqrt(wanted / pixels)
    rounded = math.floor if wanted < pixels else math.ceil
    return image.resize(
        (max(1, rounded(image.width * scale)), max(1, rounded(image.height * scale))), Image.Resampling.BICUBIC
    )
