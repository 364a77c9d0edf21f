"""One group: a prompt encoded once, its samples generated together, each scored as soon as it is finished."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from vllm.inputs import TokensPrompt

from lmm_r1.data.messages import Row, to_json
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.rows import encode_row
from lmm_r1.rollout.sampling import sampling_params
from lmm_r1.rollout.scoring import Scorer
from remote_rm.client import ItemReward, RewardUnavailable

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
    """The samples of a group on their way from an engine, with one media object: of a list, Ray copies every dict."""

    samples: list[dict[str, Any]]


@dataclass(kw_only=True)
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class GroupRollout:
    """Generates groups on one engine, and scores them where a scorer is given."""

    def __init__(
        self,
        *,
        kit: LmmKit,
        processor: Any,
        banned_token_ids: tuple[int, ...],
        scorer: Scorer | None,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self.kit = kit
        self.processor = processor
        self.tokenizer = kit.tokenizer_of(processor)
        self.banned_token_ids = banned_token_ids
        self.scorer = scorer
        # Runs a function elsewhere than in the event loop, which images would hold up, and one at a time.
        self.in_thread = in_thread

    async def run(self, engine: Any, row: Row, settings: GroupSettings) -> list[dict[str, Any]]:
        """Return the group's samples as OpenRLHF's executors do, with one shared media object.

        A prompt that leaves too little room is never cut: the group is empty, or a UserError says so.
        Raises RewardUnavailable when a sample's reward cannot be had, and UserError when it is not finite or when a
        response has not come whole: a group that is short is none.
        """
        encode = partial(encode_row, kit=self.kit, processor=self.processor, add_generation_prompt=True)
        prompt = await self.in_thread(encode, row)
        room = settings.max_len - len(prompt.token_ids)
        if room < (settings.max_new_tokens or 1):
            if settings.overlong_prompts == "skip":
                return []
            raise UserError(
                f"{row.location}: the prompt takes {len(prompt.token_ids)} tokens, which with "
                f"--rollout.max_new_tokens {settings.max_new_tokens or 1} is more than --data.max_len "
                f"{settings.max_len}; raise it, or leave such rows out with --data.overlong_prompts skip"
            )
        samples = [_Sample() for _ in range(settings.n_samples)]
        tasks = []
        try:
            async for sample in self._finished(
                engine, prompt, settings, samples=samples, max_tokens=settings.max_new_tokens or room
            ):
                if sample.finish_reason in WHOLE:
                    tasks.append(asyncio.create_task(self._score(row, prompt, sample, settings)))
            _check_whole(samples, row)
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
        samples: Sequence[_Sample],
        max_tokens: int,
    ) -> AsyncIterator[_Sample]:
        """Fill in the samples of a group, and yield each when it has ended, in whatever way."""
        request = TokensPrompt(prompt_token_ids=prompt.engine_token_ids)
        media = self.kit.engine_media(prompt)
        if media:
            request["multi_modal_data"] = media
        parameters = sampling_params(
            n_samples=settings.n_samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=max_tokens,
            banned_token_ids=self.banned_token_ids,
            end_token_id=self.tokenizer.eos_token_id,
            logprobs=settings.logprobs,
            ignore_eos=settings.ignore_eos,
        )
        async for output in engine.generate(request, parameters, request_id=uuid.uuid4().hex):
            for part in output.outputs:
                sample = samples[part.index]
                sample.token_ids.extend(part.token_ids)
                if part.logprobs is not None:
                    pairs = zip(part.token_ids, part.logprobs, strict=True)
                    sample.log_probs.extend(logprobs[token].logprob for token, logprobs in pairs)
                if part.finish_reason is not None:
                    sample.finish_reason = part.finish_reason
                    yield sample

    async def _score(
        self, row: Row, prompt: EncodedPrompt, sample: _Sample, settings: GroupSettings
    ) -> dict[str, Any]:
        response_ids = sample.token_ids
        # A model may have several end tokens; no stop strings are used.
        ended = sample.finish_reason == "stop"
        response = self.tokenizer.decode(response_ids[:-1] if ended else response_ids, skip_special_tokens=False)
        prompt_json = to_json(row.messages)
        scored = None
        if self.scorer is not None:
            try:
                scored = await self.scorer.reward(
                    query=self.tokenizer.decode([*prompt.engine_token_ids, *response_ids], skip_special_tokens=False),
                    prompt=prompt_json,
                    label=row.answer,
                    response=response,
                )
            except (RewardUnavailable, UserError) as error:
                raise type(error)(f"{row.location}: {error}") from error
            _check_finite(scored, row)
        length = len(prompt.token_ids)
        return {
            "row": row,
            "prompt": prompt_json,
            "label": row.answer,
            "response": response,
            "mm_train_inputs": prompt.media,
            "observation_tokens": [*prompt.token_ids, *response_ids],
            "action_ranges": [(length, length + len(response_ids))],
            "rollout_log_probs": [0.0] * length + sample.log_probs if settings.logprobs else None,
            "truncated": sample.finish_reason == "length",
            # Without a scorer a reward model gives them, when the samples have become experiences.
            "reward": None if scored is None else scored.reward,
            "scores": None if scored is None else scored.score,
            "extra_logs": {} if scored is None else scored.extra_logs,
        }


def _check_whole(samples: Sequence[_Sample], row: Row) -> None:
    """Raise UserError where a sample of a group did not end as responses do."""
    broken = Counter(sample.finish_reason for sample in samples if sample.finish_reason not in WHOLE)
    if broken:
        ends = ", ".join(
            f"{count} never ended" if reason is None else f"{count} ended in {reason}"
            for reason, count in broken.items()
        )
        raise UserError(
            f"{row.location}: the engine gave {len(samples) - broken.total()} of {len(samples)} responses whole ({ends}), "
            "and a group is not learnt from in part; look at the engine's output with --logger.worker_logs"
        )


def _check_finite(scored: ItemReward, row: Row) -> None:
    """Raise UserError where a reward, a score or a part of it is no finite number."""
    values = {"reward": scored.reward, "score": scored.score, **scored.extra_logs}
    wrong = ", ".join(f"{name} {value}" for name, value in values.items() if not math.isfinite(value))
    if wrong:
        raise UserError(
            f"{row.location}: --reward.remote_url gives {wrong} for a response; correct it so that it gives finite "
            "numbers for every response"
        )
