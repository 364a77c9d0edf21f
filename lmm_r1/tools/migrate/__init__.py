"""Settings of other trainers as settings of ours: pure tables and rules, from their names and values to our flags."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lmm_r1 import dotted
from lmm_r1.tools.migrate.easyr1 import EASYR1
from lmm_r1.tools.migrate.inputs import RunOfAnother, read_run
from lmm_r1.tools.migrate.openrlhf import R1_V, TABLES
from lmm_r1.tools.migrate.table import (
    CONFIG_CLASSES,
    NOT_NEEDED,
    Conversion,
    Note,
    Setting,
    Table,
    convert,
    names_of,
    to_document,
)
from lmm_r1.tools.migrate.verl import VERL

__all__ = ["Conversion", "Note", "RunOfAnother", "convert", "read_run", "to_document"]


TYPED = {name: flags.split() for flags, names in names_of("typed").items() for name in names.split()}
"""Our flags by the names that people type, of which the first that a command has is meant."""
_FOREIGN: Sequence[Table] = (*TABLES.values(), *R1_V.values(), EASYR1, VERL)
_FLAGS = {command: frozenset(dotted.leaf_types(config_class)) for command, config_class in CONFIG_CLASSES.items()}
_CONVERTS = "; `lmm-r1 convert_config FILE` converts whole files"


def counterpart(name: str, *, known: Collection[str]) -> str | None:
    """Return what another trainer's setting is here, as the end of a sentence; None for a name that none of them has.

    Args:
        name: without the hyphens before it, with underscores.
        known: the names of the command's flags; the sentence names no others.
    """
    settings = list(_settings(name, known=known))
    converts = _CONVERTS if settings else ""
    for setting in settings:
        if setting.flags and set(setting.flags) <= set(known):
            return f"is {' and '.join(f'--{flag}' for flag in setting.flags)} here{converts}"
        if setting.by_rule and setting.says:
            return f"is {setting.says}{converts}"
    if here := renamed(name, known=known) or (renamed(name.rpartition(".")[2], known=known) if settings else None):
        return here + converts
    if says := next((setting.says for setting in settings if setting.says), ""):
        return (f"is {says}" if says == NOT_NEEDED else f"has no counterpart here: {says}") + converts
    return f"has no counterpart here{converts}" if settings or name in TYPED else None


def renamed(name: str, *, known: Collection[str]) -> str | None:
    """Return the end of the sentence for a name that has a flag here; None for any other."""
    for candidate in TYPED.get(name, ()):
        flag, _, value = candidate.partition("=")
        if flag in known and flag != name:
            return f"is --{flag} {value}".rstrip() + " here"
    return None


def _settings(name: str, *, known: Collection[str]) -> Iterator[Setting]:
    """Yield the settings of this name in the tables of the command that has these flags."""
    # `plan` has more flags than the command that it plans, and one trainer may have all flags of another.
    inside = [command for command, flags in _FLAGS.items() if flags <= set(known)]
    command = max(inside, key=lambda one: len(_FLAGS[one]), default=None)
    for table in _FOREIGN:
        if table.command == command and (setting := table.by_name.get(table.names.get(name, name))):
            yield setting
