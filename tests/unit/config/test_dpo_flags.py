"""Flags of `train_dpo`: what contradicts what, and which model is the reference."""

import pytest

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, resolve
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit


def dpo(**changes: object) -> DPOConfig:
    flags = {"model.model_name_or_path": "m", "data.dataset": "pairs.jsonl", "ds.param_dtype": "fp32"}
    return dotted.replace(DPOConfig(), flags | {name.replace("__", "."): value for name, value in changes.items()})


REFUSED = [
    ({"model.beta": 0.0}, "--model.beta 0 must be above 0"),
    ({"model.label_smoothing": 0.5}, "--model.label_smoothing 0.5: must be at least 0 and below 0.5"),
    ({"model.label_smoothing": -0.1}, "--model.label_smoothing -0.1: must be at least 0"),
    (
        {"model.ipo_enable": True, "model.simpo_enable": True},
        "--model.ipo_enable and --model.simpo_enable are two losses",
    ),
    ({"model.ipo_enable": True, "model.label_smoothing": 0.1}, "has no part in --model.ipo_enable"),
    ({"model.simpo_gamma": 1.0}, "--model.simpo_gamma 1 needs --model.simpo_enable"),
    ({"model.simpo_gamma": -1.0, "model.simpo_enable": True}, "--model.simpo_gamma -1 must not be negative"),
    ({"model.nll_loss_coef": -1.0}, "--model.nll_loss_coef -1 must not be negative"),
    ({"ref.model_name_or_path": "r", "model.simpo_enable": True}, "--model.simpo_enable has no reference model"),
    ({"ref.offload": True}, "add --ds.zero_stage 3"),
    ({"ref.offload": True, "ds.zero_stage": 3, "ds.lora.rank": 8}, "the reference is the model without its adapter"),
    ({"data.input_template": "Q: {}"}, "name its column with --data.prompt_key"),
    (
        {"data.input_template": "Q: {}", "data.prompt_key": "q", "data.apply_chat_template": True},
        "both write the text around a prompt",
    ),
    ({"eval.steps": 5}, "has nothing to evaluate on; give --eval.dataset"),
    ({"eval.before_training": True}, "has nothing to evaluate on; give --eval.dataset"),
    ({"ckpt.best_metric_key": "eval_loss"}, "names no metric of an evaluation; give --eval.dataset"),
    ({"train.batch_size": 6, "train.micro_batch_size": 4}, "--train.batch_size 6 must be a multiple of"),
    ({"ds.load_in_4bit": True}, "--ds.load_in_4bit: weights in 4 bits are not trained; give --ds.lora.rank"),
    ({"ds.lora.use_rslora": True}, "--ds.lora.use_rslora is a kind of LoRA; give --ds.lora.rank, too"),
    (
        {"ds.ulysses_size": 2, "train.shared_prefix_enable": False},
        "--ds.ulysses_size 2 splits packed sequences; add --ds.packing_samples",
    ),
]


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
