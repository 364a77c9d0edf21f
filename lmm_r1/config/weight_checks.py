"""Which settings of what becomes of a policy's weights contradict each other: a reference, an average, scaled losses."""

from lmm_r1.config.ppo import PPOConfig, PPOTrainConfig
from lmm_r1.config.shared import DeepSpeedConfig, OptimizerConfig
from lmm_r1.errors import UserError


def why_not_during_generation(config: PPOConfig) -> str | None:
    """Return why the reference cannot compute log-probs while groups are generated; None where it can."""
    if config.algo.kl.init_coef <= 0:
        return f"with --algo.kl.init_coef {config.algo.kl.init_coef:g} there is no reference model"
    if not config.train.async_enable:
        return None
    if config.train.colocate_all or config.train.colocate_actor_ref:
        return "with --train.async_enable the policy is updated during generation, on the GPUs of the reference"
    if config.ref.refresh_steps:
        return "with --train.async_enable and --ref.refresh_steps the next rollout begins before the reference is refreshed"
    return None


def check_reference(config: PPOConfig) -> None:
    """Raise UserError for a reference that could not follow the policy, or run when it is to."""
    why = why_not_during_generation(config)
    if config.ref.during_generation and why is not None:
        raise UserError(f"--ref.during_generation: {why}; leave it out")
    steps = config.ref.refresh_steps
    given = f"--ref.refresh_steps {steps}"
    if steps < 0:
        raise UserError(f"{given} must be at least 1, or 0 for a reference that stays as it is")
    if steps == 0:
        return
    if config.algo.kl.init_coef <= 0:
        raise UserError(f"{given}: with --algo.kl.init_coef {config.algo.kl.init_coef:g} there is no reference model")
    if config.ds.load_in_4bit:
        raise UserError(f"{given}: with --ds.load_in_4bit the reference is in 4 bits, and takes no other weights")
    if config.ds.tensor_parallel_size > 1:
        raise UserError(
            f"{given}: with --ds.tensor_parallel_size {config.ds.tensor_parallel_size} no rank has the policy's weights whole; "
            "leave one out"
        )


def check_average(config: PPOConfig) -> None:
    """Raise UserError for a moving average that nothing would be averaged in."""
    train = config.train
    if not train.enable_ema:
        if train.ema_beta != PPOTrainConfig.ema_beta:
            raise UserError(f"--train.ema_beta {train.ema_beta:g} has no part without --train.enable_ema; add it")
        return
    if not 0 < train.ema_beta < 1:
        raise UserError(f"--train.ema_beta {train.ema_beta:g} must be above 0 and below 1")
    if config.ds.zero_stage == 0:
        raise UserError(
            "--train.enable_ema averages the optimizer's weights in single precision, which --ds.zero_stage 0 does not keep; "
            "take 1, 2 or 3"
        )
    if config.ds.use_universal_ckpt:
        raise UserError("--train.enable_ema: a universal checkpoint (--ds.use_universal_ckpt) holds no moving average")


def check_fp16_optimizer(model: OptimizerConfig, ds: DeepSpeedConfig, *, prefix: str) -> None:
    """Raise UserError for an optimizer that makes no right updates of scaled losses."""
    if ds.param_dtype == "fp16" and model.optim == "muon":
        raise UserError(
            f"--{prefix}optim muon with --ds.param_dtype fp16: DeepSpeed divides Muon's updates, which have the length of no "
            f"gradient, by the scale of the loss; take --ds.param_dtype bf16, or --{prefix}optim adam"
        )
