"""PPO with a critic on text and image rows: it learns its returns, goes on where it stopped, and gives rewards itself."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.commands import flags, with_image, write_rows
from helpers.commands_here import Ended, run_here
from helpers.conversations import message
from helpers.run_folders import check_listed
from helpers.value_models import make_value_model
from PIL import Image

from lmm_r1.lmm_kits import get_kit

KIT = "qwen2_5_vl"
PROMPTS, SAMPLES, STEPS = 4, 2, 6
PER_STEP = PROMPTS * SAMPLES
# 2 for every response to an image, 0 for one to a text alone; after as many samples as the file `limit` says, no number.
REWARD = """
from pathlib import Path
given = 0
limit = Path(__file__).with_name("limit")
def reward_func(queries, prompts, labels):
    global given
    if limit.exists() and given >= int(limit.read_text()):
        return {"rewards": [float("nan")] * len(queries)}
    given += len(queries)
    return {"rewards": [2.0 * ("image" in prompt) for prompt in prompts]}
"""

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Runs:
    """A folder in which runs take place, and how one is made."""

    folder: Path
    start: Callable[..., Ended]

    def metrics(self, name: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def rollouts(self, name: str, *, step: int) -> list[dict]:
        lines = (self.folder / name / "rollouts.jsonl").read_text().splitlines()
        return [rollout for rollout in map(json.loads, lines) if rollout["step"] == step]


@pytest.fixture(scope="module")
def runs(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "reward.py").write_text(REWARD)
    Image.new("RGB", (56, 84), "red").save(folder / "red.png")
    question = {"messages": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46"}
    write_rows(folder, *[question, with_image("red.png")] * (PROMPTS * STEPS // 2))
    values: dict[str, object] = {
        "actor.model_name_or_path": tiny_checkpoint(KIT),
        "actor.num_gpus_per_node": 1,
        "critic.num_gpus_per_node": 1,
        "critic.adam.lr": 3e-3,
        "critic.lr_scheduler": "constant",
        "ref.num_gpus_per_node": 1,
        "reward.num_gpus_per_node": 1,
        "data.prompt_dataset": "rows.jsonl",
        "data.max_len": 200,
        "algo.advantage.estimator": "gae",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": 8,
        "rollout.micro_batch_size": PER_STEP,
        "train.batch_size": PER_STEP,
        "train.micro_batch_size": PER_STEP // 2,
        "train.max_epochs": 4,
        "ds.param_dtype": "fp32",
        "logger.rollouts_per_step": PER_STEP,
    }

    def start(name: str, *switches: str, **changes: object) -> Ended:
        given = values | {"ckpt.output_dir": name}
        argv = flags(given | {key.replace("__", "."): value for key, value in changes.items()})
        return run_here("train_ppo_ray", ["--train.colocate_all", *argv, *switches], folder=folder)

    return Runs(folder=folder, start=start)


@pytest.fixture(scope="module")
def finished(runs: Runs) -> Runs:
    """A run that the reward source stops in its fourth step, and that is then taken up to its end."""
    (runs.folder / "limit").write_text(str(3 * PER_STEP))
    stopped = runs.start("ppo", "--critic.save_value_network", reward__remote_url="reward.py")
    assert stopped.code == 1, stopped.stdout + stopped.stderr
    assert "error: rows.jsonl line " in stopped.stderr
    assert ": --reward.remote_url gives reward nan, score nan for a response" in stopped.stderr
    assert (
        f"rl stopped at step 3/{STEPS}; step 3 is saved in ppo/checkpoints, the same command goes on" in stopped.stderr
    )
    assert [line["step"] for line in runs.metrics("ppo")] == [1, 2, 3]

    (runs.folder / "limit").unlink()
    ended = runs.start("ppo", "--critic.save_value_network", reward__remote_url="reward.py", ckpt__save_steps=STEPS)
    assert ended.code == 0, ended.stdout + ended.stderr
    assert f"resumed at step 3/{STEPS}" in ended.stdout
    return runs


def test_every_tokens_return_is_the_reward_of_its_response(finished):
    metrics = finished.metrics("ppo")
    check_listed(finished.folder / "ppo", "Every RL run", "Critic")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for line in metrics:
        rollouts = finished.rollouts("ppo", step=line["step"])
        assert len(rollouts) == PER_STEP
        # Without discount, with lambda 1 and without a KL penalty; the mean is over tokens.
        weighted = sum(rollout["reward"] * rollout["response_tokens"] for rollout in rollouts)
        assert line["returns"] == pytest.approx(weighted / sum(rollout["response_tokens"] for rollout in rollouts))
        assert line["reward"] == pytest.approx(sum(rollout["reward"] for rollout in rollouts) / PER_STEP)


def test_the_critic_learns_and_goes_on_from_where_it_stopped(finished):
    metrics = finished.metrics("ppo")
    losses = [line["critic_loss"] for line in metrics]
    # A new critic says about 0, where half of the mean square of rewards of 2 and of 0 is about 1; it learns at once.
    assert losses[0] > 0.1
    assert max(losses[3:]) < losses[0] / 4, "also the first one after it was taken up"
    for line in metrics[3:]:
        assert line["values"] == pytest.approx(line["returns"], abs=0.4)
    assert all(line["critic_lr"] == pytest.approx(3e-3) and line["critic_grad_norm"] > 0 for line in metrics)


def test_the_saved_critic_tells_images_from_text(finished, tiny_checkpoint):
    kit, folder = get_kit(KIT), finished.folder / "ppo_critic"
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    critic = make_value_model(folder)
    values = []
    for chat, image in (
        ("What is 12 + 34?", None),
        ("What is 1+1?", Image.open(finished.folder / "red.png").convert("RGB")),
    ):
        parts = [chat] if image is None else [image, chat]
        encoded = kit.encode(
            processor,
            [message("user", *parts)],
            images=[] if image is None else [image],
            videos=[],
            add_generation_prompt=True,
        )
        ids = torch.tensor([encoded.token_ids])
        with torch.no_grad():
            values.append(critic(ids, attention_mask=torch.ones_like(ids), media=[encoded.media]).item())
    text, image = values
    assert text == pytest.approx(0.0, abs=0.5)
    assert image == pytest.approx(2.0, abs=0.5)


def test_a_critic_is_a_reward_model_in_place_of_a_service(finished):
    ended = finished.start(
        "from_model",
        "--reward.model_name_or_path",
        "ppo_critic",
        data__max_samples=PROMPTS,
        train__max_epochs=1,
        # The text of two random tokens mostly gives these tokens again.
        rollout__max_new_tokens=2,
    )
    assert ended.code == 0, ended.stdout + ended.stderr
    (line,) = finished.metrics("from_model")
    rollouts = finished.rollouts("from_model", step=1)
    assert line["reward"] == pytest.approx(sum(rollout["reward"] for rollout in rollouts) / PER_STEP)
    assert line["reward"] == pytest.approx(line["rollout/reward_mean"])

    kit, folder = get_kit(KIT), finished.folder / "ppo_critic"
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    model, checked = make_value_model(folder, "reward"), set()
    for rollout in rollouts:
        (turn,) = rollout["messages"]
        images = [
            Image.open(finished.folder / "red.png").convert("RGB")
            for part in turn["content"]
            if part["type"] == "image"
        ]
        texts = [part["text"] for part in turn["content"] if part["type"] == "text"]
        prompt = kit.encode(
            processor, [message("user", *images, *texts)], images=images, videos=[], add_generation_prompt=True
        )
        tokenizer = kit.tokenizer_of(processor)
        response = tokenizer.encode(rollout["response"], add_special_tokens=False)
        response += [] if rollout["truncated"] else [tokenizer.eos_token_id]
        if len(response) != rollout["response_tokens"]:
            continue  # the text of random tokens does not always give the same tokens again
        ids = torch.tensor([[*prompt.token_ids, *response]])
        with torch.no_grad():
            reward = model(ids, attention_mask=torch.ones_like(ids), media=[prompt.media]).item()
        assert rollout["reward"] == pytest.approx(reward, abs=1e-4)
        checked.add(len(images))
    assert checked
