"""Reinforcement learning on episodes through the command, on real Ray, DeepSpeed and vLLM, with a user's environment."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import write_rows
from helpers.conversations import picture
from PIL import Image

from lmm_r1.cli import train_ppo_ray

pytestmark = pytest.mark.slow

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

# In OpenRLHF's form: it writes the chat template's marks itself. In the second step, whose rollout is made ahead, it answers
# the second turn when the first step is learnt from: turns before that are of other weights than the one behind it.
TURN_BY_TURN = """
import asyncio
from pathlib import Path

import torch
from PIL import Image

from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

LEARNT = Path(__file__).parent / "run" / "metrics.jsonl"
BEGUN = []


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        BEGUN.append(self)
        self.turns, self.is_ahead = 0, len(BEGUN) > EPISODES
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        while self.turns == 2 and self.is_ahead and not (LEARNT.is_file() and LEARNT.read_text()):
            await asyncio.sleep(0.01)
        done = self.turns == 3
        reward = torch.tensor(float(len(states["action_text"]) % 2 if done else 0))
        mark = "<|vision_start|><|image_pad|><|vision_end|>" if self.turns == 2 else ""
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": f"\\n<|im_start|>user\\n{mark}Again.<|im_end|>\\n<|im_start|>assistant\\n",
            "environment_images": [Image.new("RGB", (56, 84), (self.turns, 90, 30))] if mark else None,
            "done": done,
            "sampling_params": states["sampling_params"],
            "extra_logs": {"taken": self.turns} if done else {},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
""".replace("EPISODES", str(PROMPTS * SAMPLES))
# Lets an agent that knows nothing of training talk to the policy over HTTP, and puts its episode together.
SERVED = """
import socket
import threading
import time
import urllib.request

import uvicorn
from fastapi import FastAPI, Request
from openai import AsyncOpenAI
from openrlhf.utils.agent import AgentExecutorBase
from vllm import SamplingParams


class AgentExecutor(AgentExecutorBase):
    client = None

    def serve(self):
        app, self.traces = FastAPI(), {}

        @app.post("/v1/chat/completions")
        async def complete(request: Request):
            asked = await request.json()
            text = self.tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            wanted = SamplingParams(max_tokens=asked["max_tokens"], temperature=asked["temperature"], logprobs=1)
            part = (await self.engine.generate(ids, wanted)).outputs[0]
            self.traces[asked["session_id"]] = (ids, list(part.token_ids))
            message = {"role": "assistant", "content": part.text}
            choice = {"index": 0, "message": message, "finish_reason": part.finish_reason}
            return {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        run = lambda: uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
        threading.Thread(target=run, daemon=True).start()
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        self.client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        if self.client is None:
            self.engine, self.tokenizer = llm_engine, hf_tokenizer
            self.serve()
        session = str(time.monotonic_ns())
        reply = await self.client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=sampling_params.max_tokens,
            temperature=sampling_params.temperature,
            extra_body={"session_id": session},
        )
        ids, generated = self.traces.pop(session)
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": ids + generated,
            "action_ranges": [(len(ids), len(ids) + len(generated))],
            "rollout_log_probs": None,
            "truncated": False,
            "reward": float(len(reply.choices[0].message.content) % 2),
            "scores": None,
            "extra_logs": {"asked": 1.0},
        }
"""


AHEAD = ("--train.async_enable", "--train.partial_rollout_enable")


def command(
    tmp_path: Path,
    model: Path,
    *more: str,
    environment: str = ENVIRONMENT,
    agent_func: str | None = None,
    pictures: bool = True,
    together: bool = True,
) -> list[str]:
    """Args: together: models and engine take turns."""
    images = [tmp_path / f"{number}.png" for number in range(PROMPTS * STEPS)]
    for number, path in enumerate(images):
        picture(112 + 28 * number, 84).save(path)
    rows = [
        {
            "message": json.dumps(
                [
                    {
                        "role": "user",
                        "content": [
                            *([{"type": "image", "image": str(path)}] if pictures else []),
                            {"type": "text", "text": f"Which {number}?"},
                        ],
                    }
                ]
            )
        }
        for number, path in enumerate(images)
    ]
    (tmp_path / "looks.py").write_text(agent_func or environment)
    agent = ("--train.agent_func_path",) if agent_func else ("--agent.options", '{"looks": 2}', "--train.agent")
    return [
        *("--actor.model_name_or_path", str(model), "--data.prompt_dataset", str(write_rows(tmp_path, *rows))),
        *(*agent, str(tmp_path / "looks.py"), "--data.max_len", "512"),
        *("--ckpt.output_dir", str(tmp_path / "run")),
        *("--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1", "--vllm.num_engines", "1"),
        *(("--train.colocate_all",) * together),
        *("--algo.kl.init_coef", "0", "--ds.zero_stage", "2", "--ds.param_dtype", "fp32"),
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
        roles = [turn["role"] for turn in line["said"]]
        assert roles == ["assistant", "user", "assistant", "user", "assistant"]
        text, crop = line["said"][1]["content"]
        last = "".join(part["text"] for part in line["said"][-1]["content"])
        assert (text["text"], last) == ("Look 0: ", line["response"])
        with Image.open(tmp_path / "run" / crop["image"]) as shown:
            assert shown.size == (56, 28)


def metrics_of(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_branches_are_computed_once_as_far_as_they_go_together(
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
    metrics = metrics_of(tmp_path)
    assert 0 < metrics[0]["mismatch/mean"] < 1e-4
    assert metrics[0]["mismatch/max"] < 1e-3
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


@pytest.mark.parametrize(
    ("agent_func", "turns", "images", "log"),
    [(TURN_BY_TURN, 3.0, 1.0, ("agent/taken", 3.0)), (SERVED, 1.0, 0.0, ("agent/asked", 1.0))],
    ids=["steps", "served"],
)
def test_files_in_openrlhfs_form_are_trained_on_while_the_next_episodes_are_played(
    agent_func, turns, images, log, tiny_checkpoint, tmp_path, own_environment, new_process_group
):
    model, pictures = tiny_checkpoint("qwen2_5_vl"), agent_func is TURN_BY_TURN
    # Weights that are sent and change nothing: the engine's log-probs are the trainer's behind each update, too.
    ahead = (*AHEAD, "--actor.adam.lr", "1e-12")
    train_ppo_ray.main(command(tmp_path, model, *ahead, agent_func=agent_func, pictures=pictures, together=False))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert 0 < line["mismatch/mean"] < 1e-4
        assert (line["turns"], line["shown_images"], line["environment_failed"]) == (turns, images, 0.0)
        assert line["reward"] == line["agent_reward"]
        assert line[log[0]] == log[1]
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == STEPS * PROMPTS * SAMPLES
    for line in rollouts:
        assert sum(tokens for _, tokens in line["weights"]) == line["response_tokens"]
        assert (line["weight_version"], line["weights"][0][0]) == (0, 0)
    if agent_func is TURN_BY_TURN:
        assert [[version for version, _ in line["weights"]] for line in rollouts] == [[0]] * 6 + [[0, 1]] * 6
        assert [line["async/partial_samples"] for line in metrics] == [0.0, 1.0]
        said = [[turn["role"] for turn in line["said"]] for line in rollouts]
        assert said == [["assistant", "user", "assistant", "user", "assistant"]] * len(said)
        assert ["image" in part for part in rollouts[0]["said"][3]["content"]].count(True) == 1
    # The answers differ, so that some were worth more than others: there was something to learn from.
    assert {line["reward"] for line in rollouts} == {0.0, 1.0}
