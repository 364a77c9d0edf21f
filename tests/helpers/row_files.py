"""The rows of a file, for tests that do not care for its format."""

from typing import Any

from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Row


def load_rows(path: str, **options: Any) -> list[Row]:
    """Return the rows of `read_row_file`."""
    return list(read_row_file(path, **options).rows.values())
