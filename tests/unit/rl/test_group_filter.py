"""Which groups filters leave out, by numbers worked out by hand, and what is said of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.conversations import message, row
from helpers.samples import generated_sample

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.rl.filtering import ExperienceFilter, GroupFilter, deviation

QUESTION = replace(row(message("user", "?"), answer="7"), location="rows.jsonl, line 4")


def group(*rewards: float, accuracy: Sequence[float] | None = None) -> list[Sample]:
    """Samples of one prompt; their score is half of the reward."""
    parts = accuracy or [0.0] * len(rewards)
    return [
        generated_sample(
            of=QUESTION, reward=reward, score=reward / 2, parts={"accuracy": part}, text=f"answer {number}"
        )
        for number, (reward, part) in enumerate(zip(rewards, parts, strict=True))
    ]


def test_the_mean_of_the_score_or_of_a_named_part_must_be_strictly_in_range():
    by_score = GroupFilter(bounds=(0.25, 0.75))
    assert by_score.judged(group(0.0, 1.0)) == "range"  # mean score 0.25
    assert by_score.judged(group(0.0, 2.0)) == group(0.0, 2.0)  # 0.5
    by_accuracy = GroupFilter(bounds=(0.01, 0.99), part="accuracy")
    # EasyR1's issue 5: all are wrong, and well-formatted.
    assert GroupFilter(bounds=(0.01, 0.99)).judged(group(0.1, 0.1, accuracy=(0, 0))) == group(0.1, 0.1)
    assert by_accuracy.judged(group(0.1, 0.1, accuracy=(0, 0))) == "range"
    assert by_accuracy.judged(group(1.1, 1.1, accuracy=(1, 1))) == "range"
    kept = group(1.1, 0.1, accuracy=(1, 0))
    assert by_accuracy.judged(kept) == kept


def test_rewards_that_differ_too_little_are_dropped_by_their_sample_deviation():
    # Of 1, 2 and 3 it is 1, of 0.1 and 0.3 it is 0.1 x sqrt(2).
    assert deviation(group(1.0, 2.0, 3.0)) == pytest.approx(1.0)
    assert deviation(group(0.1, 0.3)) == pytest.approx(0.1414214, abs=1e-6)
    bound = GroupFilter(bounds=(-10, 10), min_std=0.15)
    assert bound.judged(group(0.1, 0.3)) == "std"
    assert bound.judged(group(0.1, 0.4)) == group(0.1, 0.4)
    # Of equal numbers that no binary fraction holds nothing is left by rounding.
    assert deviation(group(*[0.1] * 7)) == 0
    assert GroupFilter(bounds=(-10, 10), min_std=1e-9).judged(group(*[0.1] * 7)) == "std"


def test_masked_samples_have_no_say_as_no_group_is_compared_with_them():
    samples = group(2.0, 2.0, 0.0)
    samples[2] = replace(samples[2], masked=True)
    assert GroupFilter(bounds=(0, 1)).judged(samples) == "range"
    assert GroupFilter(bounds=(-9, 9), min_std=0.1).judged(samples) == "std"
    assert GroupFilter(bounds=(-9, 9)).judged([replace(sample, masked=True) for sample in samples]) == "range"
    assert GroupFilter().judged(samples) == samples


def test_a_part_that_no_reward_has_is_told_with_those_that_are_there():
    with pytest.raises(UserError, match=r"^--algo.dynamic_filtering_part acc: .*rows.jsonl, line 4 .*found: accuracy"):
        GroupFilter(bounds=(0, 1), part="acc").judged(group(1.0, 0.0))


def test_a_runs_flags_make_its_filter(tmp_path):
    (tmp_path / "mine.py").write_text("def experience_filter(samples): return True\n")
    flags = {
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_range": (0.01, 0.99),
        "algo.dynamic_filtering_part": "accuracy",
        "algo.dynamic_filtering_min_std": 0.1,
        "algo.dynamic_filtering_max_batches": 3,
    }
    made = GroupFilter.of(dotted.replace(PPOConfig(), flags))
    assert made == GroupFilter(bounds=(0.01, 0.99), part="accuracy", min_std=0.1, max_batches=3)
    assert GroupFilter.of(PPOConfig()) == GroupFilter()
    by_function = GroupFilter.of(dotted.replace(PPOConfig(), {"algo.experience_filter": str(tmp_path / "mine.py")}))
    assert by_function.bounds is None
    assert by_function.judged(group(1.0, 1.0)) == group(1.0, 1.0)


@pytest.fixture
def function(tmp_path: Path):
    """A function from the text of a filter to the filter."""

    def written(text: str, *, name: str = "") -> ExperienceFilter:
        (tmp_path / "mine.py").write_text(text)
        return ExperienceFilter(f"{tmp_path / 'mine.py'}{name}")

    return written


def test_a_function_of_the_users_keeps_groups_or_samples_and_what_it_leaves_out_is_masked(function):
    longest = "def experience_filter(samples):\n    return [s['reward'] > 0 and s['step'] == 3 for s in samples]\n"
    rule = GroupFilter(function=function(longest))
    kept = rule.judged(group(1.0, 0.0, 2.0), step=3)
    assert [sample.masked for sample in kept] == [False, True, False]
    assert rule.judged(group(1.0, 2.0), step=4) == "function"
    whole = GroupFilter(function=function("def mine(samples): return len(samples) == 2\n", name=":mine"))
    assert whole.judged(group(1.0, 0.0)) == group(1.0, 0.0)
    assert whole.judged(group(1.0)) == "function"
    # Of those that are left, all are right: there is nothing to compare.
    both = GroupFilter(bounds=(0, 1), function=rule.function)
    assert both.judged(group(2.0, 0.0, 2.0), step=3) == "range"
    assert rule.masks
    assert not GroupFilter(bounds=(0, 1)).masks


def test_an_error_of_the_function_names_its_file_and_line_and_the_row(function):
    with pytest.raises(UserError, match="keep_all names no file; give it as FILE.py or FILE.py:experience_filter"):
        ExperienceFilter("keep_all")
    rule = GroupFilter(function=function("def experience_filter(samples):\n    return samples[0]['gone']\n"))
    with pytest.raises(UserError, match=r"mine.py: it raised KeyError: 'gone', at .*mine.py, line 2, for .* line 4$"):
        rule.judged(group(1.0, 0.0))
    for reply in ("[True]", "None", "[1, 0]", "'yes'"):
        rule = GroupFilter(function=function(f"def experience_filter(samples): return {reply}\n"))
        with pytest.raises(UserError, match="return True or False for the whole group, or a list of 2 of them"):
            rule.judged(group(1.0, 0.0))
