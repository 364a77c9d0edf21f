"""Does a response keep to the format that the model is taught: one think block, then one answer block."""

import re

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_LAYOUT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def format_score(response: str) -> float:
    """Return 1.0 for exactly one think block followed by exactly one answer block, else 0.0.

    White space may stand between the two blocks and around them, and nothing else.
    """
    if any(response.count(tag) != 1 for tag in _TAGS):
        return 0.0
    return 1.0 if _LAYOUT.fullmatch(response) else 0.0
