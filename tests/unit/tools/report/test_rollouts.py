import base64
import io

import PIL.Image
import pytest
from helpers.run_folders import rollout, write_image, write_lines, write_stage
from helpers.tables import table

from lmm_r1.records.run_folder import read_run
from lmm_r1.tools.evaluation.page_parts import ImageError, data_uri
from lmm_r1.tools.report.rollout_sample import InlineImages, Series, sample_rollouts, verdict


def png(width, height, *, noise=False):
    image = PIL.Image.effect_noise((width, height), 90) if noise else PIL.Image.new("RGB", (width, height), "red")
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def image_message(reference):
    return [{"role": "user", "content": [{"type": "image", "image": reference}, {"type": "text", "text": "What?"}]}]


def sample_of(*folders, limit):
    runs = [read_run(folder) for folder in folders]
    series = [Series(run=run.name, stage=stage, color=1) for run in runs for stage in run.stages]
    return sample_rollouts(series, limit=limit)


def parts_of(sample, record):
    return [part for message in sample.prompts[record["prompt"]] for part in message["parts"]]


def test_a_sample_is_spread_over_the_steps_of_all_stages(tmp_path):
    for hour, name in ((9, "fre"), (10, "mgt")):
        write_stage(tmp_path / name, name=name, steps=3, seconds=1.0, hour=hour)
        lines = [rollout(step=step, group=group) for step in (1, 2, 3) for group in range(10)]
        write_lines(tmp_path / name / "rollouts.jsonl", lines)
    sample = sample_of(tmp_path, limit=12)
    assert sample.total == 60
    found = [(record["series"], record["step"]) for record in sample.rollouts]
    assert found == [(series, step) for series in (0, 1) for step in (1, 2, 3) for _ in range(2)]


@pytest.mark.parametrize(
    ("limit", "taken"),
    [
        (0, []),
        # Not even one group has room: parts of groups.
        (3, [(1, 0), (2, 1), (3, 1)]),
        (4, [(1, 0)]),
        # Two groups; a third would be 12.
        (11, [(1, 0), (3, 1)]),
        (12, [(1, 0), (2, 0), (3, 1)]),
        (23, [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]),
        (24, [(step, group) for step in (1, 2, 3) for group in (0, 1)]),
    ],
)
def test_groups_stay_whole_in_a_page_that_has_room_for_some_only(tmp_path, limit, taken):
    write_stage(tmp_path, name="fre", steps=3, seconds=1.0, hour=9)
    lines = [rollout(step=step, group=group) for step in (1, 2, 3) for group in (0, 1) for _ in range(4)]
    write_lines(tmp_path / "rollouts.jsonl", lines)
    sample = sample_of(tmp_path, limit=limit)
    found = [(record["step"], record["group"]) for record in sample.rollouts]
    assert found == [group for group in taken for _ in range(1 if limit == 3 else 4)]


def test_a_group_of_held_out_rows_is_another_than_that_of_the_step(tmp_path):
    write_stage(tmp_path, name="fre", steps=1, seconds=1.0, hour=9)
    held_out = [rollout(step=1, held_out=True)]
    write_lines(tmp_path / "rollouts.jsonl", [*(rollout(step=1) for _ in range(4)), *held_out])
    assert [record["held_out"] for record in sample_of(tmp_path, limit=4).rollouts] == [False] * 4


def test_the_same_prompt_stands_in_the_page_once_whichever_run_and_step_it_was_sampled_in(tmp_path):
    for run, name in (("a", "first.png"), ("b", "second.png")):
        write_stage(tmp_path / run, name="mgt", steps=2, seconds=1.0, hour=9)
        write_image(tmp_path / run / name, number=3)
        lines = [rollout(step=step, messages=image_message(name)) for step in (1, 2)]
        write_lines(tmp_path / run / "rollouts.jsonl", [*lines, rollout(step=2)])
    sample = sample_of(tmp_path / "a", tmp_path / "b", limit=9)
    assert len(sample.images) == 1
    assert [(record["series"], record["prompt"]) for record in sample.rollouts] == [
        (0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (1, 1),
    ]  # fmt: skip


def test_an_image_that_cannot_be_shown_says_why_and_is_counted(tmp_path):
    run = tmp_path / "run"
    write_stage(run, name="mgt", steps=1, seconds=1.0, hour=9)
    write_image(tmp_path / "private.png", number=1)
    (run / "notes.png").write_text("no image")
    reasons = {
        "images/gone.png": "file not found",
        "../private.png": "not in the run folder",
        str(tmp_path / "private.png"): "not in the run folder",
        "https://example.org/a.png": "not in the run folder",
        "notes.png": "not a readable image",
    }
    write_lines(run / "rollouts.jsonl", [rollout(step=1, messages=image_message(name)) for name in reasons])
    sample = sample_of(run, limit=9)
    parts = [parts_of(sample, record)[0] for record in sample.rollouts]
    assert parts == [{"missing": f"{name}: {reason}"} for name, reason in reasons.items()]
    assert (sample.images, sample.missing_images) == ([], 5)


def test_a_heavy_image_is_reduced_and_a_light_one_kept_as_it_is():
    light = png(30, 20)
    heavy = png(900, 600, noise=True)
    assert data_uri(light) == f"data:image/png;base64,{base64.b64encode(light).decode()}"
    kind, _, content = data_uri(heavy).partition(",")
    assert kind == "data:image/webp;base64"
    assert PIL.Image.open(io.BytesIO(base64.b64decode(content))).size == (640, 427)


def test_of_thousands_of_images_heavy_ones_are_made_smaller(tmp_path):
    (tmp_path / "a.png").write_bytes(png(400, 300, noise=True))
    images = InlineImages(count=5000)
    images.add("a.png", folder=tmp_path)
    content = base64.b64decode(next(iter(images.uris)).removeprefix("data:image/webp;base64,"))
    assert PIL.Image.open(io.BytesIO(content)).size == (320, 240)


def test_a_data_uri_is_checked_like_a_file(tmp_path):
    images = InlineImages()
    assert images.add(data_uri(png(4, 4)), folder=tmp_path) == 0
    with pytest.raises(ImageError, match="not a readable image"):
        images.add("data:image/svg+xml;base64,PHN2Zy8+", folder=tmp_path)
    with pytest.raises(ImageError, match="not a base64 data URI"):
        images.add("data:image/png;base64,***", folder=tmp_path)


@pytest.mark.parametrize(
    ("scores", "expected"), table("report/rollouts", "test_the_verdict_follows_from_the_accuracy_score")
)
def test_the_verdict_follows_from_the_accuracy_score(tmp_path, scores, expected):
    write_stage(tmp_path, name="fre", steps=1, seconds=1.0, hour=9)
    write_lines(tmp_path / "rollouts.jsonl", [rollout(step=1, scores=scores)])
    (found,) = read_run(tmp_path).stages[0].rollouts.read([0])
    assert verdict(found) == expected


@pytest.mark.parametrize(
    ("dropped", "shown"), [("std", "rewards hardly differ"), ("range", "mean out of range"), (None, None)]
)
def test_a_group_that_was_dropped_says_why(tmp_path, dropped, shown):
    write_stage(tmp_path, name="fre", steps=1, seconds=1.0, hour=9)
    write_lines(tmp_path / "rollouts.jsonl", [rollout(step=1, group=4, dropped=dropped)])
    (record,) = sample_of(tmp_path, limit=5).rollouts
    assert record["dropped"] == shown
