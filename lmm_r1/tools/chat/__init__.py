"""A chat: its checkpoint and limits, and the lines of stdin, of a terminal or a pipe, as messages and commands."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from PIL import Image

from lmm_r1.agents.environment import Answered
from lmm_r1.config.generation import LONGEST_CONVERSATION, ChatConfig, ConversationFlags, check_chat, episode_limits
from lmm_r1.config.shared import text_given
from lmm_r1.data.images import load_image, load_video
from lmm_r1.data.messages import (
    NO_PROMPT,
    ImagePart,
    Message,
    Row,
    TextPart,
    VideoPart,
    images_of,
    kind_of,
    resolve,
    videos_of,
)
from lmm_r1.data.reading import shipped_prompt
from lmm_r1.data.sample import Completion
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Engine, EngineSettings, EpisodeSettings, SamplingSettings
from lmm_r1.records.run_folder import trained_reading
from remote_rm.redaction import neutral

if TYPE_CHECKING:
    from lmm_r1.generation.episode_engine import EpisodeEngine
    from lmm_r1.lmm_kits import Checkpoint


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    engine: Engine
    name: str
    max_images: int
    max_videos: int
    episodes: EpisodeEngine | None = None

    def check_media(self, messages: Sequence[Message], *, more_images: int = 0, more_videos: int = 0) -> None:
        """Raise UserError if a conversation with this many more images or videos could not be answered."""
        images, videos = len(images_of(messages)) + more_images, len(videos_of(messages)) + more_videos
        for kind, count, most in (("image", images, self.max_images), ("video", videos, self.max_videos)):
            if count > most:
                raise UserError(
                    f"{count} {kind}s in the conversation: {self.name} takes {most} here; see --max_{kind}s, and lmm-r1 "
                    "kits for what models take, or start over with /reset"
                )


def model_name(config: ConversationFlags) -> str:
    return config.model if config.adapter is None else f"{config.model} + {config.adapter}"


def engine_settings(config: ConversationFlags, *, responses: int = 1) -> tuple[Checkpoint, EngineSettings]:
    """Return the checkpoint, and how it is loaded for this many responses at a time; raises UserError if it cannot be."""
    from lmm_r1.generation.engine import prepare_process, split_adapter

    # Before transformers is imported, whose torchvision has no CPU build.
    prepare_process()
    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.lmm_kits.checkpoint import check_embeddings, check_weights
    from lmm_r1.models.rope_scaling import short_length

    path, adapter = split_adapter(config.model, config.adapter)
    checkpoint = Checkpoint(path, trust_remote_code=config.trust_remote_code)
    kit = checkpoint.kit
    check_weights(path)
    check_embeddings(checkpoint)
    shown = config.agent_max_images if isinstance(config, ChatConfig) and config.agent is not None else 0
    return checkpoint, EngineSettings(
        adapter=adapter,
        **config.loading,
        # By default, within what longrope covers by its short factors.
        max_model_len=config.max_model_len
        or min(LONGEST_CONVERSATION, short_length(checkpoint.config) or LONGEST_CONVERSATION),
        max_images=config.max_images + shown if kit.takes_images else 0,
        max_videos=config.max_videos if kit.takes_videos else 0,
        batch_rows=1,
        responses=responses,
    )


def load_model(config: ChatConfig) -> ChatModel:
    """Load the checkpoint; raises UserError if that fails, before the engine starts if possible."""
    from lmm_r1.generation.engine import make_engine, playing_engine

    checkpoint, settings = engine_settings(config)
    kit = checkpoint.kit
    episodes = None
    if config.agent is not None:
        limits = episode_limits(config)
        episodes = EpisodeSettings(agent=config.agent, limits=limits, seed=config.seed, pictures="whole")
        # Check the environment before loading the engine, which takes long.
        episodes.environment()
    engine = make_engine(config.backend, checkpoint.path, settings)
    return ChatModel(
        engine=engine,
        episodes=None if episodes is None else playing_engine(engine, episodes),
        name=model_name(config),
        max_images=config.max_images if kit.takes_images else 0,
        max_videos=settings.max_videos,
    )


COMMANDS = {
    "/image": "PATH or URL: attach an image to the next message; a path on a line of its own does the same",
    "/video": "PATH: attach a video to the next message",
    "/system": 'TEXT: replace the system prompt; without text, show it; "" removes it',
    "/reset": "start over, without attachments",
    "/help": "show this; // begins a message with a slash, and a backslash at the end continues the line",
    "/exit": "leave, as do exit, quit and Ctrl-D; Ctrl-C stops an answer",
}
_PATH_STARTS = ("/", "~", "./", "../", "file://", "'", '"')


class AnswerWriter:
    """Writes answers as they arrive, without control characters, and what an environment replies."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.text = ""
        self.tokens = 0

    def begin_turn(self) -> None:
        self.text = ""
        if self._chat.has_answered and not self._chat.in_terminal:
            self._chat.out.write("\n")
        self._chat.has_answered = True

    def write(self, piece: str) -> None:
        self._chat.out.write(neutral(piece))
        self._chat.out.flush()
        self.text += piece

    def end_turn(self) -> None:
        if self.text and not self.text.endswith("\n"):
            self._chat.out.write("\n")
            self._chat.out.flush()

    def answered(self, answered: Answered) -> None:
        if not answered.is_over:
            shown = (part.text if isinstance(part, TextPart) else "[picture]" for part in answered.shown)
            say(f"the environment: {''.join(shown).strip()}")


