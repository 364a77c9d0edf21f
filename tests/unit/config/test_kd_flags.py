"""Flags of `train_kd`: what contradicts what, and that those of `train_sft` are checked as there."""

import pytest

from lmm_r1 import dotted
from lmm_r1.config import KDConfig, resolve
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


def kd(**changes: object) -> KDConfig:
    flags = {
        "model.model_name_or_path": "m",
        "teacher.model_name_or_path": "t",
        "data.dataset": "rows.jsonl",
        "ds.param_dtype": "fp32",
    }
    return dotted.replace(KDConfig(), flags | changes)


REFUSED = [
    ({"teacher.model_name_or_path": None}, "--teacher.model_name_or_path is missing"),
    ({"model.kd_coef": 0.0}, "--model.kd_coef 0 must be above 0, so that the teacher counts"),
    (
        {"model.kd_coef": 1.1},
        "--model.kd_coef 1.1 must be above 0, so that the teacher counts, and at",
    ),
    ({"model.kd_temperature": 0.0}, "--model.kd_temperature 0 must be above 0"),
    ({"model.kd_loss": "jsd", "model.kd_beta": 0.0}, "--model.kd_beta 0 must be above 0 and below 1"),
    ({"model.kd_loss": "jsd", "model.kd_beta": 1.0}, "take --model.kd_loss forward_kl and reverse_kl"),
    ({"model.kd_beta": 0.1}, "--model.kd_beta 0.1 needs --model.kd_loss jsd"),
    ({"teacher.offload": True}, "add --ds.zero_stage 3"),
    ({"ds.tensor_parallel_size": 2}, "take --ds.zero_stage 3"),
    ({"rollout.on_policy_share": 1.5}, "--rollout.on_policy_share 1.5 must be from 0 to 1"),
    ({"rollout.temperature": 0.5}, "--rollout.temperature 0.5 needs --rollout.on_policy_share above 0"),
    ({"rollout.max_new_tokens": 9}, "--rollout.max_new_tokens 9 needs --rollout.on_policy_share above 0"),
    ({"vllm.enforce_eager": True}, "--vllm.* is of the engine that samples; it needs --rollout.on_policy_share"),
    ({"rollout.on_policy_share": 0.5, "rollout.max_new_tokens": 0}, "--rollout.max_new_tokens 0 must be at least 1"),
    ({"rollout.on_policy_share": 0.5, "rollout.temperature": -1.0}, "--rollout.temperature -1.0: must be 0 or more"),
    ({"rollout.on_policy_share": 0.5, "rollout.top_p": 0.0}, "--rollout.top_p 0.0: must be above 0"),
    (
        {"rollout.on_policy_share": 0.5, "ds.ulysses_size": 2, "ds.packing_samples": True},
        "ranks that share sequences would each sample others; leave --ds.ulysses_size out",
    ),
    ({"rollout.on_policy_share": 0.5, "data.dataloader_num_workers": 1}, "leave --data.dataloader_num_workers out"),
    (
        {"rollout.on_policy_share": 0.5, "model.pretrain_mode_enable": True, "data.input_template": None},
        "has no prompts with --model.pretrain_mode_enable",
    ),
    ({"eval.verifier": "math"}, "has no rows to judge answers to; give --eval.dataset"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_contradicts_itself_or_has_no_effect_is_refused(flags, said):
    with pytest.raises(UserError) as refused:
        resolve(kd(**flags))
    assert said in str(refused.value)


def test_the_teacher_alone_is_asked_for_beside_what_fine_tuning_needs():
    resolved = resolve(kd())
    assert isinstance(resolved, KDConfig)
    assert (resolved.model.kd_coef, resolved.model.kd_loss, resolved.model.kd_temperature) == (0.4, "forward_kl", 1.0)
