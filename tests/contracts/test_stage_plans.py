"""The shipped stages fit the machines that they are for, with the shape of the released 3B model, on no memory at all."""

import json
from pathlib import Path

import pytest
from helpers.commands import STAGES, printed_commands, trainer_config
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.config.ppo import MOST_GPU_PASS_TOKENS, MOST_PASS_TOKENS
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.tools.planning.choices import plan_image, refuse_excess
from lmm_r1.tools.planning.plan import GIB, Machine, Plan
from lmm_r1.tools.planning.run_plan import plan_ppo, plan_supervised

# Of the model with 3 billion parameters a plan takes ten seconds.
pytestmark = [pytest.mark.full, pytest.mark.slow]

TEXT = table("contracts/stage_plans", "text")
VISION = table("contracts/stage_plans", "vision")
# GPUs, GB of each, and GiB of the machine's memory.
MACHINES = {"8 x 80": (8, 80, 1024), "1 x 80": (1, 80, 256), "1 x 24": (1, 24, 64)}
RL_STAGES = ("train_fre_text.sh", "train_mgt_geo.sh", "train_direct_rl_geo.sh")
# With the longest and the shortest responses; in memory train_fre_multi.sh is train_fre_text.sh.
MORE_STAGES = ("train_mgt_percereas.sh", "train_r1v_geoqa.sh")


@pytest.fixture(scope="module")
def model_3b(tiny_checkpoint, tmp_path_factory) -> Path:
    """A folder with the released model's shape, without weights, and the processor of a tiny model."""
    tiny, folder = tiny_checkpoint("qwen2_5_vl"), tmp_path_factory.mktemp("model_3b")
    for file in tiny.iterdir():
        if file.suffix in (".json", ".jinja") and "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    tokens = {name: value for name, value in config.items() if name.endswith("token_id")}
    kind = {name: config[name] for name in ("model_type", "architectures")}
    settings = {**kind, **tokens, **TEXT, "vision_config": VISION, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def machine(name: str) -> Machine:
    _, gpu, host = MACHINES[name]
    return Machine(gpu_bytes=gpu * GIB, host_bytes=host * GIB)


def stage(script: str, machine_name: str, *, model: Path, folder: Path) -> PPOConfig:
    """Return the settings with which a stage's script starts on a machine."""
    gpus, memory, _ = MACHINES[machine_name]
    variables = {"NUM_GPUS": str(gpus), "MEMORY": str(memory), "MODEL": str(model)}
    *_, command = printed_commands(STAGES / script, folder=folder, **variables)
    return trainer_config(command)


def check(plan: Plan) -> None:
    assert plan.excesses() == []
    assert plan.fitting_tokens >= plan.longest, "the longest sample has a pass"


@pytest.mark.parametrize("machine_name", MACHINES)
@pytest.mark.parametrize("script", [*RL_STAGES, *MORE_STAGES])
def test_an_rl_stage_fits_its_machine(script, machine_name, model_3b, tmp_path):
    config = stage(script, machine_name, model=model_3b, folder=tmp_path)
    check(plan := plan_ppo(config, machine(machine_name)))
    if script in MORE_STAGES:
        return
    roles = [model.role for device in plan.devices for model in device.models]
    with_critic = script != RL_STAGES[0] and machine_name != "1 x 24"
    assert ("critic" in roles) == with_critic
    assert plan.devices[0].models[0].size.parameters > 3.7e9
    assert plan.pass_tokens is not None
    assert MOST_PASS_TOKENS <= plan.pass_tokens <= MOST_GPU_PASS_TOKENS


def test_an_rl_stage_with_images_fits_its_machines(model_3b, tmp_path):
    image = plan_image(Checkpoint(str(model_3b)), pixels=512 * 512)
    for machine_name in MACHINES:
        config = stage("train_mgt_geo.sh", machine_name, model=model_3b, folder=tmp_path)
        check(plan := plan_ppo(config, machine(machine_name), image=image))
        policy = plan.devices[0].models[0]
        assert policy.passes.image_tokens > 300
        assert policy.passes.per_image > 0


@pytest.mark.parametrize("machine_name", MACHINES)
def test_the_cold_start_fits_its_machine(machine_name, model_3b, tmp_path):
    gpus, memory, _ = MACHINES[machine_name]
    variables = {"NUM_GPUS": str(gpus), "MEMORY": str(memory), "MODEL": str(model_3b), "SFT_DATA": "s.jsonl"}
    config = trainer_config(printed_commands(STAGES / "run_curriculum.sh", folder=tmp_path, **variables)[0])
    assert isinstance(config, SFTConfig)
    check(plan_supervised(config, machine(machine_name), processes=gpus, per_machine=gpus))


def test_a_stage_for_eight_gpus_is_refused_on_one_with_what_makes_it_fit(model_3b, tmp_path):
    config = stage(RL_STAGES[1], "8 x 80", model=model_3b, folder=tmp_path)
    names = [f"{name}.num_gpus_per_node" for name in ("actor", "ref", "critic")]
    config = dotted.replace(config, {**dict.fromkeys(names, 1), "vllm.num_engines": 1})
    one = machine("1 x 80")
    plan = plan_ppo(config, one)
    with pytest.raises(
        UserError, match="^the run cannot fit: each GPU of policy and critic and reference would hold"
    ) as caught:
        refuse_excess(config, plan, replan=lambda changed: plan_ppo(changed, one))
    # The optimizer's state of two models is more than the GPU has; the engine's share of a half is small enough then.
    assert "It fits with --ds.adam_offload; or begin" in caught.value.sentence
