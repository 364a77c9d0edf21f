"""The whole check of a row file, and the page with its findings."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from PIL import Image

from lmm_r1.config.file_commands import CheckDataConfig, Kind
from lmm_r1.config.run_rows import row_reading
from lmm_r1.data.files import read_row_file
from lmm_r1.data.images import load_image
from lmm_r1.data.known_keys import Overlooked
from lmm_r1.data.messages import Message, Row, SkippedRow, TextPart, images_of
from lmm_r1.data.preferences import holds_pairs, read_pairs
from lmm_r1.data.reading import RowReading
from lmm_r1.data_check.contents import (
    COMMON,
    KINDS,
    Distribution,
    Finding,
    JudgedView,
    OtherFile,
    Repeats,
    answer_findings,
    contents,
    counts,
    is_conversation,
    refusals,
    sides_of,
    spelled_findings,
    views,
)
from lmm_r1.data_check.reward_functions import function_findings
from lmm_r1.errors import UserError
from lmm_r1.evaluation.page_parts import MIN_BYTES, data_uri, number, page_templates, percent
from lmm_r1.scoring.response_scores import VerifierJudge
from lmm_r1.scoring.sources import SourceJudge, make_judge

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many rows are done, and the number of rows."""


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """The contents of a file, and the findings."""

    source: str
    kind: Kind
    """The kind of its rows."""
    counts: Mapping[str, int]
    """For rows with judged responses: the numbers that a training depends on."""
    rows: Mapping[int, Row]
    """The valid rows, by their index in the file."""
    count: int
    """All rows of the file."""
    conversations: int
    """The valid rows that end with a turn to train on."""
    datasources: Mapping[str, int]
    """Rows of each source, the most frequent first."""
    distributions: Sequence[Distribution]
    findings: Sequence[Finding]
    """By kind as in `KINDS`, then by row."""
    notes: Sequence[str]
    """What else the user should know, in sentences."""

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]


def check_rows(config: CheckDataConfig, *, progress: Progress) -> CheckedData:
    """Return the contents and findings of a row file; raises UserError if none of its rows is valid."""
    # An unknown verifier should be an error before minutes are spent on images.
    judge = partial(make_judge, flag="--reward", workers=config.judge_workers, timeout_s=config.judge_timeout)
    judges = {spec: judge(spec) for spec in config.reward}
    reading = row_reading(config)
    named = replace(reading.names, chosen=config.chosen_key, rejected=config.rejected_key)
    overlooked = Overlooked()
    file = _read(config, config.file, replace(reading, names=named, overlooked=overlooked), kind=config.kind)
    _check_flags(config, file.kind)
    rows = file.rows
    others = [OtherFile.of(path, _read(config, path, reading, kind=None).rows) for path in config.against]
    findings = [_skipped_finding(row) for row in file.skipped]
    findings += [
        Finding(kind="options", index=index, location=row.location, what=overlooked.options[row.location])
        for index, row in rows.items()
        if row.location in overlooked.options
    ]
    sizes: list[tuple[int, int]] = []
    readable: dict[int, Row] = {}
    repeats = Repeats(tuple(others))
    for done, (index, content) in enumerate(contents(rows), start=1):
        row = rows[index]
        sizes.extend(content.sizes)
        if content.error is not None:
            what = content.error.removeprefix(f"{row.location}: ")
            findings.append(Finding(kind="image", index=index, location=row.location, what=what))
        else:
            readable[index] = row
            findings.extend(repeats.findings(index, row, content))
        progress("reading", done, len(rows))
    distributions, notes = _image_sizes(rows, sizes), [file.summary, *overlooked.notes]
    judged = file.kind != "prompts"
    if not judged:
        found, told = refusals(readable)
        findings, notes = findings + found, notes + told
    if config.model is None:
        findings.extend(spelled_findings(readable, COMMON))
    else:
        of_lengths, found, note = _lengths(config, readable, progress=progress)
        distributions += of_lengths
        findings += found
        notes += [note] if note is not None else []
    if not judged:
        found, told = _rewarded(config, readable, judges, progress=progress)
        findings, notes = findings + found, notes + told
    kinds = list(KINDS)
    return CheckedData(
        source=config.file,
        kind=file.kind,
        counts=file.counts,
        rows=rows,
        count=len(rows) + len(file.skipped),
        conversations=sum(row.response is not None or is_conversation(row) for row in rows.values()),
        datasources=dict(Counter(row.datasource for row in rows.values()).most_common()),
        distributions=distributions,
        findings=sorted(findings, key=lambda finding: (kinds.index(finding.kind), finding.index)),
        notes=notes,
    )


