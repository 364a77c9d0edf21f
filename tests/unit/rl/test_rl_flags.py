"""What flags of reinforcement learning do to losses, rewards and prompts, by hand-computed numbers."""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from helpers.character_kit import CharacterKit
from helpers.conversations import message, picture, row
from helpers.played_updates import PlayedEngine, PlayedStrategy
from helpers.rl_steps import PlayedGroup, sample, without_workers
from helpers.samples import generated_sample
from helpers.sessions import checkpoint_of
from helpers.tables import frozen, table

from lmm_r1 import dotted
from lmm_r1.cluster import nodes
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.config.hardware import needed_gpus
from lmm_r1.data.messages import Row
from lmm_r1.data.training_rows import check_prompt
from lmm_r1.errors import UserError
from lmm_r1.generation import ray_engines
from lmm_r1.generation.group import SampledGroup
from lmm_r1.rl import loop, run
from lmm_r1.rl.losses import PolicyLoss
from lmm_r1.rl.model_groups import Models, hand_out, update_models
from lmm_r1.rl.outputs import shape_rewards
from lmm_r1.rl.resume import BestEvaluation, Checkpoints
from lmm_r1.rl.rollouts import KitSamplesGenerator, group_settings
from lmm_r1.rl.workers import KitCriticActor, KitPolicyActor
from lmm_r1.scoring import Moment
from lmm_r1.train.start import blended_rows
from lmm_r1.train.update import Step, mean_of_steps, update

pytestmark = pytest.mark.usefixtures("one_process")
GIVEN = table("rl/rl_flags", "given")


def config(**flags: object) -> PPOConfig:
    return resolve(dotted.replace(PPOConfig(), GIVEN | {name.replace("__", "."): to for name, to in flags.items()}))


def step_of(
    ratios: Sequence[Sequence[float]],
    advantages: Sequence[float],
    *,
    rollout: float = 1.0,
    reference: float = 1.0,
    **flags: object,
) -> tuple[Step, torch.Tensor]:
    """A step of one pass, whose loss is all that is differentiated; `ratios` are probabilities over the old ones, which are `rollout` times the engine's.

    Returns also the gradient of the log-probs.

    Args:
        reference: the policy's old probabilities over the reference model's.
    """
    log_probs = torch.tensor([[math.log(ratio) if ratio else 0.0 for ratio in own] for own in ratios])
    log_probs.requires_grad_(True)
    samples = []
    for own, advantage in zip(ratios, advantages, strict=True):
        one = sample([1], [2] * len(own))
        one.loss_mask = torch.tensor([ratio > 0 for ratio in own])
        one.log_probs, one.advantages = torch.zeros(len(own)), torch.full((len(own),), advantage)
        one.engine_log_probs = one.log_probs - math.log(rollout)
        one.reference_log_probs = one.log_probs - math.log(reference)
        samples.append(one)
    settings = config(**flags)
    worker = object.__new__(KitPolicyActor)
    worker.strategy, worker.loss = PlayedStrategy(settings), PolicyLoss.of(settings)
    output = SimpleNamespace(entropy=torch.full_like(log_probs, 0.5), aux_loss=torch.tensor(8.0))
    worker._run = lambda samples, **asked: (log_probs, output)
    found: list[torch.Tensor] = []
    worker.strategy.backward = lambda loss, *rest: found.append(loss) or loss.backward()
    step = update(
        worker.strategy,
        PlayedEngine(),
        [samples],
        counts=worker._counts,
        terms=lambda samples: worker._terms(samples, kl_weight=0.5),
        aux_weight=settings.actor.aux_loss_coef,
    )
    return replace(step, loss=found[0].item()), log_probs.grad


def loss_of(*given: Any, **flags: Any) -> float:
    return step_of(*given, **flags)[0].loss


