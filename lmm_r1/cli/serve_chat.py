"""`lmm-r1 serve_chat --model FOLDER --port 8000`: serve a checkpoint with the OpenAI chat API."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import add_access_arguments, media_access, refuse_other_names
from lmm_r1.config.generation import ChatConfig, check_chat
from remote_rm.registry import add_listening_arguments, parse_flags, positive, server_parser

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lmm_r1.chat.chat_model import ChatModel

PROG = "lmm-r1 serve_chat"
DESCRIPTION = (
    "Serve a checkpoint, for text and images, with OpenAI's chat API: for other evaluation tools, or as the judge of the "
    "verifier llm_judge."
)
PORT = 8000
RESPONSES = 64
"""Requests that are answered at a time."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; an unknown flag or a bad value ends the process with code 2."""
    parser = build_parser()
    refuse_other_names(parser, argv)
    args = parse_flags(parser, argv)
    with user_errors(PROG):
        _serve(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: the flags of the model, then those that every server has."""
    parser = server_parser(prog=PROG, description=DESCRIPTION)
    parser.add_argument(
        "--model", required=True, metavar="CHECKPOINT", help="a folder or a hub name, or an adapter's folder"
    )
    parser.add_argument("--name", help="what requests call the model; by default as --model does")
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="LoRA adapter to merge into the model")
    parser.add_argument(
        "--backend",
        choices=("vllm", "transformers"),
        default=ChatConfig.backend,
        help="what generates: vLLM, or plain transformers, which takes every architecture and one request at a time",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=ChatConfig.dtype,
        help="precision of the model; auto takes that of the weights",
    )
    parser.add_argument(
        "--max-model-len",
        type=positive(int),
        metavar="TOKENS",
        help="longest conversation with its answer; by default 8192, or what the model takes",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive(int),
        default=ChatConfig.max_new_tokens,
        metavar="TOKENS",
        help="longest answer to a request that gives no max_tokens",
    )
    parser.add_argument(
        "--max-images", type=int, default=ChatConfig.max_images, help="most images in one conversation"
    )
    parser.add_argument(
        "--max-videos", type=int, default=ChatConfig.max_videos, help="most videos in one conversation"
    )
    _add_engine_arguments(parser)
    add_access_arguments(parser, named_by="requests")
    add_listening_arguments(parser)
    parser.set_defaults(port=PORT)
    return parser


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tensor-parallel-size",
        type=positive(int),
        default=ChatConfig.tensor_parallel_size,
        help="GPUs over which vLLM splits the model",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=positive(float),
        default=ChatConfig.gpu_memory_utilization,
        help="share of a GPU's memory for vLLM",
    )
    parser.add_argument("--enforce-eager", action="store_true", default=None, help="run vLLM without CUDA graphs")
    parser.add_argument("--seed", type=int, default=ChatConfig.seed, help="seed of the sampling")


def _serve(args: argparse.Namespace) -> None:
    media = media_access(args)
    config = ChatConfig(
        model=args.model,
        adapter=args.adapter,
        backend=args.backend,
        max_model_len=args.max_model_len,
        max_images=args.max_images,
        max_videos=args.max_videos,
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enforce_eager=args.enforce_eager,
        seed=args.seed,
        trust_remote_code=args.trust_remote_code,
    )
    check_chat(config)
    from lmm_r1.chat.chat_model import load_model, model_name
    from lmm_r1.chat.server import ChatService, ServedModel, create_app
    from remote_rm.service.server import Announced, ListeningOptions, serve_app

    options = ListeningOptions.from_arguments(args)

    def load() -> "ChatModel":
        return load_model(config, responses=RESPONSES)

    def make_app(token: str | None) -> "FastAPI":
        service = ChatService(
            ServedModel(load, max_waiting=options.limits.max_queued_items),
            name=args.name or model_name(config),
            media=media,
            max_new_tokens=args.max_new_tokens,
            max_choices=options.limits.max_request_items,
        )
        return create_app(service, limits=options.limits, token=token, log_sample_share=options.log_sample_share)

    serve_app(make_app, options=options, announced=Announced(name="chat server", path="/v1"))


if __name__ == "__main__":
    run_command(main)
