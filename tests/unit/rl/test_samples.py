"""Groups that are dropped are replaced, and samples become those that are trained on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import scripted_engines
from helpers.conversations import message, row
from helpers.samples import generated_sample, media_ref, of_answer, unrewarded
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import part_weights
from lmm_r1.data.sample import Segment
from lmm_r1.data.training_rows import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.generation.group import GroupSettings, SampledGroup
from lmm_r1.rl.filtering import GroupFilter
from lmm_r1.rl.mismatch import ROWS_WITH
from lmm_r1.rl.rollouts import KitSamplesGenerator
from lmm_r1.rl.samples import TrainingSample
from lmm_r1.scoring import Moment

SETTINGS = replace(
    scripted_engines.SETTINGS,
    sampling=replace(scripted_engines.SETTINGS.sampling, n_samples=2),
    max_len=16,
    logprobs=False,
    overlong_prompts="skip",
)

ARGS = SimpleNamespace(
    vllm=SimpleNamespace(enable_sleep=False, speculative_tokens=0), logger=SimpleNamespace(rollouts_per_step=3)
)


class ScriptedGenerator(KitSamplesGenerator):
    """Gives each row's group by its answer: overlong prompts have none, `right` and `wrong` all the same score."""

    def generate(self, rows, settings, **others: object):
        scores = {"right": (1.0, 1.0), "wrong": (0.0, 0.0), "overlong": ()}
        return [[of_answer(item, score=score) for score in scores.get(item.answer, (0.0, 1.0))] for item in rows]


def rollout(answers: list[str], *, count: int, filtering: bool, episodes: int = 1, max_batches: int = 0):
    bounds = GroupFilter(bounds=(0.0, 1.0), max_batches=max_batches) if filtering else GroupFilter()
    prompts = PromptStream([row(message("user", "?"), answer=answer) for answer in answers], seed=0, episodes=episodes)
    return ScriptedGenerator(ARGS, [], SETTINGS, group_filter=bounds).rollout(prompts, count=count)


def test_prompts_that_cannot_be_encoded_are_replaced_counted_and_told():
    told: list[str] = []

    class Refusing(ScriptedGenerator):
        def generate(self, rows, settings, **others: object):
            refused = {item.answer for item in rows} & {"broken"}
            for _ in refused:
                assert self._samples_of(SampledGroup(samples=[], refused="rows.jsonl line 2: broken")) == []
            return [
                [] if item.answer in refused else group
                for item, group in zip(rows, super().generate(rows, settings), strict=True)
            ]

    prompts = PromptStream(
        [row(message("user", "?"), answer=answer) for answer in ("a", "broken", "overlong", "b")], seed=0, episodes=1
    )
    generator = Refusing(ARGS, [], SETTINGS, leave_out=told.append)
    found = generator.rollout(prompts, count=3)
    assert ([len(group) for group in found.groups], found.refused, found.overlong) == ([2, 2], 1, 1)
    assert told == ["rows.jsonl line 2: broken"]
    lost = PromptStream([row(message("user", "?"), answer="broken")], seed=0, episodes=2)
    with pytest.raises(UserError, match="1 prompts cannot be encoded; correct them: left_out_rows.jsonl lists them"):
        generator.rollout(lost, count=1)


def test_groups_without_a_difference_are_dropped_only_by_dynamic_filtering():
    answers = ["right", "wrong", "a", "b"]
    kept = rollout(answers, count=2, filtering=True)
    assert sorted(group[0].label for group in kept.groups) == ["a", "b"]
    assert kept.filtered == 2
    assert rollout(answers, count=4, filtering=False).filtered == 0


def test_a_stream_that_ends_gives_fewer_groups():
    result = rollout(["a", "overlong", "overlong"], count=3, filtering=False)
    assert len(result.groups) == 1
    assert result.overlong == 2


def test_what_was_gathered_at_the_end_of_an_episode_is_filled_up_from_the_next():
    answers = ["a", "b", "wrong", "right", "wrong", "overlong"]
    result = rollout(answers, count=3, filtering=True, episodes=2)
    # Both of the first episode, in its order, and one of them again.
    assert sorted(group[0].label for group in result.groups[:2]) == ["a", "b"]
    assert result.groups[2][0].label in ("a", "b")
    assert result.overlong >= 1
    assert result.filtered >= 3
    assert len(result.samples) == 6
    # The last episode's end is the end.
    assert len(rollout(answers, count=5, filtering=True, episodes=2).groups) == 4


@pytest.mark.parametrize("episodes", [1, 50])
def test_an_episode_without_any_group_stops_with_what_to_change(episodes):
    said = (
        r"^none of the last 4 prompts, a whole episode, gave a group to train on: 3 groups had a mean score that was not "
        r"strictly between 0 and 1, as --algo.dynamic_filtering_range asks, and 1 prompts left no room for a response; "
        r"the rewards of dropped groups are 0 to 2; "
        r"take prompts of another difficulty, raise --rollout.n_samples_per_prompt or leave "
        r"--algo.dynamic_filtering_enable out; raise --data.max_len 16$"
    )
    with pytest.raises(UserError, match=said):
        rollout(["right", "wrong", "wrong", "overlong"], count=2, filtering=True, episodes=episodes)


