"""What ZeRO keeps of a model, in bytes worked out by hand."""

from dataclasses import replace

import torch

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.models.adapters import packed_bytes
from lmm_r1.tools.planning.pass_memory import BUCKET, ModelSize, ZeroSettings, gathered_bytes, trained_states
from lmm_r1.tools.planning.run_plan import zero_settings

# A model of 3.2 billion numbers in bf16, all of them trained.
BILLION = 10**9
WHOLE = ModelSize(
    parameters=32 * BILLION // 10,
    weight_bytes=64 * BILLION // 10,
    trained=32 * BILLION // 10,
    trained_bytes=64 * BILLION // 10,
    largest_trained=BILLION // 10,
    matrices=32 * BILLION // 10,
)
EIGHT = ZeroSettings(stage=3, ranks=8, offload=False, weight_bytes=2, sum_bytes=4, on_gpu=True, passes=2)


def test_zero_3_shares_everything_and_gathers_a_billion_weights():
    states = trained_states(WHOLE, EIGHT)
    # A rank has 0.4 billion numbers: 2 bytes of weights and a bucket, 4 of the copy, 8 of the moments, 4 of the sums.
    assert states.weights == 800_000_000 + 2 * BUCKET
    assert (states.master, states.moments, states.sums) == (1_600_000_000, 3_200_000_000, 1_600_000_000)
    # Beside a billion gathered weights, the bucket copied together, and a rank's share of it.
    assert gathered_bytes(WHOLE) == 2 * BILLION
    assert states.backward == 2 * BILLION + 2 * BUCKET + 2 * BUCKET // 8
    assert states.host == 0


def test_zero_2_shares_all_but_the_weights():
    states = trained_states(WHOLE, replace(EIGHT, stage=2))
    assert states.weights == 6_400_000_000
    assert (states.master, states.moments, states.sums) == (1_600_000_000, 3_200_000_000, 1_600_000_000)
    # The bucket is made whole, and what is reduced is copied out of it.
    assert states.backward == 2 * BUCKET + 800_000_000


def test_with_offloading_the_gpu_has_weights_and_the_host_the_rest():
    alone = replace(EIGHT, stage=2, ranks=1, offload=True)
    states = trained_states(WHOLE, alone)
    assert (states.master, states.moments, states.sums) == (0, 0, 0)
    assert states.weights == 6_400_000_000 + 200_000_000
    # 4 of the copy, 4 of its gradient, 8 of the moments, 4 of the sums, 2 of what goes back.
    assert states.host == 22 * 3_200_000_000 + 200_000_000
    assert trained_states(WHOLE, replace(alone, stage=3)).host == 20 * 3_200_000_000


def test_without_sharing_one_rank_has_all_of_it():
    states = trained_states(WHOLE, replace(EIGHT, stage=0, ranks=1))
    # 2 of the weights, 4 of the copy, 8 of the moments, 2 of the gradients.
    assert states.steady == 16 * 3_200_000_000
    assert trained_states(WHOLE, replace(EIGHT, stage=0)) == states, "ranks change nothing"


def test_moments_in_8_bits_take_a_quarter():
    states = trained_states(WHOLE, replace(EIGHT, moment_bytes=1))
    assert states.moments == 800_000_000
    config = dotted.replace(PPOConfig(), {"ds.param_dtype": "bf16"})
    found = (zero_settings(config, optim, ranks=1, on_gpu=True, passes=1) for optim in ("adamw_8bit", "adam", "muon"))
    assert [zero.moment_bytes for zero in found] == [1, 4, 4]


def test_weights_in_4_bits_take_half_a_byte_and_their_scales_and_the_largest_is_whole_once():
    # 256 blocks of 64 numbers with a byte each, which have one scale of 4 bytes in common.
    assert packed_bytes(64 * 256) == 32 * 256 + 256 + 4
    weights = [torch.empty(128, 128, dtype=torch.bfloat16), torch.empty(64, 128, dtype=torch.bfloat16)]
    size = replace(WHOLE, weight_bytes=100_000).in_4bit(weights)
    assert size.weight_bytes == 100_000 - 32_768 - 16_384 + 8_452 + (4_096 + 128 + 4) + 32_768
    assert size.read_bytes == 100_000


def test_without_a_gpu_gradients_take_memory_as_they_come_and_the_optimizer_makes_temporaries():
    states = trained_states(WHOLE, replace(EIGHT, stage=2, ranks=2, on_gpu=False, weight_bytes=4, passes=1))
    assert (states.backward, states.sums) == (4 * 3_200_000_000, 0)
    # The gradients as they came, a single-precision copy of them, a root and a quotient.
    assert states.step == (4 + 4 + 8) * 1_600_000_000


ALONE = replace(EIGHT, stage=2, ranks=1)


def test_on_one_rank_zero_2_keeps_sums_of_gradients_and_one_gradient_at_a_time():
    states = trained_states(WHOLE, ALONE)
    # 2 of the weights, 4 of the copy, 8 of the moments, 4 of the sums.
    assert states.steady == 18 * 3_200_000_000
    # The largest weight has 0.1 billion numbers.
    assert states.peak(10**9) == states.steady + 200_000_000 + 10**9
    # Sums in bf16 are copied into single precision for the step.
    assert trained_states(WHOLE, replace(ALONE, sum_bytes=2)).step == 4 * 3_200_000_000


def test_on_one_rank_weights_in_fp32_are_the_optimizers():
    states = trained_states(WHOLE, replace(ALONE, on_gpu=False, weight_bytes=4, passes=1))
    assert (states.master, states.sums, states.backward) == (0, 4 * 3_200_000_000, 4 * 100_000_000)
    # A root and a quotient.
    assert states.step == 8 * 3_200_000_000


def test_muon_keeps_deepspeeds_bucket_on_one_rank():
    assert trained_states(WHOLE, replace(ALONE, muon=True)).backward == 2 * BUCKET + 6_400_000_000
