"""`lmm-r1 plan`: what a run will take of the memory of GPUs and machines, told before anything is loaded."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
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
    resolve_ppo,
    sized_supervised,
)
from lmm_r1.config.hardware import (
    Offer,
    asked_gpus,
    check_machine,
    check_offered,
    offered_gpus,
    shared_counts,
)
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
from lmm_r1.lmm_kits.registry import released_configs, released_folder

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
_MODELS = tuple(f"{group}.model_name_or_path" for group in ("actor", "critic", "reward", "model", "ref", "teacher"))
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
    settings = _for_machine(dotted.replace(_without_machine(given, PPOConfig), unread), given)

    def ask() -> Offer:
        return offered_gpus() if given.num_gpus is None else Offer(per_node=(given.num_gpus,), joined=False)

    config = resolve_ppo(_released(settings), ask=ask)
    if given.num_gpus is not None:
        check_offered(config, ask())
    elif given.gpu_memory_gib is None:
        # What the run asks of this machine, it would refuse.
        check_machine(config)

    def make(changed: PPOConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.ppo_plan import plan_ppo

        return plan_ppo(changed, machine, image=image)

    def share_gpus(changed: PPOConfig) -> dict[str, object]:
        return shared_counts(changed, ask=ask)

    _print(config, given, path=config.actor.model_name_or_path, make=make, share_gpus=share_gpus)


def _plan_supervised(given: PlanSupervisedConfig, config_class: type[Any]) -> None:
    settings = _for_machine(_without_machine(given, config_class), given)
    unread: dict[str, object] = {} if settings.data.dataset else {"data.dataset": NOT_READ}
    if isinstance(settings, PRMConfig) and not settings.model.placeholder_token:
        unread["model.placeholder_token"] = NOT_READ
    config = resolve(_released(dotted.replace(settings, unread)))
    config, _ = sized_supervised(config, rows=None, processes=given.num_gpus)

    def make(changed: SupervisedConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.run_plan import plan_supervised

        return plan_supervised(changed, machine, processes=given.num_gpus, per_machine=given.num_gpus, image=image)

    _print(config, given, path=config.model.model_name_or_path, make=make, share_gpus=shared_counts)


def _print(
    config: Config,
    given: PlanMachineConfig,
    *,
    path: str | None,
    make: Callable[[Config, Machine, PlanImage | None], Plan],
    share_gpus: Callable[[PPOConfig], Mapping[str, object]],
) -> None:
    """Print the plan of a run on the machine that was named; raises UserError where it does not fit.

    Args:
        path: of the trained model.
        make: makes the plan of settings on a machine, with an image in each prompt or without.
        share_gpus: returns the counts with which models and engines share the machine's GPUs.
    """
    prepare_training(config)
    from rich.console import Console

    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.planning.choices import choices_line, chosen, filled
    from lmm_r1.planning.machine import machine_of
    from lmm_r1.planning.plan import print_plan
    from lmm_r1.planning.run_plan import judge, plan_image, unpredictable_refused

    assert path is not None, "required by resolve"
    machine = machine_of(gpu_gib=given.gpu_memory_gib, host_gib=given.host_memory_gib)
    checkpoint = Checkpoint(path, trust_remote_code=config.train.trust_remote_code)
    image = plan_image(checkpoint, pixels=given.image_pixels) if given.image_pixels else None

    def replan(changed: Config) -> Plan:
        return make(changed, machine, image)

    with unpredictable_refused(path):
        found, plan = chosen(config, replan=replan, share_gpus=share_gpus)
        print_plan(plan, Console(highlight=False))
        if isinstance(found, PPOConfig) and machine.gpu_bytes is not None:
            gpus = asked_gpus(found)
            print(f"GPUs: {sum(gpus.values())} ({', '.join(f'{who} {count}' for who, count in gpus.items())})")
        if line := choices_line(config, filled(found, plan)):
            print(line)
        judge(found, plan, replan=replan)


def _for_machine(settings: Config, given: PlanMachineConfig) -> Config:
    """Return the settings in the precision of the GPUs that were named, whatever this machine has."""
    if given.gpu_memory_gib and settings.ds.param_dtype is None:
        return dotted.replace(settings, {"ds.param_dtype": "bf16"})
    return settings


def _released(settings: Config) -> Config:
    """Return the settings with folders in the place of names of released checkpoints: their configs, without a download."""
    names = {flag: name for flag in _MODELS if (name := _path(settings, flag)) in released_configs()}
    return dotted.replace(settings, {flag: str(released_folder(name)) for flag, name in names.items()})


def _path(settings: Config, flag: str) -> str:
    """Return the checkpoint that a flag names; "" where there is none of the name, or the flag is another command's."""
    value = dotted.get(settings, flag) if flag in dotted.leaf_types(type(settings)) else None
    return value if isinstance(value, str) and not Path(value).is_dir() else ""


def _without_machine(given: Any, config_class: type[Config]) -> Config:
    """Return the settings of the planned command alone."""
    names = (field.name for field in dataclasses.fields(config_class))
    return config_class(**{name: getattr(given, name) for name in names})


if __name__ == "__main__":
    run_command(main)
