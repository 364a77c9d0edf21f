"""Settings of other trainers as a file for ours: `lmm-r1 convert_config FILE [KEY=VALUE ...] [--output FILE]`."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lmm_r1 import dotted
from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import YamlError, parse, parse_settings
from lmm_r1.config import resolve
from lmm_r1.config.declared import ArgumentPlace
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable, write_atomically
from lmm_r1.tools.migrate import Conversion, convert, read_run, to_document
from lmm_r1.tools.migrate.table import CONFIG_CLASSES, missing

PROG = "lmm-r1 convert_config"
DESCRIPTION = (
    "Write the settings of a run of OpenRLHF, LMM-R1, EasyR1, verl, Mini-o3 or R1-V as a YAML file "
    "for --config of our trainers. The file is a script, which is read and not run, or YAML. Comments at the top of "
    "the result list what is left to fill in, has no counterpart, or means something else."
)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    file: Annotated[tuple[str, ...], ArgumentPlace("FILE [KEY=VALUE ...]")]
    """A YAML file or a bash script, then settings and variables that win over it: trainer.nnodes=2 HOME=/data."""
    output: Path | None = None
    """Where the result goes; by default it is printed."""


CONFIG = ConvertConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Write the converted settings, and say on stderr what a user must look at."""
    config = parse(ConvertConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        if config.output is not None:
            check_creatable(config.output, flag="--output")
        path, *overrides = config.file
        run = read_run(Path(path), overrides)
        conversion = convert(run.values, run.table, shown=run.shown, why_open=run.why_open, remarks=run.remarks)
        if lacking := missing(conversion):
            raise UserError(
                f"{path}: it names no {' and no '.join(lacking)}; give what the script gets from elsewhere"
            )
        document = to_document(conversion, source=run.source, system=run.table.system)
        refusal = _check(document, conversion)
        if config.output is None:
            print(document, end="")
        else:
            write_atomically(config.output, text=document)
            kinds = [note.kind for note in conversion.notes]
            print(
                f"{config.output}: {len(conversion.flags)} settings for {conversion.command}; "
                f"{kinds.count('without counterpart')} have no counterpart, {kinds.count('another meaning')} mean "
                "something else, listed in the comments at its top"
            )
        if refusal is not None:
            print(f"{PROG}: {conversion.command} refuses this file until you correct it: {refusal}", file=sys.stderr)


def _check(document: str, conversion: Conversion) -> str | None:
    """Read the document as `--config` does, and return why the trainer would refuse it; None if it would not."""
    config_class: Any = CONFIG_CLASSES[conversion.command]
    try:
        settings = parse_settings(document, dotted.leaf_types(config_class), source="line")
    except YamlError as error:
        variables = [re.findall(r"\w+", place.text)[0] for place in conversion.open if place.flag in str(error)]
        advice = f"give {variables[0]}=VALUE after the file's name" if variables else "correct the value"
        raise UserError(f"the converted settings cannot be read back: {error}; {advice}") from error
    config = dotted.replace(config_class(), settings)
    # Its warnings are about this machine, or will be said again by the trainer.
    resolving = logging.getLogger("lmm_r1.config")
    level = resolving.level
    resolving.setLevel(logging.ERROR)
    try:
        resolve(config)
    except UserError as error:
        return str(error)
    finally:
        resolving.setLevel(level)
    return None


if __name__ == "__main__":
    run_command(main)
