"""Groups whose samples are episodes: turns of the policy and answers of an environment, as token ids."""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from PIL import Image

from lmm_r1.agents.calls import told
from lmm_r1.agents.environment import (
    Answered,
    DeadlinePassed,
    Environment,
    Episode,
    Turn,
    TurnOptions,
    start_thread,
    within,
)
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart
from lmm_r1.data.sample import EpisodeEnd, EpisodeResult, Said, Sample, Segment
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.group import GroupRollout, GroupSettings, Opening, check_whole
from lmm_r1.generation.request import Request, hand_on, with_image_ids
from lmm_r1.generation.turns import TurnPieces, as_asked
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.lmm_kits.checkpoint import encode_row, encode_turn, without_end
from remote_rm.responses import turns_kept
from remote_rm.verifier import Score

if TYPE_CHECKING:
    from vllm import SamplingParams

logger = logging.getLogger(__name__)
Outcome = TypeVar("Outcome")


@dataclass(kw_only=True)
class _Play:
    """An episode so far."""

    number: int
    """Its number in the group."""
    opening: Opening
    engine_ids: list[int]
    """All tokens as the engine takes them, one placeholder per image."""
    images: list[Image.Image]
    image_ids: tuple[str, ...]
    """Names by which the engine knows the images, which it gets in every turn, without hashing their pixels again."""
    segments: list[Segment]
    begun: str
    """The text with which the next turn begins."""
    options: TurnOptions = field(default_factory=TurnOptions)
    """The options of the next turn."""
    said: list[Said] = field(default_factory=list)
    rewards: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    logs: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    """The environment's score of the episode, in addition to its rewards."""
    problem: str = ""
    """How the environment failed, as a clause; empty if it has not."""
    sampled_by: SamplingParams | None = None
    """The parameters of the last piece of the last turn."""
    asked: SamplingParams | None = None
    """The parameters that the environment asks for."""

    opened: bool = False
    """Whether a raw episode has opened; branches start from an opened one."""

    @classmethod
    def of(cls, opening: Opening, *, number: int) -> _Play:
        """Return an episode without turns."""
        return cls(
            number=number,
            opening=opening,
            engine_ids=list(opening.prompt.engine_token_ids),
            images=list(opening.prompt.images),
            image_ids=opening.prompt.image_ids,
            segments=[opening.segment],
            begun=opening.begun,
        )

    @property
    def tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def shown_images(self) -> int:
        return len(self.images) - len(self.opening.prompt.images)

    @property
    def turns(self) -> int:
        """The number of the policy's turns."""
        return sum(said.role == "assistant" for said in self.said)

    def branched(self) -> _Play:
        """Return an independent copy; segments, their media and pictures stay the same objects."""
        kept: dict[str, Any] = {
            name: copy(value) for name, value in vars(self).items() if isinstance(value, list | dict)
        }
        return replace(self, **kept)


class EpisodeWatcher(Protocol):
    """Shows an episode while it is played."""

    text: str
    """The current turn so far."""
    tokens: int
    """The generated tokens of all turns."""

    def begin_turn(self) -> None:
        """The policy begins a turn."""

    def write(self, piece: str) -> None:
        """The turn has grown by a piece of text."""

    def end_turn(self) -> None:
        """The turn has ended."""

    def answered(self, answered: Answered) -> None:
        """The environment has answered it."""


