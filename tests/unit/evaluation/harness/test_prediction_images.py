"""Images of predictions are found in row files of any format, also where a file keeps them to itself."""

import base64
import io
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
from PIL import Image

from lmm_r1.evaluation.predictions import PredictedRow, Predictions
from lmm_r1.evaluation.rejudging import PredictionImages


def noise(seed: int) -> bytes:
    """A picture of some kilobytes, which row files keep to themselves."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (40, 30), random.Random(seed).randbytes(40 * 30 * 3)).save(buffer, "PNG")
    return buffer.getvalue()


def predicted(key: str, question: str) -> PredictedRow:
    return PredictedRow(
        key=key, location=f"p.tsv {key}", question=question, label="1", responses=("1",), datasource="d"
    )


def images(data: Path) -> PredictionImages:
    found = Predictions(path=Path("p.tsv"), harness="vlmevalkit", metric=None, rows={}, skipped=(), notes=())
    return PredictionImages(str(data), predictions=found)


def size(uri: str) -> tuple[int, int]:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).size


def test_pictures_embedded_in_parquet_are_shown_by_place(tmp_path):
    rows = [
        {"problem": f"<image>How many in {n}?", "answer": "1", "images": [{"bytes": noise(n), "path": None}]}
        for n in range(2)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "geo.parquet")
    shown = images(tmp_path / "geo.parquet")
    (uri,) = shown.of(1, predicted("1", "How many in 1?"))
    assert (size(uri), shown.notes) == ((40, 30), [])
    assert shown.of(0, predicted("0", "Another question")) == ()
    assert shown.notes[0].endswith("geo.parquet row 1 has another question")


def test_a_row_may_point_to_the_picture_of_another(tmp_path):
    data = tmp_path / "bench.tsv"
    picture = base64.b64encode(noise(3)).decode()
    data.write_text(f"index\tquestion\timage\tanswer\n7\tWhich?\t{picture}\tred\n9\tHow many?\t7\t2\n")
    shown = images(data)
    assert [size(uri) for uri in shown.of(0, predicted("9", "How many?"))] == [(40, 30)]
    assert shown.of(0, predicted("8", "Which?")) == ()
    assert shown.notes == [f"without its image: p.tsv 8: {data} has no row 8"]
