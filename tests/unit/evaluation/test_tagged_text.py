import pytest
from helpers.tables import table

from lmm_r1.evaluation.page import text_parts


@pytest.mark.parametrize(
    ("text", "kinds"), table("evaluation/tagged_text", "thought_and_answer_are_parts_of_their_own_and_nothing_is_lost")
)
def test_thought_and_answer_are_parts_of_their_own_and_nothing_is_lost(text, kinds):
    parts = text_parts(text)
    assert [part.kind for part in parts] == kinds
    assert "".join(part.opening + part.text + part.closing for part in parts) == text
