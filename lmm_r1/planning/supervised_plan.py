"""The plan of a supervised run: each process has its model, and a frozen one if the loss needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lmm_r1.config import DPOConfig, KDConfig, RMConfig, SupervisedConfig, model_path
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.models.loading import load_settings, trained_settings
from lmm_r1.planning.estimates import PROCESS, WIDTHS, Machine, ModelSettings, PlanImage
from lmm_r1.planning.pass_memory import Role, ZeroSettings
from lmm_r1.planning.plan import (
    Device,
    Phase,
    Plan,
    PlannedModel,
    planned_model,
    stored_phases,
)
from lmm_r1.planning.ppo_plan import TOKEN_STEP, stage_of, zero_settings

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
    longest = config.data.max_len
    of_sides = isinstance(config, DPOConfig | RMConfig)
    run = _Run(
        config=config,
        machine=machine,
        processes=processes,
        per_machine=per_machine,
        image=image,
        share_prefix=isinstance(config, DPOConfig | RMConfig) and config.train.shared_prefix_enable,
    )
    if isinstance(config, KDConfig):
        return _plan_kd(run, config)
    pass_tokens = SIDES * longest if of_sides else longest
    models = [run.trained(pass_tokens=pass_tokens, role="critic" if isinstance(config, RMConfig) else "policy")]
    if isinstance(config, DPOConfig) and config.needs_reference_model:
        reference = run.frozen(
            pass_tokens=pass_tokens, role="reference", path=config.ref.model_name_or_path, offload=config.ref.offload
        )
        models.append(reference)
    return run.plan(models, samples_per_row=SIDES if of_sides else 1)


def _plan_kd(run: _Run, config: KDConfig) -> Plan:
    path = config.teacher.model_name_or_path
    assert path is not None, "required by config.resolve"
    longest = config.data.max_len
    student = run.trained(pass_tokens=longest)
    teacher = run.frozen(pass_tokens=longest, role="teacher", path=path, offload=config.teacher.offload)
    if config.ds.zero_stage == 3:
        # The teacher's output layer is gathered within the student's pass.
        student = replace(student, context=student.context + _output_layer_bytes(config, path))
    return run.plan([student, teacher])


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The arguments of `plan_supervised`."""

    config: SupervisedConfig
    machine: Machine
    processes: int
    per_machine: int
    image: PlanImage | None
    share_prefix: bool
    """Whether the common prefix of a pass's samples is computed once."""

    @property
    def on_gpu(self) -> bool:
        return self.machine.gpu_bytes is not None

    @property
    def zero(self) -> ZeroSettings:
        train, ranks = self.config.train, self.processes
        passes = 2 if train.batch_size > train.micro_batch_size * ranks else 1
        return zero_settings(self.config, self.config.optim, ranks=ranks, on_gpu=self.on_gpu, passes=passes)

    def trained(self, *, pass_tokens: int, role: Role = "policy") -> PlannedModel:
        """Return the process of the trained model, a "critic" for a reward model with its value head."""
        zero, settings = self.zero, self.settings(role=role)
        settings = replace(settings, bytes_per_gradient=0) if zero.sums_alone else settings
        return self._planned(settings, pass_tokens=pass_tokens)

    def frozen(self, *, pass_tokens: int, role: Role, path: str | None, offload: bool) -> PlannedModel:
        """Return a frozen model in the process of the trained one, whose features of images it uses."""
        settings = self.settings(role=role, path=path)
        return replace(self._planned(settings, pass_tokens=pass_tokens, keeps=True, offload=offload), context=0)

    def _planned(
        self, settings: ModelSettings, *, pass_tokens: int, keeps: bool = False, offload: bool = False
    ) -> PlannedModel:
        model = planned_model(
            settings,
            self.zero,
            image=self.image,
            ranks=self.per_machine,
            gpus=self.processes,
            cache_gib=self.config.ds.image_cache_gib,
            keeps=keeps,
            offload=offload,
        )
        return replace(model, pass_tokens=pass_tokens)

    def settings(self, *, role: Role, path: str | None = None) -> ModelSettings:
        """Return how the run builds the model that it trains, or a frozen one at `path`."""
        config, trained = self.config, role in ("policy", "critic")
        assert config.ds.param_dtype is not None, "resolve fills it in"
        in_backward = trained and not self.on_gpu and stage_of(config) in (1, 2)
        load_as = trained_settings if trained else load_settings
        return ModelSettings(
            path=path or model_path(config),
            role=role,
            load=load_as(config, share_prefix=self.share_prefix),
            checkpointing=trained and bool(config.model.gradient_checkpointing_enable),
            reentrant=config.model.gradient_checkpointing_reentrant,
            bytes_per_gradient=WIDTHS[config.ds.param_dtype] if in_backward else 0,
        )

    def plan(self, models: Sequence[PlannedModel], *, samples_per_row: int = 1) -> Plan:
        """Return the plan of a run whose models, the trained one first, are all on every GPU.

        Args:
            samples_per_row: sequences of up to `--data.max_len` tokens that one row makes.
        """
        policy, per_machine = models[0], self.per_machine
        device = Device(
            name="each GPU" if self.on_gpu else "the machine",
            models=list(models) * (1 if self.on_gpu else per_machine),
            engine=None,
            bucket=0,
        )
        room = device.room(policy, usable=self.machine.usable)
        return Plan(
            machine=self.machine,
            devices=[device],
            host=self._host(models) if self.on_gpu else [],
            pass_tokens=None,
            fitting_tokens=policy.passes.tokens(room, step=TOKEN_STEP) // samples_per_row,
            longest=self.config.data.max_len,
        )

    def _host(self, models: Sequence[PlannedModel]) -> list[Phase]:
        kept = max(model.kept for model in models) * self.per_machine
        stored = stored_phases(models, kept=kept, stage=stage_of(self.config))
        return [Phase(name="processes", size=PROCESS * self.per_machine), *stored]


def _output_layer_bytes(config: KDConfig, path: str) -> int:
    assert config.ds.param_dtype is not None, "filled in by config.resolve"
    text = Checkpoint(path, trust_remote_code=config.train.trust_remote_code).config.get_text_config()
    return text.vocab_size * text.hidden_size * WIDTHS[config.ds.param_dtype]
