"""Images as data URIs, so that a page needs no file beside it."""

from __future__ import annotations

import base64
import io

import PIL.Image
import PIL.ImageOps

from lmm_r1.data.image_sources import ImageSource, kind_of
from lmm_r1.data.images import encoded_image, load_image
from lmm_r1.data.messages import ImagePart

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
