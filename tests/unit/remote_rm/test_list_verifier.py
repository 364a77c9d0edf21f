import pytest
from helpers.tables import table

from remote_rm.list_verifier import ListVerifier, is_list, items_of, matches, quick_match
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "text",
    table("remote_rm/list_verifier", "the_ways_to_write_a_list"),
)
def test_the_ways_to_write_a_list(text):
    assert items_of(text) == ["1", "3", "5"]


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("dark red, light green", ["dark red", "light green"]),
        ("(1, 2), (3, 4)", ["(1, 2)", "(3, 4)"]),
        ("1,234", ["1", "234"]),
        ("5", ["5"]),
        ("1.5 2.5", ["1.5", "2.5"]),
        ("red green", ["red green"]),
    ],
)
def test_the_elements_of_a_list(text, items):
    assert items_of(text) == items


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    table("remote_rm/list_verifier", "an_ordered_list_is_compared_element_by_element"),
)
def test_an_ordered_list_is_compared_element_by_element(answer, label, is_right):
    assert matches(answer, label) is is_right


@pytest.mark.parametrize(
    ("answer", "label", "is_right"),
    table("remote_rm/list_verifier", "an_unordered_list_gives_each_element_a_partner_of_its_own"),
)
def test_an_unordered_list_gives_each_element_a_partner_of_its_own(answer, label, is_right):
    assert matches(answer, label, unordered=True) is is_right


@pytest.mark.parametrize("unordered", [False, True])
def test_expressions_and_long_lists_are_left_to_a_worker(unordered):
    assert quick_match(r"\sqrt[3]{16}, 1", r"2\sqrt[3]{2}, 1", unordered=unordered) is None
    assert quick_match("3, 2", r"2\sqrt[3]{2}, 1", unordered=unordered) is False
    hundred = ", ".join(str(number) for number in range(100))
    assert quick_match(hundred, hundred, unordered=unordered) is None
    assert matches(hundred, hundred, unordered=unordered)
    assert quick_match(f"{hundred}, 100", hundred, unordered=unordered) is False


@pytest.mark.parametrize("label", ["1,,3", ", 1", r"1, \frac{", "x, " * 400])
def test_a_label_with_an_element_that_cannot_be_read_is_reported_as_ungradable_and_never_scores(label):
    assert not is_list(label)
    response = f"<think>t</think><answer>{label}</answer>"
    score = ListVerifier().quick_score(Item(prompt="p", response=response, label=label))
    assert score.parts == {"accuracy": 0.0, "format": 1.0, "ungradable": 1.0}
