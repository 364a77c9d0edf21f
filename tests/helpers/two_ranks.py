"""Optimizer steps of two DeepSpeed processes over gloo, and the same steps of one process that sees all samples."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from helpers.conversations import clip, message, picture
from helpers.double_precision import DoublePrecision
from helpers.launched_ranks import constant_adam
from helpers.packed_batches import Batch, groups
from helpers.tiny_models import encode, make_actor

from lmm_r1.lmm_kits import get_kit
from lmm_r1.models import loading
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapted_layers, layer_weights


@contextmanager
def in_double_precision() -> Iterator[None]:
    """Let models be loaded as `param_dtype="fp64"`, and whatever would be in fp32, be it DeepSpeed's, be in fp64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.dict(loading.DTYPES, {"fp64": torch.float64}), DoublePrecision():
            yield
    finally:
        torch.set_default_dtype(default)


RANKS = 2
Way = Literal["padded", "packed", "shared"]
WAYS: tuple[Way, ...] = ("padded", "packed", "shared")
# Adam without memory whose step is nearly the gradient itself where that is small against 1: errors of gradients show.
ADAM = {"lr": 0.01, "betas": (0.0, 0.0), "eps": 1.0, "weight_decay": 0.0}
# Of the two responses to each prompt, which are a group.
LENGTHS = (4, 7)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, and a step of it in each of several ways."""

    kit: str
    folder: Path
    stage: int
    images: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    """How many images each prompt has: by rank, by micro-batch."""
    videos: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] | None = None
    """How many videos each prompt has behind its images and, in every second prompt, in front of them; None for none."""
    ways: tuple[Way, ...] = WAYS
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the actor: freezing, LoRA."""
    checkpointing: dict[str, Any] | None = None
    trained: bool = True
    """Whether it is trained, or only run as a reference model is."""
    kept_features_gib: float = 0.0
    """What the two processes keep of images; one process makes all features anew."""
    keeps_small_weights: bool = False
    """Whether ZeRO-3 keeps small weights whole on every rank, which are all of a tiny model, or none."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step computed, and what it left behind by the names of parameters."""

    log_probs: torch.Tensor
    """Of the responses' tokens, those of rank 0 first, (K,)."""
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
                pictures = [picture(56 + 28 * (place % 2), 56) for place in range(count)]
                clips = [clip(2 + 2 * place, 56, 84) for place in range(_videos(case, rank, index, number))]
                media = [*clips, *pictures] if number % 2 else [*pictures, *clips]
                question = f"What is {rank} + {index}{number}?"
                prompts.append(encode(kit, processor, [message("user", *media, question)]))
            batches.append(Batch(tuple(groups(prompts, [LENGTHS] * len(prompts)))))
        ranks.append(batches)
    return ranks


def _videos(case: Case, rank: int, micro_batch: int, prompt: int) -> int:
    return 0 if case.videos is None else case.videos[rank][micro_batch][prompt]


def one_process(case: Case) -> list[Step]:
    """Make the steps of a case without DeepSpeed."""
    with in_double_precision():
        return _one_process(case)


def _one_process(case: Case) -> list[Step]:
    actor = _actor(case)
    batches = [batch for rank in samples_of(case) for batch in rank]
    trained = {name: value for name, value in actor.model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(list(trained.values()), **ADAM)
    steps = []
    actor.train(case.trained)
    for way in case.ways:
        optimizer.zero_grad()
        log_probs = []
        for batch in batches:
            values = _log_probs(actor, batch, way=way)
            if case.trained:
                _loss(values, batch).backward()
            log_probs.append(values.detach())
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad.clone()
            for name, value in trained.items()
            if case.trained
        }
        if case.trained:
            optimizer.step()
        steps.append(
            Step(log_probs=torch.cat(log_probs), gradients=gradients, weights=_copy(actor.model.state_dict()))
        )
    return steps


def _two_processes(case: Case) -> list[Step]:
    """Make the steps of a case as one of the ranks."""
    strategy, actor = _prepared(case)
    actor.model.train(case.trained)
    batches = samples_of(case)[dist.get_rank()]
    return [_step(strategy, actor, batches, way=way, trained=case.trained) for way in case.ways]


