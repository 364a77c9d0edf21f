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

    def read(self) -> Iterator[Word | Operator]:
        while self.position < len(self.text):
            character = self.text[self.position]
            if self.text.startswith("\\\n", self.position):
                self.position += 2
            elif character in " \t\r":
                self.position += 1
            elif character == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            elif match := _TO_FILL_IN.match(self.text, self.position):
                yield self.word()
            elif self.text.startswith(("<(", ">("), self.position):
                yield Word(self.line, [Piece("text", self._balanced(self.position + 1, "(", ")"), quoted=True)])
            elif match := _OPERATORS.match(self.text, self.position):
                yield self._operator(match[0])
            elif match := re.compile(r"\d+(?=[<>])").match(self.text, self.position):
                self.position = match.end()
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
            found = self.text.find("\n", self.position)
            stop = len(self.text) if found < 0 else found
            line = self.text[self.position : stop]
            self.position = min(stop + 1, len(self.text))
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
        if match := _TO_FILL_IN.match(self.text, self.position):
            word.pieces.append(Piece("text", match[0], quoted=True))
            self.position = match.end()
        while self.position < len(self.text):
            if self.text.startswith("\\\n", self.position):
                self.position += 2
            elif self.text[self.position] == "(" and _ASSIGNED.fullmatch(word.keyword):
                word.array = self._array()
                break
            elif match := _TO_FILL_IN.match(self.text, self.position):
                word.pieces.append(Piece("text", match[0], quoted=True))
                self.position = match.end()
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
        if character == "\\":
            word.pieces.append(Piece("text", self.text[self.position + 1 : self.position + 2], quoted=True))
            self.position += 2
        elif character == "'":
            end = self._closing("'", self.position + 1)
            word.pieces.append(Piece("text", self.text[self.position + 1 : end], quoted=True))
            self.position = end + 1
        elif character == '"':
            self.position += 1
            # An empty pair of quotes is a word.
            word.pieces.extend(self.quoted(end='"') or [Piece("text", "", quoted=True)])
        elif self.text.startswith("$'", self.position):
            word.pieces.append(self._ansi())
        elif character in "$`":
            word.pieces.append(self.expansion(quoted=False))
        else:
            match = _PLAIN.match(self.text, self.position)
            assert match is not None, "a character that ends a word"
            word.pieces.append(Piece("text", match[0]))
            self.position = match.end()

    def quoted(self, *, end: str | None) -> list[Piece]:
        """Read up to the closing quote, or to the end of the text."""
        pieces: list[Piece] = []
        line, plain = self.line, ""
        while self.position < len(self.text) and self.text[self.position] != end:
            character = self.text[self.position]
            if character == "\\" and self.text[self.position + 1 : self.position + 2] in ("$", "`", '"', "\\", "\n"):
                following = self.text[self.position + 1]
                plain += "" if following == "\n" else following
                self.position += 2
            elif character in "$`":
                pieces += [Piece("text", plain, quoted=True)] if plain else []
                plain = ""
                pieces.append(self.expansion(quoted=True))
            else:
                plain += character
                self.position += 1
        if end is not None and self.position >= len(self.text):
            raise UserError(f"{self.path}:{line}: a quote {end} is opened and not closed; close it")
        self.position += end is not None
        return [*pieces, Piece("text", plain, quoted=True)] if plain else pieces

    def expansion(self, *, quoted: bool) -> Piece:
        """Read what `$` or a backtick begins."""
        text, start = self.text, self.position
        if text[start] == "`":
            end = self._closing("`", start + 1)
            self.position = end + 1
            return Piece("command", text[start + 1 : end], quoted)
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

    def _ansi(self) -> Piece:
        """Read `$'...'`."""
        start = self.position + 2
        match = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL).match(self.text, start)
        if match is None:
            raise UserError(f"{self.path}:{self.line}: a quote $' is opened and not closed; close it")
        self.position = match.end()
        inside = re.sub(r"\\(.)", lambda found: _ANSI.get(found[1], found[0]), match[0][:-1])
        return Piece("text", inside, quoted=True)

    def _closing(self, quote: str, start: int) -> int:
        end = self.text.find(quote, start)
        if end < 0:
            raise UserError(f"{self.path}:{self.line}: a quote {quote} is opened and not closed; close it")
        return end

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
                match = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL).match(text, place)
                place = match.end() - 1 if match else len(text)
            elif character == "#" and text[place - 1] in " \t\n" and opens == "(":
                place = text.find("\n", place) if "\n" in text[place:] else len(text)
            elif character in (opens, closes):
                depth += 1 if character == opens else -1
                if depth == 0:
                    self.position = place + 1
                    return text[start : place + 1]
            place += 1
        raise UserError(f"{self.path}:{self.line}: a bracket {opens} is opened and not closed; close it")
