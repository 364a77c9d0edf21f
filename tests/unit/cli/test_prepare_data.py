import json
import zipfile
from pathlib import Path

import pytest
from helpers.conversations import load_rows
from helpers.recipe_samples import SAMPLES, png

from lmm_r1.cli.prepare_data import main
from lmm_r1.tools.recipes import recipe_names


def mathv360k(folder: Path) -> Path:
    """A copy of MathV360K as it is published, with a row whose reply has no answer."""
    folder.mkdir()
    good = dict(SAMPLES["mathv360k"].record)
    reply = [good["conversations"][0], {"from": "gpt", "value": "I cannot tell."}]
    (folder / "train_samples_all_tuning.json").write_text(json.dumps([good, good | {"conversations": reply}, good]))
    with zipfile.ZipFile(folder / "data_images.zip", "w") as archive:
        archive.writestr("data_images/FigureQA/1.png", png())
    return folder


def test_rows_of_a_copy_are_written_and_what_is_left_out_or_unchecked_is_said(tmp_path, capsys):
    copy = mathv360k(tmp_path / "copy")
    command = ["mathv360k", "--source", str(copy), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 3
    out, err = capsys.readouterr()
    assert f"wrote 2 rows and 1 image of mathv360k to {tmp_path / 'out'}" in out
    assert "licence: unknown; judged by: math" in out
    assert "recipe mathv360k: its answer could not be checked against the published files: the reply ends in" in err
    assert "1 row was left out, and everything else was done:" in err
    assert f"{copy / 'train_samples_all_tuning.json'} row 2: no (?i).*answer" in err
    assert [row.answer for row in load_rows(str(tmp_path / "out"))] == ["yes", "yes"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 3
    out, err = capsys.readouterr()
    assert f"{tmp_path / 'out'} holds 2 rows and 1 image of mathv360k already" in out
    assert "1 row was left out" in err
    # As a stage script asks for the rows, which does not know of the copy; another copy makes other rows.
    with pytest.raises(SystemExit):
        main(["mathv360k", "--output", str(tmp_path / "out")])
    assert "holds 2 rows and 1 image of mathv360k already" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["mathv360k", "--source", str(tmp_path), "--output", str(tmp_path / "out")])
    assert "was made with another origin" in capsys.readouterr().err


def test_filtered_rows_and_another_number_of_rows_are_said(tmp_path, capsys):
    (tmp_path / "rows.json").write_text(
        json.dumps([{"problem": "1 + 1?", "answer": "2"}, {"problem": "?", "answer": ""}])
    )
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        "{name: own, description: d, source: {obtain: o, split: s}, licence: MIT, rows: 40309, answer: [answer], "
        "where: {answer: {filled: true}}, prompt: '{problem}', verifiers: [math]}"
    )
    main([str(recipe), "--source", str(tmp_path / "rows.json"), "--output", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert "1 of 2 were filtered by answer" in out
    assert "the recipe expects 40,309 rows, 1 were found" in out
    assert "could not be checked" not in err


def test_a_dataset_that_cannot_be_had_ends_with_what_to_do(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["math12k", "--output", str(tmp_path / "out")])
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert "recipe math12k: hiyouga/math12k: cannot be downloaded from the Hugging Face hub" in err
    assert "give that folder here with --source FOLDER" in err


def test_every_recipe_is_listed(capsys):
    main(["--list_recipes"])
    out = capsys.readouterr().out
    assert [line.partition(":")[0] for line in out.splitlines() if not line.startswith(" ")] == list(recipe_names())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["--output", "x"], "RECIPE is missing: name one (--list_recipes)"),
        (["math12k"], "--output is missing: name the folder to write"),
        (["math12k", "--output", "x", "--max_rows", "0"], "--max_rows 0 must be at least 1"),
        (["math12", "--output", "x"], "recipe math12: no such recipe; did you mean math12k?"),
        (["no.yaml", "--output", "x"], "no.yaml: No such file or directory; check the path"),
    ],
)
def test_flags_that_cannot_be_are_refused(command, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 1
    assert said in capsys.readouterr().err
