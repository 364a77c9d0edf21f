"""The messages of a conversation, and what takes turns back."""

from __future__ import annotations

from collections.abc import Sequence

from lmm_r1.data.messages import Message, TextPart

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


class Conversation:
    """Messages of which the first may be the system prompt; every other turn of the user has its answer."""

    def __init__(self, messages: Sequence[Message] = (), *, stopped: Sequence[int] = ()) -> None:
        self.messages = list(messages)
        self.stopped = set(stopped)
        """Places of the answers that were stopped before their end."""

    @property
    def system(self) -> str | None:
        """The text of the system prompt."""
        if not self.messages or self.messages[0].role != SYSTEM:
            return None
        return text_of(self.messages[0])

    @property
    def turns(self) -> int:
        """How often the user has spoken."""
        return sum(message.role == USER for message in self.messages)

    def set_system(self, text: str | None) -> None:
        """Put another system prompt before the same turns; None or a blank text takes it away."""
        before = len(self.messages)
        turns = self.messages[0 if self.system is None else 1 :]
        prompt = [] if text is None or not text.strip() else [Message(role=SYSTEM, parts=(TextPart(text),))]
        self.messages = [*prompt, *turns]
        self.stopped = {place + len(self.messages) - before for place in self.stopped}

    def add(self, question: Message, answer: str, *, stopped: bool) -> None:
        """Append a turn."""
        self.messages += [question, Message(role=ASSISTANT, parts=(TextPart(answer),))]
        if stopped:
            self.stopped.add(len(self.messages) - 1)

    def without_last_turn(self) -> Conversation | None:
        """Return the conversation up to the user's last message, None where there is no turn."""
        place = self._last_question()
        if place is None:
            return None
        return Conversation(self.messages[:place], stopped=[index for index in self.stopped if index < place])

    def last_question(self) -> Message | None:
        """Return the user's last message."""
        place = self._last_question()
        return None if place is None else self.messages[place]

    def without_turns(self) -> Conversation:
        """Return the conversation with nothing but its system prompt."""
        return Conversation([] if self.system is None else self.messages[:1])

    def _last_question(self) -> int | None:
        places = [place for place, message in enumerate(self.messages) if message.role == USER]
        return places[-1] if places else None


def text_of(message: Message) -> str:
    """Return the text of a message, without its images and videos."""
    return "\n".join(part.text for part in message.parts if isinstance(part, TextPart))
