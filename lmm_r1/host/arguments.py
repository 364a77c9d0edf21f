"""The namespace that OpenRLHF's workers read, made from a run's config."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig, SupervisedConfig, checkpoint_folder, unplanned
from lmm_r1.config.differences import only_defaults


def to_openrlhf_args(config: PPOConfig | SupervisedConfig) -> SimpleNamespace:
    """Return the nested namespace that OpenRLHF's own parser and checks make of the same flags; it may be changed."""
    settings = dataclasses.asdict(unplanned(config))
    for flag, known in only_defaults(dotted.leaf_types(type(config))).items():
        *groups, name = flag.split(".")
        functools.reduce(dict.__getitem__, groups, settings)[name] = known.value
    args = _namespace(settings)
    # peft knows the one word as a shorthand; in a list it would be the name of a module.
    if args.ds.lora.target_modules == ("all-linear",):
        args.ds.lora.target_modules = "all-linear"
    # Upstream counts the ranks that get the same samples by this, in its meshes, batches and groups of workers.
    args.ds.ring_attn_size = config.ds.ulysses_size
    args.ckpt.path = str(checkpoint_folder(config))
    if isinstance(config, PPOConfig):
        # Our engines choose by the model's size; nobody reads this one.
        args.vllm.enforce_eager = bool(config.vllm.enforce_eager)
    if isinstance(config, PPOConfig) and config.reward.remote_url:
        args.reward.remote_url = config.reward.remote_url.split(",")
    return args


def _namespace(settings: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{name: _namespace(value) if isinstance(value, dict) else value for name, value in settings.items()}
    )
