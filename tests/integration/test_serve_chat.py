"""`lmm-r1 serve_chat` as a process of its own: an endpoint that can be asked, and a judge."""

import json
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.processes import warm_python
from helpers.reward_servers import ROOT, everything

from lmm_r1.scoring.response_scores import VerifierJudge
from remote_rm.verifier import Item

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@dataclass(frozen=True, kw_only=True)
class Served:
    url: str
    log: Path

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
            yield Served(url=line.removeprefix("chat server: ").strip(), log=log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def test_a_checkpoint_is_asked_over_http_and_may_be_a_judge(served: Served, tmp_path: Path):
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 5, "n": 2}
    request = urllib.request.Request(
        f"{served.url}/chat/completions", data=json.dumps(asked).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        told = json.load(reply)
    assert len(told["choices"]) == 2
    assert all(isinstance(choice["message"]["content"], str) for choice in told["choices"])
    assert told["usage"]["prompt_tokens"] > 0
    assert 2 <= told["usage"]["completion_tokens"] <= 10
    # A random model writes no verdict, so that the rule's stands.
    spec = (
        f"llm_judge:judge_url={served.url},judge_model=tiny,judge_folder={tmp_path},judge_attempts=1,"
        'judge_body={"max_tokens": 4}'
    )
    with VerifierJudge(spec, workers=1, item_timeout_seconds=5.0) as judge:
        (score,) = judge.judge([Item(prompt="q", response="<answer>the larger</answer>", label=r"\max(a, b)")])
    assert (score.score, score.parts["judge_failed"]) == (0.0, 1.0)
    assert served.statuses() == [200, 200]
