"""The OpenAI chat API for a checkpoint: vLLM's own server, with the kit's engine arguments and banned tokens."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmm_r1 import quiet
from lmm_r1.config.generation import ServeChatConfig
from lmm_r1.data.media_access import MEGAPIXELS
from lmm_r1.files.atomic import write_atomically
from lmm_r1.generation.engine import check_backend, merged_checkpoint
from lmm_r1.generation.request import LimitedCodec
from lmm_r1.tools.chat import engine_settings, model_name
from remote_rm.service.access import HostGate, is_local

RESPONSES = 64
"""Responses that are generated at a time, for which the engine has memory; the most to one request."""
_NO_HOST = "[none: see --allow_urls]"
"""What no URL can have as its host: vLLM fetches from every host if it is given none."""


def serve(config: ServeChatConfig, *, token: str | None, more: Sequence[str] = ()) -> None:
    """Serve a checkpoint until SIGINT or SIGTERM; raises UserError if it cannot be loaded.

    Args:
        token: the key that requests must bring; None answers everyone.
        more: further flags of `vllm serve`.
    """
    checkpoint, settings = engine_settings(config, responses=RESPONSES)
    check_backend("vllm", checkpoint.kit, model=f"--model {config.model}")
    # A host that is allowed must not lead to another one.
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    os.environ.setdefault("VLLM_MAX_IMAGE_PIXELS", str(int(MEGAPIXELS * 1e6)))
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(RESPONSES))
    codec = LimitedCodec(checkpoint.path, settings, checkpoint=checkpoint)
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from lmm_r1.generation.vllm_engine import arguments_of

    theirs = vars(make_arg_parser(FlexibleArgumentParser(prog="lmm-r1 serve_chat")).parse_args(list(more)))

    # Until vLLM handles it: end by exiting, so that temporary files are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    quiet.done_loading()
    with merged_checkpoint(checkpoint.path, settings) as folder:
        given = theirs | arguments_of(folder, codec=codec, settings=settings) | _of_server(config, token)
        asyncio.run(_run(given, port_file=config.port_file, banned=sorted(codec.banned_token_ids)))


def _of_server(config: ServeChatConfig, token: str | None) -> dict[str, Any]:
    """Return arguments of `vllm serve` that open nothing but what was allowed."""
    gates = [f"{HostGate.__module__}.{HostGate.__qualname__}"] if is_local(config.host) else []
    return {
        "host": config.host,
        "port": config.port,
        "served_model_name": [config.name or model_name(config)],
        "api_key": [token] if token else None,
        "allowed_local_media_path": str(config.image_root or ""),
        "allowed_media_domains": [*config.allow_urls] or [_NO_HOST],
        # No web page may ask, whichever host a browser takes it to be from.
        "allowed_origins": [],
        "middleware": gates,
        "disable_fastapi_docs": True,
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
        # The API's defaults, not those of the checkpoint's generation config.
        "generation_config": "vllm",
    }


async def _run(given: dict[str, Any], *, port_file: Path | None, banned: list[int]) -> None:
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import setup_server

    args = argparse.Namespace(**given)
    validate_parsed_serve_args(args)
    _, listener = setup_server(args, reuse_port=False)
    with contextlib.closing(listener):
        async with build_async_engine_client(args) as engine:
            await engine.collective_rpc("ban_tokens", args=(banned,))
            port = listener.getsockname()[1]
            announcing = asyncio.create_task(_announce(args.host, port, port_file=port_file))
            # It returns when the server has stopped.
            stopping = await build_and_serve(engine, f"{args.host}:{port}", listener, args)
            announcing.cancel()
        await stopping


async def _announce(host: str, port: int, *, port_file: Path | None) -> None:
    """Print the address once the server listens, and write its port."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            break
        await asyncio.sleep(0.05)
    if port_file is not None:
        write_atomically(port_file, text=f"{port}\n")
    print(f"chat server: http://{host}:{port}/v1", flush=True)  # noqa: T201
