"""What vLLM computes on a kit's checkpoint is what the training forward computes, before and after weight updates."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import disturb, largest_difference, load_weights, loaded_one_by_one, running_engine, sampled
from helpers.tables import by_turns, kits_with
from helpers.tiny_models import CORPUS, LONGROPE, MIXTURES, build_experts, encode, make_actor, with_longrope
from safetensors.torch import load_file

from lmm_r1.generation.weight_sync import as_stored, stored_weights
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, TinyModelSpec, get_kit
from lmm_r1.models.actor import KitActor

LONG = "What is 12 + 34? Which digit does the picture show? " * 12
TOLERANCE = 1e-4
SAMPLED_TOKENS = 10_000


def prompts_of(kit: LmmKit, processor: object, *, with_images: bool) -> list[EncodedPrompt]:
    """Short and long prompts: the engine caches prefixes in blocks of 128 tokens. One spells special tokens, which are text."""
    added = kit.tokenizer_of(processor).added_tokens_decoder.values()
    spelled = " ".join(["<|image_1|>", *(token.content for token in added if token.special)])
    conversations = [
        [message("user", "What is 12 + 34?")],
        [message("system", "Think first."), message("user", LONG)],
        [message("user", "Hello."), message("assistant", spelled), message("user", spelled)],
    ]
    if with_images:
        small, wide, tall = picture(56, 56), picture(140, 84), picture(84, 112)
        conversations = [
            [message("user", wide, "Which digit is this?")],
            [message("user", small, LONG)],
            [message("user", small, wide, "Add them to", tall, "please.")],
            [message("user", spelled, wide, f"{spelled}?")],
        ]
    return [encode(kit, processor, messages) for messages in conversations]


def make_checkpoint(kit: LmmKit, folder: Path, *, tied: bool) -> Path:
    folder.mkdir()
    kit.build_tiny(TinyModelSpec(hidden_size=64, layers=2, seed=1, tie_embeddings=tied), CORPUS, folder)
    return folder


@pytest.mark.parametrize(("name", "tied"), by_turns(kits_with("RL"), [(False,), (True,)], turns=2))
def test_the_engine_samples_what_it_may_with_the_log_probs_of_the_training_forward_at_load_and_after_updates(
    name, tied, tmp_path
):
    kit = get_kit(name)
    original = make_checkpoint(kit, tmp_path / "original", tied=tied)
    actor = make_actor(original, ban_media_tokens=True)
    processor = kit.load_processor(str(original), trust_remote_code=False)
    disturb(actor, seed=0)
    # The engine starts from what a run saves, not from what the tiny model's builder wrote.
    saved = tmp_path / "saved"
    actor.model.save_pretrained(saved)
    processor.save_pretrained(saved)
    banned = actor.banned_token_ids.tolist()

    texts = prompts_of(kit, processor, with_images=False)
    images = prompts_of(kit, processor, with_images=True) if kit.takes_images else []
    differences = []
    with running_engine(kit, saved, max_images=3 if kit.takes_images else 0) as llm:
        if not tied:
            check_no_banned_token(llm, kit, (images or texts)[:1], banned=banned)
        for update in range(3):
            if update:
                disturb(actor, seed=update)
                load_weights(llm, actor, tmp_path / f"update {update}")
            for prompts in (texts, images):
                samples = sampled(llm, kit, prompts, banned=banned, n=2, max_tokens=12)
                differences.append(largest_difference(actor, prompts, samples))
        check_single_weights(llm, actor, tmp_path / "update 2")
    of_texts, of_images = differences[::2], differences[1::2]
    assert max(of_texts) <= TOLERANCE, of_texts
    if not kit.engine_disagrees(actor.model.config):
        assert max(of_images) <= TOLERANCE, of_images
    else:
        assert max(of_images) > TOLERANCE, "the engine agrees: the kit need not say that it does not"


@pytest.mark.parametrize("long_run", [False, True], ids=["short run", "long run"])
@pytest.mark.parametrize("name", LONGROPE)
def test_with_longrope_both_sides_take_the_factors_of_the_longest_sample_allowed(
    name, long_run, tiny_checkpoint, tmp_path
):
    kit, limit, max_len = get_kit(name), 64, 400 if long_run else 64
    folder = with_longrope(tiny_checkpoint(name), limit, copy=tmp_path / "model")
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    questions = ["What is 12 + 34?", "Which digit does the picture show? " * 6] if long_run else ["What is 12 + 34?"]
    prompts = [encode(kit, processor, [message("user", question)]) for question in questions]
    lengths = [len(prompt.token_ids) for prompt in prompts]
    assert lengths[0] + 12 < limit < max([*lengths[1:], limit + 1]), "on either side of the limit"
    with running_engine(kit, folder, max_images=0, max_model_len=max_len) as llm:
        samples = sampled(llm, kit, prompts, banned=(), n=2, max_tokens=12)
    assert largest_difference(make_actor(folder, max_len=max_len), prompts, samples) <= TOLERANCE
    other = make_actor(folder, max_len=limit if long_run else 400)
    assert largest_difference(other, prompts[:1], samples[:1]) > 1e-2, "the factors make no difference"


@pytest.mark.parametrize("name", ["Mixtral", pytest.param("Qwen3Moe", marks=pytest.mark.full)])
def test_a_mixture_of_experts_follows_weight_updates(name, tiny_checkpoint, tmp_path):
    kit, folder = get_kit("llm"), tmp_path / "experts"
    processor = kit.load_processor(str(tiny_checkpoint("llm")), trust_remote_code=False)
    build_experts(tiny_checkpoint("llm"), folder, architecture=name, **MIXTURES[name])
    actor = make_actor(folder)
    prompts = prompts_of(kit, processor, with_images=False)
    with running_engine(kit, folder, max_images=0) as llm:
        for update in range(3):
            if update:
                disturb(actor, seed=update)
                load_weights(llm, actor, tmp_path / f"update {update}")
            samples = sampled(llm, kit, prompts, banned=(), n=2, max_tokens=12)
            assert largest_difference(actor, prompts, samples) <= TOLERANCE
        check_single_weights(llm, actor, tmp_path / "update 2")
        if name == "Mixtral":
            with pytest.raises((KeyError, ValueError)):
                # Why they are not sent by the names that they have in the trainer.
                loaded_one_by_one(llm, dict(actor.model.named_parameters()))


def check_no_banned_token(llm: Any, kit: LmmKit, prompts: list[EncodedPrompt], *, banned: list[int]) -> None:
    """Check that an untrained policy samples no banned token, though a model of so few tokens would sample each of them."""
    (samples,) = sampled(llm, kit, prompts, banned=banned, n=50, max_tokens=SAMPLED_TOKENS // 50)
    tokens = [token for token_ids, _ in samples for token in token_ids]
    assert len(tokens) == SAMPLED_TOKENS
    assert set(banned).isdisjoint(tokens)
    assert len(set(tokens)) > 100


def check_single_weights(llm: Any, actor: KitActor, folder: Path) -> None:
    """Check that weights sent one by one, as on GPUs, come out as those of a whole checkpoint."""
    weights, stored = dict(actor.model.named_parameters()), actor.model.state_dict()
    # What is not trained is not sent: an engine has it from its checkpoint.
    sent = {name: buffer for name, buffer in actor.model.named_buffers() if name in stored}
    for group in stored_weights(actor.model, weights):
        sent |= as_stored(actor.model, {name: weights[name].detach() for name in group.names})
    single = loaded_one_by_one(llm, sent)
    whole = loaded_one_by_one(llm, load_file(folder / "model.safetensors"))
    assert single.keys() == whole.keys()
    for name, weight in whole.items():
        # Of a fused weight, the keys of a layer that shares those of another are in no checkpoint.
        same = torch.allclose(single[name], weight, rtol=0, atol=0, equal_nan=True)
        assert same or torch.isnan(weight).all(), name
    assert any(not torch.isnan(weight).any() for weight in whole.values())
