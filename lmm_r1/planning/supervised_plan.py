"""Memory plans of supervised runs: SFT, preference training and distillation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmm_r1.config import DPOConfig, KDConfig, KTOConfig, RMConfig, SupervisedConfig
from lmm_r1.config.preferences import ReferredConfig
from lmm_r1.generation.worker_extension import BUCKET_BYTES
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.planning import machine as machines
from lmm_r1.planning.estimates import WIDTHS, ModelSettings, PlanImage, estimate, kept_bytes
from lmm_r1.planning.machine import Machine
from lmm_r1.planning.pass_memory import Role
from lmm_r1.planning.plan import Device, Phase, Plan, PlannedEngine, PlannedModel, student_engine
from lmm_r1.planning.ppo_plan import TOKEN_STEP, stage_of
from lmm_r1.planning.zero_memory import ZeroSettings, gathered_bytes, moment_bytes, trained_states


def plan_sft(
    config: SupervisedConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None = None
) -> Plan:
    """Return the plan of a run whose settings are resolved; nothing is loaded but the checkpoint's config.

    The longest row is assumed to fill a pass: what else a micro-batch holds depends on the rows.

    Args:
        processes: of the run, each with its own GPU if there are GPUs.
        per_machine: how many of them are on one machine.
        image: a conversation with an image, for a run that has images.
    """
    model = trained_model(
        config,
        machine,
        processes=processes,
        per_machine=per_machine,
        image=image,
        share_prefix=False,
        pass_tokens=config.data.max_len,
    )
    return supervised_plan(config, machine, [model], per_machine=per_machine)


def trained_model(
    config: SupervisedConfig,
    machine: Machine,
    *,
    processes: int,
    per_machine: int,
    image: PlanImage | None,
    share_prefix: bool,
    pass_tokens: int,
    role: Role = "policy",
) -> PlannedModel:
    """Return the process of the model that a supervised run trains; the arguments are those of `plan_sft`.

    Args:
        share_prefix: whether what samples of a pass begin with is computed once.
        pass_tokens: of the largest pass.
        role: "critic" for a reward model, which has a value head as well.
    """
    on_gpu = machine.gpu_bytes is not None
    zero = zero_settings(config, machine, processes=processes)
    settings = model_settings(config, share_prefix=share_prefix, role=role, on_gpu=on_gpu)
    if zero.sums_alone:
        settings = replace(settings, bytes_per_gradient=0)
    estimated = estimate(settings, image)
    states = trained_states(estimated.size, zero)
    kept = kept_bytes(settings, image, limit_gib=config.ds.image_cache_gib, keeps=False)
    return PlannedModel(
        role=role,
        estimate=estimated,
        states=states,
        resident=0,
        gathered=gathered_bytes(estimated.size) if zero.stage == 3 else 0,
        sleeps=False,
        context=machines.CONTEXT if on_gpu else machines.PROCESS + kept,
        pass_tokens=pass_tokens,
        host=states.host,
        ranks=per_machine,
        gpus=processes,
        kept=kept,
    )


def frozen_model(
    config: SupervisedConfig,
    machine: Machine,
    *,
    processes: int,
    per_machine: int,
    image: PlanImage | None,
    share_prefix: bool,
    pass_tokens: int,
    role: Role,
    path: str | None,
    offload: bool,
) -> PlannedModel:
    """Return a frozen model next to the trained one; the arguments are those of `trained_model`.

    Args:
        path: of its checkpoint.
        offload: whether its weights are kept in host memory.
    """
    on_gpu, sharded = machine.gpu_bytes is not None, config.ds.zero_stage == 3
    settings = model_settings(config, share_prefix=share_prefix, role=role, on_gpu=on_gpu, path=path)
    estimated = estimate(settings, image)
    size = estimated.size
    shard = -(-size.weight_bytes // processes) if sharded else size.weight_bytes
    offloaded = sharded and on_gpu and offload
    return PlannedModel(
        role=role,
        estimate=estimated,
        states=None,
        resident=0 if offloaded else shard,
        gathered=gathered_bytes(size) if sharded else 0,
        sleeps=False,
        # It is in the policy's process, and finds the policy's features of images.
        context=0,
        pass_tokens=pass_tokens,
        host=shard if offloaded else 0,
        ranks=per_machine,
        gpus=processes,
        kept=kept_bytes(settings, image, limit_gib=config.ds.image_cache_gib, keeps=True),
    )


def zero_settings(config: SupervisedConfig, machine: Machine, *, processes: int) -> ZeroSettings:
    """Return what decides how the states of a supervised run's models are kept."""
    assert config.ds.param_dtype is not None, "resolve_sft fills it in"
    width = WIDTHS[config.ds.param_dtype]
    return ZeroSettings(
        stage=stage_of(config),
        ranks=processes,
        offload=bool(config.ds.adam_offload),
        weight_bytes=width,
        sum_bytes=4 if config.ds.grad_accum_dtype == "fp32" else width,
        on_gpu=machine.gpu_bytes is not None,
        passes=2 if config.train.batch_size > config.train.micro_batch_size * processes else 1,
        moment_bytes=moment_bytes(config.optim),
        muon=config.optim == "muon",
    )


