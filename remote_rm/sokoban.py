"""Sokoban: levels and moves as text, what moves do, a search for the shortest solution, and the verifier of moves.

`<answer>Left, Up, Up</answer>` is right if it solves the level in the label.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal, get_args

from remote_rm.answer_verifier import AnswerVerifier, setting
from remote_rm.registry import positive

Move = Literal["Left", "Up", "Right", "Down"]
MOVES: tuple[Move, ...] = get_args(Move)
Square = tuple[int, int]
"""Row and column, from 0 at the top left."""
_STEPS: dict[Move, Square] = {"Left": (0, -1), "Up": (-1, 0), "Right": (0, 1), "Down": (1, 0)}
SYMBOLS = "#-_ .$*@+"
"""Wall, three signs for floor, goal, box, box on a goal, player, player on a goal."""
LARGEST_SIDE = 64


def beside(square: Square, move: Move) -> Square:
    """Return the square next to `square` in the direction of `move`."""
    down, right = _STEPS[move]
    return square[0] + down, square[1] + right


@dataclass(frozen=True, kw_only=True)
class Level:
    """A board with its boxes and the player; made by `read_level`, which checks that it is a level."""

    height: int
    width: int
    free: frozenset[Square]
    """All squares that are not walls; everything outside of the board is wall."""
    goals: frozenset[Square]
    boxes: frozenset[Square]
    player: Square

    @property
    def is_solved(self) -> bool:
        """Whether every box is on a goal."""
        return self.boxes <= self.goals

    @property
    def is_lost(self) -> bool:
        """Whether a box is on a square from which not even a lone box can be pushed to a goal."""
        return not self.boxes <= _live_squares(self.free, self.goals)

    def allows(self, move: Move) -> bool:
        """Return whether neither a wall nor a box that cannot be pushed is in the way."""
        target = beside(self.player, move)
        behind = beside(target, move)
        return target in self.free and (target not in self.boxes or (behind in self.free and behind not in self.boxes))

    def after(self, move: Move) -> "Level":
        """Return the level after a valid move."""
        target = beside(self.player, move)
        pushed = {beside(target, move)} if target in self.boxes else set()
        return replace(self, player=target, boxes=self.boxes - {target} | pushed)


@lru_cache(maxsize=256)
def _live_squares(free: frozenset[Square], goals: frozenset[Square]) -> frozenset[Square]:
    """Pull a lone box away from the goals: the player needs one more square to step back to."""
    found, waiting = set(goals), list(goals)
    while waiting:
        box = waiting.pop()
        for move in MOVES:
            pulled = beside(box, move)
            if pulled in free and beside(pulled, move) in free and pulled not in found:
                found.add(pulled)
                waiting.append(pulled)
    return frozenset(found)


@dataclass(frozen=True, kw_only=True)
class Played:
    """The result of a list of moves; moves after the level is solved are ignored."""

    level: Level
    valid: int = 0
    pushes: int = 0
    """How many of the valid moves pushed a box."""
    invalid: tuple[tuple[int, Move], ...] = ()
    """Each move that could not be made, with its number in the list, from 1."""


def play(level: Level, moves: Iterable[Move]) -> Played:
    """Make the moves in order; an invalid move changes nothing, and the later ones are still made."""
    played = Played(level=level)
    for number, move in enumerate(moves, start=1):
        if played.level.is_solved:
            break
        if not played.level.allows(move):
            played = replace(played, invalid=(*played.invalid, (number, move)))
            continue
        following = played.level.after(move)
        pushes = played.pushes + (following.boxes != played.level.boxes)
        played = replace(played, level=following, valid=played.valid + 1, pushes=pushes)
    return played


_Node = tuple[frozenset[Square], Square]
"""The boxes and the player."""


def solve(level: Level, *, max_states: int) -> tuple[Move, ...] | None:
    """Return the moves of a shortest solution by breadth-first search; None if there is none or it takes too many states."""
    free, goals, live = level.free, level.goals, _live_squares(level.free, level.goals)
    start = (level.boxes, level.player)
    came: dict[_Node, tuple[_Node, Move] | None] = {start: None}
    waiting = deque([start])
    while waiting and len(came) <= max_states:
        node = boxes, player = waiting.popleft()
        if boxes <= goals:
            moves: list[Move] = []
            while (step := came[node]) is not None:
                node, move = step
                moves.append(move)
            return tuple(moves[::-1])
        for move in MOVES:
            target, pushed = beside(player, move), boxes
            if target in boxes:
                behind = beside(target, move)
                if behind not in live or behind in boxes:
                    continue
                pushed = boxes - {target} | {behind}
            if target in free and (pushed, target) not in came:
                came[pushed, target] = ((boxes, player), move)
                waiting.append((pushed, target))
    return None


def read_level(text: object) -> Level:
    """Return the level of an XSB text; raises ValueError for anything else."""
    if not isinstance(text, str):
        raise ValueError(f"a level is XSB text, not {type(text).__name__}")
    lines = text.strip("\r\n").splitlines()
    height, width = len(lines), max(map(len, lines), default=0)
    if not (1 <= height <= LARGEST_SIDE and width <= LARGEST_SIDE):
        raise ValueError(f"the board has {height} rows and {width} columns; 1 to {LARGEST_SIDE} of each are needed")
    squares = {(row, column): symbol for row, line in enumerate(lines) for column, symbol in enumerate(line)}
    for (row, column), symbol in squares.items():
        if symbol not in SYMBOLS:
            raise ValueError(
                f"line {row + 1}, column {column + 1} is {symbol!r}, no symbol of a board; they are {' '.join(SYMBOLS)}"
            )

    def those(symbols: str) -> frozenset[Square]:
        return frozenset(square for square, symbol in squares.items() if symbol in symbols)

    boxes, goals, players = those("$*"), those(".*+"), those("@+")
    if len(players) != 1:
        raise ValueError(f"there are {len(players)} players (@ or +); a level has one")
    if not boxes or len(boxes) != len(goals):
        raise ValueError(
            f"there are {len(boxes)} boxes and {len(goals)} goals; a level has as many of one as the other"
        )
    inside = frozenset((row, column) for row in range(height) for column in range(width))
    return Level(
        height=height, width=width, free=inside - those("#"), goals=goals, boxes=boxes, player=next(iter(players))
    )


def level_text(level: Level, *, floor: str = " ") -> str:
    """Return the level in XSB, one line for each row; `floor="-"` survives whatever strips spaces."""

    def symbol(square: Square) -> str:
        if square not in level.free:
            return "#"
        signs = "@+" if square == level.player else "$*" if square in level.boxes else f"{floor}."
        return signs[square in level.goals]

    return "\n".join("".join(symbol((row, column)) for column in range(level.width)) for row in range(level.height))


_NAMES = {"Left": "left l 左 ← ⬅", "Up": "up u 上 ↑ ⬆", "Right": "right r 右 → ➡", "Down": "down d 下 ↓ ⬇"}
_WORDS = {word: move for move in MOVES for word in _NAMES[move].split()}
# Separators between moves.
_FILLERS = frozenset(
    "move moves go step steps push then and next finally first the box player it to 向 往 推 移 动 走 然 后 再 先 步".split()
)
_BLOCK = re.compile(r"<answer>(.*?)(?=</answer>|<answer>|\Z)", re.DOTALL | re.IGNORECASE)
# A number followed by a sign counts the moves; other numbers are not read.
_TOKENS = re.compile(r"\d+\s?[.):、]|[a-z]+|\d+|[^\W\d_]|[←↑→↓⬅⬆➡⬇]", re.IGNORECASE)
_RUN = re.compile(r"[lurd]+")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a text asks for."""

    moves: tuple[Move, ...] = ()
    unread: tuple[str, ...] = ()
    """Words and numbers between the moves that name none."""
    is_answer: bool = False
    """Whether there was an answer block, or only moves."""
    stops: bool = False
    """Whether the answer is that there are no more moves: `stop`."""


