"""What is taken from scored responses: the best of n, samples to fine-tune on, and pairs to learn preferences from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from lmm_r1.batch.trajectories import END, MESSAGES

Selection = Literal["best_of_n", "rejection_sampling", "dpo_pairs"]


def select(
    records: Iterable[Mapping[str, Any]], *, kind: Selection, min_reward: float, max_per_prompt: int, min_margin: float
) -> Iterator[dict[str, Any]]:
    """Yield the selected rows of a job's records, whose responses have rewards."""
    for record in records:
        if kind == "best_of_n":
            yield _answered(record, _ranked(record)[0])
        elif kind == "rejection_sampling":
            yield from accepted(record, min_reward=min_reward, max_per_prompt=max_per_prompt)
        else:
            yield from preferred(record, min_margin=min_margin, max_per_prompt=max_per_prompt)


def accepted(record: Mapping[str, Any], *, min_reward: float, max_per_prompt: int) -> Iterator[dict[str, Any]]:
    """Yield SFT rows of the best different responses that reach `min_reward`; none that was cut off, or ended by a limit.

    Rejection sampling as in RAFT (arXiv 2304.06767).
    """
    found: set[tuple[str, ...]] = set()
    for response in _ranked(record):
        if len(found) == max_per_prompt or response["reward"] < min_reward:
            return
        is_whole = response["finish_reason"] == "stop" and response.get(END) in (None, "over")
        written = _written(response)
        if is_whole and written not in found:
            found.add(written)
            yield _answered(record, response)


def preferred(record: Mapping[str, Any], *, min_margin: float, max_per_prompt: int) -> Iterator[dict[str, Any]]:
    """Yield better responses over worse ones whose rewards differ by `min_margin` and at all: first the best over the worst.

    That one is an iteration of iterative DPO (arXiv 2312.11456): the policy that is trained on the pairs samples the next ones. A
    reward model can learn from all comparisons of a prompt's responses (InstructGPT, arXiv 2203.02155). An empty response is on
    neither side, and two that say the same are no pair, however they were rewarded: nothing could be learned.
    """
    ranked = [response for response in _ranked(record) if response["text"].strip()]
    # From the outermost to those that stand beside one another.
    places = sorted(
        itertools.combinations(range(len(ranked)), 2), key=lambda pair: (pair[0] + len(ranked) - pair[1], pair[0])
    )
    found: set[tuple[str, str]] = set()
    for one, other in places:
        best, worst = ranked[one], ranked[other]
        margin, said = best["reward"] - worst["reward"], (best["text"].strip(), worst["text"].strip())
        if len(found) == max_per_prompt:
            return
        if margin <= 0 or margin < min_margin or said[0] == said[1] or said in found:
            continue
        found.add(said)
        yield {
            "prompt": record["prompt"],
            "chosen": [{"role": "assistant", "content": best["text"]}],
            "rejected": [{"role": "assistant", "content": worst["text"]}],
            "chosen_reward": best["reward"],
            "rejected_reward": worst["reward"],
            **_origin(record),
        }


def _ranked(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the responses by falling reward; of equal ones the first sampled comes first."""
    return sorted(record["responses"], key=lambda response: -response["reward"])


def _written(response: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the model wrote; of an episode, in each of its turns."""
    if MESSAGES not in response:
        return (response["text"],)
    return tuple(json.dumps(one["content"]) for one in response[MESSAGES] if one["role"] == "assistant")


def _answered(record: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    turn = {"role": "assistant", "content": response["text"]}
    messages = response[MESSAGES] if MESSAGES in response else [*record["prompt"], turn]
    return {"messages": messages, "reward": response["reward"], **_origin(record)}


def _origin(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("answer", "datasource")}
