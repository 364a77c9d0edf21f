"""Critics and reward models of every kit: packed as one by one, without an output layer, saved and loaded again."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import disturb
from helpers.packed_batches import Batch, groups
from helpers.tables import SOME, by_turns, kits_with
from helpers.tiny_models import encode, make_actor
from helpers.value_models import HEAD, make_value_model, one_by_one, rewards_of, values_of
from safetensors.torch import load_file

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, TinyModelSpec, get_kit
from lmm_r1.models.actor import KitValueModel
from lmm_r1.models.adapters import adapted_layers
from lmm_r1.models.packed.packing import ModelSample

IMAGE_KITS = kits_with("images")
WAYS = ("padded", "packed", "shared")
SIDES = ("left", "right")
VALUES, GRADIENTS = 1e-5, 1e-5
# Of a gradient that is zero but for rounding, relative to all gradients.
ZERO = 1e-7
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": {"freeze_visual_encoder": True},
    "lora": {"lora_rank": 4, "lora_alpha": 8},
}
# The passes are those of `test_kit_packing`, which takes every kit.
CASES = [(name, variant) for name in sorted(SOME) for variant in VARIANTS if variant != "frozen" or name in IMAGE_KITS]
TEXT = [message("user", "What is 12 + 34?")]
OTHER_TEXT = [message("system", "Think first."), message("user", "And 46 + 1?")]
ONE_IMAGE = [message("user", picture(84, 56), "Which digit is this?")]
TWO_IMAGES = [message("user", picture(56, 56), "or", picture(112, 56), "?")]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same weights on padded batches and on packed sequences."""

    padded: KitValueModel
    packing: KitValueModel

    def running(self, way: str, *, train: bool = False) -> KitValueModel:
        model = self.padded if way == "padded" else self.packing
        model.share_prefix = way == "shared"
        model.zero_grad()
        return model.train(train)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What transformers reports."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return caplog


@pytest.fixture(scope="module")
def pair_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[..., Pair]:
    @cache
    def loaded(name: str, variant: str = "full") -> Pair:
        padded = make_value_model(tiny_checkpoint(name), **VARIANTS[variant])
        packing = make_value_model(tiny_checkpoint(name), packing_samples=True, share_prefix=True, **VARIANTS[variant])
        for model in (padded, packing):
            disturb(model, seed=1)
            # As large as a trained one's, so that differences show.
            torch.nn.init.normal_(model.head.weight, std=0.2, generator=torch.Generator().manual_seed(2))
        assert (padded.packing_samples, packing.packing_samples) == (False, True)
        return Pair(padded=padded, packing=packing)

    return loaded


@pytest.fixture(scope="module")
def batch_of(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Batch]:
    """A function from a kit's name to groups of texts and images, whose samples are not in order."""

    @cache
    def batch(name: str) -> Batch:
        kit = get_kit(name)
        processor = kit.load_processor(str(tiny_checkpoint(name)), trust_remote_code=False)
        chats = [TEXT, ONE_IMAGE, TWO_IMAGES] if kit.takes_images else [TEXT, OTHER_TEXT, TEXT]
        samples = groups([encode(kit, processor, chat) for chat in chats], [(5, 1, 9), (4, 7), (6,)], gap=True)
        # A sample of which the loss takes nothing, and one without a response.
        samples.append(replace(samples[0], loss_mask=(False,) * 5))
        samples.append(replace(samples[3], response=(), loss_mask=()))
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(3)).tolist()
        return Batch(tuple(samples[index] for index in order))

    return batch


def gradients(model: KitValueModel, batch: Batch, calls: list[Batch]) -> dict[str, torch.Tensor]:
    """Return the gradients of a weighted sum of all values, which are computed in these calls."""
    model.zero_grad()
    values = [value for call in calls for value in values_of(model, call)]
    terms = [(value * weights.to(value)).sum() for value, weights in zip(values, batch.weights, strict=True)]
    torch.stack(terms).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(SOME))
