"""What docs/agents.md says of the speed of episodes is what was measured; the rows that are compared ask for as much."""

import argparse
import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from episodes import BEGIN, END, Calling, in_one_turn, make_rows, table_of
from helpers.episodes import answers_of

from lmm_r1.data.messages import ImagePart, Message, TextPart, images_of
from lmm_r1.data.sample import Said

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[3]
SIZES = argparse.Namespace(episodes=2, crop_pixels=56 * 56, image_side=112)


def test_the_page_has_the_measured_figures():
    result = json.loads((ROOT / "benchmarks/results/episodes.json").read_text())
    assert BEGIN + table_of(result) + END in (ROOT / "docs/agents.md").read_text()
    assert (result["episodes"], result["turns"]) == (16, 12)
    for entry in result["kinds"].values():
        assert entry["episodes"]["context_tokens"] == pytest.approx(entry["in_one_turn"]["context_tokens"], rel=0.05)


@pytest.mark.parametrize(("kind", "images"), [("text", 0), ("images", 3)])
def test_every_turn_is_answered_with_what_the_kind_says(kind, images):
    row, _ = make_rows(kind, SIZES, seed=0)
    answers = asyncio.run(answers_of(Calling(kind, SIZES), row, ["noise"] * 3))
    parts = [part for answered in answers for part in answered.shown]
    assert sum(isinstance(part, ImagePart) for part in parts) == images
    assert not any(answered.is_over for answered in answers)


def test_in_one_turn_the_prompt_has_all_that_was_shown():
    row, _ = make_rows("images", SIZES, seed=0)
    crop = ImagePart(images_of(row.messages)[0].source)
    said = (Said("assistant", "noise"), Said("user", "This is <image>!", (crop,)), Said("assistant", "noise"))
    joined = in_one_turn(SimpleNamespace(played=SimpleNamespace(said=said)), row)
    assert joined.messages == (
        *row.messages,
        Message(role="assistant", parts=(TextPart(""),)),
        Message(role="user", parts=(TextPart("This is "), crop, TextPart("!"))),
    )
