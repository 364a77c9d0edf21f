"""One self-contained HTML page about a row file: figures, findings, and rows with their images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import Message, Row, TextPart, images_of
from lmm_r1.data_check.check import CheckedData
from lmm_r1.data_check.findings import KINDS, Finding
from lmm_r1.data_check.judged import JudgedView, sides_of
from lmm_r1.errors import UserError
from lmm_r1.evaluation.page_images import MIN_BYTES, data_uri
from lmm_r1.evaluation.page_templates import page_templates
from lmm_r1.report.page_text import number, percent

# Findings of one kind that are listed; the JSON has all of them.
LISTED = 100
# Of those, so many are shown with their rows.
SHOWN = 8
SIDE = 200


@dataclass(frozen=True, kw_only=True)
class Card:
    """A row as the page shows it."""

    location: str
    turns: tuple[tuple[str, str], ...]
    """Role and text of each message."""
    answer: str
    images: tuple[str, ...]
    """Data URIs of small copies."""
    unreadable: int
    """Images that cannot be shown."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """The findings of one kind."""

    kind: str
    what: str
    findings: Sequence[Finding]
    listed: Sequence[Finding]
    cards: Sequence[Card]


def build_page(checked: CheckedData, *, thumbnails: int) -> str:
    """Return the page as HTML.

    Args:
        thumbnails: rows shown beside those with findings, spread evenly over the file.
    """
    indices = list(checked.rows)
    step = max(1, -(-len(indices) // thumbnails)) if thumbnails else len(indices) + 1
    shown = indices[::step] if thumbnails else []
    sections = [_section(checked, kind) for kind in KINDS if checked.of_kind(kind)]
    templates = page_templates(Path(__file__).parent, filters={"number": number, "percent": percent})
    return templates.get_template("page.html.j2").render(
        checked=checked,
        sections=sections,
        cards=[_card(checked.rows[index]) for index in shown],
        written_at=datetime.now(tz=timezone.utc),
    )


def _section(checked: CheckedData, kind: str) -> Section:
    findings = checked.of_kind(kind)
    rows = [checked.rows[finding.index] for finding in findings if finding.index in checked.rows]
    return Section(
        kind=kind,
        what=KINDS[kind],
        findings=findings,
        listed=findings[:LISTED],
        cards=[_card(row) for row in rows[:SHOWN]],
    )


def _card(row: Row) -> Card:
    images, unreadable = [], 0
    for part in images_of([*row.messages, *(turn for side in sides_of(row) for turn in side.turns)]):
        try:
            images.append(_small(load_image(part, location=row.location)))
        except UserError:
            # What is wrong with it stands among the findings.
            unreadable += 1
    turns = [(message.role, _text(message)) for message in row.messages]
    turns += [(side.name, _text(message)) for side in sides_of(row) for message in side.turns]
    answer = row.verdict if isinstance(row, JudgedView) else row.answer
    return Card(location=row.location, turns=tuple(turns), answer=answer, images=tuple(images), unreadable=unreadable)


def _text(message: Message) -> str:
    return "\n".join(part.text for part in message.parts if isinstance(part, TextPart))


def _small(image: Image.Image) -> str:
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return data_uri(buffer.getvalue(), max_bytes=MIN_BYTES)
