"""Judges mathematical answers by accuracy and format.

python -m remote_rm.math_verifier --host 127.0.0.1 --port 5000 --workers 4
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from remote_rm import registry
from remote_rm.answer_verifier import DEFAULT_WEIGHTS, AnswerVerifier, Weights
from remote_rm.answers import accuracy
from remote_rm.answers.accuracy import is_gradable
from remote_rm.reward_function import reward_func_of
from remote_rm.verifier import Item, Score

PROG = "python -m remote_rm.math_verifier"


@dataclass(frozen=True, kw_only=True)
class MathVerifier(AnswerVerifier):
    """Numbers, expressions, sets, intervals, units, choices and words: the label determines how an answer is read."""

    name: ClassVar[str] = "math"
    reports_ungradable: ClassVar[bool] = True

    def matches(self, answer: str, label: str) -> bool:
        """Return whether they are equal, by sympy if necessary: `VerifierPool` bounds the time."""
        return accuracy.matches(answer, label)

    def quick_match(self, answer: str, label: str) -> bool | None:
        """Return whether they are equal if simple rules can decide, else None."""
        return accuracy.quick_match(answer, label)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label can be read, as mathematics or as plain words."""
        return is_gradable(label)


def score(response: str, label: str, *, weights: Weights = DEFAULT_WEIGHTS) -> Score:
    """Return the score of a response: its parts, each 0.0 or 1.0, and the weighted sum of accuracy and format.

    Raises ValueError for an empty label. An answer may keep sympy busy without end: `VerifierPool` bounds the time.
    """
    return MathVerifier(weights=weights).score(Item(prompt="", response=response, label=label))


def quick_score(response: str, label: str, *, weights: Weights = DEFAULT_WEIGHTS) -> Score | None:
    """Return the same as `score` if that is possible without sympy, else None."""
    return MathVerifier(weights=weights).quick_score(Item(prompt="", response=response, label=label))


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return registry.build_parser("math", prog=PROG)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and serve until SIGINT or SIGTERM."""
    registry.run("math", argv, prog=PROG)


VERIFIER = MathVerifier
reward_func = reward_func_of("math")

if __name__ == "__main__":
    main()
