"""What a line that begins with a slash does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from lmm_r1.chat.attachments import read_image, read_video, sources_of
from lmm_r1.chat.conversation import is_saved_conversation, load, save, saved_path
from lmm_r1.chat.sampling import NAMES, changed
from lmm_r1.chat.session import Session
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError

SIGN = "/"
WORDS = {"exit": "/exit", "quit": "/exit"}
"""What is a command without a slash, as in other programs, where nothing else is said."""
_NO_TEXT = ('""', "''")
_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of the chat."""

    argument: str
    """What stands behind it, for the help."""
    help: str
    run: Callable[[Session, str], None]
    takes_path: bool = False


def run_command(session: Session, line: str) -> None:
    """Do what `/name argument` says; raises UserError where it cannot be done."""
    name, argument = (*line.split(maxsplit=1), "")[:2]
    if name not in COMMANDS:
        match = nearest(name, known=COMMANDS)
        hint = f"did you mean {match}?" if match else "/help lists them"
        raise UserError(f"unknown command {name}; {hint}")
    command, argument = COMMANDS[name], argument.strip()
    if argument and not command.argument:
        raise UserError(f"{name} takes nothing behind it, but got {argument}")
    command.run(session, argument)


def attach_images(session: Session, argument: str) -> None:
    """Attach all images that are named, or none of them where one cannot be had."""
    session.check_more(images=1)
    sources = sources_of(argument)
    session.check_more(images=len(sources))
    images = [read_image(source) for source in sources]
    session.attached += images
    for image in images:
        session.screen.say(f"attached {image}")


def _attach_videos(session: Session, argument: str) -> None:
    session.check_more(videos=1)
    sources = sources_of(argument)
    session.check_more(videos=len(sources))
    videos = [read_video(source) for source in sources]
    session.attached += videos
    for video in videos:
        session.screen.say(f"attached {video}")


def _list_attached(session: Session, argument: str) -> None:
    if session.attached:
        session.screen.table([(item.name, item.size) for item in session.attached])
    else:
        session.screen.say("nothing is attached; /image PATH attaches an image to the next message")


def _detach(session: Session, argument: str) -> None:
    count, session.attached = len(session.attached), []
    session.screen.say(f"{count} detached" if count else "nothing was attached")


def _system(session: Session, argument: str) -> None:
    if argument:
        session.conversation.set_system(None if argument in _NO_TEXT else argument)
    prompt = session.conversation.system
    if prompt is None:
        session.screen.say("no system prompt but what the checkpoint's chat template may add")
    else:
        session.screen.say(f'system prompt: {prompt}\n(/system "" takes it away)')


def _set(session: Session, argument: str) -> None:
    if argument:
        name, *values = argument.replace("=", " ").split()
        if len(values) != 1:
            raise UserError(f"write /set NAME VALUE; the names are {', '.join(NAMES)}")
        session.sampling = changed(session.sampling, name, values[0])
    session.screen.table([(name, f"{value:g}") for name, value in asdict(session.sampling).items()])


def _reset(session: Session, argument: str) -> None:
    session.reset()
    kept = "" if session.conversation.system is None else "; the system prompt stays"
    session.screen.say(f"a new conversation{kept}")


def _undo(session: Session, argument: str) -> None:
    said = " ".join(session.undo().split())
    session.screen.say(f"took back: {said if len(said) <= _SHOWN else said[:_SHOWN] + '...'}")


def _retry(session: Session, argument: str) -> None:
    session.retry()


def _save(session: Session, argument: str) -> None:
    path = saved_path(argument)
    if session.conversation.turns == 0:
        raise UserError("there is nothing to save yet")
    if path not in (session.kept, session.asked) and path.is_file() and is_saved_conversation(path):
        session.asked = path
        raise UserError(f"{path} holds another conversation; the same command once more overwrites it")
    save(path, session.conversation, sampling=session.sampling, model=session.model.name)
    session.kept, session.asked = path, None
    session.screen.say(f"saved to {path}")


def _load(session: Session, argument: str) -> None:
    path = saved_path(argument)
    session.take_up(load(path), path=path)


def _help(session: Session, argument: str) -> None:
    commands = [(f"{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()]
    keys = [
        ("Alt-Enter", "begin a new line; so does a backslash at the end"),
        ("Ctrl-C", "stop the answer, or clear the line"),
        ("Ctrl-D", "leave"),
        ("//", "begins a message with a slash"),
    ]
    session.screen.table([*commands, *keys])


def _leave(session: Session, argument: str) -> None:
    session.leaving = True


COMMANDS: dict[str, Command] = {
    "/image": Command(
        argument="PATH|URL", help="attach images to the next message", run=attach_images, takes_path=True
    ),
    "/images": Command(argument="", help="show what is attached", run=_list_attached),
    "/clear_images": Command(argument="", help="attach nothing", run=_detach),
    "/video": Command(argument="PATH", help="attach a video to the next message", run=_attach_videos, takes_path=True),
    "/system": Command(argument="[TEXT]", help="show or change the system prompt", run=_system),
    "/set": Command(argument="[NAME VALUE]", help=f"show the settings or change one: {', '.join(NAMES)}", run=_set),
    "/retry": Command(argument="", help="ask for the last answer again", run=_retry),
    "/undo": Command(argument="", help="take the last turn back", run=_undo),
    "/reset": Command(argument="", help="begin a new conversation", run=_reset),
    "/clear": Command(argument="", help="the same as /reset", run=_reset),
    "/save": Command(argument="FILE", help="write the conversation to a file", run=_save, takes_path=True),
    "/load": Command(argument="FILE", help="go on with a conversation from a file", run=_load, takes_path=True),
    "/help": Command(argument="", help="show this", run=_help),
    "/exit": Command(argument="", help="leave; so do exit and quit by themselves", run=_leave),
}
