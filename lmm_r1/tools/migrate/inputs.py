"""Settings files of other systems: YAML, or a bash script with the command that trains."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from lmm_r1.errors import UserError
from lmm_r1.tools.migrate.easyr1 import EASYR1
from lmm_r1.tools.migrate.openrlhf import TABLES, dotted_table
from lmm_r1.tools.migrate.r1_v import R1_V
from lmm_r1.tools.migrate.shell import INSTEAD, CommandLine, Script
from lmm_r1.tools.migrate.table import TO_FILL_IN, Note, Table, differs, lacks, put
from lmm_r1.tools.migrate.verl import VERL

KEY_FLAG = "use_wandb"
# With a zero in front it is a name: a date, the number of a run.
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d*)")
_FRACTION = re.compile(r"[+-]?(\d+\.\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|\d+[eE][+-]?\d+)")
_NO_VALUE = "it has no value; add what it stands for to the command"
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_STAND_IN = re.compile("\ue000(\\d+)\ue001")
_HYDRA = ("--config-path", "--config-name", "--config-dir")
_STANDARD = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's own files, whose defaults the tables have."""
_PROCESSES = re.compile(r"--?(?:nproc[_-]per[_-]node|num_gpus|num_processes)")
_MACHINES = re.compile(r"--?(?:nnodes|num_nodes|num_machines)")
_SHOWN_ONLY = ("echo", "printf", "cat", "pip", "pip3", "tee", "grep", "pkill", "ls", "mkdir", "conda")
"""Commands that do not start their words."""
_LAUNCHERS: Mapping[re.Pattern[str], Mapping[str, Table]] = {
    re.compile(r"openrlhf\.cli\.(\w+)|(?:.*/)?(train_(?:ppo_ray|ppo|sft|dpo|rm|kd))\.py"): TABLES,
    re.compile(r"(?:verl|recipe|verl_dapo)(?:\.\w+)*\.(main\w*)|(?:.*/)?verl/trainer/(main_ppo)\.py"): {
        **dict.fromkeys(("main_ppo", "main_dapo", "main_ppo_sync"), VERL),
        "main": EASYR1,
    },
    # R1-V and its relatives have their trainer in a package of this name.
    re.compile(r"(?:.*/)?open_r1[./](grpo|sft)\w*?(?:\.py)?()"): R1_V,
}
_KNOWN = (
    "OpenRLHF (python -m openrlhf.cli.train_ppo_ray), EasyR1 (verl.trainer.main), verl (verl.trainer.main_ppo) or R1-V "
    "(torchrun src/open_r1/grpo.py)"
)
_OTHERS = "give the script that has one, or the settings to our command as flags or YAML, which names ours"
_INSTEAD = "give what it sets as NAME=VALUE after the file"
_SERVER = re.compile(r"(?:openrlhf\.models\.)?remote_rm\.(\w+)|(?:.*/)?remote_rm/(\w+)\.py")


class Launch(NamedTuple):
    """A command that trains."""

    table: Table
    words: tuple[str, ...]
    """Its arguments."""
    line: int
    launcher: tuple[str, ...] = ()
    """The words before it: torchrun and its flags."""


class RunOfAnother(NamedTuple):
    """The settings of one run, by the names of the system that it is for."""

    source: str
    """What was read, for messages."""
    table: Table
    values: Mapping[str, object]
    shown: Mapping[str, str]
    """Names of settings in the file that differ from the table's."""
    why_open: Mapping[str, str] = {}
    """Why variables in values have no value, by how the script writes them."""
    remarks: Sequence[Note] = ()
    """What the user should know of how the file was read."""


def read_run(path: Path, overrides: Sequence[str] = ()) -> RunOfAnother:
    """Read a YAML file, or a bash script with a command that trains; the script is not run.

    Args:
        overrides: `key=value` for settings and for variables of a script, which win over the file's.

    Raises:
        UserError: the file is missing, or holds something that cannot be read, named by its line.
    """
    if path.suffix in (".yaml", ".yml"):
        tree = _mapping(path)
        return _of_tree(tree, overrides, _table_of(tree, path=path), path=path)
    named = [override.partition("=") for override in overrides]
    script = Script(
        _read(path), path=path, given={name: value for name, _, value in named if _VARIABLE.fullmatch(name)}
    )
    remarks: list[Note] = []
    launch = _find_launch(script, path=path, remarks=remarks)
    settings = ["".join(one) for one in named if one[0] in launch.table.by_name or "." in one[0]]
    # Of the arguments, whether they are `key=value`.
    read = _of_settings if launch.table in (VERL, EASYR1) else _of_flags
    run = read(launch, settings, path=path, remarks=remarks)
    return run._replace(why_open=script.why_open, remarks=remarks)


