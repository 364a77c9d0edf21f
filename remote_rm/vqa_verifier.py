"""Judges answers by how many of the people who were asked gave them: the VQA accuracy (Antol et al. 2015, arXiv 1505.00468).

python -m remote_rm vqa --accuracy-weight 0.5 --soft-weight 0.5
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import ClassVar

from remote_rm.answer_verifier import Grade, GradedVerifier, finite_number, setting
from remote_rm.answers.accuracy import listed_golds
from remote_rm.edit_distance_verifier import similarity

PEOPLE = 10
"""So many answers have the questions of VQA; the mean over every nine of them is taken."""
ENOUGH_PEOPLE = 3
"""An answer that so many people gave is fully right."""

_ARTICLES = frozenset(("a", "an", "the"))
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten".split()
_NUMBERS = {"none": "0", **{word: str(value) for value, word in enumerate(_NUMBER_WORDS)}}
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
    """A mark next to a space anywhere is left out everywhere, and so is each mark of a text with `1,000`; others
    become spaces. A period stays in front of a digit only.
    """
    has_digit_groups = _DIGIT_GROUPS.search(text) is not None
    spaced = text
    for mark in _PUNCTUATION:
        is_left_out = has_digit_groups or f"{mark} " in text or f" {mark}" in text
        spaced = spaced.replace(mark, "" if is_left_out else " ")
    return _PERIOD.sub("", spaced)


MAX_ANSWER_CHARS = 1000
"""A longer answer is wrong."""
MAX_LABEL_CHARS = 20_000
"""A longer label is ungradable."""
MAX_QUICK_CELLS = 1_000_000
"""Pairs of a character of the answer and one of the label, up to which they are compared without a worker."""
RIGHT_FROM = 0.5
"""The VQA accuracy from which on an answer counts as right: of ten people, two gave it."""


@dataclass(frozen=True, kw_only=True)
class VqaVerifier(GradedVerifier):
    """The share of people who gave the answer; the label is a JSON list of their answers, or a single one.

    The measure `vqa` is the VQA accuracy; `soft` is the mean of the three highest likenesses to an answer
    (1 - Levenshtein distance / length of the longer text), which counts by `soft_weight`.
    """

    name: ClassVar[str] = "vqa"
    measures: ClassVar[tuple[str, ...]] = ("vqa", "soft")

    soft_weight: float = setting(
        0.0,
        type=finite_number,
        help="reward for likeness: the mean of the three highest 1 - normalised edit distance to a person's answer",
    )

    @property
    def measure_weights(self) -> tuple[float, ...]:
        return (self.weights.accuracy, self.soft_weight)

    def grade(self, answer: str, label: str) -> Grade:
        answer = normalize_answer(answer) if len(answer) <= MAX_ANSWER_CHARS else ""
        golds = _golds(label)
        if not answer or not golds:
            return Grade(values=(0.0, 0.0), is_right=False)
        accuracy = vqa_accuracy(answer, golds)
        nearest = sorted((similarity(answer, gold) for gold in golds), reverse=True)[:ENOUGH_PEOPLE]
        return Grade(values=(accuracy, fmean(nearest)), is_right=accuracy >= RIGHT_FROM)

    def is_quick(self, answer: str, label: str) -> bool:
        return len(answer) > MAX_ANSWER_CHARS or len(answer) * len(label) <= MAX_QUICK_CELLS

    def is_gradable(self, label: str) -> bool:
        """Return whether somebody gave an answer; a label of more than MAX_LABEL_CHARS characters is not read."""
        return bool(_golds(label))

    def answer_of(self, label: str) -> str:
        golds = Counter(filter(None, _golds(label)))
        return golds.most_common(1)[0][0] if golds else label


@lru_cache(maxsize=4096)
def _golds(label: str) -> tuple[str, ...]:
    """The normalised answers that are not empty. Cached for the other samples of the group."""
    golds = tuple(map(normalize_answer, listed_golds(label))) if len(label) <= MAX_LABEL_CHARS else ()
    return golds if any(golds) else ()
