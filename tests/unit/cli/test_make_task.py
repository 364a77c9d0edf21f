import filecmp
import json
from dataclasses import fields
from pathlib import Path

import pytest
from helpers.conversations import load_rows
from helpers.tables import table

from lmm_r1.cli.make_task import TaskSettings, main
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import TextPart, demonstration, images_of
from lmm_r1.tools.tasks import TASKS, get_task
from remote_rm.sokoban import read_level

SAMPLES = Path(__file__).parents[3] / "datasets" / "samples"


def make(output, *flags):
    main(["digits", "--output", str(output), *flags])
    return [demonstration(row) for row in load_rows(str(output))]


def digits_read(row):
    """How many digits the row's solution reads."""
    return len(row.messages[1].parts[0].text.removeprefix("<think>").partition(".")[0].split())


def test_files_are_the_same_byte_for_byte_for_the_same_seed(tmp_path):
    flags = ("--modality", "mixed", "--rows", "20", "--seed", "5")
    make(tmp_path / "a", *flags)
    make(tmp_path / "b", *flags)
    comparison = filecmp.dircmp(tmp_path / "a", tmp_path / "b")
    images = sorted(entry.name for entry in (tmp_path / "a" / "images").iterdir())
    assert len(images) == 10
    assert (comparison.left_only, comparison.right_only) == ([], [])
    names = ["rows.jsonl", *(f"images/{name}" for name in images)]
    assert filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", names, shallow=False) == (names, [], [])


def test_solutions_are_appended_to_the_same_prompts(tmp_path, capsys):
    prompts = make(tmp_path / "prompts", "--modality", "mixed", "--rows", "6", "--split", "test")
    solved = make(tmp_path / "solved", "--modality", "mixed", "--rows", "6", "--split", "test", "--solutions")
    for prompt, solution in zip(prompts, solved, strict=True):
        assert [message.role for message in prompt.messages] == ["user"]
        assert [message.role for message in solution.messages] == ["user", "assistant"]
        assert solution.messages[0].parts[-1] == prompt.messages[0].parts[-1]
        (turn,) = solution.messages[1].parts
        assert turn.text.startswith("<think>")
        assert turn.text.endswith(f"</think><answer>{prompt.answer.strip('[]')}</answer>")
    assert "wrote 6 rows of digits (mixed, test)" in capsys.readouterr().out


def test_the_flags_for_images_set_how_many_there_are_and_how_many_digits_they_show(tmp_path):
    flags = ("--modality", "mixed", "--rows", "12", "--solutions")
    rows = make(tmp_path / "out", *flags, "--max_image_digits", "1", "--image_share", "0.25")
    assert [digits_read(row) for row in rows] == [3, 3, 3, 1] * 3
    assert [len(images_of(row.messages)) for row in rows] == [0, 0, 0, 1] * 3


def test_a_file_of_rows_is_never_replaced_unasked(tmp_path, capsys):
    make(tmp_path / "out", "--rows", "2")
    with pytest.raises(SystemExit) as exit_code:
        main(["digits", "--output", str(tmp_path / "out"), "--rows", "3"])
    assert exit_code.value.code == 1
    told = f"lmm-r1 make_task: error: --output {tmp_path / 'out'} is not empty; name another folder or add --overwrite"
    assert told in capsys.readouterr().err
    assert len(make(tmp_path / "out", "--rows", "3", "--overwrite")) == 3


@pytest.mark.parametrize(
    ("folder", "flags"),
    [("digits_text", ["--rows", "6"]), ("digits_image", ["--rows", "2", "--modality", "image", "--seed", "1"])],
)
def test_the_samples_in_the_repository_are_what_the_command_writes(folder, flags, tmp_path):
    shipped = load_rows(str(SAMPLES / folder))
    made = make(tmp_path / folder, *flags)
    for old, new in zip(shipped, made, strict=True):
        assert (old.answer, old.datasource) == (new.answer, new.datasource)
        assert [part for part in old.messages[0].parts if isinstance(part, TextPart)] == [
            part for part in new.messages[0].parts if isinstance(part, TextPart)
        ]
        # Pixels, not bytes: another release of Pillow may compress differently.
        pairs = zip(images_of(old.messages), images_of(new.messages), strict=True)
        assert all(load_image(a, location="") == load_image(b, location="") for a, b in pairs)
    assert all(json.loads(line) for line in (SAMPLES / folder / "rows.jsonl").read_text().splitlines())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("modality", ["text", "image", "mixed"])
def test_every_task_writes_rows_that_are_read_back(task, modality, tmp_path):
    flags = ["--rows", "4", "--modality", modality]
    main([task, "--output", str(tmp_path / "rows"), *flags])
    rows = load_rows(str(tmp_path / "rows"), answer_required=task != "sokoban")
    images = [load_image(part, location="") for row in rows for part in images_of(row.messages)]
    assert len(rows) == 4
    assert len(images) == {"text": 0, "image": 4, "mixed": 2}[modality]
    assert [row.datasource.split("_")[-1 if task == "sokoban" else -2] for row in rows] == (
        ["text", "image"] * 2 if modality == "mixed" else [modality] * 4
    )


