"""`lmm-r1 serve_rm --model FOLDER --port 5000`: rewards by a trained reward model, over HTTP."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import refuse_other_names
from lmm_r1.config.hardware import default_param_dtype
from lmm_r1.config.supervised import RMDeepSpeedConfig
from lmm_r1.data.media_access import MEGAPIXELS, MediaLimits
from lmm_r1.errors import UserError
from remote_rm.registry import add_listening_arguments, parse_flags, positive, server_parser

if TYPE_CHECKING:
    from lmm_r1.scoring.reward_model import RewardModel

PROG = "lmm-r1 serve_rm"
DESCRIPTION = "Serve the rewards of a trained reward model for text and images in OpenRLHF's remote reward protocol."


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM; an unknown flag or a bad value ends the process with code 2."""
    parser = build_parser()
    refuse_other_names(parser, argv)
    args = parse_flags(parser, argv)
    with user_errors(PROG):
        _serve(args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: the flags of the model, then those that every reward server has."""
    parser = server_parser(prog=PROG, description=DESCRIPTION)
    parser.add_argument("--model", required=True, metavar="CHECKPOINT", help="reward model: a folder or a hub name")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="precision of the weights, as in training: by default bf16, or fp32 on a CPU without bf16 instructions",
    )
    parser.add_argument(
        "--max-len",
        type=positive(int),
        default=4096,
        metavar="TOKENS",
        help="longest prompt and response together; a longer sample is refused with 422, never cut",
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=positive(int),
        metavar="TOKENS",
        help="tokens of the samples, of one or many requests, that are computed together; by default 16384 on a GPU, and "
        "1024 on a CPU",
    )
    parser.add_argument(
        "--normalize", action="store_true", help="normalize rewards by the mean and deviation in the model's config"
    )
    parser.add_argument(
        "--value-head-prefix",
        default=RMDeepSpeedConfig.value_head_prefix,
        metavar="NAME",
        help="name of the value head's weight, if the model's config does not contain it",
    )
    _add_access(parser)
    add_listening_arguments(parser)
    return parser


def _add_access(parser: argparse.ArgumentParser) -> None:
    """Add the flags of what the server may read and run."""
    add = parser.add_argument
    roots = "folder below which images and videos that prompts name by their path are read; may be given several times"
    add("--image-root", type=Path, action="append", default=[], metavar="FOLDER", help=roots)
    add("--allow-urls", action="store_true", help="fetch images that prompts name by an http(s) URL")
    private = "with --allow-urls: fetch from this machine and from private networks, too"
    add("--allow-private-urls", action="store_true", help=private)
    most = "refuse images with more pixels, in millions, before they are decoded"
    add("--max-image-megapixels", type=positive(float), default=MEGAPIXELS, metavar="NUMBER", help=most)
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the checkpoint")


def _serve(args: argparse.Namespace) -> None:
    for root in args.image_root:
        if not root.is_dir():
            raise UserError(f"--image_root {root}: no such folder; check the path")
    from lmm_r1 import cpu
    from lmm_r1.data.sent_prompt import MediaAccess
    from lmm_r1.lmm_kits.registry import kit_name_of
    from lmm_r1.scoring.reward_judge import serve

    # Checked before PyTorch is loaded, so that a refusal is fast.
    kit_name_of(args.model, trust_remote_code=args.trust_remote_code)

    dtype = args.dtype or default_param_dtype(flag="dtype")

    def load() -> "RewardModel":
        cpu.prepare_process()
        from lmm_r1.scoring.reward_model import RewardModel

        return RewardModel(
            args.model,
            dtype=dtype,
            max_len=args.max_len,
            max_batch_tokens=args.max_batch_tokens,
            value_head_prefix=args.value_head_prefix,
            normalize=args.normalize,
            trust_remote_code=args.trust_remote_code,
        )

    MediaLimits(max_megapixels=args.max_image_megapixels, allow_private_urls=args.allow_private_urls).apply()
    serve(load, media=MediaAccess(roots=tuple(args.image_root), allow_urls=args.allow_urls), args=args)


if __name__ == "__main__":
    run_command(main)
