"""The plan of a supervised run: each process has its model, and a frozen one if the loss needs it."""

from __future__ import annotations

from dataclasses import replace

from lmm_r1.config import DPOConfig, KDConfig, RMConfig, SupervisedConfig, model_path
from lmm_r1.generation.weight_bucket import BUCKET_BYTES
from lmm_r1.models.loading import load_settings, trained_settings
from lmm_r1.planning.estimates import PROCESS, Machine, PlanImage
from lmm_r1.planning.pass_memory import Role
from lmm_r1.planning.plan import Device, Phase, Plan, PlannedEngine, planned_engine, planned_model, stored_phases
from lmm_r1.planning.ppo_plan import TOKEN_STEP, model_settings, stage_of, zero_settings

# A pair of responses.
SIDES = 2


def plan_supervised(
    config: SupervisedConfig, machine: Machine, *, processes: int, per_machine: int, image: PlanImage | None = None
) -> Plan:
    """Return the plan of a run whose settings are resolved.

    The longest row, or pair without a common prefix, is assumed to fill a pass: what else a micro-batch holds depends on
    the rows.

    Args:
        processes: of the run, each with its own GPU if there are GPUs.
        per_machine: how many of them are on one machine.
        image: a conversation with an image, for a run that has images.
    """
    longest, on_gpu, train = config.data.max_len, machine.gpu_bytes is not None, config.train
    samples = SIDES if isinstance(config, DPOConfig | RMConfig) else 1
    shares = isinstance(config, DPOConfig | RMConfig) and config.train.shared_prefix_enable
    passes = 2 if train.batch_size > train.micro_batch_size * processes else 1
    zero = zero_settings(config, config.optim, ranks=processes, on_gpu=on_gpu, passes=passes)

    def frozen(role: Role, *, path: str | None, offload: bool) -> None:
        """Add a frozen model to the process of the trained one, whose features of images it uses."""
        load = load_settings(config, share_prefix=shares)
        settings = model_settings(config, role, path=path or model_path(config), load=load)
        model = planned_model(settings, zero, image=image, ranks=per_machine, gpus=processes, offload=offload)
        models.append(replace(model, pass_tokens=samples * longest, context=0))

    role: Role = "critic" if isinstance(config, RMConfig) else "policy"
    load = trained_settings(config, share_prefix=shares)
    settings = model_settings(config, role, path=model_path(config), load=load)
    trained = planned_model(settings, zero, image=image, ranks=per_machine, gpus=processes)
    models = [replace(trained, pass_tokens=samples * longest)]
    if isinstance(config, DPOConfig) and config.needs_reference_model:
        frozen("reference", path=config.ref.model_name_or_path, offload=config.ref.offload)
    if isinstance(config, KDConfig):
        frozen("teacher", path=config.teacher.model_name_or_path, offload=config.teacher.offload)
    device = Device(
        name="each GPU" if on_gpu else "the machine",
        models=models if on_gpu else models * per_machine,
        engine=None,
        bucket=0,
    )
    if isinstance(config, KDConfig) and config.rollout.on_policy_share:
        engine = _student_engine(config, machine, device, per_machine=per_machine)
        device = replace(device, engine=engine, bucket=BUCKET_BYTES if on_gpu else 0)
    host = []
    if on_gpu:
        kept = max(model.kept for model in models) * per_machine
        stored = stored_phases(models, kept=kept, stage=stage_of(config))
        host = [Phase(name="processes", size=PROCESS * per_machine), *stored]
    room = device.room(models[0], usable=machine.usable)
    return Plan(
        machine=machine,
        devices=[device],
        host=host,
        pass_tokens=None,
        fitting_tokens=models[0].passes.tokens(room, step=TOKEN_STEP) // samples,
        longest=longest,
        engine_share=None if device.engine is None else device.engine.utilization,
    )


def _student_engine(config: KDConfig, machine: Machine, models: Device, *, per_machine: int) -> PlannedEngine:
    """Return each process's engine, which samples the student's responses next to its models."""
    # vLLM holds the weights whole and unquantized, whatever the training does with them.
    load = replace(load_settings(config), load_in_4bit=False)
    reserved = replace(models, bucket=BUCKET_BYTES)
    return planned_engine(
        model_settings(config, "reference", path=model_path(config), load=load),
        machine,
        utilization=config.vllm.gpu_memory_utilization,
        room=reserved.beside_engine(usable=machine.usable, sleeps=False, tokens=config.data.max_len),
        responses=-(-config.train.batch_size // per_machine),
        ranks=per_machine,
    )
