"""`trackers.json` of a run folder: under what a run is known to each service, and how far each one has got."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import write_json_object

TRACKERS_FILE = "trackers.json"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One service."""

    identity: str
    last_steps: dict[str, int]
    """By what was sent: the last step of it."""


class TrackerRecord:
    """The file's content, which is written anew, atomically, whenever something changes."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        """Read the records of an earlier session where `resumed`; a run that starts anew forgets them.

        Raises UserError where the file cannot be read.
        """
        self.path = path
        self._entries = _read(path) if resumed and path.exists() else {}
        self._before = {name: dict(entry.last_steps) for name, entry in self._entries.items()}

    def identity(self, name: str) -> str | None:
        """Return what the tracker was called before, None for one that is new."""
        return self._entries[name].identity if name in self._entries else None

    def identify(self, name: str, identity: str) -> None:
        """Note what the tracker is called; a new name starts with no steps."""
        if self.identity(name) != identity:
            self._entries[name] = _Entry(identity=identity, last_steps={})
            self._before.pop(name, None)
            self._write()

    def is_repeated(self, name: str, *, kind: str, step: int) -> bool:
        """Return whether an earlier session has sent this already."""
        return step <= self._before.get(name, {}).get(kind, -1)

    def note(self, name: str, *, kind: str, step: int) -> None:
        """Note that something has been sent."""
        self._entries[name].last_steps[kind] = step
        self._write()

    def _write(self) -> None:
        write_json_object(self.path, {name: asdict(entry) for name, entry in self._entries.items()})


def _read(path: Path) -> dict[str, _Entry]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: _Entry(identity=entry["identity"], last_steps=entry["last_steps"]) for name, entry in entries.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error!r}); remove it, and every tracker starts a new run"
        ) from error
