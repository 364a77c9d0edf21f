"""The example configurations of EasyR1, LMM-R1 and Mini-o3 become the flags that were worked out by hand."""

import math
import re
from pathlib import Path

import pytest
from helpers.original_checkpoints import (
    EASYR1_FLAGS,
    EASYR1_LEFT_OUT,
    EASYR1_SCRIPTS,
    LMM_R1_FLAGS,
    LMM_R1_SCRIPTS,
    VL7B,
)
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.agents.environment import load_environment
from lmm_r1.agents.tool_environment import CropEnvironment
from lmm_r1.cli.arguments import parse, parse_settings
from lmm_r1.cli.convert_config import main
from lmm_r1.config import PPOConfig, SFTConfig, resolve
from lmm_r1.config.declared import json_object
from lmm_r1.config.resolve import by_what_is_trained
from lmm_r1.errors import UserError
from lmm_r1.tools.migrate import Conversion, convert, counterpart, read_run, to_document
from lmm_r1.tools.migrate.easyr1 import EASYR1
from lmm_r1.tools.migrate.openrlhf import TABLES
from lmm_r1.tools.migrate.table import CONFIG_CLASSES, missing
from lmm_r1.tools.migrate.verl import VERL

DATA = Path(__file__).resolve().parents[1] / "data" / "conversion"
EASYR1_FILE = DATA / "easyr1.yaml"


def converted(path: Path, *overrides: str) -> Conversion:
    run = read_run(path, overrides)
    return convert(run.values, run.table, shown=run.shown, why_open=run.why_open, remarks=run.remarks)


def left_out(conversion: Conversion) -> set[str]:
    return {note.subject for note in conversion.notes if note.kind == "without counterpart"}


def there(flags: dict[str, object]) -> dict[str, object]:
    """The expected flags; of the losses and the KL, None stands for one that is not written down."""
    return {name: value for name, value in flags.items() if value is not None or name == "data.image_dir"}


def read_back(conversion: Conversion) -> PPOConfig | SFTConfig:
    """The config that our own parser makes of the written file."""
    return config_of(to_document(conversion, source="a test", system="another"), CONFIG_CLASSES[conversion.command])


def config_of(document: str, config_class: type) -> PPOConfig | SFTConfig:
    config = dotted.replace(config_class(), parse_settings(document, dotted.leaf_types(config_class), source="file"))
    return dotted.replace(config, by_what_is_trained(config))


@pytest.mark.parametrize("script", EASYR1_SCRIPTS)
def test_an_example_of_easyr1_becomes_the_flags_worked_out_by_hand(script, tmp_path):
    overrides, changes, more_left_out = EASYR1_SCRIPTS[script]
    conversion = converted(EASYR1_FILE, *overrides.split())
    assert conversion.flags == there(EASYR1_FLAGS | changes)
    expected = EASYR1_LEFT_OUT | more_left_out
    if "ds.lora.rank" in changes:
        expected -= {"worker.actor.model.lora.target_modules"}
    assert left_out(conversion) == expected
    # A file with a template is not there to be read.
    resolved = resolve(dotted.replace(read_back(conversion), {"data.prompt_template": None}))
    assert resolved.rollout.batch_size == 512


@pytest.mark.parametrize("script", LMM_R1_SCRIPTS)
def test_a_script_of_lmm_r1_becomes_the_flags_worked_out_by_hand(script):
    rows, estimator, lr, folder, changes = LMM_R1_SCRIPTS[script]
    own = {
        "data.prompt_dataset": f"./{rows}",
        "algo.advantage.estimator": estimator,
        "actor.adam.lr": lr,
        "ckpt.output_dir": folder,
        "ckpt.path": f"{folder}/ckpt",
        "logger.wandb.run_name": script,
        **({} if script == "sokoban" else {"logger.tensorboard_dir": f"{folder}/logs"}),
    }
    conversion = converted(DATA / f"lmm_r1_{script}.bash")
    assert conversion.flags == there(LMM_R1_FLAGS | own | changes)
    idle = set() if estimator == "gae" else {"critic_num_nodes", "critic_num_gpus_per_node"}
    idle |= {"wandb_group", "ref_num_nodes", "ref_num_gpus_per_node"} if script == "sokoban" else set()
    assert left_out(conversion) == {"normalize_reward"} | idle
    told = {note.subject for note in conversion.notes} - left_out(conversion)
    frozen = {"freeze_prefix"} if script == "sokoban" else set()
    served = {str(DATA / f"lmm_r1_{script}.bash")}
    tracked = {"use_wandb"} if script != "sokoban" else set()
    assert told == {"vllm_sync_backend", "flash_attn", "prompt_max_len, generate_max_len"} | frozen | served | tracked
    (start,) = (note.text for note in conversion.notes if note.subject in served)
    assert re.search(
        r"line \d+ starts a server of rewards.*`lmm-r1 serve_verifier (math|sokoban)`.*--data.label_key", start
    )
    assert resolve(read_back(conversion)).algo.advantage.estimator == estimator


