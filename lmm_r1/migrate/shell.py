"""Commands in a bash script, as far as they are plain: words, quotes, continued lines and variables set in the file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmm_r1.errors import UserError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_VARIABLE = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})(?:(:?)([-=])([^{{}}]*))?\}})")
_HERE = re.compile(r"\$\(pwd\)|\$\{PWD\}|\$PWD\b|`pwd`")
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_HEREDOC = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_OPENS = ("if", "for", "while", "until", "case", "{")
_CLOSES = ("fi", "done", "esac", "}")
_FOLLOWED = ("then", "do", "else", "elif", "if", "while", "until", "{", "!")
"""Words that a command of its own stands behind."""
_ESCAPED = {"$": "\ue000", "`": "\ue001"}
"""What stands for a sign that a backslash in double quotes makes one like any other."""
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
class _Command:
    """A simple command."""

    words: list[_Word]
    conditional: bool
    """Whether it stands behind `&&`, `||`, `|` or an open parenthesis."""
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
        """Take the variables that a command sets for those behind it, with the values that they have now."""
        first, *others = words
        if first.raw == ":":
            # `: "${NAME:=value}"` sets NAME where nobody else has.
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
            # In front of a command they are the command's alone.
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
        """From here on only bash could tell what a variable holds."""
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
        """Return text with its variables replaced; raises UserError for what only bash could tell."""

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
            raise self._unreadable(line, text, "only bash could tell what this is; write the value itself")
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
                # `2> file`: the number is no argument. All behind the first redirection is the shell's.
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
    """Say whether a command behind these operators may not run, or runs in a shell of its own."""
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
    """Return what stands in double quotes, with stand-ins for signs that are escaped."""
    end = start + 1
    while end < len(text) and text[end] != '"':
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        raise UserError(f'{path}:{line}: a quote " is opened and not closed')
    inner = text[start + 1 : end].replace("\\\n", "")
    plain = re.sub(r'\\([$`"\\])', lambda match: _ESCAPED.get(match[1], match[1]), inner)
    return plain, True, True, end + 1
