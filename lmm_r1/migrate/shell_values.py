"""Values of a bash script: text that may hold what only a run of the script would know, arithmetic and conditions."""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence

_OPEN, _CLOSE, _UNSET = "\ue000", "\ue001", "\ue002"
_UNKNOWN = re.compile(f"{_OPEN}({_UNSET}?)([^{_OPEN}{_CLOSE}]*){_CLOSE}")


def unknown(shown: str, *, unset: bool = False) -> str:
    """Return text that stands for what only a run would know.

    Args:
        shown: what the script says.
        unset: whether it is a variable that has no value, which bash replaces with nothing.
    """
    return f"{_OPEN}{_UNSET if unset else ''}{as_shown(shown)}{_CLOSE}"


def unknowns(text: str) -> list[str]:
    """Return what the script says for the unknown parts of a text."""
    return [match[2] for match in _UNKNOWN.finditer(text)]


def as_shown(text: str) -> str:
    """Return text with what the script says for its unknown parts."""
    return _UNKNOWN.sub(lambda match: match[2], text)


def seen(text: str) -> str | None:
    """Return the text as bash sees it, with nothing for variables without a value; None if that is not known."""
    without = _UNKNOWN.sub(lambda match: "" if match[1] else match[0], text)
    return None if _OPEN in without else without


def parts(text: str) -> list[str]:
    """Return the text split at blanks, but not inside of unknown parts."""
    return re.split(rf"\s+(?![^{_OPEN}{_CLOSE}]*{_CLOSE})", text)


_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: lambda left, right: left - right * int(left / right),
}
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    f"-{name}": vars(operator)[name] for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = dict(
    zip((ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE), _NUMBERS.values(), strict=True)
)
_TERNARY = re.compile(r"([^?]+)\?([^:]+):(.+)", re.DOTALL)
_LONGEST = 1000
"""Characters of an expression; a longer one is not computed."""


def arithmetic(text: str, value_of: Callable[[str], str]) -> int | None:
    """Return what `$(( text ))` is, None if it cannot be computed.

    Args:
        value_of: returns the value of a variable.
    """
    if len(text) > _LONGEST:
        return None
    if match := _TERNARY.fullmatch(text):
        condition = arithmetic(match[1], value_of)
        return None if condition is None else arithmetic(match[2 if condition else 3], value_of)
    try:
        tree = ast.parse(text.strip() or "0", mode="eval")
        return _computed(tree.body, value_of, depth=0)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return None


def _computed(node: ast.expr, value_of: Callable[[str], str], *, depth: int) -> int:
    """Return the value of an expression; raises ValueError if it has no whole one."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if depth < 10:
            text = seen(value_of(name))
            if text is None:
                raise ValueError(f"{name} is not known")
            return _computed(ast.parse(text.strip() or "0", mode="eval").body, value_of, depth=depth + 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand, value_of, depth=depth)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](*(_computed(side, value_of, depth=depth) for side in (left, right)))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
            return int(_COMPARED[type(op)](*(_computed(side, value_of, depth=depth) for side in (left, right))))
    raise ValueError("no arithmetic of whole numbers")


_TEXTS = ("=", "==", "!=", "=~", "<", ">", *_NUMBERS)


def condition(words: Sequence[str]) -> bool | None:
    """Return whether `[ words ]` holds; None if only a run would know.

    Words are texts that may hold unknown parts; `&&`, `||`, `!` and parentheses are words, too.
    """
    result, rest = _any_of(list(words))
    return result if not rest else None


def _any_of(words: list[str]) -> tuple[bool | None, list[str]]:
    result, words = _all_of(words)
    while words and words[0] in ("||", "-o"):
        other, words = _all_of(words[1:])
        result = True if True in (result, other) else None if None in (result, other) else False
    return result, words


def _all_of(words: list[str]) -> tuple[bool | None, list[str]]:
    result, words = _one(words)
    while words and words[0] in ("&&", "-a"):
        other, words = _one(words[1:])
        result = False if False in (result, other) else None if None in (result, other) else True
    return result, words


def _one(words: list[str]) -> tuple[bool | None, list[str]]:
    if not words:
        return False, words
    first, *rest = words
    if first == "!" and rest:
        result, rest = _one(rest)
        return (None if result is None else not result), rest
    if first == "(":
        result, rest = _any_of(rest)
        return result, rest[1:] if rest[:1] == [")"] else ["("]
    if len(rest) >= 2 and rest[0] in _TEXTS:
        return _compared(seen(first), rest[0], seen(rest[1])), rest[2:]
    if first in ("-z", "-n") and rest:
        text = seen(rest[0])
        return (None if text is None else (text == "") is (first == "-z")), rest[1:]
    if re.fullmatch("-[a-zA-Z]", first) and rest:
        # Whether there is a file, nobody knows before the run.
        return None, rest[1:]
    text = seen(first)
    return (None if text is None else text != ""), rest


def _compared(left: str | None, how: str, right: str | None) -> bool | None:
    if left is None or right is None:
        return None
    if how in _NUMBERS:
        whole = re.compile(r"\s*-?\d+\s*")
        return _NUMBERS[how](int(left), int(right)) if whole.fullmatch(left) and whole.fullmatch(right) else None
    if how in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if how == "!=":
        return not fnmatch.fnmatchcase(left, right)
    if how == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    return left < right if how == "<" else left > right
