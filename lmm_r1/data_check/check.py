"""The whole check of a row file: what is read, in which order, and what becomes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmm_r1.config.check_data import CheckDataConfig
from lmm_r1.config.rows import row_reading
from lmm_r1.config.verifier_spec import verifier_from
from lmm_r1.data.files import RowFile, SkippedRow, read_good_rows
from lmm_r1.data.messages import Row, images_of
from lmm_r1.data_check.answers import answer_findings
from lmm_r1.data_check.contents import contents, is_conversation
from lmm_r1.data_check.findings import KINDS, Distribution, Finding
from lmm_r1.data_check.repeats import OtherFile, Repeats

Progress = Callable[[str, int, int], None]
"""Is told what is done, how many rows of it are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class CheckedData:
    """What a file holds, and what was found in it."""

    source: str
    rows: Mapping[int, Row]
    """Those that can be used, by their place in the file."""
    count: int
    """All rows of the file."""
    conversations: int
    """Of the rows that can be used, those that end with a turn to learn from."""
    datasources: Mapping[str, int]
    """Rows of each source, the most frequent first."""
    distributions: Sequence[Distribution]
    findings: Sequence[Finding]
    """By kind as in `KINDS`, then by row."""
    notes: Sequence[str]
    """What the user should know beside that, in sentences."""

    def of_kind(self, kind: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]


def check_rows(config: CheckDataConfig, *, progress: Progress) -> CheckedData:
    """Return what there is to say of a row file; raises UserError where none of its rows can be used."""
    # Before minutes are spent on images.
    for spec in config.verifiers:
        verifier_from(spec)
    file = _read(config, config.file)
    rows = file.rows
    others = [OtherFile.of(path, _read(config, path).rows) for path in config.against]
    findings = [_of_skipped(row) for row in file.skipped]
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
    distributions, notes = _image_sizes(rows, sizes), [file.told]
    findings.extend(_without_answer(readable))
    if config.model is not None:
        of_lengths, found, note = _lengths(config, readable, progress=progress)
        distributions += of_lengths
        findings += found
        notes += [note] if note is not None else []
    for spec in config.verifiers:
        progress(f"judging by {spec}", 0, len(readable))
        findings.extend(answer_findings(readable, spec, workers=config.judge_workers, timeout_s=config.judge_timeout))
    kinds = list(KINDS)
    return CheckedData(
        source=config.file,
        rows=rows,
        count=len(rows) + len(file.skipped),
        conversations=sum(map(is_conversation, rows.values())),
        datasources=dict(Counter(row.datasource for row in rows.values()).most_common()),
        distributions=distributions,
        findings=sorted(findings, key=lambda finding: (kinds.index(finding.kind), finding.index)),
        notes=notes,
    )


def _read(config: CheckDataConfig, path: str) -> RowFile:
    return read_good_rows(
        path,
        split=config.split,
        max_rows=config.max_rows,
        reading=row_reading(config),
        answer_required=False,
    )


def _of_skipped(row: SkippedRow) -> Finding:
    # A reason begins with the place.
    location, _, what = row.reason.partition(": ")
    return Finding(kind="row", index=row.index, location=location, what=what)


def _without_answer(rows: Mapping[int, Row]) -> Iterator[Finding]:
    for index, row in rows.items():
        if not row.answer and row.response is None and not is_conversation(row):
            what = "has no answer for RL to reward, and no turn for SFT to learn from"
            yield Finding(kind="answer", index=index, location=row.location, what=what)


def _image_sizes(rows: Mapping[int, Row], sizes: Sequence[tuple[int, int]]) -> list[Distribution]:
    if not sizes:
        return []
    return [
        Distribution.of("images per row", [len(images_of(row.messages)) for row in rows.values()]),
        Distribution.of("pixels per image", [width * height for width, height in sizes]),
        Distribution.of("longer side over shorter", [max(size) / min(size) for size in sizes]),
    ]


def _lengths(
    config: CheckDataConfig, rows: Mapping[int, Row], *, progress: Progress
) -> tuple[list[Distribution], list[Finding], str | None]:
    """Return how long prompts and conversations are, what was found, and a note on the model."""
    # It loads the model's processor, and with it transformers.
    from lmm_r1.data_check.lengths import Budget, Lengths

    assert config.model is not None, "a model whose tokens are counted"
    budget = Budget(max_len=config.max_len, max_new_tokens=config.max_new_tokens)
    lengths = Lengths(config.model, budget, trust_remote_code=config.trust_remote_code)
    findings = []
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
