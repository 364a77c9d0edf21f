"""Turns of a policy with calls that are malformed in every way, which environments are tested with."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence

from helpers.tables import table

TAGS = ("grounding", "tool_call", "tool")
_BOX = [0.1, 0.2, 0.6, 0.7]
_BOXES = [
    [0.5, 0.2, 0.1, 0.6], [0.1, 0.6, 0.5, 0.2], [0.2, 0.2, 0.2, 0.6], [0.2, 0.2, 0.2, 0.2], [-0.1, 0, 0.5, 0.5],
    [0, 0, 1.5, 1], [0, 0, 640, 480], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5], [[0, 0], [1, 1]], [0, 0, 1e-9, 1], [],
    "0.1, 0.2, 0.6, 0.7", {"x0": 0.1}, None, ["a", "b", "c", "d"], [True, False, True, None], [1e300, -1e300, 0, 5e-324],
]  # fmt: skip
_SOURCES = [
    "original_image", "observation_1", "observation_0", "observation_99", "original_image_7", "", "image", "../etc/passwd",
    "<|im_end|>", "<image>", 1, None, ["original_image"],
]  # fmt: skip
# As JSON, or nearly.
_VALUES = [
    "NaN", "Infinity", "-Infinity", "1e400", "-1e308", "9" * 300, "-0.5", "2", "-1", "0", '"0.5"', "null", "true", "[]",
    "{}", "0x10", "1.2.3", "'", '"', "0.5%", "[" * 200, '{"a":' * 100, "\\", "\u0000", '"\\ud800"', '"<|image_pad|>"',
]  # fmt: skip
_LINES = table("helpers/malformed_calls", "_lines")
_THOUGHTS = ["", "<think>Closer.</think>\n", "<grounding>", "Let me look </think> ", "\u202e\x00\ufffd"]


def malformed_turns(count: int, *, seed: int, tags: Sequence[str] = TAGS) -> Iterator[str]:
    """Yield texts of turns, a few of which hold a call that can be carried out."""
    draw = random.Random(seed)
    arguments: list[Callable[[random.Random], str]] = [_wrong_box, _wrong_box, _wrong_value, _wrong_keys]
    for _ in range(count):
        tag = draw.choice(tags)
        body = draw.choice(arguments)(draw)
        if tag != "grounding" and draw.random() < 0.9:
            body = _named(body, draw)
        if tag == "tool" and draw.random() < 0.3:
            body = "\n".join(draw.choice(_LINES) for _ in range(draw.randint(0, 5)))
        if draw.random() < 0.3:
            body = _damaged(body, draw)
        yield draw.choice(_THOUGHTS) + _tagged(body, tag, draw)


def _wrong_box(draw: random.Random) -> str:
    return _spelt(
        {"bbox_2d": draw.choice([_BOX, *_BOXES]), "source": draw.choice(_SOURCES[: draw.choice([1, 99])])}, draw
    )


def _wrong_value(draw: random.Random) -> str:
    numbers = [str(one) for one in _BOX]
    numbers[draw.randrange(4)] = draw.choice(_VALUES)
    source = draw.choice(['"original_image"', '"original_image"', *_VALUES])
    return f'{{"bbox_2d": [{", ".join(numbers)}], "source": {source}}}'


def _wrong_keys(draw: random.Random) -> str:
    source = "original_image"
    right = json.dumps({"bbox_2d": _BOX, "source": source})
    wrong = [
        {"bbox_2d": source, "source": _BOX},
        {"bbox_2d": _BOX},
        {"source": source},
        {},
        {"bbox_2d": _BOX, "source": source, "label": "sign"},
        {"bbox": _BOX, "image": source},
        {"keypoint": _BOX[:2], "source": source},
        {"bbox_2d": _BOX, "source": source, "images": 1, "row": 2},
    ]
    twice = f'{right[:-1]}, "source": "observation_1"}}'
    return draw.choice([twice, json.dumps([right]), json.dumps(right), *(_spelt(one, draw) for one in wrong)])


def _named(arguments: str, draw: random.Random) -> str:
    name = draw.choice(['"crop"'] * 8 + ['"zoom"', '"zoomm"', '""', "null", "3"])
    return draw.choice(['{"name": %s, "arguments": %s}'] * 4 + ['{"arguments": %s, "name": %s}', "[%s, %s]"]) % (
        name,
        arguments,
    )


def _spelt(arguments: object, draw: random.Random) -> str:
    text = json.dumps(arguments)
    return draw.choice([text, text, text.replace('"', "'"), text.replace('"', ""), text.rstrip("}"), text + "}"])


def _damaged(text: str, draw: random.Random) -> str:
    """Return a text with up to four characters removed, doubled or replaced, or cut off."""
    characters = list(text or "{}")
    for _ in range(draw.randint(1, min(4, len(characters)))):
        at = draw.randrange(len(characters))
        characters[at : at + 1] = draw.choice([[], [characters[at]] * 2, [draw.choice("{}[]\"',:\\<>0e-")]])
    damaged = "".join(characters)
    return draw.choice([damaged, damaged, damaged[: draw.randrange(len(damaged) + 1)], damaged * 2])


def _tagged(body: str, tag: str, draw: random.Random) -> str:
    whole = f"<{tag}>{body}</{tag}>"
    broken = [f"<{tag}>{body}", f"{body}</{tag}>", f"<{tag}>{body}</{draw.choice(TAGS)}>", whole * 3, body]
    return whole if draw.random() < 0.85 else draw.choice(broken)
