"""Rows as other projects publish them are read without a flag; what cannot be read is refused with the flags that help."""

import io
import json
from pathlib import Path

import datasets
import pytest
from helpers.tables import frozen, table
from PIL import Image

from lmm_r1.config.evaluate import CheckDataConfig
from lmm_r1.config.run_rows import row_reading
from lmm_r1.data.files import read_row_file
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.messages import ImagePart, Row, images_of
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.data.row_parser import tagged_text
from lmm_r1.data.training_rows import check_prompt
from lmm_r1.errors import UserError

ROWS = frozen("data/foreign_rows", "rows")
RED = (255, 0, 0)


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9), RED).save(buffer, format="PNG")
    return buffer.getvalue()


def written(folder: Path, *records: dict) -> str:
    (folder / "red.png").write_bytes(png())
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def only(file: str, reading: RowReading = AS_THEY_ARE, **settings: object) -> tuple[str, Row]:
    read = read_row_file(file, reading=reading, check=check_prompt, **settings)
    (row,) = read.rows.values()
    return read.row_format.name, row


def seen(row: Row) -> dict[str, object]:
    said = {"turns": [[message.role, tagged_text(message)] for message in row.messages], "answer": row.answer}
    response = {} if row.response is None else {"response": tagged_text(row.response)}
    source = {} if row.datasource == "default" else {"datasource": row.datasource}
    return {**said, **response, **source}


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_is_read_by_its_columns(name, tmp_path):
    record, expected = ROWS[name]["record"], json.loads(json.dumps(ROWS[name]["row"]))
    found, row = only(written(tmp_path, record))
    assert (found, seen(row)) == (expected.pop("format"), expected)
    count = sum(text.count("<image>") for _, text in expected["turns"])
    assert [part.source for part in images_of(row.messages)] == [str(tmp_path / "red.png")] * count


@pytest.mark.parametrize("images", ["image", "images"])
@pytest.mark.parametrize("prompt", ["question", "problem", "prompt", "query"])
@pytest.mark.parametrize("answer", ["answer", "solution", "label", "response"])
def test_a_question_with_images_and_an_answer_is_read_under_all_usual_names(images, prompt, answer, tmp_path):
    shown = "red.png" if images == "image" else ["red.png", "red.png"]
    count = 1 if images == "image" else 2
    _, row = only(written(tmp_path, {images: shown, prompt: "Which colour?", answer: "red"}))
    assert seen(row) == {"turns": [["user", "<image>" * count + "Which colour?"]], "answer": "red", "response": "red"}
    _, row = only(written(tmp_path, {prompt: "1+1?", answer: "2"}))
    assert seen(row) == {"turns": [["user", "1+1?"]], "answer": "2", "response": "2"}


@pytest.mark.parametrize("feature", ["image", "images", "struct"])
def test_images_of_hugging_face_in_parquet_are_the_rows_images(feature, tmp_path):
    stored = {"bytes": png(), "path": None}
    column, value = ("image", stored) if feature == "image" else ("images", [stored])
    record = {"prompt": [{"role": "user", "content": "Which colour?"}], column: value, "solution": "red"}
    dataset = datasets.Dataset.from_list([record])
    if feature != "struct":
        kind = datasets.Image() if feature == "image" else datasets.Sequence(datasets.Image())
        dataset = dataset.cast_column(column, kind)
    dataset.to_parquet(tmp_path / "rows.parquet")
    found, row = only(str(tmp_path / "rows.parquet"))
    assert (found, seen(row)["turns"]) == ("flat", [["user", "<image>Which colour?"]])
    (part,) = images_of(row.messages)
    assert isinstance(part, ImagePart)
    assert part.source == png()


def test_a_dotted_name_is_a_field_of_an_object(tmp_path):
    record = {"q": "1+1?", "meta": {"truth": {"value": 2}, "from": "sums"}}
    names = ColumnNames(prompt="q", answer="meta.truth.value", datasource="meta.from")
    assert seen(only(written(tmp_path, record), RowReading(names=names))[1]) == {
        "turns": [["user", "1+1?"]],
        "answer": "2",
        "datasource": "sums",
    }
    # The prompt's column is a usual one, so that only the answer's needs a flag.
    file = written(tmp_path, {"question": "1+1?", "meta": {"truth": 2}})
    found, row = only(file, RowReading(names=ColumnNames(answer="meta.truth")))
    assert (found, row.answer) == ("flat", "2")
    # A column whose name has a dot is found as well.
    row = only(written(tmp_path, {"question": "1+1?", "a.b": 2}), RowReading(names=ColumnNames(answer="a.b")))[1]
    assert row.answer == "2"


def test_a_named_prompt_takes_images_and_answers_under_usual_names(tmp_path):
    record = {"image": "red.png", "ask": "Which colour?", "solution": "<answer>red</answer>"}
    row = only(written(tmp_path, record), RowReading(names=ColumnNames(prompt="ask")))[1]
    assert seen(row) == {
        "turns": [["user", "<image>Which colour?"]],
        "answer": "red",
        "response": "<answer>red</answer>",
    }


@pytest.mark.parametrize(("record", "sentences"), table("data/foreign_rows", "refused"))
def test_a_row_that_cannot_be_read_is_refused_with_what_helps(record, sentences, tmp_path):
    with pytest.raises(UserError) as raised:
        only(written(tmp_path, record))
    for sentence in sentences:
        assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "record", [{"a": 1}, {"question": "1+1?", "answer": " "}, {"question": "a", "query": "b", "answer": 1}]
)
def test_messages_name_the_flags_of_the_command(record, tmp_path):
    file = written(tmp_path, record)
    with pytest.raises(UserError) as raised:
        only(file, row_reading(CheckDataConfig(file=file)))
    assert "--data." not in str(raised.value)
    assert "--label_key" in str(raised.value) or "--input_key" in str(raised.value)
