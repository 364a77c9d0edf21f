"""Values of flags that contradict each other or have no effect are refused by name, with what to take instead."""

import re

import pytest
from helpers.tables import frozen, table

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, RMConfig, SFTConfig, model_paths, resolve
from lmm_r1.errors import UserError

RL = {
    "actor.model_name_or_path": "model",
    "actor.num_gpus_per_node": 1,
    "ref.num_gpus_per_node": 1,
    "data.prompt_dataset": "rows.jsonl",
    "reward.remote_url": "http://127.0.0.1:5000/get_reward",
    "rollout.n_samples_per_prompt": 8,
    "rollout.batch_size": 32,
}
SFT = {"model.model_name_or_path": "model", "data.dataset": "rows.jsonl"}
KD = SFT | {"teacher.model_name_or_path": "t"}
TRAINERS = {
    "rl": (PPOConfig, RL),
    "sft": (SFTConfig, SFT),
    "dpo": (DPOConfig, SFT),
    "kd": (KDConfig, KD),
    "rm": (RMConfig, SFT),
}

REFUSED = [
    pytest.param(trainer, changes, id=f"{trainer} {' '.join(changes)}")
    for trainer in TRAINERS
    for changes in frozen("config/flag_refusals", trainer)
]


def case(changes: dict[str, object]) -> str:
    return " ".join(changes)


def dpo(**changes: object) -> DPOConfig:
    given = {name.replace("__", "."): value for name, value in changes.items()}
    return resolve(dotted.replace(DPOConfig(), SFT | given))


@pytest.mark.parametrize(("trainer", "changes"), REFUSED)
def test_flags_that_contradict_each_other_are_refused_by_name_with_what_to_do(trainer, changes):
    config_class, needed = TRAINERS[trainer]
    with pytest.raises(UserError) as refused:
        resolve(dotted.replace(config_class(), needed | changes))
    told = str(refused.value)
    named = set(re.findall(r"--([a-z_]+(?:\.[\w.]*\w)?)", told)) - {"data.no_multiturn"}
    assert named <= dotted.leaf_types(config_class).keys(), "flags that this command has"
    assert named or "data.no_multiturn" in told
    assert re.search("; |must |is missing", told), "what to do"


@pytest.mark.parametrize("changes", table("config/flag_refusals", "what_goes_together_is_taken"), ids=case)
def test_what_goes_together_is_taken(changes):
    resolve(dotted.replace(SFTConfig(), SFT | changes))


def test_distillation_needs_only_the_teacher_in_addition():
    model = resolve(dotted.replace(KDConfig(), KD)).model
    assert (model.kd_coef, model.kd_loss, model.kd_temperature) == (0.4, "forward_kl", 1.0)


@pytest.mark.parametrize(
    ("changes", "reference", "second_model", "refers_to_base"),
    [
        ({}, "model", True, False),
        ({"ref__model_name_or_path": "r"}, "r", True, False),
        ({"ds__lora__rank": 8}, "model", False, True),
        ({"ds__lora__rank": 8, "ref__model_name_or_path": "r"}, "r", True, False),
        ({"model__simpo_enable": True}, None, False, False),
        ({"ds__lora__rank": 8, "model__simpo_enable": True}, None, False, False),
    ],
)
def test_a_second_model_is_loaded_unless_the_reference_is_the_policy_without_its_adapter(
    changes, reference, second_model, refers_to_base
):
    config = dpo(**changes)
    assert config.ref.model_name_or_path == reference
    assert (config.needs_reference_model, config.refers_to_base) == (second_model, refers_to_base)
    assert ("ref.model_name_or_path" in model_paths(config)) is second_model, "the models that a resumed run must have"
