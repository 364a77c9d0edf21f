"""Settings files of other systems: YAML, or a bash script with the command that trains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1 import EASYR1
from lmm_r1.migrate.openrlhf_06 import TABLES
from lmm_r1.migrate.table import Table, put
from lmm_r1.migrate.verl import VERL

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_VARIABLE = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})(?:(:?)([-=])([^{{}}]*))?\}})")
_HERE = re.compile(r"\$\(pwd\)|\$\{PWD\}|\$PWD\b|`pwd`")
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_OPENS = ("if", "for", "while", "until", "case", "{")
_CLOSES = ("fi", "done", "esac", "}")
_FOLLOWED = ("then", "do", "else", "elif", "if", "while", "until", "{", "!")
"""Words that a separate command follows."""
_ESCAPED = {"$": "\ue000", "`": "\ue001"}
"""Stand-ins for characters that a backslash in double quotes escapes."""
_ARGUMENTS = ("$@", "${@}", "$*")
"""What the script itself was given: nothing."""
_OPERATORS = ";&|<>()\n"


@dataclass
class _Word:
    """A word as it is written, in pieces: text, and whether variables in it are expanded."""

    line: int
    pieces: list[tuple[str, bool, bool]] = field(default_factory=list)
    """Text, whether it may hold variables, and whether it is quoted."""

    @property
    def raw(self) -> str:
        return "".join(text for text, _, _ in self.pieces)


@dataclass(frozen=True)
class Word:
    """A word of a command, with its variables replaced."""

    text: str
    line: int
    unreadable: UserError | None = None
    """What is wrong with a word that only bash could read: raised by who needs it."""


@dataclass(frozen=True)
class _Command:
    """A simple command."""

    words: list[_Word]
    conditional: bool
    """Whether it follows `&&`, `||`, `|` or an open parenthesis."""
    array: bool
    """Whether an open parenthesis follows it: `NAME=(`."""


@dataclass(frozen=True)
class _Variable:
    text: str
    unreadable: UserError | str = ""
    """Why its text cannot be known: what is wrong with it itself, or with every use of it."""


class Script:
    """A bash file: its commands, and the variables that they set."""

    def __init__(self, text: str, *, path: Path) -> None:
        self.path = path
        self._variables: dict[str, _Variable] = {}
        self._text = _without_heredocs(text)

    def command(self, modules: Sequence[str]) -> tuple[str, list[Word]]:
        """Return the module and the arguments of the file's one command that runs a Python module of these.

        Args:
            modules: prefixes of their names: `openrlhf.cli.` is all modules of that package.

        Raises:
            UserError: there is no such command, or more than one, or a quote is left open.
        """
        found: list[tuple[str, list[Word]]] = []
        lines: list[int] = []
        depth = 0
        for command in self._commands():
            words = command.words
            while words:
                depth += (words[0].raw in _OPENS) - (words[0].raw in _CLOSES)
                if words[0].raw not in _FOLLOWED:
                    break
                words = words[1:]
            place = next((place for place, word in enumerate(words[:-1]) if word.raw == "-m"), None)
            module = words[place + 1].raw if place is not None else ""
            if place is not None and module.startswith(tuple(modules)):
                arguments = [word for raw in words[place + 2 :] for word in self._expanded(raw)]
                found.append((module, arguments))
                lines.append(words[0].line)
            elif found and words and words[0].raw.startswith("-") and not command.conditional:
                raise UserError(
                    f"{self.path}:{words[0].line}: {words[0].raw} stands behind the end of the command that trains: a "
                    "comment or a line without \\ at its end is above it; mend that"
                )
            elif words:
                self._remember(words, conditional=depth > 0 or command.conditional, array=command.array)
        if not found:
            raise UserError(f"{self.path}: no command in it runs {' or '.join(f'python -m {m}...' for m in modules)}")
        if len(found) > 1:
            raise UserError(
                f"{self.path}: commands that train are in lines {', '.join(map(str, lines))}; leave one in the file"
            )
        return found[0]

    def _remember(self, words: Sequence[_Word], *, conditional: bool, array: bool) -> None:
        """Take the variables that a command sets for later commands, with their present values."""
        first, *others = words
        if first.raw == ":":
            # `: "${NAME:=value}"` sets NAME if it is not set.
            for word in others:
                self._expanded(word)
        elif first.raw in ("for", "read"):
            for word in others[:1] if first.raw == "for" else others:
                self._forget(word.raw, line=word.line, what="takes it from elsewhere; write the value itself")
        elif first.raw == "unset":
            for word in others:
                self._variables.pop(word.raw, None)
        else:
            exported = first.raw in ("export", "readonly", "local", "declare")
            assignments = [(word, _ASSIGNMENT.fullmatch(word.raw)) for word in (others if exported else words)]
            # Before a command they apply only to that command.
            if exported or all(match for _, match in assignments):
                for word, match in assignments:
                    if match is not None:
                        self._assign(word, match, conditional=conditional, array=array)

    def _assign(self, word: _Word, match: re.Match[str], *, conditional: bool, array: bool) -> None:
        name, plus, _ = match.groups()
        if conditional:
            self._forget(name, line=word.line, what="sets it under a condition; set it once")
            return
        if array:
            self._forget(name, line=word.line, what="makes an array of it; write the values themselves")
            return
        before = self._variables.get(name) if plus else None
        pieces = _behind(word, len(name) + len(plus) + 1).pieces
        if before is not None and before.unreadable:
            return
        try:
            text = "".join(self._value(piece, word.line) if expands else piece for piece, expands, _ in pieces)
        except UserError as error:
            self._variables[name] = _Variable("", error)
        else:
            self._variables[name] = _Variable((before.text if before is not None else "") + text)

    def _forget(self, name: str, *, line: int, what: str) -> None:
        """Forget a variable whose value only bash could compute."""
        self._variables[name] = _Variable("", f"line {line} {what}")

    def _expanded(self, word: _Word) -> list[Word]:
        """Return a word with its variables replaced; one that is not quoted may become several, or none."""
        if word.raw in _ARGUMENTS:
            return []
        texts = [""]
        empty = not any(quoted for _, _, quoted in word.pieces)
        for text, expands, quoted in word.pieces:
            try:
                replaced = self._value(text, word.line) if expands else text
            except UserError as error:
                return [Word(word.raw, word.line, error)]
            if quoted or replaced == text:
                texts[-1] += replaced
                continue
            first, *rest = re.split(r"\s+", replaced)
            texts[-1] += first
            texts += rest
        return [Word(text, word.line) for text in texts if text or not empty]

    def _value(self, text: str, line: int) -> str:
        """Return text with its variables replaced; raises UserError for what only bash could compute."""

        def held(match: re.Match[str]) -> str:
            name, colon, operator, default = match[1] or match[2], match[3], match[4], match[5]
            variable = self._variables.get(name)
            why = "" if variable is None else variable.unreadable
            if isinstance(why, UserError):
                raise why
            if why:
                raise self._unreadable(line, match[0], why)
            # With a colon an empty one counts as not set.
            if variable is not None and (variable.text or not colon):
                return variable.text
            if default is None:
                raise self._unreadable(line, match[0], "it is not set in this file; set it there")
            value = self._value(default, line)
            if operator == "=":
                self._variables[name] = _Variable(value)
            return value

        plain = _HERE.sub(".", text)
        if re.search(r"[$`]", _VARIABLE.sub("", plain)):
            raise self._unreadable(line, text, "only bash could compute this; write the value itself")
        value = _VARIABLE.sub(held, plain)
        for sign, stand_in in _ESCAPED.items():
            value = value.replace(stand_in, sign)
        return value

    def _unreadable(self, line: int, what: str, remedy: str) -> UserError:
        return UserError(f"{self.path}:{line}: cannot read {what}: {remedy}")

    def _commands(self) -> Iterator[_Command]:
        """Yield the simple commands, each with at least one word; redirections and what follows them are left out."""
        words: list[_Word] = []
        redirected, behind = False, ""
        for token in _tokens(self._text, path=self.path):
            if isinstance(token, _Word):
                if not redirected:
                    words.append(token)
            elif token in "<>":
                # `2> file`: the number is not an argument. Everything after the first redirection is the shell's.
                if not redirected and words and words[-1].raw.isdecimal():
                    words.pop()
                redirected = True
            elif not (redirected and token in "&()|"):
                if words:
                    yield _Command(words, conditional=_depends(behind), array=token == "(")
                    behind = ""
                words, redirected, behind = [], False, behind + token
        if words:
            yield _Command(words, conditional=_depends(behind), array=False)


def _depends(operators: str) -> bool:
    """Return whether a command after these operators may not run, or runs in its own shell."""
    last = operators.rstrip("\n")
    return last.endswith(("&&", "|", "("))


def _behind(word: _Word, count: int) -> _Word:
    """Return a word without its first characters."""
    pieces = []
    for text, expands, quoted in word.pieces:
        pieces.append((text[count:], expands, quoted))
        count = max(0, count - len(text))
    return _Word(word.line, [piece for piece in pieces if piece[0]])


def _without_heredocs(text: str) -> str:
    """Return the text with the lines of here-documents empty."""
    lines, end = [], None
    for line in text.split("\n"):
        if end is not None:
            end = None if line.strip() == end else end
            lines.append("")
            continue
        match = _HEREDOC.search(line)
        end = match[2] if match and not line.lstrip().startswith("#") else None
        lines.append(line)
    return "\n".join(lines)


def _tokens(text: str, *, path: Path) -> Iterator[_Word | str]:
    """Yield words and operators, a line break among them."""
    position, line = 0, 1
    word: _Word | None = None
    while position < len(text):
        character = text[position]
        if text.startswith("\\\n", position):
            position, line = position + 2, line + 1
        elif character in " \t\r":
            if word is not None:
                yield word
            word, position = None, position + 1
        elif character == "#" and word is None:
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif character in _OPERATORS:
            if word is not None:
                yield word
            yield character
            word, position = None, position + 1
            line += character == "\n"
        else:
            word = word or _Word(line)
            piece, expands, quoted, position = _piece(text, position, path=path, line=line)
            word.pieces.append((piece, expands, quoted))
            line += text.count("\n", position - len(piece), position) if quoted else 0
    if word is not None:
        yield word


def _piece(text: str, start: int, *, path: Path, line: int) -> tuple[str, bool, bool, int]:
    """Return the piece of a word that begins at `start`, whether it expands and is quoted, and where it ends."""
    character = text[start]
    if character == "\\":
        return text[start + 1 : start + 2], False, True, start + 2
    if character == "'":
        end = text.find("'", start + 1)
        if end < 0:
            raise UserError(f"{path}:{line}: a quote ' is opened and not closed")
        return text[start + 1 : end], False, True, end + 1
    if character == '"':
        return _double_quoted(text, start, path=path, line=line)
    match = re.compile(r"\$\((?:[^()\n]|\([^()\n]*\))*\)|\$\{[^{}\n]*\}|`[^`\n]*`|[^\s\\'\"`;&|<>()$]+|\$\w*|.").match(
        text, start
    )
    assert match is not None
    return match[0], True, False, match.end()


def _double_quoted(text: str, start: int, *, path: Path, line: int) -> tuple[str, bool, bool, int]:
    """Return the text in double quotes, with stand-ins for escaped characters."""
    end = start + 1
    while end < len(text) and text[end] != '"':
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        raise UserError(f'{path}:{line}: a quote " is opened and not closed')
    inner = text[start + 1 : end].replace("\\\n", "")
    plain = re.sub(r'\\([$`"\\])', lambda match: _ESCAPED.get(match[1], match[1]), inner)
    return plain, True, True, end + 1


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
    """Names of settings in the file that differ from the table's."""


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


