"""How many GPUs models and engines have where the flags leave it open, and what is said where they are not there."""

import os
import re
from contextlib import nullcontext

import pytest

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig, hardware
from lmm_r1.config.hardware import Offer, check_offered, needed_gpus, settled_counts, shape, shared_counts
from lmm_r1.errors import UserError

CPU, CLUSTER = Offer(per_node=(), joined=False), Offer(per_node=(8, 8), joined=True)
GPUS = {count: Offer(per_node=(count,), joined=False) for count in (1, 2, 6, 8)}
CRITIC = {"critic.model_name_or_path": "model", "algo.advantage.estimator": "gae"}
REWARD = {"reward.model_name_or_path": "rm"}


def ppo(changes: dict[str, object]) -> PPOConfig:
    """Settings with samples of 512 and updates of 128, which 1, 2, 4 and 8 ranks divide, and 3 and 6 do not."""
    batches = {"rollout.batch_size": 64, "rollout.n_samples_per_prompt": 8, "train.batch_size": 128}
    return dotted.replace(PPOConfig(), batches | changes)


def sizes(changes: dict[str, object], offer: Offer) -> dict[str, int]:
    """GPUs of what the run has, by model; counts of models that it does not have are not looked at."""
    config = ppo(changes)
    config = dotted.replace(config, settled_counts(config, ask=lambda: offer))
    found = {"actor": config.actor.gpus, "engines": config.vllm.gpus}
    found |= {"ref": config.ref.gpus} if config.algo.kl.init_coef else {}
    found |= {"critic": config.critic.gpus} if config.critic.model_name_or_path else {}
    found |= {"reward": config.reward.gpus} if config.reward.model_name_or_path else {}
    return found


@pytest.mark.parametrize(
    ("changes", "offer", "divided"),
    [
        ({}, CPU, {"actor": 1, "ref": 1, "engines": 1}),
        ({"train.colocate_all": True, "actor.num_gpus_per_node": 2}, CPU, {"actor": 2, "ref": 2, "engines": 2}),
        ({"ds.ulysses_size": 2}, CPU, {"actor": 2, "ref": 2, "engines": 1}),
        ({"train.colocate_all": True}, GPUS[8], {"actor": 8, "ref": 8, "engines": 8}),
        ({"train.colocate_all": True}, GPUS[1], {"actor": 1, "ref": 1, "engines": 1}),
        # A third of 8, and the policy has the rest: 4.
        ({}, GPUS[8], {"actor": 4, "ref": 2, "engines": 2}),
        ({"vllm.tensor_parallel_size": 2}, GPUS[8], {"actor": 4, "ref": 2, "engines": 2}),
        ({"algo.kl.init_coef": 0.0}, GPUS[8], {"actor": 4, "engines": 4}),
        # 5 of 6 do not divide the batches.
        ({"vllm.num_engines": 1, "algo.kl.init_coef": 0.0}, GPUS[6], {"actor": 4, "engines": 1}),
        ({"actor.num_gpus_per_node": 2, "ref.num_gpus_per_node": 2}, GPUS[8], {"actor": 2, "ref": 2, "engines": 4}),
        ({"train.colocate_actor_ref": True}, GPUS[8], {"actor": 4, "ref": 4, "engines": 4}),
        (CRITIC | REWARD, GPUS[8], {"actor": 4, "ref": 1, "critic": 1, "reward": 1, "engines": 1}),
        (
            CRITIC | REWARD | {"train.colocate_critic_reward": True, "train.colocate_all": True},
            GPUS[8],
            {"actor": 4, "ref": 4, "critic": 4, "reward": 4, "engines": 4},
        ),
        ({"train.colocate_all": True}, CLUSTER, {"actor": 16, "ref": 16, "engines": 16}),
        ({}, CLUSTER, {"actor": 8, "ref": 4, "engines": 4}),
        # Its GPUs may come later.
        ({}, Offer(per_node=(1,), joined=True), {"actor": 1, "ref": 1, "engines": 1}),
    ],
)
def test_open_counts_are_what_there_is_divided(changes, offer, divided):
    assert sizes(changes, offer) == divided


def test_who_shares_gpus_takes_machines_and_gpus_of_the_one_that_is_named():
    config = ppo({"train.colocate_all": True, "actor.num_nodes": 2, "actor.num_gpus_per_node": 4})
    settled = settled_counts(config, ask=lambda: pytest.fail("nothing is open that the flags do not tell"))
    assert (settled["ref.num_nodes"], settled["ref.num_gpus_per_node"], settled["vllm.num_engines"]) == (2, 4, 8)


def test_machines_alone_have_all_of_their_gpus():
    settled = settled_counts(ppo({"train.colocate_all": True, "actor.num_nodes": 2}), ask=lambda: CLUSTER)
    assert (settled["actor.num_gpus_per_node"], settled["vllm.num_engines"]) == (8, 16)


