"""The judge around a reward model: batches over requests, limits, and samples that cannot be scored."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from lmm_r1.data.messages import Row
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.scoring.reward_judge import RewardItem, RewardModelJudge, items_of_request
from lmm_r1.scoring.reward_model import EncodedSample
from remote_rm.protocol import RewardRequest
from remote_rm.service.judge import PoolUnavailable, UnusableItem

pytestmark = pytest.mark.unit


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

    def encode_text(self, query: str) -> EncodedSample:
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


def chats(prompt: str, *responses: str) -> list[RewardItem]:
    sent = json.dumps([{"role": "user", "content": prompt}])
    return [RewardItem(query="", prompt=sent, response=response, label="") for response in responses]


async def rewards(judge: RewardModelJudge, items: Sequence[RewardItem]) -> list[float]:
    return [score.reward for score in await judge.judge(items)]


def run_with(
    model: CharacterModel, scenario: Callable[[RewardModelJudge], Awaitable[object]], *, max_queued_items: int = 100
) -> object:
    async def scene() -> object:
        judge = RewardModelJudge(
            lambda: model, media=MediaAccess(roots=(), allow_urls=False), max_queued_items=max_queued_items
        )
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
        await until(lambda: judge.waiting == 4)
        assert judge.busy == 1
        model.gate.set()
        return [await task for task in (first, *later)]

    assert run_with(model, scenario) == [[1.0], [4.0, 9.0], [16.0], [25.0]]
    # At most 10 tokens, in the order in which they came.
    assert model.batches == [["1"], ["22", "333", "4444"], ["55555"]]
    # The test's own thread made the model.
    assert len(model.threads) == 2


def test_a_prompt_that_samples_have_in_common_is_encoded_once_per_batch():
    model = CharacterModel()

    async def scenario(judge: RewardModelJudge) -> list[float]:
        return await rewards(judge, [*chats("1?", "2", "3"), *chats("0?", "4")])

    assert run_with(model, scenario) == [3.0, 4.0, 4.0]
    assert model.batches == [["1?2.", "1?3."], ["0?4."]]
    assert model.prompts[:2] == ["1?", "0?"]


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
        await until(lambda: judge.waiting == 7)
        model.gate.set()
        outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert (judge.waiting, judge.busy) == (0, 0)
        return [outcome if isinstance(outcome, list) else (type(outcome), str(outcome)) for outcome in outcomes]

    assert run_with(model, scenario) == [
        [1.0],
        (UnusableItem, "query[1]: the text is too long"),
        [3.0],
        (UnusableItem, "query[0]: the reward model gives nan for it, which is no reward"),
        (RuntimeError, "out of memory"),
        (IndexError, "a fault of the kit"),
        (UnusableItem, 'prompts[1]: message 1 (user) needs a "content" that is text or a list of parts'),
        [4.0],
    ]


def test_a_full_queue_refuses_until_there_is_room():
    model = CharacterModel()

    async def scenario(judge: RewardModelJudge) -> None:
        model.gate.clear()
        asked = [asyncio.create_task(rewards(judge, texts("1")))]
        await until(model.is_scoring.is_set)
        asked.append(asyncio.create_task(rewards(judge, texts("2", "3"))))
        await until(lambda: judge.waiting == 2)
        with pytest.raises(PoolUnavailable, match="2 samples wait to be scored, and the limit is 2") as refused:
            await judge.judge(texts("4"))
        assert 1 <= refused.value.retry_after_seconds <= 60
        model.gate.set()
        assert await asyncio.gather(*asked) == [[1.0], [2.0, 3.0]]
        assert await rewards(judge, texts("4")) == [4.0]
        assert (judge.counts.items, judge.counts.worker, judge.counts.failed) == (4, 4, 0)

    run_with(model, scenario, max_queued_items=2)


def test_a_cancelled_request_frees_what_waits():
    model = CharacterModel()

    async def scenario(judge: RewardModelJudge) -> list[float]:
        model.gate.clear()
        first = asyncio.create_task(rewards(judge, texts("1")))
        await until(model.is_scoring.is_set)
        gone = asyncio.create_task(rewards(judge, texts("22", "333")))
        await until(lambda: judge.waiting == 2)
        gone.cancel()
        last = asyncio.create_task(rewards(judge, texts("4")))
        await until(lambda: judge.waiting == 3)
        model.gate.set()
        assert await first == [1.0]
        return await last

    assert run_with(model, scenario) == [4.0]
    assert model.batches == [["1"], ["4"]]


def test_stopping_answers_what_is_open_with_an_error():
    model = CharacterModel()

    async def scenario(judge: RewardModelJudge) -> list[asyncio.Task]:
        model.gate.clear()
        asked = [asyncio.create_task(judge.judge(texts("1")))]
        await until(model.is_scoring.is_set)
        asked.append(asyncio.create_task(judge.judge(texts("2"))))
        await until(lambda: judge.waiting == 1)
        threading.Timer(0.05, model.gate.set).start()
        await judge.stop()
        await judge.start()
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = run_with(model, scenario)
    assert [str(outcome) for outcome in outcomes] == ["the server was stopped"] * 2


def test_openrlhfs_request_has_no_responses():
    request = RewardRequest(query=["qa", "qb"], prompts=["q", "q"], labels=["", "1"])
    assert [item.response for item in items_of_request(request)] == [None, None]
    assert items_of_request(request.model_copy(update={"responses": ["a", "b"]}))[1] == RewardItem(
        query="qb", prompt="q", response="b", label="1"
    )
