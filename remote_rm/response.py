"""Finds the response inside a query: the last assistant turn, by the markers of the chat template."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChatMarkers:
    """How one family of chat templates opens and closes an assistant turn."""

    opening: str
    closing: str


CHAT_MARKERS = {
    "chatml": ChatMarkers(opening="<|im_start|>assistant", closing="<|im_end|>"),
    "phi": ChatMarkers(opening="<|assistant|>", closing="<|end|>"),
    "gemma": ChatMarkers(opening="<start_of_turn>model", closing="<end_of_turn>"),
    "llama3": ChatMarkers(opening="<|start_header_id|>assistant<|end_header_id|>", closing="<|eot_id|>"),
}

# End-of-text and padding tokens; a turn's own closing marker is cut before these are looked for.
TRAILING_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|dummy_85|>",
    "<eos>",
    "<pad>",
    "<unk>",
    "</s>",
    "<s>",
    "[PAD]",
)


def find_response(query: str, *, prompt: str = "") -> str:
    """Return the text of the last assistant turn, without markers, end tokens and padding.

    A query without any known marker is plain text: `prompt` is cut off its front, or the whole query is the response.
    """
    turns = [(query.rfind(markers.opening), markers) for markers in CHAT_MARKERS.values()]
    start, markers = max(turns, key=lambda turn: turn[0])
    if start < 0:
        return strip_end_tokens(query.removeprefix(prompt))
    turn = query[start + len(markers.opening) :]
    return strip_end_tokens(turn.split(markers.closing, 1)[0])


def strip_end_tokens(text: str) -> str:
    """Return the text without white space around it and without end tokens and padding after it."""
    text = text.strip()
    while (shorter := _without_one_token(text)) != text:
        text = shorter
    return text


def _without_one_token(text: str) -> str:
    for token in TRAILING_TOKENS:
        if text.endswith(token):
            return text[: -len(token)].rstrip()
    return text
