"""Parts that HTML pages share: templates, images and figures."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import jinja2
import PIL.Image
import PIL.ImageOps

from lmm_r1.data.image_sources import ImageSource, kind_of
from lmm_r1.data.images import encoded_image, load_image
from lmm_r1.data.messages import ImagePart

SETTING_WORDS = {
    "dtype": "precision",
    "max_model_len": "longest prompt and response, tokens",
    "max_new_tokens": "longest response, tokens",
    "n_samples": "responses per row",
    "top_p": "top-p",
    "judge_timeout": "seconds to judge a response",
}


def page_templates(folder: Path, *, filters: Mapping[str, Callable[..., Any]]) -> jinja2.Environment:
    """Return the templates in a folder and the parts that pages share, with filters beside `moment` and `in_words`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": moment, "in_words": in_words, **filters}
    return environment


def in_words(setting: str) -> str:
    """Return the name of a setting as a reader of a page knows it, `n_samples` as `responses per row`."""
    return SETTING_WORDS.get(setting, setting.replace("_", " "))


def moment(time: datetime) -> str:
    """Return a moment in its own time zone, `2026-01-31 12:05 UTC`."""
    zone = "UTC" if time.utcoffset() == timedelta(0) else time.strftime("UTC%z")
    return f"{time:%Y-%m-%d %H:%M} {zone}"


# An image is embedded as it is up to this size.
MAX_BYTES = 64 * 1024
MIN_BYTES = 8 * 1024
MAX_SIDE, MIN_SIDE = 640, 320
MIME_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


class ImageError(ValueError):
    """An image cannot be shown; the message says why."""


def image_uri(source: ImageSource, *, location: str) -> str:
    """Return a row's image as a data URI, upright; an address on the network as it is.

    Raises:
        UserError: it is missing or unreadable.
    """
    if isinstance(source, str) and kind_of(source) == "url":
        return source
    part = ImagePart(source)
    try:
        return data_uri(encoded_image(part, location=location))
    except ImageError:
        # A browser knows fewer formats than rows may have.
        buffer = io.BytesIO()
        load_image(part, location=location).save(buffer, "PNG")
        return data_uri(buffer.getvalue())


def data_uri(content: bytes, *, max_bytes: int = MAX_BYTES) -> str:
    """Return an image as a data URI; one of more than `max_bytes` is reduced to 320 to 640 pixels a side.

    Raises:
        ImageError: the bytes are no PNG, JPEG, WebP or GIF image.
    """
    try:
        with PIL.Image.open(io.BytesIO(content), formats=list(MIME_TYPES)) as image:
            image.load()
            mime_type = MIME_TYPES[str(image.format)]
            if len(content) > max_bytes:
                content, mime_type = _reduced(image, max_bytes=max_bytes), "image/webp"
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ImageError("not a readable image") from error
    return f"data:{mime_type};base64,{base64.b64encode(content).decode('ascii')}"


def _reduced(image: PIL.Image.Image, *, max_bytes: int) -> bytes:
    # What is written anew has no mark of how it is to be turned.
    image = PIL.ImageOps.exif_transpose(image)
    small = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    side = MAX_SIDE if max_bytes > MAX_BYTES // 2 else MIN_SIDE
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=80, method=2)
    return buffer.getvalue()


MINUS = "\N{MINUS SIGN}"
# Sums and differences of floats are off in the last digits, which would decide where a half is rounded to.
_DIGITS = 9


def percent_text(share: float) -> str:
    """Return 0.5342 as `53.4`; halves go to the even tenth, 0.2125 and 0.8500 - 0.6375 to `21.2`."""
    return mean_text(100 * share)


def points_text(difference: float) -> str:
    """Return a difference of two shares in percentage points: `+24.1`, and `0.0` without a sign."""
    text = percent_text(difference)
    return text if text == "0.0" or text.startswith(MINUS) else f"+{text}"


def mean_text(mean: float) -> str:
    """Return a mean of counts, 1234.56 as `1,234.6`."""
    tenths = Decimal(repr(round(mean, _DIGITS))).quantize(Decimal("0.1"), rounding=ROUND_HALF_EVEN)
    return f"{MINUS}{-tenths:,}" if tenths < 0 else f"{abs(tenths):,}"
