"""The plan of a distillation: a student with its teacher, and maybe the engine that samples from it, on every GPU."""

from __future__ import annotations

from dataclasses import replace

from lmm_r1.config import KDConfig
from lmm_r1.generation.weight_bucket import BUCKET_BYTES
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.planning.engine_memory import student_engine
from lmm_r1.planning.estimates import WIDTHS, PlanImage
from lmm_r1.planning.machine import Machine
from lmm_r1.planning.placement import Device
from lmm_r1.planning.plan import Plan
from lmm_r1.planning.sft_plan import frozen_model, model_settings, supervised_plan, trained_model


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
