"""Random trajectories of every environment with every kit: what is trained on is what was generated and shown, to the token.

And what the trainer's model computes for them together is what it computes for each of them alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import message
from helpers.engines import disturb
from helpers.environments import CASES
from helpers.packed_batches import Batch, DoubleThroughout, log_probs_of
from helpers.random_trajectories import GROUP, MAX_LEN, RandomPolicy, Rollouts, Spoken, build_checkpoint, packed_sample
from helpers.tables import SOME, kits_with
from helpers.tiny_models import encode, make_actor

from lmm_r1.checkpoints.merge_job import in_double
from lmm_r1.data.sample import Sample
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.lmm_kits import Checkpoint, Media, get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.rl.samples import TrainingSample

PLAYING = kits_with("RL")
# Of each environment; a kit has some two hundred of all of them.
COUNT = 24
# A turn's limit, drawn for each group: some of them cut calls off.
MAX_NEW_TOKENS = (12, 60, 200, 200)
SINGLE, DOUBLE = 1e-5, 1e-12
# How the trainer's model may compute them together; a further way is a further name here and in `Models.running`.
WAYS = ("packed", "shared")
PASS_SAMPLES = 20
# Of the module's scope, for which pytest runs the tests of a kit one behind another: they share what was played.
of_kits = pytest.mark.parametrize("name", PLAYING, scope="module")
PRECISIONS = [(name, dtype) for name in PLAYING for dtype in ("fp32", "fp64") if dtype == "fp64" or name in SOME]


class Trajectories:
    """What a random policy makes of a case with one kit."""

    def __init__(self, name: str, case: str, *, count: int, folder: Path) -> None:
        checkpoint = Checkpoint(str(folder))
        self.kit, self.processor = checkpoint.kit, checkpoint.processor
        images = self.kit.takes_images
        self.rollouts = Rollouts(
            environment=CASES[case].environment(images),
            codec=PromptCodec(kit=self.kit, processor=self.processor, banned_token_ids=checkpoint.banned_token_ids),
        )
        self.policy = RandomPolicy(
            self.kit, self.processor, checkpoint.config, turn=CASES[case].turn, seed=sorted(CASES).index(case)
        )
        rows = list(islice(CASES[case].rows(seed=1, images=images), count // GROUP))
        self.samples = self.rollouts.play(self.policy, rows, seed=2, max_new_tokens=MAX_NEW_TOKENS)

    @property
    def media(self) -> dict[str, Media]:
        return self.rollouts.media


@pytest.fixture(scope="module")
def folder_of(built_once: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: built_once(f"trajectories/{name}", partial(build_checkpoint, get_kit(name))))


@pytest.fixture(scope="module")
def trajectories(folder_of: Callable[[str], Path]) -> Callable[..., Trajectories]:
    # One kit at a time: their pictures take gigabytes.
    return lru_cache(maxsize=len(CASES))(
        lambda name, case, count: Trajectories(name, case, count=count, folder=folder_of(name))
    )


def turns_of(sample: Sample, spoken: dict[tuple, Spoken]) -> list[Spoken]:
    """What the engine has noted of a sample's turns."""
    ids = sample.token_ids
    return [spoken[tuple(ids[:start]), tuple(ids[start:end])] for start, end in sample.action_ranges]


@pytest.mark.parametrize("case", CASES)
@of_kits
def test_what_is_trained_on_is_what_was_shown_and_generated_to_the_token(trajectories, name, case):
    played = trajectories(name, case, COUNT)
    samples, tokenizer = played.samples, played.policy.tokenizer
    assert len(samples) == COUNT
    # Each turn of each sample is one that the engine made of all tokens before it, and there are no others.
    made = Counter((turn.read, turn.generated) for turn in played.policy.spoken)
    trained = [
        (tuple(sample.token_ids[:start]), tuple(sample.token_ids[start:end]))
        for sample in samples
        for start, end in sample.action_ranges
    ]
    assert Counter(trained) == made
    spoken = {(turn.read, turn.generated): turn for turn in played.policy.spoken}
    for sample in samples:
        turns = turns_of(sample, spoken)
        learnt = [token for token, is_learnt in zip(sample.token_ids, sample.loss_mask, strict=True) if is_learnt]
        assert learnt == [token for turn in turns for token in turn.generated]
        assert set(learnt).isdisjoint(played.policy.banned)
        check_texts(sample, turns, tokenizer)
        check_ends_of_turns(sample, turns, tokenizer.eos_token_id)
        check_tensors(sample, turns)
        check_number_of_images(sample, turns, played)


def check_texts(sample: Sample, turns: Sequence[Spoken], tokenizer: Any) -> None:
    """The text that environment and scorer were given is that of the tokens, behind what the turn was begun with."""
    said = [one.text for one in sample.played.said if one.role == "assistant"]
    assert len(said) == len(turns)
    for text, turn in zip(said, turns, strict=True):
        written = turn.generated[:-1] if turn.ended_by == "token" else turn.generated
        assert text.endswith(tokenizer.decode(written, skip_special_tokens=False))
    assert sample.response == said[-1]


