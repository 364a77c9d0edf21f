"""`lmm-r1 serve_chat` as a process of its own: an endpoint that can be asked, and a judge."""

import base64
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from helpers.recipe_samples import png
from helpers.reward_servers import ROOT, everything
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from lmm_r1.scoring.sources import VerifierJudge
from remote_rm.verifier import Item

pytestmark = pytest.mark.slow
KEY = "sesame"
IMAGE = f"data:image/png;base64,{base64.b64encode(png()).decode()}"


# An adapter of one whose class in vLLM is its own, and one for which `vllm serve` needs a flag on CPUs.
@pytest.fixture(params=["llm", "qwen3_vl"])
def served(request, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Iterator[openai.OpenAI]:
    model = tiny_checkpoint(request.param)
    if request.param == "llm":
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules="all-linear"))
        adapted.save_pretrained(model := tmp_path / "adapter")
    command = [sys.executable, "-m", "lmm_r1.cli.serve_chat", "--model", str(model)]
    command += ["--name", "tiny", "--port", "0", "--port-file", str(tmp_path / "port"), "--token-env", "CHAT_KEY"]
    with tempfile.TemporaryDirectory() as folder:
        environment = everything() | {"CHAT_KEY": KEY, "TMPDIR": folder}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                line = next(line for line in process.stdout if "chat server" in line)
                match = re.fullmatch(r"chat server: (http://127\.0\.0\.1:(\d+)/v1)\n", line)
                assert match is not None, line
                # The body of a refused request is not read: its connection may be reset, and the next request repeated.
                client = openai.OpenAI(base_url=match[1], api_key=KEY, max_retries=1)
                assert [one.id for one in client.models.list().data] == ["tiny"]
                assert (tmp_path / "port").read_text() == f"{match[2]}\n"
                assert len(list(Path(folder).glob("lmm-r1-merged-*"))) == (request.param == "llm")
                yield client
            finally:
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=60) == 0
        assert not list(Path(folder).glob("lmm-r1-merged-*"))


def asked(client: openai.OpenAI, content: Any = "1+1?", **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="tiny", messages=messages, **({"max_tokens": 12} | fields))


def test_a_checkpoint_is_asked_over_http_and_may_be_a_judge(served: openai.OpenAI, tmp_path, request, monkeypatch):
    reply = asked(served, n=2, seed=3)
    assert len(reply.choices) == 2
    assert 2 <= reply.usage.completion_tokens <= 24
    [greedy] = asked(served, temperature=0, logprobs=True, top_logprobs=2).choices
    assert all(one.logprob == one.top_logprobs[0].logprob for one in greedy.logprobs.content)
    pieces = [one.choices[0].delta.content or "" for one in asked(served, temperature=0, stream=True)]
    assert "".join(pieces) == greedy.message.content
    if "qwen3_vl" in request.node.name:
        check_images(served, reply.usage.prompt_tokens)
    with pytest.raises(openai.AuthenticationError):
        asked(served.with_options(api_key="guess"))
    with pytest.raises(openai.PermissionDeniedError) as refused:
        asked(served, extra_headers={"Host": "evil.example"})
    assert "localhost only" in refused.value.response.text
    monkeypatch.setenv("LLM_JUDGE_API_KEY", KEY)
    # A random model writes no verdict, so that the rule's stands.
    spec = f"llm_judge:judge_url={served.base_url},judge_model=tiny,judge_folder={tmp_path}"
    spec += ',judge_body={"max_tokens": 4}'
    with VerifierJudge(spec, workers=1, item_timeout_seconds=5.0) as judge:
        (score,) = judge.judge([Item(prompt="q", response="<answer>the larger</answer>", label=r"\max(a, b)")])
    assert (score.score, score.parts["judged_by_rule"]) == (0.0, 1.0)


def check_images(client: openai.OpenAI, tokens_of_text: int) -> None:
    """Images are taken as data URLs; no file is read and no address asked for unless that is allowed."""

    def about(url: str) -> Any:
        return asked(client, [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "1+1?"}])

    assert about(IMAGE).usage.prompt_tokens > tokens_of_text
    for url in ("file:///etc/passwd", "http://127.0.0.1:1/a.png", "http://example.org/a.png"):
        with pytest.raises(openai.APIStatusError, match="allowed-local-media-path|allowed domains"):
            about(url)
