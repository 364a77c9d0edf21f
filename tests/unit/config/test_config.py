"""Training settings: what follows from the flags, what is refused, and how they are handed on."""

import logging

import pytest
from helpers.tables import table

from lmm_r1 import dotted
from lmm_r1.cli.arguments import help_of, parse
from lmm_r1.config import KDConfig, PPOConfig, SFTConfig, resolve, to_yaml, unplanned
from lmm_r1.config.run_rows import row_reading
from lmm_r1.data.reading import shipped_prompt
from lmm_r1.errors import UserError
from lmm_r1.host.strategy import to_openrlhf_args
from lmm_r1.records.run_folder import trained_reading

ONE_GPU = table("config/config", "one_gpu")


def ppo(**changes: object) -> PPOConfig:
    """A config that resolves on one GPU, with `group__name` flags changed."""
    return dotted.replace(PPOConfig(), ONE_GPU | {name.replace("__", "."): value for name, value in changes.items()})


def sft(**changes: object) -> SFTConfig:
    given = {"model.model_name_or_path": "model", "data.dataset": "rows.jsonl"}
    return dotted.replace(SFTConfig(), given | {name.replace("__", "."): value for name, value in changes.items()})


GAE = {"algo.advantage.estimator": "gae", "critic.num_gpus_per_node": 1, "reward.num_gpus_per_node": 1}
BY_MODEL = {"reward.remote_url": None, "reward.model_name_or_path": "rm"}
EPISODES = {"train.agent": "a.py", "reward.remote_url": None}
LEVEL, THRESHOLD = "algo.advantage.is_correction_level", "algo.advantage.is_correction_threshold"


@pytest.mark.parametrize(
    ("changes", "flag", "value"),
    [
        ({"actor.eps_clip": 0.1}, "actor.eps_clip_low_high", (0.1, 0.1)),
        ({"actor.eps_clip_low_high": (0.2, 0.28)}, "actor.eps_clip_low_high", (0.2, 0.28)),
        # One threshold is an upper bound.
        ({LEVEL: "token", THRESHOLD: (2.0,)}, THRESHOLD, (0.0, 2.0)),
        # Only responses that are compared as wholes are not discounted.
        (GAE | {"algo.advantage.gamma": 0.5}, "algo.advantage.gamma", 0.5),
        ({"algo.advantage.estimator": "reinforce", "algo.advantage.gamma": 0.5}, "algo.advantage.gamma", 0.5),
        ({}, "ds.packing_samples", False),
        ({"train.dynamic_batch_enable": True}, "ds.packing_samples", True),
        ({}, "rollout.vllm_generate_batch_size", 32),
        ({"rollout.vllm_generate_batch_size": 16}, "rollout.vllm_generate_batch_size", 16),
        # A critic starts from its own model, the reward model or the policy.
        (GAE, "critic.model_name_or_path", "model"),
        (GAE | BY_MODEL, "critic.model_name_or_path", "rm"),
        (GAE | BY_MODEL | {"critic.model_name_or_path": "critic"}, "critic.model_name_or_path", "critic"),
        (GAE | BY_MODEL | {"train.colocate_critic_reward": True}, "train.colocate_critic_reward", True),
        # Where nothing gives rewards, the math verifier does.
        ({"reward.remote_url": None}, "reward.remote_url", "math"),
        (BY_MODEL, "reward.remote_url", None),
        (EPISODES, "reward.remote_url", None),
        ({"train.agent_func_path": "a.py", "reward.remote_url": None}, "reward.remote_url", None),
        # Engines keep what episodes have read.
        (EPISODES, "vllm.enable_prefix_caching", True),
        (EPISODES | {"vllm.enable_prefix_caching": False}, "vllm.enable_prefix_caching", False),
        ({}, "vllm.enable_prefix_caching", False),
        (EPISODES | {"agent.branches": 4}, "agent.branches", 4),
        ({"vllm.enable_sleep": True, "train.colocate_all": True}, "vllm.enable_sleep", True),
        ({}, LEVEL, "off"),
        ({"train.async_enable": True, LEVEL: "seq"}, LEVEL, "seq"),
        # Batches need not be multiples of micro-batches.
        (
            {"train.batch_size": 10, "train.micro_batch_size": 4, "rollout.micro_batch_size": 512},
            "train.batch_size",
            10,
        ),
    ],
)
def test_what_is_open_follows_from_the_other_flags_and_what_is_given_stays(changes, flag, value):
    assert dotted.get(resolve(dotted.replace(ppo(), changes)), flag) == value


