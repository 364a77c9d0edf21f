import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from helpers.conversations import message, picture
from PIL import Image

from lmm_r1.errors import UserError
from lmm_r1.records.rollouts import SampledResponse, append_rollout
from lmm_r1.records.run_folder import RunFolder

RESPONSE = SampledResponse(
    step=1,
    group=0,
    response="46",
    label="46",
    reward=1.0,
    scores={"accuracy": 1.0},
    response_tokens=3,
    truncated=False,
)
RECORD = json.loads(json.dumps(asdict(RESPONSE)))


def opened(path: Path) -> RunFolder:
    folder = RunFolder(path=path, name="fre", kind="rl")
    folder.open("train:\n  seed: 1\n")
    return folder


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_one_line_a_step_and_hold_numbers_only(tmp_path):
    folder = opened(tmp_path)
    folder.metrics(1, {"reward": 0.5, "tokens": 12, "tensor": [1, 2], "name": "x"})
    folder.metrics(2, {"reward": 1.0})
    first, second = lines(tmp_path / "metrics.jsonl")
    seconds = first.pop("seconds")
    assert first == {"step": 1, "reward": 0.5, "tokens": 12.0}
    assert second["step"] == 2
    assert 0 <= seconds <= second["seconds"] < 60


def test_a_rollout_is_kept_with_its_prompt_and_each_image_once(tmp_path):
    folder = opened(tmp_path)
    turns = (message("system", "Think."), message("user", picture(8, 6), "And", picture(8, 6), picture(6, 8)))
    append_rollout(folder.path, RESPONSE, messages=turns, location="rows.jsonl, line 1")
    append_rollout(folder.path, replace(RESPONSE, step=2), messages=turns, location="rows.jsonl, line 1")
    first, second = lines(tmp_path / "rollouts.jsonl")
    system, user = first.pop("messages")
    assert first == RECORD
    assert second["step"] == 2
    assert system == {"role": "system", "content": [{"type": "text", "text": "Think."}]}
    assert [part["type"] for part in user["content"]] == ["image", "text", "image", "image"]
    places = [part["image"] for part in user["content"] if part["type"] == "image"]
    assert places[0] == places[1] != places[2]
    assert sorted(f"images/{file.name}" for file in (tmp_path / "images").iterdir()) == sorted({places[0], places[2]})
    assert Image.open(tmp_path / places[0]).tobytes() == picture(8, 6).tobytes()


def test_a_finished_stage_says_so_at_the_very_end(tmp_path):
    folder = opened(tmp_path)
    assert not (tmp_path / "stage.json").exists()
    folder.started -= 100
    folder.finish(steps=7)
    stage = json.loads((tmp_path / "stage.json").read_text())
    assert (stage["name"], stage["kind"], stage["steps"]) == ("fre", "rl", 7)
    assert stage["seconds"] == pytest.approx(100, abs=5)
    assert stage["started_at"] < stage["finished_at"]
    assert stage["finished_at"].endswith("+00:00")


def test_a_finished_stage_is_not_written_again(tmp_path):
    opened(tmp_path).finish(steps=1)
    before = (tmp_path / "run_config.yaml").stat().st_mtime_ns
    with pytest.raises(UserError, match="this stage is finished"):
        opened(tmp_path)
    assert (tmp_path / "run_config.yaml").stat().st_mtime_ns == before


def test_a_resumed_stage_cuts_a_torn_line_and_counts_its_seconds_on(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "seconds": 40.0}\n{"step": 2, "seconds": 90.5}\n{"step": 3, "se'
    )
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1}\n{"response": "caf')
    folder = opened(tmp_path)
    assert (tmp_path / "rollouts.jsonl").read_text() == '{"step": 1}\n'
    folder.metrics(3, {"reward": 1.0})
    append_rollout(folder.path, RESPONSE, messages=(message("user", "hi"),), location="rows.jsonl, line 1")
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert lines(tmp_path / "metrics.jsonl")[-1]["seconds"] == pytest.approx(90.5, abs=5)
    assert len(lines(tmp_path / "rollouts.jsonl")) == 2
    folder.finish(steps=3)
    assert json.loads((tmp_path / "stage.json").read_text())["seconds"] == pytest.approx(90.5, abs=5)


def test_a_stage_that_goes_on_from_an_earlier_step_makes_the_later_records_again(tmp_path):
    """Killed at step 7, with a checkpoint of step 5."""
    metrics = [{"step": step, "seconds": 10.0 * step, "reward": 0.5} for step in range(1, 8)]
    evaluations = [{"step": step, "seconds": 10.0 * step + 5, "eval_test_pass1": 0.25} for step in (5, 6)]
    logged = [*metrics[:5], evaluations[0], metrics[5], evaluations[1], metrics[6]]
    rollouts = [{**RECORD, "step": step, "group": group} for step in range(1, 8) for group in (0, 1)]
    for name, records in (("metrics.jsonl", logged), ("rollouts.jsonl", rollouts)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    folder = opened(tmp_path)
    folder.resume(5)
    assert lines(tmp_path / "metrics.jsonl") == logged[:6]
    assert lines(tmp_path / "rollouts.jsonl") == rollouts[:10]
    assert folder.logged(5, prefix="eval_") == {"eval_test_pass1": 0.25}
    assert folder.logged(6, prefix="eval_") == {}
    for step in (6, 7):
        folder.metrics(step, {"reward": 1.0})
    made = lines(tmp_path / "metrics.jsonl")[6:]
    assert [line["step"] for line in made] == [6, 7]
    # The time of the steps that count, which ended with the evaluation of step 5.
    assert made[0]["seconds"] == pytest.approx(55.0, abs=5)


def test_a_line_of_no_step_is_a_user_error_with_its_number(tmp_path):
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1}\n{"group": 1}\n{"step": 3}\n')
    folder = opened(tmp_path)
    with pytest.raises(UserError, match="rollouts.jsonl, line 2: not a record of a step"):
        folder.resume(1)


@pytest.mark.parametrize("line", ['{"step": 3}', "[1]", "seconds: 3", '{"step": 1, "seconds": null}'])
def test_a_last_line_that_holds_no_metrics_is_a_user_error(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "seconds": 40.0}}\n{line}\n')
    with pytest.raises(UserError, match="metrics.jsonl: the last line holds no metrics"):
        opened(tmp_path)


def test_a_place_that_cannot_be_written_is_a_user_error_with_the_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--ckpt.output_dir"):
        opened(tmp_path / "file" / "runs")


def test_half_an_image_is_never_left_under_its_name(tmp_path):
    folder = opened(tmp_path)
    (tmp_path / "images").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        append_rollout(
            folder.path, RESPONSE, messages=(message("user", picture(4, 4)),), location="rows.jsonl, line 1"
        )
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_the_time_that_is_left_follows_from_the_steps_behind_the_first_of_a_session(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("lmm_r1.records.run_folder.time.time", lambda: now[0])
    folder = opened(tmp_path)
    assert folder.time_left(0, total=10) == "", "no step was made"
    now[0] += 600
    folder.metrics(4, {})
    assert folder.time_left(4, total=10) == "", "the first takes what is done only once"
    now[0] += 30
    folder.metrics(5, {})
    assert folder.time_left(5, total=10) == "  0:02:30 left"
    now[0] += 60
    folder.metrics(6, {})
    assert folder.time_left(6, total=10) == "  0:03:00 left", "45 s for each of four"
    assert folder.time_left(10, total=10) == ""
