"""A folder of rows on disk: rows.jsonl and images/, written beside its place and moved there when complete."""

import copy
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from lmm_r1.data.files import ROWS_FILE
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable

IMAGES_FOLDER = "images"


def check_writable(output: Path, *, overwrite: bool) -> None:
    """Raises UserError unless `output` can be made and is absent, an empty folder, or (with `overwrite`) a folder of rows."""
    check_creatable(output, flag="--output")
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output {output} is a file; name a folder")
    names = {entry.name for entry in output.iterdir()}
    if names and not overwrite:
        raise UserError(f"--output {output} is not empty; name another folder or add --overwrite")
    if not names <= {ROWS_FILE, IMAGES_FOLDER}:
        foreign = sorted(names - {ROWS_FILE, IMAGES_FOLDER})[0]
        raise UserError(f"--output {output} holds {foreign}, which is no part of a row folder; name another folder")


def write_row_folder(records: Iterable[Mapping[str, Any]], *, output: Path, overwrite: bool = False) -> int:
    """Writes the records and returns how many; PIL images become PNG files that rows.jsonl names by relative path.

    A folder already at `output` is replaced only when the new one is complete; on an error nothing is left behind.
    """
    check_writable(output, overwrite=overwrite)
    output = Path(os.path.abspath(output))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    replaced = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    partial.mkdir()
    try:
        count = _write(records, folder=partial)
        if output.exists():
            output.rename(replaced)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    return count


def _write(records: Iterable[Mapping[str, Any]], *, folder: Path) -> int:
    count = 0
    with (folder / ROWS_FILE).open("w", encoding="utf-8", newline="\n") as lines:
        for count, record in enumerate(records, start=1):
            stored = _with_image_files(record, folder=folder, row_number=count)
            lines.write(json.dumps(stored, ensure_ascii=False) + "\n")
    return count


def _with_image_files(record: Mapping[str, Any], *, folder: Path, row_number: int) -> dict[str, Any]:
    """A copy of `record` in which each PIL image is a relative path to a PNG file written under `folder`."""
    stored = {**record, "messages": copy.deepcopy(record["messages"])}
    listed = (message["content"] for message in stored["messages"] if not isinstance(message["content"], str))
    parts = [part for content in listed for part in content if isinstance(part.get("image"), Image.Image)]
    for number, part in enumerate(parts, start=1):
        name = f"{IMAGES_FOLDER}/{row_number:06d}_{number}.png"
        (folder / IMAGES_FOLDER).mkdir(exist_ok=True)
        part["image"].save(folder / name, format="PNG", optimize=True)
        part["image"] = name
    return stored
