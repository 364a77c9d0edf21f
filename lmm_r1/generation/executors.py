"""What plays a run's episodes: an environment, whose episodes may branch, or a user's executor, as in OpenRLHF."""

from __future__ import annotations

import asyncio
import copy
import logging
import random
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from PIL import Image

from lmm_r1.agents.environment import Episode, load_environment
from lmm_r1.agents.openrlhf_agent import REWARD, AgentFault, ExecutorAgent, load_agent, logs_of, number
from lmm_r1.config.declared import json_object
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.messages import ImagePart, Message
from lmm_r1.data.sample import WHOLE, EpisodeEnd, EpisodeResult, Said, Sample, Segment, WeightSpan
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.episodes import EpisodeRollout, episode_seed
from lmm_r1.generation.group import GroupSettings, Opening
from lmm_r1.generation.request import Request
from lmm_r1.generation.turns import as_asked

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

    from lmm_r1.generation.episodes import _Play


# Probability that branches diverge before a turn, if no turn is given.
PARTING = 0.5


@dataclass(frozen=True, kw_only=True)
class EngineCall:
    """A turn that was generated for an agent."""

    read: tuple[int, ...]
    """All tokens before it, as the engine read them."""
    generated: tuple[int, ...]
    log_probs: tuple[float, ...]
    images: tuple[Image.Image, ...]
    finish_reason: str
    ended_by_token: bool
    """Whether the last token is an end token."""
    weights: tuple[WeightSpan, ...]
    """The weights that sampled the tokens; empty if not recorded."""


