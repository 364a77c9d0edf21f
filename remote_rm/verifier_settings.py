"""A verifier by its name and settings, as files and other command lines give them: the flags of its own command."""

import argparse
from collections.abc import Mapping
from typing import NoReturn

from remote_rm.registry import verifier_class
from remote_rm.verifier import Verifier


class _Settings(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; a setting is written as its flag, with underscores and no hyphens in front")


def verifier_with(name: str, settings: Mapping[str, object]) -> Verifier:
    """Return the verifier with the settings that its flags describe: {"accuracy_weight": 2, "unordered": True}.

    True sets a switch, False and None leave a setting out. Raises ValueError for an unknown name, setting or value, and
    for a setting that is missing.
    """
    kind = verifier_class(name)
    parser = _Settings(prog=name, add_help=False, allow_abbrev=False)
    kind.add_arguments(parser)
    known = [flag.removeprefix("--").replace("-", "_") for flag in parser._option_string_actions]
    for setting in settings:
        if setting not in known:
            raise ValueError(f"{name} has no setting {setting!r}; its settings are {', '.join(known)}")
    given = {setting: value for setting, value in settings.items() if value is not None and value is not False}
    flags = {setting: f"--{setting.replace('_', '-')}" for setting in given}
    argv = [flags[setting] if value is True else f"{flags[setting]}={value}" for setting, value in given.items()]
    return kind.from_arguments(parser.parse_args(argv))
