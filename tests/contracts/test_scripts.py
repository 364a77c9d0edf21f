"""Every shipped script is clean shell and prints commands that this version accepts; every shipped YAML resolves."""

import re
import sys
from pathlib import Path

import pytest
from helpers.commands import SCRIPTS, STAGES, TRAINERS, printed_commands, trainer_config
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.agents.environment import Environment, load_environment
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.make_task import MakeTaskConfig
from lmm_r1.cli.prepare_data import PrepareDataConfig
from lmm_r1.config import DPOConfig, PPOConfig, RMConfig, SFTConfig, checkpoint_folder, resolve
from lmm_r1.config.evaluate import EvaluateConfig
from lmm_r1.config.generation import BatchConfig
from lmm_r1.tools.recipes import recipe_names

ALL_SCRIPTS = sorted(SCRIPTS.rglob("*.sh"))
LAUNCHED = [path for path in ALL_SCRIPTS if path.stat().st_mode & 0o111]
# These make their model and their rows before anything is printed, so they have no dry run.
DRY_RUNNABLE = [path for path in LAUNCHED if path.name not in ("demo.sh", "released.sh", "visual_search.sh")]
EVALUATION_CONFIGS = sorted(SCRIPTS.rglob("evaluate.yaml"))
SAMPLING_CONFIGS = sorted(SCRIPTS.rglob("sampling.yaml"))
MEMORY_CONFIGS = sorted((SCRIPTS / "lmm_r1/configs/memory").iterdir())
ROW_CONFIGS = sorted(SCRIPTS.rglob("*rows.yaml"))
TINY_CONFIGS = sorted(SCRIPTS.rglob("tiny.yaml"))
TRAINING_CONFIGS = sorted(
    set(SCRIPTS.rglob("*.yaml"))
    - {*EVALUATION_CONFIGS, *SAMPLING_CONFIGS, *MEMORY_CONFIGS, *ROW_CONFIGS, *TINY_CONFIGS}
)
# By the name of the file; any other is of RL.
SUPERVISED_CONFIGS = {
    "cold_start": SFTConfig,
    "reading": SFTConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    # Also of the student that learns without a teacher.
    "kd": SFTConfig,
    "rm": RMConfig,
}


DEMO = STAGES / "configs" / "demo"


def relative(path: Path) -> str:
    return str(path.relative_to(SCRIPTS))


@pytest.mark.parametrize("script", DRY_RUNNABLE, ids=relative)
def test_a_script_prints_training_commands_that_parse_and_resolve(script, tmp_path):
    commands = printed_commands(script, "--train.seed", "7", folder=tmp_path, SFT_DATA="sft.jsonl")
    configs = [trainer_config(command) for command in commands if TRAINERS.keys() & set(command)]
    assert configs
    assert all(command[0] == sys.executable for command in commands)
    assert {config.train.seed for config in configs if isinstance(config, PPOConfig)} <= {7}
    assert configs[-1].train.seed == 7


@pytest.mark.parametrize("script", sorted(STAGES.glob("train_*.sh")), ids=relative)
def test_a_stage_takes_its_model_data_folder_gpus_and_rewards_from_the_environment(script, tmp_path):
    (command,) = printed_commands(
        script,
        folder=tmp_path,
        MODEL="a model",
        DATA="rows.jsonl",
        OUTPUT="runs/a stage",
        NUM_GPUS="2",
        REWARD_URL="http://host:1/get_reward",
    )
    config = trainer_config(command)
    assert config.actor.model_name_or_path == "a model"
    assert config.data.prompt_dataset == "rows.jsonl"
    assert config.ckpt.output_dir == "runs/a stage"
    assert checkpoint_folder(config) == Path("runs/a stage/checkpoints")
    assert config.reward.remote_url == "http://host:1/get_reward"
    assert (config.actor.num_gpus_per_node, config.ref.num_gpus_per_node, config.vllm.num_engines) == (2, 2, 2)
    assert config.critic.num_gpus_per_node == 2


@pytest.mark.parametrize(
    ("script", "model"),
    [
        ("train_mgt_geo.sh", "runs/fre_text"),
        ("train_mgt_percereas.sh", "runs/fre_text"),
        ("train_r1v_clevr.sh", "Qwen/Qwen2-VL-2B-Instruct"),
        ("train_r1v_geoqa.sh", "Qwen/Qwen2.5-VL-3B-Instruct"),
    ],
)
def test_a_stage_starts_from_the_published_model_and_so_does_its_critic(script, model, tmp_path):
    config = trainer_config(printed_commands(STAGES / script, folder=tmp_path)[1])
    assert config.actor.model_name_or_path == model
    assert config.critic.model_name_or_path == (model if script == "train_mgt_geo.sh" else None)


