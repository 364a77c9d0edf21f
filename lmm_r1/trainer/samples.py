"""From prompts to OpenRLHF's experiences: groups go to the engines, samples come back."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call

from lmm_r1.data.messages import Row
from lmm_r1.data.prompt_stream import PromptStream
from lmm_r1.errors import UserError
from lmm_r1.rollout.group import GroupSettings
from lmm_r1.trainer.mismatch import modality_info, modality_of
from remote_rm.client import RewardUnavailable


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What one step generated."""

    experiences: list[Experience]
    groups: list[list[dict[str, Any]]]
    """The same samples as the engines returned them, for the records."""
    overlong: int
    """Prompts left out because they leave no room for a response."""
    filtered: int
    """Groups dropped by dynamic filtering."""


class KitSamplesGenerator(SamplesGenerator):
    """Generates groups on all engines, the least busy first, and replaces the groups that are dropped."""

    def __init__(self, args: SimpleNamespace, engines: Sequence[Any], settings: GroupSettings) -> None:
        self.args = args
        self.vllm_engines = list(engines)
        self.settings = settings

    def rollout(self, prompts: PromptStream, *, count: int) -> Rollout:
        """Return `count` groups of the stream's next prompts (fewer where the stream ends)."""
        low, high = self.args.algo.dynamic_filtering_range
        wake(self.args, self.vllm_engines)
        groups: list[list[dict[str, Any]]] = []
        overlong = filtered = 0
        wanted = count
        while wanted and (rows := prompts.take(wanted)):
            wanted = 0
            for group in self.generate(rows, self.settings):
                if not group:
                    overlong += 1
                elif self.args.algo.dynamic_filtering_enable and not low < _mean_score(group) < high:
                    filtered += 1
                else:
                    groups.append(group)
                    continue
                wanted += 1
        sleep(self.args, self.vllm_engines)
        experiences = [self._experience(sample) for group in groups for sample in group]
        return Rollout(experiences=experiences, groups=groups, overlong=overlong, filtered=filtered)

    def evaluate(self, rows: Sequence[Row], *, temperature: float, n_samples: int) -> list[list[dict[str, Any]]]:
        """Return the groups of held-out rows, sampled as asked for."""
        wake(self.args, self.vllm_engines)
        settings = replace(self.settings, temperature=temperature, n_samples=n_samples, logprobs=False)
        groups = self.generate(rows, settings)
        sleep(self.args, self.vllm_engines)
        return groups

    def generate(self, rows: Sequence[Row], settings: GroupSettings) -> list[list[dict[str, Any]]]:
        """Return one group per row, in row order; by the one media object of its samples, passes know a group.

        Raises UserError when a reward cannot be had or a row is wrong; the run cannot go on without it.
        """
        pending = ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])
        load = [(count, index) for index, count in enumerate(pending)]
        heapq.heapify(load)
        refs = []
        for row in rows:
            count, index = heapq.heappop(load)
            heapq.heappush(load, (count + settings.n_samples, index))
            refs.append(self.vllm_engines[index].generate_group.remote(row, settings))
        try:
            return [group.samples for group in ray.get(refs)]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RewardUnavailable | UserError):
                raise UserError(str(error.cause)) from error
            raise

    def _experience(self, sample: dict[str, Any]) -> Experience:
        experience = self._process_response_into_experience(sample, max_len=self.settings.max_len)
        experience.info |= modality_info(modality_of(sample["row"]))
        return experience


def wake(args: SimpleNamespace, engines: Sequence[Any]) -> None:
    """Give sleeping engines their memory back; those that were woken for new weights get that of their cache."""
    if args.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "wake_up")


def sleep(args: SimpleNamespace, engines: Sequence[Any]) -> None:
    """Free the engines' memory while the models train."""
    if args.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "sleep")


def _mean_score(group: list[dict[str, Any]]) -> float:
    return sum(sample["scores"] for sample in group) / len(group)
