r"""Finds the response in a query, and the final answer in a response.

The response is the last assistant turn, by the markers of the chat template. Its answer is the answer block, else the last
\boxed{}, else the last stated value. Thinking is cut off first. A block that was never closed runs to the end; if the
thinking was not closed either, the last answer block ends it. The format is one think block, then one answer block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remote_rm.answers.lexer import Match, Token, ends_of, introductions, span_content, tag_patterns
from remote_rm.answers.statement import (
    clause_of,
    in_one_line,
    is_plain,
    is_prose,
    measured,
    read,
    unit_in_prose,
    words_of,
)
from remote_rm.answers.wording import in_english, is_copied, without_sign_off, without_struck_out


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
    start = _start_of_turn(query, markers.opening, turn=_opened_by(prompt, markers))
    if start < 0:
        return strip_end_tokens(query)
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


def _opened_by(prompt: str, markers: ChatMarkers) -> int:
    """Which assistant turn, from 1, follows the prompt; 0 if the prompt shows none."""
    turns = prompt.count(markers.opening)
    is_closed = markers.closing in prompt[prompt.rfind(markers.opening) :]
    return turns + 1 if turns and is_closed else turns


def _start_of_turn(query: str, opening: str, *, turn: int) -> int:
    """Where the text of the given assistant turn (from 1) starts; of the last one if there are fewer, or turn is 0.

    A trainer may cut a long prompt from its front, and with it earlier turns.
    """
    starts = ends_of(opening, query)
    if not starts:
        return -1
    return starts[turn - 1] if 0 < turn <= len(starts) else starts[-1]


def end_of_prompt(query: str, *, prompt: str) -> int:
    """Where the prompt ends in the query; 0 if the query does not start with it.

    The text between the special tokens of the prompt is looked for piece by piece, since a trainer's query repeats
    an image token as often as the image has patches, and may start with padding.
    """
    if query.startswith(prompt):
        return len(prompt)
    position = 0
    for piece in Token.SPECIAL_TOKEN.split(prompt):
        found = query.find(piece, position)
        if found < 0 or not _is_special(query[position:found]):
            return 0
        position = found + len(piece)
    while (token := Token.SPECIAL_TOKEN.match(query, position)) and prompt.endswith(token[0]):
        position = token.end()
    return position


def _is_special(text: str) -> bool:
    return not Token.SPECIAL_TOKEN.sub("", text).strip()


MAX_TAIL_CHARS = 2000
"""How much of a response without an answer block and without a box is searched for a stated value, from its end."""
MAX_BOXES = 20
"""How many boxes are looked at, from the last one back, before the response counts as having none."""
MAX_BOX_CHARS = 2000
"""The length from which on a box counts as never closed."""

MAX_END_CHARS = 400
"""How much of that is looked through first for an introduction of the answer."""
MAX_CHARS_BEFORE = 120
"""How far in front of an introduction its own line is read."""
MAX_NAME_WORDS = 6
"""Up to how many words a last line without a verb and without a number counts as a name."""

USER_TURN = "<|im_start|>user"
THINK = "<think>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def final_answer(response: str) -> str | None:
    """Return the final answer as written, or None if the response states none."""
    # What follows a marker is a turn that the response writes for the user.
    conclusion = without_thinking(response).partition(USER_TURN)[0]
    block = _last_answer_block(conclusion)
    if block is not None:
        boxed = _boxed_with_unit(block)
        return block.strip() if boxed is None else boxed
    boxed = _boxed_with_unit(conclusion)
    if boxed is not None:
        return boxed
    return _last_stated_value(in_english(without_sign_off(without_struck_out(conclusion[-MAX_TAIL_CHARS:]).strip())))


def concluding_text(response: str) -> str | None:
    r"""Return the last answer block, or else all that stands outside the thinking; of either the last box, if it has one.

    For answers that may have many lines, such as a list of objects. None if that is no text.
    """
    conclusion = without_thinking(response)
    block = _last_answer_block(conclusion)
    text = conclusion if block is None else block
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip() or None


def without_thinking(response: str) -> str:
    """Return the text outside the think blocks; a block that was never opened or never closed is cut too.

    Of thinking that was never closed, the text from the last complete answer block on is kept.
    """
    outside, position = [], 0
    while (start := response.find("<think>", position)) >= 0:
        outside.append(response[position:start])
        end = response.find("</think>", start)
        if end < 0:
            block = response.rfind("<answer>", start)
            outside.append(response[block:] if 0 <= block < response.rfind("</answer>") else "")
            break
        position = end + len("</think>")
    else:
        outside.append(response[position:])
    return " ".join(outside).rpartition("</think>")[2]


def format_score(response: str, *, prompt: str = "") -> float:
    """Return 1.0 for exactly one think block followed by exactly one answer block, neither of them empty, else 0.0.

    Only white space is allowed between the two blocks and around them. A prompt whose chat template ends in
    `<think>` has opened the first block.
    """
    if prompt.rstrip().endswith(THINK):
        response = THINK + response
    if any(response.count(tag) != 1 for tag in TAGS):
        return 0.0
    return 1.0 if Token.LAYOUT.fullmatch(response) else 0.0


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, or None.

    `\boxed{\frac{1}{2}} or \boxed{3}` → `3`
    """
    place = _last_box(text)
    return None if place is None else text[slice(*place)].strip()


