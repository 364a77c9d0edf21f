"""What single formats do with rows unlike their sample, how tab-separated files are read, and rows whose prompt is plain text."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1.cli import arguments
from lmm_r1.config import SFTConfig
from lmm_r1.config.run_rows import row_reading
from lmm_r1.data.files import read_records, read_row_file
from lmm_r1.data.formats import FORMATS, OWN, PROMPT_ROWS
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.messages import ImagePart, Row, TextPart
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.data.row_parser import OWN_NAMES, parse_row
from lmm_r1.errors import UserError


def row_of(record: dict, name: str, *, reading: RowReading = AS_THEY_ARE) -> Row:
    return reading.row(
        record, row_format=FORMATS[name], location="rows line 3", base_dir=Path("/data"), answer_required=True
    )


@pytest.mark.parametrize(
    ("columns", "name"), table("data/row_formats", "columns_tell_one_format_and_this_projects_own_where_none_fits")
)
def test_columns_tell_one_format_and_this_projects_own_where_none_fits(columns, name):
    assert PROMPT_ROWS.find(columns, file="f") is FORMATS[name]
    assert OWN.name == "lmm_r1"


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("<answer> 3 </answer>", "3"),
        ("<think>x</think>\n<answer>\\frac{1}{2}</answer>", "\\frac{1}{2}"),
        ("3", "3"),
        ("<answer>1</answer> or <answer>2</answer>", "<answer>1</answer> or <answer>2</answer>"),
    ],
)
def test_the_gold_of_r1_v_is_what_its_tags_hold(solution, answer):
    row = row_of({"image": "a.png", "problem": "How many?", "solution": solution}, "flat")
    assert row.answer == answer


def test_an_image_of_r1_v_that_has_its_place_stays_there():
    row = row_of({"image": "a.png", "problem": "See <image> here.", "solution": "3"}, "flat")
    assert row.messages[0].parts == (TextPart("See"), ImagePart("/data/a.png"), TextPart("here."))


def test_a_label_of_r1_vlm_may_be_a_list_and_a_conversation_without_a_last_turn_has_no_prefill():
    content = [{"type": "image", "image": "IMAGE_PLACEHOLDER"}, {"type": "text", "text": "Which?"}]
    row = row_of(
        {"messages": [{"role": "user", "content": content}], "image": {"bytes": b"x"}, "label": [1, 7]}, "r1_vlm"
    )
    assert row.messages[0].parts == (ImagePart(b"x"), TextPart("Which?"))
    assert (row.answer, row.prefill, row.response) == ("[1, 7]", "", None)


def test_a_whole_conversation_with_an_image_beside_it_is_no_prefill():
    asked = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which?"}]
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": "A"}]
    row = row_of({"messages": turns, "image": "a.png", "answer": "A"}, "r1_vlm")
    assert [message.role for message in row.messages] == ["user", "assistant"]
    assert (row.prefill, dict(row.columns)) == ("", {"image": "a.png", "answer": "A"})
    turns[0]["content"] = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    row = row_of({"messages": turns, "image": "b.png", "answer": "A"}, "r1_vlm")
    assert (row.messages[0].parts[0], row.prefill) == (ImagePart("/data/b.png"), "")
    turns[0]["content"] = "Which?"
    row = row_of({"messages": turns, "image": "b.png", "answer": "A"}, "r1_vlm")
    assert row.messages[0].parts == (ImagePart("/data/b.png"), TextPart("Which?"))


def test_a_row_without_an_image_goes_on_from_its_last_turn_where_its_format_is_named():
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is"}]
    row = row_of({"messages": turns, "answer": "2"}, "r1_vlm", reading=RowReading(format="r1_vlm"))
    assert ([message.role for message in row.messages], row.prefill) == (["user"], "It is")


def test_the_image_of_a_llava_row_may_be_a_list_and_an_answer_goes_before_the_last_turn():
    record = {
        "image": ["a.png", "b.png"],
        "conversations": [{"from": "human", "value": "<image><image>Same?"}, {"from": "gpt", "value": "Yes, it is."}],
        "answer": "yes",
    }
    row = row_of(record, "sharegpt")
    assert row.messages[0].parts == (ImagePart("/data/a.png"), ImagePart("/data/b.png"), TextPart("Same?"))
    assert row.answer == "yes"
    assert row.response.parts == (TextPart("Yes, it is."),)


@pytest.mark.parametrize(
    ("record", "name", "sentence"), table("data/row_formats", "what_a_format_cannot_take_is_told_with_the_rows_place")
)
def test_what_a_format_cannot_take_is_told_with_the_rows_place(record, name, sentence):
    with pytest.raises(UserError) as raised:
        row_of(record, name)
    assert str(raised.value).startswith("rows line 3: ")
    assert sentence in str(raised.value)


def test_responses_that_a_table_holds_as_json_text_are_messages():
    said = json.dumps([{"role": "assistant", "content": "2"}])
    row = row_of({"prompt": "1+1?", "response": said}, "pairs")
    assert row.response.parts == (TextPart("2"),)
    # Of no turns, it is a text like others.
    row = row_of({"prompt": "A list?", "response": '[{"a": 1}]'}, "pairs")
    assert row.response.parts == (TextPart('[{"a": 1}]'),)


def test_an_alpaca_row_asks_with_its_input_behind_the_instruction():
    row = row_of({"instruction": "Add.", "input": "1, 2", "output": "3"}, "pairs")
    assert row.messages[0].parts == (TextPart("Add.\n1, 2"),)
    assert (row.answer, dict(row.columns)) == ("3", {"input": "1, 2", "output": "3"})


def test_columns_that_the_user_named_go_before_a_formats_own():
    names = ColumnNames(prompt="q", answer="gold", images="pics", datasource="set")
    record = {"q": "<image>?", "gold": 5, "pics": ["a.png"], "set": "geo", "problem": "no", "answer": "no"}
    row = row_of(record, "flat", reading=RowReading(format="flat", names=names))
    assert row.messages[0].parts == (ImagePart("/data/a.png"), TextPart("?"))
    assert (row.answer, row.datasource) == ("5", "geo")
    with pytest.raises(UserError, match='no field "set" .*--data.datasource_key'):
        row_of({"q": "?", "gold": 1}, "flat", reading=RowReading(names=names))


def test_an_image_in_the_messages_may_stand_in_a_column_as_well():
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]
    record = {"message": json.dumps([{"role": "user", "content": content}]), "image": "a.png", "answer": "1"}
    assert row_of(record, "lmm_r1").messages[0].parts[0] == ImagePart("/data/a.png")


def test_tab_separated_values_hold_long_images_quotes_and_lines_of_their_own(tmp_path):
    file = tmp_path / "rows.tsv"
    long = "A" * 200_000
    file.write_text(f'index\timage\tquestion\n1\t{long}\t"He said ""2"",\nand left."\n2\t\tNone?\n')
    assert [(fields, location) for fields, location, _ in read_records(str(file))] == [
        ({"index": "1", "image": long, "question": 'He said "2",\nand left.'}, f"{file} line 2"),
        ({"index": "2", "image": None, "question": "None?"}, f"{file} line 4"),
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a\tb\n1\t2\n3\n", "line 3: 1 values under 2 names"),
        (b'a\tb\n1\t"2\n', "line 2: not tab-separated values"),
        (b"a\tb\n\xff\t2\n", "not UTF-8 text"),
        (b"a\tb\ta\n1\t2\t3\n", "line 1: two columns have the name a; rename one of them"),
        (b'a\t"b\nc"\n1\n', "line 3: 1 values under 2 names"),
    ],
)
def test_a_tab_separated_file_that_is_broken_is_told_with_its_line(content, sentence, tmp_path):
    (tmp_path / "rows.tsv").write_bytes(content)
    with pytest.raises(UserError) as raised:
        list(read_records(str(tmp_path / "rows.tsv")))
    assert sentence in str(raised.value)


def test_rows_of_a_file_may_lack_columns_that_others_tell_the_format_by(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "1"}]},
        {"conversations": [{"from": "human", "value": "2?"}, {"from": "gpt", "value": "2"}], "image": None},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert read_row_file(str(tmp_path / "rows.json")).row_format.name == "sharegpt"


def test_a_trajectory_of_sharegpt_has_images_in_turns_of_the_user_and_of_tools():
    said = [
        {"from": "system", "value": "Call crop."},
        {"from": "human", "value": "<image>Which digit?"},
        {"from": "function_call", "value": "<tool_call>crop</tool_call>"},
        {"from": "observation", "value": "Here:<image>"},
        {"from": "gpt", "value": "Again."},
        {"from": "tool", "value": "<image>"},
        {"from": "gpt", "value": "<answer>4</answer>"},
    ]
    row = row_of({"conversations": said, "images": ["a.png", "b.png", "c.png"]}, "sharegpt")
    assert [message.role for message in row.messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert row.messages[3].parts == (TextPart("Here:"), ImagePart("/data/b.png"))
    assert row.messages[5].parts == (ImagePart("/data/c.png"),)
    assert row.response.parts == (TextPart("<answer>4</answer>"),)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["observation_2.jpg", "original_image.jpg", "observation_1.jpg"], "bca"),
        (["observation_10", "observation_9", "original_image"], "cba"),
        (["original_image_2", "original_image_1", "observation_1"], "bac"),
        # Other names say nothing of an order.
        (["observation_2.jpg", "page.jpg", "observation_1.jpg"], "abc"),
    ],
)
def test_images_of_a_cold_start_stand_in_the_order_of_their_names(names, order):
    said = [{"from": "human", "value": "<image><image><image>?"}, {"from": "gpt", "value": "1"}]
    record = {"conversations": str(said), "images": ["a.png", "b.png", "c.png"], "image_names": names}
    row = row_of(record, "mini_o3_cold_start")
    assert row.messages[0].parts[:3] == tuple(ImagePart(f"/data/{name}.png") for name in order)
    assert row.answer == "1"


def parse(record: dict[str, object], plain_template: str | None = None, **names: str) -> Row:
    given = {"location": "rows.jsonl line 3", "base_dir": Path("/data"), "answer_required": False}
    return parse_row(record, **given, plain_template=plain_template, names=replace(OWN_NAMES, **names))


def texts(row: Row) -> list[tuple[str, str]]:
    return [(message.role, "".join(part.text for part in message.parts)) for message in row.messages]


def test_a_response_in_a_column_of_its_own_is_an_assistants_turn():
    row = parse({"q": "1 + 1?", "a": "2"}, prompt="q", response="a")
    assert texts(row) == [("user", "1 + 1?"), ("assistant", "2")]
    assert not row.plain


def test_messages_may_be_followed_by_messages():
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    row = parse({"q": turns, "a": [{"role": "assistant", "content": "x"}]}, prompt="q", response="a")
    assert texts(row) == [("system", "s"), ("user", "u"), ("assistant", "x")]


def test_a_template_stands_around_a_plain_prompt_alone():
    row = parse({"q": "1 {} 1?", "a": "2"}, prompt="q", response="a", plain_template="User: {}\nAssistant: ")
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
        parse(record, prompt="q", **settings)


OWN_FORMAT = """
def read_row(record, *, start=""):
    return {"messages": start + record["q"], "answer": record["a"], "source_id": record["id"]}

def nothing(record):
    return None
"""


def test_a_format_of_a_file_makes_columns_of_each_record(tmp_path):
    (tmp_path / "own.py").write_text(OWN_FORMAT)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "1+1?", "a": "2", "id": 7}\n{]\n{"q": "2+2?", "id": 8}\n')
    config = arguments.parse(SFTConfig, ["--data.format", f"{tmp_path}/own.py?start=Now "], prog="p", description="d")
    reading = row_reading(config.data, prefix="--data.")
    found = read_row_file(str(rows), reading=reading, bad_rows="skip")
    (row,) = found.rows.values()
    assert (row.messages[0].parts, row.columns) == ((TextPart("Now 1+1?"),), {"answer": "2", "source_id": 7})
    unreadable, raised = (skipped.reason for skipped in found.skipped)
    assert "line 2: not valid JSON" in unreadable
    assert re.search("line 3: --data.format .*: it raised KeyError: 'a', at .*own.py, line 3$", raised)
    with pytest.raises(UserError, match=r"line 1 .*own.py:nothing: return a dict of columns, not NoneType"):
        read_row_file(str(rows), reading=replace(reading, format=f"{tmp_path}/own.py:nothing"))
