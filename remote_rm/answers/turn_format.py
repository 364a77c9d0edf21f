"""The format of a response of several turns: each thinks and calls a tool, and the last one thinks and answers."""

import re
from collections.abc import Sequence

from remote_rm.answers.extraction import THINK, format_score

CALL_TAGS = ("grounding", "tool_call", "tool")
"""Of Mini-o3, of Qwen's chat templates, and of r1_vlm."""

_THOUGHT = re.compile(r"\s*<think>.*</think>", re.DOTALL)


def turns_kept(turns: Sequence[str], *, prompt: str = "", call_tags: Sequence[str] = CALL_TAGS) -> list[bool]:
    """Return of each turn whether it keeps to the format.

    All but the last are one think block and then one or more tool calls, `<tool_call>...</tool_call>`; the last is what
    `format_score` wants. White space may stand around the blocks, and nothing else; no turn both calls and answers. Without
    call tags no turn calls, and each is what the last must be.

    Args:
        turns: what the policy said in each, with what the turn was begun with, and without end tokens.
        prompt: what the chat template opens each turn with, of which only a `<think>` at its end counts.
    """
    opened = [THINK + turn if prompt.rstrip().endswith(THINK) else turn for turn in turns]
    if not call_tags:
        return [format_score(turn) == 1.0 for turn in opened]
    calls = _Calls(call_tags)
    return [calls.are_all_after_thinking(turn) for turn in opened[:-1]] + [
        format_score(turn) == 1.0 and not calls.are_named(turn) for turn in opened[-1:]
    ]


def turn_format_score(turns: Sequence[str], *, prompt: str = "", call_tags: Sequence[str] = CALL_TAGS) -> float:
    """Return 1.0 where every turn keeps to the format, as `turns_kept` has it, else 0.0; 0.0 for no turns."""
    kept = turns_kept(turns, prompt=prompt, call_tags=call_tags)
    return float(bool(kept) and all(kept))


class _Calls:
    """Tool calls between some tags."""

    def __init__(self, tags: Sequence[str]) -> None:
        names = "|".join(map(re.escape, tags))
        self._tag = re.compile(rf"</?(?:{names})>")
        self._call = re.compile(rf"\s*<({names})>.*?</\1>", re.DOTALL)

    def are_named(self, turn: str) -> bool:
        """Whether a tag stands anywhere in it."""
        return self._tag.search(turn) is not None

    def are_all_after_thinking(self, turn: str) -> bool:
        """Whether it is one think block, then calls, and no answer."""
        if turn.count("<think>") != 1 or turn.count("</think>") != 1 or "<answer>" in turn or "</answer>" in turn:
            return False
        thought = _THOUGHT.match(turn)
        if thought is None:
            return False
        calls, end = 0, thought.end()
        while (call := self._call.match(turn, end)) is not None:
            calls, end = calls + 1, call.end()
        # A tag in the thinking, or one in another's call, would be read as a call by who runs them.
        return calls > 0 and not turn[end:].strip() and len(self._tag.findall(turn)) == 2 * calls
