"""The plans of runs that learn from pairs: a policy with its reference model beside it, or a reward model, on every GPU."""

from __future__ import annotations

from lmm_r1.config import DPOConfig, KTOConfig, RMConfig
from lmm_r1.config.dpo import ReferredConfig
from lmm_r1.planning.estimates import PlanImage, estimate
from lmm_r1.planning.machine import Machine
from lmm_r1.planning.placement import PlannedModel
from lmm_r1.planning.plan import Plan
from lmm_r1.planning.sft_plan import model_settings, supervised_plan, trained_model
from lmm_r1.planning.zero_memory import gathered_bytes

SIDES = 2


def plan_dpo(
    config: DPOConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None = None
) -> Plan:
    """Return the plan of a run whose settings are resolved; the arguments are those of `plan_sft`.

    The longest pair is taken to be alone in a pass, with nothing in common.
    """
    tokens = SIDES * config.data.max_len
    return _referred_plan(
        config, machine, processes=processes, per_machine=per_machine, image=image, pass_tokens=tokens
    )


def plan_kto(
    config: KTOConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None = None
) -> Plan:
    """Return the plan of a run on single responses; the arguments are those of `plan_sft`.

    The policy learns from a row by itself; the reference computes it with the mismatched response.
    """
    tokens = config.data.max_len
    return _referred_plan(
        config, machine, processes=processes, per_machine=per_machine, image=image, pass_tokens=tokens
    )


def _referred_plan(
    config: ReferredConfig,
    machine: Machine,
    *,
    processes: int,
    per_machine: int,
    image: PlanImage | None,
    pass_tokens: int,
) -> Plan:
    policy = trained_model(
        config,
        machine,
        processes=processes,
        per_machine=per_machine,
        image=image,
        share_prefix=config.train.shared_prefix_enable,
        pass_tokens=pass_tokens,
    )
    models = [policy]
    if config.needs_reference_model:
        models.append(_reference(config, machine, processes=processes, per_machine=per_machine, image=image))
    return supervised_plan(config, machine, models, per_machine=per_machine, samples_per_row=SIDES)


def plan_rm(
    config: RMConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None = None
) -> Plan:
    """Return the plan of a reward model's training; the arguments are those of `plan_sft`."""
    model = trained_model(
        config,
        machine,
        processes=processes,
        per_machine=per_machine,
        image=image,
        share_prefix=config.train.shared_prefix_enable,
        pass_tokens=SIDES * config.data.max_len,
        role="critic",
    )
    return supervised_plan(config, machine, [model], per_machine=per_machine, samples_per_row=SIDES)


def _reference(
    config: ReferredConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None
) -> PlannedModel:
    on_gpu, sharded = machine.gpu_bytes is not None, config.ds.zero_stage == 3
    settings = model_settings(
        config,
        share_prefix=config.train.shared_prefix_enable,
        role="reference",
        on_gpu=on_gpu,
        path=config.ref.model_name_or_path,
    )
    estimated = estimate(settings, image)
    size = estimated.size
    shard = -(-size.weight_bytes // processes) if sharded else size.weight_bytes
    offloaded = sharded and on_gpu and config.ref.offload
    return PlannedModel(
        role="reference",
        estimate=estimated,
        states=None,
        resident=0 if offloaded else shard,
        gathered=gathered_bytes(size) if sharded else 0,
        sleeps=False,
        # It is in the policy's process.
        context=0,
        pass_tokens=SIDES * config.data.max_len,
        host=shard if offloaded else 0,
        ranks=per_machine,
        gpus=processes,
    )
