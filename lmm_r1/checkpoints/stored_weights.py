"""A model's weights under the names and in the shapes of its checkpoint, which vLLM loads.

Transformers 5 holds many in others: it renames them, and the experts of a layer are one tensor (`conversion_mapping`).
Saving a model reverts that for all weights at once; here it is done for as few as belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Weights of a model that can be turned into tensors of its checkpoint by themselves."""

    names: tuple[str, ...]
    """Of the parameters in the model."""
    stored_name: str | None
    """Of the one tensor that is the same in the checkpoint; None where tensors are split, joined or turned."""


def stored_weights(model: PreTrainedModel, names: Iterable[str]) -> list[StoredWeights]:
    """Return a model's parameters, of which all names are given, those together that make up a tensor of the checkpoint."""
    renamings, converters = _reversed(model)
    groups: dict[str, list[str]] = {}
    same: dict[str, bool] = {}
    for name in names:
        stored, pattern = rename_source_key(name, renamings, converters, reverse=True)
        groups.setdefault(stored, []).append(name)
        same[stored] = pattern is None
    return [
        StoredWeights(names=tuple(names), stored_name=stored if same[stored] else None)
        for stored, names in groups.items()
    ]


def as_stored(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors that the weights of one group, whole and by their names in the model, make up."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(weights)).items()}


def _reversed(model: PreTrainedModel) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """Return what `revert_weight_conversion` does to a name, in order."""
    # Those that were used when the model was loaded; a model that was not has them all, as there.
    used = getattr(model, "_weight_conversions", None)
    if used is None:
        known = get_model_conversion_mapping(model, add_legacy=False)
        used = [one for one in known if not isinstance(one, PrefixChange)]
    back = [one.reverse_transform() for one in reversed(used)]
    renamings = [one for one in back if isinstance(one, WeightRenaming)]
    return renamings, [one for one in back if isinstance(one, WeightConverter)]
