"""`lmm-r1 plan`: what a run will take of the memory of GPUs and machines, told before anything is loaded."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lmm_r1 import dotted
from lmm_r1.cli.arguments import parse, prepare_training, user_errors
from lmm_r1.config import Config, DPOConfig, KDConfig, PPOConfig, RMConfig, SFTConfig, resolve
from lmm_r1.config.plan import (
    PlanDPOConfig,
    PlanKDConfig,
    PlanMachineConfig,
    PlanPPOConfig,
    PlanRMConfig,
    PlanSFTConfig,
)

if TYPE_CHECKING:
    from lmm_r1.planning.estimates import PlanImage
    from lmm_r1.planning.machine import Machine
    from lmm_r1.planning.plan import Plan

PROG = "lmm-r1 plan"
DESCRIPTION = (
    "Predict the memory of a run from its settings alone. `lmm-r1 plan train_sft ...` takes the flags of train_sft, "
    "`lmm-r1 plan train_kd ...`, `... train_dpo` and `... train_rm` theirs, `lmm-r1 plan ...` those of train_ppo_ray."
)
# Nothing is read of rows, and nobody is asked for rewards.
NOT_READ = "not-read"
COMMANDS = ("train_ppo_ray", "train_sft", "train_kd", "train_dpo", "train_rm")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; the process ends with code 1 where the run cannot fit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "train_ppo_ray"
    prog = PROG if command == "train_ppo_ray" else f"{PROG} {command}"
    if command == "train_sft":
        supervised = parse(PlanSFTConfig, arguments, prog=prog, description=DESCRIPTION)
        with user_errors(PROG):
            _plan_sft(supervised)
    elif command == "train_kd":
        distilled = parse(PlanKDConfig, arguments, prog=prog, description=DESCRIPTION)
        with user_errors(PROG):
            _plan_kd(distilled)
    elif command == "train_dpo":
        pairs = parse(PlanDPOConfig, arguments, prog=prog, description=DESCRIPTION)
        with user_errors(PROG):
            _plan_dpo(pairs)
    elif command == "train_rm":
        rewards = parse(PlanRMConfig, arguments, prog=prog, description=DESCRIPTION)
        with user_errors(PROG):
            _plan_rm(rewards)
    else:
        config = parse(PlanPPOConfig, arguments, prog=prog, description=DESCRIPTION)
        with user_errors(PROG):
            _plan_ppo(config)


def _plan_ppo(given: PlanPPOConfig) -> None:
    unread: dict[str, object] = {}
    if not given.data.prompt_dataset:
        unread["data.prompt_dataset"] = NOT_READ
    if not (given.reward.remote_url or given.reward.model_name_or_path):
        unread["reward.remote_url"] = f"http://{NOT_READ}"
    config = resolve(dotted.replace(_without_machine(given, PPOConfig), unread))

    def make(changed: PPOConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.ppo_plan import plan_ppo

        return plan_ppo(changed, machine, image=image)

    _print(config, given, path=config.actor.model_name_or_path, make=make)


def _plan_sft(given: PlanSFTConfig) -> None:
    unread: dict[str, object] = {} if given.data.dataset else {"data.dataset": NOT_READ}
    config = resolve(dotted.replace(_without_machine(given, SFTConfig), unread))

    def make(changed: SFTConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.sft_plan import plan_sft

        return plan_sft(changed, machine, processes=given.num_gpus, per_machine=given.num_gpus, image=image)

    _print(config, given, path=config.model.model_name_or_path, make=make)


def _plan_kd(given: PlanKDConfig) -> None:
    unread: dict[str, object] = {} if given.data.dataset else {"data.dataset": NOT_READ}
    config = resolve(dotted.replace(_without_machine(given, KDConfig), unread))

    def make(changed: KDConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.kd_plan import plan_kd

        return plan_kd(changed, machine, processes=given.num_gpus, per_machine=given.num_gpus, image=image)

    _print(config, given, path=config.model.model_name_or_path, make=make)


def _plan_dpo(given: PlanDPOConfig) -> None:
    unread: dict[str, object] = {} if given.data.dataset else {"data.dataset": NOT_READ}
    config = resolve(dotted.replace(_without_machine(given, DPOConfig), unread))

    def make(changed: DPOConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.dpo_plan import plan_dpo

        return plan_dpo(changed, machine, processes=given.num_gpus, per_machine=given.num_gpus, image=image)

    _print(config, given, path=config.model.model_name_or_path, make=make)


def _plan_rm(given: PlanRMConfig) -> None:
    unread: dict[str, object] = {} if given.data.dataset else {"data.dataset": NOT_READ}
    config = resolve(dotted.replace(_without_machine(given, RMConfig), unread))

    def make(changed: RMConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.dpo_plan import plan_rm

        return plan_rm(changed, machine, processes=given.num_gpus, per_machine=given.num_gpus, image=image)

    _print(config, given, path=config.model.model_name_or_path, make=make)


def _print(
    config: Config,
    given: PlanMachineConfig,
    *,
    path: str | None,
    make: Callable[[Config, Machine, PlanImage | None], Plan],
) -> None:
    """Print the plan of a run on the machine that was named; raises UserError where it does not fit.

    Args:
        path: of the trained model.
        make: makes the plan of settings on a machine, with an image in each prompt or without.
    """
    prepare_training(config, model=path)
    from rich.console import Console

    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.planning.machine import machine_of
    from lmm_r1.planning.run_plan import judge, plan_image, unpredictable_refused
    from lmm_r1.planning.table import print_plan

    assert path is not None, "required by resolve"
    machine = machine_of(gpu_gib=given.gpu_memory_gib, host_gib=given.host_memory_gib)
    checkpoint = Checkpoint(path, trust_remote_code=config.train.trust_remote_code)
    image = plan_image(checkpoint, pixels=given.image_pixels) if given.image_pixels else None
    with unpredictable_refused(path):
        plan = make(config, machine, image)
        print_plan(plan, Console(highlight=False))
        judge(config, plan, replan=lambda changed: make(changed, machine, image))


def _without_machine(given: Config, config_class: type[Config]) -> Config:
    """Return the settings of the planned command alone."""
    names = (field.name for field in dataclasses.fields(config_class))
    return config_class(**{name: getattr(given, name) for name in names})


if __name__ == "__main__":
    main()
