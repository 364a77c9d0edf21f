"""The judge around a reward model: batches over requests, limits, and samples that cannot be scored."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.value_models import save_reward_model

from lmm_r1.cli import serve_rm
from lmm_r1.config import hardware
from lmm_r1.data.messages import Row
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.scoring.reward_judge import RewardItem, RewardModelJudge
from lmm_r1.scoring.reward_model import EncodedSample, RewardModel
from remote_rm.verifier import UnusableItem


class CharacterModel:
    """Takes characters for tokens, and gives the sum of a text's digits; waits in `score` while the gate is closed."""

    max_batch_tokens = 10

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.is_scoring = threading.Event()
        self.threads = {threading.current_thread()}
        self.batches: list[list[str]] = []
        self.prompts: list[str] = []

    def known_ending(self, text: str | None) -> str | None:
        return text

    def encode_prompt(self, row: Row) -> EncodedPrompt:
        ids = [ord(character) for character in row.messages[0].parts[0].text]
        self.prompts.append(row.messages[0].parts[0].text)
        return EncodedPrompt(token_ids=ids, engine_token_ids=ids, images=[], media=None)

    def encode(self, row: Row, response: str, *, ending: str | None, prompt: EncodedPrompt) -> EncodedSample:
        end = "." if ending is None else ending
        return EncodedSample(token_ids=[*prompt.token_ids, *map(ord, response + end)], media=None)

    def encode_text(self, query: str, *, prompt: str) -> EncodedSample:
        self.threads.add(threading.current_thread())
        if "long" in query:
            raise UserError("the text is too long")
        if "broken" in query:
            raise IndexError("a fault of the kit")
        return EncodedSample(token_ids=[ord(character) for character in query], media=None)

    def score(self, samples: Sequence[EncodedSample]) -> list[float]:
        self.threads.add(threading.current_thread())
        texts = ["".join(map(chr, sample.token_ids)) for sample in samples]
        self.batches.append(texts)
        self.is_scoring.set()
        assert self.gate.wait(timeout=30)
        if any("boom" in text for text in texts):
            raise RuntimeError("out of memory")
        return [float("nan") if text == "nan" else float(sum(map(int, filter(str.isdigit, text)))) for text in texts]


def texts(*queries: str) -> list[RewardItem]:
    return [RewardItem(query=query, prompt="p", response=None, label="") for query in queries]


async def rewards(judge: RewardModelJudge, items: Sequence[RewardItem]) -> list[float]:
    return [score.reward for score in await judge.judge(items)]


def run_with(model: CharacterModel, scenario: Callable[[RewardModelJudge], Awaitable[object]]) -> object:
    async def scene() -> object:
        judge = RewardModelJudge(lambda: model, media=MediaAccess(roots=(), allow_urls=False))
        await judge.start()
        try:
            return await asyncio.wait_for(scenario(judge), timeout=30)
        finally:
            model.gate.set()
            await judge.stop()

    return asyncio.run(scene())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_samples_of_all_requests_are_gathered_into_full_batches():
    model = CharacterModel()

    async def scenario(judge: RewardModelJudge) -> list[list[float]]:
        model.gate.clear()
        first = asyncio.create_task(rewards(judge, texts("1")))
        await until(model.is_scoring.is_set)
        # While the model computes, the event loop is free, and what comes is gathered.
        later = [asyncio.create_task(rewards(judge, texts(*some))) for some in (("22", "333"), ("4444",), ("55555",))]
        await until(lambda: len(judge._queue) == 4)
        model.gate.set()
        return [await task for task in (first, *later)]

    assert run_with(model, scenario) == [[1.0], [4.0, 9.0], [16.0], [25.0]]
    # At most 10 tokens, in the order in which they came.
    assert model.batches == [["1"], ["22", "333", "4444"], ["55555"]]
    # The test's own thread made the model.
    assert len(model.threads) == 2


def test_a_sample_that_cannot_be_scored_fails_its_request_alone():
    model = CharacterModel()

    async def scenario(judge: RewardModelJudge) -> list[object]:
        model.gate.clear()
        first = asyncio.create_task(rewards(judge, texts("1")))
        await until(model.is_scoring.is_set)
        asked = (
            texts("2", "too long"),
            texts("3"),
            texts("nan"),
            texts("boom"),
            texts("broken"),
            [*texts("5"), RewardItem(query="", prompt='[{"role": "user"}]', response="6", label="")],
            texts("4"),
        )
        tasks = [asyncio.create_task(rewards(judge, items)) for items in asked]
        await until(lambda: len(judge._queue) == 7)
        model.gate.set()
        outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert judge.waiting == 0
        return [outcome if isinstance(outcome, list) else (type(outcome), str(outcome)) for outcome in outcomes]

    assert run_with(model, scenario) == [
        [1.0],
        (UnusableItem, "query[1]: the text is too long"),
        [3.0],
        (UnusableItem, "query[0]: the reward model gives nan for it, which is not a reward"),
        (RuntimeError, "out of memory"),
        (IndexError, "a fault of the kit"),
        (UnusableItem, 'prompts[1]: message 1 of "messages" (user) needs a "content" that is text or a list of parts'),
        [4.0],
    ]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    saved = save_reward_model(tiny_checkpoint("qwen2_5_vl"), tmp_path_factory.mktemp("reward") / "model")
    return RewardModel(
        str(saved),
        dtype="fp32",
        max_len=200,
        max_batch_tokens=400,
        value_head_prefix="score",
        normalize=False,
        trust_remote_code=False,
    )


@pytest.mark.parametrize(
    ("flags", "has_gpu", "dtype"), [([], False, "fp32"), ([], True, "bf16"), (["--dtype", "fp16"], False, "fp16")]
)
def test_a_servers_precision_is_that_of_training(flags, has_gpu, dtype, monkeypatch, tmp_path):
    loaded = {}
    monkeypatch.setattr(hardware, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(hardware, "has_gpu", lambda environment: has_gpu)
    monkeypatch.setattr("lmm_r1.lmm_kits.registry.kit_name_of", lambda path, **settings: "llm")
    monkeypatch.setattr("lmm_r1.cpu.prepare_process", lambda: None)

    class Loaded:
        max_batch_tokens = 1

        def __init__(self, path: str, **settings: Any) -> None:
            loaded.update(settings)

    monkeypatch.setattr("lmm_r1.scoring.reward_model.RewardModel", Loaded)
    monkeypatch.setattr("lmm_r1.scoring.reward_judge.serve", lambda load, **settings: load())
    serve_rm.main(["--model", "my-rm", *flags])
    assert loaded["dtype"] == dtype
