"""Whole runs in double precision, DeepSpeed's too: what is equal up to rounding is equal to the last digits there."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from lmm_r1.checkpoints.merge_job import DoublePrecision
from lmm_r1.models import loading


@contextmanager
def in_double_precision() -> Iterator[None]:
    """Let models be loaded as `param_dtype="fp64"`, and whatever would be in fp32, be it DeepSpeed's, be in fp64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.dict(loading.DTYPES, {"fp64": torch.float64}), DoublePrecision():
            yield
    finally:
        torch.set_default_dtype(default)