def test_mini_o3_becomes_episodes_of_crops_that_the_trainer_takes():
    conversion = converted(DATA / "mini_o3.bash")
    expected = {
        "data.prompt_dataset": "/data/minio3/VisualProbe_train/train.json,/data/minio3/DeepEyes_train_4K/train.json",
        "data.label_key": "solution",
        "train.agent": "crop",
        "agent.max_turns": 6,
        "agent.max_images": 11,  # 12 with that of the question
        "data.max_images_per_prompt": 1,
        "data.max_len": 32768,  # an episode with its prompt
        "rollout.max_new_tokens": 8192,  # a turn
        "agent.overturn": "mask",
        "reward.remote_url": "http://127.0.0.1:5000/get_reward",
        "rollout.batch_size": 256,
        "rollout.n_samples_per_prompt": 16,
        "train.batch_size": 512,  # 32 prompts x 16
        "actor.eps_clip_low_high": [0.2, 0.3],
        "actor.num_nodes": 8,
        "vllm.num_engines": 64,
        "algo.kl.init_coef": 0.0,
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_range": [-math.inf, math.inf],
        "algo.dynamic_filtering_min_std": 1e-4,
        "algo.dynamic_filtering_max_batches": 256,
        "eval.n_samples_per_prompt": 1,
        "eval.temperature": 0.0,
        "eval.steps": 5,
        "ckpt.output_dir": "./save",
        "train.num_episodes": 100,
        "train.dynamic_batch_enable": False,
    }
    assert {name: conversion.flags[name] for name in expected} == expected
    # Right answers alone are paid for, as in the published run.
    assert "reward.part_weights" not in conversion.flags
    rollout = "actor_rollout_ref.rollout"
    assert left_out(conversion) == {
        f"{rollout}.val_max_generation_round",
        f"{rollout}.multi_turn_prompt_type",
        "data.general_qa_reward_fn",
        "data.max_prompt_length",
        "data.gpt_extract_answer",
        "data.extract_answer_tags",
        "data.gpt_threads",
        "reward_model.reward_manager",
        "algorithm.kl_ctrl.kl_coef",
        *SAME,
        *(f"{rollout}.{name}" for name in ("vllm_infer_batch_size", "free_cache_engine", "max_num_batched_tokens")),
    }
    # Notes have the names of the file, not those of the table.
    assert not any("worker." in note.subject + note.text for note in conversion.notes)
    config = resolve(read_back(conversion))
    assert isinstance(config, PPOConfig)
    environment = load_environment("crop", options=json_object(config.agent.options, flag="--agent.options"))
    assert isinstance(environment, CropEnvironment)
    assert (environment.bounds.min_pixels, environment.bounds.max_pixels) == (40_000, 2_000_000)
    # Boxes are cut as its tool cuts them.
    options = json_object(config.agent.options, flag="--agent.options")
    assert (options["edges"], options["rounding"]) == ("clamp", "down")


def test_turns_of_verl_are_listed_with_what_to_write():
    conversion = converted(DATA / "verl_tools.bash")
    assert (conversion.flags["data.max_len"], conversion.flags["reward.remote_url"]) == (4096, "math")
    told = {note.subject: note.text for note in conversion.notes if note.kind == "without counterpart"}
    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    assert "give it as --train.agent" in told[f"{multi_turn}.enable"]
    assert {f"{multi_turn}.tool_config_path", f"{multi_turn}.max_assistant_turns"} <= told.keys()
    assert not resolve(read_back(conversion)).train.plays


SAME = tuple(table("contracts/conversion", "same"))
"""What Mini-o3's command says beside, and what happens here anyway."""


OTHER_VALUES: dict[str, object] = table("contracts/conversion", "other_values")


def another(name: str, default: object) -> object:
    """A value that is not the default."""
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, (int, float)) else "3"


@pytest.mark.parametrize("name", [setting.name for setting in EASYR1.settings])
def test_no_setting_of_easyr1_is_ignored(name):
    base = {"data.val_files": "v", "trainer.val_freq": 5, "worker.actor.dynamic_batching": True}
    setting = EASYR1.by_name[name]
    before = convert(base, EASYR1)
    after = convert(base | {name: another(name, base.get(name, setting.default))}, EASYR1)
    assert (before.flags, before.notes) != (after.flags, after.notes)


