"""Requests to reward servers, as the rollouts of this project and OpenRLHF's send them."""

from collections.abc import Sequence
from typing import Any

from lmm_r1.data.messages import Row, to_json
from lmm_r1.scoring.reward_model import ScoringModel


def sent_by_rollouts(model: ScoringModel[Any, Any], row: Row, responses: Sequence[str]) -> dict[str, Any]:
    """Return the request for responses to a row: the prompt as messages, and the whole sample as decoded ids."""
    tokenizer = model.kit.tokenizer_of(model.processor)
    prompt = tokenizer.decode(model.encode_prompt(row).engine_token_ids, skip_special_tokens=False)
    return {
        "query": [f"{prompt}{response}{tokenizer.eos_token}" for response in responses],
        "prompts": [to_json(row.messages)] * len(responses),
        "labels": [row.answer] * len(responses),
        "responses": list(responses),
    }


def sent_by_openrlhf(model: ScoringModel[Any, Any], row: Row, responses: Sequence[str]) -> dict[str, Any]:
    """Return the same as OpenRLHF's executor sends it: rendered text, and no responses."""
    request = sent_by_rollouts(model, row, responses)
    del request["responses"]
    ends = [response + model.kit.tokenizer_of(model.processor).eos_token for response in responses]
    return request | {"prompts": [query.removesuffix(end) for query, end in zip(request["query"], ends, strict=True)]}
