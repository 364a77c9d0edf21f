import pytest

from lmm_r1.cli import SKIPPED_ROWS_CODE, report_skipped
from lmm_r1.data.messages import SkippedRow
from lmm_r1.data.reading import MAX_LISTED


def said(count: int, capsys: pytest.CaptureFixture[str], **settings: str) -> list[str]:
    rows = [
        SkippedRow(index=index, reason=f"rows.jsonl line {index + 1}: no\nimage {index + 1}") for index in range(count)
    ]
    with pytest.raises(SystemExit) as ended:
        report_skipped("lmm-r1 x", rows, **settings)
    assert ended.value.code == SKIPPED_ROWS_CODE == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_every_row_has_a_line(capsys):
    assert said(1, capsys) == [
        "lmm-r1 x: 1 row was left out, and everything else was done:",
        "  rows.jsonl line 1: no image 1",
    ]


def test_many_rows_are_cut_short(capsys):
    lines = said(1500, capsys, listed_in="out.json")
    assert lines[0] == "lmm-r1 x: 1,500 rows were left out, and everything else was done:"
    assert len(lines) == MAX_LISTED + 2
    assert lines[-1] == "  and 1,480 more; out.json lists them all"
