"""Bash text as words and operators: quotes, expansions, arrays, comments, continued lines and here-documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lmm_r1.errors import UserError

PieceKind = Literal["text", "parameter", "arithmetic", "command"]
_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_OPERATORS = re.compile(r"&>>|<<<|<<-|&&|\|\||;;|<<|>>|&>|>&|<&|[;&|<>()\n]")
# `<OUTPUT_DIR>` of a README is a place to fill in, and no redirection.
_TO_FILL_IN = re.compile(r"<[A-Za-z][\w.-]*>(?=[\s\"'/]|$)")
_PLAIN = re.compile(r"[^\s\\'\"`;&|<>()$]+")
_ANSI = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
# Whitespace, line continuations, comments, and file descriptors in front of redirections.
_SKIPPED = re.compile(r"(?:\\\n|[ \t\r])+|#[^\n]*|\d+(?=[<>])")
_CONTINUED = re.compile(r"\\\n")
_ESCAPED = re.compile(r"\\(.?)", re.DOTALL)
_SINGLE_QUOTED = re.compile(r"'([^']*)'")
_ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_BACKTICKS = re.compile(r"`([^`]*)`")
_DOUBLE_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_IN_QUOTES = re.compile(r'\\([$`"\\])|\\\n|([^$`"\\]+|.)', re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A part of a word: text, or the inside of an expansion."""

    kind: PieceKind
    text: str
    quoted: bool = False


@dataclass
class Word:
    """A word as it is written."""

    line: int
    pieces: list[Piece] = field(default_factory=list)
    array: list[Word] | None = None
    """The elements after `NAME=` or `NAME+=`, if they are in parentheses."""

    @property
    def plain(self) -> str:
        """Its text if it has no expansion, otherwise the empty string."""
        return "".join(piece.text for piece in self.pieces) if all(p.kind == "text" for p in self.pieces) else ""

    @property
    def keyword(self) -> str:
        """Its text if nothing in it is quoted: only then can it be a reserved word."""
        return "" if any(piece.quoted for piece in self.pieces) else self.plain


@dataclass(frozen=True)
class Operator:
    text: str
    line: int
    document: Word | None = None
    """The here-document that this operator starts."""


def tokens(text: str, *, path: Path, line: int = 1) -> list[Word | Operator]:
    """Return the words and operators of a script, line breaks among them.

    Args:
        line: number of its first line.

    Raises:
        UserError: a quote or a bracket is not closed.
    """
    return list(_WordReader(text, path=path, line=line).read())


def pieces_in_quotes(text: str, *, path: Path, line: int) -> list[Piece]:
    """Return the pieces of a text that is read as in double quotes: of a here-document or a default value."""
    return _WordReader(text, path=path, line=line).quoted(end=None)


def pieces_of(text: str, *, path: Path, line: int) -> list[Piece]:
    """Return the pieces of one word, in which blanks are text."""
    reader = _WordReader(text, path=path, line=line)
    word = Word(line)
    while reader.position < len(text):
        if text[reader.position] in " \t\n;&|<>()":
            word.pieces.append(Piece("text", text[reader.position]))
            reader.position += 1
        else:
            reader.piece(word)
    return word.pieces


