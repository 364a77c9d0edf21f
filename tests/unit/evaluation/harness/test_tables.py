import csv
import json
from pathlib import Path

import openpyxl
import pytest

from lmm_r1.errors import UserError
from lmm_r1.evaluation.predictions import read_table, write_table

# What tables are known to spoil: quotes, line breaks, a formula, an error value, numbers, words that pandas takes for nothing.
TEXTS = ['say "x"\tand\n\nthen', "=1+1", "#N/A", "007", "None", "NA", "", " 3.50 ", "\\frac{1}{2} ü 答案"]


@pytest.mark.parametrize("suffix", [".tsv", ".xlsx", ".json"])
def test_what_is_written_is_read_again_cell_by_cell(suffix, tmp_path):
    rows = [{"index": place, "prediction": text, "answer": "A"} for place, text in enumerate(TEXTS)]
    path = tmp_path / f"predictions{suffix}"
    write_table(path, rows)
    found = read_table(path)
    assert [str(row["index"]) for row in found] == [str(place) for place in range(len(TEXTS))]
    # An empty cell of a sheet is none at all.
    assert [row["prediction"] or "" for row in found] == TEXTS
    assert list(found[0]) == ["index", "prediction", "answer"]


def test_a_tsv_has_every_cell_in_quotes(tmp_path):
    write_table(tmp_path / "a.tsv", [{"index": 0, "prediction": 'a "b"'}])
    assert (tmp_path / "a.tsv").read_bytes() == b'"index"\t"prediction"\n"0"\t"a ""b"""\n'


def test_what_an_xlsx_file_would_lose_is_refused_with_the_form_that_keeps_it(tmp_path):
    path = tmp_path / "a.xlsx"
    write_table(path, [{"prediction": "x" * 32_767}])
    assert read_table(path)[0]["prediction"] == "x" * 32_767
    with pytest.raises(UserError, match=r"a.xlsx row 2: prediction has 32,768 characters, .*; write .tsv or .json"):
        write_table(path, [{"prediction": "x"}, {"prediction": "x" * 32_768}])
    for text in ("\x0b", "a\rb", "_x000D_", "\ud800"):
        with pytest.raises(
            UserError, match="a.xlsx row 1: prediction holds .*, which this format cannot; write .tsv or"
        ):
            write_table(path, [{"prediction": text}])
    with pytest.raises(UserError, match="a.tsv row 1: prediction holds .*; write .json"):
        write_table(tmp_path / "a.tsv", [{"prediction": "\ud800"}])


def test_a_formula_that_another_program_made_of_a_prediction_is_read_as_its_text(tmp_path):
    book = openpyxl.Workbook()
    book.active.append(["index", "prediction"])
    book.active.append([3, "=2+2"])
    book.save(tmp_path / "a.xlsx")
    assert read_table(tmp_path / "a.xlsx") == [{"index": 3, "prediction": "=2+2"}]


def test_a_cell_may_be_as_long_as_an_image(tmp_path):
    limit = csv.field_size_limit()
    write_table(tmp_path / "a.tsv", [{"image": "i" * 200_000}])
    try:
        assert len(read_table(tmp_path / "a.tsv")[0]["image"]) == 200_000
    finally:
        csv.field_size_limit(limit)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.tsv", b"", "holds no rows"),
        ("a.tsv", b"a\tb\n1\n", "row 1: 1 cells, but the table has 2 columns; repair it"),
        ("a.csv", b"a\n\xff\n", "not UTF-8 text"),
        ("a.json", b'{"a": 1}', "must be a list of objects"),
        ("a.json", b"[1", "not valid JSON"),
        ("a.xlsx", b"no zip", "not a readable xlsx file"),
    ],
)
def test_what_is_no_table_is_refused(name: str, content: bytes, sentence: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_table(tmp_path / name)


def test_a_column_without_a_name_moves_no_other(tmp_path: Path) -> None:
    """pandas writes its row numbers into one, unless it is told not to."""
    book = openpyxl.Workbook()
    for line in ([None, "index", "prediction"], [0, 17, "A"], [1, 18, None]):
        book.active.append(line)
    book.save(tmp_path / "a.xlsx")
    rows = read_table(tmp_path / "a.xlsx")
    assert rows == [{"index": 17, "prediction": "A"}, {"index": 18, "prediction": None}]


def test_a_json_file_is_a_list_of_records(tmp_path):
    write_table(tmp_path / "a.json", [{"index": 0, "prediction": "\ud800"}])
    assert json.loads((tmp_path / "a.json").read_text()) == [{"index": 0, "prediction": "\ud800"}]
