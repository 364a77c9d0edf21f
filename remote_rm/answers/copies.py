"""Finds out whether an answer only repeats an expression of the question, however it is written there."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from remote_rm.answers.lexer import Latex
from remote_rm.answers.notation import has_relation
from remote_rm.answers.quantity import parse_quantity
from remote_rm.answers.reading import normalize
from remote_rm.answers.statement import is_prose, read
from remote_rm.answers.units import split_unit
from remote_rm.answers.wording import plain

MAX_CHARS = 20_000
"""How much of a prompt is searched, from its end."""
MAX_ATOMS = 100


def is_copy(answer: str, *, of: str, label: str) -> bool:
    """Return whether the prompt has what the answer states, in any order and notation: `1 * \\sin(60°)` is `\\sin 60^\\circ`.

    Of a chain, it is the last side that counts, and the value before an approximation. A number is no copy, nor is an
    answer of the label's own parts, which the question may name.
    """
    if not of:
        return False
    answer = plain(answer)
    stated = normalize((read(answer).value or answer) if is_prose(answer) else answer)
    sides = [stated] if has_relation(label) else [side.split("=")[-1] for side in stated.split(r"\approx")]
    parts = [_atoms(split_unit(side.strip())[0]) for side in sides if parse_quantity(normalize(side)) is None]
    wanted = [sorted(_atoms(side)) for side in (label, label.split("=")[-1])]
    telling = [part for part in parts if 1 < len(part) <= MAX_ATOMS and sorted(part) not in wanted]
    return any(_is_within(part, _atoms(of[-MAX_CHARS:])) for part in telling)


@lru_cache(maxsize=1024)
def _atoms(text: str) -> tuple[str, ...]:
    """The numbers, letters and functions of a text in one spelling, without signs, brackets, ones and zeros."""
    plain_text = Latex.NEUTRAL.sub(" ", unicodedata.normalize("NFKC", text))
    atoms = (found.lstrip("\\").lower() for found in Latex.ATOM.findall(plain_text))
    return tuple(_SIGNS.get(atom, atom) for atom in atoms)


_SIGNS = {
    "√": "sqrt",
    "π": "pi",
    "∫": "int",
    "∑": "sum",
    "σ": "sum",
    "∏": "prod",
    "lvert": "|",
    "rvert": "|",
    "−": "-",
}


def _is_within(part: tuple[str, ...], text: tuple[str, ...]) -> bool:
    """Whether some neighbouring atoms of the text are those of the part."""
    wanted = sorted(part)
    return any(sorted(text[place : place + len(part)]) == wanted for place in range(len(text) - len(part) + 1))
