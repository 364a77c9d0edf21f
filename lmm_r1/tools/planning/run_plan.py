"""The plans of RL and supervised runs: who is on which GPU, what each holds there, and the passes of its updates."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, RMConfig, SupervisedConfig, model_path
from lmm_r1.config.hardware import MOST_PROMPTS, MOST_SAMPLES, gpu_shares
from lmm_r1.config.ppo import MOST_GPU_PASS_TOKENS, MOST_PASS_TOKENS
from lmm_r1.config.resolve import UNPLANNED
from lmm_r1.config.shared import EIGHT_BIT, OptimizerConfig
from lmm_r1.generation.engine_arguments import WORKSPACE, engine_bytes, kv_bytes_per_token, share_of
from lmm_r1.generation.weight_bucket import BUCKET_BYTES
from lmm_r1.models.loading import LoadSettings, Role, load_settings, rl_settings, trained_settings
from lmm_r1.tools.planning.pass_memory import (
    MASTER_BYTES,
    ModelSettings,
    PlannedRole,
    ZeroSettings,
    gathered_bytes,
    trained_states,
)
from lmm_r1.tools.planning.plan import (
    CONTEXT,
    DRIVER,
    GIB,
    PROCESS,
    SLEEPING_ENGINE,
    WIDTHS,
    Device,
    Machine,
    Plan,
    PlanImage,
    PlannedEngine,
    PlannedModel,
    kept_bytes,
    passes_of,
    size_of,
)

# Sizes of passes are multiples of it.
TOKEN_STEP = 256
# Share of a GPU's memory that passes larger than usual leave free.
SPARE_SHARE = 0.15
# On CPUs vLLM keeps its linear layers' weights once more, packed for its kernels.
CPU_COPIES = 2
GROUPS: Mapping[Role, str] = {"policy": "actor", "critic": "critic", "reference": "ref", "reward": "reward"}
"""The groups of flags of an RL run's models."""


