"""Value models and their checkpoints, and requests to reward servers that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from helpers.engines import disturb
from helpers.packed_batches import Batch
from helpers.tiny_models import MAX_LEN, flat_value_model

from lmm_r1.data.messages import Row, to_json
from lmm_r1.models.actor import KitValueModel
from lmm_r1.scoring.reward_model import RewardModel

HEAD = "score"


def make_value_model(folder: Path, kind: Literal["critic", "reward"] = "critic", **settings: object) -> KitValueModel:
    """Return the checkpoint's critic or reward model in fp32, in evaluation mode; a new head is always the same one."""
    torch.manual_seed(0)
    given = {"attn_implementation": "sdpa", "param_dtype": "fp32", "value_head_prefix": HEAD, "max_len": MAX_LEN}
    given |= settings
    return flat_value_model(str(folder), kind, **given).eval()


def values_of(model: KitValueModel, batch: Batch) -> list[torch.Tensor]:
    """Return the values of each sample's loss tokens from one call, (L,) each."""
    values = model(batch.for_model)  # (B, A)
    wanted = batch.wanted
    assert not values[~wanted].any()
    return [values[row][mask] for row, mask in enumerate(wanted)]


def rewards_of(model: KitValueModel, batch: Batch) -> torch.Tensor:
    """Return the reward of each sample from one call, (B,)."""
    return model(batch.for_model, of_samples=True)


def one_by_one(batch: Batch) -> Sequence[Batch]:
    return [Batch((sample,)) for sample in batch.samples]


def save_reward_model(checkpoint: Path, folder: Path, **settings: object) -> Path:
    """Write a reward model of a small random checkpoint, whose rewards are as far apart as a trained one's."""
    model = make_value_model(checkpoint)
    disturb(model, seed=1)
    torch.nn.init.normal_(model.head.weight, std=0.2, generator=torch.Generator().manual_seed(2))
    for name, value in settings.items():
        setattr(model.model.config, name, value)
    processor = model.kit.load_processor(str(checkpoint), trust_remote_code=False)
    model.save(folder, processor=processor, weights=model.state_dict())
    return folder


def sent_by_rollouts(model: RewardModel, row: Row, responses: Sequence[str]) -> dict[str, Any]:
    """Return the request for responses to a row: the prompt as messages, and the whole sample as decoded ids."""
    tokenizer = model.kit.tokenizer_of(model.processor)
    prompt = tokenizer.decode(model.encode_prompt(row).engine_token_ids, skip_special_tokens=False)
    return {
        "query": [f"{prompt}{response}{tokenizer.eos_token}" for response in responses],
        "prompts": [to_json(row.messages)] * len(responses),
        "labels": [row.answer] * len(responses),
        "responses": list(responses),
    }


def sent_by_openrlhf(model: RewardModel, row: Row, responses: Sequence[str]) -> dict[str, Any]:
    """Return the same as OpenRLHF's executor sends it: rendered text, and no responses."""
    request = sent_by_rollouts(model, row, responses)
    del request["responses"]
    ends = [response + model.kit.tokenizer_of(model.processor).eos_token for response in responses]
    return request | {"prompts": [query.removesuffix(end) for query, end in zip(request["query"], ends, strict=True)]}
