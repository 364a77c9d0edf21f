"""One group: a prompt encoded once, its samples generated together, each scored as soon as it is finished."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample, Segment
from lmm_r1.errors import UserError
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.generation.sampling import sampling_params
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.scoring.sources import Scorer
from remote_rm.client import RewardUnavailable
from remote_rm.verifier import Score

# How vLLM says that a response is whole; it also knows abort, error and repetition.
WHOLE = ("stop", "length")


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """How the samples of a group are generated."""

    n_samples: int
    temperature: float
    top_p: float
    max_new_tokens: int | None
    """None: whatever the prompt leaves of `max_len`."""
    max_len: int
    logprobs: bool
    """Whether the engine reports the log-probs of the sampled tokens."""
    ignore_eos: bool
    overlong_prompts: Literal["error", "skip"]


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """The samples of a group on their way from an engine, with one media object: of a list, Ray copies every item."""

    samples: list[Sample]


@dataclass(kw_only=True)
class _Response:
    """What the engine has given of one response so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def segment(self, *, log_probs: bool) -> Segment:
        """Return what was generated, with the log-probs where they were asked for."""
        known = tuple(self.log_probs) if log_probs else None
        return Segment(kind="generated", token_ids=tuple(self.token_ids), log_probs=known)


class GroupRollout:
    """Generates groups on one engine, and scores them where a scorer is given."""

    def __init__(
        self,
        *,
        codec: PromptCodec,
        scorer: Scorer | None,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self.codec = codec
        self.tokenizer = codec.tokenizer
        self.scorer = scorer
        # Runs a function elsewhere than in the event loop, which images would hold up, and one at a time.
        self.in_thread = in_thread

    async def run(self, engine: Any, row: Row, settings: GroupSettings, *, weight_version: int) -> list[Sample]:
        """Return the group's samples, which have one prompt segment in common.

        A prompt that leaves too little room is never cut: the group is empty, or a UserError says so.
        Raises RewardUnavailable when a sample's reward cannot be had, and UserError when it is not finite or when a
        response has not come whole: a group that is short is none.

        Args:
            weight_version: of the engine.
        """
        prompt = await self.in_thread(self.codec.encode, row)
        room = settings.max_len - len(prompt.token_ids)
        if room < (settings.max_new_tokens or 1):
            if settings.overlong_prompts == "skip":
                return []
            raise UserError(
                f"{row.location}: the prompt takes {len(prompt.token_ids)} tokens, which with "
                f"--rollout.max_new_tokens {settings.max_new_tokens or 1} is more than --data.max_len "
                f"{settings.max_len}; raise it, or leave such rows out with --data.overlong_prompts skip"
            )
        responses = [_Response() for _ in range(settings.n_samples)]
        # One segment, and one media object, for all samples.
        shared = Segment(kind="prompt", token_ids=tuple(prompt.token_ids), media=prompt.media)
        tasks = []
        try:
            async for response in self._finished(
                engine, prompt, settings, responses=responses, max_tokens=settings.max_new_tokens or room
            ):
                if response.finish_reason in WHOLE:
                    generated = response.segment(log_probs=settings.logprobs)
                    sample = Sample(
                        row=row,
                        segments=(shared, generated),
                        response=self.codec.text(response.token_ids, ended=response.finish_reason == "stop"),
                        finish_reason=response.finish_reason,
                        weight_version=weight_version,
                    )
                    tasks.append(asyncio.create_task(self._scored(sample, prompt)))
            _check_whole(responses, row)
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _finished(
        self,
        engine: Any,
        prompt: EncodedPrompt,
        settings: GroupSettings,
        *,
        responses: Sequence[_Response],
        max_tokens: int,
    ) -> AsyncIterator[_Response]:
        """Fill in the responses of a group, and yield each when it has ended, in whatever way."""
        request = self.codec.request(prompt)
        parameters = sampling_params(
            n_samples=settings.n_samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=max_tokens,
            banned_token_ids=self.codec.banned_token_ids,
            end_token_id=self.tokenizer.eos_token_id,
            logprobs=settings.logprobs,
            ignore_eos=settings.ignore_eos,
        )
        async for output in engine.generate(request, parameters, request_id=uuid.uuid4().hex):
            for part in output.outputs:
                response = responses[part.index]
                response.token_ids.extend(part.token_ids)
                if part.logprobs is not None:
                    pairs = zip(part.token_ids, part.logprobs, strict=True)
                    response.log_probs.extend(logprobs[token].logprob for token, logprobs in pairs)
                if part.finish_reason is not None:
                    response.finish_reason = part.finish_reason
                    yield response

    async def _scored(self, sample: Sample, prompt: EncodedPrompt) -> Sample:
        """Return a sample with its reward; without a scorer a reward model gives it later."""
        if self.scorer is None:
            return sample
        (generated,) = sample.generated
        try:
            score = await self.scorer.reward(
                query=self.tokenizer.decode(
                    [*prompt.engine_token_ids, *generated.token_ids], skip_special_tokens=False
                ),
                prompt=sample.prompt,
                label=sample.label,
                response=sample.response,
            )
        except (RewardUnavailable, UserError) as error:
            raise type(error)(f"{sample.row.location}: {error}") from error
        _check_finite(score, sample.row)
        return replace(sample, reward=score)


def _check_whole(responses: Sequence[_Response], row: Row) -> None:
    """Raise UserError where a response of a group did not end as responses do."""
    broken = Counter(response.finish_reason for response in responses if response.finish_reason not in WHOLE)
    if broken:
        ends = ", ".join(
            f"{count} never ended" if reason is None else f"{count} ended in {reason}"
            for reason, count in broken.items()
        )
        raise UserError(
            f"{row.location}: the engine gave {len(responses) - broken.total()} of {len(responses)} responses whole "
            f"({ends}), and a group is not learnt from in part; look at the engine's output with --logger.worker_logs"
        )


def _check_finite(scored: Score, row: Row) -> None:
    """Raise UserError where a reward, a score or a part of it is no finite number."""
    values = {"reward": scored.reward, "score": scored.score, **scored.parts}
    wrong = ", ".join(f"{name} {value}" for name, value in values.items() if not math.isfinite(value))
    if wrong:
        raise UserError(
            f"{row.location}: --reward.remote_url gives {wrong} for a response; correct it so that it gives finite "
            "numbers for every response"
        )
