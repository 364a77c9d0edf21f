"""How the check of a merge tells rounding from an error, on a tiny language model."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.tiny_models import make_actor

from lmm_r1.checkpoints import merge_job
from lmm_r1.checkpoints.merge_job import (
    LIMIT,
    LoadedWeights,
    MergeDifference,
    check_written,
    difference,
    judge_merge,
    outputs_of,
    prompts_for,
)
from lmm_r1.checkpoints.merging import merge_adapter, write_checkpoint
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, get_kit
from lmm_r1.models.adapters import adapted_layers

KIT = get_kit("llm")


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("llm")


@pytest.fixture(scope="module")
def processor(base: Path) -> Any:
    return KIT.load_processor(str(base), trust_remote_code=False)


@pytest.fixture(scope="module")
def prompts(processor: Any) -> list[EncodedPrompt]:
    return prompts_for(KIT, processor)


def adapted(base: Path, *, std: float) -> LoadedWeights:
    torch.manual_seed(0)
    model = make_actor(base, lora_rank=4, lora_alpha=8).model
    for layer in adapted_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=std)
    return LoadedWeights(model=model)


def made_by_merging(base: Path, prompts: list[EncodedPrompt], *, std: float) -> MergeDifference:
    loaded = adapted(base, std=std)
    unmerged = outputs_of(loaded, KIT, prompts)
    merge_adapter(loaded.model)
    return difference(outputs_of(loaded, KIT, prompts), unmerged)


def test_the_difference_is_the_largest_of_all_prompts():
    one = [torch.tensor([[1.0, -4.0]]), torch.tensor([[2.0]])]
    other = [torch.tensor([[1.5, -4.0]]), torch.tensor([[1.0]])]
    assert difference(one, other) == MergeDifference(largest=1.0, scale=4.0)


def test_a_limit_is_a_share_of_values_above_one():
    assert MergeDifference(largest=3e-5, scale=4.0).within(1e-5)
    assert not MergeDifference(largest=5e-5, scale=4.0).within(1e-5)
    assert not MergeDifference(largest=2e-5, scale=0.1).within(1e-5)


@pytest.mark.parametrize("name", ["llm", "qwen2_5_vl"])
def test_the_prompts_hold_an_image_where_the_kit_takes_them(name, tiny_checkpoint):
    kit = get_kit(name)
    made = prompts_for(kit, kit.load_processor(str(tiny_checkpoint(name)), trust_remote_code=False))
    assert [prompt.media is not None for prompt in made] == ([False, True] if kit.takes_images else [False])


def test_small_adapters_need_no_explanation(base, prompts):
    found = made_by_merging(base, prompts, std=0.02)
    assert 0 < found.largest < 2 * LIMIT

    def load() -> LoadedWeights:
        raise AssertionError("nothing is to be repeated")

    said = judge_merge(MergeDifference(largest=LIMIT, scale=4.0), load=load, kit=KIT, prompts=prompts)
    assert said == "largest difference 1.0e-05 in fp32, of values up to 4.0"


def test_what_large_adapters_differ_by_is_found_to_be_rounding(base, prompts):
    found = made_by_merging(base, prompts, std=3.0)
    assert found.largest > LIMIT
    said = judge_merge(found, load=lambda: adapted(base, std=3.0), kit=KIT, prompts=prompts)
    assert "all of it rounding" in said
    exponent = int(said.removesuffix(" in fp64").rpartition("e-")[2])
    assert exponent >= 12


def test_a_wrong_merge_is_told_from_rounding(base, prompts, monkeypatch):
    def twice(model: torch.nn.Module) -> None:
        for layer in adapted_layers(model).values():
            layer.scaling["default"] *= 1 + 1e-5
        merge_adapter(model)

    monkeypatch.setattr(merge_job, "merge_adapter", twice)
    with pytest.raises(UserError, match=r"the merged model is not the adapted one: .* in fp64"):
        judge_merge(
            MergeDifference(largest=2e-5, scale=4.0), load=lambda: adapted(base, std=0.02), kit=KIT, prompts=prompts
        )


def test_without_the_memory_the_size_of_the_logits_decides(base, prompts, monkeypatch):
    monkeypatch.setattr(merge_job.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    settings = {"load": lambda: adapted(base, std=0.02), "kit": KIT, "prompts": prompts}
    assert "rounding by its size" in judge_merge(MergeDifference(largest=2e-5, scale=4.0), **settings)
    with pytest.raises(UserError, match="not the memory to tell .* --no_check"):
        judge_merge(MergeDifference(largest=5e-5, scale=4.0), **settings)


@pytest.fixture
def written(base: Path, processor: Any, tmp_path: Path) -> tuple[LoadedWeights, Path]:
    loaded = adapted(base, std=0.02)
    merge_adapter(loaded.model)
    folder = tmp_path / "merged"
    write_checkpoint(loaded.model, kit=KIT, processor=processor, output=folder, dtype=torch.bfloat16)
    return loaded, folder


def again(folder: Path) -> LoadedWeights:
    return LoadedWeights(model=make_actor(folder).model)


def test_a_folder_that_computes_what_was_written_passes(written, prompts):
    loaded, folder = written
    found = check_written(folder, loaded, again=again(folder), kit=KIT, prompts=prompts)
    assert difference(found, outputs_of(loaded, KIT, prompts)).largest <= 1e-6


def test_a_folder_with_other_weights_is_told(written, prompts):
    loaded, folder = written
    loaded.model.lm_head.weight.data[3, 4] += 1
    with pytest.raises(UserError, match=r"other weights than were written come back \(lm_head.weight\)"):
        check_written(folder, loaded, again=again(folder), kit=KIT, prompts=prompts)


def test_a_folder_with_another_config_is_told(written, prompts):
    loaded, folder = written
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(UserError, match="the same weights compute other outputs"):
        check_written(folder, loaded, again=again(folder), kit=KIT, prompts=prompts)
