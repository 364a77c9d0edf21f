"""The plans of runs that learn from pairs: a policy with its reference model beside it, or a reward model, on every GPU."""

from __future__ import annotations

from lmm_r1.config import DPOConfig, KTOConfig, RMConfig
from lmm_r1.config.dpo import ReferredConfig
from lmm_r1.planning.estimates import PlanImage
from lmm_r1.planning.machine import Machine
from lmm_r1.planning.plan import Plan
from lmm_r1.planning.sft_plan import frozen_model, supervised_plan, trained_model

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
        reference = frozen_model(
            config,
            machine,
            processes=processes,
            per_machine=per_machine,
            image=image,
            share_prefix=config.train.shared_prefix_enable,
            # A pair, or a response with a mismatched one.
            pass_tokens=SIDES * config.data.max_len,
            role="reference",
            path=config.ref.model_name_or_path,
            offload=config.ref.offload,
        )
        models.append(reference)
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
