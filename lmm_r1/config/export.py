"""A config as OpenRLHF reads it and as a run folder keeps it."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from lmm_r1.config.ppo import PPOConfig
from lmm_r1.config.sft import SFTConfig

SECRETS = (("logger", "wandb", "key"), ("logger", "swanlab", "key"))


def checkpoint_folder(config: PPOConfig | SFTConfig) -> Path:
    """Return where the run's checkpoints lie."""
    ckpt = config.ckpt
    return Path(ckpt.output_dir) / "checkpoints" if ckpt.path is None else Path(ckpt.path)


def to_openrlhf_args(config: PPOConfig | SFTConfig) -> SimpleNamespace:
    """Return the nested namespace that OpenRLHF's own parser and checks make of the same flags; it may be changed."""
    args = _namespace(dataclasses.asdict(config))
    # peft knows the one word as a shorthand; in a list it would be the name of a module.
    if args.ds.lora.target_modules == ("all-linear",):
        args.ds.lora.target_modules = "all-linear"
    # Upstream counts the ranks that get the same samples by this, in its meshes, batches and groups of workers.
    args.ds.ring_attn_size = config.ds.ulysses_size
    args.ckpt.path = str(checkpoint_folder(config))
    if isinstance(config, PPOConfig) and config.reward.remote_url:
        args.reward.remote_url = config.reward.remote_url.split(",")
    return args


def to_yaml(config: PPOConfig | SFTConfig) -> str:
    """Return the config as nested YAML that `--config` reads back; keys of other services are left out."""
    return yaml.safe_dump(without_secrets(config), sort_keys=False, allow_unicode=True)


def without_secrets(config: PPOConfig | SFTConfig) -> dict[str, Any]:
    """Return the config as nested dicts of plain values, in which keys of other services are None."""
    settings = dataclasses.asdict(config)
    for *groups, name in SECRETS:
        node = settings
        for group in groups:
            node = node[group]
        node[name] = None
    return {name: _plain(value) for name, value in settings.items()}


def _namespace(settings: dict[str, object]) -> SimpleNamespace:
    return SimpleNamespace(
        **{name: _namespace(value) if isinstance(value, dict) else value for name, value in settings.items()}
    )


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
