"""The images of an episode under the names that a policy calls them by, and how large it is shown them."""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from lmm_r1.agents.calls import BadCall, quoted
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Row, images_of
from lmm_r1.lmm_kits.encoding import bounded_size

ORIGINAL = "original_image"
OBSERVATION = "observation"
MOST_ASPECT = 100
"""How many times longer than its shorter side an image may be; image processors refuse thinner ones."""


def is_too_thin(size: tuple[int, int]) -> bool:
    """Whether image processors would refuse an image of this width and height."""
    return max(size) > MOST_ASPECT * min(size)


@dataclass(frozen=True, kw_only=True)
class PixelBounds:
    """How many pixels an image is shown with that has no bounds of its own."""

    min_pixels: int
    max_pixels: int
    side_multiple: int
    """What the image processor rounds sides to."""

    def of(self, part: ImagePart) -> ImagePart:
        """Return an image with both bounds; its own go first, and move the other one where they would cross."""
        lowest = min(self.min_pixels, part.max_pixels or self.min_pixels)
        highest = max(self.max_pixels, part.min_pixels or self.max_pixels)
        return replace(part, min_pixels=part.min_pixels or lowest, max_pixels=part.max_pixels or highest)

    def shown_size(self, part: ImagePart, *, size: tuple[int, int]) -> tuple[int, int]:
        """Return the width and height that an image of `size` is shown with."""
        bounded = self.of(part)
        assert bounded.min_pixels is not None
        assert bounded.max_pixels is not None
        height, width = bounded_size(
            height=size[1],
            width=size[0],
            factor=self.side_multiple,
            min_pixels=bounded.min_pixels,
            max_pixels=bounded.max_pixels,
        )
        return width, height


class EpisodeImages:
    """The images of the row, and those that tools have added; loaded when first asked for, in any thread.

    A row's only image is `original_image`. Several are `original_image_1`, `original_image_2` and so on, and the bare name is
    refused. What tools add is `observation_1`, `observation_2`: a call that adds none takes no number.
    """

    def __init__(self, row: Row, *, bounds: PixelBounds) -> None:
        self.bounds = bounds
        self._location = row.location
        originals = images_of(row.messages)
        names = [ORIGINAL] if len(originals) == 1 else [f"{ORIGINAL}_{i}" for i in range(1, len(originals) + 1)]
        self._parts = dict(zip(names, originals, strict=True))
        self._aliases = {f"{ORIGINAL}_1": ORIGINAL} if len(originals) == 1 else {}
        self._observations = 0
        self._loaded: dict[str, Image.Image] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> EpisodeImages:
        # The same pictures; what one adds the other has not seen.
        other = copy(self)
        other._parts, other._loaded = dict(self._parts), dict(self._loaded)
        other._lock = threading.Lock()
        return other

    @property
    def names(self) -> tuple[str, ...]:
        """The row's images, then the observations, in the order in which they were shown."""
        return tuple(self._parts)

    def number(self, name: str) -> int:
        """Return the place of an image in `names`, from 0; raises BadCall where there is none."""
        return self.names.index(self.known(name))

    def known(self, name: str) -> str:
        """Return the name of an image as it stands in `names`; raises BadCall where there is none."""
        spelt = name.strip().lower().replace(" ", "_")
        spelt = self._aliases.get(spelt, spelt)
        if spelt not in self._parts:
            there = ", ".join(self.names) or "none"
            raise BadCall(f"there is no image {quoted(name)}; the images are: {there}")
        return spelt

    def load(self, name: str) -> Image.Image:
        """Return an image in RGB, upright and in full resolution; not to be drawn on. It may take long: call it in a thread.

        Raises:
            BadCall: there is no image of this name.
            UserError: the row's image cannot be read.
        """
        name = self.known(name)
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = load_image(self._parts[name], location=self._location)
            return self._loaded[name]

    def shown_size(self, name: str) -> tuple[int, int]:
        """Return the width and height that the policy sees an image with; raises as `load` does."""
        return self.bounds.shown_size(self._parts[self.known(name)], size=self.load(name).size)

    def add(self, part: ImagePart) -> str:
        """Take in what a tool shows and return its name."""
        self._observations += 1
        name = f"{OBSERVATION}_{self._observations}"
        self._parts[name] = part
        return name
