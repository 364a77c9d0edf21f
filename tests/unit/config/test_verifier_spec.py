import pytest
from helpers.tables import table

from lmm_r1.config.rewards import verifier_from
from lmm_r1.errors import UserError
from remote_rm.llm_judge_verifier import LlmJudge
from remote_rm.verifier import Item


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


def test_flags_with_values_follow_a_colon_too():
    item = Item(prompt="", response="<think>x</think><answer>4</answer>", label="4")
    assert verifier_from("math:accuracy_weight=2, format_weight=0.25").score(item).reward == 2.25
    assert verifier_from("list:unordered,format_weight=0").score(item).reward == 1.0


def test_a_judge_is_described_by_its_flags():
    spec = (
        'llm_judge:judge_url=http://127.0.0.1:8000/v1,judge_model=org/m,judge_always,judge_body={"a": 1, "b": [2,true]},'
        "judge_rule=choice,judge_max_requests=7"
    )
    assert verifier_from(spec) == LlmJudge(
        judge_url="http://127.0.0.1:8000/v1",
        judge_model="org/m",
        judge_always=True,
        judge_body='{"a": 1, "b": [2,true]}',
        judge_rule="choice",
        judge_max_requests=7,
    )


@pytest.mark.parametrize(("spec", "sentence"), table("config/verifier_spec", "what_is_unknown_is_said_with_the_flag"))
def test_what_is_unknown_is_said_with_the_flag(spec, sentence):
    with pytest.raises(UserError) as refused:
        verifier_from(spec)
    assert str(refused.value).startswith(sentence)
