"""Optimizer steps of two DeepSpeed processes over gloo, and the same steps of one process that sees all samples."""

import importlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from helpers.conversations import message, picture
from helpers.packed_batches import Batch, groups
from helpers.tiny_models import encode, make_actor

from lmm_r1.lmm_kits import get_kit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapted_layers, layer_weights

RANKS = 2
Way = Literal["padded", "packed", "shared"]
WAYS: tuple[Way, ...] = ("padded", "packed", "shared")
# Adam without memory whose step is nearly the gradient itself where that is small against 1: errors of gradients show.
ADAM = {"lr": 0.1, "betas": (0.0, 0.0), "eps": 1.0, "weight_decay": 0.0}
# Responses per prompt and their lengths; those of one prompt are a group.
LENGTHS = (4, 7)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, trained for a step in each of several ways."""

    kit: str
    folder: Path
    stage: int
    images: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    """How many images each prompt has: by rank, by micro-batch."""
    ways: tuple[Way, ...] = WAYS
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the actor: freezing, LoRA."""
    checkpointing: dict[str, Any] | None = None
    adam: dict[str, Any] = field(default_factory=lambda: ADAM)
    keep_small_weights: bool = False
    """Whether ZeRO-3 keeps small weights whole, which are all of a tiny model."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step saw and did, by the names of parameters."""

    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def samples_of(case: Case) -> list[list[Batch]]:
    """Return the micro-batches of each rank; a prompt and its responses stand in one micro-batch."""
    kit = get_kit(case.kit)
    processor = kit.load_processor(str(case.folder), trust_remote_code=False)
    ranks = []
    for rank, micro_batches in enumerate(case.images):
        batches = []
        for index, counts in enumerate(micro_batches):
            prompts = []
            for number, count in enumerate(counts):
                pictures = [picture(56 + 28 * (step % 2), 56) for step in range(count)]
                question = f"What is {rank} + {index}{number}?"
                prompts.append(encode(kit, processor, [message("user", *pictures, question)]))
            batches.append(Batch(tuple(groups(prompts, [LENGTHS] * len(prompts)))))
        ranks.append(batches)
    return ranks


def one_process(case: Case) -> list[Step]:
    """Make the steps of a case without DeepSpeed."""
    actor = _actor(case)
    batches = [batch for rank in samples_of(case) for batch in rank]
    optimizer = torch.optim.AdamW([value for value in actor.model.parameters() if value.requires_grad], **case.adam)
    steps = []
    actor.train()
    for way in case.ways:
        optimizer.zero_grad(set_to_none=False)
        for batch in batches:
            loss_of(actor, batch, way=way).backward()
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
            for name, value in actor.model.named_parameters()
            if value.requires_grad
        }
        optimizer.step()
        steps.append(Step(gradients=gradients, weights=_copy(actor.model.state_dict())))
    return steps


def loss_of(actor: KitActor, batch: Batch, *, way: Way) -> torch.Tensor:
    """Return the weighted sum of the log-probs of a batch's responses."""
    actor.packing_samples, actor.share_prefix = way != "padded", way == "shared"
    given = batch.padded("left")
    log_probs = actor(
        given.sequences, given.action_mask, attention_mask=given.attention_mask, media=given.media
    )  # (B, T - 1)
    weights = torch.zeros_like(log_probs)
    for row, values in enumerate(batch.weights):
        weights[row, given.action_mask[row].bool()] = values.float()
    return (log_probs * weights).sum() / 10


