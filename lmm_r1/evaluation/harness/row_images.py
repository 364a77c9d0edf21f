"""The images of predicted rows: from the file of predictions where it holds them, else from the benchmark's row file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

from lmm_r1.data.files import Record, read_records
from lmm_r1.data.image_sources import ImageSource, kind_of, resolve
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, images_of
from lmm_r1.data.row_parser import parse_row
from lmm_r1.errors import UserError
from lmm_r1.evaluation.answered_rows import question_of
from lmm_r1.evaluation.harness.predictions import PredictedRow, Predictions, shown

MAX_SIDE = 480
"""Of an image on the page, in pixels."""
IMAGE_COLUMNS = ("image", "images", "image_path")
_LONGEST_INDEX = 64
"""An image that is shorter is the index of the row that holds it, as in VLMEvalKit."""


class RowImages:
    """Images by the row of the predictions, each read when it is asked for."""

    def __init__(self, data: str | None, *, predictions: Predictions) -> None:
        """Args:
        data: a row file, in which `index` or else the place is what the predictions call the row; None for none.
        """
        self.notes: list[str] = []
        """What images could not be had, in sentences."""
        self._path = predictions.path
        self._records: dict[str, Record] = {}
        if data is not None:
            for place, record in enumerate(read_records(data)):
                self._records[shown(record[0].get("index")) or str(place)] = record
        self._data = data

    def of(self, index: int, row: PredictedRow) -> tuple[str, ...]:
        """Return the row's images as small data URIs; what cannot be had is told in `notes`."""
        try:
            if row.images:
                sources = [resolve(source, base_dir=self._path.parent) for source in row.images]
            else:
                sources = list(self._found(row))
            return tuple(image_uri(source, location=row.location) for source in sources)
        except UserError as error:
            self.notes.append(f"without its image: {error}")
            return ()

    def _found(self, row: PredictedRow) -> Iterator[ImageSource]:
        if self._data is None:
            return
        record = self._records.get(row.key)
        if record is None:
            raise UserError(f"{row.location}: {self._data} has no row {row.key}")
        columns, location, base_dir = record
        if "messages" in columns or "message" in columns:
            parsed = parse_row(columns, location=location, base_dir=base_dir, answer_required=False)
            _check_same(question_of(parsed), row, location=location)
            yield from (part.source for part in images_of(parsed.messages))
            return
        _check_same(shown(columns.get("question")), row, location=location)
        value = next((columns[name] for name in IMAGE_COLUMNS if shown(columns.get(name))), None)
        for image in value if isinstance(value, list) else [] if value is None else [value]:
            yield resolve(self._stored(image), base_dir=base_dir)

    def _stored(self, image: object) -> ImageSource:
        """The image itself where only the index of another row is given."""
        text = shown(image)
        other = self._records.get(text) if len(text) <= _LONGEST_INDEX else None
        return shown(other[0].get("image")) if other is not None else text


def image_uri(source: ImageSource, *, location: str) -> str:
    """Return an image as a data URI of at most `MAX_SIDE` pixels a side; an address on the network as it is.

    Raises:
        UserError: it is missing or unreadable.
    """
    if isinstance(source, str) and kind_of(source) == "url":
        return source
    image = load_image(ImagePart(source), location=location)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def _check_same(question: str, row: PredictedRow, *, location: str) -> None:
    """Raise UserError where the row file has another question there: its image would mislead."""
    theirs, ours = " ".join(row.question.split()), " ".join(question.split())
    if theirs and ours and theirs not in ours and ours not in theirs:
        raise UserError(f"{row.location}: {location} has another question")
