"""Bash scripts read without being run: the commands that a run would start, with their variables replaced."""

from __future__ import annotations

import fnmatch
import os.path
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lmm_r1.errors import UserError
from lmm_r1.migrate.shell_syntax import Commands, Compound, Node, Simple, parsed
from lmm_r1.migrate.shell_values import arithmetic, as_shown, condition, parts, seen, unknown, unknowns
from lmm_r1.migrate.shell_words import Piece, Word, pieces_in_quotes, pieces_of

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?(\+?)=")
_PARAMETER = re.compile(r"(#|!)?([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh")
_WITHOUT_EFFECT = ("set", "shift", "exit", "return", "trap", "wait", "let", "ulimit", "umask", "cd", "pushd", "popd")
_OF_THE_USER = ("HOME", "USER")
_OF_THE_SCRIPT = ("0", "BASH_SOURCE")
_DEEPEST = 10
"""Functions, and scripts in quotes, that may be inside of one another."""

Value: TypeAlias = "str | list[str]"
Status: TypeAlias = "bool | None"
"""Whether a command succeeds; None if only a run would know."""


@dataclass(frozen=True)
class StartedCommand:
    """A command that a run of the script would start."""

    words: tuple[str, ...]
    """Its words; they may hold unknown parts, which `shell_values` describes."""
    line: int


Run: TypeAlias = "Generator[StartedCommand, None, Status]"