def read_plan(text: str) -> Plan:
    """Return the moves of the last answer block; one that is not closed runs to the end. Never raises.

    `<answer>1. Right, 2. down → ul 左</answer>` has six moves. Text without a block counts if it has only moves.
    """
    blocks = _BLOCK.findall(text.rpartition("</think>")[2]) or _BLOCK.findall(text)
    answer = unicodedata.normalize("NFKC", blocks[-1] if blocks else text)
    if blocks and answer.strip(" .!\n").lower() == "stop":
        return Plan(is_answer=True, stops=True)
    moves: list[Move] = []
    unread: list[str] = []
    for token in _TOKENS.findall(answer):
        word = token.lower()
        if word in _WORDS:
            moves.append(_WORDS[word])
        elif _RUN.fullmatch(word):
            moves.extend(_WORDS[letter] for letter in word)
        elif word not in _FILLERS and word[-1] not in ".):、":
            unread.append(token)
    if not blocks and (unread or not moves):
        return Plan()
    return Plan(moves=tuple(moves), unread=tuple(unread), is_answer=True)


MAX_STATES = 50_000
"""The most states to look at in the search for a solution."""


@dataclass(frozen=True, kw_only=True)
class SokobanVerifier(AnswerVerifier):
    """Moves that push every box onto a goal; the label is a level in XSB text that is not solved yet.

    Moves that a wall or a box blocks are skipped. An answer with words that name no move is wrong.
    """

    name: ClassVar[str] = "sokoban"
    reports_ungradable: ClassVar[bool] = True

    max_moves: int = setting(50, type=positive(int), help="how many moves of an answer are made")

    def matches(self, answer: str, label: str) -> bool:
        level, plan = _level(label), read_plan(answer)
        if level is None or plan.unread:
            return False
        return play(level, plan.moves[: self.max_moves]).level.is_solved

    def is_gradable(self, label: str) -> bool:
        """Return whether the label is a level that is not solved yet."""
        return _level(label) is not None

    def answer_of(self, label: str) -> str:
        """Return the moves of a shortest solution; the label itself if none is found."""
        level = _level(label)
        return ", ".join((level and solve(level, max_states=MAX_STATES)) or [label])


@lru_cache(maxsize=4096)
def _level(label: str) -> Level | None:
    """Return the level in a label, None if there is none or if it is solved. Cached for the other samples of the group."""
    try:
        level = read_level(label)
    except ValueError:
        return None
    return None if level.is_solved else level
