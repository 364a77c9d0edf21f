"""Answers to mathematical questions in many notations, what they must score, and a search for those that score wrongly."""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from math import comb
from types import FrameType

from helpers.tables import table

from remote_rm.answers.accuracy import matches, quick_match
from remote_rm.registry import get_verifier
from remote_rm.verifier import Item


@dataclass(frozen=True, kw_only=True, repr=False)
class Label:
    """One gold answer and what is right for it."""

    text: str
    kind: str
    value: str
    """What it means: two labels of one value are right for each other."""
    same: tuple[str, ...] = ()
    """Other spellings of the whole value, each right for this label."""
    shorter: frozenset[str] = frozenset()
    """Values that say less and are right for it, as it is right for them: `12` for `12 cm`, and `12 cm` for `12`."""
    accepts: frozenset[str] = frozenset()
    """Values that are right for it, as it is not for them: `101` for `101_2`, whose question names the base."""
    open: frozenset[str] = frozenset()
    """Values that a fair teacher may mark either way beside it: nothing is asked of such a pair."""

    def __repr__(self) -> str:
        return f"<{self.kind} {self.text}>"

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling of the whole value, the label itself first."""
        return (self.text, *self.same)

    @property
    def bare(self) -> tuple[str, ...]:
        """The spellings that are no sentence of their own, so that a sentence may be written around them."""
        return (self.text, *(text for text in self.same if not _SENTENCE.search(text)))


_SENTENCE = re.compile(r"^in |\b(?:is|be|choose)\b|[选是].|[.。]$")
DIMENSIONS = frozenset({"money", "quantity", "percentage"})
COLLECTIONS_IN_BRACKETS = frozenset({"interval", "set", "tuple"})


def expected(answer: Label, label: Label) -> bool | None:
    """Return whether one label's text is right for the other label; None where that is left open.

    Two that say more than a third do not answer one another where they are of one kind, or say what it is: `12 cm`
    and `12 kg`, `(B) 12` and `B. 13`. It is left open where they say more in different ways: `12 cm` and `(B) 12`.
    """
    if answer.value == label.value:
        return True
    if answer.value in label.shorter | label.accepts or label.value in answer.shorter:
        return True
    if answer.value in label.open or label.value in answer.open:
        return None
    kinds = {answer.kind, label.kind}
    clash = len(kinds) == 1 or kinds <= DIMENSIONS or kinds <= COLLECTIONS_IN_BRACKETS or label.value in answer.accepts
    return False if clash or are_apart(answer, label) else None


def share_an_answer(one: Label, other: Label) -> bool:
    """Return whether some answer that says less may be right for both: `12` for `12 cm` and `12 kg`."""
    return bool(_all_values(one) & _all_values(other))


def are_apart(one: Label, other: Label) -> bool:
    """Return whether no answer at all may be right for both."""
    return not share_an_answer(one, other)


def _all_values(label: Label) -> frozenset[str]:
    return label.shorter | label.accepts | label.open | {label.value}


def _label(kind: str, text: str, value: str, *columns: str) -> Label:
    """A label of a row of the table: spellings, and the values of `shorter`, `accepts` and `open`."""
    same, *values = ([*columns, "", "", "", ""])[:4]
    shorter, accepts, open_values = (frozenset(column.split(" | ")) - {""} for column in values)
    spellings = tuple(same.split(" | ")) if same else ()
    return Label(text=text, kind=kind, value=value, same=spellings, shorter=shorter, accepts=accepts, open=open_values)


CATALOGUE: tuple[Label, ...] = tuple(_label(*row) for row in table("helpers/answer_catalogue", "labels"))
KINDS: tuple[str, ...] = tuple(dict.fromkeys(label.kind for label in CATALOGUE))


NUMERIC_KINDS = frozenset({"number", "percentage", "money", "quantity"})
FORMULA_KINDS = NUMERIC_KINDS | {
    "interval",
    "set",
    "tuple",
    "list",
    "matrix",
    "expression",
    "equation",
    "based",
    "residue",
}
CHOICE_KINDS = frozenset({"choice", "lettered"})

SAID = tuple(table("helpers/answer_frames", "said"))
"""Ways to give an answer, right for whatever it is right for; each is also tried within the blocks of `BLOCKS`."""
FORMULA_SAID = tuple(table("helpers/answer_frames", "formula_said"))
WORD_SAID = (r"\text{{{}}}", '"{}"')
BLOCKS = tuple(table("helpers/answer_frames", "blocks"))
"""Whole responses around a bare answer."""

DENIED = tuple(table("helpers/answer_frames", "denied"))
"""What denies an answer, doubts it or asks for it: never right for it."""
FORMULA_DENIED = tuple(table("helpers/answer_frames", "formula_denied"))
_NO_FORMULA = re.compile(r"\$|(?<![\\A-Za-z{])[A-Za-z]{3,}|[^\x00-\x7f]")
BOUNDED = tuple(table("helpers/answer_frames", "bounded"))
"""What only bounds a number."""

HEDGED = tuple(table("helpers/answer_frames", "hedged"))
"""What gives two different answers and settles on none: right for neither."""
SECOND = tuple(table("helpers/answer_frames", "second"))
"""What gives a second, different answer: right for at most one of the two."""
LEFT_OPEN = tuple(table("helpers/answer_frames", "left_open"))
"""What gives one answer and keeps the rest open: not right for it."""

CHANGED = tuple(table("helpers/answer_frames", "changed"))
"""What makes another number of a natural number above one."""
CHANGED_NUMBERS = ("5", "6", "7", "12", "3", "16")


def said(label: Label) -> list[str]:
    """Return the sentences that give the label's answer, in each of its spellings."""
    sentences = [frame.format(text) for text in label.bare for frame in SAID]
    if label.kind in FORMULA_KINDS:
        formulas = [text for text in label.bare if not _NO_FORMULA.search(text)]
        return sentences + [frame.format(text) for text in formulas for frame in FORMULA_SAID]
    return sentences + [frame.format(text) for text in label.bare if text.isalpha() for frame in WORD_SAID]