def check_ends_of_turns(sample: Sample, turns: Sequence[Spoken], end: int) -> None:
    """Every turn that another follows is closed once: by the policy, or else by what is shown next."""
    spans = sample.action_ranges
    for turn, (_, after) in list(zip(turns, spans, strict=True))[:-1]:
        assert [turn.generated[-1], sample.token_ids[after]].count(end) == 1
        assert (turn.generated[-1] == end) == (turn.ended_by == "token")
    assert sample.finish_reason == ("length" if turns[-1].ended_by == "length" else "stop")
    assert len(sample.token_ids) <= MAX_LEN


def check_tensors(sample: Sample, turns: Sequence[Spoken]) -> None:
    """The tensors that training gets: a mask of exactly the generated tokens, each with the engine's log-prob."""
    made = TrainingSample.of(sample, max_len=MAX_LEN)
    assert made.token_ids.tolist() == sample.token_ids
    expected = torch.zeros(len(sample.token_ids))
    mask = torch.zeros(len(sample.token_ids), dtype=torch.bool)
    for turn in turns:
        span = slice(len(turn.read), len(turn.read) + len(turn.generated))
        expected[span], mask[span] = torch.tensor(turn.log_probs), True
    assert torch.equal(made.loss_mask, mask[1:])
    assert torch.equal(made.engine_log_probs, expected[1:])
    assert made.response_tokens == mask.sum().item()


def check_number_of_images(sample: Sample, turns: Sequence[Spoken], played: Trajectories) -> None:
    """Each image stands for placeholders of the segment that has its tensors, and the engine was sent all of them."""
    placeholders = played.kit.placeholder_ids(played.processor)
    with_media = [segment for segment in sample.segments if not placeholders.isdisjoint(segment.token_ids)]
    assert with_media == [segment for segment in sample.segments if segment.media is not None]
    assert [item.start for item in sample.media] == sorted({item.start for item in sample.media})
    shown = [len(turn.images) for turn in turns]
    assert shown == sorted(shown)
    observed = sum(1 for segment in with_media if segment.kind == "observation")
    assert (shown[-1] > shown[0]) == bool(observed)
    assert sample.played.images == shown[-1] - shown[0]


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].shows_images])
@pytest.mark.parametrize("name", [name for name in PLAYING if get_kit(name).takes_images])
def test_the_trainer_gets_the_pixels_that_the_engine_is_shown(trajectories, name, case):
    """Tensors of each image by itself, as the engine was sent it, are those that the segments have."""
    # What a random policy says seldom shows an image: of one that does so in too few, more are played.
    for count in (24, 48):
        played = trajectories(name, case, count)
        samples = [sample for sample in played.samples if sample.played.images]
        if len(samples) >= 2:
            break
    assert len(samples) >= 2
    spoken = {(turn.read, turn.generated): turn for turn in played.policy.spoken}
    for sample in samples[:4]:
        images = turns_of(sample, spoken)[-1].images
        alone = [encode(played.kit, played.processor, [message("user", image)]).media for image in images]
        expected = played.kit.merge_media(alone)
        merged = played.kit.merge_media([played.media[item.ref.key] for item in sample.media])
        assert merged.keys() == expected.keys()
        for key, tensor in merged.items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=0)


class Models:
    """A kit's model with stock attention, which takes trajectories one by one, and with packed sequences."""

    def __init__(self, folder: Path, *, dtype: str) -> None:
        settings = {"temperature": 0.8, "ban_media_tokens": True}
        self.alone = make_actor(folder, **settings)
        self.packing = make_actor(folder, packing_samples=True, **settings)
        # Some weights start at zero, without which images do not matter.
        disturb(self.alone, seed=1)
        self.packing.model.load_state_dict(self.alone.model.state_dict())
        if dtype == "fp64":
            for actor in (self.alone, self.packing):
                in_double(actor.model)

    def running(self, way: str) -> KitActor:
        self.packing.share_prefix = way == "shared"
        return self.packing


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    if dtype == "fp32":
        yield
        return
    with DoubleThroughout():
        yield


@pytest.mark.parametrize(("name", "dtype"), PRECISIONS, scope="module")
def test_log_probs_of_trajectories_together_are_those_of_each_alone(trajectories, folder_of, name, dtype):
    per_case = -(-COUNT // len(CASES) // GROUP) * GROUP
    played = [trajectories(name, case, per_case) for case in CASES]
    samples = [packed_sample(sample, one.media) for one in played for sample in one.samples]
    assert len(samples) >= COUNT
    models = Models(folder_of(name), dtype=dtype)
    with precision(dtype):
        alone = [log_probs_of(models.alone, Batch((sample,)))[0] for sample in samples]
        together = {way: in_passes(models.running(way), samples) for way in WAYS}
    tolerance = SINGLE if dtype == "fp32" else DOUBLE
    for way, found in together.items():
        assert len(found) == len(alone)
        worst = max((one - other).abs().max().item() for one, other in zip(found, alone, strict=True))
        assert worst <= tolerance, (way, worst)


def in_passes(actor: KitActor, samples: Sequence[Any]) -> list[torch.Tensor]:
    """Run whole groups, many in a pass."""
    passes = [samples[start : start + PASS_SAMPLES] for start in range(0, len(samples), PASS_SAMPLES)]
    return [log_probs for part in passes for log_probs in log_probs_of(actor, Batch(tuple(part)))]
