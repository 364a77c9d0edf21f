"""Turns with calls as a policy may get them wrong, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

_VALUES = [
    "NaN", "Infinity", "-Infinity", "1e400", "-1e308", "9" * 300, "-0.5", "2", "-1", "0", '"0.5"', "null", "true", "[]",
    "{}", "0x10", "1.2.3", "'", '"', "0.5%", "[" * 200, '{"a":' * 100, "\\", "\u0000", '"\\ud800"', '"<|image_pad|>"',
]  # fmt: skip
_SOURCES = [
    "observation_0",
    "observation_99",
    "original_image_7",
    "",
    "image",
    "../etc/passwd",
    "<|im_end|>",
    "<image>",
]
_BOXES = [
    [0.5, 0.2, 0.1, 0.6], [0.1, 0.6, 0.5, 0.2], [0.2, 0.2, 0.2, 0.6], [0.2, 0.2, 0.2, 0.2], [-0.1, 0, 0.5, 0.5],
    [0, 0, 1.5, 1], [0, 0, 640, 480], [0.1, 0.2, 0.3], [0.1, 0.2, 0.3, 0.4, 0.5], [[0, 0], [1, 1]], [0, 0, 1e-9, 1], [],
]  # fmt: skip
_TAGS = ["grounding", "tool_call", "tool"]


def malformed_turns(count: int, *, seed: int) -> Iterator[str]:
    """Yield texts of turns, some of which may by chance hold a call that can be carried out."""
    draw = random.Random(seed)
    for _ in range(count):
        thought = draw.choice(["", "<think>Closer.</think>\n", "<grounding>", "Let me look </think> ", "\u202e\x00�"])
        body = draw.choice([_wrong_box, _wrong_value, _wrong_keys, _damaged, _block])(draw)
        yield thought + _tagged(body, draw)


def _wrong_box(draw: random.Random) -> str:
    return _call({"bbox_2d": draw.choice(_BOXES), "source": draw.choice(["original_image", *_SOURCES])}, draw)


def _wrong_value(draw: random.Random) -> str:
    numbers = ["0.1", "0.2", "0.6", "0.7"]
    numbers[draw.randrange(4)] = draw.choice(_VALUES)
    source = draw.choice(['"original_image"', *_VALUES])
    arguments = f'{{"bbox_2d": [{", ".join(numbers)}], "source": {source}}}'
    return draw.choice(
        [arguments, f'{{"name": "crop", "arguments": {arguments}}}', f'{{"name": {draw.choice(_VALUES)}}}']
    )


def _wrong_keys(draw: random.Random) -> str:
    box, source = [0.1, 0.2, 0.6, 0.7], "original_image"
    return _call(
        draw.choice(
            [
                {"bbox_2d": source, "source": box},
                {"bbox_2d": box},
                {"source": source},
                {},
                {"bbox_2d": box, "source": source, "label": "sign"},
                {"bbox": box, "image": source},
                {"keypoint": box, "source": source},
                {"bbox_2d": box, "source": source, "images": 1, "row": 2},
            ]
        ),
        draw,
    )


def _damaged(draw: random.Random) -> str:
    """Return a right call with up to four characters removed, doubled or replaced."""
    text = list(_call({"bbox_2d": [0.1, 0.2, 0.6, 0.7], "source": "original_image"}, draw))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text))
        text[at : at + 1] = draw.choice([[], [text[at]] * 2, [draw.choice("{}[]\"',:\\<>0e-")]])
    return "".join(text)


def _block(draw: random.Random) -> str:
    lines = [
        "name: crop",
        "name: zoom",
        "bbox_2d: [0.1, 0.2",
        "keypoint: 0.5",
        "source original_image",
        ":",
        "name:",
        "x: {",
    ]
    return "\n".join(draw.choice(lines) for _ in range(draw.randint(0, 5)))


def _call(arguments: object, draw: random.Random) -> str:
    name = draw.choice(["crop", "zoom", "zoomm", "", None, 3])
    whole = draw.choice([arguments, {"name": name, "arguments": arguments}, [arguments], json.dumps(arguments)])
    text = json.dumps(whole)
    return draw.choice([text, text.replace('"', "'"), text[: draw.randrange(len(text) + 1)], text * 2])


def _tagged(body: str, draw: random.Random) -> str:
    tag, other = draw.choice(_TAGS), draw.choice(_TAGS)
    whole = f"<{tag}>{body}</{tag}>"
    return draw.choice(
        [whole, whole, whole, f"<{tag}>{body}", f"{body}</{tag}>", f"<{tag}>{body}</{other}>", whole * 3]
    )
