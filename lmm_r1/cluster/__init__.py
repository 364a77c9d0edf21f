"""The Ray cluster that a run joins: what its workers find when they start (here), its nodes and their shared files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

KIT_VARIABLE = "LMM_R1_KIT"
"""The files of kits that were registered, with semicolons between them; workers inherit it."""


def run_environment() -> dict[str, str]:
    """Return the environment variables of a training run's workers; what the user has set stays."""
    from lmm_r1 import cpu
    from lmm_r1.cluster import nodes

    variables = {"TOKENIZERS_PARALLELISM": "true", "VLLM_LOGGING_LEVEL": "WARNING", **cpu.worker_environment()}
    variables |= {} if nodes.joins() else nodes.LOOPBACK_ENVIRONMENT
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def worker_runtime(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's runtime environment for workers with these environment variables."""
    kits = {name: value for name in (KIT_VARIABLE,) if (value := os.environ.get(name))}
    return {"env_vars": {**environment, **kits}, "worker_process_setup_hook": "lmm_r1.cpu.prepare_worker"}
