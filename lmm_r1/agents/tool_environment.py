"""The environments `tool` and `crop`: a policy calls tools and sees their results, until a turn has no call."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from PIL import Image
from pydantic import Field

from lmm_r1.agents.calls import CROP, GROUNDING, TOOL_CALL, BadCall, CallFormat, WrittenCall, quoted, written_calls
from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.agents.tools import (
    MOST_ASPECT,
    ORIGINAL,
    EpisodeImages,
    PixelBounds,
    Tool,
    ToolFailed,
    ToolResult,
    as_tools,
    is_too_thin,
)
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart, images_of, merged_texts
from lmm_r1.data.sample import CallEnd, CallOutcome, Cut, CutImage
from lmm_r1.errors import UserError

Coordinates = Literal["relative", "thousandths", "absolute"]
"""The coordinates of an image's right and lower edge: 1.0, 1000, or its width and height as shown."""
UNITS: dict[Coordinates, str] = {
    "relative": "as fractions of the image's width and height, from 0.0 to 1.0",
    "thousandths": "in thousandths of the image's width and height, from 0 to 1000",
    "absolute": "in pixels of the image as it is shown",
}
Edges = Literal["refuse", "clamp"]
"""A box that extends beyond the image is refused with a message, or clamped to the image."""
Rounding = Literal["touched", "down", "even"]
"""Which pixels belong to a box: those that it touches, or those between its corners rounded down, as in Mini-o3, or to the
nearest even number, as in Pillow."""
_ROUNDED: Mapping[Rounding, tuple[Callable[[float], int], Callable[[float], int]]] = {
    "touched": (math.floor, math.ceil),
    "down": (int, int),
    "even": (round, round),
}
ZOOM_SIDE = 400
_SOURCE = (
    "The image to look at: original_image, or observation_1, observation_2 and so on. Of several original images: "
)
_SOURCE += "original_image_1, original_image_2 and so on."
# Products such as 0.29 * 100 miss a whole number by rounding; six digits are exact enough for any image.
_DIGITS = 6


def box_in_pixels(
    box: Sequence[float],
    *,
    limits: tuple[float, float],
    size: tuple[int, int],
    edges: Edges = "refuse",
    rounding: Rounding = "touched",
) -> tuple[int, int, int, int]:
    """Return left, upper, right, lower of a box's pixels, right and lower being outside.

    Args:
        box: x0, y0, x1, y1: its top-left and its bottom-right corner.
        limits: the coordinates of the image's bottom-right corner.
        size: the image's width and height.

    Raises:
        BadCall: it extends beyond the image, is swapped, empty or too thin.
    """
    x0, y0, x1, y1 = box
    said = f"bbox_2d {quoted(list(box))}"
    if edges == "refuse":
        _check_inside((x0, x1), (y0, y1), limits=limits, said=said)
    else:
        x0, x1 = (min(max(value, 0.0), limits[0]) for value in (x0, x1))
        y0, y1 = (min(max(value, 0.0), limits[1]) for value in (y0, y1))
    for axis, low, high in (("x", x0, x1), ("y", y0, y1)):
        if low > high:
            raise BadCall(
                f"{said} has swapped corners: {axis}0 is larger than {axis}1; write the top-left corner first, then the "
                "bottom-right one"
            )
        if low == high:
            raise BadCall(f"{said} is empty: {axis}0 and {axis}1 are equal")
    left, right = _span(x0, x1, limit=limits[0], pixels=size[0], rounding=rounding)
    upper, lower = _span(y0, y1, limit=limits[1], pixels=size[1], rounding=rounding)
    _check_thin((right - left, lower - upper), said=said)
    return left, upper, right, lower