class Script:
    """A bash file that is read from its beginning to its end."""

    def __init__(self, text: str, *, path: Path, given: Mapping[str, str]) -> None:
        """Read the file's syntax.

        Args:
            given: values of variables, which the script does not change.

        Raises:
            UserError: a quote, a bracket or a condition is not closed.
        """
        self._path = path
        self._given = given
        self._variables: dict[str, Value] = dict(given)
        self._functions: dict[str, Commands] = {}
        self._arguments: list[str] = []
        self._depth = 0
        self._commands = parsed(text, path=path)
        self.why: dict[str, str] = {}
        """Why parts of words are unknown, by what the script says for them."""
        self.left_out: dict[str, str] = {}
        """Lines that were not read, and why."""

    def commands(self) -> Generator[StartedCommand, None, Status]:
        """Yield the commands in the order of a run."""
        return self._sequence(self._commands, maybe=False)

    def _sequence(self, commands: Commands, *, maybe: bool) -> Run:
        status: Status = True
        before: Node | None = None
        for joiner, node in commands:
            if (joiner, status) in (("&&", False), ("||", True)):
                continue
            # Commands succeed as a rule; of a test without a known result neither side is more likely.
            unsure = status is None and (joiner == "||" or (joiner == "&&" and _tests(before)))
            status = yield from self._node(node, maybe=maybe or unsure)
            before = node
        return status

    def _node(self, node: Node, *, maybe: bool) -> Run:
        if isinstance(node, Simple):
            return (yield from self._simple(node, maybe=maybe))
        match node.kind:
            case "test":
                return condition([self._joined(word) for word in node.words]) if node.words else None
            case "group":
                return (yield from self._sequence(node.body, maybe=maybe))
            case "function":
                self._functions[node.name] = node.body
            case "if":
                yield from self._branches(node, maybe=maybe)
            case "for":
                yield from self._for(node, maybe=maybe)
            case "while":
                ((test, body),) = node.branches
                status = yield from self._sequence(test, maybe=maybe)
                if status is not node.until or status is None:
                    # Once, as a run begins it.
                    yield from self._sequence(body, maybe=maybe or status is False)
            case "case":
                yield from self._choice(node, maybe=maybe)
        return None

    def _branches(self, node: Compound, *, maybe: bool) -> Run:
        for test, body in node.branches:
            status = yield from self._sequence(test, maybe=maybe)
            if status is not False:
                yield from self._sequence(body, maybe=maybe or status is None)
            if status is True:
                return None
            maybe = maybe or status is None
        yield from self._sequence(node.body, maybe=maybe)
        return None

    def _for(self, node: Compound, *, maybe: bool) -> Run:
        words = [text for word in node.words or () for text in self._expanded(word)]
        if len(words) == 1:
            self._set(node.name, words[0], line=node.line, maybe=maybe)
            yield from self._sequence(node.body, maybe=maybe)
        elif words or node.words is None:
            if node.name:
                self._forget(node.name, f"line {node.line} sets it in a loop")
            yield from self._sequence(node.body, maybe=maybe or bool(node.name))
        return None

    def _choice(self, node: Compound, *, maybe: bool) -> Run:
        (word,) = node.words or ()
        text = seen(self._joined(word))
        for patterns, body in node.cases:
            if text is None:
                yield from self._sequence(body, maybe=True)
            elif any(fnmatch.fnmatchcase(text, seen(self._joined(pattern)) or "") for pattern in patterns):
                yield from self._sequence(body, maybe=maybe)
                return None
        return None

    def _simple(self, node: Simple, *, maybe: bool) -> Run:
        assigned = 0
        while assigned < len(node.words) and _assignment(node.words[assigned]):
            assigned += 1
        if assigned == len(node.words):
            for word in node.words:
                self._assign(word, maybe=maybe)
            return True
        words = node.words[assigned:]
        if words[0].plain in _DECLARING:
            for word in words[1:]:
                if _assignment(word):
                    self._assign(word, maybe=maybe)
            return True
        # A blank after a backslash that should end the line is a word of its own.
        texts = [text for word in words for text in self._expanded(word) if not text or text.strip()]
        if not texts:
            return True
        if node.stdin is not None and texts[0] == "read":
            self._read(texts[1:], self._joined(node.stdin), line=node.line, maybe=maybe)
            return None
        return (yield from self._start(texts, line=node.line, maybe=maybe))

    def _start(self, texts: list[str], *, line: int, maybe: bool) -> Run:
        first, *others = texts
        if first in ("[", "test"):
            return condition(others[:-1] if first == "[" else others)
        if first in ("true", ":", "false"):
            return first != "false"
        if first in ("read", "mapfile", "readarray"):
            for name in others:
                if re.fullmatch(r"[A-Za-z_]\w*", name):
                    self._forget(name, f"line {line} reads it while the script runs")
            return None
        if first == "unset":
            for name in others:
                self._variables.pop(name, None)
            return True
        if first in self._functions:
            return (yield from self._inner(self._functions[first], maybe=maybe, arguments=others))
        shell = next((place for place, text in enumerate(texts) if text in _SHELLS), None)
        inner = " ".join(others) if first == "eval" else ""
        if shell is not None and len(texts) > shell + 2 and re.fullmatch(r"-\w*c", texts[shell + 1]):
            inner = inner or texts[shell + 2]
        if inner or first == "eval":
            return (yield from self._inner(parsed(inner, path=self._path, line=line), maybe=maybe))
        if first not in _WITHOUT_EFFECT:
            yield StartedCommand(tuple(texts), line)
        return None

    def _inner(self, body: Commands, *, maybe: bool, arguments: list[str] | None = None) -> Run:
        """Run a function, or a script that is a word of a command and has the arguments of this one."""
        if self._depth >= _DEEPEST:
            return None
        before, self._arguments = self._arguments, self._arguments if arguments is None else arguments
        self._depth += 1
        try:
            return (yield from self._sequence(body, maybe=maybe))
        finally:
            self._depth -= 1
            self._arguments = before

    def _read(self, names: Sequence[str], text: str, *, line: int, maybe: bool) -> None:
        """Set what `read` sets from text of the script itself."""
        lists = any(name.startswith("-") and "a" in name for name in names)
        variables = [name for name in names if re.fullmatch(r"[A-Za-z_]\w*", name)]
        if variables:
            value = text.split() if lists else text.strip()
            self._set(variables[-1 if lists else 0], value, line=line, maybe=maybe)

    def _assign(self, word: Word, *, maybe: bool) -> None:
        match = _assignment(word)
        assert match is not None
        name, plus = match.groups()
        before = self._variables.get(name) if plus else None
        value: Value
        if word.array is not None:
            value = [text for element in word.array for text in self._expanded(element)]
            if plus and maybe:
                self.left_out[" ".join(map(as_shown, value))] = f"line {word.line} adds it under a condition"
                return
            value = (before if isinstance(before, list) else [before] if before else []) + value
        else:
            rest = _after(word, match.end())
            value = self._joined(rest)
            if rest.pieces and not rest.pieces[0].quoted and value.startswith("~/"):
                value = self._value("HOME") + value[1:]
            if isinstance(before, list):
                value = [*before[:-1], before[-1] + value] if before else [value]
            else:
                value = (before or "") + value
        self._set(name, value, line=word.line, maybe=maybe)

    def _set(self, name: str, value: Value, *, line: int, maybe: bool) -> None:
        if name in self._given or value == self._variables.get(name):
            return
        if maybe:
            self._forget(name, f"line {line} sets it under a condition")
        else:
            self._variables[name] = value

    def _forget(self, name: str, why: str) -> None:
        """Remember that only a run would know a variable."""
        if name not in self._given:
            self._variables[name] = unknown(f"${{{name}}}")
            self.why[f"${{{name}}}"] = why

    def _joined(self, word: Word) -> str:
        """Return a word with its variables replaced, as one text."""
        return "".join(self._text(piece, word.line) for piece in word.pieces)

    def _expanded(self, word: Word) -> list[str]:
        """Return a word with its variables replaced; it may become several words, or none."""
        texts = [""]
        exists = any(piece.quoted and piece.kind == "text" for piece in word.pieces)
        for place, piece in enumerate(word.pieces):
            if piece.kind == "text":
                home = place == 0 and not piece.quoted and piece.text.startswith("~/")
                texts[-1] += self._value("HOME") + piece.text[1:] if home else piece.text
                continue
            value = (
                self._parameter(piece.text, word.line) if piece.kind == "parameter" else self._text(piece, word.line)
            )
            if isinstance(value, list):
                values = value if piece.quoted else [part for one in value for part in one.split()]
            elif piece.quoted:
                values, exists = [value], True
            else:
                values, exists = parts(value), exists or bool(unknowns(value))
            for number, one in enumerate(values):
                if number:
                    texts.append("")
                texts[-1] += one
        return [text for text in texts if text or (exists and len(texts) == 1)]

    def _text(self, piece: Piece, line: int) -> str:
        if piece.kind == "text":
            return piece.text
        if piece.kind == "arithmetic":
            text = self._in_quotes(piece.text, line)
            result = arithmetic(text, lambda name: self._value(name, line))
            return self._unknown(f"$(({piece.text}))", line) if result is None else str(result)
        if piece.kind == "command":
            return self._output(piece.text, line)
        value = self._parameter(piece.text, line)
        return " ".join(value) if isinstance(value, list) else value

    def _in_quotes(self, text: str, line: int) -> str:
        return "".join(self._text(piece, line) for piece in pieces_in_quotes(text, path=self._path, line=line))

    def _unknown(self, shown: str, line: int) -> str:
        self.why[as_shown(shown)] = f"line {line}: only a run of the script would know it"
        return unknown(shown)

    def _value(self, name: str, line: int = 0) -> str:
        """Return the value of a variable; text that stands for it if it has none."""
        value = self._variables.get(name)
        if value is not None:
            return value if isinstance(value, str) else next(iter(value), "")
        if name == "PWD":
            return "."
        if name in _OF_THE_SCRIPT:
            return str(self._path)
        if name in _OF_THE_USER and name in os.environ:
            return os.environ[name]
        if name == "#":
            return str(len(self._arguments))
        if name.isdigit() and int(name) <= len(self._arguments):
            return self._arguments[int(name) - 1]
        if name in "?$!-" or name in ("RANDOM", "SECONDS", "HOSTNAME", "LINENO"):
            return self._unknown(f"${name}", line)
        shown = f"${{{name}}}"
        what = "an argument of the script" if name.isdigit() else "not set in the script"
        self.why.setdefault(shown, f"line {line}: {what}")
        return unknown(shown, unset=True)

    def _parameter(self, body: str, line: int) -> Value:
        """Return what `${body}` is."""
        match = _PARAMETER.fullmatch(body)
        if match is None:
            return self._unknown(f"${{{body}}}", line)
        mark, name, index, rest = match.groups()
        if mark == "#" and not rest:
            value = self._variables.get(name, "")
            counted = value if index in ("@", "*") and isinstance(value, list) else seen(self._value(name, line))
            return self._unknown(f"${{{body}}}", line) if counted is None else str(len(counted))
        if mark:
            return self._unknown(f"${{{body}}}", line)
        if name in ("@", "*"):
            return list(self._arguments)
        if index in ("@", "*"):
            value = self._variables.get(name, [])
            return list(value) if isinstance(value, list) else [value]
        text = self._value(name, line) if index is None else self._element(name, index, line)
        return self._changed(body, text, rest, name=name, line=line) if rest else text

    def _element(self, name: str, index: str, line: int) -> str:
        value = self._variables.get(name)
        if name in _OF_THE_SCRIPT:
            return str(self._path)
        place = arithmetic(self._in_quotes(index, line), lambda variable: self._value(variable, line))
        if not isinstance(value, list) or place is None or not -len(value) <= place < len(value):
            return self._unknown(f"${{{name}[{index}]}}", line)
        return value[place]

    def _changed(self, body: str, text: str, rest: str, *, name: str, line: int) -> Value:
        """Return what an operator in `${...}` makes of a value."""
        sees = seen(text)
        if match := re.match(r":?[-=+?]", rest):
            isset = sees is None or (sees != "" if match[0][0] == ":" else name in self._variables or sees != "")
            if match[0][-1] == "+":
                return self._joined_pieces(rest[match.end() :], line) if isset else ""
            if isset or match[0][-1] == "?":
                return text
            value = self._joined_pieces(rest[match.end() :], line)
            if match[0][-1] == "=":
                self._set(name, value, line=line, maybe=False)
            return value
        if sees is None or (sees == "" and unknowns(text)):
            return unknown(f"${{{body}}}", unset=sees is not None)
        changed = _edited(sees, rest, self._in_quotes)
        return self._unknown(f"${{{body}}}", line) if changed is None else changed

    def _joined_pieces(self, text: str, line: int) -> str:
        return "".join(self._text(piece, line) for piece in pieces_of(text, path=self._path, line=line))

    def _output(self, text: str, line: int) -> str:
        """Return what a few commands without effect print; text that stands for the output of any other."""
        shown = f"$({as_shown(text)})"
        try:
            nodes = [node for _, node in parsed(text, path=self._path, line=line)]
        except UserError:
            return self._unknown(shown, line)
        simple = [node for node in nodes if isinstance(node, Simple)]
        texts = [[one for word in node.words for one in self._expanded(word)] for node in simple]
        if len(simple) < len(nodes) or any(seen(one) is None for words in texts for one in words):
            return self._unknown(shown, line)
        printed = _printed(texts)
        return self._unknown(shown, line) if printed is None else printed


