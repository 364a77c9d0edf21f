"""A chat under way: the model, the conversation, what is attached to the next message, and the settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from lmm_r1.chat.attachments import Attachment
from lmm_r1.chat.chat_model import ChatModel
from lmm_r1.chat.conversation import USER, Conversation, SavedConversation
from lmm_r1.chat.episodes import EpisodeScreen, episode_account
from lmm_r1.chat.sampling import Sampling
from lmm_r1.chat.screen import Screen
from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError

Interruption = Callable[[], AbstractContextManager[Callable[[], bool]]]
"""() -> context that gives the function which says whether the answer is to stop."""
_NOT_ADDED = "the turn is not added: /retry asks again, /undo takes back the turn before it, /reset begins anew"


class Session:
    """What commands and messages act upon."""

    def __init__(
        self, model: ChatModel, screen: Screen, *, sampling: Sampling, system: str | None, interruption: Interruption
    ) -> None:
        self.model = model
        self.screen = screen
        self.sampling = sampling
        self.conversation = Conversation()
        self.conversation.set_system(system)
        self.attached: list[Attachment] = []
        self.unanswered: str | None = None
        """Text of a message that got no answer; what was attached to it still is."""
        self.kept: Path | None = None
        """The file that this conversation was written to, or comes from."""
        self.asked: Path | None = None
        """A file of something else that the user has asked to write to, once."""
        self.leaving = False
        self.stopped = False
        """Whether Ctrl-C ended the last answer."""
        self._interruption = interruption

    def check_more(self, *, images: int = 0, videos: int = 0) -> None:
        """Raise UserError where so many more could not be answered."""
        self.model.check_media(
            self.conversation.messages,
            more_images=images + sum(isinstance(item.part, ImagePart) for item in self.attached),
            more_videos=videos + sum(isinstance(item.part, VideoPart) for item in self.attached),
        )

    def say(self, text: str) -> None:
        """Let the user say something, with what is attached; raises UserError where the turn cannot be had."""
        parts = (*(item.part for item in self.attached), TextPart(text))
        self.unanswered = text
        self._answer(self.conversation, Message(role=USER, parts=parts))
        self.unanswered = None
        self.attached = []

    def retry(self) -> None:
        """Ask the last question again; its old answer stays where there is no new one."""
        if self.unanswered is not None:
            self.say(self.unanswered)
            return
        earlier, question = self.conversation.without_last_turn(), self.conversation.last_question()
        if earlier is None or question is None:
            raise UserError("there is no turn yet to ask for again")
        self._answer(earlier, question)

    def undo(self) -> str:
        """Take the last turn back and return what the user had said."""
        earlier, question = self.conversation.without_last_turn(), self.conversation.last_question()
        if earlier is None or question is None:
            raise UserError("there is no turn to take back")
        self.conversation = earlier
        return "".join(part.text for part in question.parts if isinstance(part, TextPart))

    def reset(self) -> None:
        """Forget all turns and what is attached; the system prompt and the settings stay."""
        self.conversation = self.conversation.without_turns()
        self.kept, self.asked = None, None
        self.attached = []
        self.unanswered = None

    def take_up(self, saved: SavedConversation, *, path: Path) -> None:
        """Go on with a saved conversation instead of this one; raises UserError where the model cannot."""
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
        assert tokens is not None, "an engine in this process counts"
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