def crop_tool(
    *, coordinates: Coordinates = "relative", edges: Edges = "refuse", rounding: Rounding = "touched"
) -> Tool:
    """Return the tool `crop`; raises UserError for an unknown kind of coordinates, edges or rounding."""
    choices = {"coordinates": (coordinates, Coordinates), "edges": (edges, Edges), "rounding": (rounding, Rounding)}
    for name, (value, kinds) in choices.items():
        if value not in get_args(kinds):
            raise UserError(f"crop: {name} {value!r} must be one of {', '.join(get_args(kinds))}")

    def crop(
        bbox_2d: Annotated[list[float], Field(min_length=4, max_length=4)], source: str, images: EpisodeImages
    ) -> ToolResult:
        """Cut a part out of an image, to see it larger."""
        source = images.known(source)
        image = images.load(source)
        limits = _limits(images, source, coordinates=coordinates)
        box = box_in_pixels(bbox_2d, limits=limits, size=image.size, edges=edges, rounding=rounding)
        return _part(image, Cut(picture=images.number(source), name=source, box=box, size=image.size))

    described = f"The part's top-left and bottom-right corner as [x0, y0, x1, y1], {UNITS[coordinates]}."
    return Tool(crop, name=CROP, descriptions={"bbox_2d": described, "source": _SOURCE})


def zoom_tool(*, coordinates: Coordinates = "relative", side: int = ZOOM_SIDE) -> Tool:
    """Return the tool `zoom`, which shows the surroundings of a point as large as the whole image was.

    Args:
        side: width and height of what is cut out, in pixels of the full resolution. Near an edge it is moved inside; an image
            with a smaller side is cut in the other direction only.
    """
    if side < 1:
        raise UserError(f"zoom: side must be at least 1 pixel, not {side}")

    def zoom(
        keypoint: Annotated[list[float], Field(min_length=2, max_length=2)],
        images: EpisodeImages,
        source: str = "original_image",
    ) -> ToolResult:
        """Show the surroundings of a point of an image larger."""
        source = images.known(source)
        image = images.load(source)
        limits = _limits(images, source, coordinates=coordinates)
        said = f"keypoint {quoted(keypoint)}"
        _check_inside(keypoint[:1], keypoint[1:], limits=limits, said=said)
        left, width = _window(keypoint[0] / limits[0], side=side, pixels=image.width)
        upper, height = _window(keypoint[1] / limits[1], side=side, pixels=image.height)
        _check_thin((width, height), said=said)
        scale = max(1.0, max(images.shown_size(source)) / max(width, height))
        wanted = max(int(width * height * scale**2), images.bounds.min_pixels)
        cut = Cut(
            picture=images.number(source),
            name=source,
            box=(left, upper, left + width, upper + height),
            size=image.size,
            keypoint=(keypoint[0] / limits[0] * image.width, keypoint[1] / limits[1] * image.height),
        )
        return _part(image, cut, min_pixels=min(wanted, images.bounds.max_pixels))

    point = f"The point to look at as [x, y], {UNITS[coordinates]}."
    return Tool(zoom, descriptions={"keypoint": point, "source": _SOURCE})


def _limits(images: EpisodeImages, source: str, *, coordinates: Coordinates) -> tuple[float, float]:
    if coordinates == "absolute":
        return images.shown_size(source)
    return (1.0, 1.0) if coordinates == "relative" else (1000.0, 1000.0)


def _check_inside(xs: Sequence[float], ys: Sequence[float], *, limits: tuple[float, float], said: str) -> None:
    for axis, values, limit in (("x", xs, limits[0]), ("y", ys, limits[1])):
        if min(values) < 0 or max(values) > limit:
            raise BadCall(f"{said} extends beyond the image: {axis} must lie between 0 and {limit:g}")


def _check_thin(size: tuple[int, int], *, said: str) -> None:
    if is_too_thin(size):
        raise BadCall(
            f"{said} is too thin: it has {size[0]} x {size[1]} pixels, and the longer side may be at most {MOST_ASPECT} "
            "times the shorter one"
        )


