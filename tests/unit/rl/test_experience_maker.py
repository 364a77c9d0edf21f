"""Samples become passes of the rollout's models and of the update, with groups and their media kept together."""

import math
import pickle

import pytest
import ray
import torch
from helpers.rl_steps import StepParts, group, numbered, sample, trained
from helpers.samples import media_ref
from helpers.tables import table
from openrlhf.trainer.ppo_utils.experience import Experience

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.data.sample import PlacedRef, media_before
from lmm_r1.rl.batching import pass_limits, sample_sizes
from lmm_r1.rl.experiences import add_advantages, is_on_policy

SETTINGS = table("rl/experience_maker", "settings")


class WorkerGroup:
    """Stands for model workers: keeps what it is called with."""

    def __init__(self, *, actors: int = 1, duplicates: int = 1, name: str = "actor") -> None:
        self.name = name
        self._actor_handlers = [object()] * actors
        self.duplicate_actors = duplicates
        self.calls: list[dict] = []

    def async_run_method_batch(self, method_name: str, **kwargs: object) -> list[object]:
        self.calls.append({"method_name": method_name, **kwargs})
        return [(self.name if method_name == "forward" else method_name, kwargs)] * len(self._actor_handlers)


@pytest.mark.parametrize(
    ("estimator", "bounds", "expected"),
    [
        # The clipped rewards 0, 10, 0 and 2 have a mean of 3 and a deviation of the root of 68 / 3.
        ("group_norm", (0.0, 10.0), [-0.6301, 1.4703, -0.6301, -0.2100]),
        ("dr_grpo", (-10.0, 10.0), [-0.5, 9.5, -10.5, 1.5]),
        ("dr_grpo", (-math.inf, math.inf), [2.0, 22.0, -28.0, 4.0]),
        # Less the greedy response's 40, clipped to 10.
        ("remax", (0.0, 10.0), [-10.0, 0.0, -10.0, -8.0]),
    ],
)
def test_rewards_are_clipped_before_they_are_compared(estimator, bounds, expected):
    flags = {"algo__advantage__estimator": estimator, "reward__clip_range": bounds}
    made = config(**flags, rollout__n_samples_per_prompt=4, algo__kl__init_coef=0.0)
    samples = numbered([sample([1], [5], reward=reward) for reward in (0.0, 20.0, -30.0, 2.0)])
    for one in samples:
        one.kl = torch.zeros(1, 1)
    add_advantages(
        samples, made, kl_weight=0.0, greedy=[sample([1], [5], reward=40.0)] if estimator == "remax" else []
    )
    assert [one.advantages.item() for one in samples] == pytest.approx(expected, abs=1e-4)
    assert [one.info["reward"].item() for one in samples] == [
        min(max(r, bounds[0]), bounds[1]) for r in (0, 20, -30, 2)
    ]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The value that each model adds to a sample's first token; the workers that share samples answer alike."""
    values: dict[str, float] = {}

    def get(refs: list[tuple[str, dict]]) -> list[list[torch.Tensor]]:
        return [
            [
                values.get(name, 0.0) + (one[:, 0] if name == "reward" else one[:, :1].expand_as(one[:, 1:])).float()
                for one in kwargs["sequences"]
            ]
            for name, kwargs in refs
        ]

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(cpu, "has_cuda", lambda: True)
    return values


def config(**changes: object) -> PPOConfig:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return resolve(dotted.replace(PPOConfig(), SETTINGS | given))


def maker(*, share_prefix: bool = True, settings: PPOConfig | None = None, **groups: WorkerGroup) -> StepParts:
    groups = {"actor": WorkerGroup(), **groups}
    return StepParts(settings or config(), share_prefix=share_prefix, policy=groups.pop("actor"), **groups)


def rollout() -> list[Experience]:
    """Four groups of two: text, image, the same text with another image, and text again."""
    image, other = media_ref("image"), media_ref("other")
    return [
        *group([1, 2], [9, 1]),
        *group([3, 4, 5, 6], [2, 4], media=image),
        *group([3, 4, 5, 6], [6, 3], media=other),
        *group([7], [1, 1]),
    ]


def indices(experiences: list[Experience]) -> list[list[int]]:
    return [experience.index for experience in experiences]


