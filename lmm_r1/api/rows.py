"""Rows as Python has them, written to a row file that a command could read."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically

Rows: TypeAlias = "str | os.PathLike[str] | Iterable[Mapping[str, Any]]"
"""A path or a name of the hub, as the commands take it; or rows as mappings, in any format that the commands read, with
images as PIL images and bytes, too."""
IMAGE_DIR = "image_dir"


def row_file(rows: Rows, *, folder: Path, argument: str) -> str:
    """Return the path of a file with the rows: the one that was given, or one that is written into `folder`.

    The file is named after its content, so that it never takes another one's place.

    Args:
        argument: of the call, for messages and the file's name.

    Raises:
        UserError: something else than a row is among them, or the file cannot be written.
    """
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    text = "".join(f"{_line(row, place=f'{argument}[{index}]')}\n" for index, row in enumerate(rows))
    if not text:
        raise UserError(f"{argument} is empty; give at least one row")
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]
    path = folder / f"{argument}-{digest}.jsonl"
    write_atomically(path, text=text)
    return str(path)


def is_messages(rows: object) -> bool:
    """Say whether what was given as rows is one conversation."""
    return (
        isinstance(rows, Sequence) and bool(rows) and all(isinstance(one, Mapping) and "role" in one for one in rows)
    )


def image_dir(rows: object) -> dict[str, object]:
    """Return the setting of the folder that relative paths of images start from: of rows in no file, the current one."""
    return {} if isinstance(rows, str | os.PathLike) else {IMAGE_DIR: os.getcwd()}


def _line(row: object, *, place: str) -> str:
    if not isinstance(row, Mapping):
        raise UserError(
            f"{place} is a {type(row).__name__}; a row is a mapping, such as {{'messages': [...], 'answer': '4'}}"
        )
    try:
        return json.dumps(dict(row), default=_as_json, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: {error}; a row holds texts, numbers, lists, mappings and images") from error


def _as_json(value: object) -> object:
    """Return what JSON has no form for: images as data URIs, numbers of arrays as numbers."""
    if isinstance(value, Image.Image):
        stream = io.BytesIO()
        value.save(stream, format="PNG")
        return _data_uri(stream.getvalue(), "image/png")
    if isinstance(value, bytes | bytearray | memoryview):
        return _data_uri(bytes(value), "application/octet-stream")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    # Arrays and their numbers, of any library.
    if callable(as_list := getattr(value, "tolist", None)):
        return as_list()
    raise TypeError(f"a {type(value).__name__} is nothing that a row can hold")


def _data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
