"""Critics and reward models that do not fit the policy, or are none: one sentence, before Ray is started."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import QUESTION, error_of, flags, without_ray, write_rows

from lmm_r1.lmm_kits import TinyModelSpec, get_kit

pytestmark = pytest.mark.usefixtures("own_environment")
KIT = "llm"


@pytest.fixture
def error(
    tmp_path: Path,
    tiny_checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """The sentence with which a run ends that has the changed flags."""
    without_ray(tmp_path, monkeypatch)
    write_rows(tmp_path, QUESTION, QUESTION)
    values: dict[str, object] = {
        "actor.model_name_or_path": tiny_checkpoint(KIT),
        "data.prompt_dataset": "rows.jsonl",
        "ckpt.output_dir": "out",
        "algo.advantage.estimator": "gae",
        "rollout.batch_size": 2,
        "train.batch_size": 2,
        "ds.param_dtype": "fp32",
    } | {f"{group}.num_gpus_per_node": 1 for group in ("actor", "critic", "ref", "reward")}

    def told(**changes: object) -> str:
        given = values | {name.replace("__", "."): value for name, value in changes.items()}
        return error_of("train_ppo_ray", flags(given), capfd=capfd)

    return told


def test_a_critic_of_another_architecture_is_refused(error, tiny_checkpoint):
    other = tiny_checkpoint("qwen2_5_vl")
    assert error(critic__model_name_or_path=other, reward__remote_url="reward.py") == (
        f"--critic.model_name_or_path {other} has the architecture qwen2_5_vl, and the policy llm: it would not "
        "understand the policy's tokens and images; take a model of the same kind"
    )


def test_a_reward_model_of_another_vocabulary_is_refused(error, tmp_path):
    (tmp_path / "other").mkdir()
    spec = TinyModelSpec(hidden_size=64, layers=2, seed=0, tie_embeddings=False)
    get_kit(KIT).build_tiny(spec, ("some words", "that nobody else says"), tmp_path / "other")
    assert error(reward__model_name_or_path=tmp_path / "other").startswith(
        f"--reward.model_name_or_path {tmp_path / 'other'} has another vocabulary than the policy"
    )


def test_a_reward_model_without_a_value_head_is_refused(error, tiny_checkpoint):
    folder = tiny_checkpoint(KIT)
    assert error(reward__model_name_or_path=folder) == (
        f"{folder}: this checkpoint has no value head (no weight score.weight); give a trained reward model, or the "
        "name of its head with --ds.value_head_prefix"
    )
    said = error(reward__model_name_or_path=folder, ds__value_head_prefix="value_head")
    assert "(no weight value_head.weight)" in said


def test_a_critic_whose_weights_are_cut_short_is_refused(error, tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint(KIT), tmp_path / "cut")
    file = tmp_path / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    said = error(critic__model_name_or_path=tmp_path / "cut", reward__remote_url="reward.py")
    assert said.startswith(f"{file}: the weight file is damaged")
