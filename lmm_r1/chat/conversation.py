"""The messages of a conversation, and the conversation as a file.

The file is one row of the project's schema, with the settings and the model's name in addition."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lmm_r1 import dotted
from lmm_r1.data.files import Record, read_records
from lmm_r1.data.images import check_image_exists, check_video_exists
from lmm_r1.data.messages import Message, TextPart, images_of, videos_of
from lmm_r1.data.row_parser import ASKED_NAMES, parse_row, stored_messages
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically
from lmm_r1.generation.engine import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class ChatSampling:
    """How answers are sampled; raises UserError for invalid values."""

    temperature: float
    top_p: float
    max_new_tokens: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature {self.temperature:g}: must be a number, at least 0 (greedy)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p:g}: must be above 0 and at most 1")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens}: must be 1 or more")

    def for_one_answer(self) -> SamplingSettings:
        return SamplingSettings(
            n_samples=1, temperature=self.temperature, top_p=self.top_p, max_new_tokens=self.max_new_tokens
        )


NAMES = tuple(field.name for field in fields(ChatSampling))
_READERS: Mapping[str, tuple[Callable[[str], float], str]] = {
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "max_new_tokens": (int, "a whole number"),
}


def changed(sampling: ChatSampling, name: str, value: str) -> ChatSampling:
    """Return the settings with one changed; raises UserError for an unknown name or an invalid value."""
    if name not in NAMES:
        match = nearest(name, known=NAMES)
        raise UserError(f"no setting {name}; " + (f"did you mean {match}?" if match else f"try {', '.join(NAMES)}"))
    read, wanted = _READERS[name]
    try:
        number = read(value)
    except ValueError as error:
        raise UserError(f"{name} {value}: must be {wanted}") from error
    return dotted.replace(sampling, {name: number})


SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
SUFFIXES = (".json", ".jsonl")
DATASOURCE = "interactive_chat"


class Conversation:
    """Messages, of which the first may be the system prompt; each turn of the user is followed by its answer."""

    def __init__(self, messages: Sequence[Message] = (), *, stopped: Sequence[int] = ()) -> None:
        self.messages = list(messages)
        self.stopped = set(stopped)
        """Indices of the answers that were stopped before their end."""

    @property
    def system(self) -> str | None:
        if not self.messages or self.messages[0].role != SYSTEM:
            return None
        return text_of(self.messages[0])

    @property
    def turns(self) -> int:
        return sum(message.role == USER for message in self.messages)

    def set_system(self, text: str | None) -> None:
        """Replace the system prompt and keep the turns; None removes it, and a blank text asks for none at all."""
        before = len(self.messages)
        turns = self.messages[0 if self.system is None else 1 :]
        prompt = [] if text is None else [Message(role=SYSTEM, parts=(TextPart(text),))]
        self.messages = [*prompt, *turns]
        self.stopped = {place + len(self.messages) - before for place in self.stopped}

    def add(self, question: Message, answer: str, *, stopped: bool) -> None:
        self.messages += [question, Message(role=ASSISTANT, parts=(TextPart(answer),))]
        if stopped:
            self.stopped.add(len(self.messages) - 1)

    def without_last_turn(self) -> Conversation | None:
        """Return the conversation up to the user's last message, None if there is no turn."""
        place = self._last_question()
        if place is None:
            return None
        return Conversation(self.messages[:place], stopped=[index for index in self.stopped if index < place])

    def last_question(self) -> Message | None:
        place = self._last_question()
        return None if place is None else self.messages[place]

    def without_turns(self) -> Conversation:
        return Conversation([] if self.system is None else self.messages[:1])

    def _last_question(self) -> int | None:
        places = [place for place, message in enumerate(self.messages) if message.role == USER]
        return places[-1] if places else None


def text_of(message: Message) -> str:
    """Return the text of a message, without its images and videos."""
    return "\n".join(part.text for part in message.parts if isinstance(part, TextPart))


