"""From Arrow arrays to Python values, with a caller's stand-ins for the binary ones at any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import pyarrow

STEP = "\0"
"""Stands in paths, and in no name: a column's own may have dots."""
Leaf: TypeAlias = "Callable[[pyarrow.Array, Sequence[int], str], list[Any]]"
"""Gives the values of a binary array from the array, the row of each value and the array's path in the table."""


def holds_binary(kind: pyarrow.DataType) -> bool:
    """Return whether `to_values` finds binary values in arrays of this type."""
    from pyarrow import types

    if types.is_dictionary(kind) or _is_list(kind):
        return holds_binary(kind.value_type)
    if types.is_struct(kind):
        return any(holds_binary(field.type) for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def to_records(table: pyarrow.Table | pyarrow.RecordBatch, leaf: Leaf, *, first_row: int) -> list[dict[str, Any]]:
    """Return the rows as `to_pylist` does, but for binary values, which are what `leaf` makes of them."""
    columns = [
        (
            list(column_values(column, leaf, path=name, first_row=first_row))
            if holds_binary(column.type)
            else column.to_pylist()
        )
        for name, column in zip(table.schema.names, table.columns, strict=True)
    ]
    return [dict(zip(table.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def column_values(
    column: pyarrow.ChunkedArray | pyarrow.Array, leaf: Leaf, *, path: str, first_row: int
) -> Iterator[Any]:
    """Yield the values of one column, chunk after chunk."""
    for chunk in getattr(column, "chunks", [column]):
        yield from to_values(chunk, leaf, rows=range(first_row, first_row + len(chunk)), path=path)
        first_row += len(chunk)


def to_values(array: pyarrow.Array, leaf: Leaf, *, rows: Sequence[int], path: str) -> list[Any]:
    """Return an array's values; `leaf` gets the binary arrays in an order that does not depend on how rows are batched.

    Args:
        rows: the row of each value.
        path: the names from the column to this array, with `STEP` between them.
    """
    from pyarrow import types

    kind = array.type
    if not holds_binary(kind):
        return array.to_pylist()
    if types.is_dictionary(kind):
        return _dictionary(array, leaf, rows=rows, path=path)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        fields = [
            to_values(array.field(place), leaf, rows=rows, path=f"{path}{STEP}{name}")
            for place, name in enumerate(names)
        ]
        return _where_valid(array, (dict(zip(names, values, strict=True)) for values in zip(*fields, strict=True)))
    if _is_list(kind):
        return _lists(array, leaf, rows=rows, path=path)
    return leaf(array, rows, path)


def _is_list(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _where_valid(array: pyarrow.Array, values: Iterable[Any]) -> list[Any]:
    if not array.null_count:
        return list(values)
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


def _lists(array: pyarrow.Array, leaf: Leaf, *, rows: Sequence[int], path: str) -> list[Any]:
    from pyarrow import types

    if types.is_fixed_size_list(array.type):
        size = array.type.list_size
        ends = list(range(array.offset * size, (array.offset + len(array)) * size + 1, size or 1))
    else:
        ends = array.offsets.to_pylist()
    spans = list(pairwise(ends))
    held = array.values.slice(ends[0], ends[-1] - ends[0])
    held_rows = list(
        chain.from_iterable(repeat(row, end - start) for row, (start, end) in zip(rows, spans, strict=True))
    )
    values = to_values(held, leaf, rows=held_rows, path=f"{path}{STEP}list")
    return _where_valid(array, (values[start - ends[0] : end - ends[0]] for start, end in spans))


def _dictionary(array: pyarrow.Array, leaf: Leaf, *, rows: Sequence[int], path: str) -> list[Any]:
    values: list[Any] = []
    for index, row in zip(array.indices.to_pylist(), rows, strict=True):
        if index is None:
            values.append(None)
        else:
            values += to_values(array.dictionary.slice(index, 1), leaf, rows=[row], path=path)
    return values
