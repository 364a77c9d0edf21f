"""An architecture without a kit, from its kit's derivation to reinforcement learning on images, on real Ray and vLLM."""

import json
import os
from pathlib import Path

import pytest
from helpers.commands import REWARD
from helpers.kitless import build_kitless

from lmm_r1 import cli
from lmm_r1.cli import make_task
from lmm_r1.cluster import KIT_VARIABLE
from lmm_r1.lmm_kits import kit_of

pytestmark = [pytest.mark.full, pytest.mark.slow]

NAME = "glm_ocr"
PROMPTS, SAMPLES, STEPS, MAX_LEN = 2, 2, 2, 1024


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_derived_kit_trains_by_sft_and_rl_on_images(tmp_path, own_environment, new_process_group, capsys):
    model, kit_file = build_kitless(NAME, tmp_path / "model"), tmp_path / "kit.json"
    cli.main(["kits", "--derive", str(model), "--output", str(kit_file)])
    found = json.loads(kit_file.read_text())["capabilities"]
    assert found["rl"]["confirmed"], found["rl"]["reason"]

    for kind, flags in (("sft", ["--solutions"]), ("rl", [])):
        rows = ["--modality", "image", "--rows", str(PROMPTS * STEPS), "--output", str(tmp_path / f"{kind}_rows")]
        make_task.main(["digits", *rows, *flags])
    cli.main(
        [
            *("--kit", str(kit_file), "train_sft", "--model.model_name_or_path", str(model)),
            *("--data.dataset", str(tmp_path / "sft_rows"), "--data.max_len", str(MAX_LEN), "--ds.param_dtype", "fp32"),
            *("--train.batch_size", str(PROMPTS), "--train.micro_batch_size", str(PROMPTS), "--train.max_epochs", "1"),
            *("--logger.logging_steps", "1", "--adam.lr", "1e-3", "--ckpt.output_dir", str(tmp_path / "sft")),
        ]
    )  # fmt: skip
    assert [line["step"] for line in metrics_of(tmp_path / "sft")] == [1, 2]

    # The trained model has its kit itself.
    os.environ[KIT_VARIABLE] = ""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARD)
    cli.main(
        [
            *("train_ppo_ray", "--actor.model_name_or_path", str(tmp_path / "sft")),
            *("--data.prompt_dataset", str(tmp_path / "rl_rows"), "--reward.remote_url", str(rewards)),
            *("--ckpt.output_dir", str(tmp_path / "rl"), "--data.max_len", str(MAX_LEN), "--ds.param_dtype", "fp32"),
            *("--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1", "--vllm.num_engines", "1"),
            *("--train.colocate_all", "--algo.kl.init_coef", "0", "--ds.zero_stage", "2"),
            *("--rollout.batch_size", str(PROMPTS), "--rollout.n_samples_per_prompt", str(SAMPLES)),
            *("--rollout.max_new_tokens", "8", "--rollout.micro_batch_size", str(PROMPTS * SAMPLES)),
            *("--train.batch_size", str(PROMPTS * SAMPLES), "--train.micro_batch_size", str(SAMPLES)),
            *("--actor.adam.lr", "1e-3"),
        ]
    )  # fmt: skip
    steps = metrics_of(tmp_path / "rl")
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["actor_grad_norm"] > 0 for line in steps), steps
    assert all(0 < line["mismatch/image/mean"] < 1e-4 for line in steps), steps
    assert kit_of(str(tmp_path / "rl")) == kit_of(str(tmp_path / "sft"))
