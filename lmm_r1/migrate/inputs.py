"""Files that say what a run of another system is: YAML settings, or a bash script with the command that trains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1 import EASYR1
from lmm_r1.migrate.openrlhf_06 import TABLES
from lmm_r1.migrate.shell import Script, Word
from lmm_r1.migrate.table import Table
from lmm_r1.migrate.verl import VERL

YAML_SUFFIXES = (".yaml", ".yml")
OPENRLHF = "openrlhf.cli."
YAML_MODULES = {"verl.trainer.main": EASYR1, "verl.trainer.main_ppo": VERL}
"""Trainers whose command lines are `key=value`."""
KEY_FLAG = "use_wandb"
# With a zero in front it is a name: a date, the number of a run.
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d*)")
_FRACTION = re.compile(r"[+-]?(\d+\.\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|\d+[eE][+-]?\d+)")


@dataclass(frozen=True, kw_only=True)
class RunOfAnother:
    """The settings of one run, by the names of the system that it is for."""

    source: str
    """What was read, for messages."""
    table: Table
    values: Mapping[str, object]
    shown: Mapping[str, str]
    """What settings are called in the file, where the table calls them otherwise."""


def read_run(path: Path, overrides: Sequence[str] = ()) -> RunOfAnother:
    """Read a YAML file of EasyR1 or verl, or a bash script with a command that trains with one of them or OpenRLHF.

    Args:
        overrides: `key=value` for YAML settings and those that a script gives, which win over the file's.

    Raises:
        UserError: the file is missing, or holds something that cannot be read, named by its line.
    """
    text = _read(path)
    given = [Word(override, 0) for override in overrides]
    if path.suffix in YAML_SUFFIXES:
        tree = _mapping(text, path=path)
        return _of_tree(tree, given, source=str(path), path=path, table=_table_of(tree, path=path))
    module, words = Script(text, path=path).command((OPENRLHF, *YAML_MODULES))
    if module.startswith(OPENRLHF):
        if overrides:
            raise UserError(
                f"{overrides[0]}: {path} is a script for OpenRLHF, which takes no key=value; edit the result"
            )
        return _of_flags(module.removeprefix(OPENRLHF), words, path=path)
    # Where its name cannot be read, it is refused with the other settings.
    base = next((word for word in words if word.text.startswith("config=")), None)
    tree = {} if base is None else _base(Path(base.text.removeprefix("config=")), script=path, line=base.line)
    settings = [word for word in words if word is not base]
    return _of_tree(tree, [*settings, *given], source=str(path), path=path, table=YAML_MODULES[module])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file") from error


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number, as OmegaConf does."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FRACTION.pattern + "$"), list("-+0123456789."))


def _mapping(text: str, *, path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}:1: expected groups of settings such as `data:` and `worker:`")
    for line, content in enumerate(text.splitlines(), start=1):
        if "${" in content.partition("#")[0]:
            raise UserError(
                f"{path}:{line}: OmegaConf would put another value in the place of ${{...}}; write it down"
            )
    return tree


def _table_of(tree: Mapping[str, Any], *, path: Path) -> Table:
    if "actor_rollout_ref" in tree:
        return VERL
    if tree.keys() & {"worker", "algorithm", "trainer"}:
        return EASYR1
    raise UserError(
        f"{path}: neither settings of EasyR1 (data, algorithm, worker, trainer) nor of verl (actor_rollout_ref); found "
        f"{', '.join(map(str, tree)) or 'nothing'}"
    )


def _base(config: Path, *, script: Path, line: int) -> dict[str, Any]:
    """Read the file that a script names, which starts from the folder in which it was meant to be run."""
    folders = [Path(), *script.absolute().parents]
    found = next((folder / config for folder in folders if (folder / config).is_file()), None)
    if found is None:
        raise UserError(
            f"{script}:{line}: no file {config} here or above the script; run this in the script's project"
        )
    return _mapping(_read(found), path=found)


def _of_tree(tree: dict[str, Any], words: Sequence[Word], *, source: str, path: Path, table: Table) -> RunOfAnother:
    for word in words:
        if word.unreadable is not None:
            raise word.unreadable
        name, equals, text = word.text.partition("=")
        where = f"{path}:{word.line}" if word.line else word.text
        if not equals:
            raise UserError(f"{where}: {word.text} is no setting such as trainer.nnodes=1")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError as error:
            raise UserError(f"{where}: the value of {name} is not valid YAML: {text}") from error
        _put(tree, name.lstrip("+").split("."), value, where=where)
    given = dict(_flat(tree, {*table.by_name, *table.names}, prefix=""))
    values = {table.names.get(name, name): value for name, value in given.items()}
    # Of EasyR1's own names, those of earlier versions are shown only where they are given.
    shown = {new: old for old, new in table.names.items() if old in given or table is VERL}
    return RunOfAnother(source=source, table=table, values=values, shown=shown)


def _put(tree: dict[str, Any], keys: Sequence[str], value: object, *, where: str) -> None:
    *groups, last = keys
    for group in groups:
        inner = tree.get(group)
        if inner is None:
            inner = tree[group] = {}
        if not isinstance(inner, dict):
            raise UserError(f"{where}: {group} is a setting, and no group of settings")
        tree = inner
    tree[last] = value


def _flat(tree: Mapping[str, Any], leaves: set[str], *, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in leaves:
            yield from _flat(value, leaves, prefix=f"{name}.")
        elif value != {} or name in leaves:
            yield name, value


def _of_flags(command: str, words: Sequence[Word], *, path: Path) -> RunOfAnother:
    table = next((table for name, table in TABLES.items() if name == command), None)
    if table is None:
        raise UserError(f"{path}: openrlhf.cli.{command} is not converted; known are {', '.join(TABLES)}")
    values: dict[str, object] = {}
    name = ""
    for word in words:
        # A key is not written down, wherever it comes from.
        if word.unreadable is not None and name != KEY_FLAG:
            raise word.unreadable
        if word.text.startswith("--"):
            flag, equals, text = word.text[2:].partition("=")
            name = flag.replace("-", "_")
            values[name] = _scalar(text) if equals else True
        elif not name:
            raise UserError(f"{path}:{word.line}: {word.text} stands behind no flag")
        else:
            values[name] = _with(values[name], _scalar(word.text))
    return RunOfAnother(source=str(path), table=table, values=values, shown={})


def _with(before: object, value: object) -> object:
    """Return what a flag holds with one more value: a flag alone is a switch, several values are a list."""
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _scalar(text: str) -> object:
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FRACTION.fullmatch(text) else text
