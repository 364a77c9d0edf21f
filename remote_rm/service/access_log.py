"""One JSON line per request, with every Nth item's prompt, response, label and score: to look at what is rewarded."""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from remote_rm.service.middleware import RequestRecord

logger = logging.getLogger(__name__)

MAX_TEXT_CHARS = 20_000
"""A longer text is logged without its middle."""


class _FileHandler(WatchedFileHandler):
    """Says in one sentence, once for each time that it begins, that no more lines can be written."""

    _fails = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._fails:
            self._fails = True
            logging.getLogger(__package__).warning(
                "--access-log %s cannot be written (%s): lines are missing until there is room; requests are answered",
                self.baseFilename,
                error.strerror,
            )

    def flush(self) -> None:
        super().flush()
        self._fails = False


class Sampler:
    """Takes every Nth item over all requests, starting with the first.

    Raises ValueError for a share outside 0 to 1.
    """

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"the share of logged items must be from 0 to 1, got {share}")
        self._step = round(1 / share) if share else None
        self._seen = 0

    def rollouts(self, items: Sequence[Any], scores: Sequence[Any]) -> list[dict[str, Any]]:
        """Return those of the items whose turn it is, with their scores."""
        if self._step is None:
            return []
        first = -self._seen % self._step
        self._seen += len(items)
        return [_rollout(items[index], scores[index]) for index in range(first, len(items), self._step)]


def log_request(record: RequestRecord) -> None:
    """Write the line of one request to this module's logger, at level INFO."""
    if not logger.isEnabledFor(logging.INFO):
        return
    line = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "items": record.items,
        "ms": round(1000 * record.seconds, 3),
    }
    logger.info(json.dumps(line | ({"rollouts": record.rollouts} if record.rollouts else {})))


def open_access_log(file: Path | None) -> None:
    """Send the lines, and nothing but them, to a file, or to stderr for None; raises OSError if it cannot be written.

    The file is appended to, and opened anew when something else has moved it away.
    """
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.StreamHandler() if file is None else _FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(message)s"))
    for earlier in logger.handlers[:]:
        logger.removeHandler(earlier)
        earlier.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _rollout(item: Any, score: Any) -> dict[str, Any]:
    given = {name: value for name, value in asdict(item).items() if value not in (None, ())}
    clipped = {name: _clipped(value) for name, value in given.items() if isinstance(value, str)}
    return given | clipped | asdict(score)


def _clipped(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[-half:]}"
