"""What each service is told of a run, by its flags."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmm_r1 import dotted
from lmm_r1.config import SFTConfig
from lmm_r1.config.shared import LoggerConfig
from lmm_r1.records.tracker_backends import BACKENDS, Session

SHARED = {"logger.wandb.project": "ours", "logger.wandb.run_name": "first", "logger.wandb.group": "both"}


def session(folder: Path, **flags: object) -> Session:
    config = dotted.replace(SFTConfig(), SHARED | {name.replace("__", "."): value for name, value in flags.items()})
    logger: LoggerConfig = config.logger
    return Session(logger=logger, folder=folder, settings={}, earlier=None)


def played_init(told: dict[str, Any]) -> Any:
    def init(**given: Any) -> SimpleNamespace:
        told.update(given)
        return SimpleNamespace(id="1", define_metric=lambda *names, **given: None)

    return init


def test_wandb_is_told_team_project_group_name_and_mode(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", exc_type=ImportError)
    told: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", played_init(told))
    BACKENDS["wandb"].open(session(tmp_path, logger__wandb__org="us", logger__wandb__mode="offline"))
    wanted = {"entity": "us", "project": "ours", "group": "both", "name": "first", "mode": "offline", "settings": None}
    assert wanted.items() <= told.items()
    BACKENDS["wandb"].open(session(tmp_path, logger__wandb__key="hush"))
    assert told["settings"].api_key == "hush"