RECIPES = table("contracts/scripts", "recipes")
# Stages whose rows a task makes, and the environment of their episodes.
TASKS = {
    "train_visual_search.sh": ("visual_search", "crop"),
    "train_sokoban.sh": ("sokoban", "sokoban"),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_stage_without_rows_makes_those_of_its_task_first(name, tmp_path):
    task, agent = TASKS[name]
    make, train = printed_commands(STAGES / name, folder=tmp_path)
    made = parse(MakeTaskConfig, make[3:], prog="p", description="")
    assert (made.task, made.modality, made.rows, made.output) == (task, "image", 4096, Path(f"data/{task}"))
    config = trainer_config(train)
    assert (config.data.prompt_dataset, config.train.agent) == (f"data/{task}", agent)
    assert isinstance(load_environment(agent), Environment)
    # The environment alone rewards moves.
    assert (config.reward.remote_url is None) is (task == "sokoban")


@pytest.mark.parametrize("script", [STAGES / name for name in RECIPES], ids=relative)
def test_a_stage_without_rows_prepares_those_of_its_recipe_first(script, tmp_path):
    recipe = RECIPES[script.name]
    assert recipe in recipe_names()
    assert f"prepare_data {recipe}" in script.read_text(encoding="utf-8").split("set -euo")[0]
    prepare, train = printed_commands(script, folder=tmp_path)
    assert prepare[1:] == ["-m", "lmm_r1.cli.prepare_data", recipe, "--output", f"data/{recipe}"]
    assert trainer_config(train).data.prompt_dataset == f"data/{recipe}"
    own = {"RECIPE": "my/own.yaml", "SOURCES": "/copies", "DATA_FOLDER": "/rows"}
    prepare, train = printed_commands(script, folder=tmp_path, **own)
    config = parse(PrepareDataConfig, prepare[3:], prog="p", description="")
    assert (config.recipe, config.output, config.source) == ("my/own.yaml", Path("/rows/own"), Path("/copies/own"))
    assert trainer_config(train).data.prompt_dataset == "/rows/own"


def test_the_curriculum_chains_any_stages(tmp_path):
    commands = printed_commands(
        STAGES / "run_curriculum.sh",
        *("fre_multi", "train_mgt_percereas.sh", "r1v_geoqa", "--actor.adam.lr", "3e-7"),
        folder=tmp_path,
        ROOT="runs/chain",
        DATA_mgt_percereas="own.jsonl",
    )
    prepared = [command[3] for command in commands if "lmm_r1.cli.prepare_data" in command]
    assert prepared == ["mathv60k", "geoqa_8k"]
    stages = [trainer_config(command) for command in commands if TRAINERS.keys() & set(command)]
    assert [stage.ckpt.output_dir for stage in stages] == [
        *("runs/chain/fre_multi", "runs/chain/mgt_percereas"),
        "runs/chain/r1v_geoqa",
    ]
    assert [stage.actor.model_name_or_path for stage in stages] == [
        *("Qwen/Qwen2.5-VL-3B-Instruct", "runs/chain/fre_multi"),
        "runs/chain/mgt_percereas",
    ]
    assert [stage.data.prompt_dataset for stage in stages] == ["data/mathv60k", "own.jsonl", "data/geoqa_8k"]
    assert {stage.actor.adam.lr for stage in stages} == {3e-7}
    assert stages[1].rollout.max_new_tokens == 8192


def test_the_curriculum_hands_each_stages_model_to_the_next(tmp_path):
    commands = printed_commands(
        STAGES / "run_curriculum.sh",
        folder=tmp_path,
        MODEL="base model",
        ROOT="runs/demo",
        SFT_DATA="sft.jsonl",
        FRE_DATA="text.jsonl",
        MGT_DATA="image.jsonl",
        SFT_CONFIG=str(DEMO / "cold_start.yaml"),
        FRE_CONFIG=str(DEMO / "fre.yaml"),
        MGT_CONFIG=str(DEMO / "mgt.yaml"),
        EVAL_CONFIG=str(DEMO / "evaluate.yaml"),
        SEED="3",
        EVAL_TEXT="test_text.jsonl",
        EVAL_IMAGE="test_image.jsonl",
    )
    cold_start, fre, mgt = (trainer_config(command) for command in commands[:3])
    assert (cold_start.model.model_name_or_path, cold_start.data.dataset) == ("base model", "sft.jsonl")
    assert (fre.actor.model_name_or_path, fre.data.prompt_dataset) == (cold_start.ckpt.output_dir, "text.jsonl")
    assert (mgt.actor.model_name_or_path, mgt.data.prompt_dataset) == (fre.ckpt.output_dir, "image.jsonl")
    assert [config.logger.stage_name for config in (cold_start, fre, mgt)] == ["cold_start", "fre", "mgt"]
    assert [config.train.seed for config in (cold_start, fre, mgt)] == [3, 3, 3]
    evaluate, report = commands[3:]
    checkpoints = [f"{config.logger.stage_name}={config.ckpt.output_dir}" for config in (cold_start, fre, mgt)]
    assert evaluate[1:3] == ["-m", "lmm_r1.cli.evaluate"]
    settings = parse(EvaluateConfig, evaluate[3:], prog="p", description="")
    assert settings.checkpoints == tuple(checkpoints)
    assert settings.files == ("text=test_text.jsonl", "image=test_image.jsonl")
    assert settings.output == Path("runs/demo/evaluation.json")
    assert (settings.n_samples, settings.temperature, settings.max_new_tokens) == (2, 1.0, 40)
    # The time that it tells is the stages' own, whichever of them this call had left to do.
    assert report[1:] == ["-m", "lmm_r1.cli.report", "runs/demo"]


@pytest.mark.parametrize("path", TRAINING_CONFIGS, ids=relative)
def test_a_shipped_yaml_of_a_stage_parses_and_resolves(path):
    supervised = path.stem in SUPERVISED_CONFIGS
    config_class = SUPERVISED_CONFIGS.get(path.stem, PPOConfig)
    config = parse(config_class, ["--config", str(path)], prog="p", description="")
    model = "model.model_name_or_path" if supervised else "actor.model_name_or_path"
    data = "data.dataset" if supervised else "data.prompt_dataset"
    inputs = {model: "m", data: "d"}
    if isinstance(config, PPOConfig):
        # A loop's rewards are those of the model that it has trained.
        inputs |= (
            {"reward.model_name_or_path": "r"} if "loops" in path.parts else {"reward.remote_url": "http://host/a"}
        )
    assert resolve(dotted.replace(config, inputs)) is not None


@pytest.mark.parametrize("path", EVALUATION_CONFIGS, ids=relative)
def test_a_shipped_evaluation_yaml_parses_and_leaves_room_for_a_prompt(path):
    argv = ["--config", str(path), "--checkpoints", "a=b", "--files", "c=d", "--output", "e.json"]
    config = parse(EvaluateConfig, argv, prog="p", description="")
    assert config.n_samples in (None, 1) or config.temperature
    assert config.max_new_tokens < config.max_model_len


@pytest.mark.parametrize("path", SAMPLING_CONFIGS, ids=relative)
def test_a_shipped_sampling_yaml_parses_and_samples_with_room_for_a_prompt(path):
    argv = ["--config", str(path), "--model", "m", "--data", "d", "--output", "o.jsonl"]
    config = parse(BatchConfig, argv, prog="p", description="")
    assert config.temperature > 0
    assert config.max_new_tokens < config.max_model_len


def test_the_demo_makes_rows_with_flags_that_parse():
    text = "".join(path.read_text(encoding="utf-8") for path in (SCRIPTS / "demo.sh", STAGES / "digits.sh"))
    text = re.sub(r'"\$\(demo_config (\w+)\)"', rf"{DEMO}/\1.yaml", text)
    lines = [line.split()[1:] for line in text.splitlines() if line.strip().startswith("rows ")]
    made = {
        name: parse(MakeTaskConfig, ["digits", "--output", name, *flags], prog="p", description="")
        for name, *flags in lines
    }
    assert {name for name, config in made.items() if config.split == "test"} == {"text_test", "image_test"}
    worked = {
        name: (config.rows, config.min_digits, config.max_image_digits)
        for name, config in made.items()
        if config.solutions
    }
    assert worked == {"first_solutions": (4800, 2, 1), "then_solutions": (8000, 2, None)}
    assert set(re.findall(r"\$ROOT/data/(\w+)", text)) == made.keys()
