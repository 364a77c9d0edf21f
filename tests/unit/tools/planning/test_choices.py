"""What is chosen by memory where flags leave it open, on a run whose bytes are worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.errors import UserError
from lmm_r1.tools.planning import choices
from lmm_r1.tools.planning.choices import choices_line, chosen, filled, refuse_excess
from lmm_r1.tools.planning.pass_memory import ModelSize, TrainedStates
from lmm_r1.tools.planning.plan import GIB, Device, Machine, PassEstimate, Plan, PlannedEngine, PlannedModel
from lmm_r1.tools.planning.run_plan import ordinary_tokens

LAYERS = 36
SIZE = ModelSize(parameters=1, weight_bytes=2 * GIB, trained=1, trained_bytes=1, largest_trained=0, matrices=1)
STATES = TrainedStates(weights=2 * GIB, master=4 * GIB, moments=8 * GIB, sums=4 * GIB, host=0)
ENGINE = PlannedEngine(weights=2 * GIB, utilization=0.25, share=20 * GIB, asleep=2 * GIB, least=GIB, host=0, ranks=1)


def replanned(config: PPOConfig, *, gpu: int, gpus: int = 1) -> Plan:
    """A policy of 18 GiB and an engine of 20, or 2 asleep; 1,024 tokens of a pass take 4 GiB, or 1 where all is recomputed."""
    actor = config.actor
    layers = actor.gradient_checkpointing_layers or LAYERS
    share = layers / LAYERS if actor.gradient_checkpointing_enable else 0
    per_token = (4 - 3 * share) * GIB / 1024
    passes = PassEstimate(floor=GIB, base=GIB, per_token=per_token, per_image=0, image_tokens=0)
    states = replace(STATES, master=0, moments=0, sums=0, host=16 * GIB) if config.ds.adam_offload else STATES
    if config.ds.zero_stage == 3:
        states = replace(states, weights=0, master=states.master // gpus, moments=states.moments // gpus)
    sleeps = bool(config.vllm.enable_sleep)
    model = PlannedModel(
        role="policy",
        size=SIZE,
        passes=passes,
        states=states,
        sleeps=bool(config.ds.enable_sleep),
        context=0,
        host=states.host,
        ranks=1,
        gpus=gpus,
    )
    engine = ENGINE if sleeps else replace(ENGINE, asleep=ENGINE.share)
    device = Device(name="each GPU", models=[model], engine=engine, bucket=0)
    machine = Machine(gpu_bytes=gpu * GIB, host_bytes=64 * GIB)
    fitting = passes.tokens(device.room(model, usable=machine.usable), step=256)
    tokens = config.train.max_tokens_per_gpu or min(16192, max(fitting, 256))
    device = replace(device, models=[replace(model, pass_tokens=max(tokens, 2048))])
    return Plan(
        machine=machine,
        devices=[device],
        host={"all": GIB + states.host},
        pass_tokens=tokens,
        fitting_tokens=fitting,
        wanted_tokens=0 if config.train.max_tokens_per_gpu else ordinary_tokens(config),
        longest=2048,
        engine_share=0.25,
        log_prob_tokens=20480,
    )


def choose(gpu: int, *, gpus: int = 1, **flags: object) -> tuple[PPOConfig, Plan, str | None]:
    """The settings that are chosen on GPUs of so many GiB, their plan and the line about them."""
    given = {"train.colocate_all": True, "actor.num_nodes": 1, "actor.num_gpus_per_node": gpus}
    given |= {name.replace("__", "."): value for name, value in flags.items()}
    # Of 2,048 tokens each, so that an update has passes of the ordinary size.
    config = dotted.replace(PPOConfig(), given | {"rollout.n_samples_per_prompt": 8})
    found, plan = chosen(
        config,
        replan=lambda changed: replanned(changed, gpu=gpu, gpus=gpus),
        share_gpus=lambda changed: pytest.fail("they share GPUs already"),
    )
    complete = filled(found, plan)
    return complete, plan, choices_line(config, complete)


@pytest.fixture(autouse=True)
def a_model_of_36_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    text = SimpleNamespace(num_hidden_layers=LAYERS)
    checkpoint = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))
    monkeypatch.setattr(choices, "checkpoint_of", lambda config: checkpoint)


def recomputed(config: PPOConfig) -> tuple[object, object]:
    return config.actor.gradient_checkpointing_enable, config.actor.gradient_checkpointing_layers


def test_with_memory_for_all_of_it_nothing_is_computed_twice_and_engines_stay_awake():
    # Awake, 0.96 x 141 - 18 - 20 = 97 GiB are left; 16,384 tokens, the next multiple of 256, take 1 + 64.
    config, plan, line = choose(141)
    assert (recomputed(config), config.vllm.enable_sleep) == ((False, None), False)
    assert (config.train.max_tokens_per_gpu, config.rollout.max_tokens_per_gpu) == (16192, 20480)
    assert (config.ds.zero_stage, config.ds.adam_offload, config.vllm.gpu_memory_utilization) == (2, False, 0.25)
    assert line == "chosen to fit: --vllm.gpu_memory_utilization 0.25"


def test_engines_sleep_before_anything_is_computed_twice():
    # 0.96 x 90 = 86.4: awake 48.4 are left, asleep 66.4.
    config, _, _ = choose(90)
    assert (recomputed(config), config.vllm.enable_sleep) == ((False, None), True)


def test_as_few_layers_as_are_needed_are_computed_twice_for_passes_of_the_ordinary_size():
    # 0.96 x 80 - 18 - 2 = 56.8: 16 x (4 - m / 12) + 1 fit from m = 6.15 on.
    config, plan, line = choose(80)
    assert recomputed(config) == (True, 7)
    assert plan.pass_tokens == 16192
    assert line == (
        "chosen to fit: --vllm.enable_sleep --vllm.gpu_memory_utilization 0.25 "
        "--actor.gradient_checkpointing_enable --actor.gradient_checkpointing_layers 7"
    )
    # 0.96 x 40 - 20 = 18.4: from m = 34.95 on.
    small, plan, _ = choose(40)
    assert (recomputed(small), small.vllm.enable_sleep, plan.shortage) == ((True, 35), True, 0)


def test_what_a_flag_names_stays_as_it_is():
    kept, _, _ = choose(80, actor__gradient_checkpointing_enable=False)
    assert recomputed(kept) == (False, None)
    # 56.8 - 1 for the pass, of which 4 GiB hold 1,024 tokens; a multiple of 256.
    assert kept.train.max_tokens_per_gpu == 14080
    awake, _, _ = choose(80, vllm__enable_sleep=False)
    assert (awake.vllm.enable_sleep, recomputed(awake)) == (False, (True, 20))
    every, _, line = choose(141, actor__gradient_checkpointing_enable=True, vllm__gpu_memory_utilization=0.25)
    assert (recomputed(every), line) == ((True, None), None)
    given, _, _ = choose(141, train__max_tokens_per_gpu=1000)
    assert given.train.max_tokens_per_gpu == 1000


def test_remedies_are_taken_where_nothing_else_is_enough_and_then_less_is_computed_twice():
    # 0.96 x 24 = 23 hold no 18 + 20 while it generates, and 2 + 20 where the policy's states wait in the host's memory.
    config, plan, line = choose(24)
    assert (plan.shortage, config.ds.enable_sleep, config.ds.adam_offload) == (0, True, False)
    # An update has 23.04 - 18 - 2 = 3.04: 2 x 1,024 tokens with all of it computed twice, as long as a sample.
    assert (recomputed(config), config.train.max_tokens_per_gpu) == ((True, None), 2048)
    assert line.endswith("--actor.gradient_checkpointing_enable --ds.enable_sleep")
    config, plan, line = choose(24, ds__enable_sleep=False)
    assert (plan.shortage, config.ds.adam_offload, config.ds.zero_stage) == (0, True, 2)
    # 23.04 - 2 - 2 = 19.04: 16 x (4 - m / 12) + 1 fit from m = 34.47 on.
    assert recomputed(config) == (True, 35)
    assert line.endswith("--actor.gradient_checkpointing_layers 35 --ds.adam_offload")


def test_a_remedy_whose_flag_is_named_is_advised_instead():
    config, plan, _ = choose(24, ds__adam_offload=False, ds__enable_sleep=False)
    assert plan.shortage > 0
    assert (config.ds.adam_offload, config.ds.enable_sleep) == (False, False)
    with pytest.raises(UserError, match="^the run cannot fit: .* It fits with --ds.enable_sleep; or begin"):
        refuse_excess(config, plan, replan=lambda changed: replanned(changed, gpu=24))


@pytest.mark.parametrize(("gpus", "stage"), [(1, 2), (4, 3)])
def test_weights_are_shared_out_over_several_gpus_alone(gpus, stage):
    # 0.96 x 31 = 29.8, of 18 + 20; each of four GPUs has 1 + 2 of the optimizer's 4 + 8, 4 of sums, and no weights.
    config, plan, line = choose(31, gpus=gpus, ds__adam_offload=False, ds__enable_sleep=False)
    assert (config.ds.zero_stage, "zero_stage" in line) == (stage, stage == 3)
    if gpus == 1:
        with pytest.raises(UserError) as caught:
            refuse_excess(config, plan, replan=lambda changed: replanned(changed, gpu=31))
        assert "zero_stage" not in str(caught.value)


def test_models_and_engines_share_their_gpus_where_groups_of_their_own_are_too_small():
    asked = []

    def share(config: PPOConfig) -> dict[str, object]:
        asked.append(config.actor.num_gpus_per_node)
        return {"train.colocate_all": True, "actor.num_gpus_per_node": 8}

    def replan(config: PPOConfig) -> Plan:
        return replanned(config, gpu=80 if config.train.colocate_all else 12)

    config = dotted.replace(
        PPOConfig(), {"actor.num_nodes": 1, "actor.num_gpus_per_node": 4, "rollout.n_samples_per_prompt": 8}
    )
    config = dotted.replace(config, {"ds.adam_offload": False, "ds.enable_sleep": False})
    found, plan = chosen(config, replan=replan, share_gpus=share)
    assert (asked, found.train.colocate_all, found.actor.gpus, plan.shortage) == ([4], True, 8, 0)
    apart = dotted.replace(config, {"train.colocate_all": False})
    found, plan = chosen(apart, replan=replan, share_gpus=share)
    assert (len(asked), found.train.colocate_all, plan.shortage > 0) == (1, False, True)
