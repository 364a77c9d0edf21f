"""Scripts as bash would read them, and rules of the conversion that no example script needs."""

import math
from pathlib import Path

import pytest
from helpers.tables import table

from lmm_r1.tools.migrate import convert, read_run, to_document
from lmm_r1.tools.migrate.easyr1 import EASYR1
from lmm_r1.tools.migrate.inputs import Script
from lmm_r1.tools.migrate.openrlhf import TABLES


def read(text: str, **given: str) -> tuple[list[str], Script]:
    """The arguments of the script's tool, with its variables replaced, and what was read."""
    script = Script(text, path=Path("folder/run.sh"), given=given)
    (words,) = (list(command.words) for command in script.commands if "tool.train" in command.words)
    return words[words.index("tool.train") + 1 :], script


@pytest.mark.parametrize(
    ("script", "words"), table("migrate/conversion_rules", "words_are_those_that_bash_would_give")
)
def test_words_are_those_that_bash_would_give(script, words, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert read(script)[0] == words


def test_a_name_of_digits_stays_as_it_is_written(tmp_path):
    run = "trainer: {experiment_name: 0809, n_gpus_per_node: 8, save_limit: null}\n"
    (tmp_path / "run.yaml").write_text(run + "worker: {actor: {optim: {lr: 1e-6}}}\n")
    values = read_run(tmp_path / "run.yaml", ["data.seed=0"]).values
    assert (values["trainer.experiment_name"], values["trainer.n_gpus_per_node"]) == ("0809", 8)
    assert (values["worker.actor.optim.lr"], values["data.seed"]) == (1e-6, 0)
    # Without a limit all are kept.
    assert convert(values, EASYR1).flags["ckpt.max_num"] == 1_000_000
    (tmp_path / "run.sh").write_text("python -m openrlhf.cli.train_sft --save_path 007 --l2 .5 --learning_rate 1E-5\n")
    values = read_run(tmp_path / "run.sh").values
    assert (values["save_path"], values["l2"], values["learning_rate"]) == ("007", 0.5, 1e-5)


@pytest.mark.parametrize(("script", "word", "why"), table("migrate/conversion_rules", "what_is_not_read_has_no_value"))
def test_what_is_not_read_has_no_value_and_its_line_is_named(script, word, why):
    words, read_script = read(script)
    assert words == [word]
    assert why in read_script.why_open[next(name for name in read_script.why_open if name in word)]


def test_a_value_that_is_given_wins_over_the_script():
    assert read("A=1\npython -m tool.train $A ${B:-2}\n", A="x", B="y")[0] == ["x", "y"]


def test_flags_after_a_comment_inside_of_the_command_are_read_and_the_line_is_named(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(
        "torchrun --nproc_per_node=4 src/open_r1/grpo.py \\\n  --model_name_or_path <MODEL> \\  # a comment\n"
        "  --dataset_name rows.jsonl --per_device_train_batch_size 2 \\\n  --output_dir out\n"
    )
    run = read_run(file)
    conversion = convert(run.values, run.table, remarks=run.remarks)
    assert conversion.flags["data.prompt_dataset"] == "rows.jsonl"
    # 2 prompts x 4 GPUs, each with 8 responses.
    assert (conversion.flags["rollout.batch_size"], conversion.flags["train.batch_size"]) == (8, 64)
    assert [(one.flag, one.text) for one in conversion.open] == [("actor.model_name_or_path", "<MODEL>")]
    assert any("line 2: a comment or a blank" in note.text for note in conversion.notes)


def easyr1(**values: object) -> tuple[dict[str, object], dict[str, str]]:
    conversion = convert({name.replace("__", "."): value for name, value in values.items()}, EASYR1)
    return dict(conversion.flags), {note.subject: note.kind for note in conversion.notes}


def test_a_critic_has_its_own_optimizer_and_shares_the_batches():
    flags, notes = easyr1(
        algorithm__adv_estimator="gae",
        trainer__critic_warmup=4,
        worker__critic__optim__lr=1e-5,
        worker__critic__cliprange_value=0.3,
        worker__critic__global_batch_size=64,
        worker__critic__ppo_epochs=1,
    )
    assert (flags["critic.adam.lr"], flags["critic.value_clip"]) == (1e-5, 0.3)
    # The policy learns from their step 4, counted from 1, on: after step 2, counted from 0.
    assert flags["critic.freezing_steps"] == 2
    assert (flags["critic.num_nodes"], flags["critic.num_gpus_per_node"]) == (1, 8)
    assert notes["worker.critic.global_batch_size"] == "without counterpart"
    assert "worker.critic.ppo_epochs" not in notes


def test_a_model_is_evaluated_before_the_training_where_there_are_rows_for_it():
    """val_before_train is on by default there, and needs no val_freq."""
    flags, notes = easyr1(data__val_files="held_out@test")
    assert (flags["eval.dataset"], flags["eval.split"]) == ("held_out", "test")
    assert (flags["eval.steps"], flags["eval.before_training"]) == (-1, True)
    assert "data.val_files" not in notes
    flags, _ = easyr1(data__val_files=["a.json@test", "b.json@test"])
    assert (flags["eval.dataset"], flags["eval.split"]) == ("a.json,b.json", "test")
    flags, notes = easyr1(trainer__val_freq=5, trainer__val_before_train=True)
    assert flags["eval.before_training"] is False
    assert "eval.dataset" not in flags
    assert notes["trainer.val_freq"] == notes["trainer.val_before_train"] == "without counterpart"
    flags, notes = easyr1(data__val_files="held_out", trainer__val_before_train=False)
    assert "eval.dataset" not in flags
    assert notes["data.val_files"] == "without counterpart"


VERL_RUN = "actor_rollout_ref: {model: {path: m}, actor: {ACTOR}}\nalgorithm: {ALGORITHM}\n"


def verl(
    folder: Path, *, actor: str = "", algorithm: str = "", more: str = ""
) -> tuple[dict[str, object], dict[str, str]]:
    file = folder / "run.yaml"
    file.write_text(VERL_RUN.replace("ACTOR", actor).replace("ALGORITHM", algorithm) + more)
    run = read_run(file)
    conversion = convert(run.values, run.table, shown=run.shown)
    return dict(conversion.flags), {note.subject: note.text for note in conversion.notes}


def test_kl_of_verl_has_one_estimator_as_a_loss_and_another_in_the_reward(tmp_path):
    both = {"algorithm": "kl_penalty: mse"}
    flags, _ = verl(tmp_path, actor="use_kl_loss: true", **both)
    assert (flags["algo.kl.use_loss"], flags["algo.kl.estimator"]) == (True, "k3")
    flags, _ = verl(tmp_path, actor="use_kl_loss: true, kl_loss_type: kl", **both)
    assert flags["algo.kl.estimator"] == "k1"
    flags, _ = verl(tmp_path, algorithm="kl_penalty: mse, use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.02}")
    assert (flags["algo.kl.use_loss"], flags["algo.kl.estimator"]) == (False, "k2")
    assert flags["algo.kl.init_coef"] == 0.02
    # Without any, none that is meant for a loss, which a run would warn of.
    flags, _ = verl(tmp_path, actor="use_kl_loss: false")
    assert (flags["algo.kl.init_coef"], flags["algo.kl.estimator"]) == (0.0, "k1")
    flags, notes = verl(tmp_path, actor="use_kl_loss: true, kl_loss_coef: 0.5", algorithm="use_kl_in_reward: true")
    assert (flags["algo.kl.use_loss"], flags["algo.kl.init_coef"]) == (True, 0.5)
    assert "one of them" in notes["algorithm.use_kl_in_reward"]


def test_defaults_of_verl_are_its_own(tmp_path):
    flags, notes = verl(tmp_path, actor="optim: {lr_warmup_steps: -1, warmup_style: cosine, min_lr_ratio: 0.2}")
    assert (flags["algo.advantage.estimator"], flags["critic.adam.lr"]) == ("gae", 1e-5)
    assert (flags["actor.lr_scheduler"], flags["actor.min_lr_ratio"]) == ("cosine_with_min_lr", 0.2)
    # A negative number of steps leaves the word to the ratio.
    assert "actor_rollout_ref.actor.optim.lr_warmup_steps" not in notes
    flags, _ = verl(tmp_path, actor="loss_agg_mode: seq-mean-token-mean", algorithm="adv_estimator: grpo")
    assert flags["actor.loss_agg_mode"] == "seq-mean-token-mean"
    flags, _ = verl(tmp_path, actor="loss_agg_mode: seq-mean-token-sum-norm", algorithm="adv_estimator: grpo")
    assert (flags["actor.loss_agg_mode"], "actor.loss_agg_length" in flags) == ("seq-mean-token-sum-norm", False)
    scaled = "loss_agg_mode: seq-mean-token-sum-norm, loss_scale_factor: 512"
    flags, _ = verl(tmp_path, actor=scaled, algorithm="adv_estimator: grpo")
    assert flags["actor.loss_agg_length"] == 512
    # Not divided at all.
    flags, _ = verl(tmp_path, actor="loss_agg_mode: seq-mean-token-sum", algorithm="adv_estimator: grpo")
    assert (flags["actor.loss_agg_mode"], flags["actor.loss_agg_length"]) == ("seq-mean-token-sum-norm", 1)
    flags, notes = verl(tmp_path, actor="loss_agg_mode: other", algorithm="adv_estimator: grpo")
    assert flags["actor.loss_agg_mode"] == "token-mean"
    assert "other" in notes["actor_rollout_ref.actor.loss_agg_mode"]


def test_losses_of_verl_have_our_names(tmp_path):
    flags, _ = verl(tmp_path, actor="policy_loss: {loss_mode: cispo}", algorithm="adv_estimator: grpo")
    assert flags["actor.policy_loss_type"] == "cispo"
    sapo = "policy_loss: {loss_mode: sapo}, tau_pos: 2.0"
    flags, _ = verl(tmp_path, actor=sapo, algorithm="adv_estimator: grpo")
    assert (flags["actor.policy_loss_type"], flags["actor.sapo_temperature_pos"]) == ("sapo", 2.0)
    assert "actor.eps_clip_low_high" not in flags
    # Dr. GRPO's.
    flags, _ = verl(tmp_path, actor="ppo_epochs: 1", algorithm="adv_estimator: grpo, norm_adv_by_std_in_grpo: false")
    assert flags["algo.advantage.estimator"] == "dr_grpo"


def test_groups_that_verl_learns_from_are_those_whose_rewards_differ(tmp_path):
    def kept(**settings):
        flags, notes = verl(tmp_path, **settings)
        assert flags["algo.dynamic_filtering_enable"]
        return flags["algo.dynamic_filtering_range"], flags.get("algo.dynamic_filtering_min_std"), notes

    # Mini-o3's code drops groups with a deviation of the rewards below 1e-4.
    bounds, least, notes = kept(more="trainer: {rejection_sample: true}\n")
    assert (bounds, least) == ([-math.inf, math.inf], 1e-4)
    assert "judge fails" in notes["trainer.rejection_sample"]
    # DAPO's scores of 1 and -1 have a mean of 0 or less where most are wrong, and are learnt from all the same.
    for metric in ("score", "seq_reward", "seq_final_reward"):
        assert kept(algorithm=f"filter_groups: {{enable: true, metric: {metric}}}")[:2] == (
            [-math.inf, math.inf],
            1e-6,
        )
    bounds, least, notes = kept(algorithm="filter_groups: {enable: true, metric: acc}")
    assert (bounds, least) == ([0.0, 1.0], None)
    assert "--algo.dynamic_filtering_part" in notes["algorithm.filter_groups.metric"]


def test_batches_that_verl_may_draw_for_a_step_are_multiples_of_the_steps_prompts(tmp_path):
    batches = "data: {train_batch_size: 64, gen_batch_size: 96}\n"
    filtered = "trainer: {rejection_sample: true}\n"
    # Mini-o3's default.
    flags, _ = verl(tmp_path, more=filtered)
    assert flags["algo.dynamic_filtering_max_batches"] == 256
    bound = "max_num_gen_batches: 5"
    flags, _ = verl(tmp_path, algorithm=bound, more=filtered)
    assert (flags["algo.dynamic_filtering_enable"], flags["algo.dynamic_filtering_max_batches"]) == (True, 5)
    # 5 x 96 = 480 prompts are eight times 64, the last time in part.
    flags, _ = verl(tmp_path, algorithm=bound, more=batches + filtered)
    assert flags["algo.dynamic_filtering_max_batches"] == 8
    # Twice as many: 10 x 96 = 960 are fifteen times 64.
    more = filtered.replace("}", ", rejection_sample_multiplier: 2}")
    flags, notes = verl(tmp_path, algorithm=bound, more=batches + more)
    assert flags["algo.dynamic_filtering_max_batches"] == 15
    assert "trainer.rejection_sample_multiplier" in notes
    # DAPO's names; 0 is no bound there and here.
    flags, notes = verl(tmp_path, algorithm="filter_groups: {enable: true, metric: acc, max_num_gen_batches: 0}")
    assert (flags["algo.dynamic_filtering_enable"], flags["algo.dynamic_filtering_max_batches"]) == (True, 0)
    flags, notes = verl(tmp_path, algorithm=bound)
    assert "algo.dynamic_filtering_max_batches" not in flags
    assert notes["algorithm.max_num_gen_batches"].startswith("it has no effect")


def test_an_adaptive_weight_of_the_kl_is_for_a_penalty_in_the_reward():
    adaptive = {"algorithm__kl_type": "adaptive", "algorithm__kl_target": 0.2, "algorithm__kl_horizon": 500.0}
    flags, _ = easyr1(**adaptive)
    assert (flags["algo.kl.target"], flags["algo.kl.horizon"], flags["algo.kl.use_loss"]) == (0.2, 500, False)
    flags, notes = easyr1(**adaptive, algorithm__use_kl_loss=True)
    assert "algo.kl.target" not in flags
    assert {
        name for name, kind in notes.items() if name.startswith("algorithm") and kind == "without counterpart"
    } == {"algorithm.kl_type", "algorithm.kl_target", "algorithm.kl_horizon"}


ESTIMATOR = "algo.advantage.estimator"


@pytest.mark.parametrize(
    ("given", "flags", "left_out"),
    [
        # An estimator that is not here becomes the nearest.
        ({"algorithm__adv_estimator": "grpo_passk"}, {ESTIMATOR: "group_norm"}, ["algorithm.adv_estimator"]),
        ({"algorithm__adv_estimator": "gdpo"}, {ESTIMATOR: "group_norm"}, ["algorithm.adv_estimator"]),
        ({"algorithm__adv_estimator": "remax"}, {ESTIMATOR: "remax"}, []),
        ({"algorithm__adv_estimator": "reinforce_plus_plus_baseline"}, {ESTIMATOR: "reinforce_baseline"}, []),
        ({"trainer__logger": ["wandb", "clearml"]}, {"logger.trackers": ["wandb"]}, ["trainer.logger"]),
        # Without dynamic batches passes are counted in samples.
        (
            {"worker__actor__dynamic_batching": False, "worker__actor__padding_free": False},
            {"train.dynamic_batch_enable": False, "ds.packing_samples": False, "train.max_tokens_per_gpu": None},
            [],
        ),
        # Validation samples as training does.
        (
            {"worker__rollout__n": 6, "worker__rollout__temperature": 0.9, "data__val_files": "held_out"},
            {"eval.n_samples_per_prompt": 6, "eval.temperature": 0.9},
            [],
        ),
        (
            {"trainer__save_limit": -1, "trainer__save_model_only": True},
            {"ckpt.max_num": 1_000_000, "ckpt.save_hf": True},
            [],
        ),
        # There is no critic.
        (
            {"worker__critic__optim__lr": 1e-5, "trainer__critic_warmup": 4},
            {"critic.adam.lr": None},
            ["worker.critic.optim.lr", "trainer.critic_warmup"],
        ),
    ],
)
def test_a_setting_of_easyr1_becomes_a_flag_or_is_listed(given, flags, left_out):
    found, notes = easyr1(**given)
    assert {name: found.get(name) for name in flags} == flags
    names = [name.replace("__", ".") for name in given]
    assert [name for name in names if notes.get(name) == "without counterpart"] == left_out


def test_a_loss_takes_the_settings_that_it_reads():
    def of(loss: str) -> dict[str, object]:
        flags, _ = easyr1(worker__actor__loss_type=loss)
        names = ("eps_clip_low_high", "dual_clip", "sapo_temperature_pos", "sapo_temperature_neg")
        return {name: flags[f"actor.{name}"] for name in names if f"actor.{name}" in flags}

    assert of("default") == of("gspo_token") == {"eps_clip_low_high": [0.2, 0.3], "dual_clip": 3.0}
    assert of("cispo") == {"eps_clip_low_high": [0.2, 0.3]}
    assert of("sapo") == {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    _, notes = easyr1(worker__actor__loss_type="sapo", worker__actor__clip_ratio_high=0.4)
    assert notes["worker.actor.clip_ratio_high"] == "without counterpart"


def test_supervised_training_of_openrlhf_has_our_names():
    conversion = convert(
        {"pretrain": "m", "dataset": "d", "learning_rate": 1e-5, "l2": 0.1, "max_len": 4096, "multiturn": True},
        TABLES["train_sft"],
    )
    assert conversion.command == "train_sft"
    assert conversion.flags == {
        "adam.lr": 1e-5,
        "adam.weight_decay": 0.1,
        "model.model_name_or_path": "m",
        "data.input_key": "input",  # their default
        "data.max_len": 4096,
        "data.dataset": "d",
        "data.multiturn": True,
        # Theirs, whatever the rows.
        "train.batch_size": 128,
        "train.micro_batch_size": 8,
        "ckpt.output_dir": "./ckpt",
    }


def test_ring_attention_becomes_ulysses_and_several_reward_models_one():
    conversion = convert({"ring_attn_size": 4, "reward_pretrain": "a,b"}, TABLES["train_ppo_ray"])
    assert (conversion.flags["ds.ulysses_size"], conversion.flags["reward.model_name_or_path"]) == (4, "a")
    kinds = {note.subject: note.kind for note in conversion.notes}
    assert (kinds["ring_attn_size"], kinds["reward_pretrain"]) == ("another meaning", "without counterpart")


def test_settings_without_counterpart_are_listed_without_their_values(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref: {model: {path: m}}\nnewest: {part: 3}\nhf_token: SECRET\n")
    run = read_run(file)
    document = to_document(convert(run.values, run.table), source="s", system="t")
    assert "newest.part, hf_token: not known" in document
    assert "SECRET" not in document


def test_what_is_not_read_of_a_script_is_listed_by_its_line(tmp_path):
    file = tmp_path / "run.sh"
    trains = "python -m openrlhf.cli.train_sft --pretrain m --dataset d --l2 0.1 "
    file.write_text(f'A=(\n  --beta 1\n)\nfor i in 1; do :; done\n{trains}"${{A[@]}}" $@\n{trains}\n')
    run = read_run(file)
    assert (run.values["l2"], run.values["dataset"]) == (0.1, "d")
    found = {note.subject: note.text.partition(",")[0].partition(";")[0] for note in run.remarks}
    assert found == {
        "line 1": "an array",
        "line 4": "`for`",
        "line 6": "another command that trains",
        "${A[@]}": "it has no value",
    }


def test_a_named_config_of_hydra_is_read_where_it_is_there(tmp_path):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "tools.yaml").write_text(
        "defaults: [ppo_trainer]\ndata: {train_batch_size: 64}\n" "actor_rollout_ref: {rollout: {n: 3}}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo --config-path=config --config-name=tools data.train_files=r.parquet "
        "actor_rollout_ref.model.path=m actor_rollout_ref.rollout.n=2\n"
    )
    run = read_run(script)
    flags = convert(run.values, run.table, shown=run.shown, remarks=run.remarks).flags
    assert (flags["rollout.batch_size"], flags["rollout.n_samples_per_prompt"]) == (64, 2)
    assert not any(note.subject.startswith("--config") for note in run.remarks)
