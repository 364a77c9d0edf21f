"""Words of a bash script as commands: sequences, conditions, loops and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from lmm_r1.errors import UserError
from lmm_r1.migrate.shell_words import Operator, Piece, Word, tokens

_REDIRECTIONS = ("<", ">", ">>", "&>", "&>>", ">&", "<&", "<<", "<<-", "<<<")
_JOINERS = ("&&", "||", "|")
_ENDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


@dataclass
class Simple:
    """A command with its words, and what it reads from standard input if that is in the script."""

    line: int
    words: list[Word] = field(default_factory=list)
    stdin: Word | None = None


@dataclass(frozen=True)
class Test:
    """`[[ ... ]]`, with its operators as words; or `(( ... ))`, whose result is not computed, without words."""

    line: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Branches:
    """`if`: conditions with what follows each, and what follows if none holds."""

    branches: tuple[tuple[Commands, Commands], ...]
    otherwise: Commands


@dataclass(frozen=True)
class Loop:
    """`for` with its variable and words, or `while` and `until` with a condition."""

    line: int
    body: Commands
    name: str = ""
    words: tuple[Word, ...] | None = None
    condition: Commands = ()
    until: bool = False


@dataclass(frozen=True)
class CaseBranches:
    """`case`: the word, and what follows each list of patterns."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Commands], ...]


@dataclass(frozen=True)
class Definition:
    """A function."""

    name: str
    body: Commands


@dataclass(frozen=True)
class Group:
    """`{ ...; }` or `( ... )`."""

    body: Commands


Node: TypeAlias = "Simple | Test | Branches | Loop | CaseBranches | Definition | Group"
Commands: TypeAlias = "Sequence[tuple[str, Node]]"
"""Commands, each with the operator before it: `;`, `&&`, `||` or `|`."""


def parsed(text: str, *, path: Path, line: int = 1) -> Commands:
    """Return the commands of a script.

    Raises:
        UserError: a quote, a bracket or a condition is not closed.
    """
    parser = _SyntaxReader(tokens(text, path=path, line=line), path=path)
    commands = list(parser.sequence())
    while not parser.ended:
        # A closing word without its opening one: bash would stop there, too.
        parser.place += 1
        commands += parser.sequence()
    return commands


