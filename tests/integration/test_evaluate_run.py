"""One whole `lmm-r1 evaluate`: two checkpoints, a text and an image file, a suite, a row with a broken image."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.commands import QUESTION, with_image, write_rows
from helpers.processes import warm_python
from helpers.tables import table
from PIL import Image

from lmm_r1.cli.evaluate import main
from lmm_r1.records.metrics import read_evaluation
from lmm_r1.records.responses import read_responses
from lmm_r1.tools.evaluation import measurement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FLAGS = table("integration/evaluate_run", "flags")


@dataclass(frozen=True, kw_only=True)
class Run:
    folder: Path
    ended: subprocess.CompletedProcess[str]

    @property
    def scores(self) -> dict:
        return json.loads((self.folder / "out/scores.json").read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, demo: Path) -> Run:
    folder = tmp_path_factory.mktemp("evaluate")
    for name in ("text", "image", "suite"):
        (folder / name).mkdir()
    Image.new("RGB", (56, 56)).save(folder / "a.png")
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:40])
    write_rows(folder / "text", {**QUESTION, "datasource": "sums"}, {**QUESTION, "datasource": "more sums"})
    write_rows(folder / "image", with_image("../a.png"), with_image("../broken.png"), with_image("../a.png"))
    write_rows(folder / "suite", {"image_path": "../a.png", "question": "How many?", "ground_truth": 4})
    model = demo / "model"
    command = [warm_python(), "-m", "lmm_r1.cli.evaluate", "--checkpoints", f"base={model}", f"again={model}"]
    command += ["--files", "text=text", "image=image", "--suite", "superclevr_200"]
    command += ["--suite_data", "superclevr_200=suite", "--reward", "math", "exact:ignore_case"]
    command += [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    settings = {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, timeout=300
    )
    return Run(folder=folder, ended=ended)


def test_a_broken_image_is_left_out_listed_and_told_by_the_exit_code(run):
    assert run.ended.returncode == 3, run.ended.stderr
    said = run.ended.stderr.splitlines()[-2:]
    assert said[0] == "lmm-r1 evaluate: 1 row was left out, and everything else was done:"
    assert said[1].startswith("  image/rows.jsonl line 2: ")
    (skipped,) = run.scores["files"]["image"]["skipped_rows"]
    assert (skipped["index"], skipped["reason"]) == (1, said[1].strip())


def test_every_checkpoint_has_its_scores_on_every_file(run):
    evaluation = read_evaluation(run.folder / "out/scores.json")
    assert [checkpoint.name for checkpoint in evaluation.checkpoints] == ["base", "again"]
    assert evaluation.file_names == ["text", "image", "superclevr_200"]
    assert evaluation.settings["n_samples"] == 2
    for checkpoint in run.scores["checkpoints"]:
        for name, rows in (("text", 2), ("image", 2), ("superclevr_200", 1)):
            scores = checkpoint["files"][name]
            assert (scores["rows"], scores["samples"]) == (rows, 2 * rows)
            assert list(scores["verifiers"]) == ["math", "exact:ignore_case"]
            assert list(scores["verifiers"]["math"]["pass_at_k"]) == ["1", "2"]
            assert 0 < scores["mean_response_tokens"] <= 8
    assert list(run.scores["checkpoints"][0]["files"]["text"]["datasources"]) == ["sums", "more sums"]


def test_responses_are_saved_for_every_row_and_sample(run):
    responses = read_responses(run.folder / "out/scores.responses.jsonl")
    places = [(one.checkpoint, one.file, one.index, one.sample) for one in responses]
    rows = [("text", 0), ("text", 1), ("image", 0), ("image", 2), ("superclevr_200", 0)]
    assert places == [(name, *row, sample) for name in ("base", "again") for row in rows for sample in (0, 1)]
    assert {one.finish_reason for one in responses} <= {"stop", "length"}
    assert {one.label for one in responses if one.file == "superclevr_200"} == {"4"}
    assert responses[-1].question.startswith("How many? First output the thinking process in <think>")


def test_the_same_checkpoint_twice_differs_by_exactly_nothing(run):
    comparisons = run.scores["comparisons"]
    assert len(comparisons) == 3 * 2
    for found in comparisons:
        assert (found["difference"], found["low"], found["high"], found["p_value"]) == (0.0, 0.0, 0.0, 1.0)


def test_the_tables_and_the_page_are_there(run):
    assert "image: 2 rows, 1 left out" in run.ended.stdout
    assert "Against base, row by row, in percentage points" in run.ended.stdout
    assert "responses: out/scores.responses.jsonl" in run.ended.stdout
    page = (run.folder / "out/scores.html").read_text()
    assert "1 row was left out" in page
    assert "superclevr_200" in page


def test_saved_responses_are_compared_without_an_engine(run, monkeypatch, capsys):
    monkeypatch.chdir(run.folder)
    main(["--compare", "again=out/scores.json", "base=out/scores.json", "--output", "out/again.json"])
    found = json.loads(Path("out/again.json").read_text())
    assert (found["baseline"], [checkpoint["name"] for checkpoint in found["checkpoints"]]) == (
        "again",
        ["again", "base"],
    )
    whole = {checkpoint["name"]: checkpoint["files"] for checkpoint in run.scores["checkpoints"]}
    for checkpoint in found["checkpoints"]:
        for name, scores in checkpoint["files"].items():
            assert scores == {key: value for key, value in whole[checkpoint["name"]][name].items() if key != "seconds"}
    assert Path("out/again.html").is_file()
    assert "Against again" in capsys.readouterr().out


class EngineWanted(Exception):
    """An engine was to be started, for these files."""


@pytest.fixture
def repeated(run, tmp_path, monkeypatch, demo):
    """The same command again, in a copy of its folder, where no engine starts; yields what repeats it."""
    shutil.copytree(run.folder, tmp_path / "run", copy_function=shutil.copy2)
    # Equal to what was measured: another path, the same weights with the same times.
    shutil.copytree(demo / "model", tmp_path / "model", copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path / "run")
    # The rows are read at the same paths, whose times decide.
    for name in ("text", "image", "suite", "a.png", "broken.png"):
        path = Path(name)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(run.folder / name)

    def wanted(*_: object) -> None:
        raise EngineWanted

    monkeypatch.setattr(measurement, "make_engine", wanted)

    def repeat(
        *more: str, checkpoints=(f"base={demo / 'model'}", "again=../model"), text="text", **flags: object
    ) -> None:
        given = {**FLAGS, "reward": "math exact:ignore_case", **flags}
        command = ["--checkpoints", *checkpoints, "--files", f"text={text}", "image=image"]
        command += ["--suite", "superclevr_200", "--suite_data", "superclevr_200=suite", *more]
        main(command + [word for name, value in given.items() for word in (f"--{name}", *str(value).split())])

    return repeat


def test_a_finished_evaluation_is_read_again_without_an_engine(run, repeated, capsys):
    with pytest.raises(SystemExit) as ended:
        repeated()
    assert ended.value.code == 3, "the broken image is still left out"
    printed = capsys.readouterr()
    assert "text, image, superclevr_200 as measured before, in out/scores.responses.jsonl" in printed.out
    assert "image/rows.jsonl line 2: " in printed.err
    found = json.loads(Path("out/scores.json").read_text())
    assert found["comparisons"] == run.scores["comparisons"]
    for checkpoint, before in zip(found["checkpoints"], run.scores["checkpoints"], strict=True):
        assert checkpoint["files"] == before["files"], "the seconds, too"
    for name in ("scores.responses.jsonl", "scores.measured.json"):
        assert (Path("out") / name).read_bytes() == (run.folder / "out" / name).read_bytes()


def test_a_checkpoint_less_and_another_name_are_read_again_too(repeated):
    with pytest.raises(SystemExit):
        repeated(checkpoints=("renamed=../model",))
    assert {one.checkpoint for one in read_responses(Path("out/scores.responses.jsonl"))} == {"renamed"}


def test_changed_rows_and_weights_and_damaged_responses_are_measured_anew(repeated, tmp_path):
    saved, measured = (Path(f"out/scores.{name}").read_text() for name in ("responses.jsonl", "measured.json"))
    lines = saved.splitlines(keepends=True)
    # What one of the two has lost is taken from the other, whose weights are the same: both lose it.
    fewer = "".join(line for line in lines if '"file": "text", "index": 0' not in line)
    for damaged in (saved[:-20], fewer, saved.replace('"label": "4"', '"label": "5"')):
        Path("out/scores.responses.jsonl").write_text(damaged)
        with pytest.raises(EngineWanted):
            repeated()
        Path("out/scores.measured.json").write_text(measured)
    Path("out/scores.responses.jsonl").write_text(saved)
    rows = tmp_path / "more"
    rows.mkdir()
    write_rows(rows, {**QUESTION, "datasource": "sums"}, {**QUESTION, "datasource": "other sums"})
    with pytest.raises(EngineWanted):
        repeated(text=str(rows))
    weights = next((tmp_path / "model").glob("*.safetensors"))
    os.utime(weights, (1, 1))
    with pytest.raises(EngineWanted):
        repeated()
