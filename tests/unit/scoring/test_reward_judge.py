"""The judge around a reward model: batches over requests, limits, and samples that cannot be scored."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.conversations import message, picture, row
from helpers.value_models import save_reward_model, sent_by_openrlhf, sent_by_rollouts

from lmm_r1.cli import serve_rm
from lmm_r1.config import hardware
from lmm_r1.data.messages import ImagePart, Row, to_json
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.scoring.reward_judge import RewardItem, RewardModelJudge, create_app, items_of_request
from lmm_r1.scoring.reward_model import EncodedSample, RewardModel
from remote_rm.protocol import RewardRequest
from remote_rm.verifier import ServiceLimits, UnusableItem

TEXT = row(message("user", "What is 12 + 34?"), answer="")
ANSWER, OTHER = "<answer>46</answer>", "What?"


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


def chats(prompt: str, *responses: str) -> list[RewardItem]:
    sent = json.dumps([{"role": "user", "content": prompt}])
    return [RewardItem(query="", prompt=sent, response=response, label="") for response in responses]


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


def test_a_cancelled_request_frees_what_waits():
    model = CharacterModel()

    async def scenario(judge: RewardModelJudge) -> list[float]:
        model.gate.clear()
        first = asyncio.create_task(rewards(judge, texts("1")))
        await until(model.is_scoring.is_set)
        gone = asyncio.create_task(rewards(judge, texts("22", "333")))
        await until(lambda: judge.waiting == 3)
        gone.cancel()
        last = asyncio.create_task(rewards(judge, texts("4")))
        await until(lambda: len(judge._queue) == 3)
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
        await until(lambda: len(judge._queue) == 1)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    picture(84, 56).save(folder / "picture.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


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


def client_of(model: RewardModel, folder: Path, **changes: Any) -> TestClient:
    settings = {"limits": ServiceLimits(max_request_bytes=100_000), "token": None}
    media = MediaAccess(roots=(folder,), allow_urls=False)
    return TestClient(create_app(lambda: model, media=media, **(settings | changes)))


@pytest.fixture(scope="module")
def client(model: RewardModel, folder: Path) -> Iterator[TestClient]:
    with client_of(model, folder) as running:
        yield running


def image_row(folder: Path) -> Row:
    return row(message("user", ImagePart(str(folder / "picture.png")), "Which digit is this?"), answer="4")


def test_a_rollouts_samples_get_the_rewards_of_the_model(client, model, folder):
    for asked in (TEXT, image_row(folder)):
        reply = client.post("/get_reward", json=sent_by_rollouts(model, asked, [ANSWER, OTHER])).json()
        expected = model.score([model.encode(asked, ANSWER), model.encode(asked, OTHER)])
        assert reply["rewards"] == pytest.approx(expected, abs=1e-5)
        assert reply["scores"] == reply["rewards"]
        assert reply["rewards"][0] != reply["rewards"][1]


def test_openrlhfs_samples_get_the_rewards_of_the_model(client, model):
    reply = client.post("/get_reward", json=sent_by_openrlhf(model, TEXT, [ANSWER, OTHER])).json()
    expected = model.score([model.encode(TEXT, ANSWER), model.encode(TEXT, OTHER)])
    assert reply["rewards"] == pytest.approx(expected, abs=1e-5)


def test_a_response_that_was_cut_off_gets_no_end_token(client, model):
    request = sent_by_rollouts(model, TEXT, [OTHER])
    tokenizer = model.kit.tokenizer_of(model.processor)
    cut = [request["query"][0].removesuffix(tokenizer.eos_token)]
    expected = model.score([model.encode(TEXT, OTHER, ending=""), model.encode(TEXT, OTHER)])
    replies = [client.post("/get_reward", json=request | {"query": query}) for query in (cut, request["query"])]
    assert [reply.json()["rewards"][0] for reply in replies] == pytest.approx(expected, abs=1e-5)
    assert expected[0] != expected[1]


def test_an_image_may_come_within_the_request(client, model, folder):
    stream = io.BytesIO()
    picture(84, 56).save(stream, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    asked = image_row(folder)
    request = sent_by_rollouts(model, asked, [ANSWER])
    sent = json.loads(request["prompts"][0])
    sent[0]["content"][0]["image"] = uri
    reply = client.post("/get_reward", json=request | {"prompts": [json.dumps(sent)]}).json()
    assert reply["rewards"] == pytest.approx(model.score([model.encode(asked, ANSWER)]), abs=1e-5)


def test_a_sample_that_cannot_be_scored_is_named(client, model, folder):
    good = sent_by_rollouts(model, TEXT, [ANSWER, ANSWER])
    broken = row(message("user", ImagePart(str(folder / "broken.png")), "?"))
    held = row(message("user", picture(84, 56), "?"))
    gone = row(message("user", ImagePart(str(folder.parent / "gone.png")), "?"))
    for bad, told in (
        (sent_by_rollouts(model, TEXT, ["What? " * 200]), "prompts[1]: the prompt and the response take "),
        (good | {"prompts": [*good["prompts"][:1], to_json(broken.messages)]}, "prompts[1]: cannot read the image "),
        (
            good | {"prompts": [*good["prompts"][:1], to_json(held.messages)]},
            "prompts[1]: the prompt names its image only as <image 84x56>",
        ),
        (
            good | {"prompts": [*good["prompts"][:1], to_json(gone.messages)]},
            "is not below a folder given with --image_root",
        ),
        (
            {"query": ["a", "b<|image_pad|>c"], "prompts": ["a", "b<|image_pad|>"], "labels": ["", ""]},
            "query[1]: the text holds the ",
        ),
        ({"query": ["a", ""], "prompts": ["a", ""], "labels": ["", ""]}, "query[1]: the text is empty"),
    ):
        if len(bad["query"]) == 1:
            bad = {name: [*good[name][:1], *bad[name]] for name in bad}
        reply = client.post("/get_reward", json=bad)
        assert reply.status_code == 422
        assert told in reply.json()["detail"]
    assert client.post("/get_reward", json=good).status_code == 200


def test_limits_of_the_reward_service_hold(client, model, folder):
    empty: dict[str, list[str]] = {"query": [], "prompts": [], "labels": []}
    assert client.post("/get_reward", json=empty).json()["rewards"] == []
    assert client.post("/get_reward", json=empty | {"labels": ["1"]}).status_code == 422
    assert client.post("/get_reward", json=empty | {"labels": ["1" * 200_000]}).status_code == 413
    with client_of(model, folder, token="secret") as guarded:
        assert guarded.post("/get_reward", json=empty).status_code == 401
        allowed = {"Authorization": "Bearer secret"}
        assert guarded.post("/get_reward", json=empty, headers=allowed).status_code == 200


def test_health_counts_samples(model, folder):
    with client_of(model, folder) as client:
        client.post("/get_reward", json=sent_by_rollouts(model, TEXT, [ANSWER, OTHER]))
        health = client.get("/health").json()
        assert (health["status"], health["verifier"]) == ("ok", "reward_model")
        assert [health[name] for name in ("items", "worker", "failed", "waiting")] == [2, 2, 0, 0]


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


def test_a_checkpoint_without_a_value_head_is_refused(monkeypatch, tiny_checkpoint, capsys):
    monkeypatch.setattr("lmm_r1.cpu.prepare_process", lambda: None)
    monkeypatch.setattr("lmm_r1.scoring.reward_judge.serve", lambda load, **settings: load())
    bare = str(tiny_checkpoint("qwen2_5_vl"))
    with pytest.raises(SystemExit) as ended:
        serve_rm.main(["--model", bare, "--dtype", "fp32"])
    assert ended.value.code == 1
    assert f"lmm-r1 serve_rm: error: {bare}: this checkpoint has no value head" in capsys.readouterr().err
