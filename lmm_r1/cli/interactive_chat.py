"""Talk with a checkpoint: `lmm-r1 interactive_chat --model DIR`."""

from __future__ import annotations

from collections.abc import Sequence

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.generation import ChatConfig

CONFIG = ChatConfig
PROG = "lmm-r1 interactive_chat"
DESCRIPTION = (
    "Chat with a checkpoint in the terminal, with images; /help lists the commands. If stdin or "
    "stdout is a pipe or a file, each line of stdin is a message or a command, only answers go to stdout, and the exit "
    "code is 1 if a line failed."
)
INTERRUPTED_CODE = 130
"""Exit code of a program that Ctrl-C ended, as shells report it."""
NO_READER_CODE = 141
"""Exit code of a program whose output nobody reads any more."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chat; exits with code 1 if a line from a pipe failed, and with 130 after Ctrl-C."""
    config = parse(ChatConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        from lmm_r1.chat.loop import run_chat

        try:
            all_well = run_chat(config)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED_CODE) from None
        except BrokenPipeError:
            raise SystemExit(NO_READER_CODE) from None
    if not all_well:
        raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
