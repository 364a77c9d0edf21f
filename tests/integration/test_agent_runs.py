"""Reinforcement learning on episodes through the command, on real Ray, DeepSpeed and vLLM, with a user's environment."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import openrlhf.utils.deepspeed.deepspeed as upstream
import pytest
import torch
from helpers.commands import write_rows
from helpers.conversations import picture
from safetensors.torch import load_file

from lmm_r1.cli import train_ppo_ray
from lmm_r1.errors import UserError

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STEPS, PROMPTS, SAMPLES = 2, 2, 3
# Shows a crop after each of the first two turns, and pays for the length of the third.
ENVIRONMENT = """
from PIL import Image

from lmm_r1.agents.environment import Answered, Environment, Episode
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, TextPart, images_of


class Looks(Environment):
    name = "looks"
    rewards = ("odd",)
    counts = ("looks",)

    def __init__(self, *, looks=1):
        self.looks = looks

    def begin(self, row, *, seed):
        return Look(row, seed, self.looks)


class Look(Episode):
    def __init__(self, row, seed, looks):
        self.row, self.seed, self.looks = row, seed, looks

    async def answer(self, turn):
        if turn.number == self.looks:
            return Answered(rewards={"odd": float(len(turn.text) % 2)})
        image = load_image(images_of(self.row.messages)[0], location=self.row.location)
        side = 28 * (1 + turn.number)
        left = (self.seed + turn.number) % 28
        crop = image.crop((left, 0, left + 2 * side, side))
        return Answered(shown=(TextPart(f"Look {turn.number}: "), ImagePart(crop)), counts={"looks": 1})
"""


@pytest.fixture
def new_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed keeps the groups of the first training in a process for good; what a CPU replaces comes back."""
    monkeypatch.setattr("deepspeed.comm.comm.cdb", None)
    monkeypatch.setattr("deepspeed.utils.groups._WORLD_GROUP", None)
    monkeypatch.setattr(upstream, "init_device_mesh", upstream.init_device_mesh)


def command(tmp_path: Path, model: Path, *more: str, environment: str = ENVIRONMENT) -> list[str]:
    images = [tmp_path / f"{number}.png" for number in range(PROMPTS * STEPS)]
    for number, path in enumerate(images):
        picture(112 + 28 * number, 84).save(path)
    rows = [
        {
            "message": json.dumps(
                [
                    {
                        "role": "user",
                        "content": [{"type": "image", "image": str(path)}, {"type": "text", "text": "Which?"}],
                    }
                ]
            ),
        }
        for path in images
    ]
    (tmp_path / "looks.py").write_text(environment)
    return [
        *("--actor.model_name_or_path", str(model), "--data.prompt_dataset", str(write_rows(tmp_path, *rows))),
        *("--train.agent", str(tmp_path / "looks.py"), "--agent.options", '{"looks": 2}', "--data.max_len", "512"),
        *("--ckpt.output_dir", str(tmp_path / "run")),
        *("--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1", "--vllm.num_engines", "1"),
        *("--train.colocate_all", "--algo.kl.init_coef", "0", "--ds.zero_stage", "2", "--ds.param_dtype", "fp32"),
        *("--rollout.batch_size", str(PROMPTS), "--rollout.n_samples_per_prompt", str(SAMPLES)),
        *("--rollout.max_new_tokens", "8", "--train.batch_size", str(PROMPTS * SAMPLES), "--actor.adam.lr", "1e-3"),
        *("--logger.rollouts_per_step", str(PROMPTS * SAMPLES), *more),
    ]


def test_a_policy_is_trained_on_episodes_of_an_environment(
    tiny_checkpoint: Callable[[str], Path], tmp_path, own_environment, new_process_group
):
    train_ppo_ray.main(command(tmp_path, tiny_checkpoint("qwen2_5_vl")))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    # What the trainer computes at generated positions is what the engine sampled by, crops and all.
    assert 0 < metrics[0]["mismatch/mean"] < 1e-4
    for line in metrics:
        assert (line["turns"], line["looks"], line["shown_images"]) == (3.0, 2.0, 2.0)
        assert (line["over_turn"], line["environment_failed"]) == (0.0, 0.0)
        assert line["reward"] == line["odd"]
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == STEPS * PROMPTS * SAMPLES
    for line in rollouts:
        roles = [role for role, _ in line["said"]]
        assert roles == ["assistant", "user", "assistant", "user", "assistant"]
        assert (line["said"][1][1], line["said"][-1][1]) == ("Look 0: <image>", line["response"])