@dataclass(kw_only=True)
class Chat:
    """A conversation with a model."""

    model: ChatModel
    sampling: SamplingSettings
    out: TextIO
    """Where answers are written; everything else goes to stderr."""
    in_terminal: bool
    system: str | None = None
    max_pixels: int | None = None
    """Images are scaled down to this many pixels, as in the run that trained the model; None keeps their size."""
    turns: list[Message] = field(default_factory=list)
    attached: list[ImagePart | VideoPart] = field(default_factory=list)
    has_answered: bool = False

    def run(self, lines: Iterable[str]) -> bool:
        """Handle every line until the user leaves, and return whether all of them succeeded.

        Raises KeyboardInterrupt if Ctrl-C stops what a pipe asked for.
        """
        all_well = True
        for line in lines:
            try:
                if not self.respond(line.strip()):
                    break
            except UserError as error:
                say(f"error: {' '.join(str(error).split())}")
                all_well = False
            except KeyboardInterrupt:
                if not self.in_terminal:
                    raise
                say("stopped")
        return all_well

    def respond(self, line: str) -> bool:
        """Handle one line, and return whether the chat goes on; raises UserError if the line cannot be handled."""
        name, argument = (*line.split(maxsplit=1), "", "")[:2]
        if line in ("exit", "quit", "/exit"):
            return False
        if name in ("/image", "/video"):
            self._attach(argument.strip(), is_video=name == "/video")
        elif name == "/system":
            self.system = (None if argument in ('""', "''") else argument) if argument else self.system
            say("no system prompt" if self.system is None else f"system prompt: {self.system}")
        elif line == "/reset":
            self.turns, self.attached = [], []
            say("a new conversation" + ("" if self.system is None else "; the system prompt stays"))
        elif line == "/help":
            say("\n".join(f"{name:8} {what}" for name, what in COMMANDS.items()))
        elif line.startswith("//"):
            self._ask(line[1:])
        elif is_dropped_image(line):
            self._attach(line, is_video=False)
        elif line.startswith("/"):
            match = None if name in COMMANDS else nearest(name, known=COMMANDS)
            raise UserError(f"unknown command {line}; " + (f"did you mean {match}?" if match else "/help lists them"))
        elif line:
            self._ask(line)
        return True

    def _attach(self, argument: str, *, is_video: bool) -> None:
        sources = sources_of(argument)
        videos = sum(isinstance(part, VideoPart) for part in self.attached) + len(sources) * is_video
        images = len(self.attached) + len(sources) - videos
        self.model.check_media(self.turns, more_images=images, more_videos=videos)
        self.attached += [read_video(one) if is_video else read_image(one, self.max_pixels) for one in sources]
        say(f"attached {argument}; images and videos for the next message: {len(self.attached)}")

    def _ask(self, text: str) -> None:
        question = Message(role="user", parts=(*self.attached, TextPart(text)))
        system = () if self.system is None else (Message(role="system", parts=(TextPart(self.system),)),)
        row = Row(
            messages=(*system, *self.turns, question), answer="", datasource="default", location="this conversation"
        )
        began = time.perf_counter()
        try:
            completion = self._completion(row)
            if not completion.text.strip():
                raise UserError("the answer is empty")
        except UserError as error:
            raise UserError(f"{error}; the turn is not added, and attachments stay") from error
        self.turns += [question, Message(role="assistant", parts=(TextPart(completion.text),))]
        self.attached = []
        say(_account(completion, seconds=time.perf_counter() - began))
        if completion.finish_reason == "aborted" and not self.in_terminal:
            raise KeyboardInterrupt

    def _completion(self, row: Row) -> Completion:
        writer = AnswerWriter(self)
        with _interrupts() as should_stop:
            if self.model.episodes is not None:
                return self.model.episodes.play(row, self.sampling, watcher=writer, should_stop=should_stop)
            writer.begin_turn()
            try:
                return self.model.engine.stream(row, self.sampling, on_text=writer.write, should_stop=should_stop)
            finally:
                writer.end_turn()


def _account(completion: Completion, *, seconds: float) -> str:
    """Return `30 tokens, 20.0 tokens/s`, the turns and counts of an episode, and what ended it early."""
    tokens, played = completion.num_tokens, completion.played
    assert tokens is not None, "an engine in this process counts tokens"
    account = [f"{tokens} tokens, {tokens / seconds:.1f} tokens/s"]
    if played is not None:
        account += [f"{played.turns} turns"]
        account += [f"{name} {value:g}" for name, value in {**played.counts, **played.rewards}.items()]
        account += [] if played.end == "over" else [f"ended at its limit of {played.end}"]
    if completion.finish_reason == "length":
        account += ["cut off at --max_new_tokens or --max_model_len"]
    return ", ".join([*account, *(["stopped"] if completion.finish_reason == "aborted" else [])])


