"""What a model leaves to chance in training: dropouts, jitter, noise."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def settings_of_chance(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, float]]:
    """Yield the name of each module with such a number, the module, its attribute and the number, 0 or more."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, float) and _is_chance(module, attribute):
                yield name, module, attribute, value


def chances(model: torch.nn.Module) -> list[str]:
    """Return the names of the attributes by which something of the model is left to chance."""
    return [f"{name}.{attribute}" for name, _, attribute, value in settings_of_chance(model) if value]


def _is_chance(module: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is the probability of a dropout or the strength of a noise."""
    return any(word in name for word in ("drop", "jitter", "noise")) or (
        name == "p" and "Dropout" in type(module).__name__
    )
