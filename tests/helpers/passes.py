"""Passes of models over padded batches, as tests write them down: a row per sample, padding on either side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lmm_r1.data.sample import SampleMedia, placed
from lmm_r1.models.actor import KitActor
from lmm_r1.models.output_layer import TokenDistribution
from lmm_r1.models.packed.packing import ModelSample


def samples_of(
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    action_mask: torch.Tensor | None = None,
    *,
    media: Sequence[SampleMedia] = (),
) -> list[ModelSample]:
    """Return the rows of a padded batch (B, T) as samples by themselves.

    Args:
        action_mask: (B, A), of the last A tokens; None for all tokens.
    """
    samples = []
    for row, (ids, mask) in enumerate(zip(sequences, attention_mask, strict=True)):
        columns = mask.nonzero().flatten()
        wanted = torch.ones(len(columns) - 1, dtype=torch.bool)
        if action_mask is not None:
            wanted = torch.zeros(len(ids) - 1, dtype=torch.bool)
            wanted[len(wanted) - action_mask.shape[1] :] = action_mask[row].bool()
            wanted = wanted[columns[:-1]]
        given = media[row] if media else None
        samples.append(ModelSample(token_ids=ids[columns], loss_mask=wanted, media=given))
    return samples


def next_log_probs(
    model: Any,
    sequences: torch.Tensor,
    action_mask: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    media: Sequence[SampleMedia] = (),
) -> torch.Tensor:
    """Return log-probs or values of a padded batch, (B, T - 1), 0 for tokens that are not wanted."""
    mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
    found = model(samples_of(sequences, mask, action_mask, media=media))
    places = mask.nonzero()
    last = torch.cat([places[1:, 0] != places[:-1, 0], torch.tensor([True])])
    rows, columns = places[~last].T
    within = torch.cat([torch.arange(int(length) - 1) for length in mask.sum(1)])
    return found.new_zeros(len(mask), mask.shape[1] - 1).index_put((rows, columns), found[rows, within])


def logits_of(
    actor: KitActor,
    sequences: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None = None,
    media: Sequence[SampleMedia] = (),
) -> torch.Tensor:
    """Return the logits of the distribution that is sampled from, (B, T, V), for a padded batch."""
    mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
    kit, config = actor.kit, actor.model_config
    given = [item.tensors for row in media for item in placed(row)]
    inputs = kit.forward_inputs(config, sequences, mask, kit.merge_media(given) if given else None)
    dtype = next(actor.model.parameters()).dtype
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    whole = kit.in_one_tower_run(config, {"input_ids": sequences, **cast})
    output = actor.model(**whole, attention_mask=mask, use_cache=False)
    sampler = TokenDistribution(
        temperature=actor.temperature, banned_token_ids=actor.banned_token_ids, cap=actor._logit_cap
    )
    return sampler(output["logits"])
