"""`lmm-r1 plan`: a dry run of a training command, which prints the memory that the run will take."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1 import dotted
from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.training import prepare_training
from lmm_r1.config import (
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
    supervised_processes,
)
from lmm_r1.config.shared import Example, FirstHelp
from lmm_r1.lmm_kits.registry import released_configs, released_folder

if TYPE_CHECKING:
    from lmm_r1.planning.estimates import Machine, PlanImage
    from lmm_r1.planning.plan import Plan

PROG = "lmm-r1 plan"
DESCRIPTION = (
    "Predict the memory of a run from its settings, before anything is loaded. `lmm-r1 plan train_sft ...` takes the "
    "flags of train_sft, and likewise for the other trainers; `lmm-r1 plan ...` takes those of train_ppo_ray."
)
DEFAULT_COMMAND = "train_ppo_ray"
PLANNED: dict[str, type[Any]] = {
    DEFAULT_COMMAND: PPOConfig,
    "train_sft": SFTConfig,
    "train_kd": KDConfig,
    "train_dpo": DPOConfig,
    "train_kto": KTOConfig,
    "train_prm": PRMConfig,
    "train_rm": RMConfig,
}
# A plan reads no rows and asks for no rewards, so it does without these flags.
UNREAD = ("data.prompt_dataset", "data.dataset", "model.placeholder_token")
_MODELS = tuple(f"{group}.model_name_or_path" for group in ("actor", "critic", "reward", "model", "ref", "teacher"))


@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """What `plan` asks in addition to the flags of the planned command."""

    num_gpus: int | None = None
    """GPUs of the one machine that the run is planned for. None is what this machine has, or one process for a supervised
    trainer."""
    gpu_memory_gib: float | None = None
    """Memory of each GPU in GiB. 0 is a machine without GPUs; None is this machine's."""
    host_memory_gib: float | None = None
    """Memory of each machine in GiB. None is this machine's; it is not checked if gpu_memory_gib is set."""
    image_pixels: int = 0
    """Pixels of the one image in each prompt; 0 plans for text only."""


_MACHINE = tuple(field.name for field in dataclasses.fields(MachineFlags))
_PPO_HELP = FirstHelp(
    examples=(
        Example(
            what="A stage of LMM-R1 on its eight GPUs of 80 GB",
            arguments="--config examples/scripts/lmm_r1/configs/fre_text.yaml"
            " --actor.model_name_or_path models/vlm-3b --gpu_memory_gib 80",
        ),
        Example(
            what="The same on GPUs of 24 GB, which are too small: prints what to change",
            arguments="--config examples/scripts/lmm_r1/configs/fre_text.yaml"
            " --actor.model_name_or_path models/vlm-3b --gpu_memory_gib 24",
        ),
        Example(
            what="A run without further flags on one GPU of 80 GB, with images",
            arguments="--actor.model_name_or_path models/vlm-3b --num_gpus 1 --gpu_memory_gib 80 --image_pixels 1000000",
        ),
    ),
    flags=(
        "actor.model_name_or_path",
        *_MACHINE,
        "rollout.n_samples_per_prompt",
        "rollout.max_new_tokens",
        "train.colocate_all",
        "ds.zero_stage",
        "vllm.gpu_memory_utilization",
    ),
)
_SUPERVISED_HELP = FirstHelp(
    examples=(
        Example(
            what="On this machine, with the settings that a run would have",
            arguments="--model.model_name_or_path models/vlm-3b",
        ),
        Example(
            what="On eight GPUs of 80 GB, with ZeRO-3 and longer sequences",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --num_gpus 8 --gpu_memory_gib 80 --ds.zero_stage 3 --data.max_len 8192",
        ),
        Example(
            what="Adapters on one smaller GPU, with an image of one megapixel in each row",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --gpu_memory_gib 24 --image_pixels 1000000 --ds.lora.rank 16",
        ),
    ),
    flags=(
        "model.model_name_or_path",
        *_MACHINE,
        "data.max_len",
        "train.batch_size",
        "train.micro_batch_size",
        "ds.zero_stage",
        "ds.lora.rank",
    ),
)


@cache
def planned_by(command: str) -> type[Any]:
    """Return the config of a training command with the flags of `MachineFlags` in addition."""
    config_class = PLANNED[command]
    return dataclasses.make_dataclass(
        f"Plan{config_class.__name__}",
        (),
        bases=(MachineFlags, config_class),
        namespace={"first_help": _PPO_HELP if config_class is PPOConfig else _SUPERVISED_HELP},
        frozen=True,
        kw_only=True,
    )


