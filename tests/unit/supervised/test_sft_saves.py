"""What a supervised run saves, and how often it says how far it is."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.character_kit import CharacterKit
from helpers.sessions import configured, session_of

from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.models.image_features import FeatureCounts
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.supervised.sft import SFTRun
from lmm_r1.train.stopping import SaveSchedule


class Strategy(SimpleNamespace):
    """Keeps what is saved."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def is_rank_0(self) -> bool:
        return True

    def save_model(self, model: object, processor: object, folder: str) -> None:
        self.calls.append(Path(folder).name)

    def save_ckpt(self, model: object, folder: str, tag: str, *limits: Any, **metric: object) -> None:
        self.calls.append((Path(folder).name, tag, *limits, *metric.values()))


def run(tmp_path: Path, **flags: object) -> tuple[SFTRun, Strategy]:
    strategy = Strategy()
    actor = SimpleNamespace(model=None, take_feature_counts=FeatureCounts)
    config = configured(SFTConfig, ckpt__output_dir=str(tmp_path), **flags)
    folder = RunFolder(path=tmp_path, name=config.logger.stage_name, kind="sft")
    session = session_of(config, strategy, kit=CharacterKit(), folder=folder)
    return SFTRun(session, actor, rows=[], encode=None, filler=None), strategy


def test_a_checkpoint_is_saved_within_the_limits_and_where_the_flags_say(tmp_path):
    made, strategy = run(tmp_path, ckpt__max_num=2, ckpt__max_mem=7, ckpt__path=str(tmp_path / "elsewhere"))
    made._save(3)
    assert strategy.calls == [("elsewhere", "global_step3", 2, 7, {"global_step": 3}, None, None)]
    assert made.saved_step == 3


@pytest.mark.parametrize("config_class", [PPOConfig, SFTConfig])
def test_checkpoints_are_due_by_steps_and_by_minutes(config_class):
    config = configured(config_class, ckpt__save_steps=2, ckpt__save_minutes=5.0)
    schedule = SaveSchedule.of(config.ckpt)
    assert [schedule.is_due(step) for step in (1, 2, 3)] == [False, True, False]
    schedule.saved_at -= 5 * 60
    assert schedule.is_due(3)
