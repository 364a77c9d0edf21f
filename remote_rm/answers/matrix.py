r"""Matrices and vectors as rows of cells: `\begin{pmatrix}1&2\\3&4\end{pmatrix}`, `[[1,2],[3,4]]`."""

import re

from remote_rm.answers.normalization import enclosing_delimiters, split_top_level

_MATRIX = re.compile(
    r"(?:[A-Za-z]=)?(?:[(\[]\s*)?\\begin\{(?:[pb]?matrix|smallmatrix|array)\}(?P<columns>\{[lcr|@\s]*\})?"
    r"(?P<body>.*)\\end\{(?:[pb]?matrix|smallmatrix|array)\}(?:\s*[)\]])?",
    re.DOTALL,
)

Rows = tuple[tuple[str, ...], ...]


def parse_matrix(text: str) -> Rows | None:
    """Return the cells of the matrix that a normalised text is, row by row, or None where it is none."""
    match = _MATRIX.fullmatch(text)
    if match is None:
        return _nested_lists(text)
    if r"\begin" in match["body"]:
        return None
    rows = [row.strip() for row in match["body"].split("\\\\")]
    cells = tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows if row)
    return cells if cells and len({len(row) for row in cells}) == 1 else None


def as_vector(text: str, *, length: int) -> tuple[str, ...] | None:
    """Return the components of a bracketed list of that length, or None."""
    items = _items(text)
    return items if items is not None and len(items) == length else None


def _nested_lists(text: str) -> Rows | None:
    outer = _items(text)
    rows = [_items(item) for item in outer or () if item[:1] in ("[", "(")]
    if not outer or len(outer) != len(rows) or len(rows) < 2 or not text.startswith("["):
        return None
    cells = tuple(row for row in rows if row is not None)
    return cells if len(cells) == len(rows) and len({len(row) for row in cells}) == 1 else None


def _items(text: str) -> tuple[str, ...] | None:
    pair = enclosing_delimiters(text)
    return tuple(split_top_level(text[1:-1])) if pair in (("(", ")"), ("[", "]")) else None
