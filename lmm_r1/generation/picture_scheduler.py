"""vLLM's scheduler for all engines, any of whose requests may lose what is kept of them: it sends all pictures to the workers.

vLLM 0.29 leaves out the tensors of pictures whose keys and values are in the prefix cache when a request begins: those of an
episode's earlier turns, and of a prompt that another response has read. Where the caches are emptied for new weights while it runs, or it makes room for others, its pictures
are to be computed once more, and its worker would have none.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler


class PictureScheduler(Scheduler):
    """vLLM's scheduler where a step is planned when the one before has ended."""

    def schedule(self, *arguments: Any, **settings: Any) -> SchedulerOutput:
        return _with_pictures(super().schedule(*arguments, **settings), self.requests)


class AsyncPictureScheduler(AsyncScheduler):
    """vLLM's scheduler where steps are planned ahead."""

    def schedule(self, *arguments: Any, **settings: Any) -> SchedulerOutput:
        return _with_pictures(super().schedule(*arguments, **settings), self.requests)


def picture_scheduler(*, vllm_config: Any, **settings: Any) -> Scheduler:
    """Return the scheduler that vLLM would choose, with all pictures."""
    ahead = vllm_config.scheduler_config.async_scheduling
    return (AsyncPictureScheduler if ahead else PictureScheduler)(vllm_config=vllm_config, **settings)


def _with_pictures(planned: SchedulerOutput, requests: Any) -> SchedulerOutput:
    for begun in planned.scheduled_new_reqs:
        begun.mm_features = requests[begun.req_id].mm_features
    return planned
