"""The plans of RL and supervised runs: who is on which GPU, what each holds there, and the passes of its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, RMConfig, SupervisedConfig, model_path
from lmm_r1.config.hardware import MOST_PROMPTS, MOST_SAMPLES
from lmm_r1.config.ppo import MOST_GPU_PASS_TOKENS, MOST_PASS_TOKENS, PlacedModel
from lmm_r1.config.resolve import UNPLANNED
from lmm_r1.config.shared import EIGHT_BIT, OptimizerConfig
from lmm_r1.generation.weight_bucket import BUCKET_BYTES
from lmm_r1.models.loading import LoadSettings, Role, load_settings, rl_settings, trained_settings
from lmm_r1.tools.planning.estimates import DRIVER, PROCESS, WIDTHS, Machine, ModelSettings, PlanImage, estimate
from lmm_r1.tools.planning.pass_memory import MASTER_BYTES
from lmm_r1.tools.planning.pass_memory import Role as PlannedRole
from lmm_r1.tools.planning.pass_memory import ZeroSettings
from lmm_r1.tools.planning.plan import (
    Device,
    Phase,
    Plan,
    PlannedEngine,
    PlannedModel,
    planned_engine,
    planned_model,
    stored_phases,
)

# Sizes of passes are multiples of it.
TOKEN_STEP = 256
# Share of a GPU's memory that passes larger than usual leave free.
SPARE_SHARE = 0.15


def plan_ppo(config: PPOConfig, machine: Machine, *, image: PlanImage | None = None) -> Plan:
    """Return the plan of a run whose settings are resolved; nothing is loaded but the checkpoints' configs.

    Args:
        image: a prompt with an image, for a run that has images.
    """
    longest = config.data.max_len
    here: dict[Role, object] = {
        "policy": True,
        "critic": config.critic.model_name_or_path,
        "reference": config.needs_reference_model,
        "reward": config.reward.model_name_or_path,
    }
    models = {role: _model(config, machine, role, image=image) for role, is_here in here.items() if is_here}
    devices = _devices(config, machine, models, _engine(config, machine, models))
    counted = counts_tokens(config)
    fitting = _fitting_tokens(devices, machine)
    tokens = _pass_tokens(config, devices, machine, fitting=fitting) if counted else None
    # A sample that is longer than the passes has one for itself.
    largest = max(tokens, longest) if tokens is not None else config.train.micro_batch_size * longest
    log_probs = _log_prob_tokens(config, devices, machine, update=tokens, image=image)
    # Those of models that are not trained; of the others, the update's take more.
    passes = {True: largest, False: max(log_probs or 0, largest)}
    devices = [
        replace(one, models=[replace(model, pass_tokens=passes[model.states is not None]) for model in one.models])
        for one in devices
    ]
    return Plan(
        machine=machine,
        devices=devices,
        host=_host(config, machine, devices),
        pass_tokens=tokens,
        fitting_tokens=fitting,
        longest=longest,
        engine_share=next(device.engine for device in devices if device.engine is not None).utilization,
        log_prob_tokens=log_probs,
    )


def stage_of(config: PPOConfig | SupervisedConfig) -> int:
    """Return `--ds.zero_stage`, or its value without a plan."""
    stage = UNPLANNED["ds.zero_stage"] if config.ds.zero_stage is None else config.ds.zero_stage
    assert isinstance(stage, int), "a number of a stage"
    return stage


def zero_settings(
    config: PPOConfig | SupervisedConfig, optim: str, *, ranks: int, on_gpu: bool, passes: int
) -> ZeroSettings:
    """Return how the states of a model with this optimizer are stored; takes what `ZeroSettings` has."""
    assert config.ds.param_dtype is not None, "filled in by config.resolve"
    width = WIDTHS[config.ds.param_dtype]
    return ZeroSettings(
        stage=stage_of(config),
        ranks=ranks,
        offload=bool(config.ds.adam_offload),
        weight_bytes=width,
        sum_bytes=4 if config.ds.grad_accum_dtype == "fp32" else width,
        on_gpu=on_gpu,
        passes=passes,
        moment_bytes=1 if optim in EIGHT_BIT else MASTER_BYTES,
        muon=optim == "muon",
    )


def ordinary_tokens(config: PPOConfig) -> int:
    """Return the tokens of passes for which nothing is computed twice: enough to keep a GPU busy, or all of a rank's update."""
    ranks = max(1, config.actor.gpus // (config.ds.tensor_parallel_size * config.ds.ulysses_size))
    samples = max(1, (config.train.batch_size or MOST_SAMPLES) // ranks)
    return min(MOST_PASS_TOKENS, samples * config.data.max_len)


def _pass_tokens(config: PPOConfig, devices: Sequence[Device], machine: Machine, *, fitting: int) -> int:
    """Return the tokens of the update's passes: what the flag says, or what fits.

    Up to `MOST_PASS_TOKENS`, whatever fits is taken, and activations are kept or computed again so that it does
    (`planning.choices`). On GPUs passes grow beyond that into memory that is free anyway: up to `MOST_GPU_PASS_TOKENS`, but not
    into the last `SPARE_SHARE` of a GPU, as larger passes gain too little for any risk.
    """
    if config.train.max_tokens_per_gpu is not None:
        return config.train.max_tokens_per_gpu
    tokens = min(MOST_PASS_TOKENS, max(fitting, TOKEN_STEP))
    if machine.gpu_bytes is None or tokens < MOST_PASS_TOKENS:
        return tokens
    return max(tokens, min(MOST_GPU_PASS_TOKENS, _fitting_tokens(devices, _with_spare(machine))))


def _with_spare(machine: Machine) -> Machine:
    """Return a machine whose GPUs have less memory by `SPARE_SHARE`."""
    assert machine.gpu_bytes is not None, "of GPUs"
    return replace(machine, gpu_bytes=int(machine.gpu_bytes * (1 - SPARE_SHARE)))


def _log_prob_tokens(
    config: PPOConfig, devices: Sequence[Device], machine: Machine, *, update: int | None, image: PlanImage | None
) -> int | None:
    """Return the tokens of passes without gradients, which need far less memory; None if they equal the update's.

    The rule is that of `_pass_tokens`. A trained model's passes without gradients are those of the same model untrained.
    """
    if machine.gpu_bytes is None or update is None or config.rollout.max_tokens_per_gpu is not None:
        return config.rollout.max_tokens_per_gpu
    usable, found = _with_spare(machine).usable, [MOST_GPU_PASS_TOKENS]
    for device in devices:
        for model in device.models:
            passes = model.passes
            if model.states is not None:
                # As it would be built if it were not trained.
                trained: Role = "policy" if model.role == "policy" else "critic"
                frozen: Role = "reference" if trained == "policy" else "reward"
                path = path_of(config, trained)
                settings = model_settings(config, frozen, path=path, load=rl_settings(config, frozen))
                passes = estimate(settings, image).passes
            room = device.beside_engine(usable=usable, sleeps=True, tokens=0) - model.gathered
            room -= model.estimate.size.merging_bytes + device.asleep
            found.append(passes.tokens(room, step=TOKEN_STEP))
    return max(update, min(found))


def _engine(config: PPOConfig, machine: Machine, models: dict[Role, PlannedModel]) -> PlannedEngine:
    """Return an engine, which takes what the models next to it leave if no flag sets its share."""
    vllm, room = config.vllm, machine.usable
    if machine.gpu_bytes is not None and config.train.colocate_all:
        together = _devices(config, machine, models, None)[0]
        counted, longest = config.train.max_tokens_per_gpu or ordinary_tokens(config), config.data.max_len
        tokens = max(counted if counts_tokens(config) else config.train.micro_batch_size * longest, longest)
        room = together.beside_engine(usable=machine.usable, sleeps=bool(vllm.enable_sleep), tokens=tokens)
    prompts = config.rollout.vllm_generate_batch_size or config.rollout.batch_size or MOST_PROMPTS
    # vLLM holds the weights whole and unquantized, whatever the training does with them.
    load = replace(rl_settings(config, "reference"), load_in_4bit=False, freeze_prefix=())
    return planned_engine(
        ModelSettings(path=path_of(config, "policy"), role="reference", load=load),
        machine,
        utilization=vllm.gpu_memory_utilization,
        room=room,
        responses=-(-prompts * config.rollout.n_samples_per_prompt // vllm.engines),
        gpus=vllm.tensor_parallel_size,
        sleeps=bool(vllm.enable_sleep),
        ranks=max(1, vllm.gpus // config.actor.nodes) if machine.gpu_bytes is not None else vllm.engines,
        process=PROCESS,
    )


def counts_tokens(config: PPOConfig) -> bool:
    """Return whether passes are sized by `--train.max_tokens_per_gpu`."""
    shares = config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1
    return config.train.dynamic_batch_enable or shares


def path_of(config: PPOConfig, role: Role) -> str:
    """Return the checkpoint of one of a run's models."""
    own = {"critic": config.critic.model_name_or_path, "reward": config.reward.model_name_or_path}
    path = own.get(role, config.actor.model_name_or_path)
    assert path is not None, "the run has this model"
    return path


def model_settings(
    config: PPOConfig | SupervisedConfig, role: PlannedRole, *, path: str, load: LoadSettings
) -> ModelSettings:
    """Return how a run builds one of its models."""
    trained = role in ("policy", "critic")
    group = config.actor if isinstance(config, PPOConfig) else config.model
    return ModelSettings(
        path=path,
        role=role,
        load=load if trained else replace(load, freeze_visual_encoder=False, freeze_prefix=()),
        checkpointing=trained and bool(group.gradient_checkpointing_enable),
        reentrant=group.gradient_checkpointing_reentrant,
        entropy=role == "policy" and isinstance(config, PPOConfig) and config.actor.entropy_coef is not None,
    )


def _model(config: PPOConfig, machine: Machine, role: Role, *, image: PlanImage | None) -> PlannedModel:
    """Return one model's process; its passes are settled later."""
    own: dict[Role, PlacedModel] = {"critic": config.critic, "reference": config.ref, "reward": config.reward}
    group = own.get(role, config.actor)
    on_gpu, trained = machine.gpu_bytes is not None, role in ("policy", "critic")
    optim = group.optim if isinstance(group, OptimizerConfig) else ""
    # Ranks that share sequences share the models' states as well; those of tensor parallelism hold parts of it.
    zero = zero_settings(config, optim, ranks=max(1, group.gpus), on_gpu=on_gpu, passes=2)
    return planned_model(
        model_settings(config, role, path=path_of(config, role), load=rl_settings(config, role)),
        zero,
        image=image,
        ranks=group.gpus_per_node,
        gpus=group.gpus,
        offload=bool(config.ref.offload if role == "reference" else config.reward.offload),
        sleeps=on_gpu and trained and bool(config.ds.enable_sleep) and not config.ds.adam_offload,
        averages=role == "policy" and config.train.enable_ema,
    )


def _devices(
    config: PPOConfig, machine: Machine, models: dict[Role, PlannedModel], engine: PlannedEngine | None
) -> list[Device]:
    """Return the kinds of GPUs that a run has; without GPUs all processes are in one memory."""
    train = config.train
    if machine.gpu_bytes is None:
        processes = [model for model in models.values() for _ in range(model.ranks)]
        return [Device(name="the machine", models=processes, engine=engine)]

    def place(role: Role) -> Role:
        """Return the first of those that a model shares its GPUs with."""
        if role in ("critic", "reward") and train.colocate_critic_reward:
            return "critic"
        return "policy" if train.colocate_all or (role == "reference" and train.colocate_actor_ref) else role

    together: dict[Role, list[Role]] = {}
    for role in models:
        together.setdefault(place(role), []).append(role)
    devices = [
        Device(
            name=f"each GPU of {' and '.join(group)}",
            models=[models[role] for role in group],
            engine=engine if train.colocate_all and place_of == "policy" else None,
            bucket=2 * BUCKET_BYTES if "policy" in group else 0,
        )
        for place_of, group in together.items()
    ]
    if not train.colocate_all:
        devices.append(Device(name="each GPU of an engine", models=[], engine=engine))
    return devices


def _fitting_tokens(devices: Sequence[Device], machine: Machine) -> int:
    """Return the tokens of the largest pass with which the updates of policy and critic fit."""
    usable = machine.usable - (DRIVER if machine.gpu_bytes is None else 0)
    return min(
        model.passes.tokens(device.room(model, usable=usable), step=TOKEN_STEP)
        for device in devices
        for model in device.models
        if model.states is not None
    )


def _host(config: PPOConfig, machine: Machine, devices: list[Device]) -> list[Phase]:
    """Return the phases of one machine's host memory."""
    models = [model for device in devices for model in device.models]
    engine = next(device.engine for device in devices if device.engine is not None)
    parts = [Phase(name="the run's process and Ray's", size=DRIVER)]
    if machine.gpu_bytes is None:
        return parts
    processes = sum(model.ranks for model in models) + engine.ranks
    parts.append(Phase(name="workers", size=PROCESS * processes))
    if engine.host:
        parts.append(Phase(name="engines, asleep", size=engine.host * engine.ranks))
    kept = sum(model.kept * model.ranks for model in models)
    return [*parts, *stored_phases(models, kept=kept, stage=stage_of(config))]


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

    def add(role: PlannedRole, load: LoadSettings, *, path: str | None = None, offload: bool = False) -> None:
        settings = model_settings(config, role, path=path or model_path(config), load=load)
        model = planned_model(settings, zero, image=image, ranks=per_machine, gpus=processes, offload=offload)
        # Frozen models are in the process of the trained one, whose features of images they use.
        models.append(replace(model, pass_tokens=samples * longest, context=0 if models else model.context))

    models: list[PlannedModel] = []
    add("critic" if isinstance(config, RMConfig) else "policy", trained_settings(config, share_prefix=shares))
    frozen = load_settings(config, share_prefix=shares)
    if isinstance(config, DPOConfig) and config.needs_reference_model:
        add("reference", frozen, path=config.ref.model_name_or_path, offload=config.ref.offload)
    if isinstance(config, KDConfig):
        add("teacher", frozen, path=config.teacher.model_name_or_path, offload=config.teacher.offload)
    device, host = Device(name="the machine", models=models * per_machine), list[Phase]()
    if on_gpu:
        device = Device(name="each GPU", models=models)
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
    )
