r"""Finds the response in a query, and tells whether it keeps to the format: one think block, then one answer block.

The response is the last assistant turn, by the markers of the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_SPECIAL_TOKEN = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_]{1,30}\]")
_LAYOUT = re.compile(r"\s*<think>(?=.*\S.*</think>).*</think>\s*<answer>(?=.*\S.*</answer>).*</answer>\s*", re.DOTALL)
_THOUGHT = re.compile(r"\s*<think>.*</think>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ChatMarkers:
    """How one family of chat templates opens and closes an assistant turn."""

    opening: str
    closing: str


CHAT_MARKERS = {
    "chatml": ChatMarkers(opening="<|im_start|>assistant", closing="<|im_end|>"),
    "phi4": ChatMarkers(opening="<|im_start|>assistant<|im_sep|>", closing="<|im_end|>"),
    "phi": ChatMarkers(opening="<|assistant|>", closing="<|end|>"),
    "gemma": ChatMarkers(opening="<start_of_turn>model", closing="<end_of_turn>"),
    "llama2": ChatMarkers(opening="[/INST]", closing="</s>"),
    "llama3": ChatMarkers(opening="<|start_header_id|>assistant<|end_header_id|>", closing="<|eot_id|>"),
    "llama4": ChatMarkers(opening="<|header_start|>assistant<|header_end|>", closing="<|eot|>"),
}

# End-of-text and padding tokens; a turn's own closing marker is cut before these are looked for.
TRAILING_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|finetune_right_pad|>", "<|im_end|>", "<|end|>",
    "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<|dummy_85|>", "<eos>", "<pad>", "<unk>", "</s>", "<s>", "[PAD]",
)  # fmt: skip
_WHITE_SPACE = " \t\n\r\f\v"


def find_response(query: str, *, prompt: str = "") -> str:
    """Return the text of the last assistant turn, without markers, end tokens and padding.

    What the prompt opened is the turn, even if the response writes markers of its own. A query without any known
    marker is plain text: `prompt`, with any number of image tokens in it, is cut off its front, or it is all response.
    """
    markers = _markers_of(prompt) or _markers_of(query)
    if markers is None:
        return strip_end_tokens(query[end_of_prompt(query, prompt=prompt) :])
    # Which assistant turn, from 1, follows the prompt; 0 if the prompt shows none.
    turn = prompt.count(markers.opening)
    if turn and markers.closing in prompt[prompt.rfind(markers.opening) :]:
        turn += 1
    starts = [match.end() for match in re.finditer(re.escape(markers.opening), query)]
    if not starts:
        return strip_end_tokens(query)
    # A trainer may cut a long prompt from its front, and with it earlier turns: the last one is then meant.
    start = starts[turn - 1] if 0 < turn <= len(starts) else starts[-1]
    return strip_end_tokens(query[start:].split(markers.closing, 1)[0])


def strip_end_tokens(text: str) -> str:
    """Return the text without white space around it and without end tokens and padding after it."""
    end = len(text.rstrip())
    while (token := next((token for token in TRAILING_TOKENS if text.endswith(token, 0, end)), None)) is not None:
        end -= len(token)
        # Index by index: half a million padding tokens must not copy the text as often.
        while end > 0 and text[end - 1] in _WHITE_SPACE:
            end -= 1
    return text[:end].strip()


def _markers_of(text: str) -> ChatMarkers | None:
    """The family whose assistant marker ends last; of two that end alike, the longer one."""
    found = [(text.rfind(markers.opening), markers) for markers in CHAT_MARKERS.values()]
    ends = [(start + len(markers.opening), -start, markers) for start, markers in found if start >= 0]
    return max(ends, key=lambda end: end[:2])[2] if ends else None


def end_of_prompt(query: str, *, prompt: str) -> int:
    """Where the prompt ends in the query; 0 if the query does not start with it.

    The text between the special tokens of the prompt is looked for piece by piece, since a trainer's query repeats
    an image token as often as the image has patches, and may start with padding.
    """
    if query.startswith(prompt):
        return len(prompt)
    position = 0
    for piece in _SPECIAL_TOKEN.split(prompt):
        found = query.find(piece, position)
        if found < 0 or _SPECIAL_TOKEN.sub("", query[position:found]).strip():
            return 0
        position = found + len(piece)
    while (token := _SPECIAL_TOKEN.match(query, position)) and prompt.endswith(token[0]):
        position = token.end()
    return position


THINK = "<think>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_score(response: str, *, prompt: str = "") -> float:
    """Return 1.0 for exactly one think block followed by exactly one answer block, neither of them empty, else 0.0.

    Only white space is allowed between the two blocks and around them. A prompt whose chat template ends in
    `<think>` has opened the first block.
    """
    if prompt.rstrip().endswith(THINK):
        response = THINK + response
    if any(response.count(tag) != 1 for tag in TAGS):
        return 0.0
    return 1.0 if _LAYOUT.fullmatch(response) else 0.0


CALL_TAGS = ("grounding", "tool_call", "tool")
"""Of Mini-o3, of Qwen's chat templates, and of r1_vlm."""


def turns_kept(turns: Sequence[str], *, prompt: str = "", call_tags: Sequence[str] = CALL_TAGS) -> list[bool]:
    """Return of each turn whether it keeps to the format.

    All but the last are one think block and then one or more tool calls, `<tool_call>...</tool_call>`; the last is what
    `format_score` wants. Only white space is allowed around the blocks; no turn both calls and answers. Without
    call tags no turn calls, and each is what the last must be.

    Args:
        turns: what the policy said in each, with what the turn was begun with, and without end tokens.
        prompt: what the chat template opens each turn with, of which only a `<think>` at its end counts.
    """
    opened = [THINK + turn if prompt.rstrip().endswith(THINK) else turn for turn in turns]
    if not call_tags:
        return [format_score(turn) == 1.0 for turn in opened]
    names = "|".join(map(re.escape, call_tags))
    tag, call = re.compile(rf"</?(?:{names})>"), re.compile(rf"\s*<({names})>.*?</\1>", re.DOTALL)
    return [_only_calls(turn, tag=tag, call=call) for turn in opened[:-1]] + [
        format_score(turn) == 1.0 and not tag.search(turn) for turn in opened[-1:]
    ]


def _only_calls(turn: str, *, tag: re.Pattern[str], call: re.Pattern[str]) -> bool:
    """Whether a turn is one think block, then calls, and no answer."""
    if turn.count("<think>") != 1 or turn.count("</think>") != 1 or "<answer>" in turn or "</answer>" in turn:
        return False
    thought = _THOUGHT.match(turn)
    if thought is None:
        return False
    calls, end = 0, thought.end()
    while (found := call.match(turn, end)) is not None:
        calls, end = calls + 1, found.end()
    # A tag in the thinking, or one in another's call, would be read as a call by who runs them.
    return calls > 0 and not turn[end:].strip() and len(tag.findall(turn)) == 2 * calls