OVERLONG = "reward_model.overlong_buffer.len"
IMAGES_OF_VERL = ("limit_mm_per_prompt", "val_limit_mm_per_prompt")
NOBODY: dict[str, object] = {"custom_reward_function.path": "r.py", "data.val_files": "v", "trainer.val_freq": 5}
CROPS: dict[str, object] = {
    "actor_rollout_ref.rollout.name": "vllm_multi_turn_tool_call",
    "actor_rollout_ref.rollout.val_max_generation_round": 12,
    "data.use_tool_reward_weight": 0.5,
}


@pytest.mark.parametrize("base", [NOBODY, CROPS], ids=["nobody", "crops"])
@pytest.mark.parametrize("name", [setting.name for setting in VERL.settings if setting.name not in EASYR1.by_name])
def test_no_setting_of_verl_is_ignored(name, base):
    special = {f"actor_rollout_ref.rollout.{name}": {"image": 3} for name in IMAGES_OF_VERL}
    special |= {"algorithm.use_kl_in_reward": True, "data.tool_call_penalty": 0.2, "trainer.resume_mode": "disable"}
    special["actor_rollout_ref.actor.use_token_level_loss"] = False
    needed = {"reward_model.enable": "reward_model.model.path", "reward_model.overlong_buffer.enable": OVERLONG}
    base = {**base, **({needed[name]: 512} if name in needed else {})}
    before = convert(base, VERL)
    setting = VERL.by_name[name]
    after = convert(base | {name: special.get(name, another(name, base.get(name, setting.default)))}, VERL)
    assert (before.flags, before.notes) != (after.flags, after.notes)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (command, setting.name)
        for command, table in TABLES.items()
        if command != "train_ppo"
        for setting in table.settings
    ],
)
def test_no_flag_of_openrlhf_is_ignored_or_unknown_to_the_trainers(command, name):
    table = TABLES[command]
    special = {
        "limit_mm_per_prompt": {"image": 3},
        "processor_kwargs": {"max_pixels": 3},
        "adam_betas": [0.1, 0.2],
        "ring_attn_size": 2,
        "reward_clip_range": [0, 1],
        # Any value that is not there is neither of the two that mean what happens here.
        "compute_fp32_loss": "no",
    }
    corrected = {"enable_vllm_is_correction": True} if name.startswith("vllm_is") else {}
    default = table.by_name[name].default
    base: dict[str, object] = {"eval_dataset": "e", **corrected}
    before = convert(base, table)
    value = special.get(name, True if default is False else another(name, default))
    after = convert(base | {name: value}, table)
    assert (before.flags, before.notes) != (after.flags, after.notes)
    assert counterpart(name, known=dotted.leaf_types(CONFIG_CLASSES[command]))


