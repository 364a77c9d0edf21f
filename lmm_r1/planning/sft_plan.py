"""The plan of a supervised run: one model on every GPU that it is launched on."""

from __future__ import annotations

from lmm_r1.config import SFTConfig
from lmm_r1.planning import machine as machines
from lmm_r1.planning.estimates import WIDTHS, ModelSettings, PlanImage, estimate
from lmm_r1.planning.machine import Machine
from lmm_r1.planning.placement import Device, Phase, PlannedModel
from lmm_r1.planning.plan import Plan
from lmm_r1.planning.ppo_plan import TOKEN_STEP
from lmm_r1.planning.zero_memory import ZeroSettings, gathered_bytes, trained_states


def plan_sft(
    config: SFTConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None = None
) -> Plan:
    """Return the plan of a run whose settings are resolved; nothing is loaded but the checkpoint's config.

    Its longest row is taken to be alone in a pass: what else stands in a micro-batch depends on the rows.

    Args:
        processes: of the run, each with a GPU of its own where there are any.
        per_machine: how many of them are on one machine.
        image: a conversation with an image, for a run that has images.
    """
    path, dtype = config.model.model_name_or_path, config.ds.param_dtype
    assert path is not None, "resolve_sft requires it"
    assert dtype is not None, "resolve_sft fills it in"
    on_gpu, width = machine.gpu_bytes is not None, WIDTHS[dtype]
    zero = ZeroSettings(
        stage=config.ds.zero_stage,
        ranks=processes,
        offload=config.ds.adam_offload,
        weight_bytes=width,
        sum_bytes=4 if config.ds.grad_accum_dtype == "fp32" else width,
        on_gpu=on_gpu,
        passes=2 if config.train.batch_size > config.train.micro_batch_size * processes else 1,
    )
    settings = ModelSettings(
        path=path,
        role="policy",
        param_dtype=dtype,
        packing_samples=config.ds.packing_samples,
        share_prefix=False,
        max_len=config.data.max_len,
        attn_implementation=config.ds.attn_implementation,
        experts_implementation=config.ds.experts_implementation,
        lora_rank=config.ds.lora.rank,
        target_modules=config.ds.lora.target_modules,
        trust_remote_code=config.train.trust_remote_code,
        freeze_prefix=config.model.freeze_prefix,
        checkpointing=config.model.gradient_checkpointing_enable,
        reentrant=config.model.gradient_checkpointing_reentrant,
        bytes_per_gradient=width if not on_gpu and zero.stage in (1, 2) else 0,
    )
    estimated = estimate(settings, image)
    states = trained_states(estimated.size, zero)
    model = PlannedModel(
        role="policy",
        estimate=estimated,
        states=states,
        resident=0,
        gathered=gathered_bytes(estimated.size) if zero.stage == 3 else 0,
        sleeps=False,
        context=machines.CONTEXT if on_gpu else machines.PROCESS,
        pass_tokens=config.data.max_len,
        host=states.host,
        ranks=per_machine,
        gpus=processes,
    )
    name = "each GPU" if on_gpu else "the machine"
    device = Device(name=name, models=[model] * (1 if on_gpu else per_machine), engine=None, bucket=0)
    host = []
    if on_gpu:
        host.append(Phase(name="processes", size=machines.PROCESS * per_machine))
        if states.host:
            host.append(Phase(name="optimizer, offloaded", size=states.host * per_machine))
        copies = 1 if zero.stage == 3 else per_machine
        host.append(Phase(name="weights that are read or written", size=estimated.size.weight_bytes * copies))
    room = device.room(model, usable=machine.usable)
    return Plan(
        machine=machine,
        devices=[device],
        host=host,
        pass_tokens=None,
        fitting_tokens=model.passes.tokens(room, step=TOKEN_STEP),
        longest=config.data.max_len,
        group=None,
    )