class CalledEngine:
    """The engine of an executor, for any event loop; samples as the agent asks, within what training needs."""

    def __init__(self, engine: TokenEngine, rollout: ExecutorRollout, settings: GroupSettings) -> None:
        """Use the running event loop for the engine.

        Args:
            settings: lengths and stop conditions, which are the same for all episodes: a call does not say which episode it
                belongs to.
        """
        self._engine = engine
        self._rollout = rollout
        self._settings = settings
        self._home = asyncio.get_running_loop()
        self._running = 0
        self._idle_since = time.monotonic()
        # By the tokens read and generated, in the order in which they ended.
        self._calls: dict[tuple[tuple[int, ...], tuple[int, ...]], list[EngineCall]] = defaultdict(list)
        # By the seed that an agent got for its episode: each request with it gets another one.
        self._requests: Counter[int] = Counter()

    @property
    def idle_s(self) -> float:
        """The seconds since the last request; 0 during requests."""
        return 0.0 if self._running else time.monotonic() - self._idle_since

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Return the complete output for a prompt, in which an image is one placeholder or its full run.

        Raises ValueError for a prompt that leaves no room, and AgentFault for media other than images.
        """
        if other := sorted(set(multi_modal_data or ()) - {"image"}):
            raise AgentFault(f"multi_modal_data has {', '.join(other)}, and an agent's turns may show only images")
        work = self._generate(list(prompt_token_ids), sampling_params, multi_modal_data or {})
        if asyncio.get_running_loop() is self._home:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._home))

    async def _generate(self, token_ids: list[int], asked: SamplingParams, media: Mapping[str, Any]) -> RequestOutput:
        from vllm.inputs import TokensPrompt

        rollout, most = self._rollout, self._settings.max_len
        if len(token_ids) >= most:
            raise ValueError(f"the prompt of {len(token_ids)} tokens leaves no room in --data.max_len {most}")
        prompt = TokensPrompt(prompt_token_ids=rollout.collapsed(token_ids))
        if media:
            prompt["multi_modal_data"] = dict(media)
        needed = rollout.needed(self._settings, most - len(token_ids))
        needed.seed = None
        if asked.seed is not None:
            self._requests[asked.seed] += 1
            needed.seed = zlib.crc32(f"{asked.seed} {self._requests[asked.seed]}".encode())
        parameters = as_asked(asked, needed=needed, engine_guesses=rollout.guesses)
        request = Request(prompt, parameters, weights=rollout.weights)
        self._running += 1
        try:
            async for _ in request.sent_to(self._engine):
                pass
        finally:
            self._running -= 1
            self._idle_since = time.monotonic()
        assert request.output is not None, "an engine answers"
        (response,) = request.responses
        read, generated = tuple(request.output.prompt_token_ids), tuple(response.token_ids)
        self._calls[tuple(rollout.collapsed(read)), generated].append(
            EngineCall(
                read=read,
                generated=generated,
                log_probs=tuple(response.log_probs),
                images=tuple(media.get("image") or ()),
                finish_reason=str(response.finish_reason),
                ended_by_token=response.finish_reason == "stop" and response.stop_text is None,
                weights=response.weights,
            )
        )
        return request.output

    def call_of(self, before: Sequence[int], generated: Sequence[int]) -> EngineCall:
        """Return the call that generated tokens after others; raises AgentFault if there was none.

        Several calls with the same tokens are returned one after the other, because their weights may differ.
        """
        calls = self._calls.get((tuple(self._rollout.collapsed(before)), tuple(generated)))
        if not calls:
            raise AgentFault(
                f"execute returns {len(generated)} tokens after the first {len(before)} as generated, but the engine has not "
                "generated them there; pass ids on unchanged, without tokenizing text again"
            )
        return calls.pop(0) if len(calls) > 1 else calls[0]

    def forget(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self._requests.clear()


logger = logging.getLogger(__name__)


class ExecutorRollout(EpisodeRollout):
    """Generates groups whose samples an executor plays: `execute` gets an engine, and returns tokens and rewards.

    Samples consist of the tokens that the engine read and generated, which the result of `execute` must match.
    """

    environment: ExecutorAgent

    def __init__(self, *, environment: ExecutorAgent, **settings: Any) -> None:
        super().__init__(environment=environment, **settings)
        # One for the whole run, because an executor may keep the first one.
        self._engine: CalledEngine | None = None
        self._playing = 0

    def collapsed(self, token_ids: Sequence[int]) -> list[int]:
        """Return tokens with one placeholder per image."""
        return self.codec.kit.collapsed(self.codec.processor, token_ids)

    def needed(self, settings: GroupSettings, room: int) -> SamplingParams:
        """Return what training needs of a turn; always with log-probs, because training and evaluation may overlap."""
        settings = replace(settings, logprobs=True)
        most = min(settings.sampling.max_new_tokens or room, room)
        return self._parameters(settings, max_tokens=most, n_samples=1, output_per="prompt")

    async def _episode(self, engine: TokenEngine, opening: Opening, settings: GroupSettings, *, number: int) -> Sample:
        if self._engine is None:
            self._engine = CalledEngine(engine, self, settings)
        called = self._engine
        self._playing += 1
        try:
            result = await self._executed(called, opening, settings, number=number)
            if result is not None:
                return await self._sample_of(result, opening, called, settings)
        except AgentFault:
            logger.exception("%s: its episode cannot be trained on", self._place_of(opening.row))
        finally:
            self._playing -= 1
            if not self._playing:
                called.forget()
        return await self._unplayed(engine, opening, settings, number=number)

    async def _executed(self, engine: CalledEngine, opening: Opening, settings: GroupSettings, *, number: int) -> Any:
        """Return the result of `execute`; None if it fails, or leaves the engine idle for too long."""
        agent, limit, began = self.environment, self.limits.answer_s, time.monotonic()
        given = self._arguments(engine, opening, settings, number=number)
        playing = asyncio.ensure_future(agent.loop.run(agent.executor.execute(**given)))
        try:
            while not playing.done():
                idle = min(engine.idle_s, time.monotonic() - began)
                if idle >= limit:
                    logger.warning(
                        "%s: it has not asked the engine for anything in %g s", self._place_of(opening.row), limit
                    )
                    return None
                await asyncio.wait({playing}, timeout=limit - idle)
            return playing.result()
        except Exception:  # the user's own code, which may raise anything
            logger.exception("%s: the executor failed", self._place_of(opening.row))
            return None
        finally:
            playing.cancel()

    def _arguments(
        self, engine: CalledEngine, opening: Opening, settings: GroupSettings, *, number: int
    ) -> dict[str, object]:
        """Return the arguments of `execute`, as in OpenRLHF."""
        images = list(opening.prompt.images)
        if opening.prompt.videos:
            raise UserError(
                f"{opening.row.location}: the row has a video, but agents in OpenRLHF's form, as in --train.agent_func_path "
                f"{self.environment.path}, only get images; play such rows with --train.agent, or leave them out"
            )
        if images and not self.environment.takes_images:
            raise UserError(
                f"{opening.row.location}: the row has an image, and execute of --train.agent_func_path "
                f"{self.environment.path} has no parameter images; add it, or leave such rows out"
            )
        processor, tokenizer = self.codec.processor, self.tokenizer
        if tokenizer is not processor and tokenizer.chat_template is None:
            tokenizer.chat_template = processor.chat_template
        # OpenRLHF's outputs have text, and a log-prob of each token.
        parameters = copy.deepcopy(self.needed(settings, settings.max_len - len(opening.prompt.token_ids)))
        parameters.detokenize = True
        parameters.logprobs = 1 if settings.logprobs else None
        if parameters.seed is not None:
            parameters.seed = zlib.crc32(f"{parameters.seed} {number}".encode())
        given = {
            "prompt": self.codec.prompt_text(opening.shown),
            "label": opening.row.answer,
            "sampling_params": parameters,
            "max_length": settings.max_len,
            # The processor only for images, as in OpenRLHF.
            "hf_tokenizer": processor if images else tokenizer,
            "llm_engine": engine,
        }
        return {**given, "images": images or None} if self.environment.takes_images else given

    async def _sample_of(self, result: Any, opening: Opening, engine: CalledEngine, settings: GroupSettings) -> Sample:
        """Return an episode of the tokens that the engine read and generated.

        Raises AgentFault if `execute` returns other tokens, and UserError if nothing gives a reward.
        """
        token_ids, spans = _tokens_of(result)
        calls = [engine.call_of(token_ids[:start], token_ids[start:end]) for start, end in spans]
        segments, said = await self._pieces(calls, opening, settings)
        reward, score = result.get("reward"), result.get("scores")
        if reward is None and self.scorer is None:
            raise UserError(
                f"--train.agent_func_path {self.environment.path}: execute returns no reward, and nothing else scores its "
                "episodes; return one, or give --reward.remote_url"
            )
        shown = len(calls[-1].images) - len(opening.prompt.images)
        # An executor only knows the limit of tokens.
        end: EpisodeEnd = "images" if shown > self.limits.max_images else "over"
        if len(calls) > self.limits.max_turns:
            end = "turns"
        played = EpisodeResult(
            end=end,
            images=shown,
            rewards={} if reward is None else {REWARD: number(reward, what="reward")},
            counts={},
            said=tuple(said),
            score=None if score is None else number(score, what="scores"),
            logs=logs_of(result),
        )
        return Sample(
            row=opening.row,
            segments=tuple(segments),
            response=played.said[-1].text,
            finish_reason=calls[-1].finish_reason,
            weight_version=opening.weight_version,
            image_scales=opening.prompt.image_scales,
            played=played,
            masked=played.over_turn and self.limits.overturn == "mask",
        )

    async def _pieces(
        self, calls: Sequence[EngineCall], opening: Opening, settings: GroupSettings
    ) -> tuple[list[Segment], list[Said]]:
        """Return the segments of an episode and their text; raises AgentFault if the calls are not one episode."""
        known, shown = calls[0].read, calls[0].images
        if not _same(shown, opening.prompt.images):
            raise AgentFault("the first prompt of execute has other images than the row")
        segments = [replace(opening.segment, token_ids=known)]
        said = [] if known == opening.segment.token_ids else [Said("user", self._marked(known))]
        for call in calls:
            if call.finish_reason not in WHOLE:
                raise AgentFault(f"a turn of the episode ended in {call.finish_reason}")
            if call.read[: len(known)] != known or not _same(call.images[: len(shown)], shown):
                raise AgentFault(
                    "a turn of the episode does not continue the previous one: its prompt begins differently"
                )
            between, images = call.read[len(known) :], call.images[len(shown) :]
            if between:
                parts = tuple(map(ImagePart, images)) if settings.pictures else ()
                said.append(Said("user", self._marked(between), parts))
                segments.append(await self._observation(between, images, settings))
            log_probs = call.log_probs if settings.logprobs else None
            segments.append(
                Segment(kind="generated", token_ids=call.generated, log_probs=log_probs, weights=call.weights)
            )
            said.append(Said("assistant", self._turn_text(call, opening)))
            known, shown = (*call.read, *call.generated), call.images
        return segments, said

    async def _observation(
        self, token_ids: tuple[int, ...], images: Sequence[Image.Image], settings: GroupSettings
    ) -> Segment:
        if not images:
            return Segment(kind="observation", token_ids=token_ids)
        kit, processor = self.codec.kit, self.codec.processor
        # An image's tensors do not depend on the text around it.
        message = Message(role="user", parts=tuple(map(ImagePart, images)))
        pictures = [image.convert("RGB") for image in images]
        encoded = await self.in_thread(
            lambda: kit.encode(processor, [message], images=pictures, add_generation_prompt=False)
        )
        placeholders = kit.placeholder_ids(processor)
        wanted, read = (sum(token in placeholders for token in ids) for ids in (encoded.token_ids, token_ids))
        if wanted != read:
            raise AgentFault(f"{len(images)} images have {read} tokens in a prompt, but {wanted} in training")
        media = await self.in_thread(self.store, encoded.media) if settings.media else None
        return Segment(kind="observation", token_ids=token_ids, media=media)

    def _turn_text(self, call: EngineCall, opening: Opening) -> str:
        """Return the generated text with its given beginning."""
        if call.read == opening.segment.token_ids:
            begun = opening.begun
        else:
            begun = self.codec.begun_with(replace(opening.shown, prefill=""), call.read)
        return begun + self.codec.text(call.generated, ended=call.ended_by_token)

    def _marked(self, token_ids: Sequence[int]) -> str:
        return self.codec.marked_text(self.collapsed(token_ids))


def _tokens_of(result: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Return an episode's tokens and the ranges of its turns; raises AgentFault for anything else."""
    try:
        token_ids = [int(token) for token in result["observation_tokens"]]
        ranges = [(int(start), int(end)) for start, end in result["action_ranges"]]
    except (KeyError, TypeError, ValueError) as error:
        raise AgentFault(
            f"execute must return a dict with numbers as observation_tokens and action_ranges ({error!r})"
        ) from error
    if any(not 0 < start <= end <= len(token_ids) for start, end in ranges):
        raise AgentFault(f"the action_ranges {ranges} do not fit {len(token_ids)} tokens")
    turns = [(start, end) for start, end in ranges if start < end]
    if not turns:
        raise AgentFault("execute returns an episode in which nothing was generated")
    return token_ids, turns