def test_a_script_of_easyr1_is_read_with_the_file_that_it_names(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/config.yaml").write_text(EASYR1_FILE.read_text())
    script = tmp_path / "examples/geo3k.sh"
    script.write_text(
        "set -x\nMODEL_PATH=Qwen/Qwen2.5-VL-7B-Instruct  # replace it\n\npython3 -m verl.trainer.main \\\n"
        "    config=examples/config.yaml \\\n    worker.actor.model.model_path=${MODEL_PATH} \\\n    trainer.nnodes=2\n"
    )
    flags = converted(script, "trainer.nnodes=4").flags
    assert (flags["actor.model_name_or_path"], flags["actor.num_nodes"]) == (VL7B, 4)
    assert flags["vllm.num_engines"] == 16


def test_an_earlier_name_is_understood_and_shown_as_it_was_given(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text("trainer: {total_episodes: 3}\nworker: {reward: {score_function: 'r.py:f', reward_type: batch}}\n")
    conversion = converted(file)
    assert (conversion.flags["train.num_episodes"], conversion.flags["reward.remote_url"]) == (3, "r.py:f")
    assert any('REWARD_TYPE = "batch"' in note.text for note in conversion.notes)


@pytest.mark.parametrize("kind", table("contracts/conversion", "script_kinds"))
def test_a_published_kind_of_file_keeps_model_and_rows_and_is_taken_by_our_command(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    case = table("contracts/conversion", "script_kinds")[kind]
    file = tmp_path / case.get("file", "run.sh")
    file.write_text(case["script"], encoding="utf-8")
    conversion = converted(file, *case.get("overrides", ()))
    assert conversion.command == case.get("command", "train_ppo_ray")
    assert {name: conversion.flags.get(name) for name in case["flags"]} == case["flags"]
    assert missing(conversion) == []
    assert set(case.get("left_out", ())) <= left_out(conversion)
    assert {one.flag: one.text for one in conversion.open} == case.get("open", {})
    assert "SECRET" not in to_document(conversion, source="s", system="t")
    config_class = CONFIG_CLASSES[conversion.command]
    resolve(dotted.replace(config_class(), {**NUMBERS_OF_GPUS[config_class is PPOConfig], **flat(conversion)}))


@pytest.mark.parametrize("system", table("contracts/conversion", "published_defaults"))
def test_what_a_file_leaves_out_is_as_the_system_it_is_for_has_it(system, tmp_path):
    case = table("contracts/conversion", "published_defaults")[system]
    file = tmp_path / case.get("file", "run.sh")
    file.write_text(case["script"], encoding="utf-8")
    config = read_back(converted(file))
    values = {flag: dotted.get(config, flag) for flag in case["values"]}
    assert {flag: list(value) if isinstance(value, tuple) else value for flag, value in values.items()} == case[
        "values"
    ]


STAGE_FILES = Path(__file__).parents[2] / "examples/scripts/lmm_r1/configs"
# What the stage scripts give, or what a run is called.
PLACES = ("actor.model_name_or_path", "data.input_key", "data.label_key", "data.prompt_dataset", "ckpt.output_dir")
PLACES += ("ckpt.path", "logger.")


@pytest.mark.parametrize("stage", table("contracts/conversion", "stages"))
def test_a_stage_has_the_settings_of_the_script_that_its_file_names_and_says_where_not(stage):
    case = table("contracts/conversion", "stages")[stage]
    file = STAGE_FILES / f"{stage}.yaml"
    theirs = read_back(converted(DATA / f"{case['fixture']}.bash"))
    if theirs.actor.eps_clip == 0.2:
        # What an open one is.
        theirs = dotted.replace(theirs, {"actor.eps_clip": None})
    ours = config_of(file.read_text(), PPOConfig)
    served = () if "reward.remote_url" in case["differences"] else ("reward.remote_url",)
    flags = [flag for flag in dotted.leaf_types(PPOConfig) if not flag.startswith((*PLACES, *served))]
    both = {flag: [dotted.get(theirs, flag), dotted.get(ours, flag)] for flag in flags}
    stated = {flag: pair for flag, pair in case["differences"].items() if pair[0] != pair[1]}
    assert {flag: pair for flag, pair in both.items() if pair[0] != pair[1]} == stated
    comment = " ".join(line for line in file.read_text().splitlines() if line.startswith("#"))
    assert [flag for flag in stated if flag.rpartition(".")[2] not in comment] == []
    assert case["script"] in comment


NUMBERS_OF_GPUS: dict[bool, dict[str, object]] = {
    True: {"actor.num_gpus_per_node": 8, "actor.num_nodes": 1},
    False: {},
}


def flat(conversion: Conversion) -> dict[str, object]:
    """What our parser makes of the written file."""
    document = to_document(conversion, source="a test", system="another")
    return parse_settings(document, dotted.leaf_types(CONFIG_CLASSES[conversion.command]), source="document")


def test_a_file_without_a_model_or_rows_ends_with_a_code_and_nothing_is_written(tmp_path, capsys):
    script, out = tmp_path / "run.sh", tmp_path / "ours.yaml"
    script.write_text("python -m openrlhf.cli.train_sft --dataset rows.jsonl\n")
    with pytest.raises(SystemExit) as stopped:
        main([str(script), "--output", str(out)])
    assert stopped.value.code == 1
    assert "it names no model (--model.model_name_or_path)" in capsys.readouterr().err
    assert not out.exists()


def test_a_number_that_is_a_variable_without_a_value_is_to_be_given_after_the_file(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text("python -m openrlhf.cli.train_sft --pretrain m --dataset d --l2 $DECAY\n")
    with pytest.raises(SystemExit):
        main([str(script)])
    assert capsys.readouterr().err.endswith("; give DECAY=VALUE after the file's name\n")
    main([str(script), "DECAY=0.1"])
    assert "weight_decay: 0.1" in capsys.readouterr().out


def test_the_command_writes_a_file_that_the_trainer_takes(tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    main([str(DATA / "lmm_r1_fre_text.bash"), "--output", str(out)])
    printed = capsys.readouterr()
    assert re.search(
        r"ours.yaml: \d+ settings for train_ppo_ray; 3 have no counterpart, 3 mean something else", printed.out
    )
    assert printed.err == ""
    config = parse(PPOConfig, ["--config", str(out)], prog="test", description="")
    assert config.rollout.n_samples_per_prompt == 16
    assert "# Run: lmm-r1 train_ppo_ray --config THIS_FILE" in out.read_text()
    main([str(DATA / "lmm_r1_fre_text.bash")])
    assert capsys.readouterr().out == out.read_text()


def test_what_the_trainer_will_refuse_is_said_at_once(capsys):
    main([str(EASYR1_FILE), "data.rollout_batch_size=64"])
    assert (
        "train_ppo_ray refuses this file until you correct it: --train.batch_size 640 is more than the 320 samples"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "content", "said"), table("contracts/conversion", "what_cannot_be_read_is_refused_with_its_place")
)
def test_what_cannot_be_read_is_refused_with_its_place(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        converted(tmp_path / name)
