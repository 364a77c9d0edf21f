"""Row files for tests: written from records, and read as rows."""

import json
from pathlib import Path
from typing import Any

from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Row


def load_rows(path: str, **options: Any) -> list[Row]:
    """Return the rows of `read_row_file`."""
    return list(read_row_file(path, **options).rows.values())


def write_rows(path: Path, *records: object) -> str:
    """Write records as JSON lines and return the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)