def _span(low: float, high: float, *, limit: float, pixels: int, rounding: Rounding) -> tuple[int, int]:
    """Return the first pixel of an interval and the one after its last; it has at least one pixel."""
    first_of, last_of = _ROUNDED[rounding]
    first = min(first_of(round(low / limit * pixels, _DIGITS)), pixels - 1)
    return first, min(max(last_of(round(high / limit * pixels, _DIGITS)), first + 1), pixels)


def _window(center: float, *, side: int, pixels: int) -> tuple[int, int]:
    """Return the first pixel of a window and its width; it is moved inside."""
    width = min(side, pixels)
    return min(max(round(center * pixels - width / 2), 0), pixels - width), width


def _part(image: Image.Image, cut: Cut, *, min_pixels: int | None = None) -> ToolResult:
    left, upper, right, lower = cut.box
    return ToolResult(
        text=f"A part of {cut.name}, cut from {right - left} x {lower - upper} pixels of its full resolution.",
        images=(CutImage(image.crop(cut.box), min_pixels=min_pixels, cut=cut),),
    )


MIN_PIXELS, MAX_PIXELS = 40_000, 2_000_000
SIDE_MULTIPLE = 28
TOOL_CALLS, MALFORMED_CALLS, FAILED_CALLS = COUNTS = ("tool_calls", "malformed_calls", "failed_calls")


@dataclass(frozen=True, kw_only=True)
class ToolOutcome:
    """The outcome of one call."""

    result: ToolResult = ToolResult()
    names: tuple[str, ...] = ()
    """The names of the result's images."""
    problem: str = ""
    """What went wrong, as a clause; empty if nothing did."""
    tool: str = ""
    """The name of the tool; empty if the call names no existing tool."""
    end: CallEnd = "done"
    turn: int = 1
    """Number of the policy's turn with the call, from 1."""


class ToolEnvironment(Environment):
    """Offers tools, each call answered in the next message; an episode ends with a turn without a call.

    Generation stops after the first call. A subclass may allow several calls in a turn, with empty `stops`; further calls
    are ignored, and the reply to the policy says so.
    """

    name = "tool"
    counts: ClassVar[tuple[str, ...]] = COUNTS
    stops: ClassVar[tuple[str, ...]] = (TOOL_CALL.closing,)
    formats: ClassVar[tuple[CallFormat, ...]] = (TOOL_CALL,)
    calls_per_turn: ClassVar[int] = 1

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., object]] | None = None,
        *,
        min_pixels: int = MIN_PIXELS,
        max_pixels: int = MAX_PIXELS,
        side_multiple: int = SIDE_MULTIPLE,
        prefill: str = "",
    ) -> None:
        """Create the tools; raises UserError if one cannot be used, or the pixel bounds cross.

        Args:
            tools: tools, or functions; None takes `crop` and `zoom`.
            min_pixels: of shown images without bounds of their own, including the row's.
            max_pixels: of the same.
            side_multiple: the image processor rounds sides to multiples of it; for absolute coordinates.
            prefill: the beginning of each turn after an observation.
        """
        if not 0 < min_pixels <= max_pixels:
            raise UserError(f"{self.name}: min_pixels {min_pixels} must lie between 1 and max_pixels {max_pixels}")
        if side_multiple < 1:
            raise UserError(f"{self.name}: side_multiple {side_multiple} must be at least 1")
        self.bounds = PixelBounds(min_pixels=min_pixels, max_pixels=max_pixels, side_multiple=side_multiple)
        self.tools = as_tools([crop_tool(), zoom_tool()] if tools is None else tools)
        self.prefill = prefill

    def shown_row(self, row: Row) -> Row:
        """Return the row with the tools explained in its system turn, and its images bounded."""
        messages = [
            replace(
                one, parts=tuple(self.bounds.of(part) if isinstance(part, ImagePart) else part for part in one.parts)
            )
            for one in row.messages
        ]
        explained = TextPart(self.explained(row))
        if messages and messages[0].role == "system":
            messages[0] = replace(messages[0], parts=merged_texts((*messages[0].parts, TextPart("\n\n"), explained)))
        else:
            messages.insert(0, Message(role="system", parts=(explained,)))
        return replace(row, messages=tuple(messages))

    @property
    def call_tags(self) -> tuple[str, ...]:
        """The tags of its formats."""
        return tuple(one.tag for one in self.formats)

    def derived(self, counts: Mapping[str, float]) -> Mapping[str, float]:
        """Return `used_tool`, whether a call was executed, and `tool_execution`, the share of executed calls."""
        calls = counts[TOOL_CALLS]
        carried_out = calls - counts[MALFORMED_CALLS] - counts[FAILED_CALLS]
        return {"used_tool": float(carried_out > 0), "tool_execution": carried_out / calls if calls else 0.0}

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode; nothing is random, so the seed is not used."""
        return ToolEpisode(self, row)

    def explained(self, row: Row) -> str:
        """Return the explanation of the tools and of how they are called."""
        return explained_tools(tuple(self.tools.values()), has_images=bool(images_of(row.messages)))

    def answered(self, outcome: ToolOutcome) -> list[Part]:
        """Return the message that reports a call's result."""
        said = f"Error: {outcome.problem}. The call was not executed." if outcome.problem else outcome.result.text
        parts: list[Part] = [TextPart(f"<tool_response>\n{said or 'Done.'}")]
        for name, image in zip(outcome.names, outcome.result.images, strict=True):
            parts += [TextPart(f"\n{name}:\n"), self.bounds.of(image)]
        return [*parts, TextPart("\n</tool_response>")]

    def ignored(self, calls: int) -> str:
        """Return the message that further calls of a turn were ignored."""
        most = self.calls_per_turn
        first, limit = ("the first", "one call") if most == 1 else (f"the first {most}", f"at most {most} calls")
        left = "1 more was" if calls == 1 else f"{calls} more were"
        return f"\nOnly {first} of your calls was executed; {left} ignored. Write {limit} per turn."

    def tool(self, name: str) -> Tool:
        """Return a tool by its name; raises BadCall if there is none."""
        if name not in self.tools:
            raise BadCall(f"there is no tool {quoted(name)}; the tools are: {', '.join(self.tools)}")
        return self.tools[name]