class _WordReader:
    def __init__(self, text: str, *, path: Path, line: int) -> None:
        self.text = text.replace("\r\n", "\n")
        self.path = path
        self.position = 0
        self._first_line = line
        self._documents: list[tuple[Word, bool, Word]] = []
        """Here-documents that begin after this line: where to put each, whether tabs are removed, and its delimiter."""

    @property
    def line(self) -> int:
        return self._first_line + self.text.count("\n", 0, self.position)

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match what begins here, and go to what follows it."""
        match = pattern.match(self.text, self.position)
        self.position = match.end() if match else self.position
        return match

    def _unclosed(self, what: str, line: int) -> UserError:
        return UserError(f"{self.path}:{line}: a {what} is opened and not closed; close it")

    def read(self) -> Iterator[Word | Operator]:
        while self.position < len(self.text):
            if self._take(_SKIPPED):
                continue
            if _TO_FILL_IN.match(self.text, self.position):
                yield self.word()
            elif self.text.startswith(("<(", ">("), self.position):
                yield Word(self.line, [Piece("text", self._balanced(self.position + 1, "(", ")"), quoted=True)])
            elif match := _OPERATORS.match(self.text, self.position):
                yield self._operator(match[0])
            else:
                yield self.word()

    def _operator(self, text: str) -> Operator:
        line = self.line
        self.position += len(text)
        if text == "\n":
            for word, strip, delimiter in self._documents:
                self._document(word, strip=strip, delimiter=delimiter)
            self._documents = []
        elif text in ("<<", "<<-"):
            while self.text[self.position : self.position + 1] in (" ", "\t"):
                self.position += 1
            body = Word(line)
            self._documents.append((body, text == "<<-", self.word()))
            return Operator(text, line, body)
        return Operator(text, line)

    def _document(self, word: Word, *, strip: bool, delimiter: Word) -> None:
        """Read a here-document, whose delimiter says by its quotes whether variables in it are replaced."""
        lines, word.line = [], self.line
        while self.position < len(self.text):
            line = self.text[self.position :].partition("\n")[0]
            self.position = min(self.position + len(line) + 1, len(self.text))
            if line.strip() == delimiter.plain:
                break
            lines.append(line.lstrip("\t") if strip else line)
        body = "\n".join(lines)
        if any(piece.quoted for piece in delimiter.pieces):
            word.pieces = [Piece("text", body, quoted=True)]
        else:
            word.pieces = pieces_in_quotes(body, path=self.path, line=word.line)

    def word(self) -> Word:
        """Read the word that begins here."""
        word = Word(self.line)
        while self.position < len(self.text):
            if self._take(_CONTINUED):
                continue
            if self.text[self.position] == "(" and _ASSIGNED.fullmatch(word.keyword):
                word.array = self._array()
                break
            if match := self._take(_TO_FILL_IN):
                word.pieces.append(Piece("text", match[0], quoted=True))
            elif self.text[self.position] in " \t\r\n;&|<>()":
                break
            else:
                self.piece(word)
        return word

    def _array(self) -> list[Word]:
        """Read the elements in the parentheses that begin here."""
        line, start = self.line, self.position
        inside = self._balanced(start, "(", ")")[1:-1]
        return [token for token in tokens(inside, path=self.path, line=line) if isinstance(token, Word)]

    def piece(self, word: Word) -> None:
        """Read the next piece of a word."""
        character = self.text[self.position]
        if match := self._take(_ESCAPED) or self._take(_SINGLE_QUOTED):
            word.pieces.append(Piece("text", match[1], quoted=True))
        elif character == "'":
            raise self._unclosed("quote '", self.line)
        elif character == '"':
            self.position += 1
            # An empty pair of quotes is a word.
            word.pieces.extend(self.quoted(end='"') or [Piece("text", "", quoted=True)])
        elif match := self._take(_ANSI_QUOTED):
            inside = re.sub(r"\\(.)", lambda found: _ANSI.get(found[1], found[0]), match[1])
            word.pieces.append(Piece("text", inside, quoted=True))
        elif self.text.startswith("$'", self.position):
            raise self._unclosed("quote $'", self.line)
        elif character in "$`":
            word.pieces.append(self.expansion(quoted=False))
        else:
            match = self._take(_PLAIN)
            assert match is not None, "a character that ends a word"
            word.pieces.append(Piece("text", match[0]))

    def quoted(self, *, end: str | None) -> list[Piece]:
        """Read up to the closing quote, or to the end of the text."""
        pieces: list[Piece] = []
        line = self.line
        while self.position < len(self.text) and self.text[self.position] != end:
            if self.text[self.position] in "$`":
                pieces.append(self.expansion(quoted=True))
            elif (match := self._take(_IN_QUOTES)) and (text := match[1] or match[2]):
                pieces.append(Piece("text", text, quoted=True))
        if end is not None and self.position >= len(self.text):
            raise self._unclosed(f"quote {end}", line)
        self.position += end is not None
        return pieces

    def expansion(self, *, quoted: bool) -> Piece:
        """Read what `$` or a backtick begins."""
        text, start = self.text, self.position
        if text[start] == "`":
            match = self._take(_BACKTICKS)
            if match is None:
                raise self._unclosed("quote `", self.line)
            return Piece("command", match[1], quoted)
        if text.startswith("$((", start):
            inside = self._balanced(start + 1, "(", ")")
            return Piece("arithmetic", inside[2:-2], quoted)
        if text.startswith("$(", start):
            return Piece("command", self._balanced(start + 1, "(", ")")[1:-1], quoted)
        if text.startswith("${", start):
            return Piece("parameter", self._balanced(start + 1, "{", "}")[1:-1], quoted)
        match = _NAME.match(text, start + 1)
        self.position = match.end() if match else start + 1
        return Piece("parameter", match[0], quoted) if match else Piece("text", "$", quoted)

    def _balanced(self, start: int, opens: str, closes: str) -> str:
        """Return the text from an opening bracket to its closing one, and go to what follows it."""
        text, depth, place = self.text, 0, start
        while place < len(text):
            character = text[place]
            if character == "\\":
                place += 1
            elif character == "'" and opens == "(":
                place = text.find("'", place + 1) if "'" in text[place + 1 :] else len(text)
            elif character == '"':
                match = _DOUBLE_QUOTED.match(text, place)
                place = match.end() - 1 if match else len(text)
            elif character == "#" and text[place - 1] in " \t\n" and opens == "(":
                place = text.find("\n", place) if "\n" in text[place:] else len(text)
            elif character in (opens, closes):
                depth += 1 if character == opens else -1
                if depth == 0:
                    self.position = place + 1
                    return text[start : place + 1]
            place += 1
        raise self._unclosed(f"bracket {opens}", self.line)