def test_ratios_are_clipped_on_each_side():
    assert loss_of([[1.5]], [1.0]) == pytest.approx(-1.2)
    assert loss_of([[1.5]], [1.0], actor__eps_clip=0.1) == pytest.approx(-1.1)
    both = {"actor__eps_clip_low_high": (0.4, 0.3)}
    assert loss_of([[1.5]], [1.0], **both) == pytest.approx(-1.3)
    assert loss_of([[0.5]], [-1.0], **both) == pytest.approx(0.6)


def test_a_dual_clip_bounds_the_loss_of_bad_samples():
    assert loss_of([[5.0]], [-1.0]) == pytest.approx(5.0)
    assert loss_of([[5.0]], [-1.0], actor__dual_clip=3.0) == pytest.approx(3.0)


def test_ratios_are_of_tokens_or_of_sequences():
    wide = {"actor__eps_clip": 0.6}
    assert loss_of([[1.5, 1.0]], [1.0], **wide) == pytest.approx(-1.25)
    found = loss_of([[1.5, 1.0]], [1.0], **wide, actor__policy_loss_type="gspo")
    assert found == pytest.approx(-math.sqrt(1.5))


def test_losses_are_means_over_tokens_or_over_sequences():
    assert loss_of([[1.0, 1.0], [1.0, 0.0]], [1.0, 4.0]) == pytest.approx(-(1 + 1 + 4) / 3)
    each = {"actor__loss_agg_mode": "seq-mean-token-mean"}
    assert loss_of([[1.0, 1.0], [1.0, 0.0]], [1.0, 4.0], **each) == pytest.approx(-(1 + 4) / 2)


def test_sums_of_sequences_are_divided_by_the_length_of_the_flag_or_of_the_longest_response():
    constant = {"actor__loss_agg_mode": "seq-mean-token-sum-norm"}
    given = [[1.0, 1.0], [1.0, 0.0]], [1.0, 4.0]
    assert loss_of(*given, **constant, actor__loss_agg_length=3) == pytest.approx(-(2 + 4) / 3 / 2)
    assert loss_of(*given, **constant, rollout__max_new_tokens=5) == pytest.approx(-(2 + 4) / 5 / 2)
    # All turns of an episode are as long as prompt and turns together may be.
    episodes = {"train__agent": "crop", "data__max_len": 10}
    assert config(**constant, rollout__max_new_tokens=5, **episodes).actor.loss_agg_length == 10
    assert config(**constant, data__max_len=12).actor.loss_agg_length == 12


def test_losses_take_the_settings_of_their_flags():
    cispo, gspo = ({"actor__policy_loss_type": name} for name in ("cispo", "gspo"))
    assert loss_of([[1.5]], [1.0], **cispo, actor__eps_clip=0.2) == pytest.approx(-1.2 * math.log(1.5))
    # Without a range by a flag: cispo up to 5, gspo 3e-4 below and 4e-4 above 1.
    assert loss_of([[6.0]], [1.0], **cispo) == pytest.approx(-5 * math.log(6))
    assert loss_of([[1.1], [0.9]], [1.0, -1.0], **gspo) == pytest.approx(-(1.0004 - 0.9997) / 2, rel=1e-3)
    sapo = {"actor__policy_loss_type": "sapo"}
    assert loss_of([[1.0]], [1.0], **sapo, actor__sapo_temperature_pos=2.0) == pytest.approx(-1.0)
    assert loss_of([[1.0]], [-1.0], **sapo, actor__sapo_temperature_neg=0.5) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("flags", "loss"), frozen("rl/rl_flags", "samples_that_the_engine_drew_otherwise_are_corrected")
)
def test_samples_that_the_engine_drew_otherwise_are_corrected(flags, loss):
    assert loss_of([[1.0]], [1.0], rollout=10.0, **flags) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("gating", "bound", "loss"),
    # Of probabilities 1 and 0.1 the ratio is 10 and the total variation 0.9; the binary KL is 12.1, as 1 is rounded.
    [
        ("ratio", 5.0, 0.0),
        ("ratio", 11.0, -10.0),
        ("tv", 5.0, -10.0),
        ("binary_kl", 11.0, 0.0),
        ("binary_kl", 13.0, -10.0),
    ],
)
def test_what_the_thresholds_bound_may_be_a_divergence(gating, bound, loss):
    flags = {
        "algo__advantage__is_correction_level": "token",
        "algo__advantage__is_correction_threshold": (0.0, bound),
        "algo__advantage__is_correction_gating": gating,
    }
    assert loss_of([[1.0]], [1.0], rollout=10.0, **flags) == pytest.approx(loss, rel=1e-5)