def test_a_group_has_prompt_and_media_in_common():
    sizes = sample_sizes([*rollout(), sample([1, 2], [4])])
    assert [(size.prompt, size.response) for size in sizes] == [
        *[(2, 9), (2, 1), (4, 2), (4, 4), (4, 6), (4, 3), (1, 1), (1, 1), (2, 1)]
    ]
    names = [size.group for size in sizes]
    # The sample behind the four groups has the first one's prompt.
    assert [names.index(name) for name in names] == [0, 0, 2, 2, 4, 4, 6, 6, 0]


def test_a_group_is_known_of_samples_that_came_one_by_one():
    # By the identity of their media they would be four groups.
    sizes = sample_sizes([pickle.loads(pickle.dumps(one)) for one in rollout()])
    names = [size.group for size in sizes]
    assert [names.index(name) for name in names] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_media_behind_the_prompt_make_no_other_group():
    image = PlacedRef(0, media_ref("image"))
    own = [(image, PlacedRef(4, media_ref(f"screen of {name}"))) for name in ("one", "other")]
    samples = [sample([1, 2], [4, 5, 6]) for _ in range(4)]
    for one, media in zip(samples, ((image,), *own, (PlacedRef(0, media_ref("other")),)), strict=True):
        one.mm_train_inputs = [media]
    names = [size.group for size in sample_sizes(samples)]
    assert [names.index(name) for name in names] == [0, 0, 0, 3]


def test_what_samples_of_a_group_go_on_alike_with_is_known(monkeypatch):
    monkeypatch.setattr("lmm_r1.data.sample.LEAST_SHARED", 1)
    samples = [sample([1, 2], [4, 5, 6]), sample([1, 2], [4, 5, 7]), sample([1, 2], [8]), sample([3], [4, 5, 6])]
    assert [size.shared for size in sample_sizes(samples)] == [((1, 2),), ((1, 2),), (), ()]
    # What all of them go on with belongs to the first node, with the prompt.
    assert [size.shared for size in sample_sizes(samples[:2])] == [((0, 2),)] * 2
    # The same tokens, with the same picture and with another.
    one, other = (PlacedRef(3, media_ref(name), end=4) for name in ("one", "other"))
    for number, shown in enumerate((one, one, other)):
        samples[number] = sample([1, 2], [4, 9, 5, number])
        samples[number].mm_train_inputs = [(shown,)]
    assert [size.shared for size in sample_sizes(samples[:3])] == [((0, 1), (1, 2)), ((0, 1), (1, 2)), ((0, 1),)]
    assert [(size.response, size.own) for size in sample_sizes(samples[:3])] == [(4, 1), (4, 1), (4, 3)]


def test_a_sample_without_a_response_is_all_prompt():
    (size,) = sample_sizes([sample([1, 2, 3], [])])
    assert (size.prompt, size.response) == (3, 0)


def test_limits_are_those_of_the_flags():
    flags = {"train__micro_batch_size": 4, "train__max_tokens_per_gpu": 600, "rollout__micro_batch_size": 8}
    settings = config(**flags)
    limits = pass_limits(settings, settings.train, share_prefix=True)
    assert (limits.samples, limits.tokens, limits.share_prefix) == (4, 600, True)
    limits = pass_limits(settings, settings.rollout, share_prefix=False)
    assert (limits.samples, limits.tokens, limits.share_prefix) == (8, None, False)
    # What the rollout's models may take is that of the update where nothing else is given.
    assert pass_limits(settings, settings.rollout, share_prefix=True).tokens == 600
    settings = config(**flags, train__dynamic_batch_enable=True, rollout__max_tokens_per_gpu=900)
    limits = pass_limits(settings, settings.rollout, share_prefix=False)
    assert (limits.samples, limits.tokens, limits.share_prefix) == (None, 900, False)
    # Two GPUs share each pass.
    settings = config(**flags, ds__ulysses_size=2, actor__num_gpus_per_node=2, ref__num_gpus_per_node=2)
    assert pass_limits(settings, settings.train, share_prefix=True).tokens == 1200


