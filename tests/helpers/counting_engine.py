"""An engine whose responses count: what vLLM's `LLMEngine` does, without a model."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind


@dataclass
class _Sample:
    index: int
    left: list[int]
    tokens: list[int] = field(default_factory=list)
    sent: int = 0


class CountingEngine:
    """Counts from 1 up to what `counts` says for each sample of a prompt, one number per step, and notes who called it.

    Args:
        counts: the prompt is what it says itself where there is none.
        ends: how the responses to a prompt end.
    """

    def __init__(
        self,
        counts: Callable[[Any], Sequence[int]] = tuple,
        *,
        ends: Callable[[Any], str] = lambda prompt: "length",
        fails_at_step: int | None = None,
    ) -> None:
        self.counts, self.ends, self.fails_at_step = counts, ends, fails_at_step
        self.left: dict[str, list[_Sample]] = {}
        self.requests: dict[str, tuple[Any, SamplingParams]] = {}
        self.aborted: list[str] = []
        self.threads = {threading.get_ident()}
        self.steps = self.most_at_once = 0
        self.running = True

    @property
    def engine_core(self) -> "CountingEngine":
        return self

    def shutdown(self, timeout: float | None = None) -> None:
        self.running = False

    def collective_rpc(self, method: str, timeout: float | None, arguments: tuple, keywords: dict | None) -> None:
        assert method == "ban_tokens", "the only call of a worker when an engine starts"

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        self.threads.add(threading.get_ident())
        counts = self.counts(prompt)
        if min(counts) < 1:
            raise ValueError(f"prompt {prompt}")
        assert len(counts) == params.n
        self.requests[request_id] = (prompt, params)
        self.left[request_id] = [_Sample(index, list(range(1, count + 1))) for index, count in enumerate(counts)]
        self.most_at_once = max(self.most_at_once, len(self.left))

    def has_unfinished_requests(self) -> bool:
        self.threads.add(threading.get_ident())
        return bool(self.left)

    def step(self) -> list[RequestOutput]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.steps == self.fails_at_step:
            self.left.clear()
            raise RuntimeError("out of memory")
        return [output for request_id in list(self.left) for output in self._step(request_id)]

    def abort_request(self, request_ids: list[str]) -> None:
        self.threads.add(threading.get_ident())
        self.aborted += request_ids
        for request_id in request_ids:
            self.left.pop(request_id, None)

    def _step(self, request_id: str) -> list[RequestOutput]:
        (prompt, params), samples = self.requests[request_id], self.left[request_id]
        outputs, parts = [], []
        for sample in filter(lambda sample: sample.left, samples):
            sample.tokens.append(sample.left.pop(0))
            finished = not any(other.left for other in samples)
            end = None if sample.left else self.ends(prompt)
            if params.output_kind is RequestOutputKind.FINAL_ONLY:
                parts = [_part(other, 0, self.ends(prompt)) for other in samples] if finished else []
            elif end or not sample.sent or len(sample.tokens) - sample.sent >= (params.stream_interval or 1):
                parts = [_part(sample, sample.sent, end)]
                sample.sent = len(sample.tokens)
            else:
                parts = []
            if parts:
                outputs.append(RequestOutput(request_id, None, None, None, parts, finished))
        if not any(sample.left for sample in samples):
            del self.left[request_id]
        return outputs


def _part(sample: _Sample, start: int, end: str | None) -> CompletionOutput:
    """Tokens of one sample of a request, as the engine gives them; the log-prob of a token is minus its id."""
    tokens = sample.tokens[start:]
    return CompletionOutput(
        index=sample.index,
        text="",
        token_ids=tokens,
        cumulative_logprob=None,
        logprobs=[{token: Logprob(-float(token))} for token in tokens],
        finish_reason=end,
    )
