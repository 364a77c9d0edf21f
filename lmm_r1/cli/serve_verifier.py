"""`lmm-r1 serve_verifier math --port 5000`: rewards by one of the registered verifiers, over HTTP."""

import sys
from collections.abc import Sequence

from lmm_r1.cli import run_command, user_errors
from lmm_r1.config.rewards import COMPOSITION, reward_list
from remote_rm.registry import VERIFIERS, run, verifier_class

PROG = "lmm-r1 serve_verifier"


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; an unknown verifier, flag or value ends the process with code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "--help-all", "--help_all"):
        print(_usage())
        return
    if name.startswith("-"):
        _exit(f"the verifier's name comes first, before {name}: {PROG} NAME [flags]")
    flags = arguments[1:]
    try:
        if listed := reward_list(name, flag="NAME"):
            name, flags = COMPOSITION, [*(f"--part={part.source}={part.weight}" for part in listed), *flags]
        verifier_class(name)
    except ValueError as error:
        _exit(str(error))
    with user_errors(PROG):
        run(name, flags, prog=f"{PROG} {name}")


def _exit(sentence: str) -> None:
    print(f"{PROG}: error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def _usage() -> str:
    width = max(map(len, VERIFIERS))
    listed = "\n".join(f"  {name:<{width}}  {verifier.purpose}" for name, verifier in VERIFIERS.items())
    return (
        f"usage: {PROG} NAME [FLAGS]\n\nServe rewards over HTTP, in OpenRLHF's remote reward protocol.\n\n{listed}\n\n"
        f"{PROG} NAME --help lists the flags of a verifier. NAME may be a list with weights: math=1,format=0.5."
    )


if __name__ == "__main__":
    run_command(main)
