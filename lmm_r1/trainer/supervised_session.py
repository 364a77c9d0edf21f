"""A supervised run between its start and its end, as each of its processes has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from lmm_r1.config import SupervisedConfig
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Trackers
from lmm_r1.trainer.stopping import StopRequests
from lmm_r1.trainer.strategy import KitStrategy

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


@dataclass(frozen=True, kw_only=True)
class Session(Generic[ConfigT]):
    """What its models and its loop are made with."""

    config: ConfigT
    checkpoint: Checkpoint
    """Of the model that is trained."""
    strategy: KitStrategy
    folder: RunFolder
    stops: StopRequests
    trackers: Trackers
    steps: int
    """Updates of the whole run, over which the learning rate follows its schedule."""
