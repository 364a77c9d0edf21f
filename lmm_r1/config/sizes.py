"""Sizes that the flags leave open: OpenRLHF's at most, and of fewer rows what makes some steps of every pass over them."""

import math
from collections.abc import Sequence
from typing import TypeVar

from lmm_r1 import dotted
from lmm_r1.config.checks import check_batches, model_gpus
from lmm_r1.config.ppo import GROUP_ESTIMATORS, PPOConfig
from lmm_r1.config.supervised import SupervisedConfig
from lmm_r1.errors import UserError

Supervised = TypeVar("Supervised", bound=SupervisedConfig)

# OpenRLHF's defaults.
MOST_PROMPTS = 1024
MOST_SAMPLES = 128
MOST_IN_A_PASS = 8
# Of a group that is compared within itself.
GROUP_SIZE = 8
# Steps that a pass over the rows has at least.
FEWEST_STEPS = 5
# Whatever divides them is the same on one to eight GPUs.
_EIGHTS = 8


def group_size(config: PPOConfig) -> int:
    """Return `--rollout.n_samples_per_prompt`, or what it is for the estimator."""
    compares = config.algo.advantage.estimator in GROUP_ESTIMATORS or config.algo.dynamic_filtering_enable
    return config.rollout.n_samples_per_prompt or (GROUP_SIZE if compares else 1)


def sized_ppo(config: PPOConfig, *, rows: int) -> tuple[PPOConfig, str | None]:
    """Return the settings with the batches that the prompts allow, and the line that says so, None where all were given.

    Raises:
        UserError: there are too few prompts for the run's processes, or the sizes contradict one another.
    """
    rollout, train = config.rollout, config.train
    prompts = rollout.batch_size or _prompts_of_a_step(config, rows=rows)
    samples = prompts * rollout.n_samples_per_prompt
    batch = train.batch_size or _multiple(min(MOST_SAMPLES, samples), of=[_processes(config)])
    sizes: dict[str, object] = {
        "rollout.batch_size": prompts,
        "rollout.vllm_generate_batch_size": rollout.vllm_generate_batch_size or prompts,
        "train.batch_size": batch,
    }
    sized = dotted.replace(config, sizes)
    check_batches(sized)
    if rollout.batch_size and train.batch_size:
        return sized, None
    return sized, (
        f"sizes for {rows} prompts: --rollout.batch_size {prompts} x --rollout.n_samples_per_prompt "
        f"{rollout.n_samples_per_prompt} a step, --train.batch_size {batch} an update"
    )


def sized_supervised(config: Supervised, *, rows: int | None, processes: int) -> tuple[Supervised, str | None]:
    """Return the settings with the batches that the rows allow, and the line that says so, None where they were given.

    Args:
        rows: None stands for as many as it takes.
        processes: of the whole run.

    Raises:
        UserError: there are too few rows for the run's processes, or those cannot share an update.
    """
    train = config.train
    # Processes that get the same samples count as one.
    ranks = max(1, processes // (config.ds.tensor_parallel_size * config.ds.ulysses_size))
    batch = train.batch_size or _rows_of_an_update(config, rows=rows, ranks=ranks)
    if batch % ranks:
        raise UserError(f"--train.batch_size {batch} must be a multiple of the {ranks} processes that share it")
    micro = train.micro_batch_size or math.gcd(MOST_IN_A_PASS, batch // ranks)
    sized = dotted.replace(config, {"train.batch_size": batch, "train.micro_batch_size": micro})
    if train.batch_size:
        return sized, None
    return (
        sized,
        f"sizes for {rows} rows: --train.batch_size {batch} an update, --train.micro_batch_size {micro} a pass",
    )


def _prompts_of_a_step(config: PPOConfig, *, rows: int) -> int:
    group, processes = config.rollout.n_samples_per_prompt, _processes(config)
    fewest = processes // math.gcd(processes, group)
    if rows < fewest:
        raise UserError(
            f"--data.prompt_dataset {config.data.prompt_dataset} gives {rows} prompts; {processes} processes that share a "
            f"step's samples, {group} to a prompt, need {fewest} at least: add rows, or take fewer GPUs"
        )
    update = config.train.batch_size or MOST_SAMPLES
    whole_updates = math.lcm(fewest, update // math.gcd(update, group))
    wanted = min(MOST_PROMPTS, rows // FEWEST_STEPS)
    if config.train.batch_size:
        wanted = max(wanted, whole_updates)
    return _multiple(wanted, of=[whole_updates, math.lcm(fewest, _EIGHTS), fewest])


def _rows_of_an_update(config: SupervisedConfig, *, rows: int | None, ranks: int) -> int:
    if rows is None:
        return _multiple(MOST_SAMPLES, of=[ranks])
    if rows < ranks:
        raise UserError(
            f"--data.dataset {config.data.dataset} gives {rows} rows for {ranks} processes, of which each needs one for an "
            "update; add rows, or take fewer GPUs"
        )
    # Of fewer than two rows there is nothing to compare.
    wanted = min(MOST_SAMPLES, max(rows // FEWEST_STEPS, 2), rows)
    return _multiple(wanted, of=[math.lcm(ranks, _EIGHTS), ranks])


def _multiple(wanted: int, *, of: Sequence[int]) -> int:
    """Return the largest multiple, not above what is wanted, of the first number that has one, else the last number."""
    number = next((number for number in of if number <= wanted), of[-1])
    return max(number, wanted - wanted % number)


def _processes(config: PPOConfig) -> int:
    """Return the number by which a step's samples must be divided for each of the run's models."""
    shared = config.ds.tensor_parallel_size * config.ds.ulysses_size
    return math.lcm(*(max(1, gpus // shared) for gpus in model_gpus(config).values()))
