"""Flags of `train_dpo`: what contradicts what, and which model is the reference."""

import pytest
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, resolve
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


def dpo(**changes: object) -> DPOConfig:
    flags = {"model.model_name_or_path": "m", "data.dataset": "pairs.jsonl", "ds.param_dtype": "fp32"}
    return dotted.replace(DPOConfig(), flags | {name.replace("__", "."): value for name, value in changes.items()})


REFUSED = table("config/dpo_flags", "refused")


@pytest.mark.parametrize(("flags", "said"), REFUSED)
def test_what_contradicts_itself_or_has_no_effect_is_refused(flags, said):
    with pytest.raises(UserError) as refused:
        resolve(dpo(**flags))
    assert said in str(refused.value)


def test_the_reference_is_the_model_that_the_run_starts_from_unless_another_is_named():
    assert resolve(dpo()).ref.model_name_or_path == "m"
    assert resolve(dpo(ref__model_name_or_path="r")).ref.model_name_or_path == "r"
    assert resolve(dpo(model__simpo_enable=True)).ref.model_name_or_path is None


def test_a_second_model_is_loaded_only_where_the_reference_is_not_the_policy_without_its_adapter():
    lora = {"ds__lora__rank": 8}
    cases = {
        "full": dpo(),
        "adapter": dpo(**lora),
        "adapter, another reference": dpo(**lora, ref__model_name_or_path="r"),
        "SimPO": dpo(model__simpo_enable=True),
        "SimPO, adapter": dpo(**lora, model__simpo_enable=True),
    }
    found = {name: resolve(config) for name, config in cases.items()}
    assert {name: config.needs_reference_model for name, config in found.items()} == {
        "full": True,
        "adapter": False,
        "adapter, another reference": True,
        "SimPO": False,
        "SimPO, adapter": False,
    }
    assert [name for name, config in found.items() if config.refers_to_base] == ["adapter"]
