"""Engines in the place of vLLM: one that counts, and one that says what a test wants it to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from helpers.character_kit import END, PATCHES, PLACEHOLDER, CharacterKit
from helpers.samples import media_ref
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import MediaRef, Sample
from lmm_r1.generation.engine import EngineSettings, SamplingSettings
from lmm_r1.generation.group import GroupRollout, GroupSettings
from lmm_r1.generation.request import PromptCodec

ENGINE = EngineSettings(
    adapter=None,
    dtype="float32",
    max_model_len=256,
    max_images=2,
    max_videos=0,
    batch_rows=1,
    tensor_parallel_size=1,
    gpu_memory_utilization=0.5,
    enforce_eager=False,
    seed=3,
    trust_remote_code=False,
)


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
    def engine_core(self) -> CountingEngine:
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


SETTINGS = GroupSettings(
    sampling=SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=4),
    max_len=80,
    logprobs=True,
    ignore_eos=False,
    overlong_prompts="error",
    media=True,
)
LIMITS = AgentConfig(max_turns=4, max_images=2, answer_s=5.0, overturn="mask", overturn_penalty=0.5)


class TalkingEngine:
    """Says its turns one after the other, each with the end token behind it; a turn of bytes has none, and is cut off."""

    def __init__(self, *turns: str | bytes) -> None:
        self.turns = list(turns)
        self.requests: list[tuple[Any, Any]] = []

    async def generate(self, request: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        self.requests.append((request, parameters))
        turn = self.turns.pop(0)
        cut_off = isinstance(turn, bytes)
        token_ids = list(turn) if isinstance(turn, bytes) else [*turn.encode(), END]
        part = SimpleNamespace(
            index=0,
            token_ids=token_ids,
            text=bytes(token_ids if cut_off else token_ids[:-1]).decode(),
            logprobs=[{token: SimpleNamespace(logprob=-float(token))} for token in token_ids],
            finish_reason="length" if cut_off else "stop",
            stop_reason=None,
        )
        read = [token for token in request["prompt_token_ids"] for _ in range(PATCHES if token == PLACEHOLDER else 1)]
        yield SimpleNamespace(outputs=[part], prompt_token_ids=read)

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens that each turn was asked for with."""
        return [list(request["prompt_token_ids"]) for request, _ in self.requests]


def play_group(
    make: Callable[..., GroupRollout],
    engine: TalkingEngine,
    prompt: Row,
    *,
    n_samples: int = 1,
    settings: GroupSettings = SETTINGS,
    limits: AgentConfig = LIMITS,
    scorer: Any = None,
    stored: list[Any] | None = None,
    processor: Any = None,
    groups: int = 1,
    beside: GroupSettings | None = None,
) -> Sequence[Sample]:
    """Return the samples of the last of the groups that one rollout plays.

    Args:
        make: returns the rollout of what a `GroupRollout` takes, and limits.
        stored: gets the media that are put aside for training.
        beside: of a further group that is played at the same time as each, whose samples come behind.
    """
    kept = [] if stored is None else stored

    def store(media: Any) -> MediaRef:
        kept.append(media)
        return media_ref(f"object {len(kept)}")

    rollout = make(
        limits=limits,
        codec=PromptCodec(kit=CharacterKit(), processor=processor, banned_token_ids=()),
        scorer=scorer,
        in_thread=asyncio.to_thread,
        store=store,
    )
    asked = replace(settings, sampling=replace(settings.sampling, n_samples=n_samples))

    async def run() -> Sequence[Sample]:
        for _ in range(groups):
            played = [rollout.run(engine, prompt, one, weight_version=7) for one in (asked, beside) if one is not None]
            samples = await asyncio.wait_for(asyncio.gather(*played), timeout=20)
        return [sample for group in samples for sample in group]

    return asyncio.run(run())
