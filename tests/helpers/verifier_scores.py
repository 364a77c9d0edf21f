"""Scores of single answers by a registered verifier."""

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item, Score


def scored(name: str, answer: str, label: str, **settings: object) -> Score:
    """Return the score of an answer in the format; the quick score has to be the same, or None."""
    return scored_response(name, f"<think>t</think><answer>{answer}</answer>", label, **settings)


def scored_response(name: str, response: str, label: str, **settings: object) -> Score:
    """Return the score of a whole response."""
    verifier, item = get_verifier(name, **settings), Item(prompt="p", response=response, label=label)
    score = verifier.score(item)
    assert verifier.quick_score(item) in (score, None)
    return score