def start(cases: Sequence[Case], folder: Path) -> list[subprocess.Popen]:
    """Start the two processes; `results` waits for them."""
    (folder / "cases.pickle").write_bytes(pickle.dumps(list(cases)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    processes = []
    for rank in range(RANKS):
        environment = {**os.environ, **launched, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, "-m", "helpers.two_ranks", str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return processes


def results(processes: Sequence[subprocess.Popen], folder: Path, *, seconds: float) -> Iterator[list[Step]]:
    """Yield the steps of each case; fails with the end of the ranks' output if one of them does."""
    try:
        codes = [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in range(RANKS))
    assert codes == [0] * RANKS, logs
    for number in range(len(pickle.loads((folder / "cases.pickle").read_bytes()))):
        yield torch.load(folder / f"case{number}.pt", weights_only=False)


def _two_processes(case: Case, *, rank: int) -> list[Step]:
    """Make the steps of a case as one of the ranks."""
    from deepspeed.utils import safe_get_full_grad

    from lmm_r1.trainer.strategy import whole_state_dict

    strategy, actor = _prepared(case)
    engine = actor.model
    steps = []
    engine.train()
    batches = samples_of(case)[rank]
    for way in case.ways:
        for batch in batches:
            # DeepSpeed takes the mean over micro-batches and ranks of what is a sum here.
            loss = loss_of(actor, batch, way=way) * len(batches) * RANKS
            strategy.backward(loss, actor, None)
            if engine.is_gradient_accumulation_boundary():
                trained = {name: value for name, value in engine.module.named_parameters() if value.requires_grad}
                gradients = {name: safe_get_full_grad(value) for name, value in trained.items()}
            strategy.optimizer_step(None, actor, None)
        weights = whole_state_dict(engine)
        steps.append(Step(gradients=_copy(gradients), weights=_copy(weights or {})))
    return steps


def _prepared(case: Case) -> tuple[Any, KitActor]:
    from lmm_r1 import dotted
    from lmm_r1.config import SFTConfig, to_openrlhf_args
    from lmm_r1.trainer.strategy import KitStrategy, make_strategy

    class NothingPersists(KitStrategy):
        """Shards weights of every size, of which ZeRO-3 would keep the small ones whole on every rank."""

        def get_ds_train_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            config = super().get_ds_train_config(*args, **kwargs)
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
            return config

    settings = {
        "train.batch_size": RANKS * len(case.images[0]),
        "train.micro_batch_size": 1,
        "ds.zero_stage": case.stage,
        "ds.param_dtype": "fp32",
        "max_norm": 0.0,
    }
    strategy = make_strategy(to_openrlhf_args(dotted.replace(SFTConfig(), settings)))
    if not case.keep_small_weights:
        strategy.__class__ = NothingPersists
    strategy.setup_distributed()
    actor = _actor(case, ds_config=strategy.get_ds_train_config())
    optimizer = {
        "optim": "adam",
        "muon": {},
        "adam": case.adam,
        "lr_scheduler": "constant",
        "lr_warmup_ratio": 0.0,
        "max_norm": 0.0,
        "scheduler_steps": 100,
    }
    return strategy, strategy.prepare((actor, optimizer))[0]


def _actor(case: Case, **settings: Any) -> KitActor:
    actor = make_actor(case.folder, packing_samples=True, share_prefix=True, **case.settings, **settings)
    generator = torch.Generator().manual_seed(0)
    for layer in adapted_layers(actor.model).values():
        # Both factors: one of them would be zero, and no gradient would reach the other.
        for factor in layer_weights(layer)[1:]:
            torch.nn.init.normal_(factor, std=0.1, generator=generator)
    if case.checkpointing is not None:
        actor.gradient_checkpointing_enable(case.checkpointing)
    return actor


def _copy(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


class LateGather:
    """A gather whose output is there once it has been waited for, and not before."""

    def __init__(self, output: torch.Tensor, gathered: torch.Tensor) -> None:
        self._output = output
        self._gathered: torch.Tensor | None = gathered

    def wait(self) -> None:
        if self._gathered is not None:
            self._output.copy_(self._gathered)
            self._gathered = None


def gather_late() -> None:
    """Let what is gathered in the background arrive as late as it can, for what reads it too early to read NaN."""
    backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
    gather = backend.all_gather_into_tensor

    def late(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> LateGather | None:
        if not async_op:
            return gather(self, output_tensor, input_tensor, group=group)
        gathered = torch.empty_like(output_tensor)
        gather(self, gathered, input_tensor, group=group)
        output_tensor.fill_(torch.nan)
        return LateGather(output_tensor, gathered)

    backend.all_gather_into_tensor = late


def main(folder: Path) -> None:
    from lmm_r1 import cpu

    cpu.prepare_process()
    gather_late()
    rank = int(os.environ["RANK"])
    for number, case in enumerate(pickle.loads((folder / "cases.pickle").read_bytes())):
        steps = _two_processes(case, rank=rank)
        if rank == 0:
            torch.save(steps, folder / f"case{number}.pt")
        # stdout is a log, for whoever looks for the case that failed
        print(f"case {number} done", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # The cases were pickled by the test, under this module's name there.
    from helpers import two_ranks

    two_ranks.main(Path(sys.argv[1]))