def test_the_rollouts_models_run_on_whole_groups_of_known_places():
    passes = maker().forward_passes(rollout())
    assert sorted(indices(passes)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for experience in passes:
        assert len(set(experience.mm_train_inputs)) == 1
    # 2 + 9 + 1 tokens, and the second sample padded by 8 on the right.
    first = next(experience for experience in passes if experience.index == [0, 1])
    assert first.sequences.tolist() == [[1, 2, *[50] * 9], [1, 2, 51, *[0] * 8]]


def test_without_shared_prefixes_they_run_on_exactly_as_many_samples_as_asked_for():
    settings = config(rollout__micro_batch_size=3)
    passes = maker(share_prefix=False, settings=settings).forward_passes(rollout())
    assert [len(experience.index) for experience in passes] == [3, 3, 2]
    assert sorted(sum(indices(passes), [])) == list(range(8))


def test_every_worker_of_every_model_gets_as_many_samples_and_passes():
    # 4 workers, of which 2 share samples, beside 4 that do not: 4 shares.
    made = maker(actor=WorkerGroup(actors=4, duplicates=2), reference=WorkerGroup(actors=4))
    passes = made.forward_passes(rollout())
    assert [len(experience.index) for experience in passes] == [2, 2, 2, 2]
    steps = made.update_passes([trained(experience) for experience in passes], step=0).steps
    assert [[len(experience.sequences) for experience in step] for step in steps] == [[1, 1, 1, 1]] * 2


def updated_sequences(steps: list[list[Experience]]) -> list[list[list[int]]]:
    """The samples of each optimizer step, sorted."""
    return [
        sorted(
            ids[mask.bool()].tolist()
            for experience in step
            for ids, mask in zip(experience.sequences, experience.attention_mask, strict=True)
        )
        for step in steps
    ]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize("by_tokens", [True, False])
def test_an_optimizer_step_has_the_same_samples_however_they_are_computed(share_prefix, actors, by_tokens):
    def steps(made: StepParts, step: int) -> list[list[list[int]]]:
        passes = [trained(experience) for experience in made.forward_passes(rollout())]
        return updated_sequences(made.update_passes(passes, step=step).steps)

    plain = maker(share_prefix=False)
    settings = config(train__dynamic_batch_enable=by_tokens, train__max_tokens_per_gpu=15)
    other = maker(share_prefix=share_prefix, actor=WorkerGroup(actors=actors), settings=settings)
    for step in range(4):
        assert steps(plain, step) == steps(other, step)
    assert len({str(steps(plain, step)) for step in range(4)}) > 1, "another order for every rollout"


def test_values_stay_with_their_samples():
    made = maker()
    passes = [trained(experience) for experience in made.forward_passes(rollout())]
    expected = {}
    for experience in passes:
        for ids, mask, advantages in zip(
            experience.sequences, experience.action_mask, experience.advantages, strict=True
        ):
            expected[tuple(ids[1:][mask.bool()].tolist()), int(ids[0])] = advantages[mask.bool()]
    for experience in sum(made.update_passes(passes, step=0).steps, []):
        for ids, mask, advantages in zip(
            experience.sequences, experience.action_mask, experience.advantages, strict=True
        ):
            torch.testing.assert_close(
                advantages[mask.bool()], expected[tuple(ids[1:][mask.bool()].tolist()), int(ids[0])]
            )


@pytest.mark.parametrize("share_prefix", [True, False])
def test_what_an_update_takes_at_least_has_every_prompt_of_a_step_once(share_prefix):
    made = maker(share_prefix=share_prefix)
    passes = [trained(experience) for experience in made.forward_passes(rollout())]
    # Prompts of 2, 4, 4 and 1 tokens, and responses of 9 + 1, 2 + 4, 6 + 3 and 1 + 1.
    assert made.update_passes(passes, step=0).unique_tokens == 11 + 27
    # One sample a step: both of a group need its prompt.
    made = maker(share_prefix=share_prefix, settings=config(train__batch_size=1, train__micro_batch_size=1))
    passes = [trained(experience) for experience in made.forward_passes(rollout())]
    assert made.update_passes(passes, step=0).unique_tokens == 2 * 11 + 27


ONE_STEP = {"train__batch_size": 8, "algo__kl__use_loss": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    table("rl/experience_maker", "the_policy_makes_a_pass_for_old_log_probs_where_the_update_does_not_give_them"),
)
def test_the_policy_makes_a_pass_for_old_log_probs_where_the_update_does_not_give_them(changes, expected, answers):
    settings = config(**changes)
    assert is_on_policy(settings) is expected
    worker = WorkerGroup()
    made = maker(actor=worker, settings=settings)
    # The first step's log-probs are compared with the engine's before anything is learnt.
    made.mismatch.measure = lambda experiences: setattr(made.mismatch, "checked", True)
    first, later = (made.with_outputs(rollout()) for _ in range(2))
    assert [call["method_name"] for call in worker.calls].count("forward") == (1 if expected else 2)
    for experience in first if expected else (*first, *later):
        assert (experience.action_log_probs is None) == expected
    # What no pass is made for is not known, and never a number.
    if expected:
        assert all(experience.action_log_probs is None for experience in later)
        assert not any(experience.kl.any() for experience in later)


def test_passes_know_a_group_by_its_media_on_the_other_side_too():
    made = maker()
    passes = [trained(experience) for experience in made.forward_passes(rollout())]
    for step in made.update_passes(passes, step=0).steps:
        for experience in pickle.loads(pickle.dumps(step)):
            assert len({media_before(media, 1) for media in experience.mm_train_inputs}) == 1


@pytest.mark.parametrize("has_cuda", [True, False])
def test_every_model_gets_the_media_and_without_cuda_one_runs_after_the_other(has_cuda, answers, monkeypatch):
    waited = []
    monkeypatch.setattr(cpu, "has_cuda", lambda: has_cuda)
    monkeypatch.setattr(ray, "wait", lambda refs, *, num_returns, fetch_local: waited.append(refs[:num_returns]))
    workers = {
        name: WorkerGroup(duplicates=2, actors=2, name=name) for name in ("actor", "critic", "reward", "reference")
    }
    made = maker(**workers)
    made.mismatch.measure = lambda experiences: None
    samples = rollout()
    for experience in samples:
        experience.rewards = None
    passes = made.forward_passes(samples)
    made.with_outputs(samples)
    for name, group_of_workers in workers.items():
        (call,) = group_of_workers.calls
        assert call["method_name"] == "forward"
        assert [media.rows for media in call["mm_train_inputs_list"]] == [one.mm_train_inputs for one in passes]
        for entry in ("sequences", "attention_mask", *(["action_mask"] if name != "reward" else [])):
            assert all(given.equal(getattr(one, entry)) for given, one in zip(call[entry], passes, strict=True))
    assert len(waited) == (0 if has_cuda else 4)


# With LoRA the policy, without its adapters, is the reference.
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("use_loss", [True, False])
def test_what_the_models_say_stands_in_the_experiences(use_loss, rank, answers):
    reference = "reference_forward" if rank else "reference"
    answers |= {"actor": -1.0, "critic": 3.0, reference: -1.5, "reward": 2.0}
    workers = {name: WorkerGroup(name=name) for name in ("actor", "critic", "reward", *([] if rank else [reference]))}
    made = maker(**workers, settings=config(algo__kl__use_loss=use_loss, train__batch_size=2, ds__lora__rank=rank))
    made.mismatch.measure = lambda experiences: None
    samples = rollout()
    for experience in samples:
        experience.rewards = None
    for experience in made.with_outputs(samples):
        mask, first = experience.action_mask, float(experience.sequences[0, 0])
        assert experience.rewards.tolist() == experience.info["reward"].tolist() == [first + 2.0]
        assert experience.action_log_probs.tolist() == torch.full(mask.shape, first - 1.0).tolist()
        assert experience.values.tolist() == torch.full(mask.shape, first + 3.0).tolist()
        # In the loss, or per token in the reward: log p - log q.
        if use_loss:
            assert experience.base_action_log_probs.tolist() == torch.full(mask.shape, first - 1.5).tolist()
        else:
            assert experience.base_action_log_probs is None
        assert experience.kl.tolist() == torch.full(mask.shape, 0.0 if use_loss else 0.5).tolist()
        for name in ("kl", "logprobs_diff"):
            assert experience.info[name].tolist() == [0.0 if use_loss else 0.5]
