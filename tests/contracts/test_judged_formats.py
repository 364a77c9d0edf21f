"""What every format of judged responses must keep to: its sample is told by its columns, and becomes the rows that stand here."""

import json
from pathlib import Path

import pytest

from lmm_r1.data.files import read_records
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, TextPart, describe, images_of
from lmm_r1.data.preferences import PREFERENCE, STEPS, UNPAIRED, JudgedRow, RowKind, read_judged_file
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.errors import UserError

pytestmark = pytest.mark.contract

SAMPLES = Path(__file__).resolve().parents[2] / "datasets" / "samples" / "judged"
SEVEN = ("user", "[seven.png]How many dots are there?")
OPENRLHF = RowReading(names=ColumnNames(prompt="context", chosen="better", rejected="worse"))
BY_INPUT = RowReading(names=ColumnNames(prompt="input", answer="value"))


def pair(*turns, chosen, rejected, margin=None, scores=(None, None), datasource="default"):
    return {
        "turns": list(turns),
        "chosen": [("assistant", chosen)],
        "rejected": [("assistant", rejected)],
        "margin": margin,
        "scores": scores,
        "datasource": datasource,
    }


def single(*turns, response, desirable):
    return {"turns": list(turns), "response": [("assistant", response)], "desirable": desirable}


def solved(*turns, steps, labels, datasource="default"):
    return {"turns": list(turns), "steps": steps, "labels": labels, "datasource": datasource}