@pytest.mark.parametrize(
    ("config", "flag", "value", "said"),
    [
        (ppo(algo__advantage__gamma=0.5), "algo.advantage.gamma", 1.0, "--algo.advantage.gamma 0.5 is not used"),
        (
            dotted.replace(ppo(), GAE | {"train.colocate_critic_reward": True}),
            "train.colocate_critic_reward",
            False,
            "--train.colocate_critic_reward is off",
        ),
        (ppo(vllm__enable_sleep=True), "vllm.enable_sleep", False, "--vllm.enable_sleep is off"),
        (ppo(data__input_template="Question:"), "data.input_template", None, "has no {}"),
        (sft(data__input_template="Question:"), "data.input_template", None, "has no {}"),
        (ppo(train__async_enable=True), LEVEL, "token", "is token: with --train.async_enable"),
    ],
)
def test_a_flag_that_is_changed_is_told(config, flag, value, said, caplog):
    with caplog.at_level(logging.WARNING):
        assert dotted.get(resolve(config), flag) == value
    assert said in caplog.text


def test_a_batch_is_divided_among_groups_of_processes_that_share_samples():
    gpus = {"actor__num_gpus_per_node": 12, "ref__num_gpus_per_node": 6, "train__batch_size": 4}
    resolve(ppo(**gpus, ds__tensor_parallel_size=3))
    resolve(ppo(**gpus, ds__ulysses_size=3))


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("think", [None, "number", "format", "box:xywh", "composition", "composition:select.box=1,format=0.5"]),
        ("think_box", ["box", "composition:box=1,format=0.5"]),
        # Of a composition's parts, only the accuracy is paid.
        ("none", ["math:format_weight=0", "format:format_weight=0", "composition:math=1", "a.py", "http://a/b"]),
    ],
)
def test_the_prompt_for_the_format_that_the_verifier_pays_is_recorded(name, rewards):
    for reward in rewards:
        resolved = resolve(ppo(reward__remote_url=reward))
        assert (reward, resolved.data.system_prompt) == (reward, name)
        assert row_reading(resolved.data).default_prompt == shipped_prompt(name)


def test_a_prompt_is_chosen_only_if_none_is_given():
    for given in ("none", "think_box", "Think."):
        assert resolve(ppo(reward__remote_url="math", data__system_prompt=given)).data.system_prompt == given
    assert resolve(ppo(reward__remote_url="math", train__agent="crop")).data.system_prompt == "none"
    weighted = ppo(reward__remote_url="math:format_weight=0", reward__part_weights='{"format": 0.5}')
    assert resolve(weighted).data.system_prompt == "think"


def test_the_prompt_of_a_run_is_recorded_as_its_text_and_found_from_its_models(tmp_path):
    (tmp_path / "own.txt").write_text("Think\nfirst.\n")
    own = {"data__system_prompt": str(tmp_path / "own.txt"), "data__max_pixels": 784}
    given = {"rl": ppo(**own), "sft": sft(**own), "plain": sft(), "none": ppo(), "box": ppo(reward__remote_url="box")}
    for name, config in given.items():
        (tmp_path / name / "checkpoints/step1_hf").mkdir(parents=True)
        (tmp_path / name / "run_config.yaml").write_text(to_yaml(resolve(config)))
    (tmp_path / "own.txt").unlink()

    def prompt(*names: str) -> str | None:
        return trained_reading([str(tmp_path / name) for name in names])[0]

    assert [prompt(name) for name in given] == ["Think\nfirst.", "Think\nfirst.", None, "none", "think_box"]
    assert prompt("rl", "plain", "elsewhere") == prompt("rl/checkpoints/step1_hf") == "Think\nfirst."
    assert prompt("rl", "none") == "none"
    assert trained_reading([str(tmp_path / "sft")]) == ("Think\nfirst.", 784)
    assert trained_reading(["Qwen/Qwen2.5-VL-3B-Instruct"]) == (None, None)


def test_resolving_twice_changes_nothing():
    once = resolve(ppo())
    assert resolve(once) == once
    assert resolve(resolve(sft())) == resolve(sft())


def test_a_reference_of_another_size_is_fine_without_a_kl_penalty():
    resolve(ppo(train__colocate_all=True, ref__num_gpus_per_node=8, algo__kl__init_coef=0.0))