def _tests(node: Node | None) -> bool:
    if isinstance(node, Simple):
        return bool(node.words) and node.words[0].plain in ("[", "test")
    return isinstance(node, Compound) and node.kind == "test"


def _assignment(word: Word) -> re.Match[str] | None:
    first = word.pieces[0] if word.pieces else None
    return None if first is None or first.quoted or first.kind != "text" else _ASSIGNMENT.match(first.text)


def _after(word: Word, count: int) -> Word:
    """Return a word without the first characters of its first piece."""
    first, *others = word.pieces
    rest = first.text[count:]
    return Word(word.line, [Piece("text", rest), *others] if rest else others)


def _edited(text: str, rest: str, expand: Callable[[str, int], str]) -> str | None:
    """Return a text after `,,`, `##pattern`, `%pattern`, `/pattern/text` or `:start:length`; None for anything else."""
    if rest in (",,", "^^"):
        return text.lower() if rest == ",," else text.upper()
    if match := re.fullmatch(r"(##?|%%?)(.*)", rest, re.DOTALL):
        return _trimmed(text, match[1], seen(expand(match[2], 0)) or "")
    if match := re.fullmatch(r"/(/?)([^/]+)(?:/(.*))?", rest, re.DOTALL):
        pattern = re.compile(fnmatch.translate(match[2]).removesuffix(r"\Z").removesuffix(r"\z"))
        replacement = seen(expand(match[3] or "", 0)) or ""
        return pattern.sub(lambda _: replacement, text, count=0 if match[1] else 1)
    if match := re.fullmatch(r":(\d+)(?::(\d+))?", rest):
        start = int(match[1])
        return text[start : start + int(match[2])] if match[2] else text[start:]
    return None


