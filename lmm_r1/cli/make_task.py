"""`lmm-r1 make_task digits --modality image --rows 1000 --output data/digits`: row files of a procedural task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from lmm_r1.cli import arguments, run_command, user_errors
from lmm_r1.config.declared import JsonText, Positional, json_object
from lmm_r1.data.files import check_writable, write_row_folder
from lmm_r1.data.row_parser import parse_row, stored_messages
from lmm_r1.errors import UserError
from lmm_r1.tools.tasks import Modality, Split, Task, TaskRow, get_task
from lmm_r1.tools.tasks.visual_search import Style

PROG = "lmm-r1 make_task"


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """Flags that override a setting of the task, which has the default; flags of other tasks are refused."""

    image_share: float | None = None
    """Share of the rows with images in modality mixed, evenly spread; None is the task's 0.5."""
    min_digits: int | None = None
    """digits: fewest digits in a row; None is the task's 3."""
    max_digits: int | None = None
    """digits: most digits in a row; None is the task's 3."""
    max_image_digits: int | None = None
    """digits: most digits in an image; None is max_digits. A cold start learns to read sooner with one digit per image."""
    page_rows: int | None = None
    """digits: number of rows for the digits of an image, 1 to 3; None is the task's 3, and 1 places them in a line."""
    board_width: int | None = None
    """digits: width of an image in pixels, with the digits at its left; None is as wide as needed, 84."""
    board_height: int | None = None
    """digits: height of an image in pixels, with the digits at its top; None is as high as needed, 84."""
    height: int | None = None
    """sokoban: rows of the board, the outer walls included; None is the task's 6."""
    width: int | None = None
    """sokoban: columns of the board, the outer walls included; None is the task's 6."""
    boxes: int | None = None
    """sokoban: number of boxes; None is the task's 1."""
    min_pushes: int | None = None
    """sokoban: fewest pushes of a level's best solution; None is the task's 1."""
    max_pushes: int | None = None
    """sokoban: most pushes of a level's best solution; None is the task's 8."""
    wall_share: float | None = None
    """sokoban: share of the inside that is wall; None is the task's 0.15."""
    tile_px: int | None = None
    """sokoban: pixels on a square's side; None is the task's 28."""
    view_px: int | None = None
    """visual_search: pixels on the side of the first view; None is the task's 112."""
    block_px: int | None = None
    """visual_search: pixels of the picture per pixel of the first view, a multiple of 9; None is the task's 9."""
    distractors: int | None = None
    """visual_search: tiles of other colours; None is the task's 40."""
    cell_blocks: int | None = None
    """visual_search: side of a cell with one tile, in pixels of the first view, a multiple of 7; None is the task's 7."""
    style: Style | None = None
    """visual_search: fine, or coarse with larger marks and coloured squares, for tiny models; None is the task's fine."""
    crop_errors: float | None = None
    """visual_search: share of worked episodes that crop another square; None is the task's 0."""


@dataclass(frozen=True, kw_only=True)
class MakeTaskConfig(TaskSettings):
    task: Positional[str]
    """Name of the task: digits, sokoban or visual_search; or FILE.py with a function `rows_of`."""
    output: Path
    """Folder to write: rows.jsonl, and images/ if rows have images."""
    modality: Modality = "text"
    """Rows of text, rows with images, or both mixed."""
    split: Split = "train"
    """Part of the task's fixed split that the rows come from."""
    rows: int = 1000
    """Number of rows."""
    seed: int = 0
    """The same seed gives the same files, byte for byte."""
    solutions: bool = False
    """Append a worked solution to each row as assistant turn, for the cold start with train_sft."""
    agent: str | None = None
    """With solutions: the environment whose tools they call, by name or as FILE.py:CLASS. A row is the whole episode then,
    with all that the environment shows, for tasks whose solutions have several turns; None writes single turns."""
    agent_options: JsonText | None = None
    """Arguments of the environment's class, as a JSON object."""
    overwrite: bool = False
    """Replace a folder of rows that is already there."""


CONFIG = MakeTaskConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Write the row folder and say what is in it."""
    config = arguments.parse(
        MakeTaskConfig, argv, prog=PROG, description="Write rows of a procedural task, with images and known answers."
    )
    with user_errors(PROG):
        run(config)


def run(config: MakeTaskConfig) -> None:
    """Raises UserError if a value is wrong or the folder is taken."""
    if config.rows < 1:
        raise UserError(f"--rows {config.rows}: one row or more is needed")
    task = _with_settings(get_task(config.task), config)
    check_writable(config.output, overwrite=config.overwrite)
    rows = task.generate(split=config.split, modality=config.modality, rows=config.rows, seed=config.seed)
    record = _recording(config)
    count = write_row_folder((record(row) for row in rows), output=config.output, overwrite=config.overwrite)
    kind = "rows with solutions" if config.solutions else "rows"
    kind = f"episodes of {config.agent}" if config.agent else kind
    print(f"wrote {count} {kind} of {config.task} ({config.modality}, {config.split}) to {config.output}")


def _recording(config: MakeTaskConfig) -> Callable[[TaskRow], Mapping[str, object]]:
    """Return what writes a row of the task; raises UserError for an environment that cannot be had."""
    if config.agent is None:
        if config.agent_options is not None:
            raise UserError(f"--agent_options {config.agent_options} is for an environment; give --agent, too")
        return lambda made: made.record(solution=config.solutions)
    if not config.solutions:
        raise UserError(
            f"--agent {config.agent} plays solutions, and a training adds it to prompts itself; add --solutions"
        )
    # Imported when they are needed: they read images.
    from lmm_r1.agents.environment import demonstration_of, load_environment

    environment = load_environment(config.agent, options=json_object(config.agent_options, flag="--agent_options"))

    def played(made: TaskRow) -> Mapping[str, object]:
        record = made.record(solution=False)
        row = parse_row(record, location=f"task {config.task}", base_dir=Path(), answer_required=False)
        messages = demonstration_of(environment, row, made.turns or (made.solution,))
        return {**record, "messages": stored_messages(messages, keep_pictures=True)}

    return played


def _with_settings(task: Task, config: MakeTaskConfig) -> Task:
    asked = {setting.name: getattr(config, setting.name) for setting in fields(TaskSettings)}
    given = {name: value for name, value in asked.items() if value is not None}
    own = [setting.name for setting in fields(task) if setting.name in asked]
    for name, value in given.items():
        if name not in own:
            flags = ", ".join(f"--{setting}" for setting in own)
            raise UserError(f"--{name} {value}: no setting of {config.task}, which takes {flags}; leave it out")
    try:
        return replace(task, **given)
    except ValueError as error:
        flags = " ".join(f"--{name} {value}" for name, value in given.items())
        raise UserError(f"{flags}: {error}") from error


if __name__ == "__main__":
    run_command(main)
