"""Learning rates and adapters that no flag names follow from what is trained, and so does the reference of RL."""

import pytest
import yaml

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, RMConfig, SFTConfig, resolve, to_yaml
from lmm_r1.config.hardware import asked_gpus
from lmm_r1.config.resolve import settings_of_the_run

RL = {"actor.model_name_or_path": "m", "data.prompt_dataset": "rows.jsonl"}
SUPERVISED = {"model.model_name_or_path": "m", "data.dataset": "rows.jsonl"}
OWN = {KDConfig: {"teacher.model_name_or_path": "t"}}
RATES = {SFTConfig: 5e-6, KDConfig: 5e-6, DPOConfig: 1e-5, RMConfig: 9e-6}
GAE = {"algo__advantage__estimator": "gae"}


def rl(**changes: object) -> PPOConfig:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return resolve(dotted.replace(PPOConfig(), RL | given))


@pytest.mark.parametrize(("config_class", "rate"), RATES.items())
def test_a_supervised_trainer_trains_adapters_with_ten_times_the_rate_and_twice_the_rank(config_class, rate):
    config = dotted.replace(config_class(), SUPERVISED | OWN.get(config_class, {}))
    named = {"adam.lr": rate, "ds.lora.alpha": 16}
    full, adapters, kept = (
        resolve(dotted.replace(config, changes))
        for changes in ({}, {"ds.lora.rank": 64}, {"ds.lora.rank": 64, **named})
    )
    assert (full.adam.lr, full.ds.lora.alpha) == (rate, None)
    assert (adapters.adam.lr, adapters.ds.lora.alpha) == (pytest.approx(10 * rate, rel=1e-12), 128)
    assert (kept.adam.lr, kept.ds.lora.alpha) == (rate, 16)


def test_policy_and_critic_have_rates_of_their_own_and_each_is_kept_if_it_is_named(caplog):
    full, adapters, named = rl(**GAE), rl(**GAE, ds__lora__rank=8), rl(**GAE, ds__lora__rank=8, actor__adam__lr=1e-6)
    assert (full.actor.adam.lr, full.critic.adam.lr) == (1e-6, 9e-6)
    assert (adapters.actor.adam.lr, adapters.critic.adam.lr, adapters.ds.lora.alpha) == (1e-5, 9e-5, 16)
    assert (named.actor.adam.lr, named.critic.adam.lr) == (1e-6, 9e-5)
    # 16 / sqrt(64) = 128 / 64.
    assert rl(ds__lora__rank=64, ds__lora__use_rslora=True).ds.lora.alpha == 16
    assert [message for message in caplog.messages if "LoRA" in message][:2] == [
        f"LoRA of rank 8: --ds.lora.alpha 16, {rate}--critic.adam.lr 9e-05, unless they are named"
        for rate in ("--actor.adam.lr 1e-05, ", "")
    ]


def test_the_run_folder_records_what_adapters_are_trained_with():
    settings = yaml.safe_load(to_yaml(rl(ds__lora__rank=8)))
    assert (settings["actor"]["adam"]["lr"], settings["ds"]["lora"]["alpha"]) == (1e-5, 16)
    # There is no critic, whose rate would be refused when the file is read again.
    assert settings["critic"]["adam"]["lr"] is None


def test_a_number_that_an_earlier_version_wrote_without_effect_makes_no_other_run(caplog):
    earlier, now = settings_of_the_run(rl(critic__adam__lr=9e-6, ds__lora__alpha=16)), settings_of_the_run(rl())
    assert [message.split()[0] for message in caplog.messages if "no effect" in message] == [
        "--ds.lora.alpha",
        "--critic.adam.lr",
    ]
    assert {"ds.lora.alpha", "critic.adam.lr"} <= earlier.keys()
    assert now == {flag: earlier[flag] for flag in now}
    # It wrote 0.2 where none was given; the range is the same.
    assert settings_of_the_run(rl(actor__eps_clip=0.2)) == now
    assert settings_of_the_run(rl(actor__eps_clip=0.3)) != now


@pytest.mark.parametrize(
    ("changes", "base", "second"),
    [
        ({}, False, True),
        ({"ds__lora__rank": 8}, True, False),
        ({"ds__lora__rank": 8, "algo__kl__init_coef": 0.0}, False, False),
    ],
)
def test_with_lora_the_reference_is_the_policy_without_its_adapters(changes, base, second):
    config = rl(**changes)
    assert (config.refers_to_base, config.needs_reference_model) == (base, second)
    assert list(asked_gpus(config)) == ["actor", *(["ref"] if second else []), "engines"]


def test_flags_of_a_second_model_are_reported_without_one(caplog):
    rl(ds__lora__rank=8, ds__zero_stage=3, ref__offload=True, ref__num_gpus_per_node=2, train__colocate_actor_ref=True)
    reason = " has no effect unless --ds.lora.rank is 0"
    told = [message.removesuffix(reason) for message in caplog.messages if message.endswith(reason)]
    assert told == ["--train.colocate_actor_ref", "--ref.num_gpus_per_node 2", "--ref.offload"]
