"""Supervised sessions without processes: a strategy in the place of DeepSpeed's, and models that are tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from helpers.played_updates import PlayedEngine, PlayedStrategy
from torch.distributed.device_mesh import init_device_mesh

from lmm_r1 import dotted
from lmm_r1.config import SupervisedConfig
from lmm_r1.lmm_kits import Checkpoint, LmmKit
from lmm_r1.models.packed.packing import ModelSample, stacked
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Trackers
from lmm_r1.supervised.samples import SFTSample
from lmm_r1.train.start import Frame
from lmm_r1.train.stopping import StopRequests
from lmm_r1.train.update import Step, update

ConfigT = TypeVar("ConfigT")


def configured(config_class: type[ConfigT], **flags: object) -> ConfigT:
    """Return a command's settings with these flags: `train__batch_size` is `--train.batch_size`."""
    return dotted.replace(config_class(), {name.replace("__", "."): value for name, value in flags.items()})


def session_of(
    config: SupervisedConfig,
    strategy: Any,
    *,
    kit: LmmKit | None = None,
    checkpoint: Checkpoint | None = None,
    folder: RunFolder | None = None,
    steps: int = 1,
) -> Frame:
    """Return the session of a strategy, without a folder unless one is given.

    Args:
        kit: of a checkpoint that has no files, and no processor.
    """
    return Frame(
        config=config,
        checkpoint=checkpoint or checkpoint_of(kit),
        strategy=strategy,
        folder=folder,
        stops=StopRequests(),
        trackers=Trackers(),
        steps=steps,
    )


def checkpoint_of(kit: Any) -> Checkpoint:
    """Return the checkpoint of a kit that has no files, and no processor."""
    checkpoint = Checkpoint("m")
    # Where its parts are kept once they are loaded.
    vars(checkpoint).update(kit=kit, processor=None)
    return checkpoint


def begun(
    config: SupervisedConfig, *, checkpoint: Checkpoint | None = None, folder: RunFolder | None = None, steps: int
) -> Frame:
    """Return the session of a run under DeepSpeed, in the processes that this one is of."""
    from lmm_r1.host.strategy import make_strategy

    strategy = make_strategy(config)
    strategy.setup_distributed()
    checkpoint = checkpoint or Checkpoint(config.model.model_name_or_path)
    return session_of(config, strategy, checkpoint=checkpoint, folder=folder, steps=steps)


def run_of(run_class: Any, session: Frame, rows: Any) -> Any:
    """Return the run of a session on rows, of which the first fits."""
    checkpoint = session.checkpoint
    encode = run_class.encoder.of(session.config, kit=checkpoint.kit, processor=checkpoint.processor)
    return run_class.of(session, rows=rows, encode=encode, filler=encode(rows[0]).filler)


def updated(run: Any, batches: Sequence[Any]) -> Step:
    """Make an update of a run on batches."""
    weight = run.config.model.aux_loss_coef
    return update(run.strategy, run.actor, batches, counts=run.counts, terms=run.terms, aux_weight=weight)


class AccumulatingStrategy(PlayedStrategy):
    """Adds up a step's gradients on one rank, as DeepSpeed does."""

    def __init__(self) -> None:
        super().__init__()
        self.ds_device_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.steps = 0

    def is_rank_0(self) -> bool:
        return True

    def optimizer_step(self, optimizer: object, model: object, scheduler: object, *, name: str) -> None:
        self.steps += 1


POLICY, REFERENCE = [0.0, -1.0, -2.0, -4.0], [0.0, -1.5, -2.0, -3.0]
"""Log-probs of the tokens 0 to 3: their log-ratios are 0, 0.5, 0 and -1."""


class TableActor(PlayedEngine):
    """A model whose log-prob of a loss token is its entry in a table, whatever came before."""

    def __init__(self, table: list[float]) -> None:
        super().__init__()
        self.table = torch.tensor(table, requires_grad=True)
        self.modes: list[str] = []

    def __call__(self, samples: list[ModelSample], **arguments: object) -> torch.Tensor:
        return stacked(samples, lambda sample: self.table[sample.token_ids[1:]] * sample.loss_mask)

    def eval(self) -> None:
        self.modes.append("eval")

    def train(self) -> None:
        self.modes.append("train")


class TableReference:
    """A reference whose log-probs stand in a table; it counts the conversations of each batch that it is asked for."""

    def __init__(self, table: list[float] | None = None) -> None:
        self.table = torch.tensor(REFERENCE if table is None else table)
        self.asked: list[int] = []

    def log_probs(self, samples: list[ModelSample]) -> torch.Tensor:
        self.asked.append(len(samples))
        return stacked(samples, lambda sample: self.table[sample.token_ids[1:]] * sample.loss_mask)


def responding(ids: list[int]) -> SFTSample:
    """A response behind a prompt of the token 0."""
    return SFTSample(token_ids=[0, *ids], loss_mask=[False, *[True] * len(ids)], media=None)
