"""Which settings of adapters, of weights in 4 bits, of optimizers in 8 bits and of kept features do not go together."""

from lmm_r1.config.shared import DeepSpeedConfig, OptimizerConfig
from lmm_r1.errors import UserError

EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
_FLAG = "--ds.load_in_4bit"


def check_adapters(ds: DeepSpeedConfig) -> None:
    """Raise UserError for kinds of adapters, or for 4 bits, without adapters, and where weights in 4 bits cannot be."""
    for name in ("use_dora", "use_rslora"):
        if getattr(ds.lora, name) and not ds.lora.rank:
            raise UserError(f"--ds.lora.{name} is a kind of LoRA; give --ds.lora.rank, too")
    if not ds.load_in_4bit:
        return
    if not ds.lora.rank:
        raise UserError(
            f"{_FLAG}: weights in 4 bits are not trained; give --ds.lora.rank for adapters on them, or leave it out"
        )
    if ds.zero_stage == 3:
        raise UserError(
            f"{_FLAG}: DeepSpeed cannot share weights in 4 bits out over GPUs; take --ds.zero_stage 2, with which each GPU "
            "has all of them in a quarter of the memory, or --ds.zero_stage 3 without 4 bits"
        )
    if ds.tensor_parallel_size > 1:
        raise UserError(
            f"{_FLAG} and --ds.tensor_parallel_size {ds.tensor_parallel_size}: a layer in 4 bits cannot be split; leave one "
            "out"
        )
    if ds.deepcompile:
        raise UserError(f"{_FLAG} and --ds.deepcompile: layers in 4 bits are not compiled; leave one out")
    if ds.use_universal_ckpt:
        raise UserError(
            f"{_FLAG} and --ds.use_universal_ckpt: universal checkpoints have no place for weights in 4 bits; resume on as "
            "many GPUs as before, without it"
        )


def check_image_cache(ds: DeepSpeedConfig) -> None:
    """Raise UserError for less memory than none."""
    if ds.image_cache_gib < 0:
        raise UserError(f"--ds.image_cache_gib {ds.image_cache_gib:g} must be 0 or more; 0 keeps nothing")


def check_eight_bit(model: OptimizerConfig, ds: DeepSpeedConfig, *, prefix: str, sleeps: bool = False) -> None:
    """Raise UserError where an optimizer's state in 8 bits could not be where other flags want it.

    Args:
        prefix: of the optimizer's flags.
        sleeps: whether the run's states wait in the host's memory while others have the GPU.
    """
    if model.optim not in EIGHT_BIT:
        return
    given = f"--{prefix}optim {model.optim}"
    if ds.adam_offload:
        raise UserError(
            f"{given} and --ds.adam_offload: DeepSpeed keeps the state of its own AdamW alone in CPU memory; take "
            f"--{prefix}optim adam with it, or leave it out"
        )
    if ds.zero_stage == 0:
        raise UserError(f"{given} is for --ds.zero_stage 1, 2 and 3; take one of them, or --{prefix}optim adam")
    if sleeps:
        raise UserError(
            f"{given} and --ds.enable_sleep: DeepSpeed moves the state of AdamW alone to the host's memory; take "
            f"--{prefix}optim adam with it, or leave it out"
        )
