"""The reference's log-probs of a rollout, part of which are computed while it is generated."""

from collections.abc import Sequence
from typing import Any

import pytest
import ray
import torch
from helpers.rl_steps import PlayedGroup, group, sample
from helpers.samples import media_ref

from lmm_r1.rl import ahead as outputs
from lmm_r1.rl.ahead import ReferenceAhead
from lmm_r1.rl.batching import Pass, PassLimits
from lmm_r1.rl.samples import TrainingSample

MEDIA = {"image": 1000.0, "other": 2000.0}


def log_probs(token_ids: torch.Tensor, media: Any) -> torch.Tensor:
    """Of each token after the first, a number that tells the token, its place and the sample's media, (T - 1,)."""
    shown = sum(MEDIA[item.ref.key] for item in media or ())
    return token_ids[1:] + torch.arange(1, len(token_ids)) / 100 + shown


class Workers(PlayedGroup):
    """Two ranks, each of two workers that share samples, which give `log_probs`; and how many samples each rank has."""

    def __init__(self) -> None:
        super().__init__(*[self] * 4, duplicates=2)
        self.shares: list[list[int]] = []

    def hand_out(self, shares: Sequence[list[Pass]]) -> list[Any]:
        self.shares.append([sum(map(len, share)) for share in shares])
        return super().hand_out(shares)

    def forward(self, passes: list[Pass]) -> list[list[torch.Tensor]]:
        return [[log_probs(one.token_ids, one.media) for one in part] for part in passes]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    monkeypatch.setattr(outputs, "AHEAD_TOKENS", 12)
    return Workers()


def ahead(workers: Workers, *, tokens: int | None = None) -> ReferenceAhead:
    limits = PassLimits(samples=None, tokens=tokens, share_prefix=True)
    return ReferenceAhead(workers, limits=limits)


def groups() -> list[list[TrainingSample]]:
    """Groups that take 6, 12, 14, 12, 4 and 4 tokens with their prompts once; the last two are alike."""
    return [
        group([1, 2], [3, 1]),
        group([3, 4, 5, 6], [2, 6], media=media_ref("image")),
        group([3, 4, 5, 6], [6, 4], media=media_ref("other")),
        group([7], [10, 1]),
        *([sample([8], response, group=number) for response in ([9, 5], [5])] for number in (-1, -2)),
    ]


def check(found: Sequence[torch.Tensor], samples: Sequence[TrainingSample]) -> None:
    for values, one in zip(found, samples, strict=True):
        torch.testing.assert_close(values, log_probs(one.token_ids, one.media), rtol=0, atol=1e-6)


def test_passes_are_started_when_there_is_a_full_one_for_every_rank(workers):
    rollout = groups()
    started = ahead(workers)
    for number, expected in enumerate((0, 0, 1, 1, 1, 1)):
        started.add(rollout[number])
        # 6 + 12 + 14 tokens are more than 12 for both ranks; 12 + 4 + 4 are not.
        assert len(workers.shares) == expected
    started.finish([one for group in rollout for one in group])
    # Three samples for each rank.
    assert workers.shares == [[3, 3], [3, 3]]


def test_log_probs_are_those_of_passes_that_were_cut_otherwise(workers):
    rollout = groups()
    started = ahead(workers)
    # They finish in another order, and one of them is dropped.
    for number in (3, 0, 2, 1):
        started.add(rollout[number])
    samples = [one for number in (5, 1, 0, 4, 2) for one in rollout[number]]
    started.finish(samples)
    check(started.log_probs(), samples)
