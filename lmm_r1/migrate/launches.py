"""The command of a script that trains, of whichever system it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from lmm_r1.errors import UserError
from lmm_r1.migrate.easyr1 import EASYR1
from lmm_r1.migrate.hugging_face import TRL
from lmm_r1.migrate.openrlhf import TABLES
from lmm_r1.migrate.shell import Script, StartedCommand
from lmm_r1.migrate.shell_values import as_shown
from lmm_r1.migrate.table import Table, names_of
from lmm_r1.migrate.verl import VERL, VERL_SFT

_SHOWN_ONLY = ("echo", "printf", "cat", "pip", "pip3", "tee", "grep", "pkill", "ls", "mkdir", "export", "conda")
"""Commands that do not start their words."""
_SCRIPTED = "(?:.*/)?"
_OPENRLHF = re.compile(rf"openrlhf\.cli\.(\w+)|{_SCRIPTED}(train_(?:ppo_ray|ppo|sft|dpo|rm|kd))\.py")
_VERL = re.compile(r"(?:verl|recipe|verl_dapo)(?:\.\w+)*\.((?:main|fsdp|sft)\w*)|(?:.*/)?verl/trainer/(main_ppo)\.py")
_TRL = re.compile(r"(?:.*/)?(?:(\w+[_-])?(grpo|sft|dpo|reward)(?:[_-]\w+)?)\.py|open_r1\.(grpo|sft)\w*")
_OTHER_COMMANDS = names_of("other_commands")
_KNOWN = (
    "OpenRLHF (python -m openrlhf.cli.train_ppo_ray), EasyR1 (verl.trainer.main), verl (verl.trainer.main_ppo), and TRL "
    "and R1-V (torchrun .../grpo.py)"
)
_REFUSED = {
    "ms-swift": re.compile(r"(?:.*/)?swift(?:/cli/\w+\.py)?|swift\.cli\.\w+"),
    "LLaMA-Factory": re.compile(r"(?:.*/)?(?:llamafactory-cli|lmf|train_bash\.py)"),
}
REFUSAL = "settings of {} are not converted; give them to our command as flags or YAML, and it names ours"
_SERVER = re.compile(r"(?:openrlhf\.models\.)?remote_rm\.(\w+)|(?:.*/)?remote_rm/(\w+)\.py")
_MORE_FLAGS = re.compile(r"--[A-Za-z]|[+~]*[A-Za-z_]\w*(?:\.\w+)+=")
"""What a line begins with that continues a command after a comment or a blank after the backslash."""


@dataclass(frozen=True)
class Launch:
    """A command that trains."""

    system: str
    table: Table
    words: tuple[str, ...]
    """Its arguments, in which unknown parts may be."""
    line: int
    launcher: tuple[str, ...] = ()
    """The words before it: torchrun and its flags."""
    remarks: tuple[str, ...] = ()
    """What the user should know of how it was read."""

    @property
    def takes_settings(self) -> bool:
        """Whether its arguments are `key=value`."""
        return self.table in (VERL, EASYR1, VERL_SFT)


def find_launch(script: Script, *, path: Path) -> Launch:
    """Return the script's command that trains.

    Raises:
        UserError: there is none, or more than one, or it does something else.
    """
    found: list[Launch] = []
    others: list[str] = []
    continued: list[int] = []
    servers: list[str] = []
    for command in script.commands():
        servers += _reward_server(command)
        if found and _MORE_FLAGS.match(command.words[0]):
            last = found[-1]
            found[-1] = replace(last, words=(*last.words, *command.words))
            continued.append(command.line)
            continue
        launch = _launch_of(command, path=path, others=others)
        if launch is not None:
            found.append(launch)
    # One that is in several branches of a condition is the same.
    found = list({(one.system, one.words): one for one in reversed(found)}.values())[::-1]
    if len(found) > 1:
        lines = ", ".join(str(launch.line) for launch in found)
        raise UserError(f"{path}: commands that train are in lines {lines}; keep one of them in the file")
    if not found:
        if others:
            raise UserError(f"{path}:{others[0]}")
        raise UserError(f"{path}: no command in it trains with {_KNOWN}; give the script that has one")
    (launch,) = found
    remarks = tuple(
        f"line {line}: a comment or a blank after \\ ends the command before it in bash; it is read as a part of it"
        for line in continued
    )
    return replace(launch, remarks=(*remarks, *servers))


def _reward_server(command: StartedCommand) -> list[str]:
    """Return what to start instead of a server of rewards of LMM-R1 that the command starts."""
    for word in command.words:
        if PurePosixPath(command.words[0]).name not in _SHOWN_ONLY and (match := _SERVER.fullmatch(word)):
            name = (match[1] or match[2]).removesuffix("_verifier")
            return [
                f"line {command.line} starts a server of rewards, which reads the answers itself: start `lmm-r1 "
                f"serve_verifier {name}` first, and name the column of the answers with --data.label_key"
            ]
    return []


def _launch_of(command: StartedCommand, *, path: Path, others: list[str]) -> Launch | None:
    words = [as_shown(word) for word in command.words]
    if PurePosixPath(words[0]).name in _SHOWN_ONLY:
        return None
    for place, word in enumerate(words):
        for find in (_openrlhf, _verl, _trl):
            named = find(words, place)
            if named is None:
                continue
            name, tables, skipped = named
            if name in tables:
                arguments, launcher = command.words[place + skipped :], tuple(words[:place])
                return Launch(name, tables[name], arguments, command.line, launcher)
            told = _OTHER_COMMANDS.get(name, f"is not converted; known are {', '.join(tables)}")
            others.append(f"{command.line}: {word} {name if skipped > 1 else ''}".rstrip() + f" {told}")
            return None
        others += [
            f"{command.line}: {REFUSAL.format(name)}" for name, mark in _REFUSED.items() if mark.fullmatch(word)
        ]
    return None


_Found = tuple[str, Mapping[str, Table], int] | None
"""What a command is called, the tables of its system, and how many words name it."""


def _openrlhf(words: Sequence[str], place: int) -> _Found:
    match = _OPENRLHF.fullmatch(words[place])
    return (match[1] or match[2], TABLES, 1) if match else None


_VERL_TABLES: Mapping[str, Table] = {
    **dict.fromkeys(("main_ppo", "main_dapo", "main_ppo_sync"), VERL),
    **dict.fromkeys(("fsdp_sft_trainer", "sft_trainer"), VERL_SFT),
    "main": EASYR1,
}


def _verl(words: Sequence[str], place: int) -> _Found:
    match = _VERL.fullmatch(words[place])
    if match is None:
        return None
    name = match[1] or match[2]
    # Recipes have their own entry points around the same settings.
    recipe = words[place].startswith("recipe.") and name.startswith("main_") and name not in _OTHER_COMMANDS
    return ("main_ppo" if recipe else name, _VERL_TABLES, 1)


def _trl(words: Sequence[str], place: int) -> _Found:
    if words[place] == "trl" and place + 1 < len(words):
        return (words[place + 1], TRL, 2)
    match = _TRL.fullmatch(words[place])
    if match is None or "--" not in " ".join(words[place + 1 :]):
        return None
    name = match[2] or match[3]
    # R1-V and its relatives have their trainer in a package of this name, and count prompts.
    return ("r1_v" if name == "grpo" and "open_r1" in words[place] else name, TRL, 1)
