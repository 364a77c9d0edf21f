"""What the supervised command saves from two processes, one with texts and one with images, and from one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import ANSWERED, flags, with_image, write_rows
from helpers.conversations import picture
from helpers.launched_ranks import Ranks, launch
from helpers.tiny_models import build_experts
from safetensors.torch import load_file

from lmm_r1.models.adapters import ADAPTER_FOLDER

pytestmark = pytest.mark.integration
KIT = "qwen2_5_vl"
STEPS = 2
SETTINGS: dict[str, object] = {
    "data.max_len": 512,
    # In the order of the file every other row is the first process's.
    "train.batch_size": 4,
    "train.micro_batch_size": 1,
    "train.max_steps": STEPS,
    "ds.param_dtype": "fp32",
    # With so large a term AdamW's step shows how large a gradient is, and not only its sign.
    "adam.eps": 1.0,
    "adam.lr": 0.1,
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
}
EXPERTS: dict[str, object] = {"model.aux_loss_coef": 100.0}
LORA: dict[str, object] = {"ds.lora.rank": 4}
STAGE_2: dict[str, object] = {"ds.zero_stage": 2}
STAGE_3: dict[str, object] = {"ds.zero_stage": 3}
# An adapter begins with random numbers, which are others where weights are sharded as they are loaded.
RUNS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "ZeRO-2": (STAGE_2, STAGE_2),
    "ZeRO-3": (STAGE_2, STAGE_3),
    "LoRA, ZeRO-3": (STAGE_3 | LORA, STAGE_3 | LORA),
    # So large that most of what is learnt is to balance the experts.
    "experts, ZeRO-3": (STAGE_2 | EXPERTS, STAGE_3 | EXPERTS),
}


@pytest.fixture(scope="module")
def experts(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    build_experts(tiny_checkpoint("llm"), folder)
    return folder


@pytest.fixture(scope="module")
def train(
    tiny_checkpoint: Callable[[str], Path], experts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, object], int], tuple[Ranks, Path]]:
    """A function that starts the command with settings in so many processes, which returns them and their run folder."""
    data = tmp_path_factory.mktemp("rows")
    picture(84, 56).save(data / "picture.png")
    rows = write_rows(data, *[ANSWERED, with_image("picture.png", base=ANSWERED)] * (2 * STEPS))
    texts = tmp_path_factory.mktemp("texts")
    longer = {**ANSWERED, "messages": [{"role": "user", "content": "What is 12 + 34?"}, ANSWERED["messages"][-1]]}
    inputs = {
        False: (tiny_checkpoint(KIT), rows),
        True: (experts, write_rows(texts, *[ANSWERED, longer] * (2 * STEPS))),
    }

    def started(settings: dict[str, object], count: int) -> tuple[Ranks, Path]:
        folder = tmp_path_factory.mktemp("run")
        model, dataset = inputs["model.aux_loss_coef" in settings]
        values = SETTINGS | settings | {"model.model_name_or_path": model, "data.dataset": dataset}
        argv = flags(values | {"ckpt.output_dir": folder / "model", "ckpt.path": folder / "checkpoints"})
        ranks = launch("lmm_r1.cli.train_sft", "--data.keep_order", *argv, count=count, folder=folder / "logs")
        return ranks, folder / "model"

    return started


def difference(ours: Path, theirs: Path) -> float:
    got, expected = load_file(ours), load_file(theirs)
    assert set(got) == set(expected)
    return max(float((got[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_save_what_one_saves(name, train, tiny_checkpoint, experts):
    alone, together = RUNS[name]
    one, expected = train(alone, 1)
    one.wait()
    two, saved = train(together, 2)
    two.wait()
    weights = "model.safetensors"
    original = (experts if "experts" in name else tiny_checkpoint(KIT)) / weights
    assert difference(expected / weights, original) > 1e-3
    # Gradients are added up in another order: some units in the last place of what one step adds, and of what follows.
    assert difference(saved / weights, expected / weights) < 1e-6
    if "ds.lora.rank" in together:
        adapter = Path(ADAPTER_FOLDER) / "adapter_model.safetensors"
        assert difference(saved / adapter, expected / adapter) < 1e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_without_a_finite_loss_ends_both_with_the_weights_before_it_saved(stage, train):
    # After the first step the weights are about 1e30, and the second's activations overflow.
    settings: dict[str, object] = {"ds.zero_stage": stage, "adam.lr": 1e30, "adam.eps": 1e-8}
    ranks, folder = train(settings, 2)
    assert [process.wait(timeout=120) for process in ranks.processes] == [1, 1]
    for rank in range(2):
        said = (ranks.folder / f"rank{rank}.log").read_text()
        assert "lmm-r1 train_sft: error: step 2: the model's loss is nan; the step was not made" in said
    checkpoints = folder.parent / "checkpoints"
    assert (checkpoints / "latest").read_text() == "global_step1"
    assert "stopped at step 1/2; step 1 is saved in" in (ranks.folder / "rank0.log").read_text()
