"""Batch sizes, GPU counts and precision of a run if no flag sets them."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeVar

from lmm_r1 import cpu, dotted
from lmm_r1.config.ppo import GPU_COUNTS, GROUP_ESTIMATORS, PPOConfig
from lmm_r1.config.supervised import SupervisedConfig
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import function_file

logger = logging.getLogger(__name__)
Supervised = TypeVar("Supervised", bound=SupervisedConfig)

# OpenRLHF's defaults.
MOST_PROMPTS = 1024
MOST_SAMPLES = 128
MOST_IN_A_PASS = 8
# Default size of a group whose responses are compared.
GROUP_SIZE = 8
# Minimum number of steps in a pass over the rows.
FEWEST_STEPS = 5
# A multiple of eight divides equally among one to eight GPUs.
_EIGHTS = 8


def group_size(config: PPOConfig) -> int:
    """Return `--rollout.n_samples_per_prompt`, or what it is for the estimator."""
    estimator = config.algo.advantage.estimator
    compares = estimator in GROUP_ESTIMATORS or function_file(estimator) or config.algo.dynamic_filtering_enable
    return config.rollout.n_samples_per_prompt or (GROUP_SIZE if compares else 1)


def sized_ppo(config: PPOConfig, *, rows: int) -> tuple[PPOConfig, str | None]:
    """Return the settings with the batches that the prompts allow, and a line about them, or None if all were set.

    Raises:
        UserError: there are too few prompts for the run's processes, or the sizes contradict one another.
    """
    rollout, train = config.rollout, config.train
    prompts = rollout.batch_size or _prompts_of_a_step(config, rows=rows)
    samples = prompts * rollout.n_samples_per_prompt
    batch = train.batch_size or _multiple(min(MOST_SAMPLES, samples), of=[_processes(config)])
    sizes: dict[str, object] = {
        "rollout.batch_size": prompts,
        "rollout.vllm_generate_batch_size": min(rollout.vllm_generate_batch_size or prompts, prompts),
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
    """Return the settings with the batches that the rows allow, and a line about them, or None if they were set.

    Args:
        rows: None is as many as needed.
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
    line = f"sizes for {rows} rows: --train.batch_size {batch} an update, --train.micro_batch_size {micro} a pass"
    return sized, line


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
    # At least two rows, which preference losses compare.
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


CPUINFO = Path("/proc/cpuinfo")
# Of x86 and ARM.
_BF16 = re.compile(r"^(?:flags|Features)\s*:.*\b(?:avx512_bf16|amx_bf16|bf16)\b", re.MULTILINE)
# Device files of NVIDIA's driver, its Tegra boards, WSL, and AMD's driver.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


def default_param_dtype(*, flag: str, uses_ray: bool = False) -> Literal["bf16", "fp32"]:
    """Return the precision of a run on this machine; rank 0 logs a line if it is fp32.

    Args:
        flag: the name of the flag that was left open.
        uses_ray: whether the run joins the cluster of RAY_ADDRESS, whose processors are others than this one.
    """
    environment = os.environ
    if (uses_ray and environment.get("RAY_ADDRESS")) or has_gpu(environment):
        return "bf16"
    # Only Linux has the file.
    if CPUINFO.exists() and has_bf16_instructions(CPUINFO.read_text(encoding="utf-8", errors="replace")):
        return "bf16"
    if environment.get("RANK", "0") == "0":
        logger.warning(
            "--%s fp32: this machine has no GPU, and its processor no bf16 instructions, without which bf16 is many "
            "times slower; give the flag to take another",
            flag,
        )
    return "fp32"


def has_bf16_instructions(cpuinfo: str) -> bool:
    """Return whether the processor of a text of /proc/cpuinfo has bf16 instructions."""
    return _BF16.search(cpuinfo) is not None


def has_gpu(environment: Mapping[str, str], *, exists: Callable[[str], bool] = os.path.exists) -> bool:
    """Return whether PyTorch can use a GPU here, without loading PyTorch or CUDA.

    Args:
        exists: whether a path exists.
    """
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        if version("torch").endswith("+cpu"):
            return False
    except PackageNotFoundError:
        return False
    return any(exists(device) for device in GPU_DEVICES)


