"""The whole check of a row file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from statistics import fmean
from typing import Any

from lmm_r1.config.evaluate import CheckDataConfig, Kind
from lmm_r1.config.run_rows import row_reading
from lmm_r1.data.files import RowFile, read_row_file
from lmm_r1.data.messages import Row
from lmm_r1.data.preferences import holds_pairs, read_pairs
from lmm_r1.data.reading import RowReading
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.scoring.sources import SourceJudge, VerifierJudge, make_judge
from lmm_r1.tools.data_check.contents import (
    COMMON,
    KINDS,
    Distribution,
    Finding,
    JudgedView,
    Repeats,
    answer_findings,
    contents,
    image_count,
    is_conversation,
    prompts_of,
    refusals,
    spelled_findings,
    views,
)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many rows are done, and the number of rows."""


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """The contents of a file, and the findings, as `--output` writes them."""

    source: str
    kind: Kind
    """The kind of its rows."""
    counts: Mapping[str, int]
    """For rows with judged responses: the numbers that a training depends on."""
    rows: int
    """All rows of the file."""
    usable: int
    """The valid ones."""
    conversations: int
    """The valid rows that end with a turn to train on."""
    datasources: Mapping[str, int]
    """Rows of each source, the most frequent first."""
    distributions: Sequence[Distribution]
    notes: Sequence[str]
    """What else the user should know, in sentences."""
    findings: Sequence[Finding]
    """By kind as in `KINDS`, then by row."""


def check_rows(config: CheckDataConfig, *, progress: Progress) -> CheckedData:
    """Return the contents and findings of a row file; raises UserError if none of its rows is valid."""
    # An unknown verifier should be an error before minutes are spent on images.
    judge = partial(make_judge, flag="--reward", workers=config.judge_workers, timeout_s=config.judge_timeout)
    judges = {spec: judge(spec) for spec in config.reward}
    reading = row_reading(config)
    names = replace(reading.names, chosen=config.chosen_key, rejected=config.rejected_key)
    hidden: dict[str, str] = {}
    kind, file, rows = _read(
        config, config.file, replace(reading, names=names, hidden_options=hidden), kind=config.kind
    )
    if kind != "prompts" and config.reward != CheckDataConfig.reward:
        raise UserError(
            f"--reward {' '.join(config.reward)}: {config.file} holds rows of the kind {kind}, which have no answers "
            "to judge; leave it out, or name their kind with --kind prompts"
        )
    others = [prompts_of(_read(config, path, reading, kind=None)[2]) for path in config.against]
    findings = []
    for skipped in file.skipped:
        location, what = skipped.finding
        findings.append(Finding(kind="row", index=skipped.index, location=location, what=what))
    for index, row in rows.items():
        if what := hidden.get(row.location, ""):
            findings.append(Finding(kind="options", index=index, location=row.location, what=what))
    readable, sizes, found = _read_images(rows, Repeats(others), progress=progress)
    findings += found
    notes, distributions = [file.summary], []
    if sizes:
        distributions = [
            Distribution.of("images per row", list(map(image_count, rows.values()))),
            Distribution.of("pixels per image", [width * height for width, height in sizes]),
            Distribution.of("longer side over shorter", [max(size) / min(size) for size in sizes]),
        ]
    if kind == "prompts":
        found, told = refusals(readable)
        findings, notes = findings + found, notes + told
    if config.model is None:
        findings.extend(spelled_findings(readable, COMMON))
    else:
        of_lengths, found, note = _lengths(config, readable, progress=progress)
        distributions += of_lengths
        findings, notes = findings + found, notes + note
    if kind == "prompts":
        found, told = _rewarded(config, readable, judges, progress=progress)
        findings, notes = findings + found, notes + told
    margins = [row.judged.margin for row in rows.values() if isinstance(row, JudgedView)]
    counts = {"pairs": len(margins), "pairs with a margin": len(margins) - margins.count(None)} if margins else {}
    return CheckedData(
        source=config.file,
        kind=kind,
        counts=counts,
        rows=len(rows) + len(file.skipped),
        usable=len(rows),
        conversations=sum(row.response is not None or is_conversation(row) for row in rows.values()),
        datasources=dict(Counter(row.datasource for row in rows.values()).most_common()),
        distributions=distributions,
        notes=notes,
        findings=sorted(findings, key=lambda finding: (list(KINDS).index(finding.kind), finding.index)),
    )


