"""Images of rollouts as data URIs, so that a page needs no file beside it."""

import base64
from pathlib import Path

from lmm_r1.evaluation.page_images import MAX_BYTES, MIN_BYTES, ImageError, data_uri

# Where a page shows thousands of images, each may have a share of this.
TOTAL_BYTES = 64 * 1024 * 1024


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