def model_settings(
    config: SupervisedConfig, *, share_prefix: bool, role: Role, on_gpu: bool, path: str | None = None
) -> ModelSettings:
    """Return how a supervised run builds the model that it trains, or one that stays as it is at `path`."""
    trained = role in ("policy", "critic")
    path = path or config.model.model_name_or_path
    assert path is not None, "resolve_sft requires it"
    assert config.ds.param_dtype is not None, "resolve_sft fills it in"
    in_backward = trained and not on_gpu and stage_of(config) in (1, 2)
    return ModelSettings(
        path=path,
        role=role,
        param_dtype=config.ds.param_dtype,
        packing_samples=config.ds.packing_samples,
        share_prefix=share_prefix,
        max_len=config.data.max_len,
        attn_implementation=config.ds.attn_implementation,
        experts_implementation=config.ds.experts_implementation,
        lora_rank=config.ds.lora.rank if trained else 0,
        target_modules=config.ds.lora.target_modules,
        use_dora=config.ds.lora.use_dora,
        load_in_4bit=config.ds.load_in_4bit,
        trust_remote_code=config.train.trust_remote_code,
        freeze_prefix=config.model.freeze_prefix if trained else (),
        checkpointing=trained and bool(config.model.gradient_checkpointing_enable),
        checkpointed_layers=config.model.gradient_checkpointing_layers if trained else None,
        reentrant=config.model.gradient_checkpointing_reentrant,
        bytes_per_gradient=WIDTHS[config.ds.param_dtype] if in_backward else 0,
    )


def supervised_plan(
    config: SupervisedConfig,
    machine: Machine,
    models: Sequence[PlannedModel],
    *,
    per_machine: int,
    samples_per_row: int = 1,
    engine: PlannedEngine | None = None,
) -> Plan:
    """Return the plan of a run whose models, the trained one first, are all on every GPU.

    Args:
        samples_per_row: sequences of up to `--data.max_len` tokens that one row makes.
        engine: each process's engine, which gets the trained model's weights.
    """
    policy, on_gpu = models[0], machine.gpu_bytes is not None
    name = "each GPU" if on_gpu else "the machine"
    device = Device(
        name=name,
        models=list(models) * (1 if on_gpu else per_machine),
        engine=engine,
        bucket=BUCKET_BYTES if on_gpu and engine is not None else 0,
    )
    host = []
    if on_gpu:
        host.append(Phase(name="processes", size=machines.PROCESS * per_machine))
        if policy.host:
            host.append(Phase(name="optimizer, offloaded", size=policy.host * per_machine))
        for other in models[1:]:
            if other.host:
                host.append(Phase(name=f"{other.role}, offloaded", size=other.host * per_machine))
        if kept := max(model.kept for model in models):
            host.append(Phase(name="features of images", size=kept * per_machine))
        copies = 1 if config.ds.zero_stage == 3 else per_machine
        host.append(Phase(name="weights that are read or written", size=policy.estimate.size.read_bytes * copies))
    room = device.room(policy, usable=machine.usable)
    return Plan(
        machine=machine,
        devices=[device],
        host=host,
        pass_tokens=None,
        fitting_tokens=policy.passes.tokens(room, step=TOKEN_STEP) // samples_per_row,
        longest=config.data.max_len,
        group=None,
        engine_share=None if engine is None else engine.utilization,
    )


SIDES = 2


def plan_dpo(
    config: DPOConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None = None
) -> Plan:
    """Return the plan of a run whose settings are resolved; the arguments are those of `plan_sft`.

    The longest pair is assumed to fill a pass, without a common prefix.
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


def plan_kd(
    config: KDConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None = None
) -> Plan:
    """Return the plan of a run whose settings are resolved; the arguments are those of `plan_sft`."""
    path = config.teacher.model_name_or_path
    assert path is not None, "required by config.resolve"
    student = trained_model(
        config,
        machine,
        processes=processes,
        per_machine=per_machine,
        image=image,
        share_prefix=False,
        pass_tokens=config.data.max_len,
    )
    teacher = frozen_model(
        config,
        machine,
        processes=processes,
        per_machine=per_machine,
        image=image,
        share_prefix=False,
        pass_tokens=config.data.max_len,
        role="teacher",
        path=path,
        offload=config.teacher.offload,
    )
    if config.ds.zero_stage == 3:
        # Within the student's pass, too.
        student = replace(student, context=student.context + _output_layer_bytes(config, path))
    engine = None
    if config.rollout.on_policy_share:
        settings = model_settings(config, share_prefix=False, role="reference", on_gpu=machine.gpu_bytes is not None)
        # vLLM takes the weights whole, whatever the training does with them.
        settings = replace(settings, load_in_4bit=False)
        models = Device(name="", models=[student, teacher], engine=None, bucket=BUCKET_BYTES)
        room = models.beside_engine(usable=machine.usable, sleeps=False, tokens=config.data.max_len)
        engine = student_engine(config, machine, settings=settings, ranks=per_machine, room=room)
    return supervised_plan(config, machine, [student, teacher], per_machine=per_machine, engine=engine)


def _output_layer_bytes(config: KDConfig, path: str) -> int:
    assert config.ds.param_dtype is not None, "filled in by config.resolve"
    text = Checkpoint(path, trust_remote_code=config.train.trust_remote_code).config.get_text_config()
    return text.vocab_size * text.hidden_size * WIDTHS[config.ds.param_dtype]
