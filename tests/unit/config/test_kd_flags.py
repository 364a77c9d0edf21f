"""Flags of `train_kd`: what contradicts what, and that those of `train_sft` are checked as there."""

import pytest
from helpers.tables import table

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


REFUSED = table("config/kd_flags", "refused")


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_contradicts_itself_or_has_no_effect_is_refused(flags, said):
    with pytest.raises(UserError) as refused:
        resolve(kd(**flags))
    assert said in str(refused.value)


def test_the_teacher_alone_is_asked_for_beside_what_fine_tuning_needs():
    resolved = resolve(kd())
    assert isinstance(resolved, KDConfig)
    assert (resolved.model.kd_coef, resolved.model.kd_loss, resolved.model.kd_temperature) == (0.4, "forward_kl", 1.0)
