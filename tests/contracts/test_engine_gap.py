"""What a first step's check of a real engine against the trainer stops, and what it lets pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.conversations import message, picture, row
from helpers.engines import disturb, running_engine, sampled
from helpers.samples import generated_sample, unrewarded
from helpers.tiny_models import CORPUS, encode, flat_actor

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import EncodedPrompt, Media, TinyModelSpec, get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.rl.losses import Correction, LossSettings, PolicyLoss, PolicyPass
from lmm_r1.rl.mismatch import Mismatch
from lmm_r1.rl.samples import TrainingSample

# One list per prompt of its samples: token ids, and the log-probs that the engine reports for them.
Samples = Sequence[Sequence[tuple[list[int], list[float]]]]


def with_log_probs(
    actor: KitActor,
    rows: Sequence[Row],
    prompts: Sequence[EncodedPrompt],
    samples: Samples,
    *,
    media: Sequence[Media | None] | None = None,
) -> list[TrainingSample]:
    """Return all samples, with the actor's log-probs beside the engine's.

    Args:
        media: what the actor gets in the place of the prompts' own.
    """
    found = []
    for asked, prompt, group, given in zip(rows, prompts, samples, media or [p.media for p in prompts], strict=True):
        for token_ids, log_probs in group:
            made = unrewarded(generated_sample(prompt.token_ids, token_ids, of=asked, log_probs=log_probs))
            one = TrainingSample.of(made, max_len=10**6)
            with torch.no_grad():
                one.log_probs = actor([replace(one, media=given)])[0]
            found.append(one)
    return found


KIT = get_kit("qwen2_5_vl")
ENGINE_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# What is left of the policy: by a rollout's flags, and by what an agent asks for.
KEPT: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "both, at another temperature": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "an agent's min_p": {"min_p": 0.1},
}
# 29 to 889 tokens: rounded rotary frequencies move what is far into a sequence.
LONG = "What is 12 + 34? Which digit does the picture show? " * 48
ROWS = [
    row(message("user", LONG)),
    row(message("user", "What is 12 + 34?")),
    row(message("user", picture(56, 56), LONG)),
    row(message("user", picture(56, 56), picture(140, 84), "Add them.")),
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checkpoint, the first rollout of an engine on it, and the trainer's model."""

    actor: KitActor
    rows: Sequence[Row]
    prompts: Sequence[EncodedPrompt]
    samples: Samples
    kept: dict[str, Samples]
    """The same prompts, sampled as in `KEPT`."""
    dtype: str

    def check(self, *, media: Sequence[Media | None] | None = None) -> dict[str, float]:
        """Do what a run does with its first step's samples, and return the metrics."""
        mismatch = Mismatch(dotted.replace(PPOConfig(), {"ds.param_dtype": self.dtype}))
        mismatch.measure(with_log_probs(self.actor, self.rows, self.prompts, self.samples, media=media))
        return mismatch.take_metrics()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with weights twice as large as usual: attention that tells tokens apart, as after training."""
    folder = tmp_path_factory.mktemp("gap")
    KIT.build_tiny(TinyModelSpec(hidden_size=64, layers=2, seed=1, tie_embeddings=False), CORPUS, folder)
    model = KIT.load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def first_rollout(
    request: pytest.FixtureRequest, checkpoint: Path
) -> tuple[str, list[EncodedPrompt], Samples, dict[str, Samples]]:
    processor = KIT.load_processor(str(checkpoint), trust_remote_code=False)
    config = KIT.load_config(str(checkpoint), trust_remote_code=False)
    banned = KIT.banned_token_ids(config, KIT.tokenizer_of(processor))
    prompts = [encode(KIT, processor, item.messages) for item in ROWS]
    with running_engine(KIT, checkpoint, max_images=2, dtype=ENGINE_DTYPES[request.param]) as llm:
        asked = {"banned": banned, "n": 4, "max_tokens": 48}
        whole = sampled(llm, KIT, prompts, **asked)
        kept = {name: sampled(llm, KIT, prompts, **asked, **settings) for name, settings in KEPT.items()}
    return request.param, prompts, whole, kept


@pytest.fixture
def run(checkpoint: Path, first_rollout: tuple[str, list[EncodedPrompt], Samples, dict[str, Samples]]) -> Run:
    dtype, prompts, samples, kept = first_rollout
    actor = flat_actor(str(checkpoint), attn_implementation="sdpa", param_dtype=dtype, ban_media_tokens=True).eval()
    return Run(actor=actor, rows=ROWS, prompts=prompts, samples=samples, kept=kept, dtype=dtype)


# What rounding makes here, and less than a tenth of the limits in fp32, a half of them in bf16.
HONEST = {"fp32": 1e-4, "bf16": 0.05}


def test_an_honest_run_passes_and_its_gap_is_that_of_rounding(run):
    metrics = run.check()
    for name in ("mismatch", "mismatch/text", "mismatch/image"):
        assert 0 < metrics[f"{name}/mean"] <= HONEST[run.dtype]
        # exp(x) - 1 is a little more than x.
        assert metrics[f"{name}/mean"] <= metrics[f"{name}/mean_exp"] - 1 <= 1.5 * metrics[f"{name}/mean"]
        assert metrics[f"{name}/mean"] < metrics[f"{name}/max"]
    assert "mismatch/video/mean" not in metrics


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_of_the_policy_is_no_gap_and_hides_none(run, name):
    """The mean ratio of an unchanged model is 1, so that a correction weights no token by what a nucleus leaves."""
    run.actor.temperature = KEPT[name].get("temperature", 1.0)
    of_kept = replace(run, samples=run.kept[name])
    assert of_kept.check()["mismatch/mean"] <= HONEST[run.dtype]
    samples = with_log_probs(run.actor, run.rows, run.prompts, run.kept[name])
    ratios = torch.cat([(one.log_probs - one.engine_log_probs).exp()[one.loss_mask] for one in samples])
    assert ratios.mean().item() == pytest.approx(1.0, abs=2e-3 if run.dtype == "fp32" else 2e-2)
    assert ratios.numel() == 4 * 4 * 48
    # So GSPO with a correction clips none of them.
    losses = LossSettings(loss="gspo", clip=(3e-4, 4e-4), correction=Correction(level="token"))
    for one in samples:
        one.advantages, one.reward = -torch.ones_like(one.log_probs), 0.0
        given = PolicyPass.of([one], log_probs=one.log_probs[None], entropy=None)
        sums = PolicyLoss(losses)(given, kl_weight=0.0).token_sums
        assert (sums["ppo_clip_ratio"], sums["is_filter_ratio"]) == (0, 0)
    run.actor.temperature *= 0.7
    with pytest.raises(UserError, match="--rollout.temperature"):
        of_kept.check()


def test_rotary_frequencies_rounded_to_bf16_stop_the_run(run):
    rounded = [
        buffer for name, buffer in run.actor.model.named_buffers() if "inv_freq" in name and "visual" not in name
    ]
    assert rounded
    for buffer in rounded:
        buffer.copy_(buffer.bfloat16().float())
    with pytest.raises(UserError, match="rope settings"):
        run.check()


def test_weights_that_did_not_reach_the_engine_stop_the_run(run):
    # A tenth of each weight's spread: of many updates, or of another checkpoint. A single one of 1e-6 is below rounding.
    disturb(run.actor, seed=0)
    with pytest.raises(UserError, match="Compare the weights of both sides"):
        run.check()


@contextmanager
def positions_from(actor: KitActor, start: int, *, shift: int) -> Iterator[None]:
    """Move the positions of all tokens from one on."""

    def hook(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions = kwargs["position_ids"].clone()
        positions[..., start:] += shift
        return args, {**kwargs, "position_ids": positions}

    handle = actor.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("shift", [1, -1])
def test_responses_whose_positions_are_off_by_one_stop_the_run(run, shift):
    # Every row by itself: with one offset for all tokens nothing would change, as only distances count.
    for index, prompt in enumerate(run.prompts):
        one = Run(
            actor=run.actor,
            rows=run.rows[index : index + 1],
            prompts=[prompt],
            samples=run.samples[index : index + 1],
            kept={},
            dtype=run.dtype,
        )
        with (
            positions_from(run.actor, len(prompt.token_ids), shift=shift),
            pytest.raises(UserError, match="positions"),
        ):
            one.check()


def test_an_image_that_does_not_arrive_stops_the_run_and_points_at_the_images(run):
    blank = [
        (
            None
            if prompt.media is None
            else {**prompt.media, "pixel_values": torch.zeros_like(prompt.media["pixel_values"])}
        )
        for prompt in run.prompts
    ]
    with pytest.raises(UserError, match="of image rows ") as error:
        run.check(media=blank)
    assert "of text rows" not in str(error.value)