class _SyntaxReader:
    def __init__(self, read: Sequence[Word | Operator], *, path: Path) -> None:
        self._tokens = read
        self._path = path
        self.place = 0

    @property
    def ended(self) -> bool:
        return self.place >= len(self._tokens)

    def _operator(self, *, ahead: int = 0) -> str:
        place = self.place + ahead
        token = self._tokens[place] if place < len(self._tokens) else None
        return token.text if isinstance(token, Operator) else ""

    def _keyword(self) -> str:
        token = None if self.ended else self._tokens[self.place]
        return token.keyword if isinstance(token, Word) else ""

    def _line(self) -> int:
        return self._tokens[min(self.place, len(self._tokens) - 1)].line

    def _take(self) -> Word | Operator:
        if self.ended:
            raise UserError(f"{self._path}:{self._line()}: a condition or loop is opened and not closed; close it")
        self.place += 1
        return self._tokens[self.place - 1]

    def _word(self) -> Word:
        token = self._take()
        return token if isinstance(token, Word) else Word(token.line, [Piece("text", token.text)])

    def _expect(self, keyword: str) -> None:
        self._skip_breaks()
        line = self._line()
        if self._keyword() != keyword:
            raise UserError(f"{self._path}:{line}: {keyword} is missing here; add it")
        self.place += 1

    def _skip_breaks(self) -> None:
        while self._operator() in ("\n", ";", "&"):
            self.place += 1

    def sequence(self) -> list[tuple[str, Node]]:
        """Read commands up to a word or an operator that ends a group of them."""
        commands: list[tuple[str, Node]] = []
        joiner = ";"
        while True:
            self._skip_breaks()
            if self.ended or self._operator() in (")", ";;") or self._keyword() in _ENDS:
                return commands
            commands.append((joiner, self._command()))
            joiner = self._operator() if self._operator() in _JOINERS else ";"
            self.place += joiner != ";"

    def _command(self) -> Node:
        keyword, line = self._keyword(), self._line()
        if self._operator() == "(":
            return self._parentheses(line)
        if keyword == "!":
            self.place += 1
            # Its status is the opposite, which nobody needs to know.
            self._command()
            return Test(line)
        compounds: Mapping[str, Callable[[str, int], Node]] = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "{": self._braces,
            "function": self._function,
            "[[": self._test,
        }
        compound = compounds.get(keyword)
        if compound is not None:
            self.place += 1
            node = compound(keyword, line)
            self._redirections(Simple(line))
            return node
        if keyword and self._operator(ahead=1) == "(" and self._operator(ahead=2) == ")":
            self.place += 3
            return self._body_of(keyword)
        return self._simple(line)

    def _simple(self, line: int) -> Simple:
        simple = Simple(line)
        while not self.ended:
            token = self._tokens[self.place]
            if isinstance(token, Word):
                simple.words.append(token)
                self.place += 1
            elif token.text in _REDIRECTIONS:
                self._redirections(simple)
            else:
                break
        if not simple.words and simple.stdin is None and not self.ended and self._operator() in _JOINERS:
            raise UserError(f"{self._path}:{line}: a command is missing before {self._operator()}; add it")
        return simple

    def _redirections(self, simple: Simple) -> None:
        """Skip redirections, and take what is read from the script itself."""
        while self._operator() in _REDIRECTIONS:
            token = self._take()
            assert isinstance(token, Operator)
            if token.document is not None:
                simple.stdin = token.document
            elif not self.ended and isinstance(self._tokens[self.place], Word):
                target = self._word()
                simple.stdin = target if token.text == "<<<" else simple.stdin

    def _parentheses(self, line: int) -> Node:
        if self._operator(ahead=1) == "(":
            self._skip_arithmetic()
            return Test(line)
        self.place += 1
        body = self.sequence()
        self.place += self._operator() == ")"
        self._redirections(Simple(line))
        return Group(body)

    def _skip_arithmetic(self) -> None:
        depth = 0
        while not self.ended:
            depth += (self._operator() == "(") - (self._operator() == ")")
            self.place += 1
            if depth == 0:
                return

    def _if(self, keyword: str, line: int) -> Branches:
        branches: list[tuple[Commands, Commands]] = []
        otherwise: Commands = ()
        while keyword in ("if", "elif"):
            condition = self.sequence()
            self._expect("then")
            branches.append((condition, self.sequence()))
            keyword = self._word().plain
        if keyword == "else":
            otherwise = self.sequence()
            self._expect("fi")
        elif keyword != "fi":
            raise UserError(f"{self._path}:{line}: an if is opened and not closed by fi; close it")
        return Branches(tuple(branches), otherwise)

    def _for(self, _: str, line: int) -> Loop:
        name, words = "", None
        if self._operator() == "(":
            self._skip_arithmetic()
        else:
            name = self._word().plain
            self._skip_breaks()
            if self._keyword() == "in":
                self.place += 1
                listed = []
                while not self.ended and isinstance(self._tokens[self.place], Word):
                    listed.append(self._word())
                words = tuple(listed)
        return Loop(line, self._loop_body(), name=name, words=words)

    def _while(self, keyword: str, line: int) -> Loop:
        condition = self.sequence()
        return Loop(line, self._loop_body(), condition=condition, until=keyword == "until")

    def _loop_body(self) -> Commands:
        self._expect("do")
        body = self.sequence()
        self._expect("done")
        return body

    def _case(self, _: str, __: int) -> CaseBranches:
        word = self._word()
        self._expect("in")
        branches: list[tuple[tuple[Word, ...], Commands]] = []
        self._skip_breaks()
        while self._keyword() != "esac":
            self.place += self._operator() == "("
            patterns = [self._word()]
            while self._operator() == "|":
                self.place += 1
                patterns.append(self._word())
            self.place += self._operator() == ")"
            branches.append((tuple(patterns), self.sequence()))
            self.place += self._operator() == ";;"
            self._skip_breaks()
        self.place += 1
        return CaseBranches(word, tuple(branches))

    def _braces(self, _: str, __: int) -> Group:
        body = self.sequence()
        self._expect("}")
        return Group(body)

    def _function(self, _: str, __: int) -> Definition:
        name = self._word().plain
        self.place += 2 * (self._operator() == "(")
        return self._body_of(name)

    def _body_of(self, name: str) -> Definition:
        self._skip_breaks()
        return Definition(name, [(";", self._command())])

    def _test(self, _: str, line: int) -> Test:
        words: list[Word] = []
        while self._keyword() != "]]":
            word = self._word()
            if word.plain != "\n":
                words.append(word)
        self.place += 1
        return Test(line, tuple(words))
