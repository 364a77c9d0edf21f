"""What the commands that serve a model over HTTP have in common: the beginning of their flags, and which media they read."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from lmm_r1.data.media_access import MEGAPIXELS, MediaLimits
from lmm_r1.errors import UserError
from remote_rm.registry import positive

if TYPE_CHECKING:
    from lmm_r1.data.sent_prompt import MediaAccess


def model_server_parser(*, prog: str, description: str, model: str) -> argparse.ArgumentParser:
    """Return a parser with the flag of the checkpoint.

    Args:
        model: what --model takes.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, metavar="CHECKPOINT", help=model)
    return parser


def add_access_arguments(parser: argparse.ArgumentParser, *, named_by: str) -> None:
    """Add the flags of what the server may read and run.

    Args:
        named_by: what names images in the requests.
    """
    parser.add_argument(
        "--image-root",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help=f"folder below which images and videos that {named_by} name by their path are read; may be given several times",
    )
    parser.add_argument(
        "--allow-urls", action="store_true", help=f"fetch images that {named_by} name by an http(s) URL"
    )
    parser.add_argument(
        "--allow-private-urls",
        action="store_true",
        help="with --allow-urls: fetch from this machine and from private networks, too",
    )
    parser.add_argument(
        "--max-image-megapixels",
        type=positive(float),
        default=MEGAPIXELS,
        metavar="NUMBER",
        help="refuse images with more pixels, in millions, before they are decoded",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the checkpoint"
    )


def media_access(args: argparse.Namespace) -> "MediaAccess":
    """Return the allowed sources of images and videos; raises UserError if a root is not a folder."""
    for root in args.image_root:
        if not root.is_dir():
            raise UserError(f"--image_root {root}: no such folder; check the path")
    from lmm_r1.data.sent_prompt import MediaAccess

    MediaLimits(max_megapixels=args.max_image_megapixels, allow_private_urls=args.allow_private_urls).apply()
    return MediaAccess(roots=tuple(args.image_root), allow_urls=args.allow_urls)