NINES = ("user", "What is 9 + 9?")
SAMPLE_ROWS = {
    "trl_explicit.jsonl": (
        PREFERENCE,
        "preference",
        AS_THEY_ARE,
        [
            pair(("user", "The dots are"), chosen=" red.", rejected=" green.", margin=1.5),
            pair(SEVEN, chosen="7", rejected="There are many."),
        ],
    ),
    "trl_implicit.jsonl": (
        PREFERENCE,
        "preference",
        AS_THEY_ARE,
        [
            pair(("user", "The dots are"), chosen=" red.", rejected=" green."),
            pair(("system", "You count dots."), SEVEN, chosen="7", rejected="9"),
            pair(NINES, chosen="18", rejected="99"),
        ],
    ),
    "openrlhf.jsonl": (
        PREFERENCE,
        "preference",
        OPENRLHF,
        [
            pair(NINES, chosen="18", rejected="99", margin=2.0),
            pair(("user", "What is 2 + 5?"), chosen="7", rejected="25", margin=0.5),
        ],
    ),
    "ultrafeedback.jsonl": (
        PREFERENCE,
        "preference",
        AS_THEY_ARE,
        [pair(NINES, chosen="It is 18.", rejected="It is 99.", margin=6.5, scores=(9.0, 2.5))],
    ),
    "rlhf_v.jsonl": (
        PREFERENCE,
        "rlhf_v",
        AS_THEY_ARE,
        [
            pair(
                SEVEN,
                chosen="There are seven dots.",
                rejected="There are seven dots and a cat.",
                datasource="counting",
            ),
            pair(
                ("user", "[three.png]Which colour do they have?"),
                chosen="Red.",
                rejected="Red and blue.",
                datasource="colours",
            ),
        ],
    ),
    "rlaif_v.jsonl": (
        PREFERENCE,
        "preference",
        AS_THEY_ARE,
        [pair(("user", "[four.png]How many dots are there?"), chosen="Four.", rejected="Five.")],
    ),
    "vlfeedback.json": (
        PREFERENCE,
        "vlfeedback",
        AS_THEY_ARE,
        [
            # The mean ratings are 4, 5 (of two aspects) and 7/3.
            pair(
                ("user", "[three.png]How many dots are there?"),
                chosen="Three dots.",
                rejected="Nine cats.",
                margin=5 - 7 / 3,
                scores=(5.0, 7 / 3),
            ),
            pair(
                ("user", "[four.png]Which colour do they have?"),
                chosen="Red.",
                rejected="Blue.",
                margin=3.0,
                scores=(4.0, 1.0),
            ),
        ],
    ),
    "llama_factory_ranking.json": (
        PREFERENCE,
        "preference",
        AS_THEY_ARE,
        [
            pair(
                ("system", "You count dots."),
                SEVEN,
                ("assistant", "7"),
                ("user", "And with two more?"),
                chosen="9",
                rejected="5",
            ),
            pair(NINES, chosen="18", rejected="99"),
        ],
    ),
    "llama_factory_alpaca.json": (
        PREFERENCE,
        "preference",
        AS_THEY_ARE,
        [
            pair(
                ("system", "You add."),
                ("user", "Add 1, 1."),
                ("assistant", "2"),
                ("user", "Add the numbers.\n9, 9"),
                chosen="18",
                rejected="99",
            ),
            pair(SEVEN, chosen="7", rejected="8"),
        ],
    ),
    "dpo_pairs.jsonl": (
        PREFERENCE,
        "preference",
        AS_THEY_ARE,
        [
            pair(
                SEVEN,
                chosen="<think>Two rows.</think><answer>7</answer>",
                rejected="<answer>8</answer>",
                margin=1.25,
                scores=(1.5, 0.25),
                datasource="dots",
            )
        ],
    ),
    "trl_unpaired.jsonl": (
        UNPAIRED,
        "unpaired",
        AS_THEY_ARE,
        [
            single(("user", "The dots are"), response=" red.", desirable=True),
            single(NINES, response="99", desirable=False),
        ],
    ),
    "llama_factory_kto.json": (
        UNPAIRED,
        "kto",
        AS_THEY_ARE,
        [single(SEVEN, response="7", desirable=True), single(NINES, response="99", desirable=False)],
    ),
    "llama_factory_kto_alpaca.json": (
        UNPAIRED,
        "kto",
        AS_THEY_ARE,
        [
            single(("user", "Add the numbers.\n9, 9"), response="18", desirable=True),
            single(("user", "Name a colour."), response="Seven.", desirable=False),
        ],
    ),
    "kto_messages.jsonl": (
        UNPAIRED,
        "unpaired",
        AS_THEY_ARE,
        [single(NINES, response="18", desirable=True), single(NINES, response="99", desirable=False)],
    ),
    "trl_stepwise.jsonl": (
        STEPS,
        "stepwise",
        AS_THEY_ARE,
        [
            solved(
                ("user", "Which is larger, 9.8 or 9.11?"),
                steps=("The first parts are equal.", "11 is more than 8, so 9.11 is larger."),
                labels=(1.0, 0.0),
            ),
            solved(SEVEN, steps=("Four above.", "Three below.", "Seven."), labels=(1.0, 1.0, 1.0)),
        ],
    ),
    "math_shepherd.jsonl": (
        STEPS,
        "math_shepherd",
        AS_THEY_ARE,
        [
            solved(
                ("user", "Ann has 3 dots and draws 4 more. How many?"),
                steps=("Step 1: She has 3 + 4 = 7 dots.", "Step 2: So the answer is 8. The answer is: 8"),
                labels=(1.0, 0.0),
                datasource="GSM8K",
            ),
            solved(
                ("user", "What is 2 + 2?"),
                steps=("Step 1: It is 4.", "Step 2: Done. #### 4"),
                labels=(1.0, 1.0),
                datasource="GSM8K",
            ),
        ],
    ),
    "openrlhf_prm.jsonl": (
        STEPS,
        "math_shepherd",
        AS_THEY_ARE,
        [
            solved(("user", "What is 2 + 2?"), steps=("Step 1: It is 5.", "Step 2: So 5."), labels=(0.0, 0.0)),
            solved(SEVEN, steps=("Four and three.", "Seven."), labels=(0.25, 1.0)),
        ],
    ),
}
DETECTED = [name for name, (_, _, reading, _) in SAMPLE_ROWS.items() if reading is AS_THEY_ARE]
# What tells their columns apart from those of other kinds; a chat with a label may be a prompt with its answer.
BY_COLUMNS = [name for name in DETECTED if name != "kto_messages.jsonl"]
MARGINS = {PREFERENCE: "chosen", UNPAIRED: "label", STEPS: "labels"}


