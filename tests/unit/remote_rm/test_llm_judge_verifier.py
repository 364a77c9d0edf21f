import argparse
import pickle

import pytest
from helpers.http_servers import chat_server, completion
from helpers.judge_server import asked_of
from helpers.tables import table

from remote_rm.composition import part_from
from remote_rm.llm_judge.endpoint import DATABASE
from remote_rm.llm_judge_verifier import LlmJudge, reward_func
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


def test_settings_by_name_are_those_of_the_flags():
    made = verifier_with(
        "llm_judge",
        {
            "judge_url": "http://h/v1",
            "judge_model": "m",
            "judge_max_requests": 5,
            "judge_always": True,
            "judge_rule": None,
        },
    )
    assert made == LlmJudge(judge_url="http://h/v1", judge_model="m", judge_max_requests=5, judge_always=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"judge_model": "m"}, "required: --judge-url"),
        ({"judge_url": "http://h", "judge_model": "m", "judge_attempts": 0}, "0 is no number above 0"),
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


def test_its_file_is_a_reward_function_whose_settings_are_arguments(tmp_path):
    """As a run in process calls it: with whatever the row has beside the settings."""
    response = "<think>x</think><answer>{}</answer>"
    settings = {
        "judge_model": "m",
        "judge_rule": "exact",
        "judge_folder": str(tmp_path),
        "judge_body": {"max_tokens": 9},
    }
    with chat_server(lambda body, _number: completion(asked_of(body).verdict("right"))) as server:
        for _ in range(2):
            reply = reward_func(
                ["q"] * 2,
                ["The capital?"] * 2,
                ["Paris"] * 2,
                responses=[response.format("Paris"), response.format("PARIS")],
                images=[[], []],
                step=3,
                judge_url=server.url,
                **settings,
            )
            assert (reply["rewards"], reply["scores"]) == ([1.5, 1.5], [1.0, 1.0])
            assert reply["extra_logs"]["judge_asked"] == [0.0, 1.0]
    assert [body["max_tokens"] for body in server.requests] == [9]
    assert (tmp_path / DATABASE).is_file()
