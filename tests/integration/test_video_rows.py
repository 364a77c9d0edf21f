"""Rows with videos, as a file and as frames, through supervised training, reinforcement learning and evaluation."""

import json
from pathlib import Path

import pytest
from helpers.commands import flags, write_rows
from helpers.commands_here import Ended, run_here
from helpers.conversations import clip, picture

REWARD = "def reward_func(queries, prompts, labels):\n    return {'rewards': [float(len(query) % 2) for query in queries]}\n"
# The two that are unlike each other: with an engine class of its own, and with times as text between the frames.
VIDEO_KITS = ("qwen2_5_vl", "qwen3_vl")
SOLUTION = {"role": "assistant", "content": "<think>easy</think><answer>2</answer>"}

pytestmark = pytest.mark.slow


def write_media(folder: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    picture(84, 56).save(folder / "still.png")
    writer = cv2.VideoWriter(str(folder / "clip.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 8, (84, 56))
    for index, frame in enumerate(clip(12, 84, 56).source):
        frame.save(folder / f"{index}.png")
        writer.write(cv2.imread(str(folder / f"{index}.png")))
    writer.release()


def questions() -> list[list[dict]]:
    """Contents with a file, with frames, with an image beside a video, and text alone."""
    text = {"type": "text", "text": "What is 1+1?"}
    file = {"type": "video", "video": "clip.avi", "fps": 4, "max_pixels": 4000}
    frames = {"type": "video", "video": [f"{index}.png" for index in range(3)], "fps": 1.0}
    return [[file, text], [frames, file, text], [{"type": "image", "image": "still.png"}, frames, text], [text]]


def run(command: str, folder: Path, *switches: str, **values: object) -> Ended:
    argv = flags({name.replace("__", "."): value for name, value in values.items()})
    return run_here(command, [*switches, *argv], folder=folder)


# What each kit makes of videos is test_kit_videos' subject; this is about the commands.
@pytest.mark.parametrize("name", VIDEO_KITS[-1:])
def test_rows_with_videos_are_learnt_rolled_out_and_evaluated(name, tiny_checkpoint, tmp_path):
    write_media(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    prompts = [{"messages": [{"role": "user", "content": content}], "answer": "2"} for content in questions()]
    write_rows(tmp_path, *({**row, "messages": [*row["messages"], SOLUTION]} for row in prompts)).rename(
        tmp_path / "solved.jsonl"
    )
    write_rows(tmp_path, *prompts)
    shared = {"ds__param_dtype": "fp32", "data__max_len": 1024}

    learnt = run(
        "train_sft",
        tmp_path,
        model__model_name_or_path=tiny_checkpoint(name),
        data__dataset="solved.jsonl",
        train__batch_size=2,
        train__micro_batch_size=2,
        train__max_epochs=1,
        ckpt__output_dir="sft",
        ckpt__path="sft/checkpoints",
        **shared,
    )
    assert learnt.code == 0, learnt.stderr
    rolled_out = run(
        "train_ppo_ray",
        tmp_path,
        "--train.colocate_all",
        actor__model_name_or_path="sft",
        actor__num_gpus_per_node=1,
        ref__num_gpus_per_node=1,
        data__prompt_dataset="rows.jsonl",
        reward__remote_url="reward.py",
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=2,
        rollout__max_new_tokens=8,
        rollout__micro_batch_size=4,
        train__batch_size=8,
        train__micro_batch_size=4,
        algo__kl__init_coef=0,
        algo__advantage__is_correction_level="token",
        ckpt__output_dir="rl",
        ckpt__path="rl/checkpoints",
        **shared,
    )
    assert rolled_out.code == 0, rolled_out.stderr
    (metrics,) = map(json.loads, (tmp_path / "rl/metrics.jsonl").read_text().splitlines())
    # The engine's log-probs are the policy's own, so that nothing is corrected.
    assert abs(metrics["vllm_kl"]) < 1e-4
    shown = [json.loads(line)["messages"][0]["content"] for line in (tmp_path / "rl/rollouts.jsonl").open()]
    assert sum(part["type"] == "video" for content in shown for part in content) == 8, "4 videos in 2 samples each"

    evaluated = run(
        "evaluate",
        tmp_path,
        checkpoints="rl=rl",
        files="rows=rows.jsonl",
        max_new_tokens=8,
        max_model_len=1024,
        output="evaluation.json",
    )
    assert evaluated.code == 0, evaluated.stderr
    (checkpoint,) = json.loads((tmp_path / "evaluation.json").read_text())["checkpoints"]
    assert checkpoint["files"]["rows"]["rows"] == 4


def test_a_video_for_a_language_model_or_a_broken_one_stops_the_command_with_its_row(tiny_checkpoint, tmp_path):
    write_media(tmp_path)
    (tmp_path / "broken.mp4").write_text("no video")
    turn = {"role": "user", "content": [{"type": "video", "video": "broken.mp4"}]}
    write_rows(tmp_path, {"messages": [turn, SOLUTION], "answer": "2"})
    for name, sentence in (
        ("llm", "the row has a video, but --model.model_name_or_path"),
        (VIDEO_KITS[0], f"cannot read the video {tmp_path}/broken.mp4"),
    ):
        ended = run(
            "train_sft",
            tmp_path,
            model__model_name_or_path=tiny_checkpoint(name),
            data__dataset="rows.jsonl",
            train__batch_size=1,
            train__micro_batch_size=1,
            ckpt__output_dir="out",
        )
        assert ended.code == 1
        assert f"error: rows.jsonl line 1: {sentence}" in ended.stderr, ended.stderr
