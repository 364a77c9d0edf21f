"""What checkpoints hold: which steps a run could resume at, and the modules that are saved."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.launched_ranks import constant_adam

from lmm_r1 import cpu, dotted
from lmm_r1.config import SFTConfig
from lmm_r1.host.checkpoint_folder import whole_checkpoints
from lmm_r1.host.models import whole_state_dict
from lmm_r1.host.strategy import KitStrategy, make_strategy


def complete_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoint is whole, the newest last."""
    return sorted({checkpoint.step for checkpoint in whole_checkpoints(folder).values()})


def newest_common_step(folders: Sequence[Path]) -> int | None:
    """Return the newest step that every folder has whole and from the same session, None where there is none."""
    found = [
        {(entry.step, entry.tag, entry.session) for entry in whole_checkpoints(folder).values()} for folder in folders
    ]
    return max((step for step, *_ in set.intersection(*found)), default=None)


ADAM = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def make_run(stage: int, *, dtype: str = "fp32") -> KitStrategy:
    settings = {
        "train.batch_size": int(os.environ.get("WORLD_SIZE", "1")),
        "train.micro_batch_size": 1,
        "ds.zero_stage": stage,
        "ds.param_dtype": dtype,
    }
    strategy = make_strategy(dotted.replace(SFTConfig(), settings))
    strategy.setup_distributed()
    return strategy


def prepared(strategy: KitStrategy) -> Any:
    """Return the engine around a linear layer of 3 x 5 weights, which begin as zeros."""
    # Under ZeRO-3 the layer is sharded when DeepSpeed takes it over.
    layer = torch.nn.Linear(5, 3, bias=False)
    torch.nn.init.zeros_(layer.weight)
    return strategy.prepare((layer, constant_adam(ADAM)))[0]


def train(strategy: KitStrategy, engine: Any, *, steps: int) -> None:
    """Move all weights by about the learning rate in each step, and Adam's memory with them."""
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        loss = engine(torch.ones(1, 5, dtype=dtype)).float().sum()
        strategy.backward(loss, engine, None)
        strategy.optimizer_step(None, engine, None)


def weight(engine: Any) -> float | None:
    """Return one of the weights, which are all the same; None on other ranks than 0 of ZeRO-3."""
    weights = whole_state_dict(engine)
    return None if weights is None else weights["weight"].float().mean().item()


def main(stage: int, folder: Path) -> None:
    """Save and load on two ranks, where `latest` is emptied and one rank's shard of the newest checkpoint is lost."""
    cpu.prepare_process()
    strategy = make_run(stage)
    engine, found = prepared(strategy), []
    for step in (1, 2):
        train(strategy, engine, steps=1)
        found.append(weight(engine))
        strategy.save_ckpt(engine, str(folder), f"global_step{step}", max_num=2, client_state={"global_step": step})
    dist.barrier()
    if dist.get_rank() == 0:
        (shard,) = (folder / "global_step2").glob("*zero_pp_rank_1_*_optim_states.pt")
        shard.unlink()
        (folder / "latest").write_text("")
    dist.barrier()
    resumed = prepared(strategy)
    _, states = strategy.load_ckpt(resumed, str(folder))
    assert states["global_step"] == 1
    assert weight(resumed) == found[0]
    train(strategy, resumed, steps=1)
    assert weight(resumed) == found[1], "with Adam's memory of step 1"
    strategy.save_ckpt(resumed, str(folder), "global_step2", max_num=1, client_state={"global_step": 2})
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["global_step2", "latest", "zero_to_fp32.py"]
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