class ToolEpisode(Episode):
    """An episode with tools, and the images shown in it."""

    def __init__(self, environment: ToolEnvironment, row: Row) -> None:
        self._environment = environment
        self._row = row
        self._images = EpisodeImages(row, bounds=environment.bounds)

    async def answer(self, turn: Turn) -> Answered:
        """Execute the turn's calls in order and return their results; the episode ends if there are none."""
        written = written_calls(turn.text, self._environment.formats)
        taken = written[: self._environment.calls_per_turn]
        outcomes = [replace(await self._outcome(call), turn=turn.number + 1) for call in taken]
        calls = tuple(CallOutcome(tool=one.tool, outcome=one.end, problem=one.problem) for one in outcomes)
        ends = [one.end for one in outcomes]
        counts = {TOOL_CALLS: len(ends), MALFORMED_CALLS: ends.count("malformed"), FAILED_CALLS: ends.count("failed")}
        if not outcomes:
            return Answered(counts=counts)
        parts = [part for outcome in outcomes for part in self._environment.answered(outcome)]
        if len(written) > len(taken):
            parts.append(TextPart(self._environment.ignored(len(written) - len(taken))))
        return Answered(shown=merged_texts(parts), prefill=self._environment.prefill, counts=counts, calls=calls)

    async def _outcome(self, written: WrittenCall) -> ToolOutcome:
        name = ""
        try:
            call = written.read()
            tool = self._environment.tool(call.name)
            name = tool.name
            result = await tool.call(call.arguments, images=self._images, row=self._row)
        except BadCall as error:
            return ToolOutcome(problem=str(error), tool=name, end="malformed")
        except ToolFailed as error:
            return ToolOutcome(problem=f"the tool failed: {error}", tool=name, end="failed")
        return ToolOutcome(result=result, names=tuple(self._images.add(image) for image in result.images), tool=name)


