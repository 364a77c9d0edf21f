"""How the check of a merge tells rounding from an error, on a tiny language model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import make_actor

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


def test_what_large_adapters_differ_by_is_found_to_be_rounding(base, prompts):
    found = made_by_merging(base, prompts, std=3.0)
    assert found.largest > LIMIT
    assert judge_merge(found) == f"largest difference {found.largest:.1e} in fp32, of values up to {found.scale:.1f}"


def test_a_wrong_merge_is_told_from_rounding(base, prompts):
    loaded = adapted(base, std=0.2)
    unmerged = outputs_of(loaded, KIT, prompts)
    for layer in adapted_layers(loaded.model).values():
        layer.scaling["default"] *= 2
    merge_adapter(loaded.model)
    with pytest.raises(UserError, match="the merged model is not the adapted one: largest difference"):
        judge_merge(difference(outputs_of(loaded, KIT, prompts), unmerged))


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