_TURNS = "let them take turns on the same ones by --train.colocate_all"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The GPUs that a run can have."""

    per_node: tuple[int, ...]
    """GPUs of each machine that has any; empty if models run on CPUs."""
    joined: bool
    """Whether they are those of a Ray cluster, which may grow."""

    @property
    def told(self) -> str:
        where = "the cluster of RAY_ADDRESS" if self.joined else "this machine"
        machines = f" on {len(self.per_node)} machines" if len(self.per_node) > 1 else ""
        return f"{where} has {sum(self.per_node)}{machines}"


def offered_gpus() -> Offer:
    """Return the GPUs of this machine or of the cluster of RAY_ADDRESS."""
    if os.environ.get("RAY_ADDRESS"):
        from lmm_r1.cluster.nodes import gpus_by_node

        return Offer(per_node=tuple(gpus_by_node()), joined=True)
    return Offer(per_node=(found,) if (found := visible_gpus()) else (), joined=False)


def visible_gpus() -> int:
    """Return how many GPUs of this machine CUDA_VISIBLE_DEVICES leaves; asks NVIDIA's driver without torch and Ray."""
    # The user may have set the backend, which is read without torch.
    if not (cpu.own_cuda() if cpu.BACKEND in os.environ else has_gpu(os.environ)):
        return 0
    with suppress(ImportError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            found, visible = pynvml.nvmlDeviceGetCount(), os.environ.get("CUDA_VISIBLE_DEVICES")
            return found if visible is None else min(found, len(list(filter(None, visible.split(",")))))
    from lmm_r1.cluster.nodes import gpus_here

    # Of another maker.
    return gpus_here()


PROCESSES = "PET_NPROC_PER_NODE"
"""The variable with which torchrun names the number of processes, too."""


def supervised_processes(config: SupervisedConfig) -> int:
    """Return in how many processes a supervised command trains: one for each visible GPU, as far as batches divide."""
    named = os.environ.get(PROCESSES, "")
    if named.isdecimal():
        return max(1, int(named))
    shared, train = config.ds.tensor_parallel_size * config.ds.ulysses_size, config.train

    def divides(count: int) -> bool:
        return count % shared == 0 and train.batch_size % (count // shared * max(1, train.micro_batch_size)) == 0

    return next((count for count in range(visible_gpus(), 1, -1) if divides(count)), 1)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Models, and perhaps the engines, that are on the same GPUs."""

    models: tuple[str, ...]
    """By their group of flags."""
    engines: bool

    def __str__(self) -> str:
        return " + ".join((*self.models, "engines") if self.engines else self.models)

    def unit(self, config: PPOConfig) -> int:
        """Return the number that the GPUs must be a multiple of."""
        model = config.ds.tensor_parallel_size * config.ds.ulysses_size if self.models else 1
        return math.lcm(model, config.vllm.tensor_parallel_size if self.engines else 1)

    def is_named(self, config: PPOConfig) -> bool:
        """Return whether its number of GPUs follows from the flags."""
        by_models = any(config.placed[name].num_gpus_per_node is not None for name in self.models)
        return by_models or (not self.models and config.vllm.num_engines is not None)

    def named(self, config: PPOConfig, *, node: int) -> tuple[int, int] | None:
        """Return the machines and the GPUs on each that the flags set; None if they set neither.

        Args:
            node: GPUs of a machine if only the number of machines is set.
        """
        for name in self.models:
            group = config.placed[name]
            if group.num_gpus_per_node is not None:
                return group.num_nodes or 1, group.num_gpus_per_node
            if group.num_nodes is not None:
                return group.num_nodes, node
        if self.engines and config.vllm.num_engines is not None:
            return shape(config.vllm.num_engines * config.vllm.tensor_parallel_size, node=node)
        return None

    def largest(self, config: PPOConfig, *, most: int) -> int:
        """Return the largest number up to `most` that divides batches and prompts; 0 if there is none."""
        return next((size for size in range(most, 0, -1) if self._divides(config, size)), 0)

    def _divides(self, config: PPOConfig, size: int) -> bool:
        if size % self.unit(config):
            return False
        # Sizes that are left open are made for the ranks, and at most these.
        prompts, batch = config.rollout.batch_size or MOST_PROMPTS, config.train.batch_size or MOST_SAMPLES
        if self.engines and prompts % (size // config.vllm.tensor_parallel_size):
            return False
        ranks = size // (config.ds.tensor_parallel_size * config.ds.ulysses_size)
        if self.models and (prompts * config.rollout.n_samples_per_prompt) % ranks:
            return False
        return not {"actor", "critic"} & set(self.models) or batch % ranks == 0


def asked_gpus(config: PPOConfig) -> dict[str, int]:
    """Return how many GPUs those who share some ask for, the policy's first, of settings without open counts."""
    counts = ((share, config.placed[share.models[0]] if share.models else config.vllm) for share in gpu_shares(config))
    return {str(share): group.gpus for share, group in counts}


def needed_gpus(config: PPOConfig) -> int:
    """Return how many GPUs the models and engines of settings without open counts ask for."""
    return sum(asked_gpus(config).values())


def check_machine(config: PPOConfig) -> None:
    """Raise UserError if resolved settings ask for more GPUs than this machine has; a cluster may grow, so a run waits."""
    if not os.environ.get("RAY_ADDRESS"):
        check_offered(config, offered_gpus())


def check_offered(config: PPOConfig, offer: Offer) -> None:
    """Raise UserError if resolved settings ask for more than the offered GPUs."""
    asked = asked_gpus(config)
    told = ", ".join(f"{name} {size}" for name, size in asked.items())
    if offer.per_node and sum(asked.values()) > sum(offer.per_node):
        raise UserError(
            f"the run asks for {sum(asked.values())} GPUs ({told}), and {offer.told}; name fewer by "
            f"--actor.num_gpus_per_node and so on, leave the counts out, or {_TURNS}"
        )
    cores = os.cpu_count() or 1
    if not offer.per_node and max(asked.values()) > cores:
        raise UserError(
            f"the run asks for {sum(asked.values())} GPUs ({told}), and this machine has none, and {cores} cores, of which "
            "each rank takes one; leave --actor.num_gpus_per_node and so on out, which makes one rank of each"
        )


def settled_counts(config: PPOConfig, *, ask: Callable[[], Offer] = offered_gpus) -> dict[str, object]:
    """Return by flag the counts that the settings leave open, and say in a line how GPUs are divided by them.

    Those who share GPUs have the same ones. What no flag names of it is divided equally, the policy having the rest; of
    each share takes as many GPUs as divide the batches. Without GPUs, and if a cluster has too few so far, every
    share is as small as can be.

    Args:
        ask: returns the GPUs that there are; not called if flags set all counts.

    Raises:
        UserError: this machine has too few.
    """
    shares = gpu_shares(config)
    offer = Offer(per_node=(), joined=False) if all(share.is_named(config) for share in shares) else ask()
    together = _chosen_together(config, offer)
    settings: dict[str, object] = {"train.colocate_all": together}
    shared = bool(together) and config.train.colocate_all is None
    config = dotted.replace(config, settings)
    shares = gpu_shares(config)
    node = min(offer.per_node, default=1)
    shapes = {share: named for share in shares if (named := share.named(config, node=node)) is not None}
    taken = sum(nodes * gpus for nodes, gpus in shapes.values())
    sizes = _divided(config, [share for share in shares if share not in shapes], offer, taken=taken)
    shapes |= {share: shape(size, node=node) for share, size in sizes.items()}
    for share, (nodes, gpus) in shapes.items():
        for name in share.models:
            group = config.placed[name]
            counts = {"num_nodes": (group.num_nodes, nodes), "num_gpus_per_node": (group.num_gpus_per_node, gpus)}
            settings |= {f"{name}.{flag}": filled for flag, (given, filled) in counts.items() if given is None}
        if share.engines and config.vllm.num_engines is None:
            settings["vllm.num_engines"] = max(1, nodes * gpus // config.vllm.tensor_parallel_size)
    divided = ", ".join(f"{share} {nodes * gpus}" for share, (nodes, gpus) in shapes.items())
    if shared:
        because = "too few for groups of their own, so that they take turns on them (--train.colocate_all)"
        logger.warning("GPUs: %s; %s, %s", divided, offer.told, because)
    elif sizes and offer.per_node:
        otherwise = "which --actor.num_gpus_per_node, --vllm.num_engines and so on divide otherwise"
        logger.warning("GPUs: %s; %s, %s", divided, offer.told, otherwise)
    return settings


def shared_counts(config: PPOConfig, *, ask: Callable[[], Offer] = offered_gpus) -> dict[str, object]:
    """Return by flag the counts with which all share a machine's GPUs, of settings whose counts no flag has named."""
    opened = dotted.replace(config, dict.fromkeys(GPU_COUNTS) | {"train.colocate_all": True})
    return settled_counts(opened, ask=ask)


def _chosen_together(config: PPOConfig, offer: Offer) -> bool | None:
    """Return `--train.colocate_all`, or what it is for the GPUs; None leaves it open to the plan of the run's memory.

    Models and engines take turns if a machine has too few GPUs for separate groups. In a cluster, which may grow,
    on CPUs, and if rollouts are generated during updates, they have separate groups.
    """
    if config.train.colocate_all is not None:
        return config.train.colocate_all
    if config.train.async_enable or offer.joined or not offer.per_node:
        return False
    shares, node = gpu_shares(config), min(offer.per_node)
    named = {share: found for share in shares if (found := share.named(config, node=node)) is not None}
    taken = sum(nodes * gpus for nodes, gpus in named.values())
    left = sum(offer.per_node) - taken
    if sum(share.unit(config) for share in shares if share not in named) > left:
        return True
    return False if any(dotted.get(config, flag) is not None for flag in GPU_COUNTS) else None


def shape(size: int, *, node: int) -> tuple[int, int]:
    """Return the fewest machines of `node` GPUs, and how many GPUs on each, that make up `size`: 12 of 8 are 2 x 6."""
    return next((nodes, size // nodes) for nodes in range(1, size + 1) if size % nodes == 0 and size // nodes <= node)


def _divided(config: PPOConfig, shares: Sequence[Share], offer: Offer, *, taken: int) -> dict[Share, int]:
    units = {share: share.unit(config) for share in shares}
    left = sum(offer.per_node) - taken
    if not shares or not offer.per_node:
        return units
    equal = {share: share.largest(config, most=left // len(shares)) for share in shares[1:]}
    sizes = {shares[0]: shares[0].largest(config, most=left - sum(equal.values())), **equal}
    if all(sizes.values()):
        return sizes
    if offer.joined:
        return units
    named = f", of which other flags take {taken}" if taken else ""
    instead = "take a machine with more" if config.train.async_enable else _TURNS
    raise UserError(
        f"{', '.join(map(str, shares))} need {sum(units.values())} GPUs or more, and {offer.told}{named}; {instead}, or name "
        "their counts by --actor.num_gpus_per_node and so on"
    )


def gpu_shares(config: PPOConfig) -> list[Share]:
    """Return who has GPUs of their own, the policy's first."""
    train = config.train
    models = list(config.placed)
    pair = ("critic", "reward") if train.colocate_critic_reward else ()
    if train.colocate_all:
        together = tuple(name for name in models if name not in pair)
    else:
        together = ("actor", "ref") if train.colocate_actor_ref and "ref" in models else ("actor",)
    apart = [(name,) for name in models if name not in (*together, *pair)]
    shares = [together, *([pair] if pair else []), *apart]
    if train.colocate_all:
        return [Share(models=share, engines=share is together) for share in shares]
    return [*(Share(models=share, engines=False) for share in shares), Share(models=(), engines=True)]


def check_batches(config: PPOConfig) -> None:
    """Raise UserError if the samples of a step cannot be divided among processes or updates; sizes may be open."""
    rollout, train = config.rollout, config.train
    samples = rollout.batch_size * rollout.n_samples_per_prompt
    sizes = (
        f"--rollout.batch_size {rollout.batch_size} x --rollout.n_samples_per_prompt {rollout.n_samples_per_prompt}"
    )
    for name, gpus in model_gpus(config).items():
        # Or groups of processes that get the same samples.
        processes = max(1, gpus // (config.ds.tensor_parallel_size * config.ds.ulysses_size))
        if samples % processes:
            raise UserError(f"{sizes} must be a multiple of the {processes} {name} processes")
        if name in ("actor", "critic") and train.batch_size % processes:
            raise UserError(
                f"--train.batch_size {train.batch_size} must be a multiple of the {processes} {name} processes"
            )
    if 0 < samples < train.batch_size:
        raise UserError(
            f"--train.batch_size {train.batch_size} is more than the {samples} samples of a rollout ({sizes}), so no step "
            "would update the weights; lower it"
        )


def model_gpus(config: PPOConfig) -> dict[str, int]:
    """Return how many GPUs each model of a run has."""
    return {name: model.gpus for name, model in config.placed.items()}
