"""Rows per second of the tasks with twins, on one core; JSON on the last line.

python benchmarks/twin_rows.py [--rows 300] [--output benchmarks/results/twin_rows.json] [--sheet docs/twin_tasks.png]

The time is that of `lmm-r1 make_task --modality image`: drawing, PNG files and rows.jsonl. --sheet also draws the contact
sheet of the docs: the five difficulties of each family.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from machine import machine_name
from measuring import parser_of, publish
from PIL import Image

from lmm_r1.data.files import write_row_folder
from lmm_r1.tasks import LEVELS, TWINS, get_task
from lmm_r1.tasks.twins.drawing import COLOURS, Canvas

CELL_PX = 204
COLUMNS = 2
"""Families next to each other on the sheet."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=300, help="rows of each family and difficulty")
    parser.add_argument("--sheet", type=Path, help="also draw the contact sheet into this file")
    arguments = parser.parse_args()
    if arguments.sheet:
        draw_sheet().save(arguments.sheet, optimize=True)
    rates = {name: {str(level): rate(name, level, rows=arguments.rows) for level in LEVELS} for name in TWINS}
    least = min(figure for levels in rates.values() for figure in levels.values())
    facts = {"benchmark": "twin_rows", "machine": machine_name(), "rows": arguments.rows}
    publish({**facts, "rows_per_core_second": rates, "least": least}, arguments.output)


def rate(name: str, level: int, *, rows: int) -> int:
    """Return the rows per second of processor time."""
    task = get_task(name).at_difficulty(level)
    made = (row.record(solution=True) for row in task.generate(split="train", modality="image", rows=rows, seed=0))
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        write_row_folder(made, output=Path(folder) / "rows", overwrite=False)
        return round(rows / (time.process_time() - began))


def draw_sheet() -> Image.Image:
    """Return a picture of each family and difficulty, with the family's name above its row."""
    lines = -(-len(TWINS) // COLUMNS)
    sheet = Canvas(COLUMNS * len(LEVELS) * CELL_PX, lines * (CELL_PX + 24), scale=1)
    sheet.box(0, 0, *sheet.image.size, COLOURS["black"])
    for place, name in enumerate(TWINS):
        left, top = place % COLUMNS * len(LEVELS) * CELL_PX, place // COLUMNS * (CELL_PX + 24)
        sheet.text(name.upper().replace("_", " "), (left + 100, top + 14), dot=2)
        for column, level in enumerate(LEVELS):
            (row,) = get_task(name).at_difficulty(level).generate(split="train", modality="image", rows=1, seed=0)
            content = row.messages[0]["content"]
            sheet.image.paste(content[0]["image"], (left + column * CELL_PX + 4, top + 26))
    return sheet.image


if __name__ == "__main__":
    main()