class EpisodeRollout(GroupRollout):
    """Generates groups of episodes on one engine; each proceeds independently."""

    def __init__(
        self,
        *,
        environment: Environment,
        limits: AgentConfig,
        guesses: bool = False,
        watcher: EpisodeWatcher | None = None,
        **group: Any,
    ) -> None:
        """Args: guesses: the engine uses speculative decoding."""
        super().__init__(**group)
        self.guesses = guesses
        self.watcher = watcher
        if not environment.raw:
            # A chat template without turns stops the run here instead of each episode.
            encode_turn(self.codec.kit, self.codec.processor, Message(role="user", parts=(TextPart("?"),)), images=())
        self.environment = environment
        self.paid_parts = environment.rewards
        self.limits = limits
        if limits.thought.forces:
            for text in (limits.thought.end, limits.thought.continue_with):
                self._appended_ids(text)

    async def shown_row(self, row: Row) -> Row:
        """Return the row with the environment's text for the policy.

        Raises UserError for plain text if the environment adds turns, and if the environment takes too long.
        """
        if row.plain and not self.environment.raw:
            raise UserError(
                f"{row.location}: the prompt is plain text, and episodes are conversations; add --data.apply_chat_template"
            )
        place = f"{row.location}, environment {self.environment.name}"
        try:
            if not self.environment.waits:
                return self.environment.shown_row(row)
            shown, _ = start_thread(lambda: self.environment.shown_row(row), name=self.environment.name)
            return await within(self.limits.answer_s, shown)
        except UserError:
            raise
        except DeadlinePassed:
            raise UserError(
                f"{place}: it has not shown the row in {self.limits.answer_s:g} s; check whether it hangs, or raise "
                "--agent.answer_s"
            ) from None
        except Exception as error:  # the user's own code, which may raise anything
            logger.exception("%s: it failed", place)
            raise UserError(f"{place}: it raised {told(error)}") from error

    def encoded_prompt(self, shown: Row) -> EncodedPrompt:
        """Return the row's prompt, whose images the engine gets in every turn."""
        return with_image_ids(super().encoded_prompt(shown))

    async def sampled(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings
    ) -> AsyncGenerator[Sample, None]:
        """Yield the group's episodes, without rewards, as they end; raises UserError if a turn does not come whole."""
        tasks = [
            asyncio.create_task(self._episode(engine, opening, settings, number=number))
            for number in range(settings.sampling.n_samples)
        ]
        async with aclosing(self._as_they_end(tasks)) as samples:
            async for sample in samples:
                yield sample

    async def _as_they_end(self, tasks: Sequence[asyncio.Task[Sample]]) -> AsyncGenerator[Sample, None]:
        """Yield the samples of a group's episodes; if one fails, the others are ended first."""
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                # Only the first error is the group's; mark the others as retrieved.
                task.add_done_callback(lambda task: task.cancelled() or task.exception())
                task.cancel()
            # The others release their resources before the error is raised; `_closed` has a time limit.
            await asyncio.wait(tasks)

    async def _episode(self, engine: TokenEngine, opening: Opening, settings: GroupSettings, *, number: int) -> Sample:
        seed = episode_seed(opening, settings, number=number)
        episode, play = self._begun(opening, seed=seed, number=number)
        return await self._played(engine, episode, play, settings)

    def _begun(self, opening: Opening, *, seed: int, number: int) -> tuple[Episode | None, _Play]:
        """Return an episode of the environment, None if that fails, and its state."""
        play = _Play.of(opening, number=number)
        place = self._place(play)
        try:
            episode = self.environment.begin(opening.row, seed=seed)
            play.options = self.environment.first_turn(opening.row)
            return episode, play
        except UserError as error:
            said = str(error)
            raise UserError(said if opening.row.location in said else f"{place}: {said}") from error
        except Exception as error:  # the user's own code, which may raise anything
            logger.exception("%s: the environment failed to begin", place)
            play.problem = f"it raised {told(error)}"
            return None, play

    async def _played(
        self,
        engine: TokenEngine,
        episode: Episode | None,
        play: _Play,
        settings: GroupSettings,
        *,
        before_turn: Callable[[], None] | None = None,
    ) -> Sample:
        """Play an episode from its present state to its end.

        Args:
            before_turn: called before each turn that is played.
        """
        try:
            if self.environment.raw and episode is not None and not play.opened:
                play.opened = await self._opened(episode, play, settings)
                if not play.opened:
                    return await self._unplayed(
                        engine, play.opening, settings, number=play.number, problem=play.problem
                    )
            end: EpisodeEnd | None = None
            while end is None:
                if before_turn is not None:
                    before_turn()
                turn = await self._turn(engine, play, settings)
                end = await self._answer(episode, play, turn, settings)
        finally:
            await self._closed(episode, play)
        return self._sample(play, turn, end, settings)

    async def _unplayed(
        self, engine: TokenEngine, opening: Opening, settings: GroupSettings, *, number: int, problem: str = ""
    ) -> Sample:
        """Return the sample of an episode that failed before its first turn: one masked turn after the prompt."""
        play = replace(_Play.of(opening, number=number), problem=problem)
        turn = await self._turn(engine, play, settings)
        play.said.append(Said("assistant", self._text(play, turn)))
        return self._sample(play, turn, "failed", settings)

    async def _opened(self, episode: Episode, play: _Play, settings: GroupSettings) -> bool:
        """Open a raw episode; return whether that worked and its text leaves room for a turn."""
        prompt = self.codec.prompt_text(play.opening.shown)
        text = await self._awaited(episode.open(prompt), play)
        if text is None or text == prompt:
            return text is not None
        try:
            encoded = await self.in_thread(self._encoded_opening, text, play.opening)
            if (tokens := len(encoded.token_ids)) >= settings.max_len:
                raise UserError(f"its {tokens} tokens leave no room in --data.max_len {settings.max_len}")
        except UserError as error:
            play.problem = f"its opening text cannot be used: {error}"
            logger.exception("%s: its opening text cannot be used", self._place(play))
            return False
        # The images and their tensors are those of the row.
        play.segments = [replace(play.opening.segment, token_ids=tuple(encoded.token_ids))]
        play.engine_ids = list(encoded.engine_token_ids)
        play.begun = self.codec.begun_with(replace(play.opening.shown, prefill=""), play.engine_ids)
        play.said.append(Said("user", self.codec.marked_text(play.engine_ids)))
        return True

    def _sample(self, play: _Play, turn: TurnPieces, end: EpisodeEnd, settings: GroupSettings) -> Sample:
        assert turn.finish_reason is not None, "a turn that came whole has ended"
        played = EpisodeResult(
            end=end,
            images=play.shown_images,
            rewards=dict(play.rewards),
            counts={name: play.counts[name] for name in self.environment.counts},
            said=tuple(play.said),
            number=play.number,
            shown=play.opening.shown.messages if settings.pictures else (),
            score=play.score,
            logs=play.logs,
            problem=play.problem,
        )
        return Sample(
            row=play.opening.row,
            segments=tuple(play.segments),
            response=next(said.text for said in reversed(play.said) if said.role == "assistant"),
            finish_reason=turn.finish_reason,
            weight_version=play.opening.weight_version,
            image_scales=play.opening.prompt.image_scales,
            played=played,
            # An episode that the environment did not judge says nothing about the policy.
            masked=end == "failed" or (played.over_turn and self.limits.overturn == "mask"),
        )

    async def _closed(self, episode: Episode | None, play: _Play) -> None:
        """Close an episode; a failure or a timeout is only logged."""
        if episode is None:
            return
        try:
            await within(self.limits.answer_s, episode.close())
        except DeadlinePassed:
            logger.warning("%s: the environment did not close in %g s", self._place(play), self.limits.answer_s)
        except Exception:  # the user's own code, which may raise anything
            logger.exception("%s: the environment failed to close", self._place(play))

    async def _turn(self, engine: TokenEngine, play: _Play, settings: GroupSettings) -> TurnPieces:
        """Generate the policy's next turn and add it to the episode."""
        room = settings.max_len - play.tokens
        turn = TurnPieces(
            own_stops=self.environment.stops if play.options.stops is None else play.options.stops,
            room=min(settings.sampling.max_new_tokens or room, play.options.max_tokens or room, room),
            thought=play.options.thought or self.limits.thought,
            ids_of=self._appended_ids,
            text_of=lambda ids: self.codec.text(ids, ended=False),
        )
        if self.watcher is not None:
            self.watcher.begin_turn()
        try:
            while turn.finish_reason is None:
                await self._add_piece(turn, engine, play, settings)
        finally:
            if self.watcher is not None:
                self.watcher.end_turn()
        play.segments += turn.segments
        play.engine_ids = [*play.engine_ids, *turn.token_ids]
        return turn

    async def _add_piece(self, turn: TurnPieces, engine: TokenEngine, play: _Play, settings: GroupSettings) -> None:
        prompt = EncodedPrompt(
            token_ids=[],
            engine_token_ids=[*play.engine_ids, *turn.token_ids],
            images=play.images,
            media=None,
            videos=play.opening.prompt.videos,
            image_ids=play.image_ids,
        )
        parameters = self._parameters(
            settings,
            max_tokens=turn.max_tokens,
            n_samples=1,
            stops=turn.stops,
            output_per="response" if self.watcher is None else "token",
        )
        if parameters.seed is not None:
            # Each piece of each episode has its own.
            tokens = len(prompt.engine_token_ids)
            parameters.seed = zlib.crc32(f"{parameters.seed} {play.number} {tokens}".encode())
        if play.asked is not None:
            parameters = as_asked(play.asked, needed=parameters, engine_guesses=self.guesses)
        play.sampled_by = parameters
        request = Request(self.codec.engine_prompt(prompt), parameters, weights=self.weights)
        if self.watcher is None:
            async for _ in request.sent_to(engine):
                pass
        else:
            try:
                await hand_on(request, engine, codec=self.codec, on_text=self.watcher.write)
            finally:
                self.watcher.tokens += len(request.responses[0].token_ids)
        check_whole(request, play.opening.row)
        read = [token for segment in [*play.segments, *turn.segments] for token in segment.token_ids]
        assert (
            request.read_token_ids == read
        ), f"{self._place(play)}: the engine reads other tokens than are trained on"
        turn.add(request.responses[0])

    async def _answer(
        self, episode: Episode | None, play: _Play, spoken: TurnPieces, settings: GroupSettings
    ) -> EpisodeEnd | None:
        """Get the environment's answer to a turn and add it; return how the episode ended, None if it continues."""
        text, number = self._text(play, spoken), play.turns
        play.said.append(Said("assistant", text))
        turn = Turn(
            text=text,
            number=number,
            ended=spoken.finish_reason == "stop",
            begun=play.begun,
            parameters=deepcopy(play.sampled_by) if self.environment.raw else None,
        )
        answered = None if episode is None else await self._awaited(_answer_of(episode, turn), play)
        if answered is None:
            return "failed"
        if self.watcher is not None:
            self.watcher.answered(answered)
        self._note(play, answered)
        play.said[-1] = play.said[-1]._replace(calls=answered.calls, rewards=tuple(answered.rewards.items()))
        if answered.is_over:
            return "over"
        if number + 1 == self.limits.max_turns:
            return "turns"
        try:
            encoded = await self.in_thread(self._encoded, answered, play, spoken)
        except UserError as error:
            play.problem = f"its answer cannot be used: {error}"
            logger.exception("%s: its answer cannot be used", self._place(play))
            return "failed"
        if play.shown_images + len(encoded.images) > self.limits.max_images:
            return "images"
        if play.tokens + len(encoded.token_ids) >= settings.max_len:
            return "tokens"
        await self._show(answered, encoded, play, settings)
        return None

    async def _show(self, answered: Answered, encoded: EncodedPrompt, play: _Play, settings: GroupSettings) -> None:
        """Add the environment's answer and the beginning of the policy's next turn."""
        media = await self.in_thread(self.store, encoded.media) if settings.media and encoded.media else None
        if encoded.token_ids:
            play.segments.append(Segment(kind="observation", token_ids=tuple(encoded.token_ids), media=media))
        play.engine_ids = [*play.engine_ids, *encoded.engine_token_ids]
        play.images = [*play.images, *encoded.images]
        play.image_ids = (*play.image_ids, *encoded.image_ids)
        begun = replace(play.opening.shown, prefill=answered.prefill)
        play.begun = self.codec.begun_with(begun, play.engine_ids)
        play.options = answered.options
        if answered.raw is None:
            text = "".join(part.text if isinstance(part, TextPart) else "<image>" for part in answered.shown)
        else:
            text = self.codec.marked_text(encoded.engine_token_ids)
        play.said.append(Said(answered.role, text, _pictures(answered) if settings.pictures else ()))

    def _text(self, play: _Play, spoken: TurnPieces) -> str:
        """Return the text of the policy's turn with its given beginning, without the end token."""
        ended = spoken.finish_reason == "stop" and not spoken.ended_by_text
        return play.begun + self.codec.text(spoken.token_ids, ended=ended)

    async def _awaited(self, said: Awaitable[Outcome], play: _Play) -> Outcome | None:
        """Return what the environment says; None if it fails or takes too long, which only ends this episode."""
        try:
            return await within(self.limits.answer_s, said)
        except DeadlinePassed:
            play.problem = f"it gave no answer in {self.limits.answer_s:g} s"
            logger.warning("%s: %s", self._place(play), play.problem)
        except Exception as error:  # the user's own code, which may raise anything
            play.problem = f"it raised {told(error)}"
            logger.exception("%s: the environment failed", self._place(play))
        return None

    def _encoded(self, answered: Answered, play: _Play, spoken: TurnPieces) -> EncodedPrompt:
        images = [load_image(part, location=self._place(play)) for part in _pictures(answered)]
        kit, processor = self.codec.kit, self.codec.processor
        if answered.raw is not None:
            return with_image_ids(kit.encode_text(processor, answered.raw.text, images=images, opens=False))
        message = Message(role=answered.role, parts=tuple(answered.shown))
        turn = encode_turn(kit, processor, message, images=images, prefill=answered.prefill)
        return with_image_ids(without_end(turn, spoken.token_ids))

    def _encoded_opening(self, text: str, opening: Opening) -> EncodedPrompt:
        kit, processor, row = self.codec.kit, self.codec.processor, opening.shown
        if row.plain:
            plain = replace(row, messages=(Message(role="user", parts=(TextPart(text),)),))
            return encode_row(plain, kit=kit, processor=processor, add_generation_prompt=True)
        return kit.encode_text(processor, text, images=opening.prompt.images, opens=True)

    def _appended_ids(self, text: str) -> list[int]:
        """Return the ids of a text that is appended to a thought; raises UserError for banned tokens."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids or not set(self.codec.banned_token_ids).isdisjoint(ids):
            raise UserError(
                f"budget forcing appends {text!r} to thoughts, which holds {'a media token' if ids else 'no token'}; give "
                "the texts of its ThoughtConfig as plain text"
            )
        return ids

    def _note(self, play: _Play, answered: Answered) -> None:
        """Add a turn's rewards and counts; raises UserError for names that the environment does not declare and for NaN."""
        for given, known, what in (
            (answered.rewards, self.environment.rewards, "rewards"),
            (answered.counts, self.environment.counts, "counts"),
        ):
            if unknown := sorted(set(given) - set(known)):
                raise UserError(
                    f"the environment {self.environment.name} gives {', '.join(unknown)}, which its {what} do not name"
                )
            if wrong := [f"{name} {value}" for name, value in given.items() if not math.isfinite(value)]:
                raise UserError(
                    f"{self._place(play)}: it gives {', '.join(wrong)} among its {what}, which is no number"
                )
        play.rewards.update(answered.rewards)
        play.counts.update(answered.counts)
        if answered.logs:
            play.logs = dict(answered.logs)
        if answered.score is not None:
            play.score = answered.score
        # Parameters that are returned unchanged ask for nothing.
        if answered.parameters is not None and answered.parameters != play.sampled_by:
            play.asked = answered.parameters

    def _place(self, play: _Play) -> str:
        return self._place_of(play.opening.row)

    def _place_of(self, row: Row) -> str:
        return f"{row.location}, environment {self.environment.name}"

    def rewarded(self, sample: Sample) -> Sample:
        """Return an episode with the environment's rewards and counts."""
        played, score = sample.played, sample.reward
        assert played is not None, "an episode was played"
        rewards = {name: float(played.rewards.get(name, 0.0)) for name in self.environment.rewards}
        counts = {name: float(played.counts.get(name, 0)) for name in self.environment.counts}
        kept = turns_kept(
            [said.text for said in played.said if said.role == "assistant"], call_tags=self.environment.call_tags
        )
        noted = {
            **self.environment.derived(counts),
            "turn_format": float(bool(kept) and all(kept)),
            "kept_turns": sum(kept) / max(len(kept), 1),
            "turns": float(sum(said.role == "assistant" for said in played.said)),
            "shown_images": float(played.images),
            "over_turn": float(played.over_turn),
            "environment_failed": float(played.end == "failed"),
        }
        earned = sum(rewards.values())
        if played.over_turn and self.limits.overturn == "penalise":
            earned -= self.limits.overturn_penalty
        if score is None:
            score = Score(reward=0.0, score=earned if played.score is None else played.score, parts={})
        if twice := sorted((rewards.keys() | counts.keys() | noted.keys()) & score.parts.keys()):
            raise UserError(
                f"{self._place_of(sample.row)}: it and --reward.remote_url both give {', '.join(twice)}; leave the "
                "environment to reward alone, without --reward.remote_url, or take another of the two"
            )
        parts = {**score.parts, **rewards, **counts, **noted}
        return replace(sample, reward=replace(score, reward=score.reward + earned, parts=parts))

    def _query(self, sample: Sample, prompt: EncodedPrompt) -> str:
        """Return an episode as the model reads and writes it; an episode's own opening text replaces the prompt."""
        if sample.segments[0].token_ids == tuple(prompt.token_ids):
            return super()._query(sample, prompt)
        ids = self.codec.kit.collapsed(self.codec.processor, sample.token_ids)
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def episode_seed(opening: Opening, settings: GroupSettings, *, number: int) -> int:
    """Return the seed of one of a group's episodes, the same in a resumed run."""
    step = None if settings.moment is None else settings.moment.step
    return zlib.crc32(f"{opening.row.location} {number} {step}".encode())


def _pictures(answered: Answered) -> tuple[ImagePart, ...]:
    if answered.raw is not None:
        return answered.raw.images
    return tuple(part for part in answered.shown if isinstance(part, ImagePart))


async def _answer_of(episode: Episode, turn: Turn) -> Answered:
    """Return the environment's answer; raises TypeError if it is something else."""
    answered = await episode.answer(turn)
    if not isinstance(answered, Answered):
        raise TypeError(f"answer() returned {type(answered).__name__}, not Answered")
    if wrong := [part for part in answered.shown if not isinstance(part, (TextPart, ImagePart))]:
        raise TypeError(f"shown contains {type(wrong[0]).__name__}, not only TextPart and ImagePart")
    return answered
