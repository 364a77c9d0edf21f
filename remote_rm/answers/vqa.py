"""The VQA accuracy: how many people gave the answer, after both sides are spelled alike.

Antol et al. 2015, arXiv 1505.00468, with the spelling rules of its evaluation script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

PEOPLE = 10
"""So many answers have the questions of VQA; the mean over every nine of them is taken."""
ENOUGH_PEOPLE = 3
"""An answer that so many people gave is fully right."""

_ARTICLES = frozenset(("a", "an", "the"))
_NUMBERS = {
    "none": "0",
    "zero": "0",
    "one": "1",
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_DIGIT_GROUPS = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_CONTRACTED = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
    how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
    oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd somebody'd've somebody'll somebody's
    someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
    there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
    where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
    y'all y'all'll y'all'd've you'd you'd've you'll you're you've
""".split()
_APOSTROPHE_LEFT_OUT = {
    word[:place] + word[place + 1 :]: word
    for word in _CONTRACTED
    for place, character in enumerate(word)
    if character == "'"
}


def normalize_answer(text: str) -> str:
    """Return an answer as the evaluation of VQA spells it: `Two dogs, isnt it?` → `2 dogs isn't it`.

    Lower case, no punctuation, no articles, digits for the words up to ten, contractions with their apostrophe. An answer
    of articles alone (the letter `A`) keeps them, which the script would make the same as no answer.
    """
    words = _without_punctuation(text.replace("\n", " ").replace("\t", " ").strip()).lower().split()
    words = [_NUMBERS.get(word, word) for word in words]
    kept = [word for word in words if word not in _ARTICLES] or words
    return " ".join(_APOSTROPHE_LEFT_OUT.get(word, word) for word in kept)


def vqa_accuracy(answer: str, golds: Sequence[str]) -> float:
    """Return min(1, people / 3) of the people who gave the answer, each side normalised.

    Of ten answers, the mean over every nine of them: 0.3, 0.6, 0.9 and 1.0 for one to four people. Where fewer than three
    people answered, all of them are enough.
    """
    people = sum(gold == answer for gold in golds) if answer else 0
    if len(golds) != PEOPLE:
        return min(1.0, people / min(ENOUGH_PEOPLE, len(golds))) if golds else 0.0
    others = [people - (gold == answer) for gold in golds]
    return fmean(min(1.0, other / ENOUGH_PEOPLE) for other in others) if people else 0.0


def _without_punctuation(text: str) -> str:
    """A mark that stands beside a space anywhere is left out everywhere, and so is each in a text with `1,000`; others
    become spaces. A period stays in front of a digit only.
    """
    has_digit_groups = _DIGIT_GROUPS.search(text) is not None
    spaced = text
    for mark in _PUNCTUATION:
        is_left_out = has_digit_groups or f"{mark} " in text or f" {mark}" in text
        spaced = spaced.replace(mark, "" if is_left_out else " ")
    return _PERIOD.sub("", spaced)


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance.

    Bit-parallel (Myers 1999, in the form of Hyyrö 2003): one step for each character of the shorter text, on integers with
    a bit for each character of the longer one. Texts of 1,000 characters take about a millisecond.
    """
    if len(one) < len(other):
        one, other = other, one
    if not other:
        return len(one)
    places: dict[str, int] = {}
    for place, character in enumerate(one):
        places[character] = places.get(character, 0) | 1 << place
    every, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    # Down a column of the table of distances a cell is one more (rises), one less (falls) or the same.
    rises, falls, distance = every, 0, len(one)
    for character in other:
        equal = places.get(character, 0)
        steps = (((equal & rises) + rises) ^ rises) | equal
        # The same along the row, from the last column to this one.
        more, less = falls | (every & ~(steps | rises)), rises & steps
        distance += bool(more & last) - bool(less & last)
        more, less = (more << 1 | 1) & every, (less << 1) & every
        equal |= falls
        rises, falls = less | (every & ~(equal | more)), more & equal
    return distance


def similarity(one: str, other: str) -> float:
    """Return 1 - distance / length of the longer text, from 0.0 to 1.0; 1.0 for two empty ones."""
    longest = max(len(one), len(other))
    return 1.0 - edit_distance(one, other) / longest if longest else 1.0