def test_samples_of_older_weights_are_corrected_for_unless_the_user_says_how(caplog):
    level = "algo.advantage.is_correction_level"
    assert dotted.get(resolve(ppo()), level) == "off"
    assert dotted.get(resolve(ppo(train__async_enable=True)), level) == "token"
    assert "--algo.advantage.is_correction_level is token: with --train.async_enable" in caplog.text
    assert dotted.get(resolve(dotted.replace(ppo(train__async_enable=True), {level: "seq"})), level) == "seq"


def test_supervised_settings_are_checked_too():
    with pytest.raises(UserError, match="--model.model_name_or_path is missing"):
        resolve(SFTConfig())
    with pytest.raises(UserError, match="--train.batch_size 10 must be a multiple of --train.micro_batch_size 8"):
        resolve(sft(train__batch_size=10, train__micro_batch_size=8))
    with pytest.raises(UserError, match="--adam.vision_lr 0.5 has no effect unless --optim is not muon"):
        resolve(sft(optim="muon", adam__vision_lr=0.5))


REREAD = [
    ppo(),
    ppo(algo__kl__init_coef=0.0, train__shared_prefix_enable=False, ref__num_gpus_per_node=None),
    *(ppo(actor__policy_loss_type=loss) for loss in ("gspo", "cispo", "sapo")),
    ppo(algo__advantage__estimator="gae", critic__num_gpus_per_node=1, train__async_enable=True),
    sft(),
    dotted.replace(
        KDConfig(), {"teacher.model_name_or_path": "t", "model.model_name_or_path": "m", "data.dataset": "d"}
    ),
]


@pytest.mark.parametrize("config", REREAD)
def test_the_yaml_of_a_resolved_config_reads_back_as_the_same_config(config, tmp_path, caplog):
    resolved = resolve(config)
    path = tmp_path / "run_config.yaml"
    path.write_text(to_yaml(unplanned(resolved)), encoding="utf-8")
    again = parse(type(config), ["--config", str(path)], prog="p", description="d")
    assert again == unplanned(resolved)
    caplog.clear()
    assert resolve(again) == again
    assert "has no effect" not in caplog.text


def test_the_yaml_holds_no_key_of_another_service():
    assert "hush" not in to_yaml(dotted.replace(ppo(), {"logger.wandb.key": "hush"}))


@pytest.mark.parametrize("config", [ppo(), sft()], ids=["train_ppo_ray", "train_sft"])
@pytest.mark.parametrize(
    ("flag", "tracker"),
    [("logger.wandb.key", "wandb"), ("logger.tensorboard_dir", "tensorboard")],
)
def test_a_setting_without_which_a_tracker_is_off_turns_it_on(config, flag, tracker):
    assert resolve(config).logger.trackers == ()
    assert resolve(dotted.replace(config, {flag: "given"})).logger.trackers == (tracker,)


def test_a_tracker_that_is_asked_for_twice_is_on_once():
    asked = sft(logger__trackers=("wandb", "tensorboard", "wandb"), logger__wandb__key="k")
    assert resolve(asked).logger.trackers == ("tensorboard", "wandb")
    given = ["--logger.trackers", "wandb", "tensorboard"]
    assert parse(SFTConfig, given, prog="p", description="d").logger.trackers == ("wandb", "tensorboard")


def test_openrlhf_gets_a_nested_namespace_that_may_be_changed():
    config = resolve(ppo(reward__remote_url="http://a/get_reward,http://b/get_reward"))
    args = to_openrlhf_args(config)
    args.eval.steps = float("inf")
    assert args.actor.adam.lr == 1e-6
    assert args.reward.remote_url == ["http://a/get_reward", "http://b/get_reward"]
    assert args.ds.lora.target_modules == "all-linear"
    assert config.eval.steps == -1


@pytest.mark.parametrize("config_class", [PPOConfig, SFTConfig])
def test_every_flag_has_a_default_and_a_help_text(config_class):
    assert isinstance(config_class(), config_class)
    for flag in dotted.leaf_types(config_class):
        assert help_of(config_class, flag).endswith("."), flag


def test_a_run_that_is_not_given_a_name_is_named_after_the_minute():
    names = [config().logger.wandb.run_name for config in (PPOConfig, SFTConfig)]
    assert names == ["ppo_1126T13:07", "sft_1126T13:07"]
