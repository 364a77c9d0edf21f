"""Wordings that still get past the rules, as the tests and the kinds of labels in which some of them do."""

import pytest

OPEN_FAULTS: dict[str, frozenset[str]] = {
    # `It is C (30°).`; Chinese yes and no within English; `It's the empty set.`
    "test_an_answer_stays_right_in_every_sentence_and_mark_up_that_says_it": frozenset(
        {"lettered", "yes or no", "set"}
    ),
    "test_an_answer_that_is_denied_doubted_or_bounded_is_wrong": frozenset({"quantity", "yes or no"}),
    # `y = 5 but y = 6`; `A4 and 4A`; `(1) 75% (2) 50%`.
    "test_two_answers_are_right_for_neither": frozenset({"percentage", "yes or no", "code", "equation"}),
    # `$Saturday$ is undefined`.
    "test_a_second_answer_is_right_for_at_most_one": frozenset({"yes or no", "word"}),
    # `3 in base 3`.
    "test_a_word_that_makes_another_number_makes_it_wrong": frozenset({"3"}),
    # `1, 3, 6 (red, blue)`.
    "test_two_answers_are_right_for_neither_in_every_layout": frozenset({"list", "unordered list"}),
    # `5000 g` and `18 km/h` for the bare numbers, which a missing unit allows.
    "test_every_spelling_is_right_for_no_label_that_is_apart": frozenset({"number"}),
}


def expect_open_faults(request: pytest.FixtureRequest) -> None:
    """Expect the test to fail where one of its wordings is known to get past the rules; what is mended is to leave here."""
    given = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    name = getattr(request.node, "originalname", request.node.name)
    if OPEN_FAULTS.get(name, frozenset()) & {str(value) for value in given}:
        request.applymarker(pytest.mark.xfail(strict=False, reason="a wording that is still judged wrongly"))
