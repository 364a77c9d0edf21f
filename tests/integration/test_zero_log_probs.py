"""Two ranks in bf16 are as near to the model's own log-probs under every ZeRO stage as bf16 without DeepSpeed is."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import flat_actor
from helpers.zero_log_probs import PLAIN, RANKS, STAGES, TOKENS, finish, log_probs_of, prompts_of, start

from lmm_r1.lmm_kits import get_kit


def largest_and_mean(values: list[torch.Tensor], exact: list[torch.Tensor]) -> tuple[float, float]:
    off = (torch.cat(values) - torch.cat(exact)).abs()
    return float(off.max()), float(off.mean())


@pytest.mark.full
def test_no_stage_is_further_from_the_model_than_bf16_itself(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "bf16"
    kit, original = get_kit("qwen2_5_vl"), tiny_checkpoint("qwen2_5_vl")
    # Weights that bf16 holds exactly: what is left between it and fp32 is the computation.
    rounded = flat_actor(str(original), attn_implementation="sdpa", param_dtype="bf16")
    rounded.model.save_pretrained(checkpoint)
    kit.load_processor(str(original), trust_remote_code=False).save_pretrained(checkpoint)
    prompts = prompts_of(kit, checkpoint)
    generator = torch.Generator().manual_seed(0)
    responses = [
        torch.randint(20, 60, (TOKENS - len(prompt.token_ids),), generator=generator).tolist() for prompt in prompts
    ]
    ranks = start(checkpoint, responses, tmp_path / "ranks")
    settings = {"attn_implementation": "sdpa", "ban_media_tokens": True}
    exact = log_probs_of(flat_actor(str(checkpoint), param_dtype="fp32", **settings).eval(), prompts, responses)
    # Frequencies as DeepSpeed's context would leave them, to see that they would be seen.
    inner = rounded.eval().model.model.language_model.rotary_emb
    inner.inv_freq = inner.inv_freq.bfloat16()
    off = largest_and_mean(log_probs_of(rounded, prompts, responses), exact)
    computed = finish(ranks, tmp_path / "ranks")
    for rank in range(RANKS):
        plain = largest_and_mean(computed[rank][PLAIN], exact)
        assert off[1] > 3 * plain[1]
        for stage in STAGES:
            largest, mean = largest_and_mean(computed[rank][f"ZeRO-{stage}"], exact)
            assert largest <= plain[0]
            assert mean <= plain[1]
