"""How far engine and trainer may be apart."""

from lmm_r1.config.ppo import PPOConfig
from lmm_r1.errors import UserError

# Mean distances per token. Rounding to bfloat16 makes 0.01 to 0.05 with released models and vLLM's kernels, experts
# included, and single precision below 1e-3, with TF32 too. A wrong model is off by 0.1 and more.
LIMITS = {"fp32": 0.01, "bf16": 0.1, "fp16": 0.1}


def mismatch_limit(config: PPOConfig) -> float:
    """Return `--algo.mismatch_limit`, or what it is for the weights' precision."""
    limit = config.algo.mismatch_limit
    return LIMITS[config.ds.param_dtype] if limit is None else limit


def check_mismatch_limit(config: PPOConfig) -> None:
    """Raise UserError for a limit that every run is beyond."""
    limit = config.algo.mismatch_limit
    if limit is not None and not limit > 0:
        raise UserError(f"--algo.mismatch_limit {limit:g} must be above 0; inf lets every run pass")
