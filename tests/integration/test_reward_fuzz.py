"""Whatever text comes in, a reward server answers: in time, with one number per sample, and as healthy as before."""

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from helpers.reward_servers import RunningServer, math_command, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_rm.math_verifier import MathVerifier
from remote_rm.protocol import without_lone_surrogates

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LIMIT_SECONDS = 0.5
SLACK_SECONDS = 3.0
"""Two batches of two items that both stall, and a machine that does other things."""
MEGABYTE = 10**6
MEMORY_GROWTH_BYTES = 32 * 2**20

PIECES = (
    "<think>", "</think>", "<answer>", "</answer>", "<think", r"\boxed{", r"\fbox{", "{", "}", "$", "$$", r"\(", r"\[", "\0",
    "\ud800", "\udfff", "\ufeff", "\u202e", "𝟜", "½", "１２", "९", "\\", r"\frac", r"\frac{1}{", r"\sqrt{", r"\text{", r"\pm",
    r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\\", r"\infty", "9^{9^{9^9}}", "99999999!", "10^{10^{10}}", r"\int_0^1 x^x dx",
    "x^{1000000}", "(1+x)^{9999}", "4", "-", ",", ";", ".", "%", "=", "<", " or ", " and ", "answer is ", "#### ", "\n", "\t",
    "<|im_start|>assistant\n", "<|im_end|>", "<pad>", "[/INST]", "None", "nan", "1e999", "__import__('os')", "lambda",
)  # fmt: skip
LARGE = (
    "a" * MEGABYTE,
    "1," * (MEGABYTE // 2),
    " " * MEGABYTE,
    "\0" * MEGABYTE,
    "<pad>" * (MEGABYTE // 5),
    "<think>" * (MEGABYTE // 7),
    "<answer>" * (MEGABYTE // 8),
    r"\boxed{" * (MEGABYTE // 7),
    "$1$ " * (MEGABYTE // 4),
    "9" * MEGABYTE,
    "<answer>" + "1+" * (MEGABYTE // 2) + "1</answer>",
    "{" * 10_000 + "4" + "}" * 10_000,
    r"<answer>\boxed{" + "{" * 10_000 + "4" + "}" * 10_000 + "}</answer>",
    "<answer>" + "(" * 450 + "x" + ")" * 450 + "</answer>",
    "<answer>" + r"\sqrt{" * 160 + "</answer>",
    "<answer>" + r"\frac{1}{" * 90 + "2" + "}" * 90 + "</answer>",
    "<answer>9^{9^{9^9}}</answer>",
    "<answer>" + "9" * 999 + "!</answer>",
)

any_text = st.text(alphabet=st.characters(exclude_categories=()), max_size=60)
pieced = st.lists(st.one_of(st.sampled_from(PIECES), any_text), max_size=12).map("".join)
wrapped = st.tuples(
    st.sampled_from(("{}", "<answer>{}</answer>", "<think>t</think><answer>{}</answer>", r"\boxed{{{}}}", "${}$")),
    pieced,
).map(lambda pair: pair[0].format(pair[1]))
response = st.one_of(any_text, pieced, wrapped, wrapped, st.sampled_from(LARGE))
label = st.one_of(any_text, pieced, st.sampled_from((r"2\sqrt{2}", "4", "[1, 2]", "x^2+1", "north", "9^{9^{9^9}}")))


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
        "labels": [r"2\sqrt{2}"] * 4,
        "responses": [r"<answer>\sqrt{8}</answer>", r"<answer>\sqrt{7}</answer>"] * 2,
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
