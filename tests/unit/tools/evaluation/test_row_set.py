import json
from pathlib import Path

import pytest

from lmm_r1.config.evaluate import EvaluateConfig
from lmm_r1.errors import UserError
from lmm_r1.tools.evaluation.board import MeasuredFile
from lmm_r1.tools.evaluation.rows import file_rows, get_suite, suite_rows


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "2+2?"}]
    message = json.dumps([{"role": "user", "content": content}])
    good = {"message": message, "answer": "4", "question": "How many?", "ground_truth": 4, "image": "a.png"}
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (good, good | {"answer": None, "question": ""}, good)))
    return path


def plain(file: MeasuredFile) -> tuple:
    sampling = tuple(file.sampling.values())
    return file.name, file.verifiers, file.ks, sampling, list(file.rows), [row.index for row in file.skipped]


def file_set(path: Path, **choices: object) -> MeasuredFile:
    return file_rows("held_out", str(path), config=EvaluateConfig(**choices))


def suite_set(path: Path, **choices: object) -> MeasuredFile:
    # Its images column is there, and so is the text for a file of rows.
    return suite_rows(get_suite("superclevr_200"), path=str(path), config=EvaluateConfig(**choices))


def test_files_have_the_defaults_and_suites_their_own(rows):
    assert plain(file_set(rows)) == ("held_out", ("math",), (1,), (0.0, 1, 1024), [0, 2], [1])
    assert plain(suite_set(rows)) == ("superclevr_200", ("number",), (1,), (0.0, 1, 1024), [0, 2], [1])


def test_what_the_user_chose_holds_for_both(rows):
    chosen = {"reward": ("exact",), "temperature": 0.7, "n_samples": 6, "max_new_tokens": 9, "max_rows": 1}
    for made, name in ((file_set(rows, **chosen), "held_out"), (suite_set(rows, **chosen), "superclevr_200")):
        assert plain(made) == (name, ("exact",), (1, 2, 4), (0.7, 6, 9), [0], [])
        assert not [note for note in made.notes if "samples" in note or "benchmark" in note]
    assert file_set(rows, n_samples=6, k=(6, 1, 6)).ks == (1, 6)


def test_a_suite_of_another_size_and_samples_that_are_alike_are_noted(rows):
    assert suite_set(rows).notes == ("suite superclevr_200: 3 rows were found, but the benchmark has 200",)
    assert file_set(rows, n_samples=2).notes[1:] == (
        "held_out: at temperature 0 the 2 samples of a row are identical; raise --temperature",
    )


def test_a_worked_answer_is_not_shown_and_a_row_that_would_show_one_is_left_out(tmp_path):
    asked, answered = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    path = tmp_path / "solved.jsonl"
    solved = [{"messages": turns, "answer": "4"} for turns in ([asked, answered], [asked, answered] * 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in solved))
    made = file_set(path)
    assert [message.role for message in made.rows[0].messages] == ["user"]
    assert [row.reason for row in made.skipped] == [
        f"{path} line 2: the row ends with an assistant turn, so there is nothing to respond to"
    ]


def test_an_embedded_image_that_cannot_be_decoded_leaves_its_row_out(rows, tmp_path):
    good = json.loads(rows.read_text().splitlines()[0])
    broken = good | {
        "message": [{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,AAAA"}]}]
    }
    path = tmp_path / "embedded.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (good | {"answer": ""}, broken, good)))
    made = file_set(path)
    assert (list(made.rows), [row.index for row in made.skipped]) == ([2], [0, 1])
    assert made.skipped[1].reason.startswith(f"{path} line 2: ")
    path.write_text(json.dumps(broken))
    with pytest.raises(UserError, match="embedded.jsonl: none of its rows can be used; the first: .* line 1: "):
        file_set(path)
