"""Sequence parallelism: what `--ds.ulysses_size` needs of other flags."""

from collections.abc import Mapping

from lmm_r1.config.shared import DeepSpeedConfig
from lmm_r1.errors import UserError


def check_ulysses(ds: DeepSpeedConfig, *, packs: bool, needs: str, gpus: Mapping[str, int]) -> None:
    """Raise UserError where ranks cannot share rows as `--ds.ulysses_size` says.

    Args:
        packs: whether samples are computed in packed rows.
        needs: which flags see to that, for the message.
        gpus: how many each model has, by the name of its group of flags.
    """
    size = ds.ulysses_size
    if size < 1:
        raise UserError(f"--ds.ulysses_size {size} must be at least 1")
    if size == 1:
        return
    if ds.tensor_parallel_size > 1:
        raise UserError(
            f"--ds.ulysses_size {size} and --ds.tensor_parallel_size {ds.tensor_parallel_size} both take the attention "
            "heads apart; give one of them"
        )
    if not packs:
        raise UserError(f"--ds.ulysses_size {size} splits packed rows; add {needs}")
    for name, count in gpus.items():
        if count % size:
            raise UserError(
                f"--ds.ulysses_size {size} does not divide the {count} GPUs of --{name}.num_nodes x "
                f"--{name}.num_gpus_per_node; take a number that does"
            )