@dataclass(frozen=True, kw_only=True)
class SavedConversation:
    conversation: Conversation
    settings: Mapping[str, str]
    """Settings by name, as in /set; empty for a row that was not saved by a chat."""
    model: str | None

    def applied_to(self, sampling: ChatSampling) -> ChatSampling:
        """Return the settings, overridden by those of the file."""
        for name, value in self.settings.items():
            sampling = changed(sampling, name, value)
        return sampling


def saved_path(argument: str) -> Path:
    """Return the named file, with `.json` added to a name without a suffix; raises UserError for another suffix."""
    if not argument.strip():
        raise UserError("give the name of a file, such as talk.json")
    path = Path(argument.strip().strip("'\"")).expanduser()
    path = path if path.suffix else path.with_name(path.name + SUFFIXES[0])
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: files of conversations must end with {' or '.join(SUFFIXES)}")
    return path


def save(path: Path, conversation: Conversation, *, sampling: ChatSampling, model: str) -> None:
    """Write the conversation as a row file of one row."""
    if path.is_file() and not is_saved_conversation(path):
        raise UserError(f"{path}: exists and holds no saved conversation; choose another name")
    row = {
        "messages": stored_messages(conversation.messages),
        "datasource": DATASOURCE,
        "model": model,
        "settings": asdict(sampling),
        "stopped": sorted(conversation.stopped),
    }
    if path.suffix.lower() == SUFFIXES[0]:
        text = json.dumps([row], ensure_ascii=False, indent=2)
    else:
        text = json.dumps(row, ensure_ascii=False)
    write_atomically(path, text=text + "\n")


def load(path: Path) -> SavedConversation:
    """Return a saved conversation, or any row that ends with an answer; raises UserError for any other file."""
    fields, location, base_dir = _only_record(path)
    row = parse_row(fields, location=location, base_dir=base_dir, answer_required=False, names=ASKED_NAMES)
    for image in images_of(row.messages):
        check_image_exists(image, location=location)
    for video in videos_of(row.messages):
        check_video_exists(video, location=location)
    if row.messages[-1].role != ASSISTANT:
        raise UserError(f"{location}: the conversation does not end with an answer; give one that does")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise UserError(f'{location}: the "model" must be a name, not {type(model).__name__}')
    stopped = _stopped(fields.get("stopped"), roles=[message.role for message in row.messages], location=location)
    return SavedConversation(
        conversation=Conversation(row.messages, stopped=stopped),
        settings=_settings(fields.get("settings"), location=location),
        model=model,
    )


def _only_record(path: Path) -> Record:
    if not path.is_file():
        raise UserError(f"no file {path}; check the path")
    try:
        records = list(read_records(str(path)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if len(records) != 1:
        raise UserError(f"{path}: holds {len(records)} rows; it must hold one conversation")
    return records[0]


def is_saved_conversation(path: Path) -> bool:
    try:
        return _only_record(path)[0].get("datasource") == DATASOURCE
    except UserError:
        return False


def _settings(value: Any, *, location: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f'{location}: the "settings" must be an object, not {type(value).__name__}')
    settings = {name: str(number) for name, number in value.items()}
    try:
        # The values of the other settings do not matter here.
        saved = ChatSampling(temperature=0, top_p=1, max_new_tokens=1)
        for name, number in settings.items():
            saved = changed(saved, name, number)
    except UserError as error:
        raise UserError(f"{location}: {error}") from error
    return {name: settings[name] for name in NAMES if name in settings}


def _stopped(value: Any, *, roles: Sequence[str], location: str) -> list[int]:
    places = [] if value is None else value
    answers = [place for place, role in enumerate(roles) if role == ASSISTANT]
    if not isinstance(places, list) or any(type(place) is not int or place not in answers for place in places):
        raise UserError(f'{location}: "stopped" must list indices of answers, counted from 0')
    return places