def test_values_are_those_of_the_samples_one_by_one(pair_of, batch_of, name, way):
    pair, batch = pair_of(name), batch_of(name)
    with torch.no_grad():
        expected = [values_of(pair.running("padded"), one)[0] for one in one_by_one(batch)]
        values = values_of(pair.running(way), batch)
    for value, wanted, sample in zip(values, expected, batch.samples, strict=True):
        assert len(value) == sum(sample.loss_mask)
        torch.testing.assert_close(value, wanted, atol=VALUES, rtol=0)
    assert torch.cat(expected).std() > 0.1


@pytest.mark.parametrize(("name", "way"), by_turns(KITS, [(way,) for way in WAYS], turns=len(WAYS)))
def test_a_reward_is_the_value_of_the_last_token_of_the_sample_alone(pair_of, batch_of, name, way):
    pair, batch = pair_of(name), batch_of(name)
    model = pair.running("padded")
    expected = []
    with torch.no_grad():
        for sample in batch.samples:
            one = ModelSample.whole(sample.token_ids, sample.media)
            hidden = model([one], return_output=True)[1].last_hidden_state  # (1, T, H)
            expected.append((hidden[0, -1] @ model.head.weight[0]).item())
        rewards = rewards_of(pair.running(way), batch)
    torch.testing.assert_close(rewards, torch.tensor(expected), atol=VALUES, rtol=0)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_gradients_are_those_of_the_samples_one_by_one(pair_of, batch_of, name, variant):
    pair, batch = pair_of(name, variant), batch_of(name)
    expected = gradients(pair.running("padded"), batch, list(one_by_one(batch)))
    assert "head.weight" in expected
    assert any("lora" in key for key in expected) == (variant == "lora")
    towers = tuple(f"model.{prefix}" for prefix in get_kit(name).vision_prefixes)
    assert any(key.startswith(towers) for key in expected if towers) == (variant == "full" and name in IMAGE_KITS)
    largest = max(float(value.norm()) for value in expected.values())
    for way in ("packed", "shared"):
        found = gradients(pair.running(way), batch, [batch])
        assert found.keys() == expected.keys()
        for key, value in found.items():
            allowed = max(GRADIENTS * float(expected[key].norm()), ZERO * largest)
            assert float((value - expected[key]).norm()) <= allowed, key


@pytest.mark.parametrize("name", KITS)
def test_the_output_layer_is_gone_and_all_other_weights_are_those_of_the_policy(tiny_checkpoint, name):
    actor, critic = make_actor(tiny_checkpoint(name)), make_value_model(tiny_checkpoint(name))
    output_layer = actor.model.get_output_embeddings()
    theirs = {key: value for key, value in actor.model.named_parameters() if value is not output_layer.weight}
    ours = dict(critic.named_parameters())
    assert ours.pop("head.weight").shape == (1, critic.model_config.get_text_config().hidden_size)
    assert {key.removeprefix("model.") for key in ours} == theirs.keys()
    assert all(torch.equal(ours[f"model.{key}"], value) for key, value in theirs.items())
    assert critic.model.get_output_embeddings() is None


@pytest.mark.parametrize(("name", "variant"), by_turns(kits_with("critic"), [("full",), ("lora",)], turns=2))
def test_a_saved_critic_loads_again_as_critic_and_as_reward_model(
    pair_of, batch_of, tiny_checkpoint, name, variant, tmp_path, reports
):
    kit, batch, critic = get_kit(name), batch_of(name), pair_of(name, variant).running("shared")
    processor = kit.load_processor(str(tiny_checkpoint(name)), trust_remote_code=False)
    critic.save(tmp_path, processor=processor, weights=critic.state_dict())
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path, tiny_checkpoint(name)))
    (output_layer,) = original.keys() - saved.keys()
    assert saved.keys() - original.keys() == {f"{HEAD}.weight"}
    assert "lm_head" in output_layer
    assert json.loads((tmp_path / "config.json").read_text())["value_head_prefix"] == HEAD
    assert kit.tokenizer_of(kit.load_processor(str(tmp_path), trust_remote_code=False)).chat_template

    with pytest.raises(UserError, match="this is a critic or reward model, which has no output layer"):
        make_actor(tmp_path)
    # The config's name of the head counts, whatever the flag says.
    reports.clear()
    again = make_value_model(tmp_path, share_prefix=True, value_head_prefix="other")
    reward = make_value_model(tmp_path, "reward", share_prefix=True)
    assert "LOAD REPORT" not in reports.text
    assert not adapted_layers(again.model)
    with torch.no_grad():
        values, expected = (values_of(model, batch) for model in (again, critic))
        for value, wanted in zip(values, expected, strict=True):
            torch.testing.assert_close(value, wanted, atol=VALUES, rtol=0)
        rewards = [rewards_of(model, batch) for model in (reward, critic)]
        torch.testing.assert_close(*rewards, atol=VALUES, rtol=0)


