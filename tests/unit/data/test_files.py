import io
import json

import datasets
import pandas
import pytest
from helpers.conversations import load_rows
from PIL import Image

from lmm_r1.data.files import read_records, read_row_file, write_row_folder
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, TextPart, images_of
from lmm_r1.errors import UserError

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "4"}]
LINES = "\n".join(map(json.dumps, ROWS)) + "\n"


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def records(path, **options):
    return [record for record, _, _ in read_records(str(path), **options)]


def png(colour):
    buffer = io.BytesIO()
    Image.new("RGB", (2, 1), colour).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES),
        ("rows.jsonl", "\ufeff" + LINES.replace("\n", "\r\n\r\n")),
        ("rows.json", json.dumps(ROWS, indent=2)),
        ("rows.json", json.dumps({"version": 1, "data": ROWS})),
        ("rows.json", LINES),
        ("rows.csv", "question,answer\n1+1?,2\n2+2?,4\n"),
    ],
)
def test_text_files_give_their_records(name, content, tmp_path):
    (tmp_path / name).write_bytes(content.encode())
    assert [{key: str(value) for key, value in record.items()} for record in records(tmp_path / name)] == ROWS


def test_comma_separated_answers_are_what_is_written(tmp_path):
    answers = ["007", "3.10", "1e3", "12345678901234567890", "None", "NA", "True"]
    lines = [f'"Say, ""{answer}""\r\nor not",{answer},' for answer in answers]
    (tmp_path / "rows.csv").write_bytes(("\ufeffquestion,answer,\r\n" + "\r\n".join(lines)).encode())
    read = list(read_records(str(tmp_path / "rows.csv")))
    assert [record["answer"] for record, _, _ in read] == answers
    assert read[1][0]["question"] == 'Say, "3.10"\r\nor not'
    assert read[1][1] == f"{tmp_path / 'rows.csv'} line 4"


def test_locations_count_lines_from_one_and_blank_lines_too(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1]))
    assert [(location, base) for _, location, base in read_records(str(file))] == [
        (f"{file} line 1", tmp_path),
        (f"{file} line 3", tmp_path),
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": }\n', "rows.jsonl line 2: not valid JSON: Expecting value at column 7"),
        ("rows.jsonl", b'{"a": 1}\n[1]\n', "rows.jsonl line 2: must be a JSON object, not list"),
        ("rows.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "rows.jsonl line 2: not UTF-8 text"),
        ("rows.json", b'[\n{"a": 1},\n{"a": }]', "rows.json line 3: not valid JSON: Expecting value at column 7"),
        ("rows.json", b'{"a": [], "b": []}', "an object with exactly one list; found 2"),
        ("rows.json", b"3", "rows.json: must be a list of rows, not int"),
        ("rows.json", b"[3]", "rows.json row 1: must be a JSON object, not int"),
        ("rows.parquet", b"PAR1 no", "rows.parquet: not a readable Parquet file"),
        ("rows.txt", b"hello", "unknown kind of row file; known kinds are .jsonl, .json, .parquet, .csv, .tsv"),
    ],
)
def test_a_malformed_file_is_an_error_with_file_and_line(name, content, sentence, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        records(tmp_path / name)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("path", ["missing.jsonl", "/nowhere/rows.parquet", "./nowhere", "/nowhere/folder"])
def test_a_path_that_leads_nowhere_is_an_error(path):
    with pytest.raises(UserError, match="no row file"):
        records(path)


def test_parquet_images_stay_encoded_and_are_read_with_their_rows(tmp_path):
    features = datasets.Features(
        {"problem": datasets.Value("string"), "images": [datasets.Image()], "answer": datasets.Value("int64")}
    )
    rows = {
        "problem": ["<image>Which?", "1+1?"],
        "images": [[{"bytes": png("red"), "path": None}], []],
        "answer": [3, 2],
    }
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    first, second = load_rows(str(tmp_path / "rows.parquet"))
    assert first.messages[0].parts == (ImagePart(png("red")), TextPart("Which?"))
    assert load_image(images_of(first.messages)[0], location="").getpixel((1, 0)) == (255, 0, 0)
    assert (first.answer, second.answer) == ("3", "2")
    assert second.location == f"{tmp_path / 'rows.parquet'} row 2"


def test_saved_datasets_are_read_with_and_without_splits(tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "flat")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(tmp_path / "splits")
    assert records(tmp_path / "flat") == ROWS
    assert records(tmp_path / "splits") == ROWS
    assert records(tmp_path / "splits", split="test") == ROWS[1:]
    with pytest.raises(UserError, match="no split 'dev'; its splits are train, test"):
        records(tmp_path / "splits", split="dev")


def test_a_folder_of_rows_is_read_through_its_row_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text(LINES)
    assert records(tmp_path) == ROWS


def test_a_folder_of_data_files_is_read_as_hugging_face_reads_it(tmp_path):
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "train.jsonl").write_text(LINES)
    assert records(folder) == ROWS


