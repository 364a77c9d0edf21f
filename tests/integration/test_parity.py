"""`lmm-r1 kits --parity` on a tiny model: engine and training agree on text and images, before and after an update."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands_here import start_anew

from lmm_r1.cli.kits import certify

pytestmark = pytest.mark.full


@pytest.mark.usefixtures("own_environment")
def test_a_sound_checkpoint_agrees_as_loaded_and_after_an_update(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_anew(monkeypatch)
    told, gaps = certify(str(tiny_checkpoint("qwen2_5_vl")), max_len=256, dtype="fp32", settings=None)
    assert told.startswith("qwen2_5_vl: ")
    assert [(gap.rows, gap.weights, gap.verdict) for gap in gaps] == [
        (rows, weights, "agree") for weights in ("as loaded", "after an update") for rows in ("text", "image")
    ]
    assert all(0 < gap.mean < 1e-4 for gap in gaps)