def test_branches_of_an_episode_are_generated_and_computed_once_as_far_as_they_go_together(
    tiny_checkpoint: Callable[[str], Path], tmp_path, own_environment, new_process_group
):
    samples = 4
    branching = ("--rollout.n_samples_per_prompt", str(samples), "--agent.branches", "2", "--agent.branch_turn", "2")
    batch = str(PROMPTS * samples)
    train_ppo_ray.main(
        command(
            tmp_path,
            tiny_checkpoint("qwen2_5_vl"),
            *(*branching, "--train.batch_size", batch, "--logger.rollouts_per_step", batch),
        )
    )
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < metrics[0]["mismatch/mean"] < 1e-4
    for line in metrics:
        assert (line["turns"], line["shown_images"], line["environment_failed"]) == (3.0, 2.0, 0.0)
        assert line["tokens/update_computed"] == line["tokens/update_unique"]
        # Trunks go on to the same two pictures, and branches part behind them.
        whole = PROMPTS * samples * line["total_length"]
        assert line["tokens/update_unique"] < 0.6 * whole
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    begun = Counter(json.dumps([line["step"], line["said"][:4]]) for line in rollouts)
    assert set(begun.values()) <= {2, 4}
    assert len(rollouts) == STEPS * PROMPTS * samples


def test_a_file_without_an_environment_is_told_before_anything_starts(tiny_checkpoint, tmp_path):
    argv = command(tmp_path, tiny_checkpoint("qwen2_5_vl"))
    (tmp_path / "looks.py").write_text("pass\n")
    with pytest.raises((UserError, SystemExit)):
        train_ppo_ray.main(argv)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# The same, but that the last turn is to be a number.
CONSTRAINED = ENVIRONMENT.replace(
    "import Answered, Environment, Episode", "import Answered, Environment, Episode, TurnOptions"
)
CONSTRAINED = CONSTRAINED.replace(
    'counts={"looks": 1})',
    'counts={"looks": 1}, options=TurnOptions(regex="[0-9]{1,3}") if turn.number == self.looks - 1 else TurnOptions())',
)


def metrics_of(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_last_turn_of_a_given_form_is_trained_around(
    tiny_checkpoint: Callable[[str], Path], tmp_path, own_environment, new_process_group
):
    train_ppo_ray.main(command(tmp_path, tiny_checkpoint("qwen2_5_vl"), environment=CONSTRAINED))
    metrics = metrics_of(tmp_path)
    assert [line["step"] for line in metrics] == [1, 2]
    # The engine's log-probs of the last turn are those among digits alone, nats away from the trainer's.
    assert 0 < metrics[0]["mismatch/mean"] < 1e-4
    assert metrics[0]["mismatch/max"] < 1e-3
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert all(re.fullmatch("[0-9]{1,3}", line["response"]) for line in rollouts)
    assert {line["turns"] for line in metrics} == {3.0}


@pytest.mark.full
def test_a_step_of_episodes_that_all_went_too_far_moves_no_weight(
    tiny_checkpoint: Callable[[str], Path], tmp_path, own_environment, new_process_group
):
    model = tiny_checkpoint("qwen2_5_vl")
    train_ppo_ray.main(command(tmp_path, model, "--agent.max_turns", "2", "--actor.entropy_coef", "0.1"))
    for line in metrics_of(tmp_path):
        assert (line["over_turn"], line["masked"], line["turns"]) == (1.0, 1.0, 2.0)
        assert (line["policy_loss"], line["entropy_loss"], line["actor_grad_norm"]) == (0.0, 0.0, 0.0)
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "run"))
    assert all(torch.equal(before[name], after[name]) for name in before)
