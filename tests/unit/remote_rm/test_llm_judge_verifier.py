import argparse
import pickle

import pytest
from helpers.tables import table

from remote_rm.composition import part_from
from remote_rm.llm_judge_verifier import LlmJudge
from remote_rm.registry import verifier_with
from remote_rm.verifier import AskingVerifier, Item


def test_without_its_judge_it_scores_by_the_rule_and_says_so():
    item = Item(prompt="", response="<think>x</think><answer>b</answer>", label="B")
    score = LlmJudge(judge_rule="choice").score(item)
    assert (score.reward, score.score) == (1.5, 1.0)
    assert (score.parts["judged_by_rule"], score.parts["judge_asked"]) == (1.0, 0.0)
    assert LlmJudge(judge_rule="exact").score(item).score == 0.0


@pytest.mark.parametrize(
    ("settings", "said"), table("remote_rm/llm_judge_verifier", "settings_that_contradict_are_refused_by_name")
)
def test_settings_that_contradict_are_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said):
        LlmJudge(**settings)


def test_every_setting_has_a_flag_with_the_same_default():
    parser = argparse.ArgumentParser()
    LlmJudge.add_arguments(parser)
    args = parser.parse_args(["--judge-url", "http://h/v1", "--judge-model", "m"])
    assert LlmJudge.from_arguments(args) == LlmJudge(judge_url="http://h/v1", judge_model="m")
    assert not [action for action in parser._actions if not action.help]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"judge_model": "m"}, "required: --judge-url"),
        ({"judge_url": "http://h", "judge_model": "m", "judge_concurrency": 0}, "0 is no number above 0"),
        ({"judge_urls": "http://h"}, "llm_judge has no setting 'judge_urls'; its settings are accuracy_weight,"),
    ],
)
def test_settings_that_are_missing_or_wrong_are_value_errors(settings, said):
    with pytest.raises(ValueError, match=said):
        verifier_with("llm_judge", settings)


def test_it_asks_and_is_no_part_of_a_composition():
    assert isinstance(LlmJudge(), AskingVerifier)
    assert not isinstance(LlmJudge().rule, AskingVerifier)
    with pytest.raises(ValueError, match="'llm_judge=1': llm_judge asks others"):
        part_from("llm_judge=1")


def test_it_is_pickled_without_a_key(monkeypatch):
    monkeypatch.setenv("LLM_JUDGE_API_KEY", "sk-secret")
    kept = LlmJudge(judge_url="http://h/v1", judge_model="m")
    assert kept.rule.name == "math"
    copy = pickle.loads(pickle.dumps(kept))
    assert (copy, copy.rule) == (kept, kept.rule)
    assert b"sk-secret" not in pickle.dumps(kept)
