"""Vision towers that attend within windows: one call per layer if a GPU's kernel can, else one per run of equal windows."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import clip, message, picture
from helpers.tiny_models import encode, make_actor
from helpers.varlen_kernels import Calls, of_torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lmm_r1.lmm_kits import KITS, LmmKit, Media, get_kit
from lmm_r1.models import image_features
from lmm_r1.models.actor import KitActor
from lmm_r1.models.image_features import WINDOW_ATTENTION
from lmm_r1.models.packed.layout import varlen_kernel

WINDOWED = [name for name in KITS if get_kit(name).windowed_tower is not None]
# Several windows each, the last ones cut; of a video, one for every step at least.
CHAT = [message("user", picture(168, 140), "or", picture(56, 112), "or", clip(4, 140, 84), "?")]
# Of four heads, with gradients of all weights; softmax and sums in another order round.
DOUBLE = 1e-12


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(image_features, "kernel_for", lambda *given, **settings: varlen_kernel())
    varlen_kernel.cache_clear()
    yield
    varlen_kernel.cache_clear()


def tower_run(model: PreTrainedModel, kit: LmmKit, media: Media) -> list[torch.Tensor]:
    """Return what the tower makes of images and videos, and the gradients of all its weights."""
    tower = model.get_submodule(kit.windowed_tower)
    tower.zero_grad()
    inputs = kit.in_one_tower_run(model.config, {"input_ids": media["input_ids"], **media})
    output = tower(inputs["pixel_values"].double(), grid_thw=inputs["image_grid_thw"])
    weights = torch.randn(output.pooler_output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (output.pooler_output * weights).sum().backward()
    return [output.pooler_output.detach(), *(weight.grad for weight in tower.parameters() if weight.grad is not None)]


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[KitActor, Media]]:
    def load(name: str) -> tuple[KitActor, Media]:
        kit, folder = get_kit(name), tiny_checkpoint(name)
        encoded = encode(kit, kit.load_processor(str(folder), trust_remote_code=False), CHAT)
        actor = make_actor(folder)
        actor.model.double()
        return actor, {"input_ids": torch.tensor([encoded.token_ids]), **encoded.media}

    return load


@pytest.mark.parametrize("name", WINDOWED)
def test_one_call_for_all_windows_of_a_layer_gives_what_one_for_each_window_does(loaded, monkeypatch, on_gpu, name):
    actor, media = loaded(name)
    model, kit = actor.model, actor.kit
    tower = model.get_submodule(kit.windowed_tower)
    assert tower.config._attn_implementation == WINDOW_ATTENTION
    calls: Calls = []
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch(calls))
    mine = tower_run(model, kit, media)
    assert len(calls) == len(tower.blocks)
    assert all(call["window_size"] == (-1, -1) for call in calls)

    # As transformers has it.
    tower.config._attn_implementation = "sdpa"
    theirs = tower_run(model, kit, media)
    assert len(calls) == len(tower.blocks)
    assert len(mine) == len(theirs) > 1
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=DOUBLE, rtol=DOUBLE)


def test_a_run_of_windows_of_one_length_is_one_call(monkeypatch):
    """Of 2, 2, 3, 2 and 2 patches: two windows, one, and two."""
    batches: list[tuple[int, ...]] = []

    def attend(
        module: torch.nn.Module, query: torch.Tensor, *given: Any, **settings: Any
    ) -> tuple[torch.Tensor, None]:
        batches.append(tuple(query.shape))
        return sdpa_attention_forward(module, query, *given, **settings)

    monkeypatch.setattr(image_features, "sdpa_attention_forward", attend)
    query, key, value = torch.randn(3, 1, 4, 11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 2, 4, 7, 9, 11])
    module = torch.nn.Module()
    found, _ = image_features._attention(
        module, query, key, value, None, scaling=0.3, is_causal=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends
    )
    assert batches == [(2, 4, 2, 5), (1, 4, 3, 5), (2, 4, 2, 5)]
    expected = torch.zeros(1, 11, 4, 5, dtype=torch.float64)
    for start, end in pairwise(ends.tolist()):
        scores = 0.3 * query[0, :, start:end] @ key[0, :, start:end].transpose(1, 2)
        expected[0, start:end] = (scores.softmax(-1) @ value[0, :, start:end]).transpose(0, 1)
    torch.testing.assert_close(found, expected, atol=DOUBLE, rtol=DOUBLE)
