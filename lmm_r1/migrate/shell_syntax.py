"""Words of a bash script as commands: sequences, conditions, loops and functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

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
class Compound:
    """A command that holds others, or a test."""

    kind: Literal["test", "if", "for", "while", "case", "function", "group"]
    line: int
    words: tuple[Word, ...] | None = None
    """Of `[[ ... ]]`, with its operators; of `for`; the one of `case`. None for `(( ... ))`, which is not computed."""
    name: str = ""
    """The variable of `for`, or the function's."""
    branches: tuple[tuple[Commands, Commands], ...] = ()
    """Conditions of `if` or `while` with what follows each."""
    cases: tuple[tuple[Sequence[Word], Commands], ...] = ()
    """Patterns of `case` with what follows them."""
    body: Commands = ()
    """What a loop repeats, a function or a group holds, or follows if no condition holds."""
    until: bool = False


Node: TypeAlias = "Simple | Compound"
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

    def _is_word(self) -> bool:
        return not self.ended and isinstance(self._tokens[self.place], Word)

    def _keyword(self) -> str:
        token = None if self.ended else self._tokens[self.place]
        return token.keyword if isinstance(token, Word) else ""

    def _line(self) -> int:
        return self._tokens[min(self.place, len(self._tokens) - 1)].line

    def _word(self) -> Word:
        if self.ended:
            raise UserError(f"{self._path}:{self._line()}: a condition or loop is opened and not closed; close it")
        token = self._tokens[self.place]
        self.place += 1
        return token if isinstance(token, Word) else Word(token.line, [Piece("text", token.text)])

    def _skip(self, *operators: str) -> bool:
        """Skip one of these operators, and return whether it is here."""
        found = self._operator() in operators
        self.place += found
        return found

    def _expect(self, keyword: str) -> None:
        self._skip_breaks()
        if self._keyword() != keyword:
            raise UserError(f"{self._path}:{self._line()}: {keyword} is missing here; add it")
        self.place += 1

    def _skip_breaks(self) -> None:
        while self._skip("\n", ";", "&"):
            pass

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
        if self._operator() == "(" or keyword in (
            "if",
            "for",
            "select",
            "while",
            "until",
            "case",
            "{",
            "function",
            "[[",
        ):
            self.place += bool(keyword)
            node = self._compound(keyword, line)
            self._redirections(Simple(line))
            return node
        if keyword == "!":
            self.place += 1
            # Its status is the opposite, which nobody needs to know.
            self._command()
            return Compound("test", line)
        if keyword and self._operator(ahead=1) == "(" and self._operator(ahead=2) == ")":
            self.place += 3
            return self._function(keyword, line)
        return self._simple(line)

    def _compound(self, keyword: str, line: int) -> Compound:
        match keyword:
            case "if":
                return self._if(line)
            case "for" | "select":
                return self._for(line)
            case "while" | "until":
                condition = self.sequence()
                return Compound("while", line, branches=((condition, self._loop_body()),), until=keyword == "until")
            case "case":
                return self._case(line)
            case "{":
                body = self.sequence()
                self._expect("}")
                return Compound("group", line, body=body)
            case "function":
                name = self._word().plain
                self.place += 2 * (self._operator() == "(")
                return self._function(name, line)
            case "[[":
                words: list[Word] = []
                while self._keyword() != "]]":
                    word = self._word()
                    words += [word] if word.plain != "\n" else []
                self.place += 1
                return Compound("test", line, tuple(words))
        if self._operator(ahead=1) == "(":
            self._skip_arithmetic()
            return Compound("test", line)
        self.place += 1
        body = self.sequence()
        self._skip(")")
        return Compound("group", line, body=body)

    def _simple(self, line: int) -> Simple:
        simple = Simple(line)
        while self._is_word() or self._operator() in _REDIRECTIONS:
            if self._is_word():
                simple.words.append(self._word())
            else:
                self._redirections(simple)
        if not simple.words and simple.stdin is None and self._operator() in _JOINERS:
            raise UserError(f"{self._path}:{line}: a command is missing before {self._operator()}; add it")
        return simple

    def _redirections(self, simple: Simple) -> None:
        """Skip redirections, and take what is read from the script itself."""
        while self._operator() in _REDIRECTIONS:
            token = self._tokens[self.place]
            assert isinstance(token, Operator)
            self.place += 1
            if token.document is not None:
                simple.stdin = token.document
            elif self._is_word():
                target = self._word()
                simple.stdin = target if token.text == "<<<" else simple.stdin

    def _skip_arithmetic(self) -> None:
        depth = 0
        while not self.ended:
            depth += (self._operator() == "(") - (self._operator() == ")")
            self.place += 1
            if depth == 0:
                return

    def _if(self, line: int) -> Compound:
        branches: list[tuple[Commands, Commands]] = []
        otherwise: Commands = ()
        keyword = "if"
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
        return Compound("if", line, branches=tuple(branches), body=otherwise)

    def _for(self, line: int) -> Compound:
        name, words = "", None
        if self._operator() == "(":
            self._skip_arithmetic()
        else:
            name = self._word().plain
            self._skip_breaks()
            if self._keyword() == "in":
                self.place += 1
                listed = []
                while self._is_word():
                    listed.append(self._word())
                words = tuple(listed)
        return Compound("for", line, words, name, body=self._loop_body())

    def _loop_body(self) -> Commands:
        self._expect("do")
        body = self.sequence()
        self._expect("done")
        return body

    def _case(self, line: int) -> Compound:
        word = self._word()
        self._expect("in")
        cases: list[tuple[Sequence[Word], Commands]] = []
        self._skip_breaks()
        while self._keyword() != "esac":
            self._skip("(")
            patterns = [self._word()]
            while self._skip("|"):
                patterns.append(self._word())
            self._skip(")")
            cases.append((patterns, self.sequence()))
            self._skip(";;")
            self._skip_breaks()
        self.place += 1
        return Compound("case", line, (word,), cases=tuple(cases))

    def _function(self, name: str, line: int) -> Compound:
        self._skip_breaks()
        return Compound("function", line, name=name, body=[(";", self._command())])
