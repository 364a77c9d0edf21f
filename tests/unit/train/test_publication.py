"""A finished run's model on the hub: the model's files alone, and told before the run where it cannot be."""

from pathlib import Path

import pytest
from helpers.commands import error_of
from helpers.http_servers import hub_server

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.train.publication import model_files, publish

MODEL = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors", "chat_template.jinja", "config.json"]
MODEL += ["merges.txt", "model.safetensors", "tokenizer.json"]
OTHERS = ["checkpoints/global_step2/config.json", "error.txt", "images/1.png", "metrics.jsonl", "rollouts.jsonl"]
OTHERS += ["rows-0123456789ab.jsonl", "run_config.yaml", "stage.json", "trackers.json", "wandb/run/config.json"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in (*MODEL, *OTHERS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


def config(repo: str | None) -> SFTConfig:
    return dotted.replace(SFTConfig(), {"ckpt.push_to_hub": repo})


def test_the_models_files_are_neither_records_nor_checkpoints_nor_rows(run):
    assert model_files(run) == MODEL


def test_they_alone_are_uploaded_to_a_private_repository_whose_address_is_told(run, capsys):
    with hub_server() as uploads:
        publish(config(None), run)
        assert uploads.posts == []
        publish(config("me/model"), run)
    assert uploads.made["visibility"] == "private"
    assert sorted(uploads.files) == MODEL
    first, second = capsys.readouterr().out.splitlines()
    assert first == "uploading 7 files to me/model ..."
    assert second.startswith("the model is at http://127.0.0.1:")


def test_the_moving_average_goes_along_as_a_model_where_the_run_has_made_one(run):
    average = ["ema/adapter/adapter_config.json", "ema/config.json", "ema/model.safetensors"]
    for name in (*average, "ema/notes.log"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    averaging = dotted.replace(PPOConfig(), {"ckpt.push_to_hub": "me/model", "train.enable_ema": True})
    with hub_server() as uploads:
        publish(averaging, run)
        assert sorted(uploads.files) == sorted([*MODEL, *average])
        # One of an earlier run stays where it is.
        uploads.files.clear()
        publish(dotted.replace(averaging, {"train.enable_ema": False}), run)
        assert sorted(uploads.files) == MODEL


@pytest.mark.parametrize("command", ["train_sft", "train_ppo_ray"])
def test_without_a_login_a_run_is_refused_before_anything_is_loaded(command, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = {
        "train_sft": ["--model.model_name_or_path", "m", "--data.dataset", "rows.jsonl"],
        "train_ppo_ray": [
            "--actor.model_name_or_path",
            "m",
            "--data.prompt_dataset",
            "rows.jsonl",
            "--rollout.n_samples_per_prompt",
            "2",
        ],
    }[command]
    with hub_server(token=None):
        error = error_of(command, [*flags, "--ds.param_dtype", "fp32", "--ckpt.push_to_hub", "me/model"], capfd=capfd)
    assert error.startswith(
        "--ckpt.push_to_hub me/model: nobody is logged in to the Hugging Face hub; run `hf auth login`"
    )
