import json
import os

import pytest
from helpers.run_folders import rollout, scores, write_curriculum, write_image, write_lines, write_stage
from helpers.tables import table

from lmm_r1.data.messages import ImagePart, Message, TextPart
from lmm_r1.errors import UserError
from lmm_r1.records.rollouts import SampledResponse
from lmm_r1.records.run_folder import RunFolder, read_run


def write_metrics(folder, *rows):
    write_lines(folder / "metrics.jsonl", rows)


def test_a_curriculum_lists_its_stages_by_the_time_they_started_not_by_name(tmp_path):
    write_stage(tmp_path / "a", name="later", steps=2, seconds=3.0, hour=12)
    write_stage(tmp_path / "b", name="earlier", kind="sft", steps=5, seconds=4.0, hour=9)
    run = read_run(tmp_path)
    assert run.is_curriculum
    assert [(stage.name, stage.kind, stage.steps, stage.seconds) for stage in run.stages] == [
        ("earlier", "sft", 5, 4.0),
        ("later", "rl", 2, 3.0),
    ]


def test_a_stage_of_metrics_alone_reckons_its_start_from_them(tmp_path):
    write_metrics(tmp_path / "mgt", {"step": 1, "seconds": 10.0}, {"step": 2, "seconds": 20.0, "reward": 0.5})
    os.utime(tmp_path / "mgt" / "metrics.jsonl", (1_000_020, 1_000_020))
    (stage,) = read_run(tmp_path).stages
    assert (stage.state, stage.last_sign_at.timestamp()) == ("stopped", 1_000_020)
    assert (stage.name, stage.kind, stage.steps, stage.seconds) == ("mgt", None, 2, 20.0)
    assert stage.started_at.timestamp() == 1_000_000


def test_times_without_a_zone_and_with_the_suffix_z_can_be_ordered_together(tmp_path):
    for name, time in (("a", "2026-01-31T12:00:00Z"), ("b", "2026-01-29T12:00:00")):
        write_stage(tmp_path / name, name=name, steps=1, seconds=1.0, hour=9)
        stage = json.loads((tmp_path / name / "stage.json").read_text())
        (tmp_path / name / "stage.json").write_text(json.dumps(stage | {"started_at": time}))
    assert [stage.name for stage in read_run(tmp_path).stages] == ["b", "a"]


def test_the_last_metrics_of_a_step_win_after_a_resume(tmp_path):
    steps = [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.7), (3, 0.8), (4, 0.9)]
    write_metrics(tmp_path, *({"step": step, "seconds": 1.0, "reward": reward} for step, reward in steps))
    metrics = read_run(tmp_path).stages[0].metrics
    assert metrics.series("reward") == [(1, 0.1), (2, 0.7), (3, 0.8), (4, 0.9)]
    assert metrics.repeated_steps == 2


def test_an_evaluation_during_training_adds_to_the_metrics_of_its_step(tmp_path):
    rows = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75}, {"step": 2, "eval_pass1": 0.25}]
    write_metrics(tmp_path, *rows, {"step": 3, "reward": 1.0})
    metrics = read_run(tmp_path).stages[0].metrics
    assert metrics.series("reward") == [(1, 0.5), (2, 0.75), (3, 1.0)]
    assert metrics.series("eval_pass1") == [(2, 0.25)]
    assert metrics.repeated_steps == 0


def test_torn_last_lines_are_left_out_and_counted(tmp_path):
    write_metrics(tmp_path, {"step": 1, "seconds": 1.0, "reward": 0.5})
    write_lines(tmp_path / "rollouts.jsonl", [rollout(step=1)])
    for name, torn in (("metrics.jsonl", b'{"step": 2, "rew'), ("rollouts.jsonl", b'{"response": "\xe4\xbd')):
        with (tmp_path / name).open("ab") as stream:
            stream.write(torn)
    (stage,) = read_run(tmp_path).stages
    assert [row.step for row in stage.metrics.rows] == [1]
    assert stage.metrics.torn_lines == 1
    assert (len(stage.rollouts), stage.rollouts.torn_lines) == (1, 1)


def test_numbers_that_are_not_finite_are_missing_values(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "kl": NaN}\n{"step": 2, "kl": -Infinity}\n{"step": 3, "kl": 2}\n'
        f'{{"step": 4, "kl": 1{"0" * 400}}}\n'
    )
    assert read_run(tmp_path).stages[0].metrics.series("kl") == [(1, None), (2, None), (3, 2.0), (4, None)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{'step': 1}", "not a JSON object"),
        ("[1, 2]", "expected a JSON object, found list"),
        ('{"reward": 1.0}', "step: Input should be a valid integer, found None"),
        (
            f'{{"step": {2**53 + 1}}}',
            "step: Input should be less than or equal to 9007199254740992, found 9007199254740993",
        ),
        (f'{{"step": 1, "reward": {"[" * 200_000}', "not a JSON object (maximum recursion depth"),
        ('{"step": 1.5}', "step: Input should be a valid integer, found 1.5"),
        ('{"step": true}', "step: Input should be a valid integer, found True"),
        ('{"step": 1, "reward": "high"}', "reward: Value error, must be a number, found 'high'"),
        ('{"step": 1, "seconds": -2}', "seconds must be 0 or more, found -2.0"),
    ],
)
def test_a_malformed_metrics_line_is_named_with_its_file_and_number(tmp_path, line, complaint):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 0}}\n\n{line}\n')
    with pytest.raises(UserError) as caught:
        read_run(tmp_path)
    assert f"{tmp_path / 'metrics.jsonl'}, line 3: {complaint}" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "complaint"), table("records/run", "a_malformed_rollout_is_named_with_its_file_and_number")
)
def test_a_malformed_rollout_is_named_with_its_file_and_number(tmp_path, fields, complaint):
    write_metrics(tmp_path, {"step": 1})
    write_lines(tmp_path / "rollouts.jsonl", [rollout(step=1), rollout(step=2, **fields)])
    with pytest.raises(UserError) as caught:
        read_run(tmp_path)
    assert f"{tmp_path / 'rollouts.jsonl'}, line 2" in str(caught.value)
    assert complaint in str(caught.value)


