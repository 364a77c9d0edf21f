"""The verifiers by name; a verifier's module is imported on demand."""

import argparse
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from remote_rm.verifier import Verifier


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A verifier's module and purpose."""

    module: str
    """Has the verifier's class as `VERIFIER`, and its `reward_func`."""
    purpose: str


VERIFIERS = {
    "math": Registration(module="remote_rm.math_verifier", purpose="mathematical answers of any kind"),
    "choice": Registration(
        module="remote_rm.choice_verifier", purpose="the letter of a multiple-choice answer, A to J"
    ),
    "number": Registration(module="remote_rm.number_verifier", purpose="one number, to the precision of the label"),
    "exact": Registration(module="remote_rm.exact_verifier", purpose="the same text, character by character"),
    "list": Registration(module="remote_rm.list_verifier", purpose="several values, in order or in any order"),
    "box": Registration(module="remote_rm.box_verifier", purpose="bounding boxes, by how much they overlap"),
    "edit_distance": Registration(
        module="remote_rm.edit_distance_verifier", purpose="a text, by how many characters are different (ANLS)"
    ),
    "vqa": Registration(module="remote_rm.vqa_verifier", purpose="the answers of several people (VQA accuracy)"),
    "format": Registration(module="remote_rm.format_verifier", purpose="one think block, then one answer block"),
    "llm_judge": Registration(
        module="remote_rm.llm_judge_verifier", purpose="a language model behind a chat endpoint, and a rule beside it"
    ),
    "composition": Registration(
        module="remote_rm.composition", purpose="a weighted sum of verifiers, or a verifier chosen by each label"
    ),
}


def verifier_class(name: str) -> type[Any]:
    """Return the class of the verifier called `name`; raises ValueError with the known names for an unknown one."""
    if name not in VERIFIERS:
        match = difflib.get_close_matches(name, VERIFIERS, n=1)
        hint = f"did you mean {match[0]}? " if match else ""
        raise ValueError(f"unknown verifier {name!r}; {hint}Known are {', '.join(VERIFIERS)}")
    return importlib.import_module(VERIFIERS[name].module).VERIFIER


def get_verifier(name: str, **settings: Any) -> Verifier:
    """Return the verifier called `name` with the settings that its class takes; raises ValueError for an unknown name."""
    return verifier_class(name)(**settings)


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
