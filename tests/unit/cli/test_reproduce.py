"""`examples/reproduce.py`: what it runs, what it reads afterwards, and what it says of it."""

import json
from pathlib import Path

import pytest
import yaml
from helpers.tables import ROOT
from PIL import Image

from examples import reproduce
from lmm_r1.cli import make_task

SCRIPT = """
[[ -d $ROOT/rows ]] || cp -r "$ROWS" "$ROOT/rows"
echo "{\\"stages\\": [{\\"name\\": \\"rl\\", \\"accuracy\\": 0.$SEED}]}" > "$ROOT/summary.json"
echo '{"least": [2, 3]}' > "$ROOT/../all.json"
"""


@pytest.fixture
def rows(tmp_path) -> Path:
    make_task.main(["digits", "--modality", "image", "--rows", "3", "--output", str(tmp_path / "made")])
    return tmp_path / "made"


@pytest.fixture
def recipe(tmp_path, monkeypatch, rows):
    """Write the band file `small` with the given fields in place of its own, and return the folder of its runs."""
    monkeypatch.setattr(reproduce, "BANDS", tmp_path / "bands")
    monkeypatch.setenv("ROWS", str(rows))
    own = {
        "about": "a small recipe", "model": "none", "measured": None, "ranges": "chosen by hand", "seeds": [4, 6],
        "script": SCRIPT, "rows": "rows", "data": {4: reproduce.digest_of(rows)},
        "figures": [
            {"name": "accuracy", "file": "seed{seed}/summary.json", "key": "stages/rl/accuracy", "low": 0.4, "high": 0.5},
            {"name": "least", "file": "all.json", "key": "least/1", "low": 3, "high": 3},
        ],
    }  # fmt: skip

    def write(**fields: object) -> Path:
        (tmp_path / "bands").mkdir(exist_ok=True)
        (tmp_path / "bands/small.yaml").write_text(yaml.safe_dump(own | fields))
        return tmp_path / "runs"

    return write


def test_each_seed_is_run_and_each_figure_compared(recipe, capsys):
    output = recipe()
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["small", "--output", str(output)])

    assert ended.value.code == 1
    record = json.loads((output / "reproduced.json").read_text())
    found = [(one["name"], one["seed"], one["value"], one["inside"]) for one in record["findings"][1:]]
    assert found == [("accuracy", 4, 0.4, True), ("accuracy", 6, 0.6, False), ("least", None, 3.0, True)]
    assert "1 of 4 outside; chosen by hand" in capsys.readouterr().out


def test_chosen_seeds_that_are_inside_end_with_code_0(recipe, capsys):
    reproduce.main(["small", "--output", str(recipe()), "--seeds", "4"])
    assert "none of 3 outside" in capsys.readouterr().out


def test_other_rows_are_outside_and_images_saved_anew_are_not(rows):
    digest = reproduce.digest_of(rows)
    image = next((rows / "images").iterdir())
    pixels = Image.open(image).copy()
    pixels.save(image, compress_level=1)
    assert reproduce.digest_of(rows) == digest == reproduce.digest_of(rows.parent)

    pixels.putpixel((0, 0), pixels.getpixel((0, 0)) ^ 1)
    pixels.save(image)
    assert reproduce.digest_of(rows) != digest


def test_a_recipe_that_fails_ends_with_its_code_and_the_way_on(recipe, capsys):
    with pytest.raises(SystemExit):
        reproduce.main(["small", "--output", str(recipe(script="exit 7")), "--seeds", "4"])
    assert "exit code 7; the same command resumes it" in capsys.readouterr().err


@pytest.mark.parametrize("name", reproduce.names())
def test_a_band_names_files_of_the_repository_and_ranges_that_its_result_lies_in(name):
    band = reproduce.read_band(name)
    assert (ROOT / band.measured).is_file() if band.measured else "published" in band.ranges
    assert all(figure.low < figure.high for figure in band.figures)
    scripts = [word for word in band.script.split() if word.endswith(".sh")]
    assert all((ROOT / script).is_file() for script in scripts)


def test_the_measured_demo_is_inside_its_band(tmp_path):
    band = reproduce.read_band("demo")
    for run in json.loads((ROOT / band.measured).read_text())["runs"]:
        (tmp_path / f"seed{run['seed']}").mkdir()
        (tmp_path / f"seed{run['seed']}/summary.json").write_text(json.dumps(run))
        for figure in band.figures:
            assert figure.low <= figure.read(tmp_path, seed=run["seed"]) <= figure.high
