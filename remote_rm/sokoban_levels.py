"""Levels and moves of Sokoban as text."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remote_rm.sokoban_board import Move, Room, Square, State

SYMBOLS = {"#": "wall", " ": "floor", "-": "floor", "_": "floor", ".": "goal"} | {
    "$": "box",
    "*": "box on a goal",
    "@": "player",
    "+": "player on a goal",
}
_NUMBERED = "#-.*$@+"
"""The symbols of the numbers 0 to 6 in gym-sokoban's arrays."""
LARGEST_SIDE = 64
_LISTS = ("walls", "goals", "boxes")
_RECORD = 'an object with "height", "width", "walls", "goals", "boxes" and "player"'


class LevelError(ValueError):
    """The input is not a level; the message says why, without its location."""


def read_state(value: Any) -> State:
    """Return the state that a row holds: XSB text, the list of its lines, or a record with squares counted from 1.

    Raises:
        LevelError: it has none of these forms, or is not a level with one player, one or more boxes, and as many goals.
    """
    if isinstance(value, Mapping):
        return _from_record(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(isinstance(x, str) for x in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise LevelError(f"a level is XSB text, a list of its lines, or {_RECORD}, not {type(value).__name__}")
    return _from_text(value)


def read_numbers(rows: Any) -> State:
    """Return the state that gym-sokoban's array `room_state` holds, given as lists of its numbers.

    The array may have a player on a goal as 5, like one on the floor: then there is a box more than there are goals.

    Raises:
        LevelError: it has other numbers, or is not a level.
    """
    if not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)):
        raise LevelError("the array needs two dimensions, rows and columns")
    unknown = [number for row in rows for number in row if number not in range(len(_NUMBERED))]
    if unknown:
        raise LevelError(f"the array holds {unknown[0]!r}; a level has whole numbers from 0 to {len(_NUMBERED) - 1}")
    text = "\n".join("".join(_NUMBERED[int(number)] for number in row) for row in rows)
    boxes, goals = (sum(map(text.count, symbols)) for symbols in ("$*", ".*+"))
    return _from_text(text.replace("@", "+") if boxes == goals + 1 else text)


def board_text(state: State, *, floor: str = " ") -> str:
    """The state in XSB, one line for each row; `floor="-"` survives whatever strips spaces."""
    return "\n".join(
        "".join(symbol_at(state, (row, column), floor=floor) for column in range(state.room.width))
        for row in range(state.room.height)
    )


def symbol_at(state: State, square: Square, *, floor: str = " ") -> str:
    """The XSB symbol of one square."""
    if square in state.room.walls:
        return "#"
    on_goal = square in state.room.goals
    if square == state.player:
        return "+" if on_goal else "@"
    if square in state.boxes:
        return "*" if on_goal else "$"
    return "." if on_goal else floor


def coordinates_text(state: State) -> str:
    """The state in coordinates, for a policy to read: one line for each kind of thing."""

    def listed(squares: Iterable[Square]) -> str:
        return ", ".join(f"({row}, {column})" for row, column in _counted_from_1(squares))

    return (
        f"{state.room.height} rows, {state.room.width} columns; (row, column), (1, 1) at the top left.\n"
        f"Player: {listed([state.player])}\nBoxes: {listed(state.boxes)}\nGoals: {listed(state.room.goals)}\n"
        f"Walls: {listed(state.room.walls)}"
    )


def _counted_from_1(squares: Iterable[Square]) -> list[list[int]]:
    return [[row + 1, column + 1] for row, column in sorted(squares)]


def _from_text(text: str) -> State:
    lines = text.splitlines()
    while lines and not lines[0].strip():
        del lines[0]
    while lines and not lines[-1].strip():
        del lines[-1]
    found: dict[str, list[Square]] = {}
    for row, line in enumerate(lines):
        for column, symbol in enumerate(line):
            if symbol not in SYMBOLS:
                known = ", ".join(f"{known!r} {meaning}" for known, meaning in SYMBOLS.items())
                raise LevelError(
                    f"line {row + 1}, column {column + 1} is {symbol!r}, no symbol of a board; they are {known}"
                )
            found.setdefault(symbol, []).append((row, column))

    def squares(symbols: str) -> list[Square]:
        return [square for symbol in symbols for square in found.get(symbol, [])]

    return _checked(
        height=len(lines),
        width=max(map(len, lines), default=0),
        walls=squares("#"),
        goals=squares(".*+"),
        boxes=squares("$*"),
        players=squares("@+"),
    )


