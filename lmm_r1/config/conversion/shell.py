"""Commands in a bash script, as far as they are plain: words, quotes, continued lines and variables set in the file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmm_r1.errors import UserError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_VARIABLE = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})(?::?([-=])([^{{}}]*))?\}})")
_HERE = re.compile(r"\$\(pwd\)|\$\{PWD\}|\$PWD\b|`pwd`")
_ASSIGNMENT = re.compile(rf"({_NAME})=(.*)", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_OPENS = ("if", "for", "while", "until", "case", "{")
_CLOSES = ("fi", "done", "esac", "}")
_FOLLOWED = ("then", "do", "else")
"""Words that a command of its own stands behind."""
_ARGUMENTS = ("$@", "${@}", "$*")
"""What the script itself was given: nothing."""
_OPERATORS = ";&|<>()\n"


@dataclass
class _Word:
    """A word as it is written, in pieces: text, and whether variables in it stand for what they hold."""

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
class _Variable:
    word: _Word
    """What stands behind the equals sign."""
    conditional: bool
    """Whether it is set under a condition or in a loop."""


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
        for written in self._commands():
            words = written[1:] if written[0].raw in _FOLLOWED and len(written) > 1 else written
            first = words[0].raw
            if first in _OPENS:
                depth += 1
            elif first in _CLOSES:
                depth -= 1
            place = next((place for place, word in enumerate(words[:-1]) if word.raw == "-m"), None)
            module = words[place + 1].raw if place is not None else ""
            if place is not None and module.startswith(tuple(modules)):
                arguments = [word for raw in words[place + 2 :] for word in self._expanded(raw)]
                found.append((module, arguments))
                lines.append(words[0].line)
            else:
                self._remember(words, conditional=depth > 0)
        if not found:
            raise UserError(f"{self.path}: no command in it runs {' or '.join(f'python -m {m}...' for m in modules)}")
        if len(found) > 1:
            raise UserError(
                f"{self.path}: commands that train are in lines {', '.join(map(str, lines))}; leave one in the file"
            )
        return found[0]

    def _remember(self, words: Sequence[_Word], *, conditional: bool) -> None:
        """Take the variables that a command sets for those behind it."""
        exported = words[0].raw in ("export", "readonly", "local", "declare")
        assignments = list(words[1:] if exported else words)
        if words[0].raw == ":":
            # `: "${NAME:=value}"` sets NAME where nobody else has.
            for word in words[1:]:
                match = _VARIABLE.fullmatch(word.raw)
                if match and match[3] == "=" and match[2] not in self._variables:
                    self._variables[match[2]] = _Variable(_Word(word.line, [(match[4], True, True)]), conditional)
            return
        matches = [_ASSIGNMENT.fullmatch(word.raw) for word in assignments]
        if not all(matches):
            return
        for word, match in zip(assignments, matches, strict=True):
            assert match is not None
            self._variables[match[1]] = _Variable(_behind(word, len(match[1]) + 1), conditional)

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

    def _value(self, text: str, line: int, seen: tuple[str, ...] = ()) -> str:
        """Return text with its variables replaced; raises UserError for what only bash could tell."""

        def held(match: re.Match[str]) -> str:
            name, default = match[1] or match[2], match[4]
            variable = self._variables.get(name)
            if variable is None and default is not None:
                return self._value(default, line, seen)
            if variable is None:
                raise self._unreadable(line, match[0], "it is not set in this file; set it there")
            if variable.conditional or name in seen:
                raise self._unreadable(
                    line, match[0], f"line {variable.word.line} sets it under a condition; set it once"
                )
            return "".join(
                self._value(piece, variable.word.line, (*seen, name)) if expands else piece
                for piece, expands, _ in variable.word.pieces
            )

        value = _VARIABLE.sub(held, _HERE.sub(".", text))
        if seen == () and ("$" in _VARIABLE.sub("", _HERE.sub("", text)) or "`" in text.replace("`pwd`", "")):
            raise self._unreadable(line, text, "only bash could tell what this is; write the value itself")
        if seen and ("$(" in value or "`" in value or "${" in value):
            raise self._unreadable(line, text, "only bash could tell what this is; write the value itself")
        return value

    def _unreadable(self, line: int, what: str, remedy: str) -> UserError:
        return UserError(f"{self.path}:{line}: cannot read {what}: {remedy}")

    def _commands(self) -> Iterator[list[_Word]]:
        """Yield the simple commands, each with at least one word; redirections and what follows them are left out."""
        words: list[_Word] = []
        redirected = False
        for token in _tokens(self._text, path=self.path):
            if isinstance(token, _Word):
                if not redirected:
                    words.append(token)
            elif token in "<>":
                # `2> file`: the number is no argument. All behind the first redirection is the shell's.
                if not redirected and words and words[-1].raw.isdecimal():
                    words.pop()
                redirected = True
            elif not (redirected and token in "&()|"):
                if words:
                    yield words
                words, redirected = [], False
        if words:
            yield words


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
    match = re.compile(r"\$\([^()\n]*\)|\$\{[^{}\n]*\}|`[^`\n]*`|[^\s\\'\"`;&|<>()$]+|\$\w*|.").match(text, start)
    assert match is not None
    return match[0], True, False, match.end()


def _double_quoted(text: str, start: int, *, path: Path, line: int) -> tuple[str, bool, bool, int]:
    """Return what stands in double quotes; with an escaped dollar sign nothing in it is a variable."""
    end = start + 1
    while end < len(text) and text[end] != '"':
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        raise UserError(f'{path}:{line}: a quote " is opened and not closed')
    inner = text[start + 1 : end]
    plain = re.sub(r'\\([$`"\\])', r"\1", inner.replace("\\\n", ""))
    return plain, "\\$" not in inner, True, end + 1