def say(text: str) -> None:
    """Write a remark to stderr, without control characters."""
    print(neutral(text), file=sys.stderr, flush=True)  # noqa: T201


def sources_of(argument: str) -> list[str]:
    """Return the paths and URLs of a line: `my picture.png` is one path if it exists, `a.png b.png` are two."""
    whole = os.path.expanduser(argument)
    if not whole:
        raise UserError("give the path or the URL of a file")
    if "\0" not in whole and os.path.exists(whole):
        return [whole]
    try:
        return [os.path.expanduser(piece) for piece in shlex.split(whole)]
    except ValueError:  # an unclosed quote, as in `Anna's.png`
        return [whole]


def is_dropped_image(line: str) -> bool:
    """Return whether a line is nothing but the path of an image, as terminals write a dropped file."""
    if not line.startswith(_PATH_STARTS) or "\n" in line or "\0" in line:
        return False
    sources = [str(resolve(source, base_dir=Path.cwd())) for source in sources_of(line)]
    suffixes = Image.registered_extensions()
    return all(os.path.splitext(path)[1].lower() in suffixes and os.path.exists(path) for path in sources)


def read_image(source: str, max_pixels: int | None = None) -> ImagePart:
    """Return an image, decoded once to check it; one from a URL is kept, because it may disappear."""
    image = load_image(ImagePart(source), location="/image")
    kept = image if kind_of(source) == "url" else resolve(source, base_dir=Path.cwd())
    return ImagePart(kept, max_pixels=max_pixels)


def read_video(source: str) -> VideoPart:
    """Return a video of a file, decoded once to check it; raises UserError if it is missing or damaged."""
    part = VideoPart(str(resolve(source, base_dir=Path.cwd())))
    if kind_of(source) != "path" or not Path(str(part.source)).is_file():
        raise UserError(f"no video file {source}; check the path")
    load_video(part, location="/video")
    return part


def entries(*, in_terminal: bool) -> Iterator[str]:
    """Yield the lines of stdin; one that ends with a backslash which is not one of a pair is joined with the next."""
    if in_terminal:
        import readline

        readline.parse_and_bind("tab: complete")  # files
    else:
        assert isinstance(sys.stdin, io.TextIOWrapper), "Python opens stdin as one"
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")
    entry = ""
    while True:
        try:
            prompt = (". " if entry else "> ") if in_terminal else ""
            entry += input(prompt).rstrip("\r")
        except KeyboardInterrupt:
            if not in_terminal:
                raise
            sys.stdout.write("\n")
            entry = ""
            continue
        except EOFError:
            break
        if (len(entry) - len(entry.rstrip("\\"))) % 2 == 1:
            entry = entry[:-1] + "\n"
        else:
            yield entry
            entry = ""
    if entry:
        yield entry


def run_chat(config: ChatConfig) -> bool:
    """Run the chat and return whether all lines succeeded; raises UserError for invalid settings.

    Raises KeyboardInterrupt if Ctrl-C should end the program: while it loads, and always outside of a terminal.
    """
    check_chat(config)
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    out = open(os.dup(1), "w", encoding="utf-8", errors="replace")
    with contextlib.ExitStack() as stack:
        stack.callback(_restore, out)
        if not in_terminal:
            # What libraries print must not get between the answers.
            sys.stdout.flush()
            os.dup2(2, 1)
        prompt, max_pixels = trained_reading([config.model, str(config.adapter or config.model)])
        system = config.system
        if system is None and prompt not in (None, NO_PROMPT):
            system = shipped_prompt(prompt) or text_given(prompt, flag="the run's --data.system_prompt") or ""
            say(f"system prompt of the run: {' '.join(system.split())} (/system replaces it)")
        began = time.perf_counter()
        loaded = load_model(config)
        stack.callback(loaded.engine.close)
        say(f"{loaded.name} by {config.backend}, loaded in {time.perf_counter() - began:.0f} s; /help for commands")
        if loaded.episodes is not None:
            say(f"each message begins an episode with the environment {loaded.episodes.environment.name}")
        sampling = SamplingSettings(
            n_samples=1, temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens
        )
        chat = Chat(
            model=loaded, sampling=sampling, out=out, in_terminal=in_terminal, system=system, max_pixels=max_pixels
        )
        return chat.run(entries(in_terminal=in_terminal)) or in_terminal


def _restore(out: TextIO) -> None:
    sys.stdout.flush()
    os.dup2(out.fileno(), 1)
    # What nobody reads any more is dropped.
    with contextlib.suppress(BrokenPipeError):
        out.close()


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed, instead of raising KeyboardInterrupt within an engine's step."""
    pressed = False

    def press(signal_number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
