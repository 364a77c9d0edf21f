"""A prompt that turns out too long for the budget when the engine encodes it, and an engine that disagrees."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import QUESTION, SMALL_RUN, flags, one_sentence, with_image, write_rows
from helpers.commands_here import Ended, run_here
from PIL import Image

# A reward file of EasyR1's, which gets both responses of a group at once, with the images of their row.
REWARD = """
REWARD_TYPE = "batch"


def compute_score(reward_inputs):
    assert len(reward_inputs) == 2
    return [
        {
            "overall": item["response_length"] % 2,
            "pictures": sum(image.width > 0 for image in item["images"]),
            "told_step": item["step"],
        }
        for item in reward_inputs
    ]


def lengths(queries, prompts, labels):
    return {"rewards": [float(len(query) % 7) for query in queries]}
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def train(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., Ended]:
    """One RL run over rows.jsonl in `tmp_path`, two prompts a step."""
    (tmp_path / "reward.py").write_text(REWARD)
    values = SMALL_RUN | {
        "actor.model_name_or_path": tiny_checkpoint("qwen2_5_vl"),
        "data.prompt_dataset": "rows.jsonl",
        "data.max_len": 200,
        "reward.remote_url": "reward.py:compute_score",
        "rollout.max_new_tokens": 8,
        "rollout.micro_batch_size": 4,
        "train.micro_batch_size": 4,
        "algo.kl.init_coef": 0,
        "ckpt.path": "out/checkpoints",
    }

    def run(**changes: object) -> Ended:
        argv = flags(values | {name.replace("__", "."): value for name, value in changes.items()})
        return run_here("train_ppo_ray", ["--train.colocate_all", *argv], folder=tmp_path)

    return run


def test_an_image_prompt_over_the_budget_is_skipped_counted_and_never_cut(train, tmp_path):
    Image.new("RGB", (560, 560)).save(tmp_path / "large.png")  # 20 x 20 placeholders: more than --data.max_len
    Image.new("RGB", (56, 56)).save(tmp_path / "small.png")
    # With the default seed the first two rows drawn are 0 and 2, so the third takes the place of the skipped one.
    write_rows(tmp_path, with_image("large.png"), QUESTION, with_image("small.png"))
    ended = train(data__overlong_prompts="skip", data__overlong_images="keep")
    assert ended.code == 0, ended.stderr
    assert "(1 overlong prompts skipped)" in ended.stdout
    (metrics,) = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    assert metrics["overlong_prompts"] == 1
    # One group of each kind, on which engine and trainer agree.
    assert metrics["rows/image"] == 0.5
    assert metrics["pictures"] == 0.5
    assert metrics["told_step"] == metrics["step"] == 1
    for kind in ("text", "image"):
        assert 0 < metrics[f"mismatch/{kind}/mean"] <= metrics[f"mismatch/{kind}/max"] < 1e-4
    shown = [json.loads(line)["messages"] for line in (tmp_path / "out/rollouts.jsonl").read_text().splitlines()]
    images = [part for messages in shown for part in messages[0]["content"] if part["type"] == "image"]
    assert len(shown) == 4
    assert len(images) == 2, "both samples of the small image, none of the large one"


def test_a_run_whose_engine_and_trainer_disagree_stops_before_its_first_update(train, tmp_path):
    write_rows(tmp_path, QUESTION, QUESTION)
    # Rounding alone is beyond this limit.
    ended = train(algo__mismatch_limit=1e-12)
    assert ended.code == 1
    sentence = one_sentence(ended.stderr, prefix="lmm-r1 train_ppo_ray: error: ")
    assert "disagree on the log-probs of a step's samples" in sentence
    assert "of text rows" in sentence
    assert "No weight was changed." in sentence
    left = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert left.isdisjoint({"metrics.jsonl", "rollouts.jsonl", "model.safetensors", "latest"}), left


def test_an_image_that_cannot_be_decoded_is_left_out_and_listed_or_stops_the_run_with_the_way_to_go_on(
    train, tmp_path
):
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8)).save(stream, "PNG")
    # Beginning and ending are those of a whole image.
    content = bytearray(stream.getvalue())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    (tmp_path / "broken.png").write_bytes(content)
    # With the default seed the first two rows drawn are 0 and 2.
    write_rows(tmp_path, with_image("broken.png"), QUESTION, QUESTION)
    ended = train(reward__remote_url="reward.py:lengths")
    assert ended.code == 1
    assert "rows.jsonl line 1: cannot read the image " in ended.stderr
    assert "To continue this run, repeat the command with --data.bad_rows skip" in ended.stderr
    ended = train(reward__remote_url="reward.py:lengths", data__bad_rows="skip")
    assert ended.code == 0, ended.stderr
    assert "(1 prompts that cannot be encoded left out)" in ended.stdout
    (line,) = (tmp_path / "out/left_out_rows.jsonl").read_text().splitlines()
    assert (json.loads(line)["dataset"], json.loads(line)["index"]) == ("rows.jsonl", 0)
