"""Log-probs of two DeepSpeed processes in bf16 under each ZeRO stage, and of the same model without DeepSpeed."""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.conversations import message, picture
from helpers.launched_ranks import Ranks, constant_adam, launch
from helpers.passes import next_log_probs
from helpers.tiny_models import encode, flat_actor

from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, kit_of
from lmm_r1.models.actor import KitActor

RANKS = 2
STAGES = (1, 2, 3)
PLAIN = "without DeepSpeed"
TOKENS = 1024  # of a sample


def prompts_of(kit: LmmKit, checkpoint: Path) -> list[EncodedPrompt]:
    """Return one prompt of text and, where the kit takes images, one with a picture."""
    processor = kit.load_processor(str(checkpoint), trust_remote_code=False)
    contents: list[tuple[Any, ...]] = [("What is 12 + 34?",)]
    if kit.takes_images:
        contents.append((picture(112, 84), "Which digit does the picture show?"))
    return [encode(kit, processor, [message("user", *parts)]) for parts in contents]


def start(checkpoint: Path, responses: Sequence[Sequence[int]], folder: Path) -> Ranks:
    """Start the processes, which compute a response (L,) to each of `prompts_of`; `finish` waits for them."""
    folder.mkdir()
    job = {"checkpoint": str(checkpoint), "responses": list(map(list, responses))}
    (folder / "job.json").write_text(json.dumps(job))
    return launch("helpers.zero_log_probs", str(folder), count=RANKS, folder=folder / "logs")


def finish(ranks: Ranks, folder: Path) -> list[dict[str, list[torch.Tensor]]]:
    """Return for each rank the responses' log-probs, (L,) each, by ZeRO stage, and without DeepSpeed."""
    ranks.wait(seconds=300)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def log_probs_of(
    actor: KitActor, prompts: Sequence[EncodedPrompt], responses: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Return the log-probs of each prompt's response, (L,) each, which are computed one by one."""
    results = []
    for prompt, response in zip(prompts, responses, strict=True):
        sequence = torch.tensor([[*prompt.token_ids, *response]])
        with torch.no_grad():
            values = next_log_probs(actor, sequence, attention_mask=torch.ones_like(sequence), media=[prompt.media])
        results.append(values[0, -len(response) :].float())
    return results


def _prepared(checkpoint: str, *, stage: int) -> KitActor:
    from lmm_r1 import dotted
    from lmm_r1.config import SFTConfig
    from lmm_r1.host.strategy import make_strategy

    flags = {"train.batch_size": RANKS, "train.micro_batch_size": 1, "ds.zero_stage": stage, "ds.param_dtype": "bf16"}
    strategy = make_strategy(dotted.replace(SFTConfig(), flags))
    strategy.setup_distributed()
    actor = flat_actor(
        checkpoint,
        attn_implementation="sdpa",
        param_dtype="bf16",
        ban_media_tokens=True,
        ds_config=strategy.get_ds_train_config(),
    )
    optimizer = constant_adam({"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}, steps=1)
    return strategy.prepare((actor, optimizer))[0].eval()


def main(folder: Path) -> None:
    from lmm_r1 import cpu

    cpu.prepare_process()
    job = json.loads((folder / "job.json").read_text())
    checkpoint, responses = job["checkpoint"], job["responses"]
    prompts = prompts_of(kit_of(checkpoint, trust_remote_code=False), Path(checkpoint))
    plain = flat_actor(checkpoint, attn_implementation="sdpa", param_dtype="bf16", ban_media_tokens=True).eval()
    results = {PLAIN: log_probs_of(plain, prompts, responses)}
    for stage in STAGES:
        actor = _prepared(checkpoint, stage=stage)
        results[f"ZeRO-{stage}"] = log_probs_of(actor, prompts, responses)
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    importlib.import_module("helpers.zero_log_probs").main(Path(sys.argv[1]))
