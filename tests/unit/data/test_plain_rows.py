"""Rows whose prompt is plain text, or whose response stands in a column of its own."""

from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1.data.messages import ImagePart, Row, TextPart
from lmm_r1.data.row_parser import parse_row
from lmm_r1.errors import UserError


def parse(record: dict[str, object], **settings: object) -> Row:
    given = {"location": "rows.jsonl line 3", "base_dir": Path("/data"), "answer_required": False}
    return parse_row(record, **given, **settings)


def texts(row: Row) -> list[tuple[str, str]]:
    return [(message.role, "".join(part.text for part in message.parts)) for message in row.messages]


def test_a_response_in_a_column_of_its_own_is_an_assistants_turn():
    row = parse({"q": "1 + 1?", "a": "2"}, message_key="q", output_key="a")
    assert texts(row) == [("user", "1 + 1?"), ("assistant", "2")]
    assert not row.plain


def test_messages_may_be_followed_by_messages():
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = parse({"q": turns, "a": [{"role": "assistant", "content": "x"}]}, message_key="q", output_key="a")
    assert texts(row) == [("system", "s"), ("user", "u"), ("assistant", "x")]


def test_a_prompt_with_images_may_have_a_response_in_a_column_of_its_own():
    row = parse({"q": "<image>What?", "a": "<image> is a word", "images": ["a.png"]}, message_key="q", output_key="a")
    assert [type(part) for part in row.messages[0].parts] == [ImagePart, TextPart]
    assert row.messages[1].parts == (TextPart("<image> is a word"),)


def test_a_template_stands_around_a_plain_prompt_alone():
    row = parse({"q": "1 {} 1?", "a": "2"}, message_key="q", output_key="a", plain_template="User: {}\nAssistant: ")
    assert texts(row) == [("user", "User: 1 {} 1?\nAssistant: "), ("assistant", "2")]
    assert row.plain
    turns = parse({"messages": [{"role": "user", "content": "u"}]}, plain_template="User: {}")
    assert texts(turns) == [("user", "u")]
    assert not turns.plain


@pytest.mark.parametrize(
    ("record", "settings", "said"), table("data/plain_rows", "what_does_not_fit_is_refused_with_its_line")
)
def test_what_does_not_fit_is_refused_with_its_line(record, settings, said):
    with pytest.raises(UserError, match=f"^rows.jsonl line 3: .*{said}"):
        parse(record, message_key="q", **settings)
