"""The client of reward servers: which endpoint is asked, and what becomes of failures."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from helpers.http_servers import in_a_loop
from helpers.tables import table

from remote_rm import client as client_module
from remote_rm.client import RewardClient, RewardUnavailable, SentSample, parse_replies
from remote_rm.verifier import Score

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SAMPLE = {"query": "q", "prompt": "p", "label": "42", "response": "r"}
GOOD = {"rewards": [1.5], "scores": [1.0], "extra_logs": {"accuracy": [1.0]}}


class Server:
    """A reward server in this event loop, with a handler of the test's own."""

    def __init__(self, handler: Handler, *, port: int = 0) -> None:
        self._port = port
        app = web.Application()
        app.router.add_post("/get_reward", handler)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/get_reward"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def ask(*endpoints: str, **settings: float) -> Score:
    async with RewardClient(endpoints, **settings) as client:
        return await client.reward(**SAMPLE)


async def good(_request: web.Request) -> web.Response:
    return web.json_response(GOOD)


def answering(*replies: Callable[[], web.Response]) -> Handler:
    """A handler that gives one reply after another, the last one from then on."""
    left = list(replies)

    async def handler(_request: web.Request) -> web.Response:
        return (left.pop(0) if len(left) > 1 else left[0])()

    return handler


def asked(*handlers: Handler, **settings: float) -> Score:
    """The score of one sample, asked of a server for each handler."""

    async def scenario() -> Score:
        async with AsyncExitStack() as servers:
            endpoints = [await servers.enter_async_context(Server(handler)) for handler in handlers]
            return await ask(*endpoints, **settings)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            '{"rewards": [1.5], "scores": [1.0], "extra_logs": {"accuracy": [1.0]}}',
            Score(reward=1.5, score=1.0, parts={"accuracy": 1.0}),
        ),
        ('{"rewards": 0.5}', Score(reward=0.5, score=0.5, parts={})),
        ('{"rewards": [2], "scores": 1, "extra_logs": {"a": 0}}', Score(reward=2.0, score=1.0, parts={"a": 0.0})),
        ('{"rewards": [[0.25]], "scores": null, "extra_logs": null}', Score(reward=0.25, score=0.25, parts={})),
        (
            '{"rewards": [0.5], "scores": [0.0], "extra_logs": {"timed_out": [1.0]}}',
            Score(reward=0.5, score=0.0, parts={"timed_out": 1.0}, timed_out=True),
        ),
    ],
)
def test_scalars_and_lists_of_one_are_read(body, expected):
    assert parse_replies(body, count=1, endpoint="http://h/get_reward") == [expected]


@pytest.mark.parametrize(
    "body",
    [
        *["", "<html>", "[]", "{}", '{"rewards": []}', '{"rewards": [1, 2]}', '{"rewards": NaN}'],
        '{"rewards": ' + "[" * 100_000,
        '{"rewards": 1' + "0" * 400 + "}",
        "\ufffd",
    ],
)
def test_a_reply_without_one_finite_reward_is_an_error_that_names_the_endpoint(body):
    with pytest.raises(RewardUnavailable, match="http://h/get_reward sent no usable reward"):
        parse_replies(body, count=1, endpoint="http://h/get_reward")


def test_the_request_is_openrlhfs_with_the_response_added():
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(GOOD)

    assert asked(handler) == Score(reward=1.5, score=1.0, parts={"accuracy": 1.0})
    assert seen == [{"query": ["q"], "prompts": ["p"], "labels": ["42"], "responses": ["r"]}]


def status(code: int) -> Callable[[], web.Response]:
    return lambda: web.json_response(GOOD, status=code)


@pytest.mark.parametrize(
    "replies",
    [[status(500), status(503)], [status(408)], [status(429)]],
    ids=["errors", "too slow", "too many requests"],
)
def test_what_may_pass_is_tried_again(replies):
    assert asked(answering(*replies, status(200))).reward == 1.5


def test_a_busy_server_is_left_alone_for_as_long_as_it_asks():
    asked_at = []

    async def handler(_request: web.Request) -> web.Response:
        asked_at.append(time.monotonic())
        if len(asked_at) == 1:
            return web.json_response({"detail": "full"}, status=503, headers={"Retry-After": "1"})
        return web.json_response(GOOD)

    assert asked(handler).reward == 1.5
    assert 1.0 <= asked_at[1] - asked_at[0] < 2.0


