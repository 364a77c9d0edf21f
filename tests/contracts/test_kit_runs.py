"""Two supervised and two RL steps of kits of every kind through the commands, on real Ray, DeepSpeed and vLLM."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import REWARD
from helpers.tables import SOME

from lmm_r1.cli import make_task, train_ppo_ray, train_sft
from lmm_r1.lmm_kits import Checkpoint, get_kit, kit_of

pytestmark = pytest.mark.slow

# Of kinds that differ in a whole run: what a kit computes alone is shown by test_kit_trainers and test_kit_engines.
# Besides the usual ones: without images, without an engine, with tiles, with experts.
RUN = sorted(SOME | {"idefics3", "janus", "llm", "qwen3_vl_moe"})
STEPS = 2
PROMPTS = 2
SAMPLES = 2
MAX_LEN = 2048


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> str:
    (file := tmp_path_factory.mktemp("rewards") / "spread.py").write_text(REWARD)
    return str(file)


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A function from the modality to a folder of rows, with or without solutions."""
    folder = tmp_path_factory.mktemp("rows")

    def made(modality: str, *, solutions: bool) -> str:
        output = folder / f"{modality}_{solutions}"
        if not output.exists():
            flags = ["--modality", modality, "--rows", str(PROMPTS * STEPS), "--output", str(output)]
            make_task.main(["digits", *flags, *(["--solutions"] if solutions else [])])
        return str(output)

    return made


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RUN)
def test_two_steps_of_supervised_and_of_reinforcement_learning(
    name, tiny_checkpoint, rewards, rows_of, tmp_path, own_environment, new_process_group
):
    kit, modality = get_kit(name), "mixed" if get_kit(name).takes_images else "text"
    train_sft.main(
        [
            *("--model.model_name_or_path", str(tiny_checkpoint(name)), "--data.dataset", rows_of(modality, solutions=True)),
            *("--data.max_len", str(MAX_LEN), "--ds.param_dtype", "fp32", "--adam.lr", "1e-3"),
            *("--train.batch_size", str(PROMPTS), "--train.micro_batch_size", str(PROMPTS), "--train.max_epochs", "1"),
            *("--logger.logging_steps", "1", "--ckpt.output_dir", str(tmp_path / "sft")),
        ]
    )  # fmt: skip
    assert [line["step"] for line in metrics_of(tmp_path / "sft")] == [1, 2]
    assert kit_of(str(tmp_path / "sft")) is kit
    if kit.engine_refusal is not None:
        return
    train_ppo_ray.main(
        [
            *("--actor.model_name_or_path", str(tmp_path / "sft"), "--data.prompt_dataset", rows_of(modality, solutions=False)),
            *("--reward.remote_url", rewards, "--ckpt.output_dir", str(tmp_path / "rl"), "--data.max_len", str(MAX_LEN)),
            *("--actor.num_gpus_per_node", "1", "--ref.num_gpus_per_node", "1", "--vllm.num_engines", "1"),
            *("--train.colocate_all", "--algo.kl.init_coef", "0", "--ds.zero_stage", "2", "--ds.param_dtype", "fp32"),
            *("--rollout.batch_size", str(PROMPTS), "--rollout.n_samples_per_prompt", str(SAMPLES)),
            *("--rollout.max_new_tokens", "8", "--rollout.micro_batch_size", str(PROMPTS * SAMPLES)),
            *("--train.batch_size", str(PROMPTS * SAMPLES), "--train.micro_batch_size", str(SAMPLES), "--actor.adam.lr", "1e-3"),
        ]
    )  # fmt: skip
    steps = metrics_of(tmp_path / "rl")
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        # Compared before the first update, and in the second update's own passes, with rounding between them.
        of_kinds = {name: line[name] for name in line if name.startswith("mismatch/") and name.endswith("/mean")}
        assert of_kinds
        if kit.engine_disagrees(Checkpoint(str(tmp_path / "rl")).config):
            of_kinds.pop("mismatch/image/mean", None)
            of_kinds.pop("mismatch/mean")
        assert all(0 < mean < 1e-4 for mean in of_kinds.values()), of_kinds
    assert json.loads((tmp_path / "rl/stage.json").read_text())["steps"] == STEPS
    assert kit_of(str(tmp_path / "rl")) is kit
    kit.load_processor(str(tmp_path / "rl"), trust_remote_code=False)