def test_a_step_takes_as_many_prompts_as_its_bound_and_stops_with_what_was_dropped():
    answers = ["wrong"] * 7 + ["right", "a", "b"]
    said = (
        r"^6 prompts, --algo.dynamic_filtering_max_batches 3 times --rollout.batch_size, gave \d of the 2 groups of a step: "
        r"\d groups had a mean score .*; the rewards of dropped groups are 0 to "
    )
    with pytest.raises(UserError, match=said):
        rollout(answers, count=2, filtering=True, max_batches=3)
    # Prompts are counted and not rounds, of which the later ones ask for what is missing alone.
    assert len(rollout(answers, count=2, filtering=True, max_batches=5).groups) == 2
    assert len(rollout(["a", "b"], count=2, filtering=True, max_batches=1).groups) == 2


def test_a_sample_marks_the_response_among_the_next_tokens():
    first, second = rollout(["a"], count=1, filtering=False).samples
    assert first.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert (first.prompt_tokens, first.response_tokens, first.reward, first.media) == (3, 2, 0.0, None)
    assert [(one.place, one.group) for one in (first, second)] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("response", [[8, 9], [8], list(range(8, 20)), []])
@pytest.mark.parametrize("rewarded", [True, False])
def test_a_sample_of_one_response_is_openrlhfs(response, rewarded):
    media = media_ref("image")
    known = [-float(token) for token in response]
    given = generated_sample(
        (5, 6, 7), response, media=media, log_probs=known, reward=2.0, score=1.0, parts={"a": 0.5}
    )
    given = replace(given if rewarded else unrewarded(given), finish_reason="length")
    theirs = SamplesGenerator._process_response_into_experience(
        None,
        {
            "prompt": given.prompt,
            "label": given.label,
            "mm_train_inputs": given.media,
            "observation_tokens": [5, 6, 7, *response],
            "action_ranges": [(3, 3 + len(response))],
            "rollout_log_probs": [0.0] * 3 + known,
            "truncated": True,
            "reward": 2.0 if rewarded else None,
            "scores": 1.0 if rewarded else None,
            "extra_logs": {"a": 0.5} if rewarded else {},
        },
        max_len=15,
    )
    ours = TrainingSample.of(given, max_len=15)
    for mine, other in (
        (ours.token_ids, theirs.sequences),
        (ours.loss_mask, theirs.action_mask.bool()),
        (ours.engine_log_probs, theirs.rollout_log_probs),
    ):
        assert torch.equal(mine, other[0])
    assert (ours.response_tokens, ours.truncated) == (theirs.response_length.item(), theirs.truncated.item())
    assert (ours.reward, ours.media) == (theirs.rewards.item() if rewarded else None, theirs.mm_train_inputs[0])
    # Another name for a part of what `truncated` says.
    del theirs.info["response_clip_ratio"]
    logged = theirs.info | {name: getattr(theirs, name) for name in ("response_length", "total_length")}
    assert ours.logged == dict.fromkeys(ROWS_WITH.values(), 0.0) | {name: one.item() for name, one in logged.items()}


def test_a_sample_of_several_turns_marks_what_was_generated():
    first, *_ = generated_sample((5, 6), ()).segments
    turns = (
        first,
        Segment(kind="generated", token_ids=(7, 8), log_probs=(-7.0, -8.0)),
        Segment(kind="observation", token_ids=(9,)),
        Segment(kind="generated", token_ids=(10,), log_probs=(-10.0,)),
    )
    found = TrainingSample.of(replace(generated_sample(), segments=turns), max_len=16)
    assert found.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert found.loss_mask.tolist() == [False, True, True, False, True]
    assert found.turns.tolist() == [-1, 0, 0, -1, 1]
    assert found.engine_log_probs.tolist() == [0.0, -7.0, -8.0, 0.0, -10.0]
    assert found.response_tokens == 3


def test_parts_are_weighted_by_the_step_and_those_of_held_out_rows_are_not():
    asked: list[GroupSettings] = []

    class Asked(ScriptedGenerator):
        def generate(self, rows, settings, **others: object):
            asked.append(settings)
            return super().generate(rows, settings)

    args = SimpleNamespace(
        vllm=SimpleNamespace(enable_sleep=False, speculative_tokens=0), logger=SimpleNamespace(rollouts_per_step=0)
    )
    weights = part_weights(RewardConfig(part_weights='{"accuracy": {"from": 1, "to": 0, "steps": 4}}'))
    generator = Asked(args, [], SETTINGS, part_weights=weights)
    item = row(message("user", "?"), answer="a")
    # As a run that was resumed at step 2 begins.
    training, held_out = (Moment(step=3, held_out=held_out) for held_out in (False, True))
    made = generator.rollout(PromptStream([item], seed=0, episodes=1), count=1, moment=training)
    generator.evaluate([item], temperature=0.0, n_samples=1, moment=held_out)
    assert [[part.weight for part in settings.part_weights] for settings in asked] == [[0.5], []]
    assert made.part_weights == asked[0].part_weights
