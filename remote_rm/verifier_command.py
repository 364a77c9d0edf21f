"""The command line of every verifier: its own flags, those of the server, and then serving."""

import argparse
from collections.abc import Sequence

from remote_rm.registry import VERIFIERS, verifier_class
from remote_rm.service.serving_arguments import add_serving_arguments, parse_flags


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
    args = parse_flags(parser, argv)
    try:
        verifier = verifier_class(name).from_arguments(args)
    except ValueError as error:
        parser.error(str(error))
    # The HTTP stack is imported after parsing, so that --help and a bad flag answer at once.
    from remote_rm.service.server import ServingOptions, serve

    serve(verifier, options=ServingOptions.from_arguments(args))
