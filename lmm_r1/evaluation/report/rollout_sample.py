"""Which rollouts are embedded in a page, and in which form its script gets them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmm_r1.evaluation.report.inline_images import ImageError, InlineImages
from lmm_r1.evaluation.rollout_log import Part, Rollout
from lmm_r1.evaluation.run_folder import Run, Stage


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    """The rollouts of a page."""

    total: int
    """How many the run logged."""
    rollouts: list[dict[str, object]]
    images: list[str]
    """Data URIs; an image part of a rollout is a place in this list."""
    missing_images: int


def sample_rollouts(run: Run, *, limit: int) -> RolloutSample:
    """Return at most `limit` rollouts of a run, spread evenly over its steps."""
    buckets = [(number, indices) for number, stage in enumerate(run.stages) for indices in _indices_by_step(stage)]
    quotas = spread([len(indices) for _, indices in buckets], limit=limit)
    chosen: list[list[int]] = [[] for _ in run.stages]
    for (number, indices), quota in zip(buckets, quotas, strict=True):
        chosen[number] += [indices[at] for at in evenly(len(indices), count=quota)]
    images = InlineImages()
    records = [
        _record(rollout, stage=stage, images=images)
        for stage, indices in zip(run.stages, chosen, strict=True)
        for rollout in stage.rollouts.read(indices)
    ]
    parts = (part for record in records for message in record["messages"] for part in message["parts"])
    return RolloutSample(
        total=sum(len(stage.rollouts) for stage in run.stages),
        rollouts=records,
        images=images.uris,
        missing_images=sum("missing" in part for part in parts),
    )


def spread(sizes: Sequence[int], *, limit: int) -> list[int]:
    """Return how many to take from each bucket: as equal as the sizes allow, together at most `limit`.

    With fewer places than buckets, the buckets that get one lie evenly from the first to the last:
    `spread([9, 9, 9], limit=2)` is `[1, 0, 1]`, `spread([1, 9, 9], limit=9)` is `[1, 4, 4]`.
    """
    quotas = [0] * len(sizes)
    left = min(limit, sum(sizes))
    while left:
        open_buckets = [bucket for bucket, size in enumerate(sizes) if quotas[bucket] < size]
        share = left // len(open_buckets)
        if share:
            for bucket in open_buckets:
                taken = min(share, sizes[bucket] - quotas[bucket])
                quotas[bucket] += taken
                left -= taken
        else:
            for at in evenly(len(open_buckets), count=left):
                quotas[open_buckets[at]] += 1
            left = 0
    return quotas


def evenly(size: int, *, count: int) -> list[int]:
    """Return `count` different places from 0 to size - 1 at equal distances, both ends among them if count > 1."""
    if count <= 1:
        return [0] * count
    return [round(index * (size - 1) / (count - 1)) for index in range(count)]


def _indices_by_step(stage: Stage) -> list[list[int]]:
    by_step: dict[int, list[int]] = {}
    for index, step in enumerate(stage.rollouts.steps):
        by_step.setdefault(step, []).append(index)
    return [by_step[step] for step in sorted(by_step)]


def _record(rollout: Rollout, *, stage: Stage, images: InlineImages) -> dict[str, object]:
    return {
        "stage": stage.name,
        "step": rollout.step,
        "group": rollout.group,
        "messages": [
            {"role": message.role, "parts": [_part(part, stage=stage, images=images) for part in message.parts]}
            for message in rollout.messages
        ],
        "response": rollout.response,
        "label": rollout.label,
        "reward": rollout.reward,
        "scores": rollout.scores,
        "verdict": verdict(rollout),
        "tokens": rollout.response_tokens,
        "truncated": rollout.truncated,
    }


def verdict(rollout: Rollout) -> str | None:
    """Return `right`, `wrong` or, between the two, `partly`; None where accuracy was not scored."""
    accuracy = rollout.scores.get("accuracy")
    if accuracy is None:
        return None
    if accuracy >= 1:
        return "right"
    return "wrong" if accuracy <= 0 else "partly"


def _part(part: Part, *, stage: Stage, images: InlineImages) -> dict[str, object]:
    if part.kind == "text":
        return {"text": part.value}
    try:
        return {"image": images.add(part.value, folder=stage.folder)}
    except ImageError as error:
        shown = "data URI" if part.value.startswith("data:") else part.value
        return {"missing": f"{shown}: {error}"}
