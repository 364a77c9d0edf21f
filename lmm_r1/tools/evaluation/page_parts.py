"""What HTML pages share: templates, images, formatted numbers and durations, and data for their scripts."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import jinja2
import PIL.Image
import PIL.ImageOps

from lmm_r1.data.images import encoded_image, load_image
from lmm_r1.data.messages import ImagePart, ImageSource, kind_of, open_image

SETTING_WORDS = {
    "dtype": "precision",
    "max_model_len": "longest prompt and response, tokens",
    "max_new_tokens": "longest response, tokens",
    "n_samples": "responses per row",
    "top_p": "top-p",
    "judge_timeout": "seconds to judge a response",
}


def page_templates(folder: Path, *, filters: Mapping[str, Callable[..., Any]]) -> jinja2.Environment:
    """Return the templates in a folder and those that pages share, with the filters `moment`, `in_words` and these."""
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
    """Return the name of a setting for readers of a page: `n_samples` becomes `responses per row`."""
    return SETTING_WORDS.get(setting, setting.replace("_", " "))


def moment(time: datetime) -> str:
    """Return a time in its own time zone: `2026-01-31 12:05 UTC`."""
    zone = "UTC" if time.utcoffset() == timedelta(0) else time.strftime("UTC%z")
    return f"{time:%Y-%m-%d %H:%M} {zone}"


# Images up to this size are embedded unchanged.
MAX_BYTES = 64 * 1024
MIN_BYTES = 8 * 1024
MAX_SIDE, MIN_SIDE = 640, 320
MIME_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


class ImageError(ValueError):
    """An image cannot be shown; the message says why."""


def image_uri(source: ImageSource, *, location: str) -> str:
    """Return a row's image as a data URI, upright; a URL is returned unchanged."""
    if isinstance(source, str) and kind_of(source) == "url":
        return source
    part = ImagePart(source)
    try:
        return data_uri(encoded_image(part, location=location))
    except ImageError:
        # Browsers support fewer formats than rows.
        buffer = io.BytesIO()
        load_image(part, location=location).save(buffer, "PNG")
        return data_uri(buffer.getvalue())


def data_uri(content: bytes, *, max_bytes: int = MAX_BYTES) -> str:
    """Return an image as a data URI; one larger than `max_bytes` is scaled down to 320 or 640 pixels per side."""
    try:
        with open_image(io.BytesIO(content)) as image:
            image.load()
            mime_type = MIME_TYPES[str(image.format)]
            if len(content) > max_bytes:
                content, mime_type = _reduced(image, max_bytes=max_bytes), "image/webp"
    except (OSError, ValueError, SyntaxError, KeyError) as error:
        raise ImageError("not a readable image") from error
    return f"data:{mime_type};base64,{base64.b64encode(content).decode('ascii')}"


def _reduced(image: PIL.Image.Image, *, max_bytes: int) -> bytes:
    # The new file has no EXIF orientation.
    image = PIL.ImageOps.exif_transpose(image)
    small = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    side = MAX_SIDE if max_bytes > MAX_BYTES // 2 else MIN_SIDE
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=80, method=2)
    return buffer.getvalue()


MINUS = "\N{MINUS SIGN}"
# Sums and differences of floats have errors in the last digits, which would affect how halves are rounded.
_DIGITS = 9


def percent_text(share: float) -> str:
    """Return 0.5342 as `53.4`; halves are rounded to the even tenth: 0.2125 and 0.8500 - 0.6375 give `21.2`."""
    return mean_text(100 * share)


def points_text(difference: float) -> str:
    """Return a difference of two shares in percentage points: `+24.1`, and `0.0` without a sign."""
    text = percent_text(difference)
    return text if text == "0.0" or text.startswith(MINUS) else f"+{text}"


def mean_text(mean: float) -> str:
    """Return a mean of counts, 1234.56 as `1,234.6`."""
    tenths = Decimal(repr(round(mean, _DIGITS))).quantize(Decimal("0.1"), rounding=ROUND_HALF_EVEN)
    return f"{MINUS}{-tenths:,}" if tenths < 0 else f"{abs(tenths):,}"


NONE = "\N{EN DASH}"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def percent(share: float | None) -> str:
    return NONE if share is None else f"{percent_text(share)}\N{NO-BREAK SPACE}%"


def points(change: float | None) -> str:
    """Return a difference of two shares in percentage points, 0.241 as `+24.1`; empty for None."""
    return "" if change is None else points_text(change)


def mean(value: float | None) -> str:
    return NONE if value is None else mean_text(value)


def direction(change: float) -> str:
    """Return the CSS class of a change's colour after a space; empty if it is shown as 0.0."""
    text = points_text(change)
    return "" if text == "0.0" else " down" if text.startswith(MINUS) else " up"


def number(value: float | None) -> str:
    """Return a number in at most about six characters: 31.2, 12.4k, 1.5e-4."""
    if value is None:
        return NONE
    size = abs(value)
    if value == 0:
        text = "0"
    elif size >= 999_500:
        text = f"{size / 1e6:.3g}M"
    elif size >= 9_995:
        text = f"{size / 1e3:.3g}k"
    elif size < 1e-3:
        mantissa, exponent = f"{size:.1e}".split("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    else:
        text = f"{size:.4g}" if size >= 1000 else f"{size:.3g}"
    return f"{MINUS}{text}" if value < 0 else text


def duration(seconds: float | None) -> str:
    """Return 41.2 as `41.2 s`, 200 as `3 min 20 s` and 3840 as `1 h 04 min`."""
    if seconds is None:
        return NONE
    if seconds < 59.95:
        return f"{seconds:.1f}\N{NO-BREAK SPACE}s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}\N{NO-BREAK SPACE}min {rest:02d}\N{NO-BREAK SPACE}s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours}\N{NO-BREAK SPACE}h {minutes:02d}\N{NO-BREAK SPACE}min"


FILTERS = {show.__name__: show for show in (percent, points, direction, mean, number, duration)}


def script_json(value: object) -> str:
    """Return JSON that cannot end its script block, and that any encoding can represent."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # These characters occur only inside strings, in which an escape has the same meaning.
    text = text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
    return LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
