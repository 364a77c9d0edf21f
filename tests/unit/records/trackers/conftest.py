"""Tracking libraries that ask no server, and keep what they write out of the home folder."""

from pathlib import Path

import pytest
from helpers.tracked_runs import keep_offline


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of its own, without keys."""
    home = tmp_path_factory.mktemp("home")
    keep_offline(home, monkeypatch)
    return home
