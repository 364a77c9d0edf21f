"""`lmm-r1 serve_chat` as a process of its own: an endpoint that can be asked, and a judge."""

import http.client
import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers.processes import warm_python
from helpers.reward_servers import ROOT, everything

from lmm_r1.scoring.response_scores import VerifierJudge
from remote_rm.verifier import Item

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Served:
    url: str
    log: Path
    backend: str

    def reply(self, **fields: Any) -> bytes:
        """Ask for an answer to 1+1."""
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 24} | fields
        request = urllib.request.Request(
            f"{self.url}/chat/completions",
            data=json.dumps(asked).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read()

    def choices(self, **fields: Any) -> list[dict[str, Any]]:
        return json.loads(self.reply(**fields))["choices"]

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/health", timeout=60) as reply:
            return json.load(reply)

    def statuses(self) -> list[int]:
        """Of the conversations that it was asked to answer."""
        lines = map(json.loads, self.log.read_text().splitlines())
        return [line["status"] for line in lines if line["path"] == "/v1/chat/completions"]


# One whose class in vLLM is its own, one for which `vllm serve` needs a flag on CPUs, and one that vLLM does not have.
@pytest.fixture(params=["llm", "qwen3_vl", "janus"])
def served(request, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    backend = "transformers" if request.param == "janus" else "vllm"
    log = tmp_path / "access.jsonl"
    command = [warm_python(), "-m", "lmm_r1.cli.serve_chat", "--model", str(tiny_checkpoint(request.param))]
    command += ["--name", "tiny", "--port", "0", "--backend", backend, "--access-log", str(log)]
    with subprocess.Popen(command, cwd=ROOT, env=everything(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            assert line.startswith("chat server: http://127.0.0.1:"), line
            yield Served(url=line.removeprefix("chat server: ").strip(), log=log, backend=backend)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def whole_characters(text: str) -> str:
    """Return a text without the marks of broken characters, which a random model writes and whose number may differ."""
    return text.replace("\ufffd", "")


def texts(choices: list[dict[str, Any]]) -> list[str]:
    return [whole_characters(choice["message"]["content"]) for choice in choices]


def streamed(served: Served, **fields: Any) -> list[str]:
    """Return the text of each choice of a streamed answer."""
    lines = [
        line.removeprefix("data: ") for line in served.reply(stream=True, **fields).decode().split("\n\n") if line
    ]
    assert lines.pop() == "[DONE]"
    came: dict[int, str] = {}
    for line in lines:
        [choice] = json.loads(line)["choices"]
        came[choice["index"]] = came.get(choice["index"], "") + choice["delta"].get("content", "")
    return [whole_characters(text) for text in came.values()]


def check_fields(served: Served) -> None:
    """What a request may ask for changes its answer as the API says."""
    first = served.choices(seed=3, n=2)
    whole = texts(first)
    assert whole[0] != whole[1]
    assert texts(served.choices(seed=3, n=2)) == whole != texts(served.choices(seed=4, n=2))
    assert streamed(served, seed=3, n=2) == whole
    stop = max(re.split(r"[\ufffd\s]+", first[0]["message"]["content"]), key=len)
    [cut] = served.choices(seed=3, stop=[stop, "nowhere"], temperature=0)
    assert stop not in cut["message"]["content"]
    both = served.choices(seed=3, n=2, stop=[stop])
    assert (texts(both)[0], both[0]["finish_reason"]) == (whole[0][: whole[0].index(stop)], "stop")
    assert streamed(served, seed=3, n=2, stop=[stop]) == texts(both)
    if served.backend == "transformers":
        with pytest.raises(urllib.error.HTTPError, match="400"):
            served.choices(logprobs=True)
        return
    [greedy] = served.choices(temperature=0, logprobs=True, top_logprobs=2)
    content = greedy["logprobs"]["content"]
    assert [whole_characters("".join(one["token"] for one in content))] == texts([greedy])
    for one in content:
        likeliest, second = (other["logprob"] for other in one["top_logprobs"])
        assert one["logprob"] == likeliest >= second
    # With the strongest penalty no token comes as often as without it. Tokens that are parts of characters look alike.
    [varied] = served.choices(temperature=0, logprobs=True, frequency_penalty=2)
    most, fewer = (
        max(Counter(one["token"] for one in answer if one["bytes"]).values())
        for answer in (content, varied["logprobs"]["content"])
    )
    assert fewer <= most


def check_abandoned(served: Served) -> None:
    """A stream whose client disconnects frees its place."""
    place, logged = urlsplit(served.url), len(served.statuses())
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "1+1?"}], "stream": True, "n": 4}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    until = time.monotonic() + 20
    # Its line in the access log comes after its place is free.
    while served.health()["open"] or len(served.statuses()) == logged:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_checkpoint_is_asked_over_http_and_may_be_a_judge(served: Served, tmp_path: Path):
    told = json.loads(served.reply(max_tokens=5, n=2))
    assert len(told["choices"]) == 2
    assert told["usage"]["prompt_tokens"] > 0
    assert 2 <= told["usage"]["completion_tokens"] <= 10
    check_fields(served)
    check_abandoned(served)
    requests = len(served.statuses())
    # A random model writes no verdict, so that the rule's stands.
    spec = (
        f"llm_judge:judge_url={served.url},judge_model=tiny,judge_folder={tmp_path},judge_attempts=1,"
        'judge_body={"max_tokens": 4}'
    )
    with VerifierJudge(spec, workers=1, item_timeout_seconds=5.0) as judge:
        (score,) = judge.judge([Item(prompt="q", response="<answer>the larger</answer>", label=r"\max(a, b)")])
    assert (score.score, score.parts["judge_failed"]) == (0.0, 1.0)
    assert served.statuses()[requests:] == [200]
