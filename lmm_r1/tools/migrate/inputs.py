"""Settings files of other systems: YAML, or a bash script with the command that trains.

Of a script, assignments, references to variables and plain commands are split by `shlex`; nothing is run. Loops,
conditions, functions, arrays and the output of commands are not read, and what they set stays without a value.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import yaml

from lmm_r1.errors import UserError
from lmm_r1.tools.migrate.easyr1 import EASYR1
from lmm_r1.tools.migrate.openrlhf import R1_V, TABLES, dotted_table
from lmm_r1.tools.migrate.table import TO_FILL_IN, Note, Table, differs, lacks, put
from lmm_r1.tools.migrate.verl import VERL

_INSIDE = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*"
_REFERENCE = (
    rf"\$\((?P<command>{_INSIDE})\)|`[^`]*`|\$\{{(?P<name>\w+|[@*])(?:(?P<mark>:?[-=])(?P<default>(?:[^{{}}]|\$\{{[^{{}}]*\}})*))?\}}"
    r"|\$\{(?P<other>[^{}]*)\}|\$(?P<short>\d|[A-Za-z_]\w*|[@*#?$!-])"
)
_QUOTED = rf"\"(?:\\.|\$\({_INSIDE}\)|[^\"\\])*\""
_COMMENT = r"(?<!\S)#[^\n]*"
# `<OUTPUT_DIR>` of a README is a place to fill in, and no redirection.
_PLACE = r"<[A-Za-z][\w.-]*>(?=[\s\"'/]|$)"
_PART = re.compile(
    rf"'[^']*'|{_QUOTED}|\\.|{_COMMENT}|(?<!\S)\d+(?=[<>])|(?<![^\s=:])~(?=/)|{_PLACE}|{_REFERENCE}", re.DOTALL
)
_PART_IN_QUOTES = re.compile(rf"\\(?P<escaped>[$`])|\\.|{_REFERENCE}", re.DOTALL)
_COMMAND = re.compile(
    rf"(?:'[^']*'|{_QUOTED}|\\.|{_COMMENT}|\$\({_INSIDE}\)|(?!&&|\|\|)[^\n;'\"\\])*(?P<end>\n|;|&&|\|\||\Z)?",
    re.DOTALL,
)
# A comment, or a blank after the backslash, ends a command in bash, though flags follow.
_BROKEN = re.compile(
    r"(?:\\[ \t]+(?:#[^\n]*)?\n|(?<=\\\n)(?:[ \t]*#[^\n]*\n)+)(?=[ \t]*(?:--[A-Za-z]|[+~]*\w+(?:\.\w+)+=))"
)
_HERE_DOCUMENT = re.compile(r"(?<![<\d])<<-?\s*['\"\\]?([A-Za-z_]\w*)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPERATORS = ";&|<>()"
_BLOCKS = ("if", "for", "while", "until", "case", "select", "function", "{")
_ENDS = ("fi", "done", "esac", "}")
_BEFORE_COMMANDS = ("then", "else", "elif", "do", "!", "time")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SETTING = ("for", "select", "read", "mapfile", "readarray", "getopts", "unset")
_SUCCEEDING = ("=", "cd", "mkdir", "source", ".", *_DECLARING)
_ARRAY = "an array"
_KEPT_BLANK = "\u00a0"
"""A blank in what has no value, at which shlex splits no word."""


class CommandLine(NamedTuple):
    """A command of a script, with the values of its variables."""

    words: tuple[str, ...]
    """References to variables without a value are kept as they are: `${NAME}`."""
    line: int


def _started(command: CommandLine) -> tuple[str, ...]:
    """Return the words of a command that may start something."""
    return command.words if command.words[0] not in _SHOWN_ONLY else ()


class Script:
    """What is read of a script."""

    def __init__(self, text: str, *, path: Path, given: Mapping[str, str]) -> None:
        """Read the script from its beginning to its end.

        Args:
            given: values of variables, which the script does not change.

        Raises:
            UserError: a quote is not closed.
        """
        self.commands: list[CommandLine] = []
        self.in_blocks: list[tuple[CommandLine, str]] = []
        """Commands that are not read, and what they are in."""
        self.blocks: dict[int, str] = {}
        """What is not read, by the number of its first line."""
        self.broken: list[int] = []
        """Lines after which a command would end in bash, and is read on."""
        self.why_open: dict[str, str] = {}
        """Why parts of words have no value, by how the words have them."""
        self._path, self._given = path, given
        self._variables = {name: os.environ[name] for name in ("HOME", "USER") if name in os.environ}
        self._variables |= {"PWD": ".", "@": "", "*": "", **given}
        self._unread: dict[str, str] = {}
        self._open: list[str] = []
        self._before = ""
        text = text.replace("\r\n", "\n")
        self.broken = [text.count("\n", 0, match.start()) + 1 for match in _BROKEN.finditer(text)]
        self._read(_BROKEN.sub(lambda match: "\\\n" * match[0].count("\n"), text) + "\n", first=1)

    def _read(self, text: str, *, first: int) -> None:
        position, after = 0, ""
        while position < len(text):
            match = _COMMAND.match(text, position)
            assert match is not None, "it matches nothing as well"
            line = first + text.count("\n", 0, position)
            if match["end"] is None:
                opened = line + match[0].count("\n")
                what = f"a quote {text[match.end()]} is opened and not closed"
                raise UserError(f"{self._path}:{opened}: {what}; close it")
            command, position = match[0].removesuffix(match["end"]), match.end()
            try:
                self._split(command, line, after=after)
            except ValueError as error:
                raise UserError(f"{self._path}:{line}: not read: {error}; {INSTEAD}") from error
            after = match["end"] if command.strip() else after
            # The document of `read` is often the flags of a command.
            if (document := _HERE_DOCUMENT.search(command)) and not command.lstrip().startswith("read "):
                end = re.compile(rf"^\s*{document[1]}\s*$", re.MULTILINE).search(text, position)
                position = end.end() + 1 if end else len(text)

    def _split(self, text: str, line: int, *, after: str) -> None:
        """Read a command, of which a part may be in parentheses or after a pipe."""
        lexer = shlex.shlex(self._expanded(text, line), posix=True, punctuation_chars=_OPERATORS)
        lexer.commenters, lexer.whitespace_split = "", True
        words: list[str] = []
        redirected = False
        for token in [*lexer, ";"]:
            if not token or token.strip(_OPERATORS):
                words += [] if redirected else [token]
                continue
            if redirected := "<" in token or ">" in token:
                continue
            if token[0] == "(" and words and (match := _ASSIGNMENT.fullmatch(words[-1])) and not match[3]:
                self._forget([match[1]], line, _ARRAY)
                self.blocks.setdefault(line, _ARRAY)
                self._open.append(_ARRAY)
            else:
                self._command(words, line, after=after)
            if ")" in token and self._open[-1:] == [_ARRAY]:
                self._open.pop()
            words = []

    def _command(self, words: list[str], line: int, *, after: str) -> None:
        if not words:
            return
        first = next((word for word in words if word not in _BEFORE_COMMANDS), "")
        if self._open[-1:] != [_ARRAY] and (first in _BLOCKS or words[-1] == "{"):
            if not self._open:
                self.blocks[line] = f"`{first}`"
            self._open.append(f"`{first}`")
        assigned = [match for match in map(_ASSIGNMENT.fullmatch, words) if match]
        if self._open:
            others = words[1:] if first in _SETTING else ()
            self._forget([*(match[1] for match in assigned), *others], line, self._open[0])
            self.in_blocks.append((_shown(words, line), self._open[0]))
            if first in _ENDS and self._open[-1] != _ARRAY:
                self._open.pop()
        elif first in _SETTING:
            self._forget(words[1:], line, f"`{first}`")
        elif first in _DECLARING or len(assigned) == len(words):
            if after in ("&&", "||") and self._before not in _SUCCEEDING:
                self._forget([match[1] for match in assigned], line, f"a condition, {after}")
            else:
                self._assign(assigned)
            first = "="
        elif inner := _inner_script(words):
            self._read(inner + "\n", first=line)
        else:
            self.commands.append(_shown(words, line))
        self._before = first

    def _assign(self, assigned: Iterable[re.Match[str]]) -> None:
        for name, plus, value in (match.groups() for match in assigned):
            if name not in self._given and not (plus and name in self._unread):
                self._variables[name] = (self._variables.get(name, "") if plus else "") + value
                self._unread.pop(name, None)

    def _forget(self, names: Iterable[str], line: int, what: str) -> None:
        for name in names:
            if name not in self._given:
                self._variables.pop(name, None)
                self._unread[name] = f"line {line} sets it by {what}, which is not read"

    def _expanded(self, text: str, line: int) -> str:
        """Return text with its variables replaced, such that shlex splits it as bash would."""

        def in_quotes(match: re.Match[str]) -> str:
            if match["escaped"] or match[0][0] == "\\":
                return match["escaped"] or match[0].replace("\\\n", "")
            return re.sub(r"[\\\"]", r"\\\g<0>", self._value(match, line))

        def part(match: re.Match[str]) -> str:
            found = match[0]
            if found[0] in "'\\":
                return found if found != "\\\n" else ""
            if found[0] == '"':
                return "" if re.fullmatch(r"\"\$\{?[@*]\}?\"", found) else _PART_IN_QUOTES.sub(in_quotes, found)
            if found[0] == "#" or found.isdigit():
                return ""
            value = found if found[0] == "<" else self._variables["HOME"] if found == "~" else self._value(match, line)
            # What is assigned is not split at blanks.
            assigned = re.search(r"(?:^|\s)[A-Za-z_]\w*\+?=\S*\Z", text[: match.start()])
            return re.sub(r"\W" if assigned else r"[^\w\s]", r"\\\g<0>", value)

        return _PART.sub(part, text)

    def _value(self, match: re.Match[str], line: int) -> str:
        """Return the value of a reference; as it is written if it has none."""
        command, name = match["command"], match["name"] or match["short"]
        if command == "pwd":
            return "."
        if command and command[0] == "(":
            name_of = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
            numbers = name_of.sub(lambda one: self._variables.get(one[1], one[0]), command[1:-1])
            if re.fullmatch(r"\s*\d+(?:\s*[*+]\s*\d+)*\s*", numbers):
                return str(sum(math.prod(map(int, term.split("*"))) for term in numbers.split("+")))
        value = self._variables.get(name) if name else None
        mark, default = match["mark"] or "", match["default"]
        if default is not None and name not in self._unread and (value is None or (mark[0] == ":" and not value)):
            value = " ".join(shlex.split(self._expanded(default, line)))
            if mark[-1] == "=":
                self._variables[name] = value
        if value is not None:
            return value
        shown = f"${{{name}}}" if name else match[0]
        known = self._unread.get(name or re.split(r"\W", match["other"] or "", maxsplit=1)[0])
        self.why_open[shown] = known or f"line {line}: the script gives it no value"
        return re.sub(r"\s", _KEPT_BLANK, shown)


INSTEAD = "write the command's settings as a YAML file, or the command with its values into a file of its own"


def _shown(words: Iterable[str], line: int) -> CommandLine:
    return CommandLine(tuple(word.replace(_KEPT_BLANK, " ") for word in words), line)


def _inner_script(words: list[str]) -> str:
    """Return the text that a command runs as a script."""
    for shell, flag, text in zip(words, words[1:], words[2:], strict=False):
        if PurePosixPath(shell).name in ("bash", "sh", "zsh") and re.fullmatch(r"-\w*c", flag):
            return text
    return " ".join(words[1:]) if words[0] == "eval" else ""


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
    script = Script(_read(path), path=path, given={name: text for name, _, text in named if _VARIABLE.fullmatch(name)})
    remarks: list[Note] = []
    launch = _find_launch(script, path=path, remarks=remarks)
    settings = ["".join(one) for one in named if one[0] in launch.table.by_name or "." in one[0]]
    # Of the arguments, whether they are `key=value`.
    read = _of_settings if launch.table in (VERL, EASYR1) else _of_flags
    return read(launch, settings, path=path, remarks=remarks)._replace(why_open=script.why_open, remarks=remarks)


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
        for match in filter(None, map(_SERVER.fullmatch, _started(command))):
            what = f"line {command.line} starts a server of rewards, which reads the answers itself"
            first = f"start `lmm-r1 serve_verifier {(match[1] or match[2]).removesuffix('_verifier')}` first"
            text = f"{what}: {first}, and name the column of the answers with --data.label_key"
            remarks.append(differs(str(path), text))
    unread = [*script.blocks.items(), *((one.line, "another command that trains") for one in launches[1:])]
    remarks += [lacks(f"line {line}", f"{what}, which is not read: {_INSTEAD}") for line, what in unread]
    return launches[0]


def _launch_of(command: CommandLine) -> Launch | None:
    words = _started(command)
    for place, word in enumerate(words):
        for launcher, tables in _LAUNCHERS.items():
            if match := launcher.fullmatch(word):
                name = match[1] or match[2]
                # Recipes have their own entry points around the same settings.
                table = VERL if word.startswith("recipe.") and name.startswith("main_") else tables.get(name)
                return Launch(table, words[place + 1 :], command.line, words[:place]) if table else None
    return None


def _restored(value: object, places: Sequence[str]) -> object:
    """Return a value of YAML with places to fill in instead of what stands for them."""
    if isinstance(value, list):
        return [_restored(one, places) for one in value]
    if isinstance(value, dict):
        return {key: _restored(one, places) for key, one in value.items()}
    return _STAND_IN.sub(lambda match: places[int(match[1])], value) if isinstance(value, str) else value


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
    if found := _found(config, script=script):
        return _mapping(found)
    raise UserError(f"{script}:{line}: no file {config} here or above the script; run this in the script's project")


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
    return _run_of(given, table, path=path)


def _run_of(given: Mapping[str, object], table: Table, *, path: Path) -> RunOfAnother:
    """Return the run with values that are given by the system's names, or earlier ones, which are shown only if given."""
    values = {table.names.get(name, name): value for name, value in given.items()}
    shown = {new: old for old, new in table.names.items() if table is VERL and new not in given}
    shown |= {new: old for old, new in table.names.items() if old in given}
    return RunOfAnother(source=str(path), table=table, values=values, shown=shown)


def _value(text: str, *, name: str, where: str) -> object:
    """Return a value of YAML, in which places to fill in are text."""
    found = [match[0] for match in TO_FILL_IN.finditer(text)]
    numbers = iter(range(len(found)))
    plain = TO_FILL_IN.sub(lambda match: f"\ue000{next(numbers)}\ue001", text)
    try:
        return _restored(yaml.load(plain, Loader=_Loader), found)
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
    return _run_of(values, table, path=path)


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
