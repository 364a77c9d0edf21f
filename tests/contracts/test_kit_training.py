"""What training leaves alone, for every kit, and what adapters are merged to; its trainers have `test_kit_trainers`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.double_precision import DoublePrecision, in_double
from helpers.passes import logits_of, next_log_probs
from helpers.tables import by_turns, kits_with
from helpers.tiny_models import encode, make_actor, pad

from lmm_r1.lmm_kits import KITS, Media, get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapted_layers, merged_state_dict
from lmm_r1.models.loading import language_layer_list

IMAGE_KITS = kits_with("images")
TEXT = [message("user", "What is 12 + 34?")]
IMAGE = [message("user", picture(84, 56), "Which digit is this?")]
RESPONSES = ([11, 5, 7, 30, 9], [8, 40, 6])
LORA = {"lora_rank": 4, "lora_alpha": 8}
# Settings and whether checkpointing is reentrant.
CHECKPOINTED = [
    ({}, False),
    ({"checkpointed_layers": 1}, False),
    (LORA, False),
    (LORA | {"checkpointed_layers": 1}, True),
]
SCALING = 8 / 4


@dataclass(frozen=True, kw_only=True)
class Batch:
    sequences: torch.Tensor  # (B, T)
    attention_mask: torch.Tensor  # (B, T)
    loss_mask: torch.Tensor
    """Whether the token after each position is part of a response, (B, T - 1)."""
    media: list[Media | None]


@pytest.fixture(scope="module")
def batch_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[..., Batch]:
    """A function from a kit's name to two padded rows: a text and an image, or two texts."""

    def batch(name: str, *, with_image: bool) -> Batch:
        kit = get_kit(name)
        processor = kit.load_processor(str(tiny_checkpoint(name)), trust_remote_code=False)
        prompts = [encode(kit, processor, messages) for messages in (TEXT, IMAGE if with_image else TEXT)]
        rows = [[*prompt.token_ids, *response] for prompt, response in zip(prompts, RESPONSES, strict=True)]
        sequences, mask = pad(rows, side="right")
        loss_mask = torch.zeros_like(mask)
        for index, (row, response) in enumerate(zip(rows, RESPONSES, strict=True)):
            loss_mask[index, len(row) - len(response) : len(row)] = 1
        media = [prompt.media for prompt in prompts]
        return Batch(sequences=sequences, attention_mask=mask, loss_mask=loss_mask[:, 1:], media=media)

    return batch


def loss_of(actor: KitActor, batch: Batch) -> torch.Tensor:
    log_probs = next_log_probs(actor, batch.sequences, attention_mask=batch.attention_mask, media=batch.media)
    return -(log_probs * batch.loss_mask).sum() / batch.loss_mask.sum()


def train(actor: KitActor, batch: Batch, *, steps: int) -> set[str]:
    """Make AdamW steps and return the names of the parameters that they changed."""
    before = {name: weight.detach().clone() for name, weight in actor.model.named_parameters()}
    optimizer = torch.optim.AdamW(trained_by(actor), lr=1e-3, weight_decay=0.0)
    actor.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(actor, batch).backward()
        optimizer.step()
    actor.eval()
    return {name for name, weight in actor.model.named_parameters() if not torch.equal(weight, before[name])}


def trained_by(actor: KitActor) -> list[torch.nn.Parameter]:
    return [weight for weight in actor.model.parameters() if weight.requires_grad]


def differ(one: KitActor, other: KitActor, batch: Batch) -> torch.Tensor:
    """Return the largest difference of two models' logits at each token (B, T), 0 where there is padding."""
    dtype = one.model.dtype
    media = [
        item and {key: value.to(dtype) if value.is_floating_point() else value for key, value in item.items()}
        for item in batch.media
    ]
    with torch.no_grad():
        first, second = (
            logits_of(actor, batch.sequences, attention_mask=batch.attention_mask, media=media)
            for actor in (one, other)
        )
    return (first - second).abs().amax(dim=-1) * batch.attention_mask


def gradients(actor: KitActor, batch: Batch) -> dict[str, torch.Tensor | None]:
    actor.zero_grad()
    torch.manual_seed(0)
    loss_of(actor, batch).backward()
    return {name: weight.grad for name, weight in actor.model.named_parameters() if weight.requires_grad}


def names_of(actor: KitActor, *, without: tuple[str, ...] = ()) -> set[str]:
    return {name for name, _ in actor.model.named_parameters() if not name.startswith(without)}


def trainable(actor: KitActor) -> set[str]:
    """Parameters that a loss reaches; a kit may freeze others as it loads a model, where a config says which."""
    trained = {name for name, weight in actor.model.named_parameters() if weight.requires_grad}
    return trained & names_of(actor, without=actor.kit.untrained_prefixes)


def towers(name: str) -> tuple[str, ...]:
    kit = get_kit(name)
    return (*kit.vision_prefixes, *kit.projector_prefixes)


