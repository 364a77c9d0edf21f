"""Whatever text comes in, a reward server answers: in time, with one number per sample, and as healthy as before."""

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from helpers.hostile_texts import LARGE, label, pieced, response
from helpers.reward_servers import RunningServer, math_command, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_rm.math_verifier import MathVerifier
from remote_rm.protocol import without_lone_surrogates

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LIMIT_SECONDS = 0.5
SLACK_SECONDS = 3.0
"""Two batches of two items that both stall, and a machine that does other things."""
MEMORY_GROWTH_BYTES = 32 * 2**20


@st.composite
def requests(draw: st.DrawFn) -> dict[str, list[str]]:
    count = draw(st.integers(min_value=1, max_value=2))
    prompts = draw(st.lists(pieced, min_size=count, max_size=count))
    texts = draw(st.lists(response, min_size=count, max_size=count))
    request = {
        "query": [prompt + text for prompt, text in zip(prompts, texts, strict=True)],
        "prompts": prompts,
        "labels": draw(st.lists(label, min_size=count, max_size=count)),
    }
    return request | ({"responses": texts} if draw(st.booleans()) else {})


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ("--workers", "2", "--item-timeout-seconds", str(LIMIT_SECONDS), "--log-sample-share", "1")
    with running(math_command(*flags)) as running_server:
        yield running_server


def post(endpoint: str, request: dict[str, list[str]]) -> tuple[int, dict]:
    """Status and reply; the body goes out with lone surrogates as JSON escapes."""

    body = json.dumps(request).encode("ascii")
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint, data=body, headers=headers), timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def is_refused(gold: str) -> bool:
    try:
        MathVerifier().check_label(without_lone_surrogates(gold))
    except ValueError:
        return True
    return False


def check(server: RunningServer, request: dict[str, list[str]]) -> None:
    """Post one request and compare the reply with what every request is promised."""
    started = time.monotonic()
    status, reply = post(server.endpoint, request)
    seconds = time.monotonic() - started
    assert seconds < LIMIT_SECONDS + SLACK_SECONDS
    if any(is_refused(gold) for gold in request["labels"]):
        assert status == 422, reply
        return
    assert status == 200, reply
    columns = [reply["rewards"], reply["scores"], *reply["extra_logs"].values()]
    assert {len(column) for column in columns} == {len(request["labels"])}
    assert all(math.isfinite(value) for column in columns for value in column)
    assert set(reply["scores"]) <= {0.0, 1.0}


def memory_bytes(server: RunningServer) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


def check_that_it_is_well(server: RunningServer) -> None:
    """Both workers must judge, and nothing may be left waiting."""
    asked = {
        "query": ["q"] * 4,
        "prompts": ["p"] * 4,
        "labels": [r"2\sqrt[3]{2}"] * 4,
        "responses": [r"<answer>\sqrt[3]{16}</answer>", r"<answer>\sqrt[3]{15}</answer>"] * 2,
    }
    assert post(server.endpoint, asked)[1]["scores"] == [1.0, 0.0, 1.0, 0.0]
    assert 1 <= len(server.workers()) <= 2
    assert all(worker.status() != psutil.STATUS_ZOMBIE for worker in server.workers())
    assert sum(worker.memory_info().rss for worker in server.workers()) < 2**30


def test_any_text_in_any_field_is_answered_in_time(server):
    @settings(
        max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(request=requests())
    def fuzz(request: dict[str, list[str]]) -> None:
        check(server, request)

    # The first requests of a size bring the allocator to it; what grows after them would grow for ever.
    for text in LARGE:
        check(server, {"query": [text], "prompts": ["p"], "labels": ["4"]})
    before = memory_bytes(server)
    fuzz()
    for text in LARGE:
        check(server, {"query": ["q"], "prompts": ["p"], "labels": ["x+4"], "responses": [text]})
    check_that_it_is_well(server)
    assert memory_bytes(server) - before < MEMORY_GROWTH_BYTES


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 100_000,
        b"{",
        b'"',
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"query": 1}',
        b'{"query": ["\\ud800"]}',
        b"\0" * 1000,
    ],
)
def test_a_body_that_is_no_request_is_refused(server, body):

    request = urllib.request.Request(server.endpoint, data=body, headers={"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    assert refused.value.code in (400, 422)
    assert len(refused.value.read()) < 10_000
    check_that_it_is_well(server)
