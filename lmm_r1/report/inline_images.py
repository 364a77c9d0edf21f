"""Images of rollouts as data URIs, so that a page needs no file beside it."""

import base64
import io
from pathlib import Path

import PIL.Image

# An image is embedded as it is up to this size; where a page shows thousands, up to a share of TOTAL_BYTES.
MAX_BYTES = 64 * 1024
MIN_BYTES = 8 * 1024
TOTAL_BYTES = 64 * 1024 * 1024
MAX_SIDE, MIN_SIDE = 640, 320
MIME_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


class ImageError(ValueError):
    """An image cannot be shown; the message says why."""


class InlineImages:
    """Collects images: the same content is embedded once, however many rollouts and files show it.

    Args:
        count: how many different images are to come at most; the more there are, the smaller heavy ones are made.
    """

    def __init__(self, *, count: int = 1) -> None:
        self.uris: list[str] = []
        self._by_reference: dict[str, int | ImageError] = {}
        self._by_uri: dict[str, int] = {}
        self._max_bytes = max(MIN_BYTES, min(MAX_BYTES, TOTAL_BYTES // max(1, count)))

    def add(self, reference: str, *, folder: Path) -> int:
        """Return the place in `uris` of an image that a rollout of the stage in `folder` refers to.

        Raises:
            ImageError: it is missing, unreadable, on the network, or not inside the folder.
        """
        key = image_key(reference, folder=folder)
        if key not in self._by_reference:
            try:
                uri = data_uri(_image_bytes(reference, folder=folder), max_bytes=self._max_bytes)
            except ImageError as error:
                self._by_reference[key] = error
            else:
                if uri not in self._by_uri:
                    self._by_uri[uri] = len(self.uris)
                    self.uris.append(uri)
                self._by_reference[key] = self._by_uri[uri]
        found = self._by_reference[key]
        if isinstance(found, ImageError):
            raise found
        return found


def image_key(reference: str, *, folder: Path) -> str:
    """Return what tells an image of the stage in `folder` from others before it is read."""
    return reference if reference.startswith("data:") else str(folder / reference)


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
    small = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    side = MAX_SIDE if max_bytes > MAX_BYTES // 2 else MIN_SIDE
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=80, method=2)
    return buffer.getvalue()


def _image_bytes(reference: str, *, folder: Path) -> bytes:
    if reference.startswith("data:"):
        try:
            return base64.b64decode(reference.partition(",")[2], validate=True)
        except ValueError as error:
            raise ImageError("not a base64 data URI") from error
    if "://" in reference:
        raise ImageError("not in the run folder")
    # The page may be passed on, so a rollout must not be able to pull any other file of this machine into it.
    path = (folder / reference).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ImageError("not in the run folder")
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ImageError("file not found") from error
