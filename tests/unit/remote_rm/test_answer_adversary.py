"""Responses put together from labels and words are not right for two labels of which no answer may be both."""

import pytest
from helpers.answer_adversary import search

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit

# What other seeds have found.
FOUND = [
    ("So £5 = x = $5.", "£5", r"\$5"),
    (r"\$5$12not 5 GBP' and ", "£5", r"\$5"),
    (" vs $5 yuan{ times €32,348£5 in ", "5元", "£5"),
    (r"\boxed{\text{(4, 3) was y=4, x=3}}", "(4, 3)", "(3, 4)"),
    (r"<answer>x=3, y=4, not x \ge 3</answer>", "(3, 4)", r"4 \pmod{7}"),
    ("<answer>**(4, 3)**; The answer is: x=3, y=4</answer>", "(3, 4)", r"4 \pmod{7}"),
    (r"**Answer:** 5 m/sfive years\text{", "5 m/s", "5 years"),
    ("**Answer:** 5cmthe five years(A) ) ", "5 cm", "5 years"),
    (r"\boxed{ == 5 cm5 m/s equals  for this, five years}", "5 cm", "5 years"),
    (r"\{12 centimeters, 12 kg, 12 s\}", "12 cm", "12 s"),
    ("25 °C in one case and 12 s in the other.", "12 s", "12 m"),
    ("The answer is It depends: 12 s here, 12 m there..", "12 s", "12 m"),
    ("The answer is 1, 3, 6'+$2$ and $3$ with AC namely  equals ", "2, 3", "AC"),
    ("<answer>$2$ and $3$ was red and blue</answer>", "2, 3", "red, blue"),
    ("<answer>$XIV$ = AB3</answer>", "XIV", "AB3"),
    ("<answer>B-Odd-above</answer>", "B", "above"),
    ("<answer>B-It is 8 volts.</answer>", "B", "8 V"),
    (r"Answer: A), It is 4 \pmod{7}.", "A", r"4 \pmod{7}"),
    (r"\boxed{C, so No, it is not., so false}", "C", "No"),
    ("<answer>A = no, B = 是</answer>", "是", "否"),
    ("<answer>The answer is red, blue. with **是**</answer>", "red, blue", "是"),
    ("<answer>It's True. rather than **False**</answer>", "True", "False"),
    ("The answer is True、It is left..", "True", "left"),
    ("<answer>thirteen、Above</answer>", "13", "above"),
    (r"\$32348\boxed{和12 dollarsThe answer is 32,348€The answer is ", r"\$32,348", "32,348€"),
    (
        "<answer>The final answer is (-\\infty, 1) \\cup (2, \\infty).\n\nIt is 1 \\le x < 2.</answer>",
        r"(-\infty, 1) \cup (2, \infty)",
        "[1, 2)",
    ),
    ("So 12 s5 cm12 kg$。.", "12 s", "12 kg"),
    ("**Answer:**  - 12 m(five years12秒~", "12 m", "12 s"),
    (".\n90 minmaybe %5 cm at 90°)  over ", "90 minutes", "90°"),
    ("The answer is  should be 12 m、_12 kg**12 km. ", "12 m", "12 km"),
    (r"\boxed{\text{ can't be . 90 minutes isn't 12 cm \approx 。12 s#### }}", "12 cm", "12 s"),
    ("**Answer:** B, It's False.", "B", "False"),
    ("Thus, $five thousand (left)$.", "5000", "left"),
    ("**Answer:** 'It should be B.' becomes '75%'", "B", "75%"),
    ("<answer>'True.' should be '蓝色'</answer>", "True", "蓝色"),
    (r"\boxed{0,100}", "[0, 100]", "100"),
    ("**Answer:** x = 0 vs x = CO2", "0", "CO2"),
    ("It is It's North.和**New York**.", "north", "New York"),
    (r"The answer is **Answer:** A, so It is 2\frac{1}{2}..", "A", "5/2"),
    (r"\boxed{ 等于  plus 5 GBP) 32,348€<answer> be 5 eurosAnswer:  means }", "£5", "€5"),
    (r"\boxed{B, thus  must be New York, not  can't be 5-15 means  could be }", "B", "New York"),
    ("答案是above | twenty", "above", "20"),
    ("<answer>seven and the empty set</answer>", "7", r"\emptyset"),
    ("答案是~True. namely 8:6 gives 1", "True", "1"),
    ("<answer>A)It is false. gives </answer>", "A", "False"),
    (r"\boxed{\text{'B) 12' should be '2:4:6'}}", "(B) 12", "1:2:3"),
    ("It is A -> x=1, y=2.", "A", "(1, 2)"),
    ("Thus, $, . No, 答案是D，$blue$.", "D", "blue"),
    ("Thus, $The answer is D-$5 gives y = 2x + 3.$.", "D", "y = 2x + 3"),
    (r"Thus, $Therefore \$32,348: $5: £5 = 32,348€$.", "32,348€", r"\$32,348"),
    (r"\boxed{\text{The correct answer is left. per **Paul**}}", "left", "Paul"),
]


@pytest.mark.parametrize(("response", "label", "other"), FOUND)
def test_what_was_found_is_right_for_one_label_at_most(response: str, label: str, other: str):
    for name in ("math", "number", *(["list"] if "," in label else [])):
        verifier = get_verifier(name)
        items = [Item(prompt="", response=response, label=text) for text in (label, other)]
        assert sum(verifier.score(item).parts["accuracy"] for item in items) <= 1, name


def test_ten_thousand_responses_are_right_for_no_two_labels():
    found = search(seed=17, responses=10_000, max_by_sympy=200)
    assert found.breaks == [], found.report()


@pytest.mark.full
@pytest.mark.slow
def test_twenty_thousand_other_responses_are_right_for_no_two_labels():
    found = search(seed=18, responses=20_000, max_by_sympy=150)
    assert found.breaks == [], found.report()
