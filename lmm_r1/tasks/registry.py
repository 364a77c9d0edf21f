"""The procedural tasks by name; a task's module is imported when it is asked for."""

import importlib

from lmm_r1.errors import UserError
from lmm_r1.tasks.base import Task

# Each module has a `TASK` with its default settings.
TASKS = {
    "digits": "lmm_r1.tasks.digits",
}


def get_task(name: str) -> Task:
    """The task called `name`; raises UserError listing the known ones."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}; known tasks are {', '.join(TASKS)}")
    return importlib.import_module(TASKS[name]).TASK
