"""What a worker process does: it judges one item at a time, within limits of processor time and memory."""

from __future__ import annotations

import json
import resource
import signal
from dataclasses import asdict

from remote_rm.verifier import Item, Verifier

PRELOADED_MODULES = ("sympy", "math_verify", "remote_rm.service.worker", "remote_rm.service.warm_start")
"""Imported once, in the process that workers are forked from, so that a killed worker is replaced in milliseconds."""

_verifier: Verifier | None = None


def prepare(verifier: Verifier, memory_bytes: int) -> None:
    """Keep the verifier of this worker, and limit its memory."""
    global _verifier
    _verifier = verifier
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def is_ready() -> bool:
    """Return whether the worker has its verifier."""
    return _verifier is not None


def verdict(item: Item, seconds: float) -> tuple[str | None, str]:
    """Return the score as JSON, or None, and then why there is none.

    After so many seconds of processor time, the kernel ends the process with SIGPROF.
    """
    assert _verifier is not None
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return json.dumps(asdict(_verifier.score(item))), ""
    except BaseException as error:
        # The text comes from a model: if a rule fails on it, the server decides its score.
        return None, f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