def test_text_and_image_rows_may_be_mixed_and_cut_to_the_first(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(png("red"))
    content = [{"type": "image", "image": "images/a.png"}, {"type": "text", "text": "Which?"}]
    lines = [
        {"messages": [{"role": "user", "content": "1+1?"}], "answer": 2},
        {"message": json.dumps([{"role": "user", "content": content}]), "answer": "A"},
        {"messages": [{"role": "user", "content": "never read"}]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = load_rows(str(tmp_path / "rows.jsonl"), max_rows=2)
    assert [len(images_of(row.messages)) for row in rows] == [0, 1]
    with pytest.raises(UserError, match='rows.jsonl line 3: the answer "answer" is missing'):
        load_rows(str(tmp_path / "rows.jsonl"))


def record(*images, answer="1"):
    content = [{"type": "image", "image": image} for image in images] + [{"type": "text", "text": "é?"}]
    return {"messages": [{"role": "user", "content": content if images else "é?"}], "answer": answer}


def failing_records():
    yield record(Image.new("L", (2, 1)))
    raise UserError("stop")


def test_images_become_files_beside_the_rows_and_the_records_stay_as_they_were(tmp_path):
    red, blue = Image.new("RGB", (2, 1), "red"), Image.new("RGB", (2, 1), "blue")
    given = [record(), record(red, blue)]
    assert write_row_folder(given, output=tmp_path / "out") == 2
    assert given[1]["messages"][0]["content"][0]["image"] is red
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert json.loads(lines[1])["messages"][0]["content"][1] == {"type": "image", "image": "images/000002_2.png"}
    loaded = [load_image(part, location="") for part in images_of(load_rows(str(tmp_path / "out"))[1].messages)]
    assert [image.getpixel((0, 0)) for image in loaded] == [(255, 0, 0), (0, 0, 255)]


def test_a_failure_keeps_the_folder_that_was_to_be_replaced(tmp_path):
    write_row_folder([record(answer="old")], output=tmp_path / "out")
    with pytest.raises(UserError, match="stop"):
        write_row_folder(failing_records(), output=tmp_path / "out", overwrite=True)
    assert load_rows(str(tmp_path / "out"))[0].answer == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_rows_is_replaced_only_when_told_to(tmp_path):
    write_row_folder([record(Image.new("L", (2, 1)), answer="old")], output=tmp_path / "out")
    with pytest.raises(UserError, match="--output .*out is not empty; name another folder or add --overwrite"):
        write_row_folder([record(answer="new")], output=tmp_path / "out")
    write_row_folder([record(answer="new")], output=tmp_path / "out", overwrite=True)
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["rows.jsonl"]
    assert load_rows(str(tmp_path / "out"))[0].answer == "new"


def test_files_of_other_origin_are_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds thesis.tex, which is not part of a row folder"):
        write_row_folder([record()], output=tmp_path, overwrite=True)
    with pytest.raises(UserError, match="is a file; name a folder"):
        write_row_folder([record()], output=tmp_path / "thesis.tex", overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl"])
def test_a_whole_number_stays_whole_where_pandas_made_floats_of_a_column(kind, tmp_path):
    table = pandas.DataFrame(
        {"question": ["3+4?", "?", "10*100?"], "answer": [7, None, 1e3], "exact": ["7.0", "1.50", ""]}
    )
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        table.to_parquet(file)
    else:
        table.to_json(file, orient="records", lines=kind == "jsonl")
    rows = read_row_file(str(file), answer_required=False).rows.values()
    assert [row.answer for row in rows] == ["7", "", "1000"]
    assert [None if row.response is None else row.response.parts[0].text for row in rows] == ["7", None, "1000"]
    # Text and a column without an empty cell are what they are.
    assert [row.columns["exact"] or "" for row in rows] == ["7.0", "1.50", ""]
