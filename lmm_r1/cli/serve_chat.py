"""`lmm-r1 serve_chat --model FOLDER --port 8000`: serve a checkpoint with the OpenAI chat API."""

import os
import sys
from collections.abc import Sequence

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.generation import ServeChatConfig, check_chat
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable

CONFIG = ServeChatConfig
PROG = "lmm-r1 serve_chat"
DESCRIPTION = (
    "Serve a checkpoint, for text and images, with OpenAI's chat API: vLLM's own server, for other evaluation tools, or "
    "for the verifier llm_judge. After -- follow flags of `vllm serve` that are not listed here."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; an unknown flag or a bad value ends the process with code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    config = parse(ServeChatConfig, arguments[:end], prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        _serve(config, more=arguments[end + 1 :])


def _serve(config: ServeChatConfig, *, more: Sequence[str]) -> None:
    check_chat(config)
    if config.image_root is not None and not config.image_root.is_dir():
        raise UserError(f"--image_root {config.image_root}: no such folder; check the path")
    token = os.environ.get(config.token_env or "", "").strip() or None
    if config.token_env and token is None:
        raise UserError(f"--token_env {config.token_env}: the environment variable is not set; export it")
    if config.port_file is not None:
        check_creatable(config.port_file, flag="--port_file")
    from lmm_r1.tools.chat.server import serve
    from remote_rm.service.access import check_access

    try:
        check_access(config.host, token=token, is_insecure=config.insecure)
    except ValueError as error:
        raise UserError(str(error)) from error
    serve(config, token=token, more=more)


if __name__ == "__main__":
    run_command(main)