def test_rows_of_sokoban_carry_their_state_through_the_file(tmp_path):
    main(["sokoban", "--output", str(tmp_path / "rows"), "--rows", "3", "--boxes", "2", "--max_pushes", "5"])
    rows = load_rows(str(tmp_path / "rows"), answer_required=False)
    assert [row.answer for row in rows] == ["", "", ""]
    for row in rows:
        level = read_level(row.columns["state"])
        assert (len(level.boxes), level.is_solved) == (2, False)


def test_the_pixel_bound_and_the_box_of_a_search_go_through_the_file(tmp_path):
    flags = ["--modality", "image", "--view_px", "28", "--distractors", "4", "--block_px", "18"]
    main(["visual_search", "--output", str(tmp_path / "rows"), "--rows", "2", *flags])
    for row in load_rows(str(tmp_path / "rows")):
        (part,) = images_of(row.messages)
        assert part.max_pixels == 28 * 28
        assert load_image(part, location="").size == (504, 504)
        left, top, right, bottom = row.columns["box"]
        assert right - left == bottom - top == 90


def test_every_setting_of_a_task_that_is_a_plain_value_has_a_flag():
    flags = {flag.name for flag in fields(TaskSettings)}
    owners = {}
    for name in TASKS:
        for setting in fields(get_task(name)):
            if isinstance(getattr(get_task(name), setting.name), int | float | str):
                assert setting.name in flags | {"spelled_share"}, f"{name}.{setting.name}"
                owners.setdefault(setting.name, []).append(name)
    assert flags - set(owners) == {"max_image_digits", "board_width", "board_height"}


SEARCH = ["visual_search", "--modality", "image", "--view_px", "56", "--distractors", "3"]


def test_solutions_with_an_environment_are_whole_episodes_with_their_crops(tmp_path, capsys):
    bounds = ["--agent", "crop", "--agent_options", '{"min_pixels": 38000, "max_pixels": 40000}']
    main([*SEARCH, "--output", str(tmp_path / "rows"), "--rows", "3", "--solutions", *bounds])
    assert "wrote 3 episodes of crop of visual_search (image, train)" in capsys.readouterr().out
    for row in load_rows(str(tmp_path / "rows")):
        assert [message.role for message in row.messages] == ["system", "user", "assistant", "user", "assistant"]
        call, answer = (row.messages[place].parts[0].text for place in (2, 4))
        assert call.endswith('"source": "original_image"}</grounding>')
        assert answer.endswith(f"<answer>{row.answer}</answer>")
        view, crop = images_of(row.messages)
        assert (view.min_pixels, view.max_pixels, crop.min_pixels, crop.max_pixels) == (56**2, 56**2, 38000, 40000)
        # Two of the eight cells on a side, of 7 blocks of 9 pixels each.
        picture, part = load_image(view, location=""), load_image(crop, location="")
        assert (picture.size, part.size) == ((504, 504), (126, 126))
        left, top, right, bottom = (
            round(504 * edge) for edge in json.loads(call[call.index("[") : call.index("]") + 1])
        )
        assert part == picture.crop((left, top, right, bottom))
        box = row.columns["box"]
        assert left <= box[0] < box[2] <= right
        assert top <= box[1] < box[3] <= bottom


MISTAKES = [
    *table("cli/make_task", "a_mistake_ends_with_a_sentence_and_leaves_no_files"),
    *(
        [flags, 1, said]
        for flags, said in table("cli/make_task", "a_flag_of_another_task_and_a_wrong_value_are_refused_by_name")
    ),
    *(
        [[*SEARCH, "--rows", "1", *flags], 1, said]
        for flags, said in table("cli/make_task", "an_environment_that_cannot_play_solutions_is_refused")
    ),
]


@pytest.mark.parametrize(("flags", "code", "sentence"), MISTAKES)
def test_a_mistake_ends_with_a_sentence_and_leaves_no_files(flags, code, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_code:
        main([*flags, "--output", str(tmp_path / "out")])
    assert exit_code.value.code == code
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


OWN = """
def rows_of(split, modality, rows, seed, *, word="say"):
    yield seed / 0

def wrong(split, modality, rows, seed):
    return ["a row"]
"""


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("", [], "task own.py: it raised ZeroDivisionError: division by zero, at own.py, line 3"),
        (":wrong", [], "own.py:wrong: yield a lmm_r1.tools.tasks.TaskRow per row, not str"),
        ("?worb=a", [], "task own.py?worb=a: rows_of has no keyword-only parameter worb; known are word"),
        ("", ["--boxes", "2"], "--boxes 2: no setting of own.py"),
    ],
)
def test_a_file_without_a_task_is_refused_with_its_line(text, flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    with pytest.raises(SystemExit):
        main([f"own.py{text}", *flags, "--output", "none"])
    assert said in capsys.readouterr().err.replace(f"{tmp_path}/", "")
    assert not Path("none").exists()