def test_while_one_server_is_busy_the_other_is_asked_at_once():
    async def busy(_request: web.Request) -> web.Response:
        return web.json_response({"detail": "full"}, status=503, headers={"Retry-After": "30"})

    async def scenario() -> list[float]:
        async with Server(busy) as first, Server(good) as second, RewardClient([first, second]) as client:
            return [item.reward for item in await asyncio.gather(*(client.reward(**SAMPLE) for _ in range(20)))]

    started = time.monotonic()
    assert asyncio.run(scenario()) == [1.5] * 20
    assert time.monotonic() - started < 2


def test_a_down_server_costs_few_attempts_and_is_used_again_when_it_is_back():
    port, seen = free_port(), []

    async def first(_request: web.Request) -> web.Response:
        seen.append("first")
        return web.json_response(GOOD)

    async def second(_request: web.Request) -> web.Response:
        seen.append("second")
        return web.json_response(GOOD)

    async def scenario() -> None:
        endpoint = f"http://127.0.0.1:{port}/get_reward"
        async with Server(second) as other, RewardClient([endpoint, other]) as client:
            await asyncio.gather(*(client.reward(**SAMPLE) for _ in range(20)))
            assert seen == ["second"] * 20
            async with Server(first, port=port):
                await asyncio.sleep(0.3)
                for _ in range(10):
                    await client.reward(**SAMPLE)

    asyncio.run(scenario())
    assert seen[20:].count("first") == 5


@pytest.mark.parametrize(
    ("token", "variable", "sent"),
    [(None, None, None), (None, "abc", "Bearer abc"), ("def", "abc", "Bearer def"), (None, " ", None)],
)
def test_the_token_is_sent_with_every_request(monkeypatch, token, variable, sent):
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response(GOOD)

    async def scenario() -> None:
        async with Server(handler) as endpoint, RewardClient([endpoint], token=token) as client:
            await client.reward(**SAMPLE)
            await client.check_health()

    monkeypatch.delenv("REMOTE_RM_TOKEN", raising=False)
    if variable is not None:
        monkeypatch.setenv("REMOTE_RM_TOKEN", variable)
    asyncio.run(scenario())
    assert seen == [sent, sent]


def test_a_4xx_reply_is_final_and_its_reason_is_told():
    replies = [lambda: web.json_response({"detail": "labels[0]: the gold answer is empty"}, status=422), status(200)]
    with pytest.raises(RewardUnavailable, match=r"/get_reward refused the request with 422: labels\[0\]"):
        asked(answering(*replies))


