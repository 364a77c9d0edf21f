"""A seeded search for responses that are right for two labels of which no answer may be right for both.

Responses are put together from the catalogue's labels by templates, verbs and connectives, from computed forms of two
numbers, from several boxes and blocks, and from fragments at random.
"""

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import combinations

from helpers.answer_catalogue import CATALOGUE, DIMENSIONS, Label, are_apart, expected
from helpers.answer_frames import CHOICE_KINDS, DENIED, HEDGED, SAID
from helpers.answer_verdicts import time_limit
from helpers.tables import table

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

MAX_JUDGED = 3

VERBS = tuple(table("helpers/answer_adversary", "verbs"))
CONNECTIVES = tuple(table("helpers/answer_adversary", "connectives"))
PAIR_FRAMES = tuple(table("helpers/answer_adversary", "pair_frames"))
MANY_FRAMES = tuple(table("helpers/answer_adversary", "many_frames"))
LETTER_FRAMES = tuple(table("helpers/answer_adversary", "letter_frames"))
NUMBER_FORMS = tuple(table("helpers/answer_adversary", "number_forms"))
BLOCK_FRAMES = tuple(table("helpers/answer_adversary", "block_frames"))
WRAPPERS = tuple(table("helpers/answer_adversary", "wrappers"))
GLUE = tuple(table("helpers/answer_adversary", "glue"))


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A response, and the labels that it is judged against."""

    family: str
    response: str
    said: tuple[Label, ...]
    """The labels that it is made of."""
    labels: tuple[Label, ...]


@dataclass(frozen=True, kw_only=True)
class Break:
    """A response that a verifier takes for right for two labels of which no answer may be right for both."""

    family: str
    verifier: str
    response: str
    labels: tuple[str, ...]


@dataclass(kw_only=True)
class Search:
    """What a search has judged and found."""

    responses: int = 0
    judged: int = 0
    by_sympy: int = 0
    left_undecided: int = 0
    breaks: list[Break] = field(default_factory=list)

    def report(self, *, shortest: int = 20) -> str:
        """Return the counts by family and the shortest breaks."""
        families = Counter((found.family, found.verifier) for found in self.breaks)
        lines = [
            f"{len(self.breaks)} breaks by {self.responses} responses, {self.judged} verdicts: {self.by_sympy} by sympy, "
            f"{self.left_undecided} undecided",
            *(f"  {count:6} {family} ({verifier})" for (family, verifier), count in families.most_common()),
        ]
        by_length = sorted(self.breaks, key=lambda found: (len(found.response), found.response))
        for name in dict.fromkeys(found.family for found in by_length):
            lines.append(f"{name}:")
            some = [found for found in by_length if found.family == name][:shortest]
            lines += [
                f"    {found.response!r} is right for {' and '.join(map(repr, found.labels))} ({found.verifier})"
                for found in some
            ]
        return "\n".join(lines)


def search(*, seed: int, responses: int, max_by_sympy: int) -> Search:
    """Judge that many responses, each of them once; what the rules leave open goes to sympy where it could matter."""
    rng, seen, found = random.Random(seed), set[str](), Search()
    makers = list(FAMILIES)
    while found.responses < responses:
        family = rng.choice(makers)
        attack = FAMILIES[family](rng)
        if attack.response in seen:
            continue
        seen.add(attack.response)
        found.responses += 1
        _judge(attack, found, max_by_sympy=max_by_sympy)
    return found


def _judge(attack: Attack, found: Search, *, max_by_sympy: int) -> None:
    labels = list({label.text: label for label in attack.labels}.values())
    for verifier in _VERIFIERS:
        judged = [label for label in labels if _is_for(verifier, label.text)]
        possible: list[tuple[Label, bool | None]] = []
        for place, label in enumerate(judged):
            if not possible and place == len(judged) - 1:
                break
            found.judged += 1
            verdict = _quickly(verifier, attack.response, label.text)
            if verdict is not False:
                possible.append((label, verdict))
        right = [label for label, verdict in possible if verdict]
        # What is undecided matters most beside what is right.
        for label in (label for label, verdict in possible if verdict is None):
            if not any(_must_differ(label, other, attack.said) for other, _ in possible if other is not label):
                continue
            if found.by_sympy >= (max_by_sympy if right else max_by_sympy // 4):
                found.left_undecided += 1
                continue
            found.by_sympy += 1
            if _slowly(verifier, attack.response, label.text):
                right.append(label)
        found.breaks += [
            Break(family=attack.family, verifier=verifier, response=attack.response, labels=(one.text, other.text))
            for one, other in combinations(right, 2)
            if _must_differ(one, other, attack.said) and not _is_one_option(attack.response, one, other)
        ]


def _must_differ(one: Label, other: Label, said: tuple[Label, ...]) -> bool:
    """Whether no answer of these parts may be right for both.

    `12` may be right for `12 cm` and for `12 kg`, so that these two count only where `12` is not said by itself.
    """
    if are_apart(one, other):
        return True
    if (
        not {one.kind, other.kind} <= DIMENSIONS
        or expected(one, other) is not False
        or expected(other, one) is not False
    ):
        return False
    return all(label.kind in DIMENSIONS for label in said) and {one.text, other.text} <= {label.text for label in said}


def _is_one_option(response: str, one: Label, other: Label) -> bool:
    """Whether it says one option with its text, `(B) no`: right for the letter and for the text, of which a row has one."""
    letter, text = (one, other) if one.kind == "choice" else (other, one)
    if letter.kind != "choice" or text.kind == "choice":
        return False
    same = [label for label in CATALOGUE if expected(label, text) or label.value in text.open]
    written = "|".join(re.escape(spelling) for label in same for spelling in label.spellings)
    option = rf"(?i:{re.escape(letter.text.strip('().'))}[)}}]*\s?[).:])\s*(?:{written})"
    return re.search(option, response) is not None


@lru_cache(maxsize=4096)
def _is_for(verifier: str, label: str) -> bool:
    if verifier == "math":
        return True
    if verifier == "list" and "," not in label:
        return False
    return _VERIFIERS[verifier].failed_score(Item(prompt="", response="", label=label)).parts["ungradable"] == 0.0


def _quickly(verifier: str, response: str, label: str) -> bool | None:
    score = _VERIFIERS[verifier].quick_score(Item(prompt="", response=response, label=label))
    return None if score is None else score.parts["accuracy"] == 1.0


def _slowly(verifier: str, response: str, label: str) -> bool:
    try:
        with time_limit():
            return _VERIFIERS[verifier].score(Item(prompt="", response=response, label=label)).parts["accuracy"] == 1.0
    except TimeoutError:
        return False


_VERIFIERS = {name: get_verifier(name) for name in ("math", "choice", "number", "list")}


_BY_KIND: dict[str, list[Label]] = {}
for _entry in CATALOGUE:
    _BY_KIND.setdefault("choice" if _entry.kind in CHOICE_KINDS else _entry.kind, []).append(_entry)
_KINDS = list(_BY_KIND)
_LETTERS = [label for label in CATALOGUE if label.kind == "choice"]


def _some(rng: random.Random, count: int) -> list[Label]:
    """Different labels, mostly of one kind."""
    if rng.random() < 0.6:
        pool = _BY_KIND[rng.choice(_KINDS)]
        if len(pool) >= count:
            return rng.sample(pool, count)
    return [rng.choice(_BY_KIND[rng.choice(_KINDS)]) for _ in range(count)]


def _written(rng: random.Random, label: Label) -> str:
    return label.text if rng.random() < 0.7 else rng.choice(label.spellings)


def _wrapped(rng: random.Random, text: str) -> str:
    return rng.choice(WRAPPERS).format(text)


def _filled(rng: random.Random, frame: str, labels: list[Label]) -> str:
    slots = {name: _written(rng, label) for name, label in zip("abcd", labels, strict=False)}
    return frame.format(verb=rng.choice(VERBS), verb2=rng.choice(VERBS), **slots, **{"and": rng.choice(CONNECTIVES)})


def _attack(rng: random.Random, family: str, response: str, said: list[Label], more: list[Label]) -> Attack:
    """An attack that is judged against up to three of the labels it says, and those besides."""
    judged = said if len(said) <= MAX_JUDGED else rng.sample(said, MAX_JUDGED)
    return Attack(family=family, response=response, said=tuple(said), labels=(*judged, *more))


def _pair(rng: random.Random) -> Attack:
    said = _some(rng, 2)
    text = _filled(rng, rng.choice(PAIR_FRAMES), said)
    return _attack(rng, "pair", _wrapped(rng, text), said, _some(rng, 1))


def _many(rng: random.Random) -> Attack:
    said = _some(rng, 4)
    text = _filled(rng, rng.choice(MANY_FRAMES), said)
    return _attack(rng, "many", _wrapped(rng, text), said, [])


def _letters(rng: random.Random) -> Attack:
    letters, texts = rng.sample(_LETTERS, 3), _some(rng, 2)
    slots = {name: label.text for name, label in zip("pqrab", [*letters, *texts], strict=True)}
    text = rng.choice(LETTER_FRAMES).format(**slots)
    return _attack(rng, "letters", _wrapped(rng, text), [*letters, *texts], [])


def _blocks(rng: random.Random) -> Attack:
    said = _some(rng, 4)
    return _attack(rng, "blocks", _filled(rng, rng.choice(BLOCK_FRAMES), said), said, [])


def _numbers(rng: random.Random) -> Attack:
    m, n = rng.sample(_NATURAL, 2)
    text = rng.choice(NUMBER_FORMS).format(m=m, n=n, nn=f"{n % 60:02}")
    made = [*_made_of(m, n), *_made_of(n, m), *_some(rng, 1)]
    return _attack(rng, "numbers", _wrapped(rng, text), [], rng.sample(made, 5))


def _sentences(rng: random.Random) -> Attack:
    one, other = _some(rng, 2)
    frame = rng.choice(DENIED) if rng.random() < 0.3 else rng.choice(SAID)
    first, second = frame.format(_written(rng, one)), rng.choice(SAID).format(_written(rng, other))
    text = first + rng.choice(CONNECTIVES) + second
    return _attack(rng, "sentences", _wrapped(rng, text), [one, other], _some(rng, 1))


def _hedges(rng: random.Random) -> Attack:
    one, other, third = _some(rng, 3)
    hedge = rng.choice(HEDGED).format(_written(rng, one), _written(rng, other))
    text = f"{third.text} {rng.choice(VERBS)} {hedge}" if rng.random() < 0.4 else hedge
    return _attack(rng, "hedges", _wrapped(rng, text), [one, other, third], [])


def _soup(rng: random.Random) -> Attack:
    said = _some(rng, rng.choice((2, 2, 3, 3, 4)))
    parts: list[str] = []
    for label in said:
        parts += [rng.choice(GLUE) for _ in range(rng.randint(0, 2))] + [_written(rng, label)]
    parts += [rng.choice(GLUE) for _ in range(rng.randint(0, 2))]
    return _attack(rng, "soup", _wrapped(rng, "".join(parts)), said, [])


FAMILIES: dict[str, Callable[[random.Random], Attack]] = {
    "pair": _pair,
    "many": _many,
    "letters": _letters,
    "blocks": _blocks,
    "numbers": _numbers,
    "sentences": _sentences,
    "hedges": _hedges,
    "soup": _soup,
}
_NATURAL = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 20, 24, 30, 31, 45, 60, 100, 555, 1234, 1990, 2000, 2024)


@lru_cache(maxsize=4096)
def _made_of(m: int, n: int) -> tuple[Label, ...]:
    """Labels that two numbers may be put together to, by reading or by computing."""
    computed = {m, n, -m, -n, m - n, m + n, m * n, int(f"{m}{n}")} | ({m**n} if m**n < 10**9 else set())
    labels = [_plain(str(value), "number", str(value)) for value in sorted(computed)]
    # `9 100` is a number with its thousands apart, and a list of two.
    spaced = f"{m}{n}" if len(str(n)) == 3 and len(str(m)) <= 3 else ""
    labels += [
        _plain(f"{m}-{n}", "range or score", f"range {m} {n}"),
        _plain(f"({m}, {n})", "tuple", f"({m},{n})", f"{m},{n}", open=spaced),
        _plain(f"[{m}, {n}]", "interval", f"[{m},{n}]", f"{m},{n}", open=spaced),
        _plain(f"{m}.{n}", "number", str(Fraction(f"{m}.{n}"))),
        _plain(f"{m}-{n}-{n}", "date or telephone", f"date {m} {n}"),
    ]
    if n > 0 and m > 0:
        labels.append(_plain(f"{m}/{n}", "number", str(Fraction(m, n))))
        # Clock and ratio are written alike, and a ratio may be answered by its fraction.
        read = _readings(m, n)
        labels.append(Label(text=f"{m}:{n}", kind="ratio", value=f"ratio {Fraction(m, n)}", open=read))
    if m < 24 and n < 60:
        open_values = _readings(m, n) | {str(m), f"ratio {m}"}
        labels.append(Label(text=f"{m}:{n:02}", kind="clock", value=f"clock {m}:{n:02}", open=open_values))
    return tuple(labels)


def _readings(m: int, n: int) -> frozenset[str]:
    """What `m:n` may be besides a time of day."""
    fraction = [str(Fraction(m, n)), f"ratio {Fraction(m, n)}"] if n else []
    return frozenset([*fraction, f"clock {m}:{n:02}"])


def _plain(text: str, kind: str, value: str, shorter: str = "", *, open: str = "") -> Label:
    return Label(
        text=text,
        kind=kind,
        value=value,
        shorter=frozenset([shorter] if shorter else []),
        open=frozenset([open] if open else []),
    )
