"""What every row format must keep to: its sample is told from all others, and becomes the rows that stand here."""

import json
import typing
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmm_r1.data.files import read_records, read_row_file
from lmm_r1.data.formats import FORMATS, FormatName
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, demonstration, describe, images_of
from lmm_r1.data.reading import RowReading
from lmm_r1.data.training_rows import check_prompt
from lmm_r1.errors import UserError

pytestmark = pytest.mark.contract

SAMPLES = Path(__file__).resolve().parents[2] / "datasets" / "samples"
THINK = ("system", "Think inside <think></think>, then answer inside <answer></answer>.")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a row of a sample must be, its images written as [file] or [WxH]."""

    turns: list[tuple[str, str]]
    answer: str
    datasource: str = "default"
    columns: dict[str, object] = field(default_factory=dict)
    response: str | None = None
    rejected: str | None = None
    prefill: str = ""


EXPECTED = {
    "lmm_r1": [
        Expected(
            turns=[THINK, ("user", "[three.png]How many dots are there?")],
            answer="$3$",
            datasource="dots",
            columns={"difficulty": 1},
        ),
        Expected(
            turns=[THINK, ("user", "What is 7 + 5?")], answer="$12$", datasource="sums", columns={"difficulty": 2}
        ),
    ],
    "easyr1": [
        Expected(
            turns=[
                (
                    "user",
                    "[four.png]Here are some dots,[five.png]and here are more. How many are there together?",
                )
            ],
            answer="9",
            columns={"level": "easy"},
            response="9",
        ),
        Expected(turns=[("user", "What is 6 times 4?")], answer="24", columns={"level": "easy"}, response="24"),
    ],
    "r1_v": [
        Expected(
            turns=[("user", "[two.png]How many dots are in the picture?")],
            answer="2",
            columns={"scene": 17},
            response="<answer> 2 </answer>",
        ),
        Expected(
            turns=[("user", "[six.png]How many dots are in the picture?")],
            answer="6",
            columns={"scene": 18},
            response="<think>Two rows of three dots.</think>\n\n<answer> 6 </answer>",
        ),
    ],
    "r1_vlm": [
        Expected(
            turns=[THINK, ("user", f"Look at the picture.[{name}.png]How many dots does it show?")],
            answer=answer,
            datasource="count",
            columns={"seed": seed},
            response="<think> Let me count them one by one.\n",
            prefill="<think> Let me count them one by one.\n",
        )
        for name, answer, seed in (("one", "1", 41), ("seven", "7", 47))
    ],
    "mini_o3": [
        Expected(
            turns=[("user", "[eight.png]How many blue dots can be found in the picture?")],
            answer="8",
            datasource="visual_probe_train",
            columns={"doc_id": "dots_0001"},
            response="8",
        ),
        Expected(
            turns=[("user", "[red.png]Which colour do the dots have?")],
            answer="red",
            datasource="visual_probe_easy",
            columns={"doc_id": "dots_0002"},
            response="red",
        ),
    ],
    "sharegpt": [
        Expected(
            turns=[
                ("system", "You count dots."),
                ("user", "[four.png]How many dots are there?"),
                ("assistant", "4"),
                ("user", "[two.png]And here?"),
            ],
            answer="2",
            columns={"id": "talk-1"},
            response="2",
        ),
        Expected(turns=[("user", "What is half of 18?")], answer="9", columns={"id": "talk-2"}, response="9"),
    ],
    "mini_o3_cold_start": [
        Expected(
            turns=[
                ("system", "Look closely by <grounding>."),
                ("user", "[original.png]How many dots are in the upper row?"),
                (
                    "assistant",
                    "<think>The upper row is small.</think>"
                    '<grounding>{"bbox_2d": [0.0, 0.0, 1.0, 0.5], "source": "original_image"}</grounding>',
                ),
                ("user", "After Action 0, this is Observation 1:[part.png].\nGo on."),
            ],
            answer="2",
            datasource="dots",
            columns={"sample_index": 7, "rollout_index": 0},
            response="<think>It has two.</think><answer> 2 </answer>",
        ),
        Expected(
            turns=[
                ("user", "[original.png]Are all dots alike?"),
                (
                    "assistant",
                    "<think>I look at the left ones.</think>"
                    '<grounding>{"bbox_2d": [0.0, 0.0, 0.5, 1.0], "source": "original_image"}</grounding>',
                ),
                ("user", "This isn't all of it:[part.png]"),
            ],
            answer="yes",
            datasource="dots",
            columns={"sample_index": 8, "rollout_index": 3},
            response="<answer>yes</answer>",
        ),
    ],
    "llava": [
        Expected(
            turns=[("user", "[five.png]How many dots are there?")],
            answer="5",
            columns={"id": "000005"},
            response="5",
        ),
        Expected(turns=[("user", "Which is larger, 3 or 8?")], answer="8", columns={"id": "000006"}, response="8"),
    ],
    "vlmeval": [
        Expected(
            turns=[
                (
                    "user",
                    "[<image 56x56>]All of them are red.\nHow many dots are there?\nA. four\nB. six\nC. eight\n"
                    "Answer with the letter of the right option.",
                )
            ],
            answer="B",
            datasource="counting",
            columns={"index": "0", "split": "dev"},
            response="B",
        ),
        Expected(
            turns=[
                (
                    "user",
                    "[<image 56x56>]Which colour do the dots have?\nA. red\nB. blue\n"
                    "Answer with the letter of the right option.",
                )
            ],
            answer="A",
            datasource="colour",
            columns={"index": "1", "split": "dev"},
            response="A",
        ),
        Expected(
            turns=[("user", "How many more dots does[<image 56x56>]have than[<image 56x56>]?")],
            answer="2",
            datasource="counting",
            columns={"index": "2", "split": "dev"},
            response="2",
        ),
    ],
    "pairs": [
        Expected(
            turns=[("user", "[three.png]How many dots are there?")],
            answer="3",
            columns={"writer": "a"},
            response="<think>Three in a row.</think><answer>3</answer>",
        ),
        Expected(turns=[("user", "What is 15 - 6?")], answer="9", columns={"writer": "b"}, response="9"),
    ],
    "preference": [
        Expected(
            turns=[("user", "[seven.png]How many dots are there?")],
            answer="7",
            columns={"rater": 3},
            response="7",
            rejected="There are many dots.",
        ),
        Expected(turns=[("user", "What is 9 + 9?")], answer="18", columns={"rater": 4}, response="18", rejected="99"),
    ],
}
# What each sample's first row lacks for its format to be kept to, and what is said of it.
BROKEN = {
    "lmm_r1": ("message", 'no field "message" or "messages"'),
    "easyr1": ("problem", 'no field "problem"'),
    "r1_v": ("problem", 'no field "problem"'),
    "r1_vlm": ("image", "than the 0 images"),
    "mini_o3": ("images", "than the 0 images"),
    "sharegpt": ("images", "than the 0 images"),
    "mini_o3_cold_start": ("image_names", '"image_names" has 0 names for 2 images'),
    "llava": ("conversations", 'no field "conversations"'),
    "vlmeval": ("question", 'no field "question"'),
    "pairs": ("response", 'the field "response" is empty'),
    "preference": ("rejected", 'the field "rejected" is empty'),
}


def sample_of(name: str) -> Path:
    """The one row file of a format's sample."""
    (file,) = (SAMPLES / name).glob("rows.*")
    return file