WRONG = {
    "no rewards": web.Response,
    "not UTF-8": lambda: web.Response(body=b'{"rewards": "\xff"}', content_type="application/json"),
    "nested without end": lambda: web.Response(text='{"rewards": ' + "[" * 100_000),
    "a number without end": lambda: web.Response(text='{"rewards": 1' + "0" * 400 + "}"),
    "too long": lambda: web.Response(text=" " * 2**21),
    "no access": lambda: web.Response(status=401),
    "nothing there": lambda: web.Response(status=404),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_reply_is_not_final_where_another_endpoint_is_well(kind, monkeypatch):
    monkeypatch.setattr(client_module, "LONGEST_REPLY_BYTES", 2**20)
    assert asked(answering(WRONG[kind]), good).reward == 1.5


@pytest.mark.parametrize(
    ("kind", "told"), table("remote_rm/client", "wrong_replies_are_final_when_every_endpoint_has_given_them")
)
def test_wrong_replies_are_final_when_every_endpoint_has_given_them(kind, told, monkeypatch):
    monkeypatch.setattr(client_module, "LONGEST_REPLY_BYTES", 2**20)
    given = []

    async def wrong(_request: web.Request) -> web.Response:
        given.append(kind)
        return WRONG[kind]()

    with pytest.raises(RewardUnavailable, match=told):
        asked(wrong, wrong)
    assert len(given) == 2


def test_a_server_that_stays_silent_is_given_up_at_the_deadline():
    async def handler(_request: web.Request) -> web.Response:
        await asyncio.sleep(4)
        return web.json_response(GOOD)

    async def scenario() -> float:
        async with Server(handler) as endpoint:
            started = time.monotonic()
            with pytest.raises(RewardUnavailable, match=r"did not answer within 0\.\d s; gave up after \d attempts"):
                await ask(endpoint, timeout_s=0.2, deadline_s=0.6)
            return time.monotonic() - started

    assert asyncio.run(scenario()) < 4


def test_a_server_that_is_down_is_named_at_the_deadline():
    endpoint = f"http://127.0.0.1:{free_port()}/get_reward"
    with pytest.raises(RewardUnavailable, match=f"{endpoint} failed with ClientConnectorError.*python -m remote_rm"):
        asyncio.run(ask(endpoint, deadline_s=0.5))


def test_hundreds_of_requests_share_few_connections_and_none_is_lost():
    ports, most_at_once, at_once = set(), 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal most_at_once, at_once
        ports.add(request.transport.get_extra_info("peername")[1])
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        await asyncio.sleep(0.05)
        at_once -= 1
        label = (await request.json())["labels"][0]
        return web.json_response({"rewards": [float(label)]})

    async def scenario() -> list[float]:
        # One attempt may take 1.5 s, all together take longer: waiting for a connection must not count. One that does
        # take longer closes its connection, and is asked over another.
        async with Server(handler) as endpoint, RewardClient([endpoint], timeout_s=1.5, connections=8) as client:
            requests = [client.reward(query="q", prompt="p", label=str(index)) for index in range(300)]
            return [item.reward for item in await asyncio.gather(*requests)]

    assert asyncio.run(scenario()) == [float(index) for index in range(300)]
    assert most_at_once <= 8
    assert len(ports) <= 8


def test_one_client_serves_one_event_loop_after_another():
    port = free_port()
    client = RewardClient([f"http://127.0.0.1:{port}/get_reward"])

    async def scenario() -> float:
        async with Server(good, port=port), client:
            return (await client.reward(**SAMPLE)).reward

    assert [asyncio.run(scenario()), asyncio.run(scenario())] == [1.5, 1.5]


@pytest.mark.parametrize("endpoints", [[], "http://h/get_reward", ["h:5000"], ["reward.py"]])
def test_endpoints_that_are_no_addresses_are_refused(endpoints):
    with pytest.raises(ValueError, match="endpoint|address"):
        RewardClient(endpoints)


async def check_health(endpoint: str) -> None:
    async with RewardClient([endpoint]) as client:
        await client.check_health()


@in_a_loop
async def test_health_accepts_a_foreign_server_of_the_same_protocol():
    async with Server(answering(lambda: web.json_response({"rewards": []}))) as endpoint:
        await check_health(endpoint)


def test_health_names_the_endpoint_where_nothing_listens():
    endpoint = f"http://127.0.0.1:{free_port()}/get_reward"
    with pytest.raises(RewardUnavailable, match=f"no reward server listens at {endpoint}"):
        asyncio.run(check_health(endpoint))


def samples_of(count: int) -> list[SentSample]:
    return [SentSample(query="q", prompt="p", label=str(number), response="r") for number in range(count)]


@in_a_loop
async def test_a_batch_is_halved_until_the_server_takes_it():
    seen: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        labels = (await request.json())["labels"]
        seen.append(len(labels))
        if len(labels) > 4:
            return web.json_response({"detail": "too many"}, status=413)
        return web.json_response({"rewards": [float(label) for label in labels]})

    async with Server(handler) as endpoint, RewardClient([endpoint], connections=1) as client:
        scores = await client.reward_batch(samples_of(10))
        assert [score.reward for score in scores] == [float(number) for number in range(10)]
        assert seen == [10, 5, 2, 3, 5, 2, 3]
        assert await client.reward_batch([]) == []


def test_one_sample_that_is_too_large_is_final():
    large = answering(lambda: web.json_response({"detail": "the request is larger than 64 MiB"}, status=413))
    told = "413: the request is larger than 64 MiB; the request itself is at fault"
    with pytest.raises(RewardUnavailable, match=told):
        asked(large)


def test_a_batch_with_some_responses_is_refused():
    async def scenario() -> None:
        async with RewardClient(["http://127.0.0.1:1/get_reward"]) as client:
            await client.reward_batch([*samples_of(1), SentSample(query="q", prompt="p", label="1")])

    with pytest.raises(ValueError, match="1 of 2 samples have a response"):
        asyncio.run(scenario())


def test_each_attempt_after_a_timeout_has_twice_the_time():
    async def handler(_request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.json_response(GOOD)

    # 0.2 s and 0.4 s are not enough, and would not be for ever.
    assert asked(handler, timeout_s=0.2, deadline_s=20.0).reward == 1.5


@in_a_loop
async def test_a_caller_that_is_cancelled_closes_its_connections():
    open_at_once, closed = 0, 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal open_at_once, closed
        open_at_once += 1
        transport = request.transport
        while transport is not None and not transport.is_closing():
            await asyncio.sleep(0.01)
        closed += 1
        return web.json_response(GOOD)

    async with Server(handler) as endpoint, RewardClient([endpoint]) as client:
        asking = asyncio.gather(*(client.reward_batch([sample]) for sample in samples_of(3)))
        while open_at_once < 3:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        until = time.monotonic() + 5
        while closed < 3:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
