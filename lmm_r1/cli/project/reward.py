"""The reward of rl.yaml. It gets all responses to one prompt at a time; rows may have further columns, given by their names."""

import re

FORM = re.compile(r"\s*<think>.*</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)


def reward(
    queries: list[str], prompts: list[str], labels: list[str], responses: list[str]
) -> dict[str, list[float] | dict[str, list[float]]]:
    """1 for a right answer, and 0.1 for a response in the form that the rows have."""
    found = [FORM.fullmatch(response) for response in responses]
    form = [float(match is not None) for match in found]
    right = [float(match is not None and plain(match["answer"]) == plain(label)) for match, label in zip(found, labels)]
    return {
        "rewards": [a + 0.1 * b for a, b in zip(right, form)],
        # What counts as right, for pass@k; and what the report shows beside it.
        "scores": right,
        "extra_logs": {"form": form},
    }


def plain(answer: str) -> str:
    """`"[2, 3]"` and `" 2,3"` are the same answer."""
    return re.sub(r"[\s\[\]]", "", answer)