def _boxed_with_unit(text: str) -> str | None:
    r"""The last box with the unit after it: `\boxed{12} cm` → `12 cm`; boxes that are joined, as a list."""
    place = _last_box(text)
    if place is None:
        return None
    boxed = text[slice(*place)].strip()
    unit = unit_in_prose(text, place[1] + 1) if is_plain(boxed) else ""
    listed = [boxed]
    while len(listed) < MAX_BOXES:
        start = text.rfind("\\", 0, place[0])
        before = _last_box(text, end=start)
        between = None if before is None else Token.BETWEEN_BOXES.fullmatch(text, before[1] + 1, start)
        if before is None or between is None:
            break
        place, listed = before, [text[slice(*before)].strip(), *listed]
    if len(set(listed)) > 1:
        return ", ".join(listed)
    return f"{boxed} {unit}" if unit else boxed


def _last_box(text: str, *, end: int | None = None) -> tuple[int, int] | None:
    """Where the content of the last complete box before `end` starts and ends."""
    end = len(text) if end is None else end
    for _ in range(MAX_BOXES):
        end = max(text.rfind(r"\boxed", 0, end), text.rfind(r"\fbox", 0, end))
        opening = Token.BOX.match(text, max(end, 0))
        closing = None if opening is None else _closing_brace(text, start=opening.end())
        if opening is not None and closing is not None:
            return opening.end(), closing
        if end <= 0:
            break
    return None


def _last_answer_block(text: str) -> str | None:
    """The content of the last block that has any; a block that was never closed runs to the end."""
    start, end = text.rfind("<answer>"), text.rfind("</answer>")
    if start > end and not text[start + len("<answer>") :].strip() and end >= 0:
        start = text.rfind("<answer>", 0, end)
    return text[start + len("<answer>") :].partition("</answer>")[0] if start >= 0 else None


def _closing_brace(text: str, *, start: int) -> int | None:
    depth = 1
    for index in range(start, min(start + MAX_BOX_CHARS, len(text))):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index
    return None


