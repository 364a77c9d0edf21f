"""JSON lines: what is appended is whole or not there, and what a killed writer left is cut off."""

import json

import pytest

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import append_json_lines, cut_torn_line, last_line, read_json_lines


def test_what_is_appended_is_read_again_with_its_place_and_bytes(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_lines(path, [{"a": "é \ud800\u2028"}])
    append_json_lines(path, [{"b": 2}, {"c": None}])
    lines = list(read_json_lines(path))
    assert [line.record for line in lines] == [{"a": "é \ud800\u2028"}, {"b": 2}, {"c": None}]
    assert lines[1].place == f"{path}, line 2"
    assert b"".join(line.raw for line in lines) == path.read_bytes()
    assert path.read_bytes()[lines[2].offset :] == lines[2].raw


def test_readable_lines_escape_only_what_has_no_encoding(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_lines(path, [{"a": "é"}, {"a": "é \ud800"}], readable=True)
    assert path.read_bytes() == '{"a": "é"}\n{"a": "\\u00e9 \\ud800"}\n'.encode()


def test_a_failure_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "lines.jsonl"
    append_json_lines(path, [{"a": 1}])
    with pytest.raises(TypeError):
        append_json_lines(path, [{"a": "x" * 100_000}, {"a": object()}])
    assert path.read_bytes() == b'{"a": 1}\n'


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"", b""),
        (b'{"a": 1', b""),
        (b'{"a": 1}', b""),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"a"', b'{"a": 1}\n'),
        (b'{"a": 1}\n' + b"x" * 200_000, b'{"a": 1}\n'),
    ],
)
def test_a_torn_line_is_cut_off(content, kept, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    torn = [line for line in read_json_lines(path) if line.record is None]
    assert len(torn) == (content not in (kept, b'{"a": 1}'))
    cut_torn_line(path)
    assert path.read_bytes() == kept


@pytest.mark.parametrize("last", [b'{"a": 2}\n', b'{"a": 2}', b'{"a": 2}\n\n \n', b"z" * 70_000 + b"\n"])
def test_the_last_line_is_the_last_that_is_not_blank(last, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + last)
    assert last_line(path).strip() == last.strip()
    path.write_bytes(b"\n \n")
    assert last_line(path) == b""


@pytest.mark.parametrize(("line", "complaint"), [("{'a': 1}", "not a JSON object"), ("[1]", "found list")])
def test_a_line_that_is_no_object_is_named(line, complaint, tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(f"{json.dumps({})}\n\n{line}\n")
    with pytest.raises(UserError, match=f"lines.jsonl, line 3: .*{complaint}"):
        list(read_json_lines(path))
