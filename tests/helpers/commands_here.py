"""Training commands that run to their end in the process of the tests, whose libraries are loaded already.

What a kill does to a command, and what its start takes, is tested with processes of its own (`killed_runs`).
"""

import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import ray
from helpers.deepspeed_process import start_anew


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def run_here(command: str, argv: Sequence[str], *, folder: Path, columns: int = 120) -> Ended:
    """Run `lmm-r1 COMMAND` in a folder, with what it changes in this process put back."""
    main, before = import_module(f"lmm_r1.cli.{command}").main, dict(os.environ)
    code = 0
    # Files of the system: an engine asks for their numbers.
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err, pytest.MonkeyPatch.context() as patch:
        start_anew(patch)
        patch.setenv("COLUMNS", str(columns))
        patch.chdir(folder)
        try:
            with redirect_stdout(out), redirect_stderr(err):
                main(argv)
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            # As the end of its process would, where the command failed.
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)
        said = [stream.seek(0) or stream.read() for stream in (out, err)]
    return Ended(code=code, stdout=said[0], stderr=said[1])
