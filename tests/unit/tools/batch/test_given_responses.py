"""Rows that bring their responses along."""

import json

import pytest
from helpers.tables import table

from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.errors import UserError
from lmm_r1.tools.batch import load_responses

USER = {"role": "user", "content": "1+1?"}


def load(path, **options):
    settings = {"split": "train", "max_rows": None, "reading": AS_THEY_ARE}
    return load_responses(str(path), **{**settings, **options}, count_tokens=lambda text: len(text.split()))


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_an_output_of_a_job_and_a_conversation_bring_responses(tmp_path):
    output = {
        "prompt": [USER],
        "answer": "2",
        "responses": [{"text": "2", "tokens": 5, "finish_reason": "length"}, {"text": "it is 3"}],
    }
    conversation = {"messages": [USER, {"role": "assistant", "content": "it is 2"}]}
    outcomes, skipped = load(write(tmp_path / "rows.jsonl", output, conversation))
    assert skipped == []
    first, second = outcomes
    assert [(item.text, item.num_tokens, item.finish_reason) for item in first.completions] == [
        ("2", 5, "length"),
        ("it is 3", 3, "stop"),
    ]
    assert (first.index, first.row.answer, len(first.row.messages)) == (0, "2", 1)
    assert [(item.text, item.num_tokens) for item in second.completions] == [("it is 2", 3)]
    assert [message.role for message in second.row.messages] == ["user"]


@pytest.mark.parametrize(
    ("record", "reason"), table("batch/given_responses", "a_record_without_a_usable_response_is_left_out")
)
def test_a_record_without_a_usable_response_is_left_out(record, reason, tmp_path):
    good = {"messages": [USER, {"role": "assistant", "content": "2"}]}
    outcomes, [skipped] = load(write(tmp_path / "rows.jsonl", good, record, good))
    assert [outcome.index for outcome in outcomes] == [0, 2]
    assert skipped.index == 1
    assert reason in skipped.reason


def test_a_line_that_cannot_be_read_is_one_row_that_is_left_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", *[{"messages": [USER, {"role": "assistant", "content": "2"}]}] * 2)
    path.write_text(path.read_text().replace("\n", "\n{]\n", 1))
    outcomes, [skipped] = load(path)
    assert [outcome.index for outcome in outcomes] == [0, 2]
    assert "line 2: not valid JSON" in skipped.reason


def test_a_file_without_any_response_is_an_error(tmp_path):
    with pytest.raises(UserError, match="holds no rows with responses; the first: .*nothing to score"):
        load(write(tmp_path / "rows.jsonl", {"messages": [USER]}))


def test_rows_in_a_format_of_a_file_bring_their_responses(tmp_path):
    code = "def read_row(record):\n    asked = {'role': 'user', 'content': record['q']}\n"
    code += "    said = {'role': 'assistant', 'content': record['a']}\n"
    code += "    return {'messages': [asked, said], 'answer': record['a'][-1]}\n"
    (tmp_path / "own.py").write_text(code)
    path = write(tmp_path / "rows.jsonl", {"q": "1+1?", "a": "it is 2"}, {"q": "1+1?"})
    (outcome,), (skipped,) = load(path, reading=RowReading(format=f"{tmp_path}/own.py"))
    assert (outcome.row.answer, outcome.completions[0].text) == ("2", "it is 2")
    assert skipped.reason.endswith(f"it raised KeyError: 'a', at {tmp_path}/own.py, line 3")
