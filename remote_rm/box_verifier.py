"""Judges answers that are bounding boxes by their intersection over union (IoU) with those of the label.

python -m remote_rm.box_verifier --port 5000
python -m remote_rm.box_verifier --iou-threshold 0.75 --match-labels
"""

import argparse
from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import ClassVar

from typing_extensions import Self

from remote_rm import verifier_command
from remote_rm.answer_verifier import Grade, GradedVerifier, Weights, finite_number
from remote_rm.answers.boxes import Box, best_pairs, boxes_in, iou, is_matchable, same_class, scaled
from remote_rm.answers.extraction import concluding_text
from remote_rm.reward_function import reward_func_of
from remote_rm.verifier import Item

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

    iou_threshold: float = 0.5
    """An answer is right if as many boxes as the label has can be paired with its own, each by this IoU at least."""
    xywh: bool = False
    """Four numbers are x, y, width and height, in labels and answers."""
    match_labels: bool = False
    """A box of the label that names its class is met only by a box that names the same one."""

    unscaled: bool = False
    """Labels have the coordinates that the model writes, and answers are compared with them as they are."""

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
        if self.unscaled or not golds or all(map(_is_share, golds)):
            return set()
        return {(x, y) for x, y in item.image_scales}

    def _grade(self, boxes: list[Box] | None, *, golds: list[Box] | None) -> Grade:
        if golds is None or boxes is None:
            return _WRONG
        if not golds or not boxes:
            return Grade(values=(float(golds == boxes),), is_right=golds == boxes)
        table = [[self._iou(box, gold=gold) for box in boxes] for gold in golds]
        mean = fsum(table[gold][box] for gold, box in best_pairs(table)) / max(len(golds), len(boxes))
        reached = [[overlap >= self.iou_threshold for overlap in row] for row in table]
        return Grade(values=(min(1.0, mean),), is_right=len(golds) == len(boxes) and is_matchable(reached))

    def is_quick(self, answer: str, label: str) -> bool:
        """Return whether there are few enough pairs to compare."""
        golds, boxes = _golds(label, xywh=self.xywh) or [], boxes_in(answer, xywh=self.xywh) or []
        return len(golds) * len(boxes) <= MAX_QUICK_PAIRS

    def answer_in(self, response: str) -> str | None:
        """Return the text in which the boxes are looked for, all of it: a list of them may have many lines."""
        return concluding_text(response)

    def is_gradable(self, label: str) -> bool:
        """Return whether the label is a list of boxes, or an empty one."""
        return _golds(label, xywh=self.xywh) is not None

    def _iou(self, box: Box, *, gold: Box) -> float:
        is_other_class = self.match_labels and gold.label is not None and not same_class(box.label, gold.label)
        return 0.0 if is_other_class else iou(box, gold)

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the weights and of the boxes."""
        super().add_arguments(parser)
        parser.add_argument(
            "--iou-threshold",
            type=finite_number,
            default=cls.iou_threshold,
            help="IoU from which on a box counts as right for the accuracy; the reward follows the IoU itself",
        )
        parser.add_argument(
            "--xywh", action="store_true", help="read four numbers as x, y, width and height, in labels and answers"
        )
        parser.add_argument(
            "--match-labels",
            action="store_true",
            help="want the class of a box too, where the label names one: {'bbox_2d': [...], 'label': 'cat'}",
        )
        parser.add_argument(
            "--unscaled",
            action="store_true",
            help="labels have the coordinates that the model writes; without it they are pixels of the stored image, to "
            "which answers are scaled",
        )

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> Self:
        """Return the verifier that the flags of `add_arguments` describe; raises ValueError for a threshold that is none."""
        return cls(
            weights=Weights(accuracy=args.accuracy_weight, format=args.format_weight),
            iou_threshold=args.iou_threshold,
            xywh=args.xywh,
            match_labels=args.match_labels,
            unscaled=args.unscaled,
        )


@lru_cache(maxsize=4096)
def _golds(label: str, *, xywh: bool) -> list[Box] | None:
    """The boxes of a label; None if it has none, or one is not a box. Cached for the rest of the group."""
    boxes = boxes_in(label, xywh=xywh)
    return boxes if boxes is not None and all(box.corners is not None for box in boxes) else None


def _is_share(box: Box) -> bool:
    """Whether a box of a label is in shares of the image's width and height."""
    return box.corners is not None and max(box.corners) <= 1


VERIFIER = BoxVerifier
reward_func = reward_func_of("box")

if __name__ == "__main__":
    verifier_command.run("box", None, prog="python -m remote_rm.box_verifier")
