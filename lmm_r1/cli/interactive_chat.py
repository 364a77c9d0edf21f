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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chat; exits with code 1 if a line from a pipe failed, and with 130 after Ctrl-C."""
    config = parse(ChatConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        from lmm_r1.tools.chat import run_chat

        if not run_chat(config):
            raise SystemExit(1)


if __name__ == "__main__":
    run_command(main)
