"""The command line of every verifier: its own flags, those of the server, and then serving."""

import argparse
import difflib
import sys
from collections.abc import Sequence

from remote_rm.registry import VERIFIERS, verifier_class
from remote_rm.serving_arguments import add_serving_arguments


def build_parser(name: str, *, prog: str) -> argparse.ArgumentParser:
    """Return the parser for the verifier called `name`; raises ValueError for an unknown one."""
    verifier = verifier_class(name)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=f"Serve rewards over HTTP, in OpenRLHF's remote reward protocol: {VERIFIERS[name].purpose}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
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
    args, unknown = parser.parse_known_args(_with_hyphens(sys.argv[1:] if argv is None else argv))
    if unknown:
        parser.error(_unknown_flag(unknown[0], parser=parser))
    try:
        verifier = verifier_class(name).from_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    # The HTTP stack is imported after parsing, so that --help and a bad flag answer at once.
    from remote_rm.server import ServingOptions, serve

    serve(verifier, options=ServingOptions.from_arguments(args))


def _with_hyphens(argv: Sequence[str]) -> list[str]:
    """The arguments with `--port_file` written `--port-file`: lmm-r1's other commands take both."""
    parted = [argument.partition("=") for argument in argv]
    return [
        f"{name.replace('_', '-') if name.startswith('--') else name}{equals}{value}" for name, equals, value in parted
    ]


def _unknown_flag(argument: str, *, parser: argparse.ArgumentParser) -> str:
    flag = argument.partition("=")[0]
    match = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
    return f"unknown argument {argument}; " + (f"did you mean {match[0]}?" if match else "--help lists the flags")
