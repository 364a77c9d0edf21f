"""The registry of verifiers, and verifiers made of others."""

import subprocess
import sys

import pytest

from remote_rm.composition import Composition, part_from
from remote_rm.registry import VERIFIERS, get_verifier
from remote_rm.short_verifiers import ExactVerifier
from remote_rm.verifier import Item


def test_a_verifier_is_made_with_its_settings():
    assert get_verifier("exact", ignore_case=True) == ExactVerifier(ignore_case=True)


def test_an_unknown_name_is_told_with_the_nearest_and_all_known_ones():
    with pytest.raises(ValueError, match=r"unknown verifier 'chioce'; did you mean choice\?") as raised:
        get_verifier("chioce")
    assert str(raised.value).endswith(f"Known are {', '.join(VERIFIERS)}")


def test_no_verifier_loads_sympy_or_the_http_stack_when_it_is_made():
    probe = (
        "import sys\n"
        "from remote_rm.registry import VERIFIERS, get_verifier\n"
        "assert not [name for name in sys.modules if name.endswith('_verifier')]\n"
        "[get_verifier(name) for name in VERIFIERS]\n"
        "sys.exit(str({'sympy', 'fastapi', 'uvicorn', 'pydantic', 'torch', 'lmm_r1'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=30)
    assert done.stderr.strip() == ""


def scored(composition: Composition, response: str, label: str):
    return composition.score(Item(prompt="p", response=response, label=label))


def test_the_reward_is_the_weighted_sum_of_the_verdicts():
    composition = Composition(parts=(part_from("number=2"), part_from("exact=0.25"), part_from("format=0.5")))
    score = scored(composition, "<think>t</think><answer>42.0</answer>", "42")
    assert score.reward == 2.5
    assert score.score == 1.0
    assert score.parts == {"accuracy": 1.0, "number": 1.0, "exact": 0.0, "format": 1.0, "ungradable": 0.0}
    assert scored(composition, "<answer>42</answer>", "42").reward == 2.25


def test_a_part_that_measures_counts_by_its_measure_and_says_what_is_right_itself():
    composition = Composition(parts=(part_from("box=2"), part_from("format=0.5")))
    score = scored(composition, "<answer>[0, 0, 10, 6]</answer>", "[0, 0, 10, 10]")
    assert score.parts == pytest.approx({"accuracy": 1.0, "box": 0.6, "format": 0.0, "ungradable": 0.0})
    assert (score.score, score.reward) == pytest.approx((0.6, 1.2))
    selecting = Composition(select=(part_from("box"), part_from("math")))
    assert scored(selecting, "<answer>[0, 0, 10, 4]</answer>", "box: [0, 0, 10, 10]").parts["accuracy"] == 0.0


def test_the_answer_that_a_label_wants_is_the_one_of_the_verifier_that_judges_it():
    selecting = Composition(select=(part_from("vqa"), part_from("math")), parts=(part_from("format"),))
    assert selecting.answer_of('vqa: ["net", "the net", "mesh"]') == "net"
    assert selecting.answer_of("math: 42") == "42"
    assert Composition(parts=(part_from("format"), part_from("edit_distance"))).answer_of('["Rye", "NY"]') == "rye"
    assert Composition(parts=(part_from("format"),)).answer_of("any") == "any"


def test_a_label_names_the_verifier_that_judges_it():
    composition = Composition(select=(part_from("choice"), part_from("exact=3")), parts=(part_from("format=0.5"),))
    for response, label, reward in [
        ("<answer>(b)</answer>", "choice: B", 1.0),
        ("<answer>B</answer>", "exact:B", 3.0),
        ("<answer>(b)</answer>", "exact:B", 0.0),
        ("<think>t</think><answer>10:30</answer>", "exact: 10:30", 3.5),
    ]:
        score = scored(composition, response, label)
        assert score.reward == reward
        assert set(score.parts) == {"accuracy", "format", "ungradable"}


@pytest.mark.parametrize("label", ["B", "chioce: B", "number: 4", "", ":"])
def test_a_label_that_names_no_verifier_is_refused(label):
    composition = Composition(select=(part_from("choice"), part_from("exact")))
    with pytest.raises(
        ValueError, match="names no verifier; write NAME: before the gold answer, with one of choice, exact"
    ):
        composition.check_label(label)
    assert composition.failed_score(Item(prompt="p", response="B", label=label)).reward == 0.0


def test_an_ungradable_label_of_one_part_is_reported():
    composition = Composition(parts=(part_from("math"), part_from("choice")))
    score = scored(composition, "<answer>42</answer>", "42")
    assert score.parts == {"accuracy": 1.0, "math": 1.0, "choice": 0.0, "ungradable": 1.0}


def test_one_undecided_part_leaves_the_item_to_a_worker():
    composition = Composition()
    item = Item(prompt="p", response=r"<think>t</think><answer>|-16\sqrt{2}|</answer>", label=r"16\sqrt{2}")
    assert composition.quick_score(item) is None
    assert composition.score(item).reward == 1.5
    assert composition.failed_score(item).reward == 0.5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("maths=1", "did you mean math"),
        ("math=much", "'much' is no number"),
        ("math=nan", "'nan' is no number"),
        ("math=", "'' is no number"),
        ("composition=1", "cannot be a part of itself"),
    ],
)
def test_a_part_that_is_none_is_told(text, told):
    with pytest.raises(ValueError, match=told):
        part_from(text)


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="--part math is given more than once"):
        Composition(parts=(part_from("math"), part_from("math=2")))