def test_entropy_is_worth_a_bonus():
    assert loss_of([[1.0]], [1.0], actor__entropy_coef=0.0) == pytest.approx(-1.0)
    assert loss_of([[1.0]], [1.0], actor__entropy_coef=0.5) == pytest.approx(-1.0 - 0.5 * 0.5)


def test_the_load_of_experts_is_worth_a_loss():
    assert loss_of([[1.0]], [1.0], actor__aux_loss_coef=0.25) == pytest.approx(-1.0 + 0.25 * 8)


OTHER_TERMS = {
    "kl": {"algo__kl__use_loss": True, "algo__kl__estimator": "k3"},
    "entropy": {"actor__entropy_coef": 0.5},
}


@pytest.mark.parametrize(("estimator", "kl"), [("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))])
def test_the_kl_to_the_reference_is_a_loss_by_its_estimator(estimator, kl):
    flags = {"algo__kl__use_loss": True, "algo__kl__estimator": estimator}
    # By the weight that the trainer is given, 0.5.
    assert loss_of([[1.0]], [1.0], reference=2.0, **flags) == pytest.approx(-1 + 0.5 * kl, rel=1e-5)


@pytest.mark.parametrize(("loss", "length"), [("ppo", None), ("gspo", None), ("ppo", 4)])
@pytest.mark.parametrize(("term", "flags"), OTHER_TERMS.items())
def test_kl_and_entropy_are_averaged_as_the_policy_loss_is(term, flags, loss, length):
    mode = "seq-mean-token-sum-norm" if length else "seq-mean-token-mean" if loss == "ppo" else "token-mean"
    flags = flags | {"actor__policy_loss_type": loss, "actor__loss_agg_mode": mode, "actor__loss_agg_length": length}
    # One token with a KL of k3(log 2) = 0.1931, three whose policy is the reference's, and entropies of 0.5 each.
    found = loss_of([[2.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [0.0, 0.0], **flags)
    if term == "kl":
        expected = 0.5 * (0.5 - 1 + math.log(2)) / (2 * (length or 1))
    else:
        expected = -0.5 * (0.5 + 3 * 0.5) / (2 * length) if length else -0.5 * 0.5
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_the_kl_may_be_the_exact_one():
    flags = {"algo__kl__use_loss": True, "algo__kl__estimator": "k3"}
    biased, exact = (
        step_of([[1.0]], [0.0], reference=2.0, algo__kl__unbiased_gradient=unbiased, **flags)[1].item()
        for unbiased in (False, True)
    )
    # Half of k3's own derivative, 1 - exp(-log 2); the exact one adds k3's value times that of the sample's log-prob.
    assert biased == pytest.approx(0.25, abs=1e-5)
    assert exact != pytest.approx(biased, abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ({}, [1.0, 1.0, 1.0]),
        # Lengths 5, 8 and 10 of at most 10.
        ({"reward__overlong_buffer_len": 4.0}, [1.0, 0.5, 0.0]),
        ({"reward__overlong_buffer_len": 4.0, "reward__overlong_penalty_factor": 2.0}, [1.0, 0.0, -1.0]),
        ({"reward__stop_properly_penalty_coef": 0.25}, [1.0, 1.0, 0.25]),
        ({"reward__stop_properly_penalty_coef": -0.5}, [1.0, 1.0, -0.5]),
    ],
)
def test_long_and_cut_off_responses_lose_reward(flags, left):
    samples = [sample([1], [2] * length, reward=1.0) for length in (5, 8, 10)]
    samples[2].truncated = True
    shape_rewards(samples, config(rollout__max_new_tokens=10, **flags))
    assert [one.reward for one in samples] == pytest.approx(left)


def write(path: Path, *records: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def prompts(path: str, **flags: object) -> list[Row]:
    own = dotted.replace(config(**flags), {"data.prompt_dataset": path, "rollout.batch_size": 1})
    load = partial(run._load, own, split=own.data.prompt_split, check=check_prompt)
    return list(blended_rows(own, load))


def test_prompts_are_read_from_the_columns_that_the_flags_name(tmp_path):
    record = {"q": "<image>x", "gold": "1", "pics": ["a.png"]}
    picture(8, 8).save(tmp_path / "a.png")
    flags = {"data__input_key": "q", "data__label_key": "gold", "data__image_key": "pics"}
    (found,) = prompts(write(tmp_path / "rows.jsonl", record), **flags)
    assert (found.answer, found.messages[0].parts[0].source) == ("1", str(tmp_path / "a.png"))


def test_a_template_takes_a_plain_prompt_past_the_chat_template(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"q": "1 + 1?", "answer": "2"})
    (found,) = prompts(path, data__input_key="q")
    assert (found.plain, found.messages[0].parts[0].text) == (False, "1 + 1?")
    (found,) = prompts(path, data__input_key="q", data__input_template="Q: {}\nA:")
    assert (found.plain, found.messages[0].parts[0].text) == (True, "Q: 1 + 1?\nA:")
    with pytest.raises(UserError, match="--data.input_template 'Q: {}' and --data.apply_chat_template both write"):
        config(data__input_template="Q: {}", data__apply_chat_template=True)


def test_datasets_are_mixed_by_their_shares_and_cut_to_so_many_rows(tmp_path):
    one, other = (
        write(tmp_path / f"{name}.jsonl", *({"messages": name, "answer": str(n)} for n in range(20))) for name in "ab"
    )
    assert len(prompts(f"{one},{other}")) == 40
    assert len(prompts(f"{one},{other}", data__max_samples=7)) == 7
    mixed = prompts(f"{one},{other}", data__prompt_probs="1.0,0.0")
    assert {found.messages[0].parts[0].text for found in mixed} == {"a"}


def test_the_split_is_the_one_that_is_named(tmp_path):
    import datasets

    rows = {name: datasets.Dataset.from_list([{"messages": name, "answer": "1"}]) for name in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "saved"))
    (found,) = prompts(str(tmp_path / "saved"), data__prompt_split="test")
    assert found.messages[0].parts[0].text == "test"
    own = config(eval__dataset=str(tmp_path / "saved"), eval__split="test", eval__steps=1)
    (found,) = run._load(own, own.eval.dataset, split=own.eval.split, check=check_prompt)
    assert found.messages[0].parts[0].text == "test"


def test_columns_are_kept_where_reward_requests_hold_them(tmp_path):
    file = str(write(tmp_path / "rows.jsonl", {"messages": "x", "answer": "1", "level": 3}))
    for request_fields, kept in (((), {}), (("step",), {}), (("columns", "step"), {"answer": "1", "level": 3})):
        (found,) = run._load(config(reward__request_fields=request_fields), file, split="train", check=check_prompt)
        assert found.columns == kept


keeping = partial(config, data__overlong_images="keep")


def test_a_prompt_with_more_images_than_allowed_is_refused(tmp_path):
    picture(8, 8).save(tmp_path / "a.png")
    record = {"messages": "<image><image>x", "answer": "1", "images": ["a.png", "a.png"]}
    (row,) = prompts(write(tmp_path / "rows.jsonl", record))
    policy = checkpoint_of(CharacterKit())
    for allowed in (0, 2):
        run._check_row(keeping(data__max_images_per_prompt=allowed), policy, None, None, row, lengths=[])
    with pytest.raises(UserError, match="2 images, more than --data.max_images_per_prompt 1"):
        run._check_row(keeping(data__max_images_per_prompt=1), policy, None, None, row, lengths=[])


def test_a_row_is_checked_as_its_environment_shows_it():
    class Shrinking:
        waits = False

        def shown_row(self, asked: Row) -> Row:
            return row(message("user", picture(1, 8)))

    large, policy = row(message("user", picture(8, 8))), checkpoint_of(CharacterKit())
    run._check_row(keeping(), policy, None, None, large, lengths=[])
    with pytest.raises(UserError, match="an image is too small"):
        run._check_row(keeping(), policy, Shrinking(), None, large, lengths=[])
    # What takes long to be shown is encoded when it is there.
    Shrinking.waits = True
    run._check_row(keeping(), policy, Shrinking(), None, large, lengths=[])


def test_the_engines_have_no_more_prompts_at_one_time_than_asked_for(monkeypatch):
    running: set[int] = set()
    most = []

    class Engine:
        def __init__(self) -> None:
            self.get_num_unfinished_requests = SimpleNamespace(remote=lambda: 0)
            self.generate_group = SimpleNamespace(remote=self.generate)
            self.rows: list[int] = []

        def generate(self, item: Row, settings: object) -> int:
            number = int(item.answer)
            running.add(number)
            self.rows.append(number)
            most.append(len(running))
            return number

    def wait(refs: list[int], *, num_returns: int) -> tuple[list[int], list[int]]:
        # The one that was asked for last is done first.
        running.discard(refs[-1])
        return refs[-1:], refs[:-1]

    def get(refs: Any) -> Any:
        return [SampledGroup(samples=[ref, ref]) if ref is not None else ref for ref in refs]

    monkeypatch.setattr(ray, "wait", wait)
    rows = [row(message("user", "?"), answer=str(number)) for number in range(1, 5)]
    for limit, expected in ((2, 2), (4, 4)):
        running.clear(), most.clear()
        engines = [Engine(), Engine()]
        own = config(rollout__vllm_generate_batch_size=limit)
        generator = KitSamplesGenerator(own, engines, group_settings(own))
        monkeypatch.setattr(ray, "get", lambda refs: refs if not isinstance(refs, list) or 0 in refs else get(refs))
        assert generator.generate(rows, generator.settings) == [[1, 1], [2, 2], [3, 3], [4, 4]]
        assert max(most) == expected
        # The second engine's is done, and it gets the next.
        assert [engine.rows for engine in engines] == ([[1], [2, 3, 4]] if limit == 2 else [[1, 3], [2, 4]])


def test_engines_are_started_as_the_flags_say(tiny_checkpoint):
    flags = {
        "vllm__tensor_parallel_size": 2,
        "vllm__gpu_memory_utilization": 0.25,
        "vllm__enable_prefix_caching": True,
        "vllm__enable_sleep": True,
        "train__colocate_all": True,
        "train__full_determinism_enable": True,
        "actor__num_gpus_per_node": 2,
        "ref__num_gpus_per_node": 2,
        "reward__timeout_s": 3.0,
        "reward__deadline_s": 4.0,
        "data__max_len": 99,
        "ds__param_dtype": "fp32",
        "actor__model_name_or_path": str(tiny_checkpoint("llm")),
        "reward__remote_url": "http://a/get_reward,http://b/get_reward",
    }
    told = ray_engines._engine_arguments(config(**flags), share=1, max_images=0, max_videos=0)
    wanted = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.25,
        "enable_prefix_caching": True,
        "enable_sleep_mode": True,
        "full_determinism": True,
        "max_model_len": 99,
        "dtype": "float32",
    }
    found = {name: told[name] for name in wanted}
    reward = told["reward"]
    assert (reward.timeout_s, reward.deadline_s, reward.remote_url) == (3.0, 4.0, flags["reward__remote_url"])
    if not ray_engines.cpu.has_cuda():
        # vLLM's cache on a CPU has a size of its own.
        found["gpu_memory_utilization"] = wanted["gpu_memory_utilization"]
    assert found == wanted


def test_the_output_of_workers_is_shown_where_asked_for(monkeypatch):
    told = []
    monkeypatch.setattr(nodes, "connect", lambda **arguments: told.append(arguments["log_to_driver"]))
    monkeypatch.setattr(nodes, "joins", lambda: True)
    for shown in (False, True):
        run._start_ray(config(logger__worker_logs=shown))
    assert told == [False, True]


SIZES = {"actor": (2, 2), "ref": (1, 4), "critic": (1, 3), "reward": (2, 1)}


@pytest.mark.parametrize(("flags", "gpus"), table("rl/rl_flags", "a_run_asks_for_the_gpus_of_its_models_and_engines"))
def test_a_run_asks_for_the_gpus_of_its_models_and_engines(flags, gpus):
    sizes = {
        f"{name}.{flag}": number
        for name, pair in SIZES.items()
        for flag, number in zip(("num_nodes", "num_gpus_per_node"), pair, strict=True)
    }
    engines = {"vllm.num_engines": 3, "vllm.tensor_parallel_size": 2}
    assert needed_gpus(dotted.replace(PPOConfig(), sizes | engines | flags)) == gpus


def test_what_is_sampled_follows_from_seed_step_and_place_so_that_a_resumed_run_repeats_it():
    def seeds(moment: Moment, *, first: int = 0, **flags: object) -> list[int]:
        own = config(**flags)
        settings = replace(group_settings(own), moment=moment)
        generator = KitSamplesGenerator(own, [], settings)
        return [generator._of_row(settings, place=place, first=first).sampling.seed for place in range(3)]

    second, third = (Moment(step=step, held_out=False) for step in (2, 3))
    assert seeds(third) == seeds(third)
    others = [
        *seeds(second),
        *seeds(replace(third, held_out=True)),
        *seeds(third, first=3),
        *seeds(third, train__seed=7),
    ]
    assert len({*seeds(third), *others}) == 15


@pytest.mark.parametrize("kept", [{}, {"eval.top_p": 0.5, "eval.top_k": 3}], ids=str)
def test_an_evaluation_samples_as_its_flags_say(kept):
    asked = []
    own = config(
        eval__dataset="e", eval__steps=1, eval__temperature=0.25, eval__n_samples_per_prompt=3, rollout__top_k=7
    )
    # What is left of the policy in training is not in an evaluation, unless it has such flags of its own.
    own = dotted.replace(own, {"rollout.top_p": 0.9} | kept)
    generator = KitSamplesGenerator(own, [], group_settings(own))
    generator.generate = lambda rows, settings: asked.append(settings.sampling) or []
    trained = object.__new__(loop.RLRun)
    trained.config, trained.learner, trained.eval_rows = own, SimpleNamespace(generator=generator), []
    trained.recorder = SimpleNamespace(evaluation=lambda step, groups: {})
    trained._evaluate(1)
    (sampling,) = asked
    expected = (kept.get("eval.top_p", 1.0), kept.get("eval.top_k", -1))
    assert (sampling.temperature, sampling.n_samples, sampling.top_p, sampling.top_k) == (0.25, 3, *expected)


@pytest.mark.parametrize(
    ("key", "saved"), [("", ["best_global_step1"]), ("none", []), ("eval_b_pass2", ["best_global_step2"])]
)
def test_the_best_checkpoint_is_that_of_the_metric_that_is_named(key, saved, monkeypatch):
    tags = []
    own = config(ckpt__best_metric_key=key, eval__dataset="e", eval__steps=1)
    group = SimpleNamespace(start=lambda method, tag, **given: tags.append((method.__name__, tag)) or [])
    best = BestEvaluation(key=own.ckpt.best_metric_key)
    checkpoints = Checkpoints(config=own, models=Models(policy=group), best=best)
    monkeypatch.setattr(ray, "get", lambda refs, timeout=None: refs)
    checkpoints.save_if_best({"eval_a_pass1": 0.5}, 1, {})
    checkpoints.save_if_best({"eval_a_pass1": 0.25, "eval_b_pass2": 0.75}, 2, {})
    assert [tag for method, tag in tags if method == "save_checkpoint"] == saved


@pytest.mark.parametrize("copies", [False, True])
def test_a_checkpoint_of_the_policy_has_a_copy_in_hugging_face_format_where_asked_for(copies, tmp_path):
    saved = []
    worker = object.__new__(KitPolicyActor)
    worker.strategy = SimpleNamespace(
        config=config(ckpt__output_dir=str(tmp_path), ckpt__disable_ds=True, ckpt__save_hf=copies),
        unsettled=contextlib.nullcontext,
        save_model=lambda model, tokenizer, folder: saved.append(folder),
    )
    worker.model, worker.processor, worker.average = None, None, None
    worker.save_checkpoint("global_step3")
    folder = str(tmp_path / "checkpoints" / "global_step3_hf")
    assert saved == ([folder] if copies else [])
    # The moving average of the weights is a model beside it.
    saved.clear()
    worker.average = SimpleNamespace(in_weights=contextlib.nullcontext)
    worker.save_checkpoint("global_step3")
    assert saved == ([folder, f"{folder}/ema"] if copies else [])


def test_whole_groups_of_a_step_are_kept_as_many_as_fit_in(tmp_path):
    rows = [row(message("user", str(number))) for number in range(3)]
    groups = [[generated_sample(of=item, text=text, reward=0.0) for text in "ab"] for item in rows]
    for count, kept in ((0, 0), (1, 2), (2, 2), (5, 4), (100, 6)):
        given, folder = config(logger__rollouts_per_step=count), tmp_path / str(count)
        recorded = without_workers(loop.RLRun, given, rows, folder=folder)
        recorded.folder.open("")
        assert len(recorded.recorder.rollouts(1, groups)) == kept


def test_the_critics_values_are_clipped_to_the_range_of_the_flag():
    for clip in (0.5, 5.0):
        worker = object.__new__(KitCriticActor)
        worker.strategy = PlayedStrategy(dotted.replace(PPOConfig(), {"critic.value_clip": clip}))
        # From 0 to 2 where 3 is right: 2 is held at the clip's bound.
        worker._run = lambda samples: torch.tensor([[2.0]])
        one = sample([1], [2])
        one.values, one.returns = torch.zeros(1), torch.tensor([3.0])
        assert worker._terms([one]).loss.item() == pytest.approx(max((3 - min(2.0, clip)) ** 2, 1.0) / 2)


@pytest.mark.parametrize("sleeps", [False, True])
def test_the_trainers_memory_is_freed_while_others_work(sleeps, monkeypatch):
    calls: list[str] = []

    def noting(name: str) -> Any:
        return lambda *given, **named: calls.append(name) or {}

    methods = ("reload_states", "fit", "offload_states")
    policy = PlayedGroup(SimpleNamespace(**{name: noting(name) for name in methods}))
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    fits = hand_out([[["a pass"]]], Models(policy=policy), trains_policy=True, kl_weight=0.0)
    update_models(fits, config(ds__enable_sleep=sleeps))
    assert calls == (["reload_states", "fit", "offload_states"] if sleeps else ["fit"])


def test_a_pass_without_loss_tokens_moves_nothing_and_is_no_part_of_a_mean():
    step, gradient = step_of([[0.0] * 3] * 2, [0.0] * 2, actor__entropy_coef=0.1)
    assert (step.loss, step.tokens) == (0.0, 0)
    assert gradient.abs().max() == 0.0
    assert {"policy_loss", "entropy_loss", "ppo_kl", "ppo_clip_ratio"} <= step.means.keys()
    assert set(step.means.values()) == {0.0}
    # Next to a step with tokens it weighs no more than one token.
    other, _ = step_of([[1.0] * 99], [1.0])
    assert mean_of_steps([step, replace(other, means=dict.fromkeys(step.means, 1.0))])["ppo_kl"] == pytest.approx(0.99)