CONFIG = planned_by(DEFAULT_COMMAND)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; the process ends with code 1 if the run cannot fit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = bool(arguments) and arguments[0] in PLANNED
    command = arguments.pop(0) if named else DEFAULT_COMMAND
    prog = PROG if command == DEFAULT_COMMAND else f"{PROG} {command}"
    config_class = planned_by(command)
    given = parse(config_class, arguments, prog=prog, description=DESCRIPTION, first_help=config_class.first_help)
    machine, settings = (
        part(**{field.name: getattr(given, field.name) for field in dataclasses.fields(part)})
        for part in (MachineFlags, PLANNED[command])
    )
    with user_errors(PROG):
        settings = _readable(settings, machine)
        if command == DEFAULT_COMMAND:
            _plan_ppo(settings, machine)
        else:
            _plan_supervised(settings, machine)


def _plan_ppo(settings: PPOConfig, given: MachineFlags) -> None:
    def ask() -> Offer:
        return offered_gpus() if given.num_gpus is None else Offer(per_node=(given.num_gpus,), joined=False)

    config = resolve_ppo(settings, ask=ask)
    if given.num_gpus is not None:
        check_offered(config, ask())
    elif given.gpu_memory_gib is None:
        # The run itself would be refused if it asks for more than this machine has.
        check_machine(config)

    def make(changed: PPOConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.ppo_plan import plan_ppo

        return plan_ppo(changed, machine, image=image)

    def share_gpus(changed: PPOConfig) -> Mapping[str, object]:
        return shared_counts(changed, ask=ask)

    _print(config, given, path=config.actor.model_name_or_path, make=make, share_gpus=share_gpus)


def _plan_supervised(settings: Any, given: MachineFlags) -> None:
    config = resolve(settings)
    processes = supervised_processes(config) if given.num_gpus is None else given.num_gpus
    config, _ = sized_supervised(config, rows=None, processes=processes)

    def make(changed: SupervisedConfig, machine: Machine, image: PlanImage | None) -> Plan:
        from lmm_r1.planning.supervised_plan import plan_supervised

        return plan_supervised(changed, machine, processes=processes, per_machine=processes, image=image)

    _print(config, given, path=config.model.model_name_or_path, make=make, share_gpus=shared_counts)


def _print(
    config: Any,
    given: MachineFlags,
    *,
    path: str | None,
    make: Callable[[Any, Machine, PlanImage | None], Plan],
    share_gpus: Callable[[PPOConfig], Mapping[str, object]],
) -> None:
    """Print the plan of a run on the given machine; raises UserError if it does not fit.

    Args:
        path: the trained model.
        make: returns the plan of settings on a machine, with or without an image in each prompt.
        share_gpus: returns the counts with which models and engines share the machine's GPUs.
    """
    prepare_training(config, dry=True)
    from rich.console import Console

    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.planning.choices import choices_line, chosen, filled, judge, plan_image, unpredictable_refused
    from lmm_r1.planning.estimates import machine_of
    from lmm_r1.planning.plan import print_plan

    assert path is not None, "resolve requires it"
    machine = machine_of(gpu_gib=given.gpu_memory_gib, host_gib=given.host_memory_gib)
    checkpoint = Checkpoint(path, trust_remote_code=config.train.trust_remote_code)
    image = plan_image(checkpoint, pixels=given.image_pixels) if given.image_pixels else None

    def replan(changed: Any) -> Plan:
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


def _readable(settings: Any, given: MachineFlags) -> Any:
    """Return the settings with what a plan needs from flags that it does not read, and configs of released checkpoints."""
    known = dotted.leaf_types(type(settings))
    changes: dict[str, object] = {
        flag: "not-read" for flag in UNREAD if flag in known and not dotted.get(settings, flag)
    }
    if given.gpu_memory_gib and settings.ds.param_dtype is None:
        # The precision of the given GPUs, whatever this machine has.
        changes["ds.param_dtype"] = "bf16"
    for flag in _MODELS:
        name = dotted.get(settings, flag) if flag in known else None
        if isinstance(name, str) and not Path(name).is_dir() and name in released_configs():
            changes[flag] = str(released_folder(name))
    return dotted.replace(settings, changes)


if __name__ == "__main__":
    run_command(main)