def _mapping(text: str, *, path: Path) -> dict[str, object]:
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


def _table_of(tree: Mapping[str, object], *, path: Path) -> Table:
    if "actor_rollout_ref" in tree:
        return VERL
    if tree.keys() & {"worker", "algorithm", "trainer"}:
        return EASYR1
    raise UserError(
        f"{path}: neither settings of EasyR1 (data, algorithm, worker, trainer) nor of verl (actor_rollout_ref); found "
        f"{', '.join(map(str, tree)) or 'nothing'}"
    )


def _base(config: Path, *, script: Path, line: int) -> dict[str, object]:
    """Read the file that a script names, which starts from the folder in which it was meant to be run."""
    folders = [Path(), *script.absolute().parents]
    found = next((folder / config for folder in folders if (folder / config).is_file()), None)
    if found is None:
        raise UserError(
            f"{script}:{line}: no file {config} here or above the script; run this in the script's project"
        )
    return _mapping(_read(found), path=found)


def _of_tree(tree: dict[str, object], words: Sequence[Word], *, source: str, path: Path, table: Table) -> RunOfAnother:
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
        put(tree, name.lstrip("+"), value, where=where)
    given = dict(_flat(tree, {*table.by_name, *table.names}, prefix=""))
    values = {table.names.get(name, name): value for name, value in given.items()}
    # EasyR1's names of earlier versions are shown only if they are given.
    shown = {new: old for old, new in table.names.items() if old in given or table is VERL}
    return RunOfAnother(source=source, table=table, values=values, shown=shown)


def _flat(tree: Mapping[str, object], leaves: set[str], *, prefix: str) -> Iterator[tuple[str, object]]:
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
    """Return a flag's value with one more: without a value it is a switch, several values are a list."""
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _scalar(text: str) -> object:
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FRACTION.fullmatch(text) else text
