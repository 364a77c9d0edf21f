"""Judged responses, for every kit: what is encoded by another one's media has the ids that it has by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.conversations import clip, message, picture
from helpers.tables import SOME
from helpers.tiny_models import make_actor
from helpers.value_models import make_value_model

from lmm_r1.data.messages import Message, PreferenceRow
from lmm_r1.lmm_kits import KITS, get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.supervised.pairs import PairSample, RewardSample, encode_pair, sides_for_model
from lmm_r1.supervised.samples import encode_sample

WIDE, TALL, SHORT = picture(140, 84), picture(84, 112), clip(2, 112, 84)
PROMPTS: dict[str, tuple[str, list[Message]]] = {
    "text": ("text", [message("system", "Think first."), message("user", "What is 12 + 34?")]),
    "an image": ("images", [message("user", WIDE, "Which digit is this?")]),
    "images of several turns": (
        "images",
        [message("user", "Which ", TALL, "?"), message("assistant", "<answer>4</answer>"), message("user", WIDE, "?")],
    ),
    "a video": ("videos", [message("user", SHORT, "Which digit?")]),
    "a video and an image": ("videos", [message("user", SHORT, "or", TALL, "?")]),
}
SIDES = [("<think>easy</think><answer>46</answer>", "<think>easy</think><answer>47"), ("46", "Forty-six, I think.")]


def takes(name: str, media: str) -> bool:
    kit = get_kit(name)
    return media == "text" or (kit.takes_images if media == "images" else kit.takes_videos)


CASES = [(name, prompt) for name in KITS for prompt, (media, _) in PROMPTS.items() if takes(name, media)]


def row(prompt: list[Message], chosen: str, rejected: str) -> PreferenceRow:
    return PreferenceRow(
        messages=tuple(prompt),
        chosen=(message("assistant", chosen),),
        rejected=(message("assistant", rejected),),
        margin=None,
        location="rows.jsonl line 1",
    )


@pytest.fixture(scope="module")
def actors(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[KitActor, KitActor]]:
    """A function from a kit's name to its model on packed sequences, where it takes any, and on padded ones."""
    made: dict[str, tuple[KitActor, KitActor]] = {}

    def of(name: str) -> tuple[KitActor, KitActor]:
        if name not in made:
            made[name] = make_actor(tiny_checkpoint(name), share_prefix=True), make_actor(tiny_checkpoint(name))
        return made[name]

    return of


@pytest.fixture(scope="module")
def encode(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str, PreferenceRow], PairSample]:
    """A function from a kit's name and a pair to its sample."""
    processors = {}

    def encoded(name: str, pair: PreferenceRow) -> PairSample:
        kit = get_kit(name)
        if name not in processors:
            processors[name] = kit.load_processor(str(tiny_checkpoint(name)), trust_remote_code=False)
        sample = encode_pair(pair, kit=kit, processor=processors[name], max_len=8192)
        for got, side in zip((sample.chosen, sample.rejected), pair.sides, strict=True):
            alone = encode_sample(side, kit=kit, processor=processors[name], max_len=8192, every_turn=False)
            assert (got.token_ids, got.loss_mask) == (alone.token_ids, alone.loss_mask)
            assert (got.media is None) == (alone.media is None)
            if got.media is not None:
                assert got.media.keys() == alone.media.keys()
                assert all(torch.equal(got.media[key], value) for key, value in alone.media.items())
        return sample

    return encoded


@pytest.mark.parametrize("sides", SIDES, ids=["alike", "different"])
@pytest.mark.parametrize(("name", "prompt"), CASES)
def test_both_sides_have_the_ids_that_they_have_by_themselves_and_one_object_of_media(encode, name, prompt, sides):
    messages = PROMPTS[prompt][1]
    sample = encode(name, row(messages, *sides))
    assert sample.rejected.media is sample.chosen.media
    assert (sample.chosen.media is None) == (prompt == "text")


@pytest.mark.parametrize("name", sorted(SOME))
def test_a_pair_in_one_packed_sequence_has_the_log_probs_of_its_sides_by_themselves(encode, name, actors):
    messages = PROMPTS["an image" if get_kit(name).takes_images else "text"][1]
    sample = encode(name, row(messages, *SIDES[0]))
    shared, stock = actors(name)
    shared.computed_tokens = 0
    with torch.no_grad():
        together = shared(sides_for_model([sample]))
        sums = [stock([side.for_model()]).sum() for side in (sample.chosen, sample.rejected)]
    torch.testing.assert_close(together.sum(-1), torch.stack(sums), atol=1e-4, rtol=1e-5)
    if shared.packing_samples:
        prompt = sample.chosen.loss_mask.index(True)
        assert shared.computed_tokens <= len(sample.chosen.token_ids) + len(sample.rejected.token_ids) - prompt


@pytest.mark.parametrize("name", sorted(SOME))
def test_a_pair_in_one_packed_sequence_has_the_rewards_of_its_sides_by_themselves(encode, name, tiny_checkpoint):
    messages = PROMPTS["an image" if get_kit(name).takes_images else "text"][1]
    sample = encode(name, row(messages, *SIDES[0]))
    folder = tiny_checkpoint(name)
    shared, stock = make_value_model(folder, share_prefix=True), make_value_model(folder)
    rewards = RewardSample(chosen=sample.chosen, rejected=sample.rejected, margin=0.0, scores=(0.0, 0.0))
    with torch.no_grad():
        together = shared(sides_for_model([rewards, rewards.filler]), of_samples=True)
        alone = [stock([side.for_model()], of_samples=True)[0] for side in (sample.chosen, sample.rejected)]
    # A filler's sides are the same conversations, which nothing divides into prompt and response.
    expected = torch.stack([alone[0], alone[0], alone[1], alone[1]])
    torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)