def explained_tools(tools: Sequence[Tool], *, has_images: bool) -> str:
    """Return the tools' schemas and the call format in the wording of Hermes, which policies were trained on."""
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
    images = (
        "\nThe image of the question is named original_image; several are named original_image_1, original_image_2 and so on. "
        "Images that tools show you come with their names."
        if has_images
        else ""
    )
    return (
        "# Tools\n\nYou may call one of these tools per turn. The next message shows its result.\n"
        f"<tools>\n{schemas}\n</tools>\n\n"
        "A call is a JSON object with the tool's name and its arguments inside <tool_call></tool_call>, at the end of the "
        'turn:\n<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>\n'
        f"A turn without a call is your answer.{images}"
    )


_EXAMPLES = {
    "relative": "[0.25, 0.5, 0.75, 1.0]",
    "thousandths": "[250, 500, 750, 1000]",
    "absolute": "[28, 28, 140, 84]",
}


_TEXTS = {
    "system": "TOOL_CROP_SYSTEM_PROMPT",
    "observation": "TOOL_CALL_CROP_MULTI_TRUN_PROMPT",
    "error": "ERROR_INFO_MULTI_TURN_PROMPT",
}
"""The names of the texts in Mini-o3's `verl/trainer/constants.py`."""
_IMAGE = re.compile(r"<image>|<\|vision_start\|>.*?<\|vision_end\|>")


@dataclass(frozen=True, kw_only=True)
class CropPrompts:
    """The texts for a policy, in the wording of its training."""

    system: str
    observation: str
    """Has the image as `<image>` or as a chat template's tokens, and `{action_turn}` and `{observation_turn}` for numbers."""
    error: str
    """Appended to the sentence that says what was wrong with a call."""
    first_turn: int = 1
    """The number of the first turn; Mini-o3 counts actions from 0."""


def load_crop_prompts(path: Path) -> CropPrompts:
    """Return the texts of a file: JSON with the keys system, observation and error, or Mini-o3's `constants.py`.

    The Python file is parsed, not executed.

    Raises:
        UserError: the file cannot be read, or lacks a text.
    """
    try:
        content = path.read_text(encoding="utf-8")
        texts = _constants(content) if path.suffix == ".py" else json.loads(content)
    except OSError as error:
        raise UserError(f"prompts {path}: {error.strerror}; check the path") from error
    except (ValueError, SyntaxError) as error:
        raise UserError(f"prompts {path}: it cannot be parsed as JSON or Python: {error}") from error
    found: dict[str, str] = {}
    for key, name in _TEXTS.items():
        name = name if path.suffix == ".py" else key
        text = texts.get(name) if isinstance(texts, dict) else None
        if not isinstance(text, str) or (key == "observation" and len(_IMAGE.findall(text)) != 1):
            what = ", with exactly one <image>" if key == "observation" else ""
            raise UserError(f"prompts {path}: it has no text {name}{what}; add it")
        found[key] = text
    return CropPrompts(**found, first_turn=0 if path.suffix == ".py" else 1)


