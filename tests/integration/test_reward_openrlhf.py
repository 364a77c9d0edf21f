"""The protocol against the installed OpenRLHF: its own executor on our server, our client on its own reward server."""

import asyncio
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn
from helpers.reward_servers import math_command, running

from remote_rm.client import RewardClient
from remote_rm.verifier import Score

torch = pytest.importorskip("torch")
agent = pytest.importorskip("openrlhf.utils.agent")

pytestmark = pytest.mark.slow

IMAGE = "<|image_pad|>"
PROMPT = f"<|im_start|>user\n<|vision_start|>{IMAGE}<|vision_end|>8?<|im_end|>\n<|im_start|>assistant\n"
THINKING = "<think>t</think>"


class CharacterTokenizer:
    """One token per character, and four per image, as a processor of images makes of it."""

    def __call__(self, text: str, **_: object) -> dict:
        return {"input_ids": torch.tensor([[ord(character) for character in text.replace(IMAGE, 4 * IMAGE)]])}

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(map(chr, token_ids))


class ScriptedEngine:
    """Generates the text it was given."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def generate(self, *_: object, **__: object) -> SimpleNamespace:
        output = SimpleNamespace(
            token_ids=[ord(character) for character in self._text], finish_reason="stop", logprobs=None
        )
        return SimpleNamespace(outputs=[output])


async def executed(endpoints: list[str], *, text: str, label: str) -> dict:
    executor = agent.SingleTurnAgentExecutor(endpoints)
    return await executor.execute(
        PROMPT,
        label,
        SimpleNamespace(max_tokens=100, logprobs=None),
        10_000,
        CharacterTokenizer(),
        ScriptedEngine(text),
    )


@pytest.mark.parametrize(
    ("text", "reward", "score"),
    [
        (rf"{THINKING}<answer>\sqrt{{8}}</answer><|im_end|>", 1.5, 1.0),
        (rf"{THINKING}<answer>\sqrt{{7}}</answer><|im_end|>", 0.5, 0.0),
        ("so it is $2\\sqrt{2}$<|im_end|>", 1.0, 1.0),
    ],
)
def test_the_executor_of_openrlhf_gets_its_rewards_from_our_server(text, reward, score):
    with running(math_command("--workers", "1")) as server:
        output = asyncio.run(executed([server.endpoint], text=text, label=r"2\sqrt{2}"))
    # OpenRLHF keeps the lists of one: it takes them apart when it makes tensors of them.
    assert (output["reward"], output["scores"]) == ([reward], [score])
    assert output["extra_logs"]["accuracy"] == [score]


@pytest.fixture
def serve_rm(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """OpenRLHF's `serve_rm`, its own code from argument to reply, with a reward model that counts tokens."""

    class CountingModel:
        device = "cpu"

        def eval(self) -> None:
            pass

        def __call__(self, input_ids: "torch.Tensor", attention_mask: "torch.Tensor") -> "torch.Tensor":
            return attention_mask.sum(dim=1).float()

    def tokenize(texts: list[str], **_: object) -> dict:
        widths = [len(text) for text in texts]
        mask = torch.tensor([[1] * width + [0] * (max(widths) - width) for width in widths])
        return {"input_ids": mask, "attention_mask": mask}

    started = []

    def run(app: object, **_: object) -> None:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        started.append((server, threading.Thread(target=server.run, daemon=True)))

    monkeypatch.setattr("openrlhf.models.get_llm_for_sequence_regression", lambda *_, **__: CountingModel())
    monkeypatch.setattr("openrlhf.utils.get_tokenizer", lambda *_, **__: tokenize)
    monkeypatch.setattr("uvicorn.run", run)
    monkeypatch.setattr(sys, "argv", ["serve_rm", "--reward.model_name_or_path", "none"])
    runpy.run_module("openrlhf.cli.serve_rm", run_name="__main__")
    ((server, thread),) = started
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/get_reward"
    server.should_exit = True
    thread.join()


def test_our_client_gets_its_rewards_from_the_server_of_openrlhf(serve_rm):
    async def scenario() -> list[Score]:
        async with RewardClient([serve_rm]) as client:
            asked = [client.reward(query="q" * length, prompt="q", label="1", response="r") for length in (3, 5)]
            return await asyncio.gather(*asked)

    assert asyncio.run(scenario()) == [
        Score(reward=float(length), score=float(length), parts={"dummy_scores": float(length)}) for length in (3, 5)
    ]
