"""`lmm-r1 plan`: a dry run of a training command, which prints the memory that the run will take."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmm_r1 import dotted
from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.cli.training import prepare_training
from lmm_r1.config import DPOConfig, PPOConfig, RMConfig, resolve, resolve_ppo, sized_supervised
from lmm_r1.config.hardware import (
    Offer,
    asked_gpus,
    check_machine,
    check_offered,
    offered_gpus,
    shared_counts,
    supervised_processes,
)
from lmm_r1.config.shared import FirstHelp
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.registry import released_configs, released_folder
from lmm_r1.tools.migrate.table import CONFIG_CLASSES

if TYPE_CHECKING:
    from lmm_r1.tools.planning.choices import Remedy
    from lmm_r1.tools.planning.plan import Plan

PROG = "lmm-r1 plan"
DESCRIPTION = (
    "Predict the memory of a run from its settings, before anything is loaded. `lmm-r1 plan train_sft ...` takes the "
    "flags of train_sft, and likewise for the other trainers; `lmm-r1 plan ...` takes those of train_ppo_ray."
)
DEFAULT_COMMAND = "train_ppo_ray"
PLANNED: dict[str, type[Any]] = {str(command): config_class for command, config_class in CONFIG_CLASSES.items()}
# A plan does without these flags; in the command that it prints they have these values.
UNREAD = {"data.prompt_dataset": "rows.jsonl", "data.dataset": "rows.jsonl"}
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
    """Pixels of the image in each prompt. 0 takes those of the largest row in data.prompt_dataset or data.dataset, if it is
    a file here."""


_MACHINE = tuple(field.name for field in dataclasses.fields(MachineFlags))
_PPO_HELP = FirstHelp(
    text="""
    # A stage of LMM-R1 on its eight GPUs of 80 GB
    --config examples/scripts/lmm_r1/configs/fre_text.yaml --actor.model_name_or_path models/vlm-3b
    --gpu_memory_gib 80
    # The same on GPUs of 24 GB, which are too small: prints what to change
    --config examples/scripts/lmm_r1/configs/fre_text.yaml --actor.model_name_or_path models/vlm-3b
    --gpu_memory_gib 24
    # A run without further flags on one GPU of 80 GB, with images
    --actor.model_name_or_path models/vlm-3b --num_gpus 1 --gpu_memory_gib 80 --image_pixels 1000000
    """,
    flags=f"actor.model_name_or_path {' '.join(_MACHINE)} rollout.n_samples_per_prompt rollout.max_new_tokens "
    "train.colocate_all ds.zero_stage vllm.gpu_memory_utilization",
)
_SUPERVISED_HELP = FirstHelp(
    text="""
    # On this machine, with the settings that a run would have
    --model.model_name_or_path models/vlm-3b
    # On eight GPUs of 80 GB, with ZeRO-3 and longer sequences
    --model.model_name_or_path models/vlm-3b --num_gpus 8 --gpu_memory_gib 80 --ds.zero_stage 3 --data.max_len 8192
    # Adapters on one smaller GPU, with an image of one megapixel in each row
    --model.model_name_or_path models/vlm-3b --gpu_memory_gib 24 --image_pixels 1000000 --ds.lora.rank 16
    """,
    flags=f"model.model_name_or_path {' '.join(_MACHINE)} data.max_len train.batch_size train.micro_batch_size "
    "ds.zero_stage ds.lora.rank",
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
    """Print the plan and the planned command; the process ends with code 1 if the run cannot fit."""
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
        _print(_planned(settings, machine), partial(_command, command, arguments, settings))


def fitting_flags(
    model: str, *, machine: MachineFlags = MachineFlags(), flags: Mapping[str, object] = MappingProxyType({})
) -> dict[str, object]:
    """Return by flag what an RL run of a model needs to fit a machine, without what it chooses itself; empty if it fits.

    Args:
        model: a folder or a name on the hub.
        flags: further settings of the run, by dotted names: lengths, rows and so on.

    Raises:
        UserError: nothing makes it fit, or the flags contradict each other.
    """
    from lmm_r1.tools.planning.choices import fitting_remedies, refuse_excess, settings_of

    run = _planned(dotted.replace(PPOConfig(), {"actor.model_name_or_path": model, **flags}), machine)
    taken, missing = fitting_remedies(run.config, run.plan, replan=run.replan)
    if missing:
        refuse_excess(run.config, run.plan, replan=run.replan)
    return settings_of(taken)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A run on a machine, with what memory decides chosen."""

    given: Any
    """The resolved settings."""
    config: Any
    plan: Plan
    replan: Callable[[Any], Plan]
    """Returns the plan of other settings."""


