"""Banned tokens of a vocabulary that is padded by 150,000 ids: real engines never sample them, whatever a request asks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.conversations import message, picture
from helpers.engines import EngineRun, disturb, largest_difference, load_weights, running_engine, sampled
from helpers.tiny_models import CORPUS, encode, make_actor
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt

from lmm_r1.config.shared import Speculation
from lmm_r1.lmm_kits import Checkpoint, TinyModelSpec, get_kit

KIT = get_kit("qwen2_5_vl")
PADDED = 150_000
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose output layer prefers ids that its tokenizer does not have."""
    folder = tmp_path_factory.mktemp("padded")
    KIT.build_tiny(TinyModelSpec(hidden_size=64, layers=2, seed=1, tie_embeddings=False), CORPUS, folder)
    model = make_actor(folder).model
    known = model.config.get_text_config().vocab_size
    model.resize_token_embeddings(known + PADDED, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[known:].normal_(std=1.0, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(None, id="plain"),
        pytest.param(Speculation(tokens=4), id="guessing", marks=pytest.mark.full),
    ],
)
def run(request: pytest.FixtureRequest, padded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRun]:
    checkpoint, policy = Checkpoint(str(padded)), make_actor(padded, ban_media_tokens=True, temperature=2.0)
    banned = list(checkpoint.banned_token_ids)
    assert len(banned) >= PADDED
    asked = ([message("user", picture(56, 56), "Which digit is this?")], [message("user", "What is 12 + 34?")])
    prompts = [encode(KIT, checkpoint.processor, messages) for messages in asked]
    with running_engine(KIT, padded, max_images=1, speculation=request.param) as engine:
        new = tmp_path_factory.mktemp("new")
        yield EngineRun(folder=new, policy=policy, banned=banned, prompts=prompts, engine=engine)


def check(run: EngineRun) -> None:
    """See that samples are free of banned tokens, and that engine and trainer agree at the highest temperature that vLLM takes."""
    samples = sampled(
        run.engine, KIT, run.prompts, banned=run.banned, n=2, max_tokens=16, temperature=run.policy.temperature
    )
    tokens = {token for group in samples for token_ids, _ in group for token in token_ids}
    assert tokens.isdisjoint(run.banned)
    assert largest_difference(run.policy, run.prompts, samples) <= TOLERANCE


def test_150_000_banned_ids_are_never_sampled_at_load_and_after_new_weights(run):
    check(run)
    disturb(run.policy, seed=1)
    load_weights(run.engine, run.policy, run.folder)
    check(run)
    logits = run.policy.model(torch.tensor([run.prompts[1].token_ids])).logits[0, -1]
    assert int(logits.argmax()) in run.banned, "the model itself prefers one"


def test_a_request_cannot_bring_a_banned_token_back(run):
    ordinary, wanted = 20, run.banned[-1]
    assert ordinary not in run.banned
    parameters = SamplingParams(n=8, max_tokens=8, ignore_eos=True, logit_bias={wanted: 100.0, ordinary: 100.0})
    prompt = TokensPrompt(prompt_token_ids=run.prompts[1].engine_token_ids)
    if run.engine.llm_engine.vllm_config.speculative_config is not None:
        with pytest.raises(VLLMValidationError, match="logit_bias"):
            run.engine.generate([prompt], parameters, use_tqdm=False)
        return
    (output,) = run.engine.generate([prompt], parameters, use_tqdm=False)
    assert {token for sample in output.outputs for token in sample.token_ids} == {ordinary}
