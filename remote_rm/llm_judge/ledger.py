"""What is kept of a judge on disk: its verdicts, what they cost, and where they differ from the rule's.

Several processes of one machine may share a folder: SQLite's write-ahead log orders what they write, and a request is
charged before it is sent, in one statement, so that their budget is one. That log needs a disk of this machine.
"""

import json
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tenacity

DATABASE = "verdicts.sqlite"
DISAGREEMENTS = "disagreements.jsonl"
MAX_DISAGREEMENT_BYTES = 64 * 2**20
"""From this size on, no further line is written."""
BUSY_SECONDS = 30.0
"""How long a statement waits for another process's."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, is_right INTEGER NOT NULL, judged_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spending (
    id INTEGER PRIMARY KEY CHECK (id = 1), requests INTEGER NOT NULL, tokens INTEGER NOT NULL
);
INSERT OR IGNORE INTO spending VALUES (1, 0, 0);
"""
_WITHIN = "(:max_requests IS NULL OR requests < :max_requests) AND (:max_tokens IS NULL OR tokens < :max_tokens)"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What may be spent; None is no limit."""

    max_requests: int | None
    max_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class Spending:
    """What was spent by all who have used the folder."""

    requests: int
    tokens: int


class Ledger:
    """The records in one folder; opened, used and closed in one thread."""

    def __init__(self, folder: str | None, *, budget: Budget) -> None:
        """Args:
        folder: made where it is missing; None keeps everything in memory, and disagreements not at all.
        """
        self._folder = None if folder is None else Path(folder)
        self.budget = budget
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Connect; raises OSError or sqlite3.Error where the folder or its database cannot be used."""
        self._database()

    def close(self) -> None:
        """Disconnect; the next use connects again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def verdict(self, key: str) -> bool | None:
        """Return the verdict that is kept by a key, None where there is none."""
        found = self._database().execute("SELECT is_right FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if found is None else bool(found[0])

    def reserve(self) -> bool:
        """Charge one request, unless the budget is used up."""
        done = self._database().execute(
            f"UPDATE spending SET requests = requests + 1 WHERE {_WITHIN}", vars(self.budget)
        )
        return done.rowcount == 1

    def has_room(self) -> bool:
        """Return whether another request may be sent."""
        found = self._database().execute(f"SELECT 1 FROM spending WHERE {_WITHIN}", vars(self.budget))
        return found.fetchone() is not None

    def give_back(self) -> None:
        """Take back the charge of a request that no model has computed for."""
        self._database().execute("UPDATE spending SET requests = requests - 1")

    def charge(self, tokens: int) -> None:
        """Add what a reply has cost."""
        self._database().execute("UPDATE spending SET tokens = tokens + ?", (tokens,))

    def keep(self, key: str, is_right: bool) -> None:
        """Keep a verdict; the first one by a key stays."""
        self._database().execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?)", (key, is_right, time.time()))

    def spending(self) -> Spending:
        """Return what was spent."""
        requests, tokens = self._database().execute("SELECT requests, tokens FROM spending").fetchone()
        return Spending(requests=requests, tokens=tokens)

    def disagree(self, record: Mapping[str, object]) -> None:
        """Append a record to the file of disagreements, unless that has reached its size; raises OSError."""
        if self._folder is None:
            return
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **record}) + "\n"
        # One write in append mode: lines of several processes do not mix.
        with (self._folder / DISAGREEMENTS).open("ab", buffering=0) as file:
            if file.tell() + len(line) <= MAX_DISAGREEMENT_BYTES:
                file.write(line.encode())

    def _database(self) -> sqlite3.Connection:
        if self._connection is None:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            place = ":memory:" if self._folder is None else str(self._folder / DATABASE)
            connection = sqlite3.connect(place, timeout=BUSY_SECONDS, isolation_level=None)
            try:
                _prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection


def _is_locked(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


# SQLite does not wait for the lock where two processes turn the log on at the same time.
@tenacity.retry(
    retry=tenacity.retry_if_exception(_is_locked),
    stop=tenacity.stop_after_delay(BUSY_SECONDS),
    wait=tenacity.wait_random(0.01, 0.1),
    reraise=True,
)
def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    # What a power cut could lose is asked for again.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.executescript(_SCHEMA)
