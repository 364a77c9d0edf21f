"""The command-line flags that every reward server shares."""

import argparse
import os
from pathlib import Path

DEFAULT_WORKERS = min(4, os.cpu_count() or 1)


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the HTTP server and its worker pool."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 opens it to the network")
    parser.add_argument("--port", type=_port, default=5000, help="port to listen on; 0 picks a free one")
    parser.add_argument("--port-file", type=Path, default=None, help="file to write the port to once it listens")
    parser.add_argument("--workers", type=_positive(int), default=DEFAULT_WORKERS, help="judging processes")
    parser.add_argument(
        "--item-timeout-seconds",
        type=_positive(float),
        default=5.0,
        help="wall time after which one answer counts as wrong and its worker is replaced",
    )


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port: give 0 to 65535")
    return port


def _positive(number: type[int] | type[float]):
    def parse(text: str) -> int | float:
        value = number(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    parse.__name__ = number.__name__
    return parse
