r"""The bounding boxes that an answer names, in the ways in which models write them, and how much two of them overlap.

`[x0, y0, x1, y1]`, JSON with `bbox_2d`, `bbox` or `box` and a `label` (Qwen2.5-VL, Mini-o3), and Qwen2-VL's
`<|object_ref_start|>cat<|object_ref_end|><|box_start|>(x0,y0),(x1,y1)<|box_end|>`, with or without these tokens.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_CHARS = 20_000
"""A longer text names no boxes."""
MAX_BOXES = 100
"""A text of more names none; COCO looks at as many of an image."""
MAX_COORDINATE = 1e6
"""Of a box that an image can have."""
BOX_KEYS = ("bbox_2d", "bbox", "box")

_INSIDE = r"[^()\[\]{}<>]"
_LIST = rf"[\[(](?P<list>{_INSIDE}{{1,200}})[\])]"
_CORNERS = rf"\((?P<first>{_INSIDE}{{1,100}})\)\s{{0,4}}(?:,\s{{0,4}})?\((?P<second>{_INSIDE}{{1,100}})\)"
_REFERENCE = r"<\|object_ref_start\|>(?P<reference>[^<]{0,200})<\|object_ref_end\|>"
_OBJECT = r"(?P<object>\{[^{}]{0,2000}\})"
_FORMS = re.compile(rf"{_OBJECT}|{_REFERENCE}|{_CORNERS}|{_LIST}")
_LISTS = re.compile(_LIST)
# For what is nearly JSON: single quotes, a comma too many, no quotes.
_LABEL = re.compile(r"""\blabel["']?\s{0,4}:\s{0,4}(?:"([^"]*)"|'([^']*)')""")
_EMPTY = re.compile(r"(?:```(?:json)?)?\s*\[\s*\]\s*(?:```)?")


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box as it is written."""

    corners: tuple[float, float, float, float] | None
    """(x0, y0, x1, y1), the upper left corner first; None where what is written is no box of an image: not four numbers
    from 0 to MAX_COORDINATE, corners that are swapped, or no area."""
    label: str | None = None
    """Its class, where one is named."""

    @property
    def area(self) -> float:
        """In the square of the coordinates' unit; 0.0 where it is no box."""
        if self.corners is None:
            return 0.0
        left, top, right, bottom = self.corners
        return (right - left) * (bottom - top)


def boxes_in(text: str, *, xywh: bool = False) -> list[Box] | None:
    """Return the boxes that a text names, in their order; None where it names none and is no empty list.

    Only a text that is `[]` and nothing else says that there is no box. Never raises.

    Args:
        xywh: four numbers are x, y, width and height; two corners are two corners all the same.
    """
    if len(text) > MAX_CHARS:
        return None
    if _EMPTY.fullmatch(text.strip()):
        return []
    boxes: list[Box] = []
    reference: str | None = None
    for form in _FORMS.finditer(text):
        if form["object"] is not None:
            boxes += _of_object(form["object"], xywh=xywh)
        elif form["reference"] is not None:
            reference = form["reference"].strip()
        elif form["first"] is not None:
            first, second = _numbers(form["first"]), _numbers(form["second"])
            if len(first) == len(second) == 2:
                boxes.append(_box([*first, *second], label=reference, xywh=False))
        elif len(numbers := _numbers(form["list"])) == 4:
            boxes.append(_box(numbers, label=reference, xywh=xywh))
        if len(boxes) > MAX_BOXES:
            return None
    return boxes or None


def iou(one: Box, other: Box) -> float:
    """Return the intersection over the union, from 0.0 to 1.0; 0.0 where one of both is no box."""
    if one.corners is None or other.corners is None:
        return 0.0
    (left, top, right, bottom), (other_left, other_top, other_right, other_bottom) = one.corners, other.corners
    width = min(right, other_right) - max(left, other_left)
    height = min(bottom, other_bottom) - max(top, other_top)
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return min(1.0, shared / (one.area + other.area - shared))


def scaled(box: Box, *, x: float, y: float) -> Box:
    """Return a box with its coordinates multiplied."""
    if box.corners is None:
        return box
    left, top, right, bottom = box.corners
    return replace(box, corners=(left * x, top * y, right * x, bottom * y))


def same_class(one: str | None, other: str | None) -> bool:
    """Return whether two classes are the same text, whatever its case and its white space."""
    return _folded(one) == _folded(other)


def _folded(label: str | None) -> str | None:
    return None if label is None else " ".join(label.casefold().split())


def _of_object(text: str, *, xywh: bool) -> list[Box]:
    """The boxes of one JSON object, by its keys; of what is nearly one, all lists of four numbers."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = {}
    label = found.get("label")
    boxes = [box for key in BOX_KEYS if key in found for box in _of_value(found[key], label=label, xywh=xywh)]
    if boxes:
        return boxes
    named = _LABEL.search(text)
    label = None if named is None else named[1] if named[1] is not None else named[2]
    listed = [_numbers(numbers["list"]) for numbers in _LISTS.finditer(text)]
    return [_box(numbers, label=label, xywh=xywh) for numbers in listed if len(numbers) == 4]


def _of_value(value: object, *, label: object, xywh: bool) -> list[Box]:
    """The boxes of a key's value: four numbers, or lists of them."""
    rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else [value]
    name = label if isinstance(label, str) else None
    return [_box(row if isinstance(row, list) else [], label=name, xywh=xywh) for row in rows]


def _numbers(text: str) -> list[float]:
    """The numbers between commas or spaces; none where something else stands there."""
    try:
        return [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        return []


def _box(numbers: Sequence[object], *, label: str | None, xywh: bool) -> Box:
    # A nan is within no bounds, and a whole number of hundreds of digits is not converted.
    fitting = [
        float(number)
        for number in numbers
        if isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= MAX_COORDINATE
    ]
    if len(fitting) != 4 or len(numbers) != 4:
        return Box(corners=None, label=label)
    left, top, right, bottom = fitting
    if xywh:
        right, bottom = left + right, top + bottom
    box = Box(corners=(left, top, right, bottom), label=label)
    # A side can be so short that the area is rounded to 0.
    return box if left < right and top < bottom and box.area > 0 else Box(corners=None, label=label)