def _from_record(record: Mapping[str, Any]) -> State:
    missing = [name for name in ("height", "width", *_LISTS, "player") if name not in record]
    if missing:
        raise LevelError(f'"{missing[0]}" is missing; a level in coordinates is {_RECORD}')
    for name in ("height", "width"):
        if not _is_whole(record[name]):
            raise LevelError(f'"{name}" is {record[name]!r}; a whole number is needed')
    listed = {name: _squares(record[name], name=name) for name in _LISTS}
    return _checked(
        height=record["height"], width=record["width"], players=_squares([record["player"]], name="player"), **listed
    )


def _squares(value: Any, *, name: str) -> list[Square]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise LevelError(f'"{name}" is {value!r}; a list of [row, column] is needed')
    for pair in value:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_whole, pair))):
            raise LevelError(f'"{name}" holds {pair!r}; [row, column] in whole numbers from 1 is needed')
    return [(row - 1, column - 1) for row, column in value]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked(
    *, height: int, width: int, walls: list[Square], goals: list[Square], boxes: list[Square], players: list[Square]
) -> State:
    if not (1 <= height <= LARGEST_SIDE and 1 <= width <= LARGEST_SIDE):
        raise LevelError(f"the board has {height} rows and {width} columns; 1 to {LARGEST_SIDE} of each are needed")
    for row, column in (*walls, *goals, *boxes, *players):
        if not (0 <= row < height and 0 <= column < width):
            raise LevelError(f"({row + 1}, {column + 1}) lies outside of {height} rows and {width} columns")
    if len(players) != 1:
        raise LevelError(f"there are {len(players)} players (@ or +); a level has one")
    if not boxes:
        raise LevelError("there is no box ($ or *)")
    solid = [*walls, *boxes, *players]
    if len(set(solid)) < len(solid) or len(set(goals)) < len(goals) or set(goals) & set(walls):
        raise LevelError("one square holds two things that cannot share it")
    if len(boxes) != len(goals):
        raise LevelError(
            f"there are {len(boxes)} boxes and {len(goals)} goals; a level has as many of one as the other"
        )
    room = Room(height=height, width=width, walls=frozenset(walls), goals=frozenset(goals))
    return State(room=room, boxes=frozenset(boxes), player=players[0])


_WORDS: dict[str, Move] = {
    **{"left": "L", "up": "U", "right": "R", "down": "D"},
    **{"左": "L", "上": "U", "右": "R", "下": "D"},
    **{"←": "L", "↑": "U", "→": "R", "↓": "D"},
    **{"⬅": "L", "⬆": "U", "➡": "R", "⬇": "D"},
}
_LETTERS: dict[str, Move] = {"l": "L", "u": "U", "r": "R", "d": "D"}
# Separators between moves.
_FILLERS = frozenset(
    "move moves go step steps push then and next finally first the box player it to 向 往 推 移 动 走 然 后 再 先 步".split()
)
_STOPS = frozenset(("stop", "stuck", "give up"))
_BLOCK = re.compile(r"<answer>(.*?)(?=</answer>|<answer>|\Z)", re.DOTALL | re.IGNORECASE)
# A number followed by a sign counts the moves; other numbers are not read.
_TOKENS = re.compile(r"\d+\s?[.):、]|[a-z]+|\d+|[^\W\d_]|[←↑→↓⬅⬆➡⬇]", re.IGNORECASE)
_RUN = re.compile(r"[lurd]+")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a text asks for."""

    moves: tuple[Move, ...]
    unread: tuple[str, ...]
    """Words and numbers between the moves that name none."""
    is_answer: bool
    """Whether there was an answer block, or only moves."""
    stops: bool = False
    """Whether the answer is that there are no more moves: `stop`, `stuck` or `give up`."""


def read_plan(text: str) -> Plan:
    """Return the moves of the last answer block; one that is not closed runs to the end. Never raises.

    `<answer>1. Right, 2. down → ul 左</answer>` → R, D, R, U, L, L. Text without a block counts if it has only moves.
    """
    blocks = _BLOCK.findall(text.rpartition("</think>")[2]) or _BLOCK.findall(text)
    answer = unicodedata.normalize("NFKC", blocks[-1] if blocks else text)
    if blocks and " ".join(answer.lower().strip(" .!\n").split()) in _STOPS:
        return Plan(moves=(), unread=(), is_answer=True, stops=True)
    moves: list[Move] = []
    unread: list[str] = []
    for token in _TOKENS.findall(answer):
        word = token.lower()
        if word in _WORDS:
            moves.append(_WORDS[word])
        elif _RUN.fullmatch(word):
            moves.extend(_LETTERS[letter] for letter in word)
        elif word not in _FILLERS and word[-1] not in ".):、":
            unread.append(token)
    if not blocks and (unread or not moves):
        return Plan(moves=(), unread=(), is_answer=False)
    return Plan(moves=tuple(moves), unread=tuple(unread), is_answer=True)