def denials(label: Label) -> tuple[str, ...]:
    """Return the sentences that deny or bound an answer of this label's kind."""
    more = BOUNDED + FORMULA_DENIED if label.kind in NUMERIC_KINDS else ()
    # "No, no." and "No? No." say no.
    frames = [
        frame for frame in DENIED if label.text not in ("No", "False", "否") or not frame.lower().endswith(" no.")
    ]
    return (*frames, *more)


def rivals(label: Label, *, of: Iterable[Label] = CATALOGUE) -> list[Label]:
    """Return the labels of the same kind that no answer may share with this one, in an order of this label's own.

    Zero and one have none: `5/1` is 5, and `0/5` is 0.
    """
    kinds = CHOICE_KINDS if label.kind in CHOICE_KINDS else {label.kind}
    found = [other for other in of if other.kind in kinds and are_apart(label, other) and other.value not in "01"]
    random.Random(label.text).shuffle(found)
    return found if label.value not in "01" else []


MAX_SECONDS = 1.0
"""The default time limit of the service for one item; what takes longer counts as wrong."""

Pair = tuple[str, str]
"""An answer and a label."""


def is_right(answer: str, label: str) -> bool:
    """Return whether the answer is right for the label."""
    verdict = quick_match(answer, label)
    return _by_sympy(answer, label) if verdict is None else verdict


def right_ones(pairs: Iterable[Pair], *, by_sympy: int) -> list[Pair]:
    """Return the pairs that are right; of those that the rules leave open, `by_sympy` at random are judged."""
    verdicts = {pair: quick_match(*pair) for pair in pairs}
    left_open = [pair for pair, verdict in verdicts.items() if verdict is None]
    some = left_open if len(left_open) <= by_sympy else random.Random(len(verdicts)).sample(left_open, by_sympy)
    return [pair for pair, verdict in verdicts.items() if verdict] + [pair for pair in some if _by_sympy(*pair)]


def expect_none(wrong: Iterable[Pair]) -> None:
    """Fail with the number of answers that were judged wrongly, by their wording, each with its shortest example."""
    found = sorted(set(wrong), key=lambda pair: (len(pair[0]), pair))
    wordings: dict[str, list[Pair]] = {}
    for answer, label in found:
        wordings.setdefault(answer.replace(label, "…"), []).append((answer, label))
    most = sorted(wordings.values(), key=len, reverse=True)[:30]
    lines = [f"  {len(some):5}  {some[0][0]!r} for the label {some[0][1]!r}" for some in most]
    assert not found, "\n".join([f"{len(found)} answers of {len(wordings)} wordings", *lines])


@contextmanager
def time_limit(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Raise a TimeoutError within the block when the time is over, as the service kills a worker."""

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _by_sympy(answer: str, label: str) -> bool:
    try:
        with time_limit():
            return matches(answer, label)
    except TimeoutError:
        return False


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
RELATIONS = tuple(table("helpers/answer_adversary", "relations"))


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
    # `(B) no`, and `B (3, 4)`, whose text has its own bracket.
    option = rf"(?i:{re.escape(letter.text.strip('().'))}[)}}]*\s?(?:[).:\]]|(?=\()))[\s`*$(\[]*(?:{written})"
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


def _chain(rng: random.Random) -> Attack:
    """Up to 200 values in a row, with one relation between them or any; half of the chains are in order."""
    said = _some(rng, rng.choice((2, 2, 3, 4, 8)))
    if rng.random() < 0.5:
        values = rng.sample(_FRACTIONS, rng.choice((2, 3, 5, 20, 200)))
        said = [
            _plain(f"{value}", "number", f"{value}") for value in (values if rng.random() < 0.5 else sorted(values))
        ]
    signs = [rng.choice(RELATIONS)] if rng.random() < 0.8 else RELATIONS
    text = _written(rng, said[0]) + "".join(rng.choice(signs) + _written(rng, label) for label in said[1:])
    return _attack(rng, "chain", _wrapped(rng, text), said, [said[0], said[-1]])


FAMILIES: dict[str, Callable[[random.Random], Attack]] = {
    "pair": _pair,
    "many": _many,
    "letters": _letters,
    "blocks": _blocks,
    "numbers": _numbers,
    "sentences": _sentences,
    "hedges": _hedges,
    "soup": _soup,
    "chain": _chain,
}
_FRACTIONS = sorted({Fraction(top, bottom) for bottom in range(2, 31) for top in range(1, bottom)})
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
        # `C(5, 2)` is a point, and 10.
        _plain(f"({m}, {n})", "tuple", f"({m},{n})", f"{m},{n}", open=str(comb(m, n)), also_open=spaced),
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


def _plain(text: str, kind: str, value: str, shorter: str = "", *, open: str = "", also_open: str = "") -> Label:
    less, undecided = frozenset({shorter} - {""}), frozenset({open, also_open} - {""})
    return Label(text=text, kind=kind, value=value, shorter=less, open=undecided)
