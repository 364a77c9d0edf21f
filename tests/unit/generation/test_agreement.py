"""What a run does with a kit that vLLM cannot run, or computes other log-probs for."""

import logging
from types import SimpleNamespace

import pytest
from helpers.conversations import message, picture, row
from helpers.tiny_models import altered

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig
from lmm_r1.generation.codec import CORRECTION, with_correction
from lmm_r1.lmm_kits import LmmKit, get_kit


def policy_of(kit: LmmKit) -> SimpleNamespace:
    return SimpleNamespace(kit=kit, config=SimpleNamespace())


POLICY = policy_of(altered(get_kit("llm"), engine_disagreement="the engine attends causally within images"))
TEXT, IMAGE = row(message("user", "1+1?")), row(message("user", picture(8, 8), "Which digit?"))


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_cuda", lambda: False)


def test_image_rows_of_a_kit_that_disagrees_are_corrected_per_token_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING):
        corrected = with_correction(PPOConfig(), policy=POLICY, rows=[TEXT, IMAGE])
    assert dotted.get(corrected, CORRECTION) == "token"
    (record,) = caplog.records
    assert record.getMessage() == (
        "the engine attends causally within images; its samples are corrected for that "
        "(--algo.advantage.is_correction_level token)"
    )


def test_a_correction_that_the_user_chose_stays():
    chosen = dotted.replace(PPOConfig(), {CORRECTION: "seq"})
    assert with_correction(chosen, policy=POLICY, rows=[IMAGE]) == chosen


@pytest.mark.parametrize("why", ["text rows", "agreement", "gpu"])
def test_where_both_sides_agree_nothing_is_corrected(why, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "has_cuda", lambda: why == "gpu")
    policy = policy_of(get_kit("llm")) if why == "agreement" else POLICY
    rows = [TEXT] if why == "text rows" else [IMAGE]
    assert with_correction(PPOConfig(), policy=policy, rows=rows) == PPOConfig()
    assert not caplog.records