def _step(strategy: Any, actor: KitActor, batches: Sequence[Batch], *, way: Way, trained: bool) -> Step:
    from deepspeed.utils import safe_get_full_grad

    from lmm_r1.host.models import whole_state_dict

    engine = actor.model
    gradients, log_probs = {}, []
    for number, batch in enumerate(batches, start=1):
        values = _log_probs(actor, batch, way=way, grad=trained)
        log_probs.append(values.detach())
        if not trained:
            continue
        engine.set_gradient_accumulation_boundary(number == len(batches))
        # DeepSpeed takes the mean over ranks of what is a sum here.
        strategy.backward(_loss(values, batch) * RANKS, actor, None)
        if engine.is_gradient_accumulation_boundary():
            parameters = {name: value for name, value in engine.module.named_parameters() if value.requires_grad}
            gradients = {name: safe_get_full_grad(value) for name, value in parameters.items()}
        strategy.optimizer_step(None, actor, None)
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, torch.cat(log_probs))
    weights = whole_state_dict(engine) or {}
    return Step(log_probs=torch.cat(ranks), gradients=_copy(gradients), weights=_copy(weights))


def _prepared(case: Case) -> tuple[Any, KitActor]:
    """Return the strategy and the actor of a case, as the trainers prepare them."""
    from lmm_r1 import dotted
    from lmm_r1.config import SFTConfig
    from lmm_r1.host.strategy import KitStrategy, make_strategy

    class NothingKept(KitStrategy):
        """Shards weights of every size; ZeRO-3 keeps those below 100,000 numbers whole."""

        def get_ds_train_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return _without_kept_weights(super().get_ds_train_config(*args, **kwargs))

        def get_ds_eval_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return _without_kept_weights(super().get_ds_eval_config(*args, **kwargs))

    settings = {
        "train.batch_size": RANKS * len(case.images[0]),
        "train.micro_batch_size": 1,
        "ds.zero_stage": case.stage,
        "ds.param_dtype": "fp32",
        "max_norm": 0.0,
    }
    strategy = make_strategy(dotted.replace(SFTConfig(), settings))
    if not case.keeps_small_weights:
        strategy.__class__ = NothingKept
    strategy.setup_distributed()
    if not case.trained:
        kept = {"image_cache_gib": case.kept_features_gib, "trained": False}
        return strategy, strategy.prepare(_actor(case, ds_config=strategy.get_ds_eval_config(), **kept))
    optimizer = constant_adam(ADAM)
    kept = {"image_cache_gib": case.kept_features_gib}
    return strategy, strategy.prepare((_actor(case, ds_config=strategy.get_ds_train_config(), **kept), optimizer))[0]


def _without_kept_weights(config: dict[str, Any]) -> dict[str, Any]:
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config


def _actor(case: Case, **settings: Any) -> KitActor:
    actor = make_actor(
        case.folder, param_dtype="fp64", packing_samples=True, share_prefix=True, **case.settings, **settings
    )
    generator = torch.Generator().manual_seed(0)
    for layer in adapted_layers(actor.model).values():
        # Both factors: one of them would be zero, and no gradient would reach the other.
        for factor in layer_weights(layer)[1:]:
            torch.nn.init.normal_(factor, std=0.1, generator=generator)
    if case.checkpointing is not None:
        actor.gradient_checkpointing_enable(case.checkpointing)
    return actor


def _log_probs(actor: KitActor, batch: Batch, *, way: Way, grad: bool = True) -> torch.Tensor:
    """Return the log-probs of all responses' tokens, (K,)."""
    actor.packing_samples, actor.share_prefix = way != "padded", way == "shared"
    with torch.set_grad_enabled(grad):
        return actor(batch.for_model)[batch.wanted]


def _loss(log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (log_probs * torch.cat(batch.weights)).sum() / 10


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
    """Let what is gathered in the background arrive as late as it may, so that what reads it too early reads NaN."""
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
    for number, case in enumerate(pickle.loads((folder / "cases.pickle").read_bytes())):
        with in_double_precision():
            steps = _two_processes(case)
        if dist.get_rank() == 0:
            torch.save(steps, folder / f"case{number}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The cases were pickled under this module's name in the test.
    importlib.import_module("helpers.two_ranks").main(Path(sys.argv[1]))