def plan_ppo(config: PPOConfig, machine: Machine, *, image: PlanImage | None = None) -> Plan:
    """Return the plan of a run whose settings are resolved; nothing is loaded but the checkpoints' configs.

    Args:
        image: a prompt with an image, for a run that has images.
    """
    longest = config.data.max_len
    placed = [role for role, group in GROUPS.items() if group in config.placed]
    models = {role: _model(config, machine, role, image=image) for role in placed}
    engine = _engine(config, machine, models)
    devices = list(_devices(config, machine, models, engine))
    counted, given = counts_tokens(config), config.train.max_tokens_per_gpu
    fitting = _fitting_tokens(devices, usable=machine.usable - (DRIVER if machine.gpu_bytes is None else 0))
    # Usable bytes of a GPU without its last `SPARE_SHARE`.
    spared = None
    if machine.gpu_bytes is not None:
        spared = replace(machine, gpu_bytes=int(machine.gpu_bytes * (1 - SPARE_SHARE))).usable
    tokens = _pass_tokens(config, devices, fitting=fitting, spared=spared) if counted else None
    # A sample that is longer than the passes has one for itself.
    largest = max(tokens, longest) if tokens is not None else config.train.micro_batch_size * longest
    log_probs = _log_prob_tokens(config, devices, update=tokens, spared=spared, image=image)
    # Those of models that are not trained; of the others, the update's take more.
    passes = {True: largest, False: max(log_probs or 0, largest)}
    models = {role: replace(one, pass_tokens=passes[one.states is not None]) for role, one in models.items()}
    return Plan(
        machine=machine,
        devices=list(_devices(config, machine, models, engine)),
        host=_host(config, machine, models.values(), engine),
        pass_tokens=tokens,
        fitting_tokens=fitting,
        longest=longest,
        wanted_tokens=ordinary_tokens(config) if counted and given is None else 0,
        engine_share=engine.utilization,
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


def _pass_tokens(config: PPOConfig, devices: Sequence[Device], *, fitting: int, spared: int | None) -> int:
    """Return the tokens of the update's passes: what the flag says, or what fits.

    Up to `MOST_PASS_TOKENS`, whatever fits is taken, and activations are kept or computed again so that it does
    (`planning.choices`). On GPUs passes grow beyond that into memory that is free anyway: up to `MOST_GPU_PASS_TOKENS`, but not
    into the last `SPARE_SHARE` of a GPU, as larger passes gain too little for any risk.
    """
    if config.train.max_tokens_per_gpu is not None:
        return config.train.max_tokens_per_gpu
    tokens = min(MOST_PASS_TOKENS, max(fitting, TOKEN_STEP))
    if spared is None or tokens < MOST_PASS_TOKENS:
        return tokens
    return max(tokens, min(MOST_GPU_PASS_TOKENS, _fitting_tokens(devices, usable=spared)))


def _log_prob_tokens(
    config: PPOConfig, devices: Sequence[Device], *, update: int | None, spared: int | None, image: PlanImage | None
) -> int | None:
    """Return the tokens of passes without gradients, which need far less memory; None if they equal the update's.

    The rule is that of `_pass_tokens`. A trained model's passes without gradients are those of the same model untrained.
    """
    if spared is None or update is None or config.rollout.max_tokens_per_gpu is not None:
        return config.rollout.max_tokens_per_gpu
    found = [MOST_GPU_PASS_TOKENS]
    for device in devices:
        for model in device.models:
            passes = model.passes
            if model.states is not None:
                # As it would be built if it were not trained.
                frozen: Role = "reference" if model.role == "policy" else "reward"
                path, load = path_of(config, model.role), rl_settings(config, frozen)
                passes = passes_of(model_settings(config, frozen, path=path, load=load), image)
            room = device.beside_engine(usable=spared, sleeps=True, tokens=0) - model.gathered
            room -= model.size.merging_bytes + device.asleep
            found.append(passes.tokens(room, step=TOKEN_STEP))
    return max(update, min(found))


def _engine(config: PPOConfig, machine: Machine, models: Mapping[Role, PlannedModel]) -> PlannedEngine:
    """Return an engine; if no flag sets its share, it takes what it needs of what the models next to it leave."""
    vllm, longest, sleeps = config.vllm, config.data.max_len, bool(config.vllm.enable_sleep)
    # vLLM holds the weights whole and unquantized, whatever the training does with them.
    load = replace(rl_settings(config, "reference"), load_in_4bit=False, freeze_prefix=())
    settings = ModelSettings(path=path_of(config, "policy"), role="reference", load=load)
    whole = size_of(settings).weight_bytes
    if machine.gpu_bytes is None:
        cache = int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
        share = vllm.engines * (CPU_COPIES * whole + cache + PROCESS)
        return PlannedEngine(weights=whole, share=share, asleep=share, ranks=vllm.engines)
    model, width, gpu_bytes = settings.checkpoint.config, WIDTHS[load.param_dtype], machine.gpu_bytes
    gpus = vllm.tensor_parallel_size
    least = whole // gpus + WORKSPACE + kv_bytes_per_token(model, width=width) // gpus * longest
    utilization, room = vllm.gpu_memory_utilization, machine.usable
    if utilization is None:
        if config.train.colocate_all:
            counted = config.train.max_tokens_per_gpu or ordinary_tokens(config)
            tokens = max(counted if counts_tokens(config) else config.train.micro_batch_size * longest, longest)
            device = next(_devices(config, machine, models, None))
            room = device.beside_engine(usable=machine.usable, sleeps=sleeps, tokens=tokens)
        prompts = config.rollout.vllm_generate_batch_size or config.rollout.batch_size or MOST_PROMPTS
        needed = engine_bytes(
            model,
            weights=whole,
            width=width,
            max_len=longest,
            responses=-(-prompts * config.rollout.n_samples_per_prompt // vllm.engines),
            gpu_bytes=gpu_bytes,
            gpus=gpus,
        )
        # With too little room it asks for the least, and the plan says what is missing.
        utilization = share_of(needed, room=max(room, least + gpu_bytes // 100), gpu_bytes=gpu_bytes)
    share = int(gpu_bytes * utilization)
    return PlannedEngine(
        weights=whole // gpus,
        utilization=utilization,
        share=share,
        asleep=SLEEPING_ENGINE if sleeps else share,
        least=least,
        host=whole // gpus if sleeps else 0,
        ranks=max(1, vllm.gpus // config.actor.nodes),
    )


def counts_tokens(config: PPOConfig) -> bool:
    """Return whether passes are sized by `--train.max_tokens_per_gpu`."""
    shares = config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1
    return config.train.dynamic_batch_enable or shares


def path_of(config: PPOConfig, role: PlannedRole) -> str:
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
    group = config.placed[GROUPS[role]]
    optim = group.optim if isinstance(group, OptimizerConfig) else ""
    # Ranks that share sequences share the models' states as well; those of tensor parallelism hold parts of it.
    zero = zero_settings(config, optim, ranks=group.gpus, on_gpu=machine.gpu_bytes is not None, passes=2)
    settings = model_settings(config, role, path=path_of(config, role), load=rl_settings(config, role))
    offload = bool(config.ref.offload if role == "reference" else config.reward.offload)
    model = planned_model(settings, zero, image=image, ranks=group.gpus_per_node, offload=offload)
    if (states := model.states) is None:
        return model
    # Of adapters, rank 0 averages the merged weights.
    averaged = model.size.parameters if config.ds.lora.rank else -(-model.size.trained // zero.ranks)
    average = MASTER_BYTES * averaged if role == "policy" and config.train.enable_ema else 0
    if not zero.on_gpu:
        # There the models are in host memory.
        return replace(model, context=model.context + average)
    sleeps = bool(config.ds.enable_sleep) and not config.ds.adam_offload
    waiting = states.asleep_in_host if sleeps else 0
    return replace(model, host=model.host + waiting + average, sleeps=sleeps)


def planned_model(
    settings: ModelSettings, zero: ZeroSettings, *, image: PlanImage | None, ranks: int, offload: bool = False
) -> PlannedModel:
    """Return one model's process; what it takes of a pass of no tokens.

    Args:
        ranks: its processes on one machine.
        offload: whether a frozen model's weights are in host memory.
    """
    size, kept, shared = size_of(settings), kept_bytes(settings, image), zero.stage == 3
    model = PlannedModel(
        role=settings.role,
        size=size,
        passes=passes_of(settings, image),
        gathered=gathered_bytes(size) if shared else 0,
        context=CONTEXT if zero.on_gpu else PROCESS + kept,
        ranks=ranks,
        gpus=zero.ranks,
        kept=kept,
    )
    if settings.role in ("policy", "critic"):
        states = trained_states(size, zero)
        return replace(model, states=states, host=states.host)
    shard = -(-size.weight_bytes // zero.ranks) if shared else size.weight_bytes
    away = shared and zero.on_gpu and offload
    return replace(model, resident=0 if away else shard, host=shard if away else 0)


def _devices(
    config: PPOConfig, machine: Machine, models: Mapping[Role, PlannedModel], engine: PlannedEngine | None
) -> Iterator[Device]:
    """Yield the kinds of GPUs that a run has; without GPUs all processes are in one memory."""
    if machine.gpu_bytes is None:
        processes = [model for model in models.values() for _ in range(model.ranks)]
        yield Device(name="the machine", models=processes, engine=engine)
        return
    for share in gpu_shares(config):
        roles = [role for role in models if GROUPS[role] in share.models]
        yield Device(
            name=f"each GPU of {' and '.join(roles) or 'an engine'}",
            models=[models[role] for role in roles],
            engine=engine if share.engines else None,
            bucket=2 * BUCKET_BYTES if "policy" in roles else 0,
        )


def _fitting_tokens(devices: Sequence[Device], *, usable: int) -> int:
    """Return the tokens of the largest pass with which the updates fit on devices with so many bytes."""
    return min(
        model.passes.tokens(device.room(model, usable=usable), step=TOKEN_STEP)
        for device in devices
        for model in device.models
        if model.states is not None
    )


def _host(
    config: PPOConfig, machine: Machine, models: Collection[PlannedModel], engine: PlannedEngine
) -> dict[str, int]:
    """Return what one machine's host memory holds."""
    parts = {"the run's process and Ray's": DRIVER}
    if machine.gpu_bytes is None:
        return parts
    parts["workers"] = PROCESS * (sum(model.ranks for model in models) + engine.ranks)
    if engine.host:
        parts["engines, asleep"] = engine.host * engine.ranks
    kept = sum(model.kept * model.ranks for model in models)
    return parts | stored_phases(models, kept=kept, stage=stage_of(config))


def stored_phases(models: Collection[PlannedModel], *, kept: int, stage: int) -> dict[str, int]:
    """Return what a machine's memory holds of a run's models, the policy first, in addition to their processes.

    Args:
        kept: bytes of features of images.
    """
    parts = {f"{one.role}, offloaded": one.host * one.ranks for one in models if one.host}
    if kept:
        parts["features of images"] = kept
    # Rank 0 gathers the weights whole to write them; before ZeRO-3 every rank has read them.
    policy = next(iter(models))
    copies = 1 if stage == 3 else policy.ranks
    return {**parts, "weights that are read or written": policy.size.read_bytes * copies}


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
    # Of pairs there are two responses.
    samples = 2 if isinstance(config, DPOConfig | RMConfig) else 1
    shares = isinstance(config, DPOConfig | RMConfig) and config.train.shared_prefix_enable
    passes = 2 if train.batch_size > train.micro_batch_size * processes else 1
    zero = zero_settings(config, config.optim, ranks=processes, on_gpu=on_gpu, passes=passes)

    def add(role: PlannedRole, load: LoadSettings, *, path: str | None = None, offload: bool = False) -> None:
        settings = model_settings(config, role, path=path or model_path(config), load=load)
        model = planned_model(settings, zero, image=image, ranks=per_machine, offload=offload)
        # Frozen models are in the process of the trained one, whose features of images they use.
        models.append(replace(model, pass_tokens=samples * longest, context=0 if models else model.context))

    models: list[PlannedModel] = []
    add("critic" if isinstance(config, RMConfig) else "policy", trained_settings(config, share_prefix=shares))
    frozen = load_settings(config, share_prefix=shares)
    if isinstance(config, DPOConfig) and config.needs_reference_model:
        add("reference", frozen, path=config.ref.model_name_or_path, offload=config.ref.offload)
    if isinstance(config, KDConfig):
        add("teacher", frozen, path=config.teacher.model_name_or_path, offload=config.teacher.offload)
    device, host = Device(name="the machine", models=models * per_machine), dict[str, int]()
    if on_gpu:
        device = Device(name="each GPU", models=models)
        kept = max(model.kept for model in models) * per_machine
        host = {"processes": PROCESS * per_machine, **stored_phases(models, kept=kept, stage=stage_of(config))}
    return Plan(
        machine=machine,
        devices=[device],
        host=host,
        pass_tokens=None,
        fitting_tokens=_fitting_tokens([device], usable=machine.usable) // samples,
        longest=longest,
        wanted_tokens=train.micro_batch_size * longest,
    )
