"""What the training commands share: they read flags, resolve settings and prepare the process."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lmm_r1.cli import user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config import Config, PPOConfig, SupervisedConfig, model_path, resolve
from lmm_r1.config.hardware import check_machine, supervised_processes
from lmm_r1.config.rewards import GivenFunctions
from lmm_r1.records.metrics import NO_CALLBACKS, Callbacks
from lmm_r1.train.first_checks import check_first


@contextmanager
def training(
    config_class: type[Config], argv: Sequence[str] | None, *, prog: str, description: str
) -> Iterator[Config]:
    """Yield the resolved settings in a process that is ready to train; errors of users end the process with a sentence."""
    config = parse(config_class, argv, prog=prog, description=description, first_help=config_class.first_help)
    with user_errors(prog):
        config = resolve(config)
        prepare_training(config)
        yield config


def train_supervised(
    run: str, config_class: type[Config], argv: Sequence[str] | None = None, *, prog: str, description: str
) -> None:
    """Train as the flags say, in one process for each visible GPU unless a launcher has started several.

    Args:
        run: the class of the run, as MODULE:CLASS.
    """
    with training(config_class, argv, prog=prog, description=description) as config:
        assert isinstance(config, SupervisedConfig), "RL starts its own workers"
        if "RANK" in os.environ or (count := supervised_processes(config)) == 1:
            train_run(run, config)
        else:
            from lmm_r1.cli.ranks import train_in_ranks

            train_in_ranks(run, config, count=count, prog=prog)


def train_run(run: str, config: SupervisedConfig, *, callbacks: Callbacks = NO_CALLBACKS) -> None:
    """Train in this process."""
    from lmm_r1.supervised.start import train
    from lmm_r1.tools.planning.choices import planned

    module, _, name = run.partition(":")
    train(getattr(importlib.import_module(module), name), config, plan=planned, callbacks=callbacks)


def prepare_training(
    config: PPOConfig | SupervisedConfig, *, reward: GivenFunctions | None = None, dry: bool = False
) -> None:
    """Prepare this process for the training stack; refusals come before the stack is loaded.

    Args:
        reward: the reward functions that were given to this process instead of in a file.
        dry: nothing is trained, so that rows, folder and machine are not checked.
    """
    if isinstance(config, PPOConfig) and not dry:
        check_machine(config)
    from lmm_r1 import cpu
    from lmm_r1.lmm_kits.registry import kit_name_of
    from lmm_r1.records.tracker_backends import check_trackers

    check_trackers(config.logger)
    if config.ckpt.push_to_hub is not None:
        from lmm_r1.hub import check_uploadable

        check_uploadable(config.ckpt.push_to_hub, flag="--ckpt.push_to_hub")
    # A launcher starts several processes, of which one checks.
    if not dry and os.environ.get("RANK", "0") == "0":
        check_first(config, reward=reward)
    kit_name_of(model_path(config), trust_remote_code=config.train.trust_remote_code)
    cpu.prepare_process()
