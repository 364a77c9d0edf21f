"""What every shipped environment is tested with: rows, replies, and calls that are malformed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from helpers.conversations import message, picture, row
from helpers.tables import table

from lmm_r1.agents.calls import TOOL_BLOCK
from lmm_r1.agents.environment import Environment
from lmm_r1.agents.registry import load_environment
from lmm_r1.agents.tool_environment import CropEnvironment, ToolEnvironment, zoom_tool
from lmm_r1.data.messages import Row

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


Draw = random.Random
# Small ones, so that models are quick.
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}
LEVELS = ("#####\n#@$.#\n#####", "######\n#@ $.#\n#  $.#\n######", "#####\n#.$@#\n#   #\n#####")
WORDS = ("left", "Right", "u", "DOWN", "2. up", "jump", "", "stop", "RRD", "<answer>", "7", "上")


class BlockTools(ToolEnvironment):
    """r1_vlm's way to write calls, and two of them in a turn."""

    name = "block"
    stops = ()
    formats = (TOOL_BLOCK,)
    calls_per_turn = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """An environment, rows for it, and what a policy may write."""

    environment: Callable[[bool], Environment]
    """Given whether the rows have images."""
    asked: Callable[[Draw, bool], dict[str, Any]]
    """What a row has beside its question: `images`, `answer`, `columns`."""
    turn: Callable[[Draw], str]
    shows_images: bool = False
    """Whether it answers with images where the rows have some."""

    def rows(self, *, seed: int, images: bool) -> Iterator[Row]:
        """Yield rows without end."""
        draw = Draw(seed)
        for number in count():
            given = self.asked(draw, images)
            question = message(
                "user", *given.get("images", ()), draw.choice(("Solve it.", "What do you see?", "And 46 + 1?"))
            )
            made = row(question, answer=given.get("answer", "46"))
            yield _with(made, location=f"rows.jsonl, line {number + 1}", columns=given.get("columns", {}))


def _with(made: Row, *, location: str, columns: Mapping[str, Any]) -> Row:
    return Row(
        messages=made.messages, answer=made.answer, datasource=made.datasource, location=location, columns=columns
    )


def _pictures(most: int) -> Callable[[Draw, bool], dict[str, Any]]:
    def asked(draw: Draw, images: bool) -> dict[str, Any]:
        shown = draw.randint(1, most) if images else 0
        return {"images": [picture(draw.randint(40, 150), draw.randint(40, 150)) for _ in range(shown)]}

    return asked


def _level(draw: Draw, images: bool) -> dict[str, Any]:
    return {"columns": {"state": draw.choice(LEVELS)}}


def _answer(draw: Draw, images: bool) -> dict[str, Any]:
    return {"answer": "46", **_pictures(1)(draw, images)}


def _box(draw: Draw) -> list[float]:
    x, y = draw.uniform(0, 0.6), draw.uniform(0, 0.6)
    return [round(value, 2) for value in (x, y, x + draw.uniform(0.2, 0.4), y + draw.uniform(0.2, 0.4))]


def _source(draw: Draw) -> str:
    return draw.choice(("original_image", "original_image_1", "original_image_1", "original_image_1", "observation_1"))


def _grounding(draw: Draw) -> str:
    return f"<grounding>{json.dumps({'bbox_2d': _box(draw), 'source': _source(draw)})}</grounding>"


def _call(draw: Draw) -> str:
    arguments = draw.choice(
        (
            {"name": "crop", "arguments": {"bbox_2d": _box(draw), "source": _source(draw)}},
            {"name": "zoom", "arguments": {"keypoint": _box(draw)[:2], "source": _source(draw)}},
        )
    )
    return f"<tool_call>{json.dumps(arguments)}</tool_call>"


def _block(draw: Draw) -> str:
    one = f"<tool>\nname: crop\nbbox_2d: {_box(draw)}\nsource: {_source(draw)}\n</tool>"
    return one * draw.choice((1, 1, 2, 3))


def _calls(*valid: Callable[[Draw], str], tag: str) -> Callable[[Draw], str]:
    """What a policy writes that may call: mostly what can be carried out, then what cannot, and answers."""

    def turn(draw: Draw) -> str:
        chance = draw.random()
        if chance < 0.55:
            return draw.choice(("", "<think>Closer.</think>")) + draw.choice(valid)(draw)
        if chance < 0.85:
            (text,) = malformed_turns(1, seed=draw.randrange(10**6), tags=(tag,))
            return text
        return _said(draw)

    return turn


def _said(draw: Draw) -> str:
    return draw.choice(("<answer>46</answer>", "46", "<think>Yes.</think><answer>3</answer>", "No idea"))


def _moves(draw: Draw) -> str:
    written = ", ".join(draw.choice(WORDS[:5] if draw.random() < 0.7 else WORDS) for _ in range(draw.randint(0, 4)))
    return draw.choice((f"<answer>{written}</answer>", f"<think>{written}</think><answer>{written}</answer>", written))


def _acts(draw: Draw) -> str:
    text = f"<action>{draw.choice((0, 1, 2, 3, 7, -1, 'x', ''))}</action>"
    return draw.choice((text, text, f"<think>Down.</think>{text}", text[:-9], _said(draw)))


def _view(images: bool) -> dict[str, Any]:
    return {"views": ["image", "text"] if images else ["text"], "tile_px": 14}


CASES: dict[str, Case] = {
    "crop": Case(
        environment=lambda images: load_environment("crop", options=PIXELS),
        asked=_pictures(2),
        turn=_calls(_grounding, tag="grounding"),
        shows_images=True,
    ),
    "crop, zoom": Case(
        environment=lambda images: CropEnvironment(
            tools=[zoom_tool()], coordinates="relative", prefill="<think>", **PIXELS
        ),
        asked=_pictures(1),
        turn=_calls(_grounding, _call, tag="tool_call"),
        shows_images=True,
    ),
    "tool": Case(
        environment=lambda images: load_environment("tool", options=PIXELS),
        asked=_pictures(2),
        turn=_calls(_call, tag="tool_call"),
        shows_images=True,
    ),
    "tool, blocks": Case(
        environment=lambda images: BlockTools(**PIXELS),
        asked=_pictures(1),
        turn=_calls(_block, tag="tool"),
        shows_images=True,
    ),
    "sokoban": Case(
        environment=lambda images: load_environment("sokoban", options=_view(images)),
        asked=_level,
        turn=_moves,
        shows_images=True,
    ),
    "sokoban-plan": Case(
        environment=lambda images: load_environment("sokoban-plan", options=_view(images)), asked=_level, turn=_moves
    ),
    "gymnasium": Case(
        environment=lambda images: load_environment("gymnasium", options={"arguments": {"is_slippery": True}}),
        asked=_pictures(1),
        turn=_acts,
    ),
    "single": Case(environment=lambda images: load_environment("single"), asked=_answer, turn=_said),
}
"""By the environment's name, behind which a variant may stand."""
