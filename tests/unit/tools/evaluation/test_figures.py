"""One figure everywhere, however it was reckoned, and responses in parts of which nothing is lost."""

import pytest
from helpers.tables import table

from lmm_r1.tools.evaluation.board import share
from lmm_r1.tools.evaluation.page import text_parts
from lmm_r1.tools.evaluation.page_parts import percent, percent_text, points, points_text


@pytest.mark.parametrize(
    ("value", "text"), table("evaluation/figures", "a_share_is_rounded_to_the_nearest_tenth_of_a_percent")
)
def test_a_share_is_rounded_to_the_nearest_tenth_of_a_percent(value, text):
    assert percent_text(value) == share(value) == text
    assert percent(value) == f"{text}\N{NO-BREAK SPACE}%"
    signed = text if value < 0 or text == "0.0" else f"+{text}"
    assert points_text(value) == points(value) == signed


def test_a_difference_has_one_figure_however_it_was_reckoned():
    """Of 400 answers, as the demo has them: each difference of 85 answers is 21.25 points."""
    found = {points_text((low + 85) / 400 - low / 400) for low in range(315)}
    assert found == {"+21.2"}
    assert len({100 * ((low + 85) / 400 - low / 400) for low in range(315)}) > 1, "floats alone differ"


@pytest.mark.parametrize(
    ("text", "kinds"), table("evaluation/tagged_text", "thought_and_answer_are_parts_of_their_own_and_nothing_is_lost")
)
def test_thought_and_answer_are_parts_of_their_own_and_nothing_is_lost(text, kinds):
    parts = text_parts(text)
    assert [part.kind for part in parts] == kinds
    assert "".join(part.opening + part.text + part.closing for part in parts) == text