def _rewarded(
    config: CheckDataConfig,
    rows: Mapping[int, Row],
    judges: Mapping[str, VerifierJudge | SourceJudge],
    *,
    progress: Progress,
) -> tuple[list[Finding], list[str]]:
    """Return the findings and notes of every `--reward` on the rows' own answers."""
    findings: list[Finding] = []
    notes = []
    for spec, judge in judges.items():
        progress(f"judging by {spec}", 0, len(rows))
        if isinstance(judge, VerifierJudge):
            findings += answer_findings(rows, judge, timeout_s=config.judge_timeout)
            continue
        with judge:
            found, note = function_findings(rows, spec, judge)
        findings += found
        notes.append(note)
    return findings, notes


@dataclass(frozen=True, kw_only=True)
class _File:
    rows: dict[int, Row]
    skipped: Sequence[SkippedRow]
    kind: Kind
    counts: Mapping[str, int]
    summary: str


def _read(config: CheckDataConfig, path: str, reading: RowReading, *, kind: Kind | None) -> _File:
    """Return the rows of a file, including the skipped ones; None detects the kind from the columns."""
    if kind is None:
        kind = "preference" if holds_pairs(path, split=config.split, reading=reading) else "prompts"
    if kind == "prompts":
        file = read_row_file(
            path, split=config.split, max_rows=config.max_rows, reading=reading, answer_required=False, bad_rows="skip"
        )
        return _File(rows=file.rows, skipped=file.skipped, kind=kind, counts={}, summary=file.summary)
    found = read_pairs(path, split=config.split, max_rows=config.max_rows, reading=reading, bad_rows="skip")
    return _File(
        rows=views(found.rows), skipped=found.skipped, kind=kind, counts=counts(found.rows), summary=found.summary
    )


def _skipped_finding(row: SkippedRow) -> Finding:
    location, what = row.finding
    return Finding(kind="row", index=row.index, location=location, what=what)


def _image_sizes(rows: Mapping[int, Row], sizes: Sequence[tuple[int, int]]) -> list[Distribution]:
    if not sizes:
        return []
    return [
        Distribution.of("images per row", [_image_count(row) for row in rows.values()]),
        Distribution.of("pixels per image", [width * height for width, height in sizes]),
        Distribution.of("longer side over shorter", [max(size) / min(size) for size in sizes]),
    ]


def _image_count(row: Row) -> int:
    return len(images_of(row.messages)) + sum(len(images_of(side.turns)) for side in sides_of(row))


def _check_flags(config: CheckDataConfig, kind: Kind) -> None:
    if kind != "prompts" and config.reward != CheckDataConfig.reward:
        raise UserError(
            f"--reward {' '.join(config.reward)}: {config.file} holds rows of the kind {kind}, which have no answers to "
            "judge; leave it out, or name their kind with --kind prompts"
        )


def _lengths(
    config: CheckDataConfig, rows: Mapping[int, Row], *, progress: Progress
) -> tuple[list[Distribution], list[Finding], str | None]:
    """Return the lengths of prompts and conversations, the findings, and a note on the model."""
    # This module loads the model's processor, and with it transformers.
    from lmm_r1.data_check.contents import Lengths, TokenBudget

    assert config.model is not None, "tokens are counted with a model"
    budget = TokenBudget(max_len=config.max_len, max_new_tokens=config.max_new_tokens)
    lengths = Lengths(config.model, budget, trust_remote_code=config.trust_remote_code)
    findings = list(spelled_findings(rows, lengths.control_texts))
    for done, (index, row) in enumerate(rows.items(), start=1):
        finding = lengths.finding(index, row)
        if finding is not None:
            findings.append(finding)
        progress("counting tokens", done, len(rows))
    named = (
        ("tokens per prompt", lengths.prompts, budget.prompt),
        ("tokens per conversation", lengths.conversations, budget.max_len),
    )
    found = [Distribution.of(name, values, limit=limit) for name, values, limit in named if values]
    return found, findings, lengths.too_long_for_model


# The page lists this many findings per kind; the JSON has all of them.
LISTED = 100
# The page shows this many rows with findings per kind.
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
        thumbnails: how many rows to show in addition to those with findings, spread evenly over the file.
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
            images.append(_small(load_image(part, location=row.location, side=SIDE)))
        except UserError:
            # The findings list the reason.
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
