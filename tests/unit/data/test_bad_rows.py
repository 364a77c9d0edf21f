"""Records that no row can be made of: all are told, a file is refused or read without them, and a training keeps their list."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import QUESTION, TWO_ANSWERS, write_rows
from helpers.tables import frozen

from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import SkippedRow
from lmm_r1.data.reading import MAX_LISTED, good_rows, reasons
from lmm_r1.data.training_rows import KeptRows, LeftOutRow, check_prompt, with_left_out
from lmm_r1.errors import ListedError, UserError
from lmm_r1.records.run_folder import RunFolder

FLAG = "--data.bad_rows skip"


def made(record):
    """The record's value; one that is odd cannot be used."""
    if record[0]["value"] % 2:
        raise UserError(f"{record[1]}: {record[0]['value']} is odd")
    return record[0]["value"]


def records(*values):
    return [({"value": value}, f"rows line {place}", Path()) for place, value in enumerate(values, start=1)]


def test_good_rows_keep_their_places_and_bad_ones_their_reasons():
    rows, skipped = good_rows("rows", records(2, 3, 4), made, bad_rows="skip", skip_by=None)
    assert rows == {0: 2, 2: 4}
    assert skipped == [SkippedRow(index=1, reason="rows line 2: 3 is odd")]


@pytest.mark.parametrize(
    ("values", "skip_by", "told"), frozen("data/bad_rows", "a_file_is_refused_with_all_that_is_wrong_in_it")
)
def test_a_file_is_refused_with_all_that_is_wrong_in_it(values, skip_by, told):
    with pytest.raises(UserError) as refused:
        good_rows("rows", records(*values), made, bad_rows="stop", skip_by=skip_by)
    if isinstance(refused.value, ListedError):
        assert refused.value.sentence == told
        assert refused.value.lines == ["rows line 1: 1 is odd", "rows line 3: 3 is odd"]
    else:
        assert str(refused.value) == told


def test_beyond_a_limit_bad_rows_are_counted():
    many = [SkippedRow(index=place, reason=f"line {place}:\n broken {place}") for place in range(MAX_LISTED + 1_200)]
    lines = reasons(many)
    assert lines[:2] == ["line 0: broken 0", "line 1: broken 1"]
    assert (len(lines), lines[-1]) == (MAX_LISTED + 1, "and 1,200 more")


def test_a_finding_is_listed_once_with_its_count():
    said = {0: "no image", 2: "no\nimage", 3: "no answer: it is empty", 5: "no image"}
    skipped = [SkippedRow(index=index, reason=f"a line {index + 1}: {what}") for index, what in said.items()]
    lines = ["a line 1 (3 rows, this is the first): no image", "a line 4: no answer: it is empty"]
    assert reasons(skipped) == lines
    assert reasons(skipped, listed_in="left_out.jsonl") == [lines[0], f"{lines[1]}; left_out.jsonl lists them all"]


def test_a_training_is_refused_with_each_finding_once(tmp_path):
    file = write_rows(tmp_path, *[{"problem": "1+1?", "answer": {"value": 2}}] * 30, {"problem": "1+1?", "answer": ""})
    with pytest.raises(ListedError) as refused:
        read_row_file(str(file), skip_by=FLAG)
    assert [line.removeprefix(f"{file} ") for line in refused.value.lines] == [
        'line 1 (30 rows, this is the first): the answer "answer" must be text or a number, not dict',
        'line 31: the answer "answer" is empty; fill it in, or name another field with --data.label_key',
    ]


def test_a_file_without_a_good_row_is_refused_whatever_is_asked():
    with pytest.raises(UserError, match="^rows: none of its 2 rows can be used; the first: rows line 1: 1 is odd$"):
        good_rows("rows", records(1, 3), made, bad_rows="skip", skip_by=FLAG)
    with pytest.raises(UserError, match="^rows holds no rows"):
        good_rows("rows", [], made, bad_rows="skip", skip_by=FLAG)


def test_lines_that_are_no_records_are_bad_rows_like_others(tmp_path):
    path = write_rows(tmp_path, "{]", "", "3", QUESTION, TWO_ANSWERS)
    path.write_bytes(path.read_bytes() + b'{"messages": "\xff"}\n')
    file = read_row_file(str(path), bad_rows="skip", check=check_prompt)
    assert list(file.rows) == [2]
    assert [(row.index, row.reason.partition(": ")[2].split(" at ")[0].split(";")[0]) for row in file.skipped] == [
        (0, "not valid JSON: Expecting property name enclosed in double quotes"),
        (1, "must be a JSON object, not int"),
        (3, "a prompt for RL must not end with one of several assistant turns"),
        (4, "not UTF-8 text ('utf-8' codec can't decode byte 0xff in position 14: invalid start byte)"),
    ]
    assert with_left_out(file.summary, file.skipped).endswith(
        f"; 4 rows that cannot be used are left out, the first: {' '.join(file.skipped[0].reason.split())}"
    )


def test_a_table_with_lines_of_other_lengths_is_read_to_its_end(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("problem,answer\none,1\ntwo\nthree,3\n")
    file = read_row_file(str(path), bad_rows="skip")
    assert list(file.rows) == [0, 2]
    assert file.skipped[0].reason == f"{path} line 3: 1 values under 2 names; correct the line"


def test_a_run_folder_keeps_the_list_of_what_its_rows_lack(tmp_path):
    skipped = [SkippedRow(index=1, reason="a line 2: broken"), SkippedRow(index=4, reason="a line 5: broken")]
    row = SimpleNamespace(location="a line 1")
    kept = KeptRows.of("a.jsonl", {0: row}, skipped)
    assert (list(kept), kept.left_out[0]) == ([row], LeftOutRow(dataset="a.jsonl", index=1, reason="a line 2: broken"))
    folder = RunFolder(path=tmp_path, name="sft", kind="sft")
    folder.left_out([])
    assert list(tmp_path.iterdir()) == []
    folder.left_out(kept.left_out)
    written = tmp_path / "left_out_rows.jsonl"
    assert [json.loads(line)["index"] for line in written.read_text().splitlines()] == [1, 4]
    # What --ckpt.overwrite deletes.
    assert RunFolder.files(tmp_path) == [written]


def test_rows_that_are_found_in_a_run_are_listed_once_and_stay_listed_when_it_is_resumed(tmp_path):
    rows = {index: SimpleNamespace(location=f"a line {index + 1}") for index in (0, 10)}
    found_before = [SkippedRow(index=1, reason="a line 2: no JSON")]
    kept = KeptRows.of("a.jsonl", rows, found_before)
    folder = RunFolder(path=tmp_path, name="sft", kind="sft", origins=kept.origins)
    folder.left_out(kept.left_out)
    assert [folder.leave_out(reason) for reason in ["a line 11: broken", "a line 11: broken"]] == [True, False]
    folder.left_out(kept.left_out)
    lines = (tmp_path / "left_out_rows.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line).values()) for line in lines] == [
        ("a.jsonl", 1, "a line 2: no JSON"),
        ("a.jsonl", 10, "a line 11: broken"),
    ]