def test_a_number_of_gpus_is_made_up_of_the_fewest_machines():
    assert [shape(size, node=8) for size in (1, 8, 12, 16)] == [(1, 1), (1, 8), (2, 6), (2, 8)]


def test_a_division_is_told_in_a_line_and_one_rank_each_on_cpus_is_not(caplog):
    settled_counts(ppo({}), ask=lambda: CPU)
    assert caplog.messages == []
    settled_counts(ppo({}), ask=lambda: GPUS[8])
    (line,) = caplog.messages
    assert line.startswith("GPUs: actor 4, ref 2, engines 2; this machine has 8, which --actor.num_gpus_per_node")


@pytest.mark.parametrize(("gpus", "shared"), [(1, True), (2, True), (6, None), (8, None)])
def test_too_few_gpus_for_groups_of_their_own_are_shared(gpus, shared, caplog):
    settled = settled_counts(ppo({}), ask=lambda: GPUS[gpus])
    # A policy, its reference and an engine need three.
    assert settled["train.colocate_all"] is shared
    if shared:
        assert (settled["actor.num_gpus_per_node"], settled["vllm.num_engines"]) == (gpus, gpus)
        (line,) = caplog.messages
        assert line.startswith(f"GPUs: actor + ref + engines {gpus}; this machine has {gpus}, too few for groups")


def test_what_a_plan_may_not_change_is_settled():
    # A count is named, and there are enough; rollouts are made during updates; a cluster may grow; no GPU.
    for changes, offer in (
        ({"actor.num_gpus_per_node": 2}, GPUS[8]),
        ({"train.async_enable": True}, GPUS[8]),
        ({}, CLUSTER),
        ({}, CPU),
    ):
        assert settled_counts(ppo(changes), ask=lambda offer=offer: offer)["train.colocate_all"] is False
    assert settled_counts(ppo({"ref.num_gpus_per_node": 1}), ask=lambda: GPUS[2])["train.colocate_all"] is True


def test_all_gpus_are_shared_where_the_plan_asks_for_that():
    config = ppo({})
    config = dotted.replace(config, settled_counts(config, ask=lambda: GPUS[8]))
    assert (config.actor.gpus, config.vllm.gpus) == (4, 2)
    config = dotted.replace(config, shared_counts(config, ask=lambda: GPUS[8]))
    assert (config.train.colocate_all, config.actor.gpus, config.ref.gpus, config.vllm.gpus) == (True, 8, 8, 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train.colocate_all": False},
            "^actor, ref, engines need 3 GPUs or more, and this machine has 2; let them take turns",
        ),
        (
            {"train.colocate_all": False, "ref.num_gpus_per_node": 1},
            "^actor, engines need 2 GPUs or more, and this machine has 2, of which other flags take 1",
        ),
        ({"train.async_enable": True}, "this machine has 2; take a machine with more, or name their counts"),
    ],
)
def test_models_that_must_have_gpus_of_their_own_and_do_not_fit_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        settled_counts(ppo(changes), ask=lambda: GPUS[2])


@pytest.mark.parametrize(
    ("counts", "offer", "said"),
    [
        ((8, 8), GPUS[8], "the run asks for 17 GPUs (actor 8, ref 8, engines 1), and this machine has 8;"),
        ((4, 3), GPUS[8], None),
        # On CPUs as many ranks as cores.
        ((2, 2), CPU, None),
        ((8, 2), CPU, "the run asks for 11 GPUs (actor 8, ref 2, engines 1), and this machine has none, and 2 cores"),
    ],
)
def test_named_counts_that_are_not_there_are_refused_with_what_is(counts, offer, said, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    policy, reference = counts
    named = {"actor.num_gpus_per_node": policy, "ref.num_gpus_per_node": reference, "vllm.num_engines": 1}
    config = dotted.replace(ppo(named), settled_counts(ppo(named)))
    assert needed_gpus(config) == policy + reference + 1
    with nullcontext() if said is None else pytest.raises(UserError, match=f"^{re.escape(said)}"):
        check_offered(config, offer)


@pytest.mark.parametrize(
    ("changes", "visible", "named", "count"),
    [
        ({}, 0, None, 1),
        ({}, 8, None, 8),
        ({"train.batch_size": 128}, 6, None, 4),
        ({"train.batch_size": 8, "train.micro_batch_size": 4}, 8, None, 2),
        ({"ds.ulysses_size": 2, "train.batch_size": 3}, 7, None, 6),
        ({"train.batch_size": 128}, 0, "3", 3),
        ({}, 8, "auto", 8),
    ],
)
def test_a_supervised_command_takes_the_visible_gpus_that_divide_its_batches(
    changes, visible, named, count, monkeypatch
):
    monkeypatch.setattr(hardware, "visible_gpus", lambda: visible)
    monkeypatch.delenv(hardware.PROCESSES, raising=False)
    if named is not None:
        monkeypatch.setenv(hardware.PROCESSES, named)
    assert hardware.supervised_processes(dotted.replace(SFTConfig(), changes)) == count
