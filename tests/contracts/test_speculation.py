"""Tokens that a real engine guesses ahead, with images: what is sampled is what it would be without."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import EngineRun, disturb, largest_difference, load_weights, running_engine, sampled
from helpers.tiny_models import CORPUS, encode, make_actor

from lmm_r1.config.shared import Speculation
from lmm_r1.generation.engine_arguments import Guesses, guesses_so_far
from lmm_r1.lmm_kits import Checkpoint, EncodedPrompt, TinyModelSpec, get_kit
from lmm_r1.models.actor import KitActor

KIT = get_kit("qwen2_5_vl")
TOLERANCE = 1e-4
GUESSED = 4
TOKENS = 48


@dataclass(kw_only=True)
class Run(EngineRun):
    """The engine guesses tokens; another one, which does not, has given tokens greedily."""

    without: list[list[int]]
    steps_without: int

    def sampled(self, *, n: int, temperature: float, max_tokens: int = TOKENS) -> tuple[list, Guesses]:
        """Return the samples of each prompt, and the guesses for them."""
        before = guesses_so_far()
        samples = sampled(
            self.engine, KIT, self.prompts, banned=self.banned, n=n, max_tokens=max_tokens, temperature=temperature
        )
        return samples, guesses_so_far().since(before)


def peak(policy: KitActor, prompt: EncodedPrompt, *, banned: list[int]) -> None:
    """Let the policy be sure of its next token, which rather follows from the last one, and want a banned one at first."""
    with torch.no_grad():
        for name, weight in policy.model.model.language_model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.1)
        head = policy.model.lm_head.weight
        head.mul_(15)
        likeliest = policy.model(torch.tensor([prompt.token_ids])).logits[0, -1].argmax()
        head[banned[0]] = 2 * head[likeliest]


def greedy(engine: Any, prompts: list[EncodedPrompt], *, banned: list[int]) -> tuple[list[list[int]], int]:
    """Return the likeliest tokens behind each prompt, and in how many steps of the engine they were found."""
    steps, step = 0, engine.llm_engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.llm_engine, "step", counted)
        groups = sampled(engine, KIT, prompts, banned=banned, n=1, max_tokens=TOKENS, temperature=0.0)
    return [token_ids for [(token_ids, _)] in groups], steps


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("speculation")
    original = folder / "original"
    original.mkdir()
    KIT.build_tiny(TinyModelSpec(hidden_size=64, layers=2, seed=1, tie_embeddings=False), CORPUS, original)
    policy = make_actor(original, ban_media_tokens=True)
    disturb(policy, seed=0)
    checkpoint = Checkpoint(str(original))
    banned = list(checkpoint.banned_token_ids)
    asked = ([message("user", picture(140, 84), "Which digit is this?")], [message("user", "What is 12 + 34?")])
    prompts = [encode(KIT, checkpoint.processor, messages) for messages in asked]
    peak(policy, prompts[1], banned=banned)
    policy.model.save_pretrained(original)
    with running_engine(KIT, original, max_images=2) as engine:
        without, steps = greedy(engine, prompts, banned=banned)
    with running_engine(KIT, original, max_images=2, speculation=Speculation(tokens=GUESSED)) as engine:
        yield Run(
            folder=folder,
            policy=policy,
            banned=banned,
            prompts=prompts,
            engine=engine,
            without=without,
            steps_without=steps,
        )


def test_the_likeliest_tokens_are_the_same_with_guesses_and_without_and_take_fewer_steps(run):
    before = guesses_so_far()
    found, steps = greedy(run.engine, run.prompts, banned=run.banned)
    assert found == run.without
    assert run.steps_without == TOKENS, "a token of each response a step"
    guesses = guesses_so_far().since(before)
    assert steps < TOKENS
    assert 0 < guesses.accepted <= guesses.drafted


def test_sampled_tokens_have_the_log_probs_of_the_training_forward_and_none_is_banned(run):
    samples, guesses = run.sampled(n=4, temperature=1.0)
    assert 0 < guesses.accepted < guesses.drafted, "tokens that were taken, and tokens in the place of others"
    assert largest_difference(run.policy, run.prompts, samples) <= TOLERANCE
    tokens = {token for group in samples for token_ids, _ in group for token in token_ids}
    assert tokens.isdisjoint(run.banned)


def test_new_weights_are_those_that_guesses_are_checked_with(run):
    disturb(run.policy, seed=3)
    load_weights(run.engine, run.policy, run.folder / "new")
    samples, guesses = run.sampled(n=2, temperature=1.0)
    assert guesses.accepted
    assert largest_difference(run.policy, run.prompts, samples) <= TOLERANCE


def test_tokens_are_as_likely_as_they_would_be_without_guesses(run):
    """Sums of log-probs against their expectation: an excess of taken guesses would make samples likelier than they are."""
    samples, guesses = run.sampled(n=24, temperature=1.0, max_tokens=24)
    assert guesses.accepted
    text = run.prompts[1]
    excess = variance = 0.0
    for token_ids, reported in samples[1]:
        with torch.no_grad():
            logits = run.policy.model(torch.tensor([[*text.token_ids, *token_ids]])).logits[0]
        logits[:, run.banned] = -1e9
        log_probs = logits[len(text.token_ids) - 1 : -1].log_softmax(-1)
        expected = (log_probs.exp() * log_probs).sum(-1)
        excess += float(torch.tensor(reported).sum() - expected.sum())
        variance += float((log_probs.exp() * (log_probs - expected[:, None]).square()).sum())
    assert abs(excess) < 4 * variance**0.5
