import pytest

from lmm_r1.config.verifier_spec import verifier_from
from lmm_r1.errors import UserError
from remote_rm.verifier import Item

pytestmark = pytest.mark.unit


def judged(spec: str, response: str, label: str) -> float:
    return verifier_from(spec).score(Item(prompt="", response=response, label=label)).score


def test_a_name_alone_is_the_verifier_with_its_defaults():
    assert judged("number", "<answer>3</answer>", "3") == 1.0
    assert judged("list", "<answer>2, 1</answer>", "1, 2") == 0.0
    assert judged("exact", "<answer>Red</answer>", "red") == 0.0


def test_switches_follow_a_colon():
    assert judged("list:unordered", "<answer>2, 1</answer>", "1, 2") == 1.0
    assert judged("exact:ignore_case", "<answer>Red</answer>", "red") == 1.0


def test_a_composition_names_its_parts_and_weights():
    item = Item(prompt="", response="<think>x</think><answer>4</answer>", label="3")
    score = verifier_from("composition:math=2,format=0.25").score(item)
    assert (score.reward, score.score) == (0.25, 0.0)


def test_a_selected_part_judges_the_labels_that_name_it():
    spec = "composition:select.choice,select.number"
    assert judged(spec, "<answer>(B)</answer>", "choice: B") == 1.0
    assert judged(spec, "<answer>7</answer>", "number: 7") == 1.0


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("maths", "--verifiers maths: unknown verifier 'maths'; did you mean math? Known are "),
        ("list:any_order", "--verifiers list:any_order: list has no setting 'any_order'; its settings are unordered"),
        ("choice:x", "--verifiers choice:x: choice has no setting 'x'; it has no settings"),
        ("composition:math=much", "--verifiers composition:math=much: 'math=much': 'much' is no number"),
        ("composition:mth=1", "--verifiers composition:mth=1: 'mth=1': unknown verifier 'mth'"),
    ],
)
def test_what_is_unknown_is_said_with_the_flag(spec, sentence):
    with pytest.raises(UserError) as refused:
        verifier_from(spec)
    assert str(refused.value).startswith(sentence)
