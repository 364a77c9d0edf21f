"""One group: a prompt encoded once, its samples generated together, each scored as soon as it is finished."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from lmm_r1.config.rewards import WeightedPart
from lmm_r1.data.messages import BadRows, Row
from lmm_r1.data.sample import WHOLE, MediaRef, Sample, Segment
from lmm_r1.data.training_rows import stopped_by
from lmm_r1.errors import UserError
from lmm_r1.files.user_process import FunctionFailed
from lmm_r1.generation.engine import SamplingSettings, TokenEngine
from lmm_r1.generation.request import EngineWeights, PromptCodec, Request, Response, sampling_params
from lmm_r1.lmm_kits import EncodedPrompt, Media
from lmm_r1.scoring import Moment, ScoredResponse, Scorer, weighted
from remote_rm.client import RewardUnavailable
from remote_rm.verifier import Score

if TYPE_CHECKING:
    from vllm import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """How the samples of a group are generated."""

    sampling: SamplingSettings
    max_len: int
    """Longest prompt and response together, in tokens."""
    logprobs: bool
    """Whether the engine reports the log-probs of the sampled tokens."""
    ignore_eos: bool
    overlong_prompts: Literal["error", "skip", "take"]
    """How to treat a prompt that leaves less room than `max_new_tokens`; `take` uses the remaining tokens."""
    media: bool
    """Whether samples include their media, which only training needs."""
    branches: int = 1
    """How many episodes share their first turns; see `BranchingRollout`."""
    pictures: bool = False
    """Whether episodes include the pictures that they were shown, for people to look at."""
    moment: Moment | None = None
    """When in the run they are scored, for reward functions; None outside of a run."""
    part_weights: tuple[WeightedPart, ...] = ()
    """Weighted parts added to the reward of each sample; empty in an evaluation."""
    bad_rows: BadRows | None = None
    """Whether a run stops at a prompt that cannot be encoded, or skips it; None outside of a run."""
    greedy: bool = False
    """Whether to also generate and score a greedy response for each group."""

    def of_greedy(self) -> GroupSettings:
        """Return the settings of the greedy response to a prompt, which is scored but not trained on."""
        return replace(
            self,
            sampling=self.sampling.greedy(),
            branches=1,
            logprobs=False,
            media=False,
            pictures=False,
            greedy=False,
        )


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The shared start of a group's samples."""

    row: Row
    shown: Row
    """The row as shown to the policy."""
    prompt: EncodedPrompt
    """Without media tensors."""
    segment: Segment
    begun: str
    """The text with which a response begins."""
    weight_version: int
    """Of the engine."""


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """The samples of a group on their way from an engine; in a plain list, Ray would copy the prompt of every item."""

    samples: list[Sample]
    refused: str | None = None
    """Why the prompt cannot be encoded, if the run skips it."""


class RefusedPrompt(UserError):
    """A prompt that cannot be encoded, and that the run skips."""