def test_what_training_writes_is_what_the_report_reads(tmp_path):
    folder = RunFolder(path=tmp_path, name="mgt", kind="rl")
    folder.open("actor:\n  lr: 1.0e-6\n")
    folder.metrics(1, {"reward": 0.5, "timing/generation": 2.0})
    write_image(tmp_path / "card.png", number=7)
    with_image = Message(role="user", parts=(ImagePart(str(tmp_path / "card.png")), TextPart("Which?")))
    record = {key: value for key, value in rollout(step=1, group=3).items() if key != "messages"}
    folder.rollout(
        SampledResponse(**record, weight_version=2, weights=((2, 3), (3, 2)), held_out=True),
        messages=(with_image,),
        location="row 1",
    )
    folder.finish(steps=1)
    (stage,) = read_run(tmp_path).stages
    (found,) = stage.rollouts.read([0])
    assert (stage.name, stage.kind, stage.steps, stage.state) == ("mgt", "rl", 1, "finished")
    assert stage.settings == "actor:\n  lr: 1.0e-6\n"
    assert stage.metrics.names == ["reward", "timing/generation"]
    assert (found.group, found.response_tokens, found.weight_version, found.held_out) == (3, 5, 2, True)
    assert found.weights == ((2, 3), (3, 2))
    image, text = found.messages[0].parts
    assert (tmp_path / image.value).is_file()
    assert text.value == "Which?"


def test_rollouts_are_read_by_their_place_in_the_file(tmp_path):
    write_metrics(tmp_path, {"step": 1})
    image = {"type": "image", "image": "images/a.png"}
    asked = [{"role": "user", "content": [image, {"type": "text", "text": "Wie groß?"}]}]
    write_lines(
        tmp_path / "rollouts.jsonl",
        [rollout(step=1), rollout(step=1, group=1, messages=asked, reward=float("nan")), rollout(step=2)],
    )
    log = read_run(tmp_path).stages[0].rollouts
    last, middle = log.read([2, 1])
    assert log.steps == (1, 1, 2)
    assert (last.step, last.reward, last.scores) == (2, 1.0, {"accuracy": 1.0, "format": 1.0})
    assert (middle.group, middle.reward) == (1, None)
    assert (middle.weight_version, middle.weights, middle.held_out) == (None, (), False), "earlier versions had none"
    assert [(part.kind, part.value) for part in middle.messages[0].parts] == [
        ("image", "images/a.png"),
        ("text", "Wie groß?"),
    ]


def test_a_stage_finds_its_checkpoint_by_its_name_and_else_by_its_folders_name(tmp_path):
    write_stage(tmp_path / "one", name="fre", steps=1, seconds=1.0, hour=9)
    write_stage(tmp_path / "mgt", name="images", steps=1, seconds=1.0, hour=10)
    write_stage(tmp_path / "new", name="new", steps=1, seconds=1.0, hour=11)
    checkpoints = [
        {"name": name, "path": "", "files": {"text": scores(accuracy=accuracy, form=1.0, tokens=9.0)}}
        for name, accuracy in (("mgt", 0.75), ("fre", 0.5))
    ]
    (tmp_path / "evaluation.json").write_text(json.dumps({"settings": {}, "checkpoints": checkpoints}))
    run = read_run(tmp_path)
    accuracies = [{file: held.accuracy for file, held in run.held_out(stage).items()} for stage in run.stages]
    assert accuracies == [{"text": 0.5}, {"text": 0.75}, {}]


def test_a_share_above_one_in_an_evaluation_is_refused(tmp_path):
    write_curriculum(tmp_path, steps=1)
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    evaluation["checkpoints"][1]["files"]["image"]["accuracy"] = 36.0
    (tmp_path / "evaluation.json").write_text(json.dumps(evaluation))
    with pytest.raises(
        UserError, match=r"evaluation\.json: checkpoints\.1\.files\.image\.accuracy: Input should be less than or"
    ):
        read_run(tmp_path)


@pytest.mark.parametrize(("text", "complaint"), table("records/run", "a_malformed_stage_json_is_named"))
def test_a_malformed_stage_json_is_named(tmp_path, text, complaint):
    (tmp_path / "stage.json").write_text(text)
    with pytest.raises(UserError) as caught:
        read_run(tmp_path)
    assert str(tmp_path / "stage.json") in str(caught.value)
    assert complaint in str(caught.value)


def test_a_folder_without_a_stage_and_a_missing_folder_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no stage"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: is a file; give a run folder"):
        read_run(tmp_path / "file")


def test_a_file_of_a_run_that_cannot_be_read_is_named(tmp_path):
    write_stage(tmp_path, name="fre", steps=1, seconds=1.0, hour=9)
    (tmp_path / "rollouts.jsonl").mkdir()
    with pytest.raises(UserError, match=r"rollouts\.jsonl: cannot be read \(Is a directory\)"):
        read_run(tmp_path)
