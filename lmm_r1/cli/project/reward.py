"""The reward of rl.yaml. It gets all responses to one prompt at a time; rows may have further columns, given by their names."""

import re

FORM = re.compile(r"\s*<think>.*</think>\s*<answer>(?P<answer>.*)</answer>\s*", re.DOTALL)


def reward(
    queries: list[str], prompts: list[str], labels: list[str], responses: list[str]
) -> dict[str, list[float] | dict[str, list[float]]]:
    """1 for a right answer, and 0.1 for the format `<think>...</think><answer>...</answer>`."""
    form, right = [], []
    for response, label in zip(responses, labels, strict=True):
        found = FORM.fullmatch(response)
        form.append(float(found is not None))
        right.append(float(found is not None and plain(found["answer"]) == plain(label)))
    return {
        "rewards": [a + 0.1 * b for a, b in zip(right, form, strict=True)],
        # Scores say what is right, for pass@k; the report also shows extra_logs.
        "scores": right,
        "extra_logs": {"form": form},
    }


def plain(answer: str) -> str:
    """`"[2, 3]"` and `" 2,3"` are the same answer."""
    return re.sub(r"[\s\[\]]", "", answer)