def _read_images(
    rows: Mapping[int, Row], repeats: Repeats, *, progress: Progress
) -> tuple[dict[int, Row], list[tuple[int, int]], list[Finding]]:
    """Return the rows whose images and videos can be read, the sizes of images, and the findings on what rows show."""
    readable: dict[int, Row] = {}
    sizes: list[tuple[int, int]] = []
    findings: list[Finding] = []
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
    return readable, sizes, findings


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


def _read(
    config: CheckDataConfig, path: str, reading: RowReading, *, kind: Kind | None
) -> tuple[Kind, RowFile[Any], dict[int, Row]]:
    """Return a file's kind, which None detects from the columns, the file, and its rows as the checks read them."""
    if kind is None:
        kind = "preference" if holds_pairs(path, split=config.split, reading=reading) else "prompts"
    if kind == "prompts":
        file = read_row_file(
            path, split=config.split, max_rows=config.max_rows, reading=reading, answer_required=False, bad_rows="skip"
        )
        return kind, file, file.rows
    found = read_pairs(path, split=config.split, max_rows=config.max_rows, reading=reading, bad_rows="skip")
    return kind, found, views(found.rows)


def _lengths(
    config: CheckDataConfig, rows: Mapping[int, Row], *, progress: Progress
) -> tuple[list[Distribution], list[Finding], list[str]]:
    """Return the lengths of prompts and conversations, the findings, and notes on the model."""
    # This module loads the model's processor, and with it transformers.
    from lmm_r1.tools.data_check.contents import Lengths

    assert config.model is not None, "tokens are counted with a model"
    lengths = Lengths(
        config.model,
        max_len=config.max_len,
        max_new_tokens=config.max_new_tokens,
        trust_remote_code=config.trust_remote_code,
    )
    findings = list(spelled_findings(rows, lengths.control_texts))
    for done, (index, row) in enumerate(rows.items(), start=1):
        finding = lengths.finding(index, row)
        if finding is not None:
            findings.append(finding)
        progress("counting tokens", done, len(rows))
    named = (
        ("tokens per prompt", lengths.prompts, lengths.longest_prompt),
        ("tokens per conversation", lengths.conversations, lengths.max_len),
    )
    found = [Distribution.of(name, values, limit=limit) for name, values, limit in named if values]
    return found, findings, lengths.notes


_THOUGHT = "<think>\nThis is known.\n</think>\n"
FORMS = ("{}", r"\boxed{{{}}}", _THOUGHT + "<answer>{}</answer>", _THOUGHT + r"<answer>\boxed{{{}}}</answer>")
"""How responses may write an answer; which of them the function reads is unknown."""


def function_findings(rows: Mapping[int, Row], spec: str, judge: SourceJudge) -> tuple[list[Finding], str]:
    """Return the findings about the rows that have an answer, and what the function gives in general, as a sentence."""
    findings, best, nothing = [], [], []
    judged = [(index, row) for index, row in rows.items() if row.answer]
    outcomes = judge.outcomes([(row, _responses(row)) for _, row in judged])
    for (index, row), outcome in zip(judged, outcomes, strict=True):
        kind, what = "gold refused", f"{spec} gives a reward that is not finite"
        if isinstance(outcome, UserError):
            what = str(outcome).removeprefix(f"{row.location}: ")
        elif all(isfinite(score.reward) for score in outcome):
            *given, empty = [score.reward for score in outcome]
            best.append(max(given))
            nothing.append(empty)
            if max(given) > empty:
                continue
            kind = "gold wrong"
            what = f"{spec} gives the answer {row.answer!r} itself {max(given):g}, no more than an empty response"
        findings.append(Finding(kind=kind, index=index, location=row.location, what=what))
    if not best:
        return findings, f"{spec} judged no row"
    told = f"{min(best):g} to {max(best):g} (mean {fmean(best):g})"
    return findings, f"{spec} gives the rows' own answers {told}, and empty responses {fmean(nothing):g} on average"


def _responses(row: Row) -> list[Completion]:
    """Return the row's answer in all forms, and an empty response."""
    return [
        Completion(text=text, num_tokens=len(text.split()) + 1, finish_reason="stop")
        for text in (*(form.format(row.answer) for form in FORMS), "")
    ]
