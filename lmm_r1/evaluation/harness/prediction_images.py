"""The images of predicted rows: from the file of predictions where it holds them, else from the benchmark's row file."""

from __future__ import annotations

from collections.abc import Iterator

from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.files import read_good_rows, read_records
from lmm_r1.data.image_sources import ImageSource, resolve
from lmm_r1.data.messages import Row, images_of
from lmm_r1.errors import UserError
from lmm_r1.evaluation.answered_rows import question_of
from lmm_r1.evaluation.harness.predictions import PredictedRow, Predictions, shown
from lmm_r1.evaluation.page_images import image_uri


class PredictionImages:
    """Images by the row of the predictions, each read when it is asked for."""

    def __init__(self, data: str | None, *, predictions: Predictions) -> None:
        """Args:
        data: a row file, in which `index` or else the place is what the predictions call the row; None for none.
        """
        self.notes: list[str] = []
        """What images could not be had, in sentences."""
        self._path = predictions.path
        self._data = data
        self._rows = {} if data is None else _rows_by_key(data)

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
        found = self._rows.get(row.key)
        if found is None:
            raise UserError(f"{row.location}: {self._data} has no row {row.key}")
        if isinstance(found, SkippedRow):
            raise UserError(found.reason)
        _check_same(question_of(found), row, location=found.location)
        yield from (part.source for part in images_of(found.messages))


def _rows_by_key(path: str) -> dict[str, Row | SkippedRow]:
    """Return the rows of a file in any format by what predictions call them."""
    file = read_good_rows(path, answer_required=False)
    found: dict[int, Row | SkippedRow] = {**file.rows, **{row.index: row for row in file.skipped}}
    return {
        shown(columns.get("index")) or str(place): found[place]
        for place, (columns, _, _) in enumerate(read_records(path))
    }


def _check_same(question: str, row: PredictedRow, *, location: str) -> None:
    """Raise UserError where the row file has another question there: its image would mislead."""
    theirs, ours = " ".join(row.question.split()), " ".join(question.split())
    if theirs and ours and theirs not in ours and ours not in theirs:
        raise UserError(f"{row.location}: {location} has another question")