def written(message: Message | None) -> str | None:
    if message is None:
        return None
    return "".join(
        part.text if isinstance(part, TextPart) else f"[{Path(describe(part.source)).name}]"
        for part in message.parts
        if isinstance(part, TextPart | ImagePart)
    )


def seen(row: Row, *, columns: Collection[str]) -> Expected:
    """Return what a row is, of its columns these."""
    return Expected(
        turns=[(message.role, str(written(message))) for message in row.messages],
        answer=row.answer,
        datasource=row.datasource,
        columns={name: row.columns[name] for name in columns},
        response=written(row.response),
        rejected=written(row.rejected),
        prefill=row.prefill,
    )


def test_every_format_has_its_name_its_sample_and_what_becomes_of_it():
    assert set(typing.get_args(FormatName)) == set(FORMATS) == set(EXPECTED) == set(BROKEN)
    assert all(sample_of(name).is_file() for name in FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_is_told_by_its_columns_and_fits_no_other_format(name):
    columns = {column for fields, _, _ in read_records(str(sample_of(name))) for column in fields}
    assert [other for other in FORMATS if FORMATS[other].fits(columns)] == [name]
    read = read_row_file(str(sample_of(name)))
    assert read.row_format is FORMATS[name]
    assert f"{len(EXPECTED[name])} rows in the format {name} ({FORMATS[name].source})" in read.summary


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_becomes_these_rows_found_or_named(name):
    read = read_row_file(str(sample_of(name)))
    pairs = zip(read.rows.values(), EXPECTED[name], strict=True)
    assert [seen(row, columns=one.columns) for row, one in pairs] == EXPECTED[name]
    assert read_row_file(str(sample_of(name)), reading=RowReading(format=name)).rows == read.rows
    for row in read.rows.values():
        for image in images_of(row.messages):
            assert load_image(image, location=row.location).size == (56, 56)


PROMPT_COLUMNS = ("message", "messages", "problem", "conversations", "question", "prompt", "instruction")


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_keeps_every_column_but_those_of_the_prompt_and_its_media(name):
    records = [fields for fields, _, _ in read_records(str(sample_of(name)))]
    for record, row in zip(records, read_row_file(str(sample_of(name))).rows.values(), strict=True):
        shown = {*PROMPT_COLUMNS, "image", "images", "videos"}
        assert dict(row.columns) == {column: value for column, value in record.items() if column not in shown}


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_can_be_asked_and_answered(name):
    rows = list(read_row_file(str(sample_of(name))).rows.values())
    for row in rows:
        check_prompt(row)
    file = SAMPLES / "lmm_r1" / "solved.jsonl" if name == "lmm_r1" else sample_of(name)
    shown = [demonstration(row) for row in read_row_file(str(file), answer_required=False).rows.values()]
    assert all(row.messages[-1].role == "assistant" for row in shown)
    assert [row.messages[:-1] for row in shown] == [row.messages for row in rows]


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_without_what_its_format_needs_is_named_with_its_place(name, tmp_path):
    column, sentence = BROKEN[name]
    records = [fields for fields, _, _ in read_records(str(sample_of(name)))]
    images = SAMPLES / name
    lines = [
        records[1],
        {key: value for key, value in records[0].items() if key != column},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError) as raised:
        read_row_file(str(tmp_path / "rows.jsonl"), reading=RowReading(format=name, image_dir=images))
    assert str(raised.value).startswith(f"{tmp_path}/rows.jsonl line ")
    assert sentence in str(raised.value)


def test_columns_that_fit_two_formats_are_an_error_that_names_both(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "1+1?", "answer": "2", "prompt": "2+2?", "response": "4"}')
    with pytest.raises(UserError) as raised:
        read_row_file(str(file))
    assert str(raised.value) == (
        f"{file}: its columns fit the row formats easyr1 (problem, answer) and pairs (prompt or question or query or "
        "instruction, response or completion or output); choose one with --data.format"
    )
    assert read_row_file(str(file), reading=RowReading(format="pairs")).rows[0].answer == "2"
