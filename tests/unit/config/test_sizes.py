"""Batches that no flag names: made of the rows and shared out among the processes, with numbers worked out by hand."""

import pytest
from helpers.tables import frozen

from lmm_r1 import dotted
from lmm_r1.config import DPOConfig, PPOConfig, SFTConfig, resolve, sized_ppo, sized_supervised
from lmm_r1.errors import UserError


def rl(rows: int, **changes: object) -> tuple[int, int, int, str | None]:
    """Prompts of a step, responses of a prompt, samples of an update, and what is said."""
    values = {"actor.model_name_or_path": "m", "data.prompt_dataset": "p", "ds.param_dtype": "bf16"}
    one_gpu = {"actor.num_gpus_per_node": 1, "ref.num_gpus_per_node": 1}
    given = one_gpu | {name.replace("__", "."): value for name, value in changes.items()}
    config, told = sized_ppo(resolve(dotted.replace(PPOConfig(), values | given)), rows=rows)
    assert config.rollout.vllm_generate_batch_size == config.rollout.batch_size
    return config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.train.batch_size, told


def on_gpus(count: int) -> dict[str, object]:
    return {"actor__num_gpus_per_node": count, "ref__num_gpus_per_node": count}


def sft(rows: int, *, processes: int = 1, config_class: type = SFTConfig, **changes: object) -> tuple[int, int]:
    """Rows of an update, and of a pass."""
    values = {"model.model_name_or_path": "m", "data.dataset": "d", "ds.param_dtype": "bf16"}
    given = {name.replace("__", "."): value for name, value in changes.items()}
    config, _ = sized_supervised(
        resolve(dotted.replace(config_class(), values | given)), rows=rows, processes=processes
    )
    return config.train.batch_size, config.train.micro_batch_size


def test_forty_prompts_make_five_steps_of_eight_with_one_update_each():
    told = (
        "sizes for 40 prompts: --rollout.batch_size 8 x --rollout.n_samples_per_prompt 8 a step, "
        "--train.batch_size 64 an update"
    )
    assert rl(40) == (8, 8, 64, told)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_the_sizes_are_the_same_on_one_to_eight_gpus(gpus):
    assert rl(40, **on_gpus(gpus)) == rl(40)
    assert rl(50, **on_gpus(gpus)) == rl(50)
    assert (sft(40, processes=gpus)[0], sft(50, processes=gpus)[0]) == (8, 8)


@pytest.mark.parametrize(
    ("rows", "sizes"), frozen("config/sizes", "a_step_is_a_fifth_of_the_prompts_and_openrlhfs_at_most")
)
def test_a_step_is_a_fifth_of_the_prompts_and_openrlhfs_at_most(rows, sizes):
    assert rl(rows)[:3] == sizes


def test_many_gpus_share_the_samples_of_a_step():
    # 16 processes share 8 samples of a prompt only two prompts at a time.
    assert rl(5, **on_gpus(16))[:3] == (2, 8, 16)
    # An update of at most 128 samples that 12 processes can share has 120.
    assert rl(1000, **on_gpus(12))[0] * 8 % 12 == 0
    assert rl(1000, **on_gpus(12))[2] == 120
    with pytest.raises(
        UserError, match="gives 1 prompts; 16 processes .* need 2 at least: add rows, or take fewer GPUs"
    ):
        rl(1, **on_gpus(16))


def test_sizes_that_are_named_are_taken_as_they_are():
    assert rl(40, rollout__batch_size=40, rollout__n_samples_per_prompt=2, train__batch_size=16) == (40, 2, 16, None)
    # A step that no flag names holds the samples of the update that one does.
    assert rl(40, train__batch_size=128)[:3] == (16, 8, 128)
    assert rl(40, rollout__batch_size=4)[:3] == (4, 8, 32)


def test_a_group_is_one_response_where_nothing_is_compared():
    assert rl(40, algo__advantage__estimator="gae", critic__num_gpus_per_node=1)[:3] == (8, 1, 8)
    filters = {"algo__advantage__estimator": "reinforce", "algo__dynamic_filtering_enable": True}
    assert rl(40, **filters)[:3] == (8, 8, 64)


@pytest.mark.parametrize(
    ("rows", "processes", "sizes"),
    frozen("config/sizes", "an_update_is_a_fifth_of_the_rows_that_the_processes_can_share"),
)
def test_an_update_is_a_fifth_of_the_rows_that_the_processes_can_share(rows, processes, sizes):
    assert sft(rows, processes=processes) == sizes


def test_other_supervised_stages_take_their_sizes_of_the_rows_too():
    assert sft(40, config_class=DPOConfig) == (8, 8)


def test_a_pass_divides_an_update_that_is_named():
    assert sft(40, train__batch_size=12) == (12, 4)
    assert sft(40, processes=4, train__batch_size=12) == (12, 1)
    with pytest.raises(UserError, match="--train.batch_size 12 must be a multiple of the 8 processes"):
        sft(40, processes=8, train__batch_size=12)


def test_ranks_that_share_samples_count_as_one():
    assert sft(40, processes=8, ds__ulysses_size=4, ds__packing_samples=True) == (8, 4)


def test_fewer_rows_than_processes_are_refused():
    with pytest.raises(UserError, match="--data.dataset d gives 5 rows for 8 processes"):
        sft(5, processes=8)


def test_a_stage_that_names_no_folder_has_one_of_its_own():
    values = {"model.model_name_or_path": "m", "data.dataset": "d", "ds.param_dtype": "bf16"}
    assert resolve(dotted.replace(SFTConfig(), values)).ckpt.output_dir == "runs/sft"
    named = values | {"logger.stage_name": "cold", "ckpt.output_dir": "out"}
    assert resolve(dotted.replace(SFTConfig(), named)).ckpt.output_dir == "out"