def _same(some: Sequence[Image.Image], others: Sequence[Image.Image]) -> bool:
    """Return whether images are equal."""
    return len(some) == len(others) and all(
        one is other or (one.size == other.size and one.convert("RGB").tobytes() == other.convert("RGB").tobytes())
        for one, other in zip(some, others, strict=True)
    )


@dataclass(kw_only=True)
class _Fork:
    """The point at which the branches of a trunk diverge."""

    passed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the branches have diverged, or the trunk has ended."""
    copies: list[tuple[Episode | None, _Play]] = field(default_factory=list)
    """States from which the other branches continue; empty if the trunk ended before the fork."""


class BranchingRollout(EpisodeRollout):
    """Generates groups in which `GroupSettings.branches` episodes at a time share their first turns.

    Shared turns are the same ids, segments and media. If a trunk ends before its branches diverge, the others are played
    from the prompt, so that a group is always complete.
    """

    async def sampled(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings
    ) -> AsyncGenerator[Sample, None]:
        """Yield the group's episodes, without rewards, as they end; raises UserError also if one cannot be copied."""
        if settings.branches == 1:
            async with aclosing(super().sampled(engine, opening, settings)) as samples:
                async for sample in samples:
                    yield sample
            return
        count, branches = settings.sampling.n_samples, settings.branches
        forks = [_Fork() for _ in range(0, count, branches)]
        tasks = []
        for place in range(count):
            goes_on = self._branch if place % branches else self._trunk
            made = goes_on(engine, opening, settings, number=place, fork=forks[place // branches])
            tasks.append(asyncio.create_task(made))
        try:
            async with aclosing(self._as_they_end(tasks)) as samples:
                async for sample in samples:
                    yield sample
        finally:
            for fork in forks:
                for episode, played in fork.copies:
                    await self._closed(episode, played)

    async def _trunk(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings, *, number: int, fork: _Fork
    ) -> Sample:
        """Play one branch, and start the other branches of its tree where they diverge."""
        seed = episode_seed(opening, settings, number=number)
        draw = random.Random(seed)
        episode, play = self._begun(opening, seed=seed, number=number)

        def part() -> None:
            if fork.passed.is_set() or not self._part_before(play.turns, draw):
                return
            for _ in range(settings.branches - 1):
                fork.copies.append((self._copied(episode, opening), play.branched()))
            fork.passed.set()

        try:
            return await self._played(engine, episode, play, settings, before_turn=part)
        finally:
            fork.passed.set()

    async def _branch(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings, *, number: int, fork: _Fork
    ) -> Sample:
        await fork.passed.wait()
        if not fork.copies:
            return await self._episode(engine, opening, settings, number=number)
        episode, play = fork.copies.pop()
        play.number = number
        return await self._played(engine, episode, play, settings)

    def _part_before(self, turn: int, draw: random.Random) -> bool:
        if self.limits.branch_turn is not None:
            return turn == self.limits.branch_turn
        return turn > 0 and (turn == self.limits.max_turns - 1 or draw.random() < PARTING)

    def _copied(self, episode: Episode | None, opening: Opening) -> Episode | None:
        try:
            return None if episode is None else episode.branch()
        except Exception as error:  # the user's own code, which may raise anything
            raise UserError(
                f"{self._place_of(opening.row)}: its episodes cannot branch, because they cannot be copied ({error}); give them a "
                "method `branch` that returns a copy, or leave --agent.branches out"
            ) from error


@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """What plays the episodes of a run."""

    name: str | None
    """`--train.agent`; None for a file in OpenRLHF's form."""
    func_path: str | None
    """`--train.agent_func_path`."""
    settings: AgentConfig

    def rollout(self, **group: Any) -> EpisodeRollout:
        """Return the rollout of its episodes, with the arguments of a `GroupRollout`; raises UserError if it cannot be made."""
        if self.func_path is None:
            assert self.name is not None, "one of the two is given"
            options = json_object(self.settings.options, flag="--agent.options")
            environment = load_environment(self.name, options=options)
            return BranchingRollout(environment=environment, limits=self.settings, **group)
        agent = load_agent(self.func_path)
        if isinstance(agent, ExecutorAgent):
            return ExecutorRollout(environment=agent, limits=self.settings, **group)
        return BranchingRollout(environment=agent, limits=self.settings, **group)