@pytest.mark.parametrize("name", ["llm", "qwen2_5_vl"])
def test_embeddings_that_the_output_layer_shared_stay_and_are_saved(name, tmp_path):
    kit = get_kit(name)
    spec = TinyModelSpec(hidden_size=64, layers=2, seed=0, tie_embeddings=True)
    (tmp_path / "tied").mkdir()
    kit.build_tiny(spec, ("12 + 34 = 46", "Which digit is this?"), tmp_path / "tied")
    critic = make_value_model(tmp_path / "tied")
    embeddings = critic.model.get_input_embeddings().weight
    actor = make_actor(tmp_path / "tied")
    assert actor.model.get_output_embeddings().weight is actor.model.get_input_embeddings().weight
    assert torch.equal(embeddings, actor.model.get_input_embeddings().weight)
    processor = kit.load_processor(str(tmp_path / "tied"), trust_remote_code=False)
    critic.save(tmp_path / "saved", processor=processor, weights=critic.state_dict())
    again = make_value_model(tmp_path / "saved", "reward")
    assert torch.equal(again.model.get_input_embeddings().weight, embeddings)
    assert torch.equal(again.head.weight, critic.head.weight)


def test_a_head_that_is_not_there_is_drawn_for_a_critic_and_missed_for_a_reward_model(tiny_checkpoint):
    folder = tiny_checkpoint("llm")
    torch.manual_seed(0)
    weights = torch.cat([make_value_model(folder).head.weight.flatten() for _ in range(2)])
    assert torch.equal(*weights.chunk(2)), "the same seed draws the same head"
    assert 0.5 / 65 < weights.std() < 2 / 65  # 64 hidden units: a standard deviation of 1 / 65
    with pytest.raises(UserError, match=rf"{folder}: this checkpoint has no value head \(no weight score.weight\)"):
        make_value_model(folder, "reward")


def test_rewards_are_normalized_in_evaluation_alone_and_a_critics_values_always(tiny_checkpoint, batch_of, tmp_path):
    critic, batch = make_value_model(tiny_checkpoint("llm")), batch_of("llm")
    processor = critic.kit.load_processor(str(tiny_checkpoint("llm")), trust_remote_code=False)
    critic.save(tmp_path, processor=processor, weights=critic.state_dict())
    config = json.loads((tmp_path / "config.json").read_text()) | {"mean": 0.25, "std": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = make_value_model(tmp_path, "reward")
    model = make_value_model(tmp_path, "reward", normalize_reward=True)
    with torch.no_grad():
        expected, values = rewards_of(plain, batch), values_of(plain, batch)
        torch.testing.assert_close(rewards_of(model, batch), (expected - 0.25) / 0.5)
        torch.testing.assert_close(rewards_of(model.train(), batch), expected)
        for found, value in zip(values_of(model, batch), values, strict=True):
            torch.testing.assert_close(found, (value - 0.25) / 0.5)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_values_are_in_single_precision_whatever_the_weights_are(tiny_checkpoint, batch_of, dtype):
    model, batch = make_value_model(tiny_checkpoint("llm"), param_dtype=dtype), batch_of("llm")
    assert model.head.weight.dtype is {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    assert {value.dtype for value in values_of(model, batch)} == {torch.float32}
