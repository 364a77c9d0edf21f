"""Which rollouts of a step are kept in the run's folder, and how they get there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmm_r1.data.sample import Sample
from lmm_r1.generation.media_store import fetch_pictures
from lmm_r1.records.rollouts import SampledResponse, shown_messages
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.trackers import Generation
from lmm_r1.records.trackers.trackers import make_generation
from lmm_r1.rl.rollouts import Rollout


@dataclass(frozen=True, kw_only=True)
class RecordedRollouts:
    """Writes some of the samples of each step."""

    folder: RunFolder
    count: int
    """Samples of a step, of which whole groups are kept; 0 keeps none."""

    def write(self, step: int, groups: Sequence[Sequence[Sample]], *, held_out: bool = False) -> list[Generation]:
        """Write and return some whole groups, of `count` samples together; write their greedy responses."""
        samples = list(recorded_samples(groups, count=self.count))
        shown = [self._write_sample(sample, step=step, group=group, held_out=held_out) for group, sample in samples]
        greedy = {group: sample.greedy for group, sample in samples if sample.greedy is not None}
        for group, sample in greedy.items():
            self._write_sample(sample, step=step, group=group, greedy=True)
        return shown

    def write_dropped(self, step: int, rollout: Rollout) -> None:
        """Write the samples that are kept of dropped groups, which are numbered behind the step's own."""
        for number, dropped in enumerate(rollout.dropped, start=len(rollout.groups)):
            for sample in dropped.samples:
                self._write_sample(sample, step=step, group=number, dropped=dropped.reason)

    def _write_sample(self, sample: Sample, **noted: Any) -> Generation:
        """Write a sample and return it as trackers show it.

        Args:
            noted: what else `SampledResponse.of` takes.
        """
        sample = fetch_pictures(sample)
        place = sample.row.location
        said = () if sample.played is None else self.folder.turns(sample.played.said, location=place)
        response = SampledResponse.of(sample, said=said, **noted)
        written = self.folder.rollout(response, messages=shown_messages(sample), location=place)
        return make_generation(response, messages=written, folder=self.folder.path)


def recorded_samples(groups: Sequence[Sequence[Sample]], *, count: int) -> Iterator[tuple[int, Sample]]:
    """Yield the samples of as many whole groups as `count` has room for, but one at least, with their groups' places.

    Groups whose episodes have pictures come first, and in a group the episode that was begun first. A count of 0 yields
    nothing.
    """
    ordered = sorted(groups, key=lambda group: not any(sample.played and sample.played.pictures for sample in group))
    room = count
    for place, group in enumerate(ordered if count else []):
        if place and len(group) > room:
            return
        room -= len(group)
        for sample in sorted(group, key=lambda sample: sample.played.number if sample.played else 0):
            yield place, sample
