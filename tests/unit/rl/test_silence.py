"""A run that waits says what for."""

import logging
import time
from dataclasses import replace

import pytest
import ray
from helpers.conversations import message, row

from lmm_r1.rl.rollouts import silence_watch

ROWS = [replace(row(message("user", "?")), location=f"rows.jsonl, line {line}") for line in range(1, 13)]


def watched(caplog, monkeypatch, *, ready_after: list[int], count: int) -> list[str]:
    """What is said while so many of `count` groups are there at one look after the other."""
    looks: list[int] = []

    def wait(refs, *, num_returns, timeout, fetch_local):
        assert (num_returns, timeout, fetch_local) == (count, 0, False)
        ready = ready_after[min(len(looks), len(ready_after) - 1)]
        looks.append(ready)
        return refs[:ready], refs[ready:]

    monkeypatch.setattr(ray, "wait", wait)
    with caplog.at_level(logging.WARNING), silence_watch(list(range(count)), ROWS, after_s=0.01):
        end = time.monotonic() + 10
        while len(looks) < len(ready_after) and time.monotonic() < end:
            time.sleep(0.005)
    assert len(looks) >= len(ready_after)
    return [record.getMessage() for record in caplog.records]


def test_nothing_is_said_while_groups_come(caplog, monkeypatch):
    assert watched(caplog, monkeypatch, ready_after=[1, 2, 3, 4, 5], count=5) == []


@pytest.mark.parametrize(
    ("ready", "count", "named"),
    [(2, 4, "(rows.jsonl, line 3; rows.jsonl, line 4): "), (0, 12, "rows.jsonl, line 8 and 4 more): ")],
)
def test_a_few_of_the_rows_that_are_awaited_are_named(ready, count, named, caplog, monkeypatch):
    said, *_ = watched(caplog, monkeypatch, ready_after=[ready, ready], count=count)
    start = f"no group has come for 0.01 s, and {count - ready} of {count} are awaited (rows.jsonl, line "
    assert (said.startswith(start), named in said) == (True, True), said
