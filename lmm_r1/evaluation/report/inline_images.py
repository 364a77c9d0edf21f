"""Images of rollouts as data URIs, so that a page needs no file beside it."""

import base64
import io
from pathlib import Path

import PIL.Image

MAX_BYTES = 64 * 1024
MAX_SIDE = 640
MIME_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


class ImageError(ValueError):
    """An image cannot be shown; the message says why."""


class InlineImages:
    """Collects images: the same file is embedded once, however many rollouts show it."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self._indices: dict[str, int] = {}

    def add(self, reference: str, *, folder: Path) -> int:
        """Return the place in `uris` of an image that a rollout of the stage in `folder` refers to.

        Raises:
            ImageError: it is missing, unreadable, on the network, or not inside the folder.
        """
        key = reference if reference.startswith("data:") else str(folder / reference)
        if key not in self._indices:
            self.uris.append(data_uri(_image_bytes(reference, folder=folder)))
            self._indices[key] = len(self.uris) - 1
        return self._indices[key]


def data_uri(content: bytes) -> str:
    """Return an image as a data URI; a heavy one is reduced to at most 640 pixels a side.

    Raises:
        ImageError: the bytes are no PNG, JPEG, WebP or GIF image.
    """
    try:
        with PIL.Image.open(io.BytesIO(content), formats=list(MIME_TYPES)) as image:
            image.load()
            mime_type = MIME_TYPES[image.format]
            if len(content) > MAX_BYTES:
                content, mime_type = _reduced(image), "image/webp"
    except (OSError, ValueError, SyntaxError, PIL.Image.DecompressionBombError) as error:
        raise ImageError("not a readable image") from error
    return f"data:{mime_type};base64,{base64.b64encode(content).decode('ascii')}"


def _reduced(image: PIL.Image.Image) -> bytes:
    small = image.convert("RGBA" if "A" in image.getbands() or "transparency" in image.info else "RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "WEBP", quality=80)
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