def turns(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    def text(message: Message) -> str:
        return "".join(
            part.text if isinstance(part, TextPart) else f"[{Path(describe(part.source)).name}]"
            for part in message.parts
            if isinstance(part, TextPart | ImagePart)
        )

    return [(message.role, text(message)) for message in messages]


def seen(row: JudgedRow, *, like: dict) -> dict:
    """The row in the form of what is expected."""
    found = {"turns": turns(row.messages)}
    for name in set(like) - {"turns"}:
        if name == "scores":
            found[name] = (row.chosen_score, row.rejected_score)
        elif name in ("chosen", "rejected", "response"):
            found[name] = turns(getattr(row, name))
        else:
            found[name] = getattr(row, name)
    return found


@pytest.mark.parametrize("name", SAMPLE_ROWS)
def test_a_sample_becomes_these_rows(name):
    kind, row_format, reading, expected = SAMPLE_ROWS[name]
    file = read_judged_file(str(SAMPLES / name), kind, reading=reading)
    assert file.row_format.name == row_format
    assert file.summary.startswith(f"{SAMPLES / name}: {len(expected)} rows of the kind {kind.name} in the format")
    assert [seen(row, like=like) for row, like in zip(file.rows.values(), expected, strict=True)] == expected
    for row in file.rows.values():
        assert [load_image(image, location="").size for image in images_of(row.messages)] in ([], [(56, 56)])


def test_every_sample_is_expected_to_be_something():
    assert {file.name for file in SAMPLES.iterdir() if file.is_file()} == set(SAMPLE_ROWS)
    formats = {row_format.name for kind in (PREFERENCE, UNPAIRED, STEPS) for row_format in kind.formats.formats}
    assert {row_format for _, row_format, _, _ in SAMPLE_ROWS.values()} == formats


@pytest.mark.parametrize("name", BY_COLUMNS)
def test_the_columns_of_a_sample_tell_one_format_of_one_kind(name):
    columns = {column for fields, _, _ in read_records(str(SAMPLES / name)) for column in fields}
    fitting = [
        (kind.name, row_format.name)
        for kind in (PREFERENCE, UNPAIRED, STEPS)
        for row_format in kind.formats.formats
        if row_format.fits(columns)
    ]
    kind, row_format, _, _ = SAMPLE_ROWS[name]
    assert fitting == [(kind.name, row_format)]


def test_the_columns_of_openrlhf_may_be_named_for_steps_as_well():
    found = read_judged_file(str(SAMPLES / "openrlhf_prm.jsonl"), STEPS).rows
    assert read_judged_file(str(SAMPLES / "openrlhf_prm.jsonl"), STEPS, reading=BY_INPUT).rows == found


@pytest.mark.parametrize("name", SAMPLE_ROWS)
def test_a_row_without_one_of_its_columns_is_named_with_its_place_or_read(name, tmp_path):
    """Columns that a row can do without are those that nothing but the record itself would miss."""
    kind, _, reading, _ = SAMPLE_ROWS[name]
    (tmp_path / "images").symlink_to(SAMPLES / "images")
    records = [fields for fields, _, _ in read_records(str(SAMPLES / name))]
    file = tmp_path / "rows.jsonl"
    refused = set()
    for column in records[0]:
        broken = {key: value for key, value in records[0].items() if key != column}
        file.write_text("".join(json.dumps(record) + "\n" for record in (broken, records[0])))
        if broken_is_refused(file, kind, reading):
            refused.add(column)
    named = reading.names
    needed = {
        PREFERENCE.name: {named.chosen or "chosen", named.rejected or "rejected", "completions", "text"},
        UNPAIRED.name: {"completion", "output", "label", "kto_tag", "conversations"},
        STEPS.name: {"completions", "labels", "label", "value", "input"},
    }[kind.name]
    assert needed & set(records[0]) <= refused


def broken_is_refused(file: Path, kind: RowKind, reading: RowReading) -> bool:
    try:
        read_judged_file(str(file), kind, reading=reading)
        return False
    except UserError as error:
        told = str(error)
    assert told.startswith(f"{file} line 1: ")
    return True
