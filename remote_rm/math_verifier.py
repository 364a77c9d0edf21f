"""Judges mathematical answers by accuracy and format.

python -m remote_rm.math_verifier --host 127.0.0.1 --port 5000 --workers 4
"""

import argparse
from dataclasses import dataclass

from remote_rm import accuracy
from remote_rm.extraction import final_answer
from remote_rm.format_check import format_score
from remote_rm.verifier import Item, Score


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How much each part of a score counts."""

    accuracy: float = 1.0
    format: float = 0.5


DEFAULT_WEIGHTS = Weights()


def score(response: str, label: str, *, weights: Weights = DEFAULT_WEIGHTS) -> Score:
    """Return the score of a response: accuracy and format, each 0.0 or 1.0, and their weighted sum.

    Raises ValueError for an empty label. An answer may keep sympy busy without end: `VerifierPool` bounds the time.
    """
    answer = final_answer(response)
    is_right = answer is not None and accuracy.matches(answer, label)
    return _weighted(response, is_right=is_right, weights=weights)


def quick_score(response: str, label: str, *, weights: Weights = DEFAULT_WEIGHTS) -> Score | None:
    """Return the same as `score` where it can be told without sympy, else None."""
    answer = final_answer(response)
    is_right = False if answer is None else accuracy.quick_match(answer, label)
    return None if is_right is None else _weighted(response, is_right=is_right, weights=weights)


def _weighted(response: str, *, is_right: bool, weights: Weights) -> Score:
    parts = {"accuracy": float(is_right), "format": format_score(response)}
    reward = weights.accuracy * parts["accuracy"] + weights.format * parts["format"]
    return Score(reward=reward, score=parts["accuracy"], parts=parts)


@dataclass(frozen=True, kw_only=True)
class MathVerifier:
    """The verifier that the service runs by default."""

    weights: Weights = DEFAULT_WEIGHTS
    name: str = "math"

    def check_label(self, label: str) -> None:
        """Raise a ValueError for an empty label."""
        accuracy.check_label(label)

    def quick_score(self, item: Item) -> Score | None:
        """The score where it can be told without sympy."""
        return quick_score(item.response, item.label, weights=self.weights)

    def score(self, item: Item) -> Score:
        """The score, by sympy where need be."""
        return score(item.response, item.label, weights=self.weights)

    def failed_score(self, item: Item) -> Score:
        """A wrong answer; the format counts as it is."""
        return _weighted(item.response, is_right=False, weights=self.weights)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    # The HTTP stack is imported after parsing, so that --help and a bad flag answer at once.
    from remote_rm.serving_arguments import add_serving_arguments

    parser = argparse.ArgumentParser(
        prog="python -m remote_rm.math_verifier",
        description="Serve rewards for mathematical answers over HTTP, in OpenRLHF's remote reward protocol.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--accuracy-weight", type=float, default=DEFAULT_WEIGHTS.accuracy, help="reward for being right"
    )
    parser.add_argument("--format-weight", type=float, default=DEFAULT_WEIGHTS.format, help="reward for the format")
    add_serving_arguments(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and serve until SIGINT or SIGTERM."""
    args = build_parser().parse_args(argv)
    from remote_rm.server import ServingOptions, serve

    weights = Weights(accuracy=args.accuracy_weight, format=args.format_weight)
    serve(MathVerifier(weights=weights), options=ServingOptions.from_arguments(args))


if __name__ == "__main__":
    main()
