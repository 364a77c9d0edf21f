import json

import pytest
from PIL import Image

from lmm_r1.data.files import load_rows
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import images_of
from lmm_r1.data.row_folder import write_row_folder
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


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


def test_a_failure_leaves_nothing_behind(tmp_path):
    with pytest.raises(UserError, match="stop"):
        write_row_folder(failing_records(), output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


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


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    assert write_row_folder([record()], output=tmp_path / "out") == 1


def test_files_of_other_origin_are_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds thesis.tex, which is no part of a row folder"):
        write_row_folder([record()], output=tmp_path, overwrite=True)
    with pytest.raises(UserError, match="is a file; name a folder"):
        write_row_folder([record()], output=tmp_path / "thesis.tex", overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "precious"
