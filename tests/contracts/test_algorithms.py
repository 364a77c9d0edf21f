"""The shipped algorithms: each file says its paper's settings and nothing else, on text and on images."""

import math

import pytest
from helpers.commands import STAGES, printed_commands, trainer_config

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse
from lmm_r1.config import PPOConfig, resolve
from lmm_r1.errors import UserError

CLIPPED = {"actor.policy_loss_type": "ppo", "actor.eps_clip_low_high": (0.2, 0.2), "actor.loss_agg_mode": "token-mean"}
NO_KL = {"algo.kl.init_coef": 0.0, "algo.kl.use_loss": False, "algo.kl.estimator": "k1"}
GROUP = {"algo.advantage.estimator": "group_norm"}


def in_reward(estimator: str) -> dict[str, object]:
    return {"algo.advantage.estimator": estimator, "algo.kl.use_loss": False, "algo.kl.estimator": "k1"}


def as_loss(estimator: str) -> dict[str, object]:
    return {"algo.kl.use_loss": True, "algo.kl.estimator": estimator}


PAPERS: dict[str, dict[str, object]] = {
    "ppo": CLIPPED | in_reward("gae") | {"algo.advantage.gamma": 1.0, "algo.advantage.lambd": 1.0},
    "reinforce_plus_plus": CLIPPED | in_reward("reinforce") | {"algo.advantage.gamma": 1.0},
    "reinforce_plus_plus_baseline": CLIPPED | as_loss("k2") | {"algo.advantage.estimator": "reinforce_baseline"},
    "grpo": CLIPPED
    | GROUP
    | as_loss("k3")
    | {"actor.loss_agg_mode": "seq-mean-token-mean", "algo.kl.init_coef": 0.04},
    "dr_grpo": CLIPPED
    | NO_KL
    | {"algo.advantage.estimator": "dr_grpo", "actor.loss_agg_mode": "seq-mean-token-sum-norm"},
    "rloo": CLIPPED | in_reward("rloo"),
    "remax": CLIPPED | in_reward("remax"),
    "dapo": CLIPPED
    | NO_KL
    | GROUP
    | {
        "actor.eps_clip_low_high": (0.2, 0.28),
        "algo.dynamic_filtering_enable": True,
        "algo.dynamic_filtering_range": (0.0, 1.0),
        "reward.overlong_buffer_len": 819.0,
        "reward.overlong_penalty_factor": 1.0,
    },
    "gspo": NO_KL
    | GROUP
    | {
        "actor.policy_loss_type": "gspo",
        "actor.eps_clip_low_high": (3e-4, 4e-4),
        "actor.loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": CLIPPED | NO_KL | GROUP | {"actor.policy_loss_type": "cispo", "actor.eps_clip_low_high": (1.0, 4.0)},
    "sapo": NO_KL
    | GROUP
    | {
        "actor.policy_loss_type": "sapo",
        "actor.sapo_temperature_pos": 1.0,
        "actor.sapo_temperature_neg": 1.05,
        "actor.loss_agg_mode": "seq-mean-token-mean",
    },
}
FILES = {path.stem: path for path in (STAGES / "configs/algorithms").iterdir()}
# The stages on which an algorithm stands, by what their rows are.
BASES = {"text": "fre_text", "image": "fre_multi"}


def config(*files: str) -> PPOConfig:
    arguments = [part for file in files for part in ("--config", str(STAGES / "configs" / f"{file}.yaml"))]
    return parse(PPOConfig, arguments, prog="p", description="")


def test_every_algorithm_has_its_papers_settings():
    assert set(FILES) == set(PAPERS)


@pytest.mark.parametrize("base", [*BASES.values(), "demo/mgt", "r1v_geoqa"])
@pytest.mark.parametrize("name", PAPERS)
def test_on_top_of_a_stage_an_algorithm_changes_what_is_its_own(name, base):
    plain, on_top = config(base), config(base, f"algorithms/{name}")
    for flag in dotted.leaf_types(PPOConfig):
        expected = PAPERS[name].get(flag, dotted.get(plain, flag))
        assert dotted.get(on_top, flag) == expected, flag
    inputs = {
        "actor.model_name_or_path": "m",
        "data.prompt_dataset": "d",
        "reward.remote_url": "http://host/get_reward",
    }
    if on_top.algo.kl.use_loss and not on_top.algo.kl.init_coef:
        with pytest.raises(UserError, match=r"^--algo\.kl\..* unless --algo\.kl\.init_coef is above 0"):
            resolve(dotted.replace(on_top, inputs))
        return
    buffer, response = on_top.reward.overlong_buffer_len, on_top.rollout.max_new_tokens
    if buffer and response and buffer > response:
        with pytest.raises(UserError, match=f"^--reward.overlong_buffer_len 819 must be at most .* {response};"):
            resolve(dotted.replace(on_top, inputs))
        return
    resolved = resolve(dotted.replace(on_top, inputs))
    changed = {flag for flag, value in PAPERS[name].items() if dotted.get(resolved, flag) != value}
    assert changed == set()


def test_the_buffer_of_dapo_is_that_share_of_a_response_which_it_is_in_the_paper():
    stage = config("fre_text", "algorithms/dapo")
    assert stage.reward.overlong_buffer_len == math.floor(4096 / 20480 * stage.rollout.max_new_tokens)


@pytest.mark.parametrize("rows", BASES)
def test_the_script_trains_an_algorithm_on_rows_of_either_kind(rows, tmp_path):
    script = STAGES / "train_algorithm.sh"
    prepare, train = printed_commands(script, "dapo", rows, "--train.seed", "7", folder=tmp_path)
    recipe = {"text": "deepscaler_40k", "image": "vermulti_geo"}[rows]
    assert prepare[-3:] == [recipe, "--output", f"data/{recipe}"]
    found = trainer_config(train)
    assert (found.train.seed, found.ckpt.output_dir, found.logger.stage_name) == (7, f"runs/dapo_{rows}", "dapo")
    assert found.actor.eps_clip_low_high == (0.2, 0.28)
    assert found.actor.adam.lr == config(BASES[rows]).actor.adam.lr


def test_an_algorithm_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(AssertionError, match="train_algorithm.sh: trpo is none of cispo dapo dr_grpo"):
        printed_commands(STAGES / "train_algorithm.sh", "trpo", folder=tmp_path)
    with pytest.raises(AssertionError, match="not of video"):
        printed_commands(STAGES / "train_algorithm.sh", "grpo", "video", folder=tmp_path)


def test_what_contradicts_an_algorithm_is_refused():
    inputs = {"actor.model_name_or_path": "m", "data.prompt_dataset": "d", "actor.eps_clip": 0.3}
    with pytest.raises(UserError, match="--actor.eps_clip 0.3 .* unless --actor.policy_loss_type is not sapo"):
        resolve(dotted.replace(config("algorithms/sapo"), inputs))
