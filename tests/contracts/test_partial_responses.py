"""Responses of a real engine that go on across an update of its weights, with images, as a run's actor replaces them."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import disturb, running_engine
from helpers.passes import next_log_probs
from helpers.tiny_models import CORPUS, encode, make_actor

from lmm_r1.data.sample import WeightSpan
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.engine_arguments import CPU_BLOCK_SIZE, SCHEDULER
from lmm_r1.generation.ray_engines import KitRolloutActor
from lmm_r1.generation.request import EngineWeights, PromptCodec, Request, Response, sampling_params, tokens_under_way
from lmm_r1.generation.vllm_engine import InProcessEngine
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, TinyModelSpec, get_kit
from lmm_r1.models.actor import KitActor

KIT = get_kit("qwen2_5_vl")
TOLERANCE = 1e-4
TOKENS = 120
# An update comes when a response has so many.
BEFORE = 20


@dataclass(kw_only=True)
class Run:
    """A policy, and the actor around an engine with its weights."""

    folder: Path
    policy: KitActor
    engine: KitRolloutActor
    llm_engine: Any
    codec: PromptCodec

    def saved(self, name: str) -> Path:
        """The policy's weights as they are now."""
        self.policy.model.save_pretrained(self.folder / name)
        return self.folder / name

    def responses(self, prompts: Sequence[EncodedPrompt], *, n: int, update: Path | None) -> list[list[Response]]:
        """Sample responses, and replace the engine's weights in their midst where some are given."""
        torch.manual_seed(3)
        # Each event loop has its own.
        self.engine.llm = InProcessEngine(lambda: self.llm_engine, own_thread=True)
        return asyncio.run(self._responses(prompts, n=n, update=update))

    async def _responses(self, prompts: Sequence[EncodedPrompt], *, n: int, update: Path | None) -> list[list[Response]]:  # fmt: skip
        parameters = sampling_params(
            SamplingSettings(n_samples=n, temperature=1.0, top_p=1.0, max_new_tokens=TOKENS),
            max_tokens=TOKENS,
            end_token_id=0,
            logprobs=True,
            ignore_eos=True,
            output_per="response",
        )
        weights, llm = self.engine.weights, self.engine.llm
        requests = [Request(self.codec.engine_prompt(prompt), parameters, weights=weights) for prompt in prompts]

        async def whole(request: Request) -> None:
            async for _ in request.sent_to(llm):
                pass

        tasks = [asyncio.create_task(whole(request)) for request in requests]
        if update is not None:
            while min((min(of.values()) for of in tokens_under_way(llm).values()), default=0) < BEFORE:
                await asyncio.sleep(0.001)
            await self.engine.pause_generation()
            held = tokens_under_way(llm)
            await self.engine.load_weights_from(str(update))
            await self.engine.reset_caches(keep_images=False)
            assert tokens_under_way(llm) == held, "nothing was generated while the weights were replaced"
            await self.engine.resume_generation()
        await asyncio.gather(*tasks)
        return [request.responses for request in requests]

    def distances(self, prompt: EncodedPrompt, response: Response) -> torch.Tensor:
        """How far the engine's log-prob of each token is from the policy's, (T,)."""
        sequence = torch.tensor([[*prompt.token_ids, *response.token_ids]])
        with torch.no_grad():
            mask = torch.ones_like(sequence)
            own = next_log_probs(self.policy, sequence, attention_mask=mask, media=[prompt.media])[0]
        return (own[-len(response.token_ids) :] - torch.tensor(response.log_probs)).abs()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("partial")
    original = folder / "original"
    original.mkdir()
    KIT.build_tiny(TinyModelSpec(hidden_size=64, layers=2, seed=1, tie_embeddings=False), CORPUS, original)
    policy = make_actor(original, ban_media_tokens=True)
    disturb(policy, seed=0)
    policy.model.save_pretrained(original)
    checkpoint = Checkpoint(str(original))
    codec = PromptCodec(kit=KIT, processor=checkpoint.processor, banned_token_ids=checkpoint.banned_token_ids)
    # Blocks so small that a picture's are kept for later prompts.
    blocks = {"block_size": CPU_BLOCK_SIZE, "scheduler_cls": SCHEDULER}
    with running_engine(KIT, original, max_images=2, **blocks) as llm:
        actor = object.__new__(KitRolloutActor)
        actor.weights, actor.paused = EngineWeights(), False
        yield Run(folder=folder, policy=policy, engine=actor, llm_engine=llm.llm_engine, codec=codec)


def prompts_of(run: Run) -> list[EncodedPrompt]:
    wide = picture(140, 84)
    asked = ([message("user", wide, "Which digit is this?")], [message("user", "What is 12 + 34?")])
    return [encode(KIT, run.codec.processor, messages) for messages in asked]


def test_a_response_that_goes_on_with_the_same_weights_is_the_one_that_was_never_held_up(run):
    image, _ = prompts_of(run)
    weights = run.saved("as they are")
    [[whole]] = run.responses([image], n=1, update=None)
    [[partial]] = run.responses([image], n=1, update=weights)
    assert len(whole.token_ids) == TOKENS
    assert partial.token_ids == whole.token_ids
    assert (torch.tensor(partial.log_probs) - torch.tensor(whole.log_probs)).abs().max() <= TOLERANCE
    first, second = partial.weights
    assert second.version == first.version + 1
    assert first.tokens >= BEFORE
    assert first.tokens + second.tokens == TOKENS
    assert whole.weights == (WeightSpan(first.version, TOKENS),)


def test_each_token_has_the_log_prob_of_the_weights_that_its_version_names(run):
    prompts, version = prompts_of(run), run.engine.weights.version
    old = {name: weight.clone() for name, weight in run.policy.model.state_dict().items()}
    disturb(run.policy, seed=2)
    new = run.saved("new")
    groups = run.responses(prompts, n=2, update=new)
    pairs = [(prompt, response) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    distances_to_new = [run.distances(*pair) for pair in pairs]
    run.policy.model.load_state_dict(old)
    distances_to_old = [run.distances(*pair) for pair in pairs]
    for (_, response), to_old, to_new in zip(pairs, distances_to_old, distances_to_new, strict=True):
        first, second = response.weights
        assert (first.version, second.version) == (version, version + 1)
        assert first.tokens >= BEFORE
        assert to_old[: first.tokens].max() <= TOLERANCE
        assert to_new[first.tokens :].max() <= TOLERANCE, "what was read before is computed anew, pictures included"
        assert min(to_old[first.tokens :].max(), to_new[: first.tokens].max()) > 100 * TOLERANCE


def test_a_picture_of_an_earlier_turn_which_the_engine_has_kept_is_read_by_the_new_weights_too(run):
    question = "What does it show, and how often does it show it? " * 3
    later = encode(KIT, run.codec.processor, [message("user", picture(56, 56), question)])
    weights = run.saved("kept")
    run.responses([later], n=1, update=weights)
    [[whole]] = run.responses([later], n=1, update=None)
    # Now its prompt stands in the prefix cache, and the picture in one of its first blocks.
    [[partial]] = run.responses([later], n=1, update=weights)
    assert partial.token_ids == whole.token_ids
    assert (torch.tensor(partial.log_probs) - torch.tensor(whole.log_probs)).abs().max() <= TOLERANCE
    assert [span.tokens > 0 for span in partial.weights] == [True, True]
