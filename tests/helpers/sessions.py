"""Supervised runs between their start and their end, without a command around them."""

from typing import Any, TypeVar

from lmm_r1 import dotted
from lmm_r1.config import SupervisedConfig
from lmm_r1.lifecycle.stopping import StopRequests
from lmm_r1.lmm_kits import Checkpoint, LmmKit
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Trackers
from lmm_r1.supervised.models import SupervisedSession

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
) -> SupervisedSession:
    """Return the session of a strategy, without a folder unless one is given.

    Args:
        kit: of a checkpoint that has no files, and no processor.
    """
    return SupervisedSession(
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
) -> SupervisedSession:
    """Return the session of a run under DeepSpeed, in the processes that this one is of."""
    from lmm_r1.host.strategy import make_strategy

    strategy = make_strategy(config)
    strategy.setup_distributed()
    checkpoint = checkpoint or Checkpoint(config.model.model_name_or_path)
    return session_of(config, strategy, checkpoint=checkpoint, folder=folder, steps=steps)


def run_of(run_class: Any, session: SupervisedSession, rows: Any) -> Any:
    """Return the run of a session on rows, of which the first fits."""
    checkpoint = session.checkpoint
    encode = run_class.encoder.of(session.config, kit=checkpoint.kit, processor=checkpoint.processor)
    learned = run_class.learned(rows)
    return run_class.of(session, rows=learned, encode=encode, filler=encode(next(iter(learned))).filler)