def _constants(content: str) -> dict[str, object]:
    """Return the constants that are assigned to names at the top level of a Python file."""
    return {
        target.id: node.value.value
        for node in ast.parse(content).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


class CropEnvironment(ToolEnvironment):
    """Answers `<grounding>` blocks with a crop of an image, and other calls with further tools.

    A row without images is shown unchanged.
    """

    name = "crop"
    stops = (GROUNDING.closing, TOOL_CALL.closing)
    formats = (GROUNDING, TOOL_CALL)

    def __init__(
        self,
        *,
        coordinates: Coordinates = "relative",
        edges: Edges = "refuse",
        rounding: Rounding = "touched",
        prompts: str | None = None,
        tools: Sequence[Tool | Callable[..., object]] = (),
        min_pixels: int = MIN_PIXELS,
        max_pixels: int = MAX_PIXELS,
        side_multiple: int = SIDE_MULTIPLE,
        prefill: str = "",
    ) -> None:
        """Create the tools; raises UserError as `ToolEnvironment` does, and for unknown options.

        Args:
            coordinates: of boxes; absolute ones are pixels of the image as shown.
            edges: whether a box beyond the image is refused or clamped.
            rounding: which pixels belong to a box.
            prompts: a file with another wording; see `load_crop_prompts`.
            tools: further tools, such as `zoom_tool()`, or functions, called in `<tool_call>` blocks.
        """
        super().__init__(
            [crop_tool(coordinates=coordinates, edges=edges, rounding=rounding), *tools],
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            side_multiple=side_multiple,
            prefill=prefill,
        )
        self._coordinates = coordinates
        self._prompts = None if prompts is None else load_crop_prompts(Path(prompts))

    def shown_row(self, row: Row) -> Row:
        """Return the row with the call format explained in its system turn, and its images bounded."""
        return super().shown_row(row) if images_of(row.messages) else row

    def explained(self, row: Row) -> str:
        """Return the explanation of the call format."""
        if self._prompts is not None:
            return self._prompts.system
        images = len(images_of(row.messages))
        names = ORIGINAL if images == 1 else ", ".join(f"{ORIGINAL}_{number}" for number in range(1, images + 1))
        first = ORIGINAL if images == 1 else f"{ORIGINAL}_1"
        text = (
            "You can look closely at small details before you answer. Think inside <think> </think>. To enlarge a part of an "
            "image, end your turn with one call:\n"
            f'<grounding>{{"bbox_2d": {_EXAMPLES[self._coordinates]}, "source": "{first}"}}</grounding>\n'
            "bbox_2d is [x0, y0, x1, y1], the top-left and the bottom-right corner of the part, "
            f"{UNITS[self._coordinates]}. source is the image to cut from: {names}, or observation_1, observation_2 and so "
            "on, which are the parts shown to you. Once you know the answer, write it inside <answer> </answer>, without a "
            "call."
        )
        further = [tool for tool in self.tools.values() if tool.name != CROP]
        return f"{text}\n\n{explained_tools(further, has_images=False)}" if further else text

    def answered(self, outcome: ToolOutcome) -> list[Part]:
        """Return the crops, or what was wrong with the call, and how to continue."""
        if self._prompts is not None:
            return self._in_own_words(outcome, self._prompts)
        if outcome.problem:
            return [
                TextPart(
                    f"This call was not executed: {outcome.problem}. No observation was added. Think about what went wrong "
                    "inside <think> </think>, then call again, or answer inside <answer> </answer>."
                )
            ]
        parts: list[Part] = []
        for name, image in zip(outcome.names, outcome.result.images, strict=True):
            parts += [TextPart(f"This is {name}:\n"), self.bounds.of(image), TextPart("\n")]
        text = f"{outcome.result.text}\n" if outcome.result.text else ""
        return [
            *parts,
            TextPart(
                f"{text}Continue thinking inside <think> </think>. Then look closer at the original image or an observation "
                "with another call, or answer inside <answer> </answer>."
            ),
        ]

    def _in_own_words(self, outcome: ToolOutcome, prompts: CropPrompts) -> list[Part]:
        if outcome.problem:
            return [TextPart(f"{outcome.problem}.\n{prompts.error}")]
        parts: list[Part] = []
        for name, image in zip(outcome.names, outcome.result.images, strict=True):
            numbers = {
                "action_turn": outcome.turn - 1 + prompts.first_turn,
                "observation_turn": name.rpartition("_")[2],
            }
            text = prompts.observation
            for key, number in numbers.items():
                text = text.replace(f"{{{key}}}", str(number))
            before, after = _IMAGE.split(text, maxsplit=1)
            parts += [TextPart(before), self.bounds.of(image), TextPart(after)]
        return [part for part in parts if not isinstance(part, TextPart) or part.text]
