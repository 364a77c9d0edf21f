"""Judges only the format: exactly one think block, then exactly one answer block."""

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from remote_rm.answer_verifier import finite_number
from remote_rm.responses import format_score
from remote_rm.verifier import Item, Score

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class FormatVerifier:
    """The format of a response, whatever its label is; an empty label is refused."""

    name: ClassVar[str] = "format"

    weight: float = 1.0

    def check_label(self, label: str) -> None:
        """Raise a ValueError for a label of white space only."""
        if not label.strip():
            raise ValueError(
                f"the label is empty ({label!r}); the format is judged without it, but an empty one means that the "
                "column of the answers was not found: name it (OpenRLHF's --data.label_key) or fill in any text"
            )

    def quick_score(self, item: Item) -> Score:
        return self.score(item)

    def score(self, item: Item) -> Score:
        self.check_label(item.label)
        return self.failed_score(item)

    def failed_score(self, item: Item) -> Score:
        """The score, which needs no label."""
        kept = format_score(item.response, prompt=item.prompt)
        return Score(reward=self.weight * kept, score=kept, parts={"format": kept})

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--format-weight", type=finite_number, default=1.0, help="reward for the format")

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Self":
        return cls(weight=args.format_weight)
