"""`lmm-r1 plan`: what a run will take of the memory of GPUs and machines, told before anything is loaded."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmm_r1 import dotted
from lmm_r1.cli import run_command
from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.cli.training import prepare_training
from lmm_r1.config import (
    Config,
    DPOConfig,
    KDConfig,
    KTOConfig,
    PPOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
    resolve,
    sized_supervised,
)
from lmm_r1.config.gpu_counts import asked_gpus, check_machine
from lmm_r1.config.plan import (
    PlanDPOConfig,
    PlanKDConfig,
    PlanKTOConfig,
    PlanMachineConfig,
    PlanPPOConfig,
    PlanPRMConfig,
    PlanRMConfig,
    PlanSFTConfig,
    PlanSupervisedConfig,
)

if TYPE_CHECKING:
    from lmm_r1.planning.estimates import PlanImage
    from lmm_r1.planning.machine import Machine
    from lmm_r1.planning.plan import Plan

CONFIG = PlanPPOConfig
PROG = "lmm-r1 plan"
DESCRIPTION = (
    "Predict the memory of a run from its settings alone. `lmm-r1 plan train_sft ...` takes the flags of train_sft, "
    "`lmm-r1 plan train_dpo ...` and so on those of the others, `lmm-r1 plan ...` those of train_ppo_ray."
)
# Nothing is read of rows, and nobody is asked for rewards.
NOT_READ = "not-read"
# What each supervised command is planned by, and its own settings.
SUPERVISED: dict[str, tuple[type[Any], type[Any]]] = {
    "train_sft": (PlanSFTConfig, SFTConfig),
    "train_kd": (PlanKDConfig, KDConfig),
    "train_dpo": (PlanDPOConfig, DPOConfig),
    "train_kto": (PlanKTOConfig, KTOConfig),
    "train_prm": (PlanPRMConfig, PRMConfig),
    "train_rm": (PlanRMConfig, RMConfig),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; the process ends with code 1 where the run cannot fit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments and arguments[0] in ("train_ppo_ray", *SUPERVISED) else "train_ppo_ray"
    prog = PROG if command == "train_ppo_ray" else f"{PROG} {command}"
    if command in SUPERVISED:
        planned_by, config_class = SUPERVISED[command]
        supervised = parse(planned_by, arguments, prog=prog, description=DESCRIPTION, first_help=planned_by.first_help)
        with user_errors(PROG):
            _plan_supervised(supervised, config_class)
    else:
        config = parse(
            PlanPPOConfig, arguments, prog=prog, description=DESCRIPTION, first_help=PlanPPOConfig.first_help
        )
        with user_errors(PROG):
            _plan_ppo(config)


def _plan_ppo(given: PlanPPOConfig) -> None:
    unread: dict[str, object] = {}
    if not given.data.prompt_dataset:
        unread["data.prompt_dataset"] = NOT_READ
    config = resolve(dotted.replace(_without_machine(given, PPOConfig), unread))
    if given.gpu_memory_gib is None:
        # What the run asks of this machine, it would refuse.
        check_machine(config)

    def make(changed: PPOConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.ppo_plan import plan_ppo

        return plan_ppo(changed, machine, image=image)

    _print(config, given, path=config.actor.model_name_or_path, make=make, gpus=asked_gpus(config))


def _plan_supervised(given: PlanSupervisedConfig, config_class: type[Any]) -> None:
    settings = _without_machine(given, config_class)
    unread: dict[str, object] = {} if settings.data.dataset else {"data.dataset": NOT_READ}
    if isinstance(settings, PRMConfig) and not settings.model.placeholder_token:
        unread["model.placeholder_token"] = NOT_READ
    config = resolve(dotted.replace(settings, unread))
    config, _ = sized_supervised(config, rows=None, processes=given.num_gpus)

    def make(changed: SupervisedConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.run_plan import plan_supervised

        return plan_supervised(changed, machine, processes=given.num_gpus, per_machine=given.num_gpus, image=image)

    _print(config, given, path=config.model.model_name_or_path, make=make)


def _print(
    config: Config,
    given: PlanMachineConfig,
    *,
    path: str | None,
    make: Callable[[Config, Machine, PlanImage | None], Plan],
    gpus: Mapping[str, int] | None = None,
) -> None:
    """Print the plan of a run on the machine that was named; raises UserError where it does not fit.

    Args:
        path: of the trained model.
        make: makes the plan of settings on a machine, with an image in each prompt or without.
        gpus: how many those who share some ask for; None where a launcher says it.
    """
    prepare_training(config)
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
        if gpus is not None and machine.gpu_bytes is not None:
            print(f"GPUs: {sum(gpus.values())} ({', '.join(f'{who} {count}' for who, count in gpus.items())})")
        judge(config, plan, replan=lambda changed: make(changed, machine, image))


def _without_machine(given: Any, config_class: type[Config]) -> Config:
    """Return the settings of the planned command alone."""
    names = (field.name for field in dataclasses.fields(config_class))
    return config_class(**{name: getattr(given, name) for name in names})


if __name__ == "__main__":
    run_command(main)
