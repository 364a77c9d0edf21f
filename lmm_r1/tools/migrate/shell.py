"""Launch scripts in bash: assignments, references to variables and plain commands, split by `shlex`; nothing is run.

Loops, conditions, functions, arrays and the output of commands are not read, and what they set stays without a value.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lmm_r1.errors import UserError

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