@pytest.mark.parametrize("name", KITS)
def test_every_parameter_is_under_one_kind_of_prefix(tiny_checkpoint, name):
    kit = get_kit(name)
    kinds = (kit.vision_prefixes, kit.projector_prefixes, kit.language_prefixes)
    for key in names_of(make_actor(tiny_checkpoint(name)), without=kit.untrained_prefixes):
        assert sum(key.startswith(prefixes) for prefixes in kinds) == 1, key


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_a_text_batch_leaves_the_vision_tower_alone(tiny_checkpoint, batch_of, name):
    actor = make_actor(tiny_checkpoint(name))
    changed = train(actor, batch_of(name, with_image=False), steps=1)
    assert changed
    assert not {key for key in changed if key.startswith(towers(name))}


@pytest.mark.parametrize("name", IMAGE_KITS)
def test_a_frozen_vision_tower_stays_as_it_was_and_the_language_model_learns(tiny_checkpoint, batch_of, name):
    actor = make_actor(tiny_checkpoint(name), freeze_visual_encoder=True)
    changed = train(actor, batch_of(name, with_image=True), steps=2)
    assert changed == trainable(actor)
    assert changed == names_of(actor, without=(*towers(name), *get_kit(name).untrained_prefixes))


@pytest.mark.parametrize("name", KITS)
def test_a_merged_checkpoint_computes_what_the_adapted_model_does(tiny_checkpoint, batch_of, name, tmp_path):
    torch.manual_seed(0)
    kit, folder, batch = get_kit(name), tiny_checkpoint(name), batch_of(name, with_image=name in IMAGE_KITS)
    original = make_actor(folder).model.state_dict()
    actor = make_actor(folder, **LORA)
    train(actor, batch, steps=2)
    trained = {key: value.clone() for key, value in actor.model.state_dict().items()}
    merged = merged_state_dict(actor.model)
    assert list(merged) == list(original)
    for key, weight in merged.items():
        place = key.removesuffix(".weight")
        expected = original[key]
        if key.endswith(".weight") and f"{place}.lora_A.default.weight" in trained:
            a, b = (trained[f"{place}.lora_{factor}.default.weight"] for factor in "AB")
            expected = expected + SCALING * b @ a
            assert not torch.equal(weight, original[key]), key
        torch.testing.assert_close(weight, expected, atol=1e-6, rtol=0)
    assert all(torch.equal(value, trained[key]) for key, value in actor.model.state_dict().items())

    actor.model.save_pretrained(tmp_path, state_dict=merged)
    kit.load_processor(str(folder), trust_remote_code=False).save_pretrained(tmp_path)
    again = make_actor(tmp_path)
    # Of the responses, which a run uses: in fp32 two ways of adding up the same come to some 5e-6 with logits of 4, and
    # the more of them are looked at, the larger is the largest.
    assert differ(actor, again, batch)[:, :-1][batch.loss_mask.bool()].max() <= 1e-5

    # In fp64 nothing is left but what rounding the merged weights to fp32 does, and nothing at all without it.
    in_double(actor.model)
    in_double(again.model)
    exact = merged_state_dict(actor.model)
    with DoublePrecision():
        assert differ(actor, again, batch).max() <= 2e-6
    again.model.load_state_dict(exact)
    with DoublePrecision():
        assert differ(actor, again, batch).max() <= 1e-12


@pytest.mark.parametrize(("name", "settings", "reentrant"), by_turns(KITS, CHECKPOINTED, turns=len(CHECKPOINTED)))
def test_gradient_checkpointing_changes_no_log_prob_and_no_gradient(
    tiny_checkpoint, batch_of, name, settings, reentrant
):
    batch = batch_of(name, with_image=name in IMAGE_KITS)
    torch.manual_seed(0)
    actor = make_actor(tiny_checkpoint(name), **settings).train()
    for layer in adapted_layers(actor.model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    expected = {key: None if value is None else value.clone() for key, value in gradients(actor, batch).items()}
    assert any(value is not None for value in expected.values())
    loss = loss_of(actor, batch).detach()

    actor.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layers = [layer.gradient_checkpointing for layer in language_layer_list(actor.model, get_kit(name))]
    # Of the first layers so many, where not all of them.
    assert sum(layers) == settings.get("checkpointed_layers", len(layers))
    assert layers[0]
    torch.testing.assert_close(loss_of(actor, batch).detach(), loss, atol=1e-6, rtol=0)
    through_vision = []
    for key, module in actor.model.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{key}.weight".startswith(get_kit(name).vision_prefixes):
            module.register_forward_hook(lambda module, inputs, output: through_vision.append(output.requires_grad))
    for key, value in gradients(actor, batch).items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=0)
    assert bool(through_vision) == (name in IMAGE_KITS)
    if "lora_rank" in settings:
        assert not any(through_vision), "the frozen tower's gradients were computed for nothing"
