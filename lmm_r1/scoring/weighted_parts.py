"""Rewards in which named parts count as `--reward.part_weights` says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from lmm_r1.config.part_weights import FLAG, WeightedPart
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError
from remote_rm.verifier import Score


def weighted(score: Score, weights: Sequence[WeightedPart], *, paid: Collection[str] = (), location: str) -> Score:
    """Return a score whose reward has the weighted parts added: r + sum of w_i x_i; its `score` and parts are as before.

    A part of `paid` is in the reward already, at weight 1, and the weight given takes the place of that 1.

    Args:
        paid: the names of the parts that an environment has added to the reward.
        location: where the sample's row stands, for messages.

    Raises:
        UserError: there is no part of a name.
    """
    reward = score.reward
    for weight in weights:
        for factor in weight.factors:
            if factor not in score.parts:
                raise UserError(_unknown(factor, score, location=location))
        reward += weight.earned(score.parts)
        if len(weight.factors) == 1 and weight.factors[0] in paid:
            reward -= score.parts[weight.factors[0]]
    return replace(score, reward=reward)


def _unknown(name: str, score: Score, *, location: str) -> str:
    known = ", ".join(sorted(score.parts)) or "none"
    match = nearest(name, known=score.parts)
    meant = f"did you mean {match}?" if match else "name one of them"
    return f"{location}: {FLAG} names {name}, and the parts of a response's reward are: {known}; {meant}"
