"""Judges answers that are bounding boxes by their intersection over union (IoU) with those of the label.

python -m remote_rm box --iou-threshold 0.75 --match-labels

Boxes are `[x0, y0, x1, y1]`, JSON with `bbox_2d`, `bbox` or `box` and a `label` (Qwen2.5-VL, Mini-o3), or Qwen2-VL's
`<|object_ref_start|>cat<|object_ref_end|><|box_start|>(x0,y0),(x1,y1)<|box_end|>`, with or without these tokens.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import fsum, inf
from typing import ClassVar

from remote_rm.answer_verifier import Grade, GradedVerifier, finite_number, is_matchable, setting
from remote_rm.answers.extraction import concluding_text
from remote_rm.verifier import Item

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
    """(x0, y0, x1, y1), the upper left corner first; None if what is written is no box of an image: not four numbers
    from 0 to MAX_COORDINATE, corners that are swapped, or no area."""
    label: str | None = None
    """Its class, if one is named."""

    @property
    def area(self) -> float:
        """In the square of the coordinates' unit; 0.0 if it is no box."""
        if self.corners is None:
            return 0.0
        left, top, right, bottom = self.corners
        return (right - left) * (bottom - top)


def boxes_in(text: str, *, xywh: bool = False) -> list[Box] | None:
    """Return the boxes that a text names, in their order; None if it names none and is no empty list.

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
    """Return the intersection over the union, from 0.0 to 1.0; 0.0 if one of them is no box."""
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
    """The numbers between commas or spaces; none if something else is between them."""
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


def best_pairs(weights: Sequence[Sequence[float]]) -> list[tuple[int, int]]:
    """Return the pairs (row, column) of the largest sum, as many as the shorter side is long, in the order of the rows.

    The Hungarian method, by shortest augmenting paths, O(shorter² · longer): Kuhn 1955; Jonker and Volgenant 1987. In
    plain Python: scipy's arrays and threads would take much of the address space that a worker is given.

    Args:
        weights: finite numbers, by row and column; every row has as many.
    """
    if not weights or not weights[0]:
        return []
    if len(weights) > len(weights[0]):
        return sorted((row, column) for column, row in best_pairs(list(zip(*weights, strict=True))))
    # No pair costs less than the prices of its row and its column together, and those that are taken cost just that.
    row_price, column_price = [0.0] * len(weights), [0.0] * len(weights[0])
    row_of: dict[int, int] = {}
    for row in range(len(weights)):
        distance = [inf] * len(column_price)
        reached_from = [row] * len(column_price)
        unseen, length, at = set(range(len(column_price))), 0.0, row
        path: list[int] = []
        while True:
            for column in unseen:
                cost = length - weights[at][column] - row_price[at] - column_price[column]
                if cost < distance[column]:
                    distance[column], reached_from[column] = cost, at
            nearest = min(unseen, key=distance.__getitem__)
            unseen.remove(nearest)
            length = distance[nearest]
            if nearest not in row_of:
                break
            path.append(nearest)
            at = row_of[nearest]
        row_price[row] += length
        for column in path:
            row_price[row_of[column]] += length - distance[column]
            column_price[column] -= length - distance[column]
        # From the free column back to the new row, each row gives its column to the one that it was reached from.
        taken = {taker: column for column, taker in row_of.items()}
        column, taker = nearest, reached_from[nearest]
        while taker != row:
            row_of[column] = taker
            column, taker = taken[taker], reached_from[taken[taker]]
        row_of[column] = row
    return sorted((row, column) for column, row in row_of.items())


MAX_QUICK_PAIRS = 256
"""Pairs of boxes that are compared without a worker."""

_WRONG = Grade(values=(0.0,), is_right=False)


@dataclass(frozen=True, kw_only=True)
class BoxVerifier(GradedVerifier):
    """One box, or several, each matched with one of the label's so that the sum of the IoUs is the largest.

    The measure `iou` is that sum over the number of boxes on the side that has more: a box without a partner counts 0, so
    that naming many to hit one pays nothing. A label `[]` is met by the answer `[]`, and by no answer without it.

    A label's numbers are pixels of the stored image. A model's coordinates are scaled to those if its format is known. If the
    label has shares of the image, from 0 to 1, nothing is scaled.
    """

    name: ClassVar[str] = "box"
    measures: ClassVar[tuple[str, ...]] = ("iou",)

    iou_threshold: float = setting(
        0.5,
        type=finite_number,
        help="IoU from which on a box counts as right for the accuracy; the reward follows the IoU itself",
    )
    xywh: bool = setting(False, help="read four numbers as x, y, width and height, in labels and answers")
    match_labels: bool = setting(
        False, help="want the class of a box too, where the label names one: {'bbox_2d': [...], 'label': 'cat'}"
    )
    unscaled: bool = setting(
        False,
        help="labels have the coordinates that the model writes; without it they are pixels of the stored image, to which "
        "answers are scaled",
    )

    def __post_init__(self) -> None:
        """Raise a ValueError for a threshold that every answer or none would reach."""
        if not 0 < self.iou_threshold <= 1:
            raise ValueError(f"--iou-threshold must be above 0 and at most 1, got {self.iou_threshold:g}")

    def grade(self, answer: str, label: str) -> Grade:
        """Return the mean IoU; an answer that names no box, or too many, is wrong."""
        return self._grade(boxes_in(answer, xywh=self.xywh), golds=_golds(label, xywh=self.xywh))

    def grade_of(self, item: Item, answer: str) -> Grade:
        """Return the mean IoU in pixels of the image as it is stored, if the item has the scales of answers."""
        golds, boxes, scales = _golds(item.label, xywh=self.xywh), boxes_in(answer, xywh=self.xywh), self._scales(item)
        if boxes is None or len(scales) > 1:
            return _WRONG
        for x, y in scales:
            boxes = [scaled(box, x=x, y=y) for box in boxes]
        return self._grade(boxes, golds=golds)

    def can_grade(self, item: Item) -> bool:
        """Return whether the label and an answer's boxes can be read, which fails if several images have different scales."""
        return super().can_grade(item) and len(self._scales(item)) < 2

    def _scales(self, item: Item) -> set[tuple[float, float]]:
        """The factors of an answer's coordinates: none, one pair (x, y), or several, which cannot be applied."""
        golds = _golds(item.label, xywh=self.xywh)
        # Of a label in shares of the width and height, from 0 to 1, nothing is scaled.
        if self.unscaled or not golds or all(box.corners is not None and max(box.corners) <= 1 for box in golds):
            return set()
        return {(x, y) for x, y in item.image_scales}

    def _grade(self, boxes: list[Box] | None, *, golds: list[Box] | None) -> Grade:
        if golds is None or boxes is None:
            return _WRONG
        if not golds or not boxes:
            return Grade(values=(float(golds == boxes),), is_right=golds == boxes)
        table = [[0.0 if self._is_other(box, gold) else iou(box, gold) for box in boxes] for gold in golds]
        mean = fsum(table[gold][box] for gold, box in best_pairs(table)) / max(len(golds), len(boxes))
        reached = [[overlap >= self.iou_threshold for overlap in row] for row in table]
        return Grade(values=(min(1.0, mean),), is_right=len(golds) == len(boxes) and is_matchable(reached))

    def is_quick(self, answer: str, label: str) -> bool:
        golds, boxes = _golds(label, xywh=self.xywh) or [], boxes_in(answer, xywh=self.xywh) or []
        return len(golds) * len(boxes) <= MAX_QUICK_PAIRS

    def answer_in(self, response: str) -> str | None:
        """Return the text in which the boxes are looked for, all of it: a list of them may have many lines."""
        return concluding_text(response)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label is a list of boxes, or an empty one."""
        return _golds(label, xywh=self.xywh) is not None

    def _is_other(self, box: Box, gold: Box) -> bool:
        return self.match_labels and gold.label is not None and not same_class(box.label, gold.label)


@lru_cache(maxsize=4096)
def _golds(label: str, *, xywh: bool) -> list[Box] | None:
    """The boxes of a label; None if it has none, or one is not a box. Cached for the rest of the group."""
    boxes = boxes_in(label, xywh=xywh)
    return boxes if boxes is not None and all(box.corners is not None for box in boxes) else None
