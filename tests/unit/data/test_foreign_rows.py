"""Rows as other projects publish them are read without a flag; what cannot be read is refused with the flags that help."""

import io
import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
from helpers.tables import frozen, table
from PIL import Image

from lmm_r1.config.file_commands import CheckDataConfig
from lmm_r1.config.run_rows import row_reading
from lmm_r1.data.files import read_row_file
from lmm_r1.data.formats.row_format import ColumnNames
from lmm_r1.data.messages import ImagePart, Row, images_of
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.data.row_parser import tagged_text
from lmm_r1.data.training_rows import check_prompt
from lmm_r1.errors import UserError
from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

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


# A level as gym-sokoban stores it: 0 wall, 1 floor, 2 goal, 3 box on a goal, 4 box, 5 player.
LEVEL = [[0, 0, 0, 0, 0, 0], [0, 5, 4, 2, 1, 0], [0, 1, 3, 1, 1, 0], [0, 0, 0, 0, 0, 0]]


def sokoban_row(folder: Path, numbers: list[list[int]], **columns: object) -> str:
    """Write a row as LMM-R1 publishes them for Sokoban, with its level."""
    np.save(folder / "level_65.npy", np.array(numbers))
    image = {"type": "image", "image": f"file://{folder}/red.png"}
    text = {"type": "text", "text": "The answer is a sequence of Left, Right, Up, Down."}
    turns = [{"role": "system", "content": "Play Sokoban."}, {"role": "user", "content": [image, text]}]
    record = {"message": json.dumps(turns), "question": "level_65", "answer": "", "env_path": "level_65.npy"}
    return written(folder, {**record, **columns})


@pytest.mark.parametrize("number", [int, float])
def test_the_answer_of_a_sokoban_row_is_the_level_in_its_file(number, tmp_path):
    file = sokoban_row(tmp_path, [list(map(number, row)) for row in LEVEL])
    found, row = only(file, answer_required=True)
    assert (found, row.answer) == ("lmm_r1", "######\n#@$.-#\n#-*--#\n######")
    assert [message.role for message in row.messages] == ["system", "user"]
    assert len(images_of(row.messages)) == 1
    verifier = get_verifier("sokoban")
    for moves, score in (("Right", 1.0), ("Down, Right", 0.0), ("Right, Right", 1.0), ("Up, Down", 0.0)):
        judged = verifier.score(Item(prompt="", response=f"<answer>{moves}</answer>", label=row.answer))
        assert (moves, judged.score) == (moves, score)


def test_a_player_on_a_goal_is_stored_like_one_on_the_floor(tmp_path):
    _, row = only(sokoban_row(tmp_path, [[5, 4, 1]]), answer_required=True)
    assert row.answer == "+$-"


@pytest.mark.parametrize(("numbers", "columns", "sentence"), table("data/foreign_rows", "no_levels"))
def test_a_file_that_holds_no_level_is_refused(numbers, columns, sentence, tmp_path):
    (tmp_path / "rows.npy").write_text("not an array")
    with pytest.raises(UserError, match=re.escape(sentence)):
        only(sokoban_row(tmp_path, numbers, **columns), answer_required=True)


def test_a_row_of_a_downloaded_dataset_names_no_level_outside_of_it(tmp_path):
    folder = tmp_path / "rows"
    (folder / ".cache" / "huggingface" / "download").mkdir(parents=True)
    sokoban_row(tmp_path, LEVEL)
    with pytest.raises(UserError, match="rows of a downloaded dataset may name no other files"):
        only(sokoban_row(folder, LEVEL, env_path="../level_65.npy"), answer_required=True)


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
