"""What libraries write to stdout and stderr, kept off the screen and told only if the program breaks."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from lmm_r1.errors import UserError

_TOLD_BYTES = 4000


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The stdout and stderr that the user sees."""

    out: TextIO
    err: TextIO


@contextlib.contextmanager
def captured_output() -> Iterator[Streams]:
    """Lead file descriptors 1 and 2 to a temporary file, and give streams to where they led.

    Native code and child processes write to the descriptors, past `sys.stdout`. Where anything but what the user did
    ends the program, the last of what was kept comes out before the traceback.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    with tempfile.TemporaryFile() as kept:
        for descriptor in saved:
            os.dup2(kept.fileno(), descriptor)
        streams = Streams(out=_stream(saved[1]), err=_stream(saved[2]))
        try:
            yield streams
        except (UserError, KeyboardInterrupt):
            raise
        except BrokenPipeError:
            # What is still in a buffer has no reader.
            with open(os.devnull, "wb") as nowhere:
                for original in saved.values():
                    os.dup2(nowhere.fileno(), original)
            raise
        except Exception:
            sys.stdout.flush()
            kept.seek(max(0, kept.seek(0, os.SEEK_END) - _TOLD_BYTES))
            os.write(saved[2], kept.read())
            raise
        finally:
            for stream in (streams.out, streams.err, sys.stdout, sys.stderr):
                stream.flush()
            for descriptor, original in saved.items():
                os.dup2(original, descriptor)
                os.close(original)


def _stream(descriptor: int) -> TextIO:
    return open(descriptor, "w", encoding="utf-8", errors="replace", closefd=False, buffering=1)