def _planned(settings: Any, given: MachineFlags) -> _Planned:
    """Return the plan of settings on the given machine; raises UserError if it cannot be predicted."""
    readable = _readable(settings, given)
    processes = 1

    def ask() -> Offer:
        return offered_gpus() if given.num_gpus is None else Offer(per_node=(given.num_gpus,), joined=False)

    config: Any
    if isinstance(readable, PPOConfig):
        config = resolve_ppo(readable, ask=ask)
        if given.num_gpus is not None:
            check_offered(config, ask())
        elif given.gpu_memory_gib is None:
            # The run itself would be refused if it asks for more than this machine has.
            check_machine(config)
    else:
        config = resolve(readable)
        processes = supervised_processes(config) if given.num_gpus is None else given.num_gpus
        config, _ = sized_supervised(config, rows=None, processes=processes)
    prepare_training(config, dry=True)
    from lmm_r1.tools.planning.choices import checkpoint_of, chosen, fitting_pixels, plan_image
    from lmm_r1.tools.planning.pass_memory import Unpredictable
    from lmm_r1.tools.planning.plan import machine_of
    from lmm_r1.tools.planning.run_plan import plan_ppo, plan_supervised

    machine = machine_of(gpu_gib=given.gpu_memory_gib, host_gib=given.host_memory_gib)
    checkpoint, pixels = checkpoint_of(config), given.image_pixels or largest_pixels(settings)

    def replan(changed: Any) -> Plan:
        image = plan_image(checkpoint, pixels=fitting_pixels(checkpoint, changed, pixels=pixels)) if pixels else None
        if isinstance(changed, PPOConfig):
            return plan_ppo(changed, machine, image=image)
        return plan_supervised(changed, machine, processes=processes, per_machine=processes, image=image)

    try:
        found, plan = chosen(config, replan=replan, share_gpus=partial(shared_counts, ask=ask))
    except Unpredictable as error:
        raise UserError(
            f"{checkpoint.path}: the memory of this model's passes cannot be predicted ({error}); start the run with a small "
            "--train.max_tokens_per_gpu instead"
        ) from error
    return _Planned(given=config, config=found, plan=plan, replan=replan)


def largest_pixels(settings: Any) -> int:
    """Return the pixels of the images of the row that has most."""
    from lmm_r1.config.run_rows import read_conversations, read_judged
    from lmm_r1.tools.planning.choices import most_pixels

    data, in_rl = settings.data, isinstance(settings, PPOConfig)
    read: Callable[..., Any] = partial(read_judged, settings)
    if not isinstance(settings, DPOConfig | RMConfig):
        read = partial(read_conversations, settings, answer_required=False)
    datasets, split = (data.prompt_dataset, data.prompt_split) if in_rl else (data.dataset, data.dataset_split)
    # A dataset that is not here is not downloaded.
    paths = [path for path in map(str.strip, (datasets or "").split(",")) if path and Path(path).exists()]
    files = (read(path, split=split, bad_rows="skip") for path in paths)
    return max((most_pixels(file.rows.values()) for file in files), default=0)


def _print(run: _Planned, command: Callable[[Sequence[Remedy]], str]) -> None:
    """Print the plan of a run and its command; raises UserError, with the command that fits, if it does not fit.

    Args:
        command: returns the command with remedies.
    """
    from rich.console import Console

    from lmm_r1.tools.planning.choices import choices_line, filled, refuse_excess
    from lmm_r1.tools.planning.plan import print_plan

    print_plan(run.plan, Console(highlight=False))
    if isinstance(run.config, PPOConfig) and run.plan.machine.gpu_bytes is not None:
        gpus = asked_gpus(run.config)
        print(f"GPUs: {sum(gpus.values())} ({', '.join(f'{who} {count}' for who, count in gpus.items())})")
    if line := choices_line(run.given, filled(run.config, run.plan)):
        print(line)
    refuse_excess(run.config, run.plan, replan=run.replan, command=command)
    print(command(()))


def _command(name: str, arguments: Sequence[str], settings: Any, remedies: Sequence[Remedy]) -> str:
    """Return the command that is planned, with remedies, and with values for flags that it needs and a plan does not."""
    words, remaining = ["lmm-r1", name], iter(arguments)
    for word in remaining:
        flag, equals, _ = word.removeprefix("--").replace("-", "_").partition("=")
        if not word.startswith("--") or flag not in _MACHINE:
            words.append(word)
        elif not equals:
            next(remaining)
    words += [word for flag, value in _unread(settings).items() for word in (f"--{flag}", value)]
    return shlex.join([*words, *(word for remedy in remedies for word in str(remedy).split())])


def _unread(settings: Any) -> dict[str, str]:
    """Return of `UNREAD` the flags that the settings leave open."""
    known = dotted.leaf_types(type(settings))
    return {flag: value for flag, value in UNREAD.items() if flag in known and not dotted.get(settings, flag)}


def _readable(settings: Any, given: MachineFlags) -> Any:
    """Return the settings with what a plan needs from flags that it does not read, and configs of released checkpoints."""
    known = dotted.leaf_types(type(settings))
    changes: dict[str, object] = {**_unread(settings)}
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
