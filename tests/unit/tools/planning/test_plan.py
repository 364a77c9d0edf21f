"""Who holds what while others work, what fits, and what a run that does not fit is told; numbers worked out by hand."""

from dataclasses import replace

import pytest

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.errors import ListedError, UserError
from lmm_r1.tools.planning.choices import refuse_excess
from lmm_r1.tools.planning.pass_memory import ModelSize, TrainedStates
from lmm_r1.tools.planning.plan import GIB, Device, Machine, PassEstimate, Plan, PlannedEngine, PlannedModel

SIZE = ModelSize(
    parameters=GIB, weight_bytes=2 * GIB, trained=GIB, trained_bytes=2 * GIB, largest_trained=0, matrices=GIB
)
# A GiB, and another one for every 1024 tokens.
PASSES = PassEstimate(floor=GIB, base=GIB, per_token=GIB / 1024, per_image=0, image_tokens=0)
STATES = TrainedStates(
    weights=2 * GIB, master=4 * GIB, moments=8 * GIB, sums=4 * GIB, backward=GIB, after_backward=2 * GIB, step=3 * GIB
)
POLICY = PlannedModel(
    role="policy",
    size=SIZE,
    passes=PASSES,
    states=STATES,
    context=GIB,
    pass_tokens=4096,
    ranks=1,
    gpus=1,
)
REFERENCE = replace(POLICY, role="reference", states=None, resident=2 * GIB)
ENGINE = PlannedEngine(
    weights=2 * GIB, utilization=0.375, share=30 * GIB, asleep=2 * GIB, least=10 * GIB, host=2 * GIB, ranks=1
)
SHARED = Device(name="each GPU", models=[POLICY, REFERENCE], engine=ENGINE, bucket=GIB)


def plan(device: Device = SHARED, *, gpu: int = 80, host: int = 64) -> Plan:
    return Plan(
        machine=Machine(gpu_bytes=gpu * GIB, host_bytes=host * GIB),
        devices=[device],
        host={"workers": 3 * GIB, "engines, asleep": 2 * GIB},
        pass_tokens=4096,
        fitting_tokens=8192,
        longest=2048,
    )


def test_each_phase_has_what_works_and_what_the_others_hold_meanwhile():
    # Waiting: the policy 1 + 2 + 4 + 8 + 4, the reference model 1 + 2. A pass of 4096 tokens takes 1 + 4.
    assert (POLICY.idle, REFERENCE.idle) == (19 * GIB, 3 * GIB)
    assert {name: size // GIB for name, size in SHARED.phases().items()} == {
        "generation": 19 + 3 + 30,
        # The pass and its buffers, 6, are more than the step's 3; the engine sleeps.
        "update of the policy": 19 + 6 + 3 + 2,
        "passes of the reference": 19 + 3 + 5 + 2,
        # The engine's weights are back, and a bucket is on its way.
        "new weights": 19 + 3 + 1 + 4,
    }
    assert SHARED.peak[0] == "generation"
    merging = replace(POLICY, size=replace(SIZE, merging_bytes=GIB))
    adapted = replace(SHARED, models=[merging, REFERENCE])
    assert adapted.phases()["new weights"] // GIB == 19 + 3 + 1 + 1 + 4


def test_tokens_that_fit_are_what_is_left_beside_the_others():
    # 60 are usable: 3 of the reference model, 2 of the engine, 1 + 18 + 1 of the policy leave 35, a GiB of it the pass's own.
    assert SHARED.room(POLICY, usable=60 * GIB) == 35 * GIB
    assert PASSES.tokens(35 * GIB, step=256) == 34 * 1024
    assert PASSES.tokens(35 * GIB - 1, step=256) == 34 * 1024 - 256
    assert PASSES.tokens(0, step=256) == 0


def test_images_are_counted_with_the_tokens_that_they_stand_beside():
    passes = replace(PASSES, per_image=GIB, image_tokens=512)
    # Half of a pass are prompts: four images of 512 tokens in 4096.
    assert (passes.images(4096), passes.pass_bytes(4096)) == (4, (1 + 4 + 4) * GIB)
    assert passes.tokens(9 * GIB, step=256) == 4096
    assert passes.images(100) == 1, "a pass with images has one at least"