def _find_launch(script: Script, *, path: Path, remarks: list[Note]) -> Launch:
    """Return the first command that trains; raises UserError if there is none outside of loops and conditions."""
    launches = [launch for command in script.commands if (launch := _launch_of(command))]
    if not launches:
        for command, block in script.in_blocks:
            if _launch_of(command):
                what = f"the command that trains is in {block}, which is not read"
                raise UserError(f"{path}:{command.line}: {what}; {INSTEAD}")
        raise UserError(f"{path}: no command in it trains with {_KNOWN}; {_OTHERS}")
    for line in script.broken:
        text = "a comment or a blank after \\ ends the command before it in bash; it is read as a part of it"
        remarks.append(differs(str(path), f"line {line}: {text}"))
    for command in script.commands:
        for match in map(_SERVER.fullmatch, command.words if command.words[0] not in _SHOWN_ONLY else ()):
            name = (match[1] or match[2]).removesuffix("_verifier") if match else ""
            text = (
                f"start `lmm-r1 serve_verifier {name}` first, and name the column of the answers with --data.label_key"
            )
            what = f"line {command.line} starts a server of rewards, which reads the answers itself"
            remarks += [differs(str(path), f"{what}: {text}")] if match else []
    unread = [*script.blocks.items(), *((one.line, "another command that trains") for one in launches[1:])]
    remarks += [lacks(f"line {line}", f"{what}, which is not read: {_INSTEAD}") for line, what in unread]
    return launches[0]


def _launch_of(command: CommandLine) -> Launch | None:
    words = command.words if command.words[0] not in _SHOWN_ONLY else ()
    for place, word in enumerate(words):
        for launcher, tables in _LAUNCHERS.items():
            if match := launcher.fullmatch(word):
                name = match[1] or match[2]
                # Recipes have their own entry points around the same settings.
                table = VERL if word.startswith("recipe.") and name.startswith("main_") else tables.get(name)
                return Launch(table, words[place + 1 :], command.line, words[:place]) if table else None
    return None


def _changed(value: object, change: Callable[[str], object]) -> object:
    """Return a value with all of its texts changed."""
    if isinstance(value, list):
        return [_changed(one, change) for one in value]
    if isinstance(value, dict):
        return {key: _changed(one, change) for key, one in value.items()}
    return change(value) if isinstance(value, str) else value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a UTF-8 text file; convert it to UTF-8") from error


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number, as OmegaConf does."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FRACTION.pattern + "$"), list("-+0123456789."))


def _mapping(path: Path) -> dict[str, object]:
    text = _read(path)
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not valid YAML: {error.problem}; correct it") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path}:1: expected settings such as `data:` and `worker:`; give the file of a run")
    for line, content in enumerate(text.splitlines(), start=1):
        if "${" in content.partition("#")[0]:
            raise UserError(f"{path}:{line}: OmegaConf would replace ${{...}} with another value; write that value")
    return tree


def _table_of(tree: Mapping[str, object], *, path: Path) -> Table:
    if "actor_rollout_ref" in tree:
        return VERL
    if tree.keys() & {"worker", "algorithm", "trainer"}:
        return EASYR1
    if "dataset_name" in tree:
        return R1_V["sft"]
    raise UserError(
        f"{path}: neither settings of EasyR1 (data, algorithm, worker, trainer) nor of verl (actor_rollout_ref) or R1-V "
        f"(dataset_name); found {', '.join(map(str, tree)) or 'nothing'}; {_OTHERS}"
    )


def _base(config: Path, *, script: Path, line: int) -> dict[str, object]:
    """Read the file that a script names, which starts from the folder in which it was meant to be run."""
    if (found := _found(config, script=script)) is None:
        advice = "run this in the script's project"
        raise UserError(f"{script}:{line}: no file {config} here or above the script; {advice}")
    return _mapping(found)


def _found(config: Path, *, script: Path) -> Path | None:
    folders = [Path(), *script.absolute().parents]
    return next((folder / config for folder in folders if (folder / config).is_file()), None)


def _of_settings(launch: Launch, overrides: Sequence[str], *, path: Path, remarks: list[Note]) -> RunOfAnother:
    """Return the run of a command whose arguments are `key=value`."""
    table, settings = launch.table, list[str]()
    tree: dict[str, object] = {}
    hydra: dict[str, str] = {}
    words = iter(launch.words)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "config" and equals:
            tree = _base(Path(value), script=path, line=launch.line)
        elif name in _HYDRA:
            hydra[name] = value if equals else next(words, "")
        elif equals and any(known.startswith(f"{name}.") for known in (*table.by_name, *table.names)):
            remarks.append(lacks(word, "it selects a file of defaults, which is not read"))
        elif name.startswith("~"):
            remarks.append(lacks(word, "it removes a setting; leave that out of the result"))
        elif not equals and word[0] in "$`":
            remarks.append(lacks(word, _NO_VALUE))
        else:
            settings.append(word)
    name = hydra.get("--config-name", "").removesuffix(".yaml")
    file = Path(hydra.get("--config-path", hydra.get("--config-dir", ""))) / f"{name}.yaml"
    if hydra and name not in _STANDARD and (found := _found(file, script=path)):
        tree = {key: value for key, value in _mapping(found).items() if key not in ("defaults", "hydra")}
    elif hydra:
        remarks += [lacks(flag, f"{value}: defaults of other files are not read") for flag, value in hydra.items()]
    return _of_tree(tree, [*settings, *overrides], table, path=path, line=launch.line)


