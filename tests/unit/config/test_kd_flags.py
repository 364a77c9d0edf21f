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
    ({"model.kd_coef": 0.0}, "--model.kd_coef 0 must be above 0, where nothing would be learned of the teacher"),
    (
        {"model.kd_coef": 1.1},
        "--model.kd_coef 1.1 must be above 0, where nothing would be learned of the teacher, and at",
    ),
    ({"model.kd_temperature": 0.0}, "--model.kd_temperature 0 must be above 0"),
    ({"model.kd_loss": "jsd", "model.kd_beta": 0.0}, "--model.kd_beta 0 must be above 0 and below 1"),
    ({"model.kd_loss": "jsd", "model.kd_beta": 1.0}, "take --model.kd_loss forward_kl and reverse_kl"),
    ({"model.kd_beta": 0.1}, "--model.kd_beta 0.1 needs --model.kd_loss jsd"),
    ({"teacher.offload": True}, "add --ds.zero_stage 3"),
    ({"ds.tensor_parallel_size": 2}, "take --ds.zero_stage 3"),
    ({"ds.use_liger_kernel": True}, "--ds.use_liger_kernel is not available in this version"),
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