class GroupRollout:
    """Generates groups on one engine, and scores them if there is a scorer."""

    paid_parts: Collection[str] = ()
    """The parts of the reward that the rollout adds to the scorer's, at weight 1."""

    def __init__(
        self,
        *,
        codec: PromptCodec,
        scorer: Scorer | None,
        in_thread: Callable[..., Awaitable[Any]],
        store: Callable[[Media], MediaRef],
        weights: EngineWeights | None = None,
    ) -> None:
        self.codec = codec
        # The engine's, if it may be updated while it generates.
        self.weights = weights
        self.tokenizer = codec.tokenizer
        self.scorer = scorer
        # Runs a function outside of the event loop, which images would block.
        self.in_thread = in_thread
        # Stores media for the models' workers.
        self.store = store

    async def run(
        self, engine: TokenEngine, row: Row, settings: GroupSettings, *, weight_version: int
    ) -> list[Sample]:
        """Return the group's samples, which share one prompt segment.

        A prompt that leaves too little room is never cut: the group is empty, or UserError is raised.
        Raises RewardUnavailable if a sample gets no reward, and UserError if a reward is not finite or a response is
        incomplete: an incomplete group is an error. Raises RefusedPrompt for a prompt that cannot be encoded and that the
        run skips.

        Args:
            weight_version: the engine's.
        """
        shown, prompt = await self._shown_prompt(row, settings)
        room = settings.max_len - len(prompt.token_ids)
        wanted = 1 if settings.overlong_prompts == "take" else settings.sampling.max_new_tokens
        if room < (wanted or 1):
            if settings.overlong_prompts == "skip":
                return []
            raise UserError(
                f"{row.location}: the prompt takes {len(prompt.token_ids)} tokens, which with "
                f"--rollout.max_new_tokens {wanted or 1} is more than --data.max_len {settings.max_len}; raise it, or "
                "leave such rows out with --data.overlong_prompts skip"
            )
        media = await self.in_thread(self.store, prompt.media) if settings.media and prompt.media else None
        opening = Opening(
            row=row,
            shown=shown,
            # Pixel values are large, and the engine needs only the images.
            prompt=replace(prompt, media=None),
            # One segment for all samples.
            segment=Segment(kind="prompt", token_ids=tuple(prompt.token_ids), media=media),
            begun=self.codec.begun_with(shown, prompt.engine_token_ids),
            weight_version=weight_version,
        )
        if not settings.greedy:
            return await self._scored_samples(engine, opening, settings)
        # Run both at once.
        parts = [
            asyncio.ensure_future(self._scored_samples(engine, opening, own))
            for own in (settings, settings.of_greedy())
        ]
        try:
            samples, (greedy,) = await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
            # If one fails, release the other before raising.
            await asyncio.wait(parts)
        return [replace(sample, greedy=greedy) for sample in samples]

    async def _shown_prompt(self, row: Row, settings: GroupSettings) -> tuple[Row, EncodedPrompt]:
        """Return the row as the policy sees it, and its prompt."""
        try:
            shown = await self.shown_row(row)
            return shown, await self.in_thread(self.encoded_prompt, shown)
        except UserError as error:
            if settings.bad_rows == "skip":
                raise RefusedPrompt(str(error)) from error
            if settings.bad_rows == "stop":
                raise stopped_by(error) from error
            raise

    async def _scored_samples(self, engine: TokenEngine, opening: Opening, settings: GroupSettings) -> list[Sample]:
        """Return samples with their rewards, scored one by one as they end or all at once, depending on the scorer."""
        tasks: list[asyncio.Task[list[Sample]]] = []
        samples = []
        try:
            async with aclosing(self.sampled(engine, opening, settings)) as generated:
                async for sample in generated:
                    if self.scorer is None or self.scorer.one_by_one:
                        tasks.append(asyncio.create_task(self._scored([sample], opening.prompt, settings)))
                    else:
                        samples.append(sample)
            if samples:
                tasks.append(asyncio.create_task(self._scored(samples, opening.prompt, settings)))
            return list(chain.from_iterable(await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()

    async def shown_row(self, row: Row) -> Row:
        """Return the row as shown to the policy."""
        return row

    def encoded_prompt(self, shown: Row) -> EncodedPrompt:
        """Return the prompt of a row as shown to the policy; may take long."""
        return self.codec.encode(shown)

    async def sampled(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings
    ) -> AsyncGenerator[Sample, None]:
        """Yield the group's samples, without rewards, as they end; raises UserError if one is incomplete."""
        room = settings.max_len - len(opening.prompt.token_ids)
        parameters = self._parameters(settings, max_tokens=settings.sampling.max_new_tokens or room)
        request = Request(self.codec.engine_prompt(opening.prompt), parameters, weights=self.weights)
        async with aclosing(request.sent_to(engine)) as responses:
            async for response in responses:
                if response.finish_reason in WHOLE:
                    ended = response.finish_reason == "stop"
                    yield Sample(
                        row=opening.row,
                        segments=(opening.segment, generated_segment(response, settings)),
                        response=opening.begun + self.codec.text(response.token_ids, ended=ended),
                        finish_reason=response.finish_reason,
                        weight_version=opening.weight_version,
                        image_scales=opening.prompt.image_scales,
                    )
        check_whole(request, opening.row)

    def _parameters(
        self,
        settings: GroupSettings,
        *,
        max_tokens: int,
        n_samples: int | None = None,
        stops: Sequence[str] = (),
        output_per: Literal["token", "response", "prompt"] = "response",
    ) -> SamplingParams:
        sampling = settings.sampling if n_samples is None else replace(settings.sampling, n_samples=n_samples)
        return sampling_params(
            sampling,
            max_tokens=max_tokens,
            end_token_id=self.tokenizer.eos_token_id,
            output_per=output_per,
            logprobs=settings.logprobs,
            ignore_eos=settings.ignore_eos,
            stops=stops,
        )

    async def _scored(self, samples: Sequence[Sample], prompt: EncodedPrompt, settings: GroupSettings) -> list[Sample]:
        """Return samples of a group with their rewards; without a scorer a reward model gives them later."""
        if self.scorer is not None:
            row = samples[0].row
            try:
                scores = await self.scorer.rewards([self._given(sample, prompt, settings) for sample in samples])
            except (RewardUnavailable, UserError) as error:
                raised = isinstance(error, FunctionFailed)
                advice = "; correct it, with the whole traceback by LMM_R1_VERBOSE=1" if raised else ""
                kind = UserError if isinstance(error, UserError) else RewardUnavailable
                raise kind(f"{_placed(error, row)}{advice}") from error
            for score in scores:
                _check_finite(score, row)
            samples = [replace(sample, reward=score) for sample, score in zip(samples, scores, strict=True)]
        return [self._weighted(self.rewarded(sample), settings) for sample in samples]

    def rewarded(self, sample: Sample) -> Sample:
        """Return a sample with the rewards that the rollout adds itself."""
        return sample

    def _weighted(self, sample: Sample, settings: GroupSettings) -> Sample:
        """Return a sample whose reward has the weighted parts."""
        if not settings.part_weights:
            return sample
        reward = weighted(sample.scored, settings.part_weights, paid=self.paid_parts, location=sample.row.location)
        return replace(sample, reward=reward)

    def _given(self, sample: Sample, prompt: EncodedPrompt, settings: GroupSettings) -> ScoredResponse:
        return ScoredResponse(
            row=sample.row,
            prompt=self.tokenizer.decode(prompt.engine_token_ids, skip_special_tokens=False),
            query=self._query(sample, prompt),
            response=sample.response,
            num_tokens=sample.generated_tokens,
            token_ids=tuple(chain.from_iterable(segment.token_ids for segment in sample.segments[1:])),
            image_scales=prompt.image_scales,
            moment=settings.moment,
        )

    def _query(self, sample: Sample, prompt: EncodedPrompt) -> str:
        """Return prompt and response as the model reads and writes them, with one placeholder per image."""
        later = chain.from_iterable(segment.token_ids for segment in sample.segments[1:])
        ids = [*prompt.engine_token_ids, *self.codec.kit.collapsed(self.codec.processor, list(later))]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def generated_segment(response: Response, settings: GroupSettings) -> Segment:
    """Return a complete response as a segment."""
    log_probs = tuple(response.log_probs) if settings.logprobs else None
    return Segment(
        kind="generated", token_ids=tuple(response.token_ids), log_probs=log_probs, weights=response.weights
    )


def _placed(error: Exception, row: Row) -> str:
    """Return an error's message with the row's location, which errors of images already have."""
    said = str(error)
    return said if said.startswith(f"{row.location}:") else f"{row.location}: {said}"


class BrokenOff(UserError):
    """The engine has not completed a response."""


def check_whole(request: Request, row: Row) -> None:
    """Raise BrokenOff if a response of a group is incomplete."""
    if broken := request.broken:
        ends = ", ".join(
            f"{count} never ended" if reason is None else f"{count} ended in {reason}"
            for reason, count in broken.items()
        )
        count = len(request.responses)
        raise BrokenOff(
            f"{row.location}: the engine completed {count - broken.total()} of {count} responses ({ends}), and incomplete "
            "groups are not trained on; look at the engine's output with LMM_R1_VERBOSE=1"
        )


def _check_finite(scored: Score, row: Row) -> None:
    """Raise UserError if a reward, a score or a part of it is not finite."""
    values = {"reward": scored.reward, "score": scored.score, **scored.parts}
    wrong = ", ".join(f"{name} {value}" for name, value in values.items() if not math.isfinite(value))
    if wrong:
        raise UserError(
            f"{row.location}: --reward.remote_url gives {wrong} for a response; correct it so that it gives finite "
            "numbers for every response"
        )
