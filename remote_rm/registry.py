"""The verifiers by name, and the command that serves each; a verifier's module is imported on demand."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from remote_rm.verifier import DEFAULT_LIMITS, WORKER_MEMORY_BYTES, Verifier

LIKENESS = 0.8
"""Share of letters that a name has in common with the one that it is taken for."""


@dataclass(frozen=True)
class Registration:
    """A verifier's class and purpose."""

    place: str
    """MODULE:CLASS in this package."""
    purpose: str


VERIFIERS = {
    "math": Registration("math_verifier:MathVerifier", "mathematical answers of any kind"),
    "choice": Registration("short_verifiers:ChoiceVerifier", "the letter of a multiple-choice answer, A to J"),
    "number": Registration("short_verifiers:NumberVerifier", "one number, to the precision of the label"),
    "exact": Registration("short_verifiers:ExactVerifier", "the same text, character by character"),
    "list": Registration("list_verifier:ListVerifier", "several values, in order or in any order"),
    "box": Registration("box_verifier:BoxVerifier", "bounding boxes, by how much they overlap"),
    "edit_distance": Registration(
        "edit_distance_verifier:EditDistanceVerifier", "a text, by how many characters are different (ANLS)"
    ),
    "vqa": Registration("vqa_verifier:VqaVerifier", "the answers of several people (VQA accuracy)"),
    "sokoban": Registration("sokoban:SokobanVerifier", "moves that solve the level of Sokoban in the label"),
    "format": Registration("format_verifier:FormatVerifier", "one think block, then one answer block"),
    "llm_judge": Registration(
        "llm_judge_verifier:LlmJudge", "a language model behind a chat endpoint, and a rule beside it"
    ),
    "composition": Registration(
        "composition:Composition", "a weighted sum of verifiers, or a verifier chosen by each label"
    ),
}


def verifier_class(name: str) -> type[Any]:
    """Return the class of the verifier called `name`; raises ValueError with the known names for an unknown one."""
    if name not in VERIFIERS:
        match = difflib.get_close_matches(name, VERIFIERS, n=1, cutoff=LIKENESS)
        hint = f"did you mean {match[0]}? " if match else ""
        raise ValueError(f"unknown verifier {name!r}; {hint}Known are {', '.join(VERIFIERS)}")
    module, _, name = VERIFIERS[name].place.partition(":")
    return getattr(importlib.import_module(f"remote_rm.{module}"), name)


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


DEFAULT_WORKERS = min(4, os.cpu_count() or 1)
MIB = 2**20


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the HTTP server and its worker pool."""
    add_listening_arguments(parser)
    parser.add_argument("--workers", type=positive(int), default=DEFAULT_WORKERS, help="judging processes")
    parser.add_argument(
        "--item-timeout-seconds",
        type=positive(float),
        default=5.0,
        help="processor time after which one answer counts as wrong and its worker is replaced",
    )
    parser.add_argument(
        "--worker-memory-mib",
        type=positive(int),
        default=WORKER_MEMORY_BYTES // MIB,
        help="memory of one worker, beyond which an answer counts as wrong",
    )


def add_address_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of where a server listens, and to whom."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 opens it to the network")
    parser.add_argument("--port", type=_port, default=5000, help="port to listen on; 0 picks a free one")
    parser.add_argument("--port-file", type=Path, default=None, help="file to write the port to once it listens")
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        default=None,
        help="environment variable with the bearer token that requests must bring, such as REMOTE_RM_TOKEN; required if "
        "--host is not an address of this machine only",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="answer everyone on the network: --host without --token-env"
    )


def add_listening_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the HTTP server."""
    add_address_arguments(parser)
    parser.add_argument(
        "--max-connections",
        type=positive(int),
        default=4096,
        help="open connections from which on a request is refused with 503",
    )
    parser.add_argument(
        "--max-request-items",
        type=positive(int),
        default=DEFAULT_LIMITS.max_request_items,
        help="samples of one request, beyond which it is refused with 413",
    )
    parser.add_argument(
        "--max-request-mib",
        type=positive(float),
        default=DEFAULT_LIMITS.max_request_bytes / MIB,
        help="size of a request, beyond which it is refused with 413",
    )
    parser.add_argument(
        "--grace-seconds",
        type=positive(float),
        default=20.0,
        help="time to answer what is open when told to stop; what is not answered by then is refused with 500",
    )


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return what the flags say, with hyphens or underscores; an unknown one ends the process with code 2.

    Args:
        argv: None reads `sys.argv`.
    """
    given = []
    for argument in sys.argv[1:] if argv is None else argv:
        name, equals, value = argument.partition("=")
        # lmm-r1's other commands take `--port_file`, too.
        given.append(f"{name.replace('_', '-') if name.startswith('--') else name}{equals}{value}")
    if "--format-weight" in parser._option_string_actions:
        given = ["--format-weight=0" if argument == "--disable-format-reward" else argument for argument in given]
    args, unknown = parser.parse_known_args(given)
    if unknown:
        flag = unknown[0].partition("=")[0]
        match = difflib.get_close_matches(flag, parser._option_string_actions, n=1, cutoff=LIKENESS)
        hint = f"did you mean {match[0]}?" if match else "--help lists the flags"
        parser.error(f"unknown argument {unknown[0]}; {hint}")
    return args


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port: give 0 to 65535")
    return port


def positive(number: type[int] | type[float]) -> Callable[[str], int | float]:
    """Return the type of a flag that takes numbers above 0."""

    def parse(text: str) -> int | float:
        value = number(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is no number above 0")
        return value

    parse.__name__ = number.__name__
    return parse


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """The layout of the other commands' help: each flag in a line of its own, with its text below."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=min(shutil.get_terminal_size().columns, 100))

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return str(getattr(action.type, "__name__", "text")).strip("_").upper()

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return f"{action.help} (required)" if action.required else super()._get_help_string(action)


def server_parser(*, prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of help."""
    parser = argparse.ArgumentParser(
        prog=prog, usage=f"{prog} [FLAGS]", description=description, formatter_class=_Help, allow_abbrev=False
    )
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    return parser


def build_parser(name: str, *, prog: str) -> argparse.ArgumentParser:
    """Return the parser for the verifier called `name`; raises ValueError for an unknown one."""
    verifier = verifier_class(name)
    parser = server_parser(
        prog=prog,
        description=f"Serve rewards over HTTP, in OpenRLHF's remote reward protocol: {VERIFIERS[name].purpose}.",
    )
    verifier.add_arguments(parser)
    add_serving_arguments(parser)
    return parser


def run(name: str, argv: Sequence[str] | None, *, prog: str) -> None:
    """Parse the command line and serve until SIGINT or SIGTERM; a bad flag or value ends the process with code 2.

    Raises ValueError for an unknown name.

    Args:
        argv: the arguments after the verifier's name; None reads `sys.argv`.
    """
    parser = build_parser(name, prog=prog)
    args = parse_flags(parser, argv)
    try:
        verifier = verifier_class(name).from_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    # The HTTP stack is imported after parsing, so that --help and a bad flag answer at once.
    from remote_rm.service.app import serve

    serve(verifier, args)