def _of_tree(
    tree: dict[str, object], words: Sequence[str], table: Table, *, path: Path, line: int = 0
) -> RunOfAnother:
    for word in words:
        name, equals, text = word.partition("=")
        where = f"{path}:{line}" if line else word
        if not equals:
            raise UserError(f"{where}: {word} is not a setting such as trainer.nnodes=1; correct it")
        put(tree, name.lstrip("+"), _value(text, name=name, where=where), where=where)
    given = dict(_flat(tree, {*table.by_name, *table.names}, prefix=""))
    values = {table.names.get(name, name): value for name, value in given.items()}
    # Earlier names are shown only if they are given.
    shown = {new: old for old, new in table.names.items() if table is VERL and new not in given}
    shown |= {new: old for old, new in table.names.items() if old in given}
    return RunOfAnother(source=str(path), table=table, values=values, shown=shown)


def _value(text: str, *, name: str, where: str) -> object:
    """Return a value of YAML, in which places to fill in are text."""
    found = [match[0] for match in TO_FILL_IN.finditer(text)]
    numbers = iter(range(len(found)))

    def restored(text: str) -> str:
        return _STAND_IN.sub(lambda match: found[int(match[1])], text)

    plain = TO_FILL_IN.sub(lambda match: f"\ue000{next(numbers)}\ue001", text)
    try:
        return _changed(yaml.load(plain, Loader=_Loader), restored)
    except yaml.YAMLError as error:
        if plain.startswith(("[", "{")):
            raise UserError(f"{where}: the value of {name} is not valid YAML: {text}; correct it") from error
        return text


def _flat(tree: Mapping[str, object], leaves: set[str], *, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and name not in leaves:
            yield from _flat(value, leaves, prefix=f"{name}.")
        elif value != {} or name in leaves:
            yield name, value


def _of_flags(launch: Launch, overrides: Sequence[str], *, path: Path, remarks: list[Note]) -> RunOfAnother:
    """Return the run of a command whose arguments are flags."""
    table = launch.table
    openrlhf = table.system.startswith("OpenRLHF")
    values: dict[str, object] = {} if openrlhf else dict(_launched(launch))
    name = ""
    for word in launch.words:
        if word.startswith("--"):
            flag, equals, text = word[2:].partition("=")
            name = flag.replace("-", "_")
            values[name] = _scalar(text, switches=not openrlhf) if equals else True
        elif word[:1] in ("$", "`") and ("[" in word or not name or values[name] is not True):
            remarks.append(lacks(word, _NO_VALUE))
        elif name:
            # Without a value a flag is a switch, several values are a list.
            before, value = values[name], _scalar(word, switches=not openrlhf)
            values[name] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
        else:
            raise UserError(f"{path}:{launch.line}: {word} belongs to no flag; correct the command")
    if not openrlhf and isinstance(config := values.pop("config", None), str):
        values = {**_base(Path(config), script=path, line=launch.line), **values}
    if openrlhf and any("." in name for name in values):
        table = dotted_table(table.command)
    for override in overrides:
        key, _, text = override.partition("=")
        values[key] = _value(text, name=key, where=override)
    if KEY_FLAG in values:
        # A key is not written, wherever it comes from.
        values[KEY_FLAG] = True
    named = {table.names.get(key, key): value for key, value in values.items()}
    shown = {new: old for old, new in table.names.items() if old in values}
    return RunOfAnother(source=str(path), table=table, values=named, shown=shown)


def _launched(launch: Launch) -> Iterator[tuple[str, object]]:
    """Yield the settings that the launcher gives."""
    for place, word in enumerate(launch.launcher):
        name, equals, value = word.partition("=")
        value = value if equals else next(iter(launch.launcher[place + 1 :]), "")
        if value.isdecimal() and _PROCESSES.fullmatch(name):
            yield "nproc_per_node", int(value)
        elif value.isdecimal() and _MACHINES.fullmatch(name):
            yield "nnodes", int(value)


def _scalar(text: str, *, switches: bool) -> object:
    if switches and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FRACTION.fullmatch(text) else text
