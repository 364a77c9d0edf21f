"""What the supervised command saves from two processes, one with texts and one with images, and from one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.commands import ANSWERED, flags, with_image, write_rows
from helpers.commands_here import Ended, run_in_ranks
from helpers.conversations import picture
from helpers.tables import table
from helpers.tiny_models import build_experts
from safetensors.torch import load_file

from lmm_r1.models.adapters import ADAPTER_FOLDER

KIT = "qwen2_5_vl"
STEPS = 2
SETTINGS: dict[str, object] = table("integration/two_processes_save", "settings")
EXPERTS: dict[str, object] = {"model.aux_loss_coef": 100.0}
LORA: dict[str, object] = {"ds.lora.rank": 4}
STAGE_2: dict[str, object] = {"ds.zero_stage": 2}
STAGE_3: dict[str, object] = {"ds.zero_stage": 3}
# After the first step the weights are about 1e30, and the second's activations overflow.
INFINITE: dict[str, object] = {"adam.lr": 1e30, "adam.eps": 1e-8}
# By the number of processes. An adapter begins with random numbers, which are others where weights are sharded as they are
# loaded.
RUNS: dict[str, dict[int, dict[str, object]]] = {
    "ZeRO-2": {1: STAGE_2, 2: STAGE_2},
    "ZeRO-3": {1: STAGE_2, 2: STAGE_3},
    "LoRA, ZeRO-3": {1: STAGE_3 | LORA, 2: STAGE_3 | LORA},
    # So large that most of what is learnt is to balance the experts.
    "experts, ZeRO-3": {1: STAGE_2 | EXPERTS, 2: STAGE_3 | EXPERTS},
    "not finite, ZeRO-2": {2: STAGE_2 | INFINITE},
    "not finite, ZeRO-3": {2: STAGE_3 | INFINITE},
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run has left."""

    folder: Path
    ended: Sequence[Ended]
    """How it ended on each rank."""

    @property
    def model(self) -> Path:
        return self.folder / "model"


@pytest.fixture(scope="module")
def experts(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    build_experts(tiny_checkpoint("llm"), folder)
    return folder


@pytest.fixture(scope="module")
def trained(
    tiny_checkpoint: Callable[[str], Path], experts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trained]:
    """A function from a run's name to what it left; all runs of so many processes take place in the same ones."""
    data = tmp_path_factory.mktemp("rows")
    picture(84, 56).save(data / "picture.png")
    rows = write_rows(data, *[ANSWERED, with_image("picture.png", base=ANSWERED)] * (2 * STEPS))
    texts = tmp_path_factory.mktemp("texts")
    longer = {**ANSWERED, "messages": [{"role": "user", "content": "What is 12 + 34?"}, ANSWERED["messages"][-1]]}
    inputs = {
        False: (tiny_checkpoint(KIT), rows),
        True: (experts, write_rows(texts, *[ANSWERED, longer] * (2 * STEPS))),
    }
    found: dict[str, Trained] = {}
    for count in (1, 2):
        folder = tmp_path_factory.mktemp("runs") / f"of_{count}"
        settings = {name: runs[count] for name, runs in RUNS.items() if count in runs}
        places = {name: folder / f"run{number}" for number, name in enumerate(settings)}
        commands = []
        for name, own in settings.items():
            model, dataset = inputs["model.aux_loss_coef" in own]
            values = SETTINGS | own | {"model.model_name_or_path": model, "data.dataset": dataset}
            values |= {"ckpt.output_dir": places[name] / "model", "ckpt.path": places[name] / "checkpoints"}
            commands.append([*flags(values), "--data.keep_order"])
        for name, ended in zip(settings, run_in_ranks(commands, count=count, folder=folder), strict=True):
            found[f"{name}, {count}"] = Trained(folder=places[name], ended=ended)
    return found.__getitem__


def difference(ours: Path, theirs: Path) -> float:
    got, expected = load_file(ours), load_file(theirs)
    assert set(got) == set(expected)
    return max(float((got[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("name", [name for name, runs in RUNS.items() if 1 in runs])
def test_two_processes_save_what_one_saves(name, trained, tiny_checkpoint, experts):
    one, two = trained(f"{name}, 1"), trained(f"{name}, 2")
    assert [rank.code for rank in (*one.ended, *two.ended)] == [0, 0, 0]
    weights = "model.safetensors"
    original = (experts if "experts" in name else tiny_checkpoint(KIT)) / weights
    assert difference(one.model / weights, original) > 1e-3
    # Gradients are added up in another order: some units in the last place of what one step adds, and of what follows.
    assert difference(two.model / weights, one.model / weights) < 1e-6
    if "ds.lora.rank" in RUNS[name][2]:
        adapter = Path(ADAPTER_FOLDER) / "adapter_model.safetensors"
        assert difference(two.model / adapter, one.model / adapter) < 1e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_without_a_finite_loss_ends_both_with_the_weights_before_it_saved(stage, trained):
    run = trained(f"not finite, ZeRO-{stage}, 2")
    assert [rank.code for rank in run.ended] == [1, 1]
    for rank in run.ended:
        assert "lmm-r1 train_sft: error: step 2: the model's loss is nan; the step was not made" in rank.stderr
    assert (run.folder / "checkpoints/latest").read_text() == "global_step1"
    assert "stopped at step 1/2; step 1 is saved in" in run.ended[0].stderr
