"""Pictures beside an output: each is a file that is written once, under a name made of what it holds."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from lmm_r1.data.image_sources import kind_of, open_image
from lmm_r1.data.images import encoded_image
from lmm_r1.data.messages import ImagePart
from lmm_r1.files.atomic import write_bytes_atomically

_SUFFIX = ".images"
_DIGITS = 16
_NAME = re.compile(rf"[0-9a-f]{{{_DIGITS}}}\.\w+")


@dataclass(frozen=True)
class PictureFolder:
    path: Path

    @classmethod
    def beside(cls, output: Path) -> PictureFolder:
        """Return the folder of an output's pictures: `rows.images` for `rows.jsonl`."""
        return cls(output.with_name(output.stem + _SUFFIX))

    def kept(self, part: ImagePart) -> ImagePart:
        """Return a picture with its absolute path here; one that is a file already, or a URL, as it is.

        Raises:
            UserError: it cannot be written.
        """
        if kind_of(part.source) in ("path", "url"):
            return part
        data = encoded_image(part, location="a picture that was shown")
        with open_image(io.BytesIO(data)) as image:
            suffix = str(image.format).lower()
        path = self.path / f"{hashlib.sha256(data).hexdigest()[:_DIGITS]}.{suffix}"
        if not path.exists():
            write_bytes_atomically(path, data=data)
        return replace(part, source=os.path.abspath(path))

    def clear(self, *, but: Collection[str] = ()) -> None:
        """Take away what an earlier output has left here, and nothing else.

        Args:
            but: paths of pictures that stay.
        """
        kept = {Path(path).name for path in but}
        if self.path.is_dir():
            for file in self.path.iterdir():
                if _NAME.fullmatch(file.name) and file.name not in kept:
                    file.unlink()
