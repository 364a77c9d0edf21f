"""Moves as policies write them: words, letters, arrows or Chinese, in an answer block, in whatever punctuation."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from lmm_r1.tasks.sokoban.state import Move

_WORDS: dict[str, Move] = {
    **{"left": "L", "up": "U", "right": "R", "down": "D"},
    **{"左": "L", "上": "U", "右": "R", "下": "D"},
    **{"←": "L", "↑": "U", "→": "R", "↓": "D"},
    **{"⬅": "L", "⬆": "U", "➡": "R", "⬇": "D"},
}
_LETTERS: dict[str, Move] = {"l": "L", "u": "U", "r": "R", "d": "D"}
# What stands between moves and says nothing of its own.
_FILLERS = frozenset(
    "move moves go step steps push then and next finally first the box player it to 向 往 推 移 动 走 然 后 再 先 步".split()
)
_STOPS = frozenset(("stop", "stuck", "give up"))
_BLOCK = re.compile(r"<answer>(.*?)(?=</answer>|<answer>|\Z)", re.DOTALL | re.IGNORECASE)
# A number with a sign behind it counts the moves; others are not read.
_TOKENS = re.compile(r"\d+\s?[.):、]|[a-z]+|\d+|[^\W\d_]|[←↑→↓⬅⬆➡⬇]", re.IGNORECASE)
_RUN = re.compile(r"[lurd]+")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a text asks for."""

    moves: tuple[Move, ...]
    unread: tuple[str, ...]
    """Words and numbers between the moves that name none."""
    is_answer: bool
    """Whether there was an answer block, or nothing but moves."""
    stops: bool = False
    """Whether the answer is that there are no more moves: `stop`, `stuck` or `give up`."""


def read_plan(text: str) -> Plan:
    """Return the moves of the last answer block; one that is not closed runs to the end. Never raises.

    `<answer>1. Right, 2. down → ul 左</answer>` → R, D, R, U, L, L. Text without a block counts where it is moves only.
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