def _last_stated_value(text: str) -> str | None:
    """What the end of a text without an answer block and without a box states."""
    # A response ends in its answer: its last lines are looked through first.
    for end in (text[-MAX_END_CHARS:], text) if len(text) > MAX_END_CHARS else (text,):
        if introductions(end):
            end = in_one_line(end)
            return _introduced(end, introductions(end))
    is_question = is_copied(text)
    text = in_one_line(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or is_question or len({line[:4] for line in lines[-2:] if Token.OPTION_LINE.fullmatch(line)}) > 1:
        return None
    last = lines[-1]
    if Token.IGNORANCE.search(last):
        return None
    if Token.OPTION_LINE.fullmatch(lines[0]) and not any(map(Token.OPTION_LINE.fullmatch, lines[1:])):
        return lines[0]
    # "42", "B", "yes", "x = 5" are values as they are; "so 42" and "12 apples" are not.
    if not is_prose(last) and not (words_of(last) and Token.DIGIT_OR_DOLLAR.search(last)):
        is_whole = (last.count("=") > 1 and Token.SEVERAL_VALUES.search(last)) or _is_equation(last)
        return (last if is_whole else last.rpartition("=")[2].strip()) or None
    return _of_line(last, text)


def _is_equation(line: str) -> bool:
    """Whether it says something of letters, and is not what a value is called: `2x + y = 0`, not `x = 5`."""
    left, _, right = line.strip(" $*.").partition("=")
    is_name = Token.VALUE_NAME.fullmatch(left.strip()) is not None
    return not is_name and "=" not in right and Token.LETTER_TERM.search(left) is not None


def _introduced(text: str, introduced: Sequence[Match]) -> str:
    """The text from the line of the last introduction on."""
    last = introduced[-1]
    if not text[last.end() :].strip(" *_:\n") and len(introduced) > 1:
        last = introduced[-2]
    start = text.rfind("\n", 0, last.start() + 1) + 1
    segment = text[max(start, last.start() - MAX_CHARS_BEFORE) :]
    clause = clause_of(segment)
    return segment if clause is None else clause.strip(" *\t").rstrip("。.").strip(" *\t")


def _of_line(line: str, text: str) -> str | None:
    """What the last line states: the value that is read from it, the line if it is words, else the last value of all."""
    if (
        Token.OPEN_END.search(line)
        or Token.DENIED.search(line)
        or Token.LEFT_OPEN.search(line)
        or Token.BOUND.search(line)
        or Token.OR.search(line)
    ):
        return line
    stated = read(line)
    if stated.value:
        return stated.value
    if Token.VERB.search(line):
        return line
    found = [(match.end(), span_content(match)) for match in Token.FORMULA.finditer(text)]
    found += [(match.end(), match.group()) for match in Token.NUMBER.finditer(text)]
    if not found:
        return line if len(line.split()) <= MAX_NAME_WORDS or ": " in line else None
    end, value = max(found)
    unit = unit_in_prose(text, end) if is_plain(value) else ""
    return f"{value} {unit}" if unit else measured(value, line) or line


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
    calls = _Calls(call_tags)
    return [calls.are_all_after_thinking(turn) for turn in opened[:-1]] + [
        format_score(turn) == 1.0 and not calls.are_named(turn) for turn in opened[-1:]
    ]


class _Calls:
    """Tool calls between some tags."""

    def __init__(self, tags: Sequence[str]) -> None:
        self._tag, self._call = tag_patterns(tags)

    def are_named(self, turn: str) -> bool:
        """Whether a tag is anywhere in it."""
        return self._tag.search(turn) is not None

    def are_all_after_thinking(self, turn: str) -> bool:
        """Whether it is one think block, then calls, and no answer."""
        if turn.count("<think>") != 1 or turn.count("</think>") != 1 or "<answer>" in turn or "</answer>" in turn:
            return False
        thought = Token.THOUGHT.match(turn)
        if thought is None:
            return False
        calls, end = 0, thought.end()
        while (call := self._call.match(turn, end)) is not None:
            calls, end = calls + 1, call.end()
        # A tag in the thinking, or one in another's call, would be read as a call by who runs them.
        return calls > 0 and not turn[end:].strip() and len(self._tag.findall(turn)) == 2 * calls
