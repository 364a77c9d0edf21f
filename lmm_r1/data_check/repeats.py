"""Rows that are there twice, in one file or in two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lmm_r1.data.messages import Row
from lmm_r1.data_check.contents import RowContent, contents
from lmm_r1.data_check.findings import Finding
from lmm_r1.data_check.judged import sides_of


@dataclass(frozen=True, kw_only=True)
class OtherFile:
    """What the rows of another file ask."""

    path: str
    questions: Mapping[bytes, str]
    """From what is asked to the place of the first row that asks it."""
    openings: Mapping[bytes, str]
    """The same by what is asked first of images."""

    @classmethod
    def of(cls, path: str, rows: Mapping[int, Row]) -> OtherFile:
        """Return it; rows whose images cannot be read are left out."""
        questions: dict[bytes, str] = {}
        openings: dict[bytes, str] = {}
        for index, content in contents(rows):
            if content.error is None:
                questions.setdefault(content.question, rows[index].location)
                if content.opening is not None:
                    openings.setdefault(content.opening, rows[index].location)
        return cls(path=path, questions=questions, openings=openings)

    def place_of(self, content: RowContent) -> str | None:
        """Return the place of a row that asks the same, None where there is none."""
        place = self.questions.get(content.question)
        if place is None and content.opening is not None:
            place = self.openings.get(content.opening)
        return place


class Repeats:
    """Finds rows that ask what an earlier row of the file asks, or a row of another file."""

    def __init__(self, others: tuple[OtherFile, ...] = ()) -> None:
        self._others = others
        self._seen: dict[bytes, tuple[str, str]] = {}

    def findings(self, index: int, row: Row, content: RowContent) -> Iterator[Finding]:
        """Yield what there is to say of the file's next row, whose images can be read."""
        for other in self._others:
            place = other.place_of(content)
            if place is not None:
                yield Finding(kind="leak", index=index, location=row.location, what=f"asks what {place} asks")
        first, answer = self._seen.setdefault(content.repeated, (row.location, content.answer))
        if first == row.location:
            return
        if answer.strip() == content.answer.strip():
            yield Finding(kind="duplicate", index=index, location=row.location, what=f"is the same as {first}")
        else:
            asked = f"judges the responses of {first}" if sides_of(row) else f"asks what {first} asks"
            had = "verdict" if sides_of(row) else "answer"
            what = f"{asked}, and has the {had} {_short(content.answer)} where that has {_short(answer)}"
            yield Finding(kind="contradiction", index=index, location=row.location, what=what)


def _short(answer: str) -> str:
    return repr(answer if len(answer) <= 60 else f"{answer[:57]}...")