def test_what_is_too_small_is_named_with_what_it_would_hold():
    assert plan().excesses() == []
    # 4 % of a GPU are lost.
    assert plan(gpu=55).excesses() == []
    assert plan(gpu=54).excesses() != []
    (phrase,) = plan(gpu=50).excesses()
    assert phrase == "each GPU would hold 52.0 GiB (generation) of 50.0 GiB"
    assert plan(host=4).excesses() == ["a machine's memory would hold 5.0 GiB of 4.0 GiB"]
    small = replace(SHARED, engine=replace(ENGINE, share=9 * GIB))
    (phrase,) = plan(small).excesses()
    assert phrase.startswith("an engine has 9.0 GiB of each GPU, and needs 10.0 GiB")


def test_a_machine_without_gpus_holds_all_in_one_memory():
    alone = replace(plan(), machine=Machine(gpu_bytes=None, host_bytes=57 * GIB))
    assert alone.host_peak == (52 + 5) * GIB
    assert alone.excesses() == []
    assert replace(alone, machine=Machine(gpu_bytes=None, host_bytes=56 * GIB)).excesses()


def test_a_run_that_cannot_fit_is_told_the_cheapest_flags_that_make_it_fit():
    given = {"train.colocate_all": True, "vllm.enable_sleep": False, "vllm.gpu_memory_utilization": 0.95}
    config = dotted.replace(PPOConfig(), given)

    def replan(changed: PPOConfig) -> Plan:
        share = int(80 * GIB * changed.vllm.gpu_memory_utilization)
        asleep = 2 * GIB if changed.vllm.enable_sleep else share
        return plan(replace(SHARED, engine=replace(ENGINE, share=share, asleep=asleep)))

    with pytest.raises(UserError) as caught:
        refuse_excess(config, replan(config), replan=replan)
    assert str(caught.value).startswith("the run cannot fit: each GPU would hold ")
    # With 0.7 of 80 there are 22 + 56 of 76.8 GiB while it generates, with 0.5 also 28 + 40 in an update: no need to sleep.
    assert "It fits with --vllm.gpu_memory_utilization 0.5; or begin" in caught.value.sentence
    refuse_excess(config, plan(), replan=replan)


def test_a_pass_with_some_layers_computed_again_takes_its_share_of_both_and_the_images_of_the_second():
    every = PassEstimate(floor=GIB, base=2 * GIB, per_token=GIB / 8192, per_image=5, image_tokens=0)
    some = PASSES.between(every, share=0.25)
    assert (some.floor, some.base, some.per_token) == (GIB, 1.25 * GIB, (0.75 / 1024 + 0.25 / 8192) * GIB)
    assert some.per_image == 5


@pytest.mark.parametrize(
    ("gpu", "flags"),
    [
        (50, "--actor.freeze_visual_encoder"),
        # 51 - 5 = 46 of 46.08: the first one is not needed then.
        (48, "--algo.kl.init_coef 0"),
        (36, "--actor.freeze_visual_encoder --algo.kl.init_coef 0 --actor.optim adamw_8bit"),
        (30, "--algo.kl.init_coef 0 --ds.lora.rank 64"),
        (25, "--algo.kl.init_coef 0 --ds.lora.rank 64 --ds.load_in_4bit"),
        (23, "take more GPUs, a machine with more memory, or a smaller model"),
    ],
)
def test_what_harms_least_is_tried_first_and_what_is_not_needed_is_left_out(gpu, flags):
    def replan(config: PPOConfig) -> Plan:
        # 1 + 2 + 8 + 4, and 6 of a pass: with the copy in single precision of the following they are 51.
        ds, actor = config.ds, config.actor
        master = 30 - 4 * actor.freeze_visual_encoder - 8 * (actor.optim == "adamw_8bit")
        master = (7 if ds.load_in_4bit else 10) if ds.lora.rank else master
        states = replace(STATES, master=(master - 5 * (config.algo.kl.init_coef == 0)) * GIB)
        return plan(replace(SHARED, models=[replace(POLICY, states=states)], engine=None, bucket=0), gpu=gpu)

    config = dotted.replace(PPOConfig(), {"algo.kl.init_coef": 0.01})
    with pytest.raises(ListedError) as caught:
        refuse_excess(config, replan(config), replan=replan, command=lambda taken: f"run {len(taken)}")
    assert f"{flags}; or begin all the same" in caught.value.sentence
    if gpu == 36:
        first, *_, last = caught.value.lines
        assert (first[:32], last) == ("--actor.freeze_visual_encoder: T", "run 3")
