"""Groups that are dropped are replaced, and samples become experiences."""

from types import SimpleNamespace

import pytest
from helpers.conversations import message, row

from lmm_r1.data.prompt_stream import PromptStream
from lmm_r1.rollout.group import GroupSettings
from lmm_r1.trainer.samples import KitSamplesGenerator
from lmm_r1.trainer.workers import media_per_row

pytestmark = pytest.mark.unit

SETTINGS = GroupSettings(
    n_samples=2,
    temperature=1.0,
    top_p=1.0,
    max_new_tokens=4,
    max_len=16,
    logprobs=False,
    ignore_eos=False,
    overlong_prompts="skip",
)


def sample(label: str, *, score: float) -> dict:
    """A sample with a prompt of three tokens and a response of two."""
    return {
        "row": row(message("user", "?"), answer=label),
        "prompt": "[]",
        "label": label,
        "mm_train_inputs": None,
        "observation_tokens": [5, 6, 7, 8, 9],
        "action_ranges": [(3, 5)],
        "rollout_log_probs": None,
        "truncated": False,
        "reward": 2 * score,
        "scores": score,
        "extra_logs": {"accuracy": score},
    }


class ScriptedGenerator(KitSamplesGenerator):
    """Gives each row's group by its answer: overlong prompts have none, `right` and `wrong` all the same score."""

    def generate(self, rows, settings):
        scores = {"right": (1.0, 1.0), "wrong": (0.0, 0.0), "overlong": ()}
        return [[sample(item.answer, score=score) for score in scores.get(item.answer, (0.0, 1.0))] for item in rows]


def rollout(answers: list[str], *, count: int, filtering: bool):
    algo = SimpleNamespace(dynamic_filtering_enable=filtering, dynamic_filtering_range=(0.0, 1.0))
    args = SimpleNamespace(algo=algo, vllm=SimpleNamespace(enable_sleep=False))
    prompts = PromptStream([row(message("user", "?"), answer=answer) for answer in answers], seed=0, episodes=1)
    return ScriptedGenerator(args, [], SETTINGS).rollout(prompts, count=count)


def test_overlong_prompts_are_replaced_and_counted():
    result = rollout(["a", "overlong", "b", "overlong", "c"], count=3, filtering=False)
    assert sorted(group[0]["label"] for group in result.groups) == ["a", "b", "c"]
    assert (result.overlong, result.filtered) == (2, 0)
    assert len(result.experiences) == 6


def test_groups_without_a_difference_are_dropped_only_by_dynamic_filtering():
    answers = ["right", "wrong", "a", "b"]
    kept = rollout(answers, count=2, filtering=True)
    assert sorted(group[0]["label"] for group in kept.groups) == ["a", "b"]
    assert kept.filtered == 2
    assert rollout(answers, count=4, filtering=False).filtered == 0


def test_a_stream_that_ends_gives_fewer_groups():
    result = rollout(["a", "overlong", "overlong"], count=3, filtering=False)
    assert len(result.groups) == 1
    assert result.overlong == 2


def test_an_experience_marks_the_response_among_the_next_tokens():
    experience, _ = rollout(["a"], count=1, filtering=False).experiences
    assert experience.sequences.tolist() == [[5, 6, 7, 8, 9]]
    assert experience.action_mask.tolist() == [[0, 0, 1, 1]]
    assert experience.rewards.tolist() == [0.0]
    assert experience.response_length.tolist() == [2]
    assert experience.mm_train_inputs == [None]


def test_the_media_of_a_micro_batch_are_one_entry_per_row():
    one, other = {"pixel_values": 1}, {"pixel_values": 2}
    assert media_per_row([[one, None], [None], other, None], "cpu") == {"media": [one, None, None, other, None]}
    assert media_per_row([], "cpu") == {"media": []}