def _trimmed(text: str, how: str, pattern: str) -> str:
    """Return a text without its shortest, or longest, beginning or end of a pattern."""
    lengths = range(len(text) + 1) if len(how) == 1 else range(len(text), -1, -1)
    for length in lengths:
        if how[0] == "#" and fnmatch.fnmatchcase(text[:length], pattern):
            return text[length:]
        if how[0] == "%" and fnmatch.fnmatchcase(text[len(text) - length :], pattern):
            return text[: len(text) - length]
    return text


def _printed(commands: Sequence[Sequence[str]]) -> str | None:
    """Return what the commands of `$(...)` print if that needs no run; None otherwise."""
    match [[seen(text) or "" for text in words] for words in commands]:
        case [["pwd"]]:
            return "."
        case [["cd", folder], ["pwd", *_]]:
            return os.path.normpath(folder)
        case [["echo", *words]] if not any(word.startswith("-") for word in words):
            return " ".join(words)
        case [["basename", name, *suffix]]:
            return os.path.basename(name.rstrip("/")).removesuffix("".join(suffix[:1]))
        case [["dirname", name]]:
            return os.path.dirname(name.rstrip("/")) or "."
        case [["realpath", name]] | [["readlink", "-f", name]]:
            return os.path.normpath(name)
        case [["date"]]:
            return time.strftime("%c")
        case [["date", format]] if format.startswith("+") and not re.search(r"%[^a-zA-Z%]|%[NP]", format):
            return time.strftime(format[1:])
    return None
