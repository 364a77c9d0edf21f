"""Boxes that a model writes are compared with those of rows in pixels of the image as it is stored, however it is shown."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from helpers.tables import kits_with

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Row
from lmm_r1.data.reading import RowReading
from lmm_r1.generation.request import PromptCodec
from lmm_r1.lmm_kits import EncodedPrompt
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.sources import RowClient, make_scorer
from remote_rm.box_verifier import BoxVerifier
from remote_rm.client import SentSample, _payload
from remote_rm.reward_function import reward_func_of
from remote_rm.service.app import create_app
from remote_rm.verifier import Score

CASES = Path(__file__).resolve().parents[1] / "data" / "cases"
THOUSANDTHS = {"qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "internvl"}
# Of 1000 x 800 pixels there are 36 x 29 squares of 28 x 28. Of 100 at most, sides shrink by sqrt(78400 / 800000) = 0.313,
# to 11.2 and 8.9 squares: 11 x 8, which are 308 x 224 pixels.
MOST_PIXELS = 100 * 28 * 28
# The label is [250, 200, 750, 600]: x from 1/4 to 3/4 of the width, and y of the height.
WRITTEN = {"qwen2_5_vl": "[77, 56, 231, 168]", **dict.fromkeys(THOUSANDTHS, "[250, 250, 750, 750]")}


def the_row(**reading: int) -> Row:
    (row,) = read_row_file(str(CASES / "F10_box_scaled_image.jsonl"), reading=RowReading(**reading)).rows.values()
    assert row.answer == "[250, 200, 750, 600]"
    return row


@dataclass(frozen=True)
class Shown:
    """A row as a kit encodes it."""

    row: Row
    prompt: EncodedPrompt

    def answered(self, text: str) -> ScoredResponse:
        return ScoredResponse(
            row=self.row, prompt="p", query="q", response=text, num_tokens=1, image_scales=self.prompt.image_scales
        )


@pytest.fixture
def shown(tiny_checkpoint: Callable[[str], Path]) -> Callable[..., Shown]:
    def encoded(name: str, **reading: int) -> Shown:
        row = the_row(**reading)
        return Shown(row, PromptCodec.of(str(tiny_checkpoint(name)), trust_remote_code=False).encode(row))

    return encoded


def by_verifier(item: ScoredResponse) -> Score:
    async def scored() -> Score:
        scorer = make_scorer(RewardConfig(remote_url="box"))
        (score,) = await scorer.rewards([item])
        await scorer.close()
        return score

    return asyncio.run(scored())


@pytest.mark.parametrize("name", kits_with("images"))
def test_an_answer_in_the_models_own_coordinates_meets_a_label_in_stored_pixels(name, shown):
    bounds = {"max_pixels": MOST_PIXELS} if name == "qwen2_5_vl" else {}
    made = shown(name, **bounds)
    expected = {"qwen2_5_vl": (1000 / 308, 800 / 224), **dict.fromkeys(THOUSANDTHS, (1.0, 0.8))}.get(name)
    assert made.prompt.image_scales == (() if expected is None else (pytest.approx(expected),))
    # Where a release was not trained to write coordinates, they are compared as they are written.
    score = by_verifier(made.answered(WRITTEN.get(name, "[250, 200, 750, 600]")))
    assert score.parts["iou"] == pytest.approx(1.0)


def test_scales_travel_to_a_reward_server_without_a_flag(shown):
    made = shown("qwen2_5_vl", max_pixels=MOST_PIXELS)
    further = RowClient(None, fields=())._further(made.answered(WRITTEN["qwen2_5_vl"]))
    samples = [
        SentSample(query="q", prompt="p", label=made.row.answer, response=text, further=further)
        for text in (WRITTEN["qwen2_5_vl"], "[250, 200, 750, 600]")
    ]
    client = TestClient(create_app(BoxVerifier(), workers=1, item_timeout_seconds=1.0))
    reply = client.post("/get_reward", json=_payload(samples)).json()
    assert reply["scores"] == pytest.approx([1.0, 0.0])
    # One of OpenRLHF, which sends none, is judged as it is written.
    request = {name: value for name, value in _payload(samples).items() if name != "image_scales"}
    assert client.post("/get_reward", json=request).json()["scores"][1] == 1.0


def test_a_function_in_a_file_is_given_them_too(shown):
    made = shown("qwen2_5_vl", max_pixels=MOST_PIXELS)
    given = {"responses": [WRITTEN["qwen2_5_vl"]], "image_scales": [made.prompt.image_scales], "images": [[]]}
    reply = reward_func_of("box")(["q"], ["p"], [made.row.answer], **given)
    assert reply["scores"] == pytest.approx([1.0])
