"""Episodes on a real engine: its log-probs are the trainer's in every turn, also with what it keeps from turn to turn."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import disturb, load_weights, running_engine
from helpers.environments import CASES
from helpers.packed_batches import Batch, log_probs_of
from helpers.random_trajectories import GROUP, LIMITS, MAX_LEN, Overheard, Rollouts, build_checkpoint, packed_sample
from helpers.tables import by_turns, kits_with
from helpers.tiny_models import make_actor
from PIL import Image

from lmm_r1.data.sample import Sample
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.generation.vllm_engine import InProcessEngine
from lmm_r1.lmm_kits import Checkpoint, get_kit
from lmm_r1.models.actor import KitActor

TOLERANCE = 1e-4
MAX_NEW_TOKENS = (4, 12, 24)


@pytest.fixture(scope="module")
def folder_of(built_once: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: built_once(f"trajectories/{name}", partial(build_checkpoint, get_kit(name))))


class Run:
    """A policy, and an engine with its weights."""

    def __init__(self, folder: Path, llm: Any, actor: KitActor, *, images: bool) -> None:
        checkpoint = Checkpoint(str(folder))
        self.llm, self.actor, self.images = llm, actor, images
        self.codec = PromptCodec(
            kit=checkpoint.kit, processor=checkpoint.processor, banned_token_ids=checkpoint.banned_token_ids
        )
        self.engine = InProcessEngine(lambda: llm.llm_engine, own_thread=False)

    def play(self, case: str, *, count: int, seed: int) -> tuple[list[Sample], float]:
        """Return episodes and the largest distance between the engine's log-probs and the trainer's."""
        rollouts = Rollouts(environment=Overheard(CASES[case], images=self.images), codec=self.codec)
        rows = list(islice(CASES[case].rows(seed=seed, images=self.images), -(-count // GROUP)))
        samples = rollouts.play(self.engine, rows, seed=seed, max_new_tokens=MAX_NEW_TOKENS)
        return samples, self.distance(samples, rollouts.media)

    def distance(self, samples: Sequence[Sample], media: dict[str, Any]) -> float:
        distances = []
        for sample in samples:
            batch = Batch((packed_sample(sample, media),))
            reported = torch.tensor([value for one in sample.generated for value in one.log_probs])
            distances.append((log_probs_of(self.actor, batch)[0] - reported).abs().max().item())
        return max(distances)

    def update(self, folder: Path, *, seed: int) -> None:
        disturb(self.actor, seed=seed)
        load_weights(self.llm, self.actor, folder)


def tower_runs(llm: Any) -> list[int]:
    """Return a list that grows whenever the engine's vision tower runs."""
    runs: list[int] = []

    def watch(worker: Any) -> None:
        tower = worker.model_runner.model.visual
        tower.register_forward_hook(lambda module, inputs, output: runs.append(len(output)))

    llm.collective_rpc(watch)
    return runs


@pytest.fixture
def run_of(folder_of: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    """A function from a kit's name to a run; the engine stops behind the test."""
    engines = []

    def run(name: str) -> Run:
        kit, folder = get_kit(name), folder_of(name)
        actor = make_actor(folder, ban_media_tokens=True)
        disturb(actor, seed=1)
        saved = tmp_path / "saved"
        actor.model.save_pretrained(saved)
        processor = kit.load_processor(str(folder), trust_remote_code=False)
        processor.save_pretrained(saved)
        most = LIMITS.max_images + 2
        engine = running_engine(kit, saved, max_images=most if kit.takes_images else 0, max_model_len=MAX_LEN)
        engines.append(engine)
        llm = engine.__enter__()
        assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        # What the engine cannot agree with the trainer on is not asked for.
        return Run(saved, llm, actor, images=kit.takes_images and not kit.engine_disagrees(actor.model.config))

    yield run
    for engine in engines:
        engine.__exit__(None, None, None)


def cases_of(name: str) -> list[str]:
    """All cases for three kits, and a third of them by turns for each other, which `test_trajectories` plays all of."""
    return [case for one, case in by_turns(kits_with("RL"), [(case,) for case in CASES], turns=3) if one == name]


@pytest.mark.parametrize("name", kits_with("RL"))
def test_the_engines_log_probs_of_episodes_are_the_trainers_before_and_after_an_update(run_of, tmp_path, name):
    run = run_of(name)
    played, turns, images = 0, 0, 0
    for update in range(2):
        if update:
            run.update(tmp_path / "weights", seed=2)
        for number, case in enumerate(cases_of(name)):
            # What an update changes shows in a few of them.
            if update and number % 3:
                continue
            samples, distance = run.play(case, count=GROUP, seed=number)
            assert distance <= TOLERANCE, (case, update, distance)
            played += len(samples)
            turns += sum(len(sample.generated) for sample in samples)
            images += sum(sample.played.images for sample in samples)
    assert turns > 1.2 * played, "more turns than one"
    assert bool(images) == run.images


def test_what_is_kept_from_turn_to_turn_must_be_forgotten_with_an_update(run_of, tmp_path):
    run = run_of("qwen2_5_vl")
    _, before = run.play("crop", count=GROUP, seed=0)
    assert before <= TOLERANCE
    disturb(run.actor, seed=2)
    run.actor.model.save_pretrained(tmp_path / "weights")
    run.llm.collective_rpc("load_weights_from", args=(str(tmp_path / "weights"),))
    # The new weights alone: the prompts are known already, with the keys and values of the old ones.
    run.llm.llm_engine.reset_encoder_cache()
    run.llm.llm_engine.reset_mm_cache()
    _, stale = run.play("crop", count=GROUP, seed=0)
    assert stale > 100 * TOLERANCE
    assert run.llm.reset_prefix_cache()
    _, after = run.play("crop", count=GROUP, seed=0)
    assert after <= TOLERANCE
    # An update of the language model alone: what the frozen tower has made of the images is as good as before.
    moved = 0
    with torch.no_grad():
        for name, weight in run.actor.model.named_parameters():
            if name.startswith(run.actor.kit.language_prefixes):
                moved += weight.add_(0.02 * torch.randn_like(weight)).numel()
    run.actor.model.save_pretrained(tmp_path / "language")
    run.llm.collective_rpc("load_weights_from", args=(str(tmp_path / "language"),))
    assert run.llm.reset_prefix_cache()
    runs = tower_runs(run.llm)
    _, kept = run.play("crop", count=GROUP, seed=0)
    assert moved
    assert kept <= TOLERANCE
    assert not runs
    run.llm.llm_engine.reset_encoder_cache()
    assert run.llm.reset_prefix_cache()
    run.play("crop", count=GROUP, seed=0)
    assert runs


def test_an_engine_takes_an_image_by_its_name_for_what_it_showed_before(run_of, monkeypatch):
    """That is how names save time, and why two images of one name would go wrong without a word."""
    run = run_of("qwen2_5_vl")
    monkeypatch.setattr("lmm_r1.generation.codec._image_id", lambda image: "one name for all")
    distances = []
    for _ in range(2):
        noise = Image.effect_noise((84, 84), 80).convert("RGB")
        monkeypatch.setattr("helpers.environments.picture", lambda width, height, noise=noise: noise)
        distances.append(run.play("single", count=GROUP, seed=5)[1])
    assert distances[0] <= TOLERANCE < 10 * TOLERANCE < distances[1]
