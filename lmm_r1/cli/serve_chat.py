"""`lmm-r1 serve_chat --model FOLDER --port 8000`: serve a checkpoint with the OpenAI chat API."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import refuse_other_names
from lmm_r1.config.generation import ChatConfig, check_chat
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable
from remote_rm.registry import add_address_arguments, parse_flags, positive, server_parser

PROG = "lmm-r1 serve_chat"
DESCRIPTION = (
    "Serve a checkpoint, for text and images, with OpenAI's chat API: vLLM's own server, for other evaluation tools, or "
    "for the verifier llm_judge."
)
PORT = 8000


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; an unknown flag or a bad value ends the process with code 2."""
    parser = build_parser()
    refuse_other_names(parser, argv)
    args = parse_flags(parser, argv)
    with user_errors(PROG):
        _serve(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: the flags of the model, of what requests may read, and of the address."""
    parser = server_parser(prog=PROG, description=DESCRIPTION)
    add = parser.add_argument
    add("--model", required=True, metavar="CHECKPOINT", help="a folder or a hub name, or an adapter's folder")
    add("--name", help="what requests call the model; by default as --model does")
    add("--adapter", type=Path, metavar="FOLDER", help="LoRA adapter to merge into the model")
    dtypes = ("auto", "float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default=ChatConfig.dtype, help="precision; auto takes that of the weights")
    length = "longest conversation with its answer; by default 8192, or what the model takes"
    add("--max-model-len", type=positive(int), metavar="TOKENS", help=length)
    add("--max-images", type=int, default=ChatConfig.max_images, help="most images in a conversation")
    add("--max-videos", type=int, default=ChatConfig.max_videos, help="most videos in a conversation")
    gpus = "GPUs over which vLLM splits the model"
    add("--tensor-parallel-size", type=positive(int), default=ChatConfig.tensor_parallel_size, help=gpus)
    add("--gpu-memory-utilization", type=positive(float), help="share of a GPU's memory for vLLM")
    add("--enforce-eager", action="store_true", default=None, help="run vLLM without CUDA graphs")
    add("--seed", type=int, default=ChatConfig.seed, help="seed of the sampling")
    root = "folder below which images and videos that requests name by a file:// URL are read"
    add("--image-root", type=Path, metavar="FOLDER", help=root)
    urls = "hosts from which images and videos that requests name by an http(s) URL are fetched"
    add("--allow-urls", nargs="+", default=[], metavar="HOST", help=urls)
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the checkpoint")
    add_address_arguments(parser)
    parser.set_defaults(port=PORT)
    add("more", nargs="*", metavar="-- FLAGS", help="flags of `vllm serve` that are not listed here, after --")
    return parser


def _serve(args: argparse.Namespace) -> None:
    if args.image_root is not None and not args.image_root.is_dir():
        raise UserError(f"--image_root {args.image_root}: no such folder; check the path")
    token = os.environ.get(args.token_env or "", "").strip() or None
    if args.token_env and token is None:
        raise UserError(f"--token_env {args.token_env}: the environment variable is not set; export it")
    if args.port_file is not None:
        check_creatable(args.port_file, flag="--port_file")
    config = ChatConfig(
        model=args.model,
        adapter=args.adapter,
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
    from lmm_r1.chat.chat_model import model_name
    from lmm_r1.chat.server import ServedModel, serve
    from remote_rm.service.access import check_access

    try:
        check_access(args.host, token=token, is_insecure=args.insecure)
    except ValueError as error:
        raise UserError(str(error)) from error
    served = ServedModel(
        host=args.host,
        port=args.port,
        port_file=args.port_file,
        name=args.name or model_name(config),
        token=token,
        image_root=args.image_root,
        url_hosts=args.allow_urls,
    )
    serve(config, served, more=args.more)


if __name__ == "__main__":
    run_command(main)
