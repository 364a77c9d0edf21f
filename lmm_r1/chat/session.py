"""A running chat: the model, the conversation, the attachments of the next message, and the settings."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lmm_r1.agents.environment import Answered
from lmm_r1.chat.chat_model import ChatModel
from lmm_r1.chat.conversation import USER, ChatSampling, Conversation, SavedConversation
from lmm_r1.chat.screen import AnswerWriter, Screen, one_line
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.images import PictureFolder, load_image, load_video
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart, describe, kind_of, resolve
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError


class EpisodeScreen:
    """Shows an episode while it is played: each turn as an answer, followed by the environment's reply."""

    def __init__(self, screen: Screen, *, environment: str, thinking: bool, pictures: PictureFolder | None) -> None:
        self._screen, self._environment, self._thinking, self._pictures = screen, environment, thinking, pictures
        self._writer: AnswerWriter | None = None

    def begin_turn(self) -> None:
        self._writer = self._screen.answer(thinking=self._thinking)

    def write(self, piece: str) -> None:
        assert self._writer is not None, "a turn has begun"
        self._writer.write(piece)

    def end_turn(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def answered(self, answered: Answered) -> None:
        if not answered.is_over:
            parts = (part.text if isinstance(part, TextPart) else self._picture(part) for part in answered.shown)
            self._screen.say(f"{self._environment}: {''.join(parts).strip()}")

    def _picture(self, part: object) -> str:
        assert isinstance(part, ImagePart), "environments show texts and images"
        image = load_image(part, location=f"a picture of {self._environment}")
        written = ""
        if self._pictures is not None:
            written = f", written to {os.path.relpath(str(self._pictures.kept(part).source))}"
        return f"[picture of {image.width}x{image.height} pixels{written}]"


def greeting(environment: str) -> str:
    return (
        f"each message begins an episode with the environment {environment}; the conversation continues from its last turn "
        "and keeps none of the earlier ones"
    )


def episode_account(completion: Completion, limits: AgentConfig, *, max_new_tokens: int) -> str:
    """Return a summary of an episode: `2 turns, tool calls 1, failed calls 0`, and the limit that ended it."""
    played = completion.played
    if played is None:
        return "stopped"
    ends = {
        "over": "",
        "turns": f"ended at --agent_max_turns {limits.max_turns}",
        "images": f"ended at --agent_max_images {limits.max_images}",
        "tokens": "ended: the conversation fills --max_model_len",
    }
    numbers = {**played.counts, **played.rewards}
    account = [
        f"{played.turns} {'turn' if played.turns == 1 else 'turns'}",
        *(f"{name.replace('_', ' ')} {value:g}" for name, value in numbers.items()),
        ends[played.end],
        f"the last turn cut off at max_new_tokens {max_new_tokens}" if completion.finish_reason == "length" else "",
    ]
    return ", ".join(filter(None, account))


_QUOTES = "'\""
_PATH_STARTS = ("/", "~", "./", "../", "file://", *_QUOTES)


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """An image or a video that is sent with the next message."""

    name: str
    size: str
    part: ImagePart | VideoPart

    def __str__(self) -> str:
        return f"{self.name} ({self.size})"


def sources_of(argument: str) -> list[str]:
    """Return the paths and URLs that were typed or dragged: a single one, or several separated by spaces or quotes.

    An existing path needs no quotes for spaces: `my picture.png` is one path, `a.png b.png` are two.
    """
    whole = argument.strip()
    if not whole:
        raise UserError("give the path or the URL of a file")
    if _exists(_expanded(whole)):
        return [_expanded(whole)]
    try:
        pieces = [_expanded(piece) for piece in shlex.split(whole)]
    except ValueError:  # an unclosed quote, as in `Anna's.png`
        return [_expanded(whole)]
    known = any(_exists(piece) or kind_of(piece) != "path" for piece in pieces)
    return pieces if pieces and (known or len(pieces) == 1 or whole[0] in _QUOTES) else [_expanded(whole)]


def dragged_image(line: str) -> str | None:
    """Return the path of an image file if the line is nothing else, as terminals write a dropped file."""
    text = line.strip()
    if not text.startswith(_PATH_STARTS) or "\n" in text:
        return None
    sources = sources_of(text)
    suffix = os.path.splitext(sources[0])[1].lower()
    return sources[0] if len(sources) == 1 and suffix in _image_suffixes() and _exists(sources[0]) else None


def read_image(source: str, *, max_pixels: int | None = None) -> Attachment:
    """Return an image, decoded once to check it; one from a URL is kept, because it may disappear.

    Args:
        max_pixels: it is scaled down to these for the model.
    """
    try:
        image = load_image(ImagePart(source), location="the image")
    except UserError as error:
        raise UserError(_image_reason(one_line(describe(source)), error.__cause__)) from error
    kept = image if kind_of(source) == "url" else resolve(source, base_dir=Path.cwd())
    part = ImagePart(kept, max_pixels=max_pixels)
    return Attachment(name=one_line(_name(source)), size=f"{image.width}x{image.height}", part=part)


def read_video(source: str) -> Attachment:
    """Return a video, decoded once to check it; raises UserError if it is missing or damaged."""
    if kind_of(source) != "path":
        raise UserError(f"{one_line(describe(source))}: a video must be a file on this machine")
    file = str(resolve(source, base_dir=Path.cwd()))
    part = VideoPart(file)
    if not Path(file).is_file():
        raise UserError(f"no video file {one_line(source)}; check the path")
    frames = load_video(part, location="the video").frames
    size = f"{frames.shape[2]}x{frames.shape[1]}, {len(frames)} frames"
    return Attachment(name=one_line(_name(source)), size=size, part=part)


def _expanded(path: str) -> str:
    return os.path.expanduser(path)


def _exists(path: str) -> bool:
    if kind_of(path) != "path" or "\0" in path:
        return False
    return os.path.exists(str(resolve(path, base_dir=Path.cwd())))


def _name(source: str) -> str:
    return (
        os.path.basename(str(resolve(source, base_dir=Path.cwd()))) if kind_of(source) == "path" else describe(source)
    )


def _image_reason(name: str, cause: BaseException | None) -> str:
    if isinstance(cause, FileNotFoundError):
        return f"no image file {name}; check the path"
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
    return f"cannot read the image {name}: {one_line(str(reason))}"


def _image_suffixes() -> frozenset[str]:
    return frozenset(Image.registered_extensions())


Interruption = Callable[[], AbstractContextManager[Callable[[], bool]]]
"""() -> a context whose value is a function that returns whether to stop the answer."""
_NOT_ADDED = "the turn is not added: /retry asks again, /undo takes back the turn before it, /reset starts over"


class ChatSession:
    """The state of a chat, which commands and messages change."""

    def __init__(
        self,
        model: ChatModel,
        screen: Screen,
        *,
        sampling: ChatSampling,
        system: str | None,
        interruption: Interruption,
    ) -> None:
        self.model = model
        self.screen = screen
        self.sampling = sampling
        self.conversation = Conversation()
        self.conversation.set_system(system)
        self.attached: list[Attachment] = []
        self.max_pixels: int | None = None
        """Images are scaled down to so many pixels, as in the run that trained the model; None leaves them as they are."""
        self.unanswered: str | None = None
        """Text of a message that got no answer; its attachments are still in `attached`."""
        self.kept: Path | None = None
        """The file that this conversation was saved to or loaded from."""
        self.asked: Path | None = None
        """A file with another conversation that the user has once tried to overwrite."""
        self.leaving = False
        self.stopped = False
        """Whether Ctrl-C ended the last answer."""
        self._interruption = interruption

    def check_more(self, *, images: int = 0, videos: int = 0) -> None:
        self.model.check_media(
            self.conversation.messages,
            more_images=images + sum(isinstance(item.part, ImagePart) for item in self.attached),
            more_videos=videos + sum(isinstance(item.part, VideoPart) for item in self.attached),
        )

    def say(self, text: str) -> None:
        """Send a message with the attachments; raises UserError if it cannot be answered."""
        parts = (*(item.part for item in self.attached), TextPart(text))
        self.unanswered = text
        self._answer(self.conversation, Message(role=USER, parts=parts))
        self.unanswered = None
        self.attached = []

    def retry(self) -> None:
        """Ask the last question again; its old answer is kept if there is no new one."""
        if self.unanswered is not None:
            self.say(self.unanswered)
            return
        earlier, question = self.conversation.without_last_turn(), self.conversation.last_question()
        if earlier is None or question is None:
            raise UserError("there is no turn yet to ask for again")
        self._answer(earlier, question)

    def undo(self) -> str:
        """Take the last turn back and return the user's text."""
        earlier, question = self.conversation.without_last_turn(), self.conversation.last_question()
        if earlier is None or question is None:
            raise UserError("there is no turn to take back")
        self.conversation = earlier
        return "".join(part.text for part in question.parts if isinstance(part, TextPart))

    def reset(self) -> None:
        self.conversation = self.conversation.without_turns()
        self.kept, self.asked = None, None
        self.attached = []
        self.unanswered = None

    def resume(self, saved: SavedConversation, *, path: Path) -> None:
        """Continue a saved conversation instead of this one; raises UserError if the model cannot."""
        try:
            self.model.check_media(saved.conversation.messages)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        self.sampling = saved.applied_to(self.sampling)
        self.kept, self.asked = path, None
        self.conversation = saved.conversation
        self.attached = []
        self.unanswered = None
        if saved.model is not None and saved.model != self.model.name:
            self.screen.say(f"it was saved with another model: {saved.model}")
        turns = self.conversation.turns
        self.screen.say(f"loaded {turns} {'turn' if turns == 1 else 'turns'} from {path}")

    def _answer(self, before: Conversation, question: Message) -> None:
        row = Row(messages=(*before.messages, question), answer="", datasource="default", location="this conversation")
        began = time.perf_counter()
        try:
            with self._interruption() as should_stop:
                completion = self._completion(row, should_stop=should_stop)
        except UserError as error:
            raise UserError(f"{error}; {_NOT_ADDED}") from error
        seconds = time.perf_counter() - began
        self.stopped = completion.finish_reason == "aborted"
        if not completion.text.strip():
            what = "stopped before the answer" if self.stopped else "the answer is empty"
            raise UserError(f"{what}; {_NOT_ADDED}")
        before.add(question, completion.text, stopped=self.stopped)
        self.conversation = before
        self.screen.say(self._account(completion, seconds=seconds))

    def _completion(self, row: Row, *, should_stop: Callable[[], bool]) -> Completion:
        sampling = self.sampling.for_one_answer()
        if self.model.episodes is None:
            writer = self.screen.answer(thinking=self.model.opens_thought)
            try:
                return self.model.engine.stream(row, sampling, on_text=writer.write, should_stop=should_stop)
            finally:
                writer.close()
        shown = EpisodeScreen(
            self.screen,
            environment=self.model.episodes.environment.name,
            thinking=self.model.opens_thought,
            pictures=self.model.pictures,
        )
        try:
            return self.model.episodes.play(row, sampling, watcher=shown, should_stop=should_stop)
        finally:
            shown.end_turn()

    def _account(self, completion: Completion, *, seconds: float) -> str:
        tokens = completion.num_tokens
        assert tokens is not None, "an engine in this process counts tokens"
        account = f"{tokens} {'token' if tokens == 1 else 'tokens'}, {tokens / seconds:.1f} tokens/s"
        if self.model.episodes is not None:
            limits, longest = self.model.episodes.settings.limits, self.sampling.max_new_tokens
            return f"{account}, {episode_account(completion, limits, max_new_tokens=longest)}"
        if self.stopped:
            return f"{account}, stopped"
        if completion.finish_reason == "stop":
            return account
        if tokens >= self.sampling.max_new_tokens:
            return f"{account}, cut off at max_new_tokens {self.sampling.max_new_tokens}"
        return f"{account}, cut off: the conversation fills --max_model_len"
