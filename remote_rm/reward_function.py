"""A verifier as OpenRLHF's `reward_func(queries, prompts, labels)`, for a .py file given as remote reward URL.

A file of one's own: `reward_func = reward_func_of(get_verifier("exact", ignore_case=True))`.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from remote_rm.registry import get_verifier
from remote_rm.responses import find_response
from remote_rm.verifier import (
    AskingVerifier,
    Item,
    Score,
    Verifier,
    as_text,
    check_labels,
    check_parallel,
    extra_logs_of,
    quick_score,
)

if TYPE_CHECKING:
    from remote_rm.service.pool import BlockingPool


class FunctionReply(TypedDict):
    """The reply of a reward function, one entry per sample: OpenRLHF reads it as it reads a server's."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


RewardFunction = Callable[..., FunctionReply]


def reward_func_of(verifier: Verifier | str, *, workers: int = 1, item_timeout_seconds: float = 5.0) -> RewardFunction:
    """Return a `reward_func` that answers as the server would: rewards, scores and extra_logs, one entry per query.

    It may be called from several threads. Items that the verifier cannot decide quickly go to worker processes, which
    start with the first such item; one that takes more processor time than `item_timeout_seconds` is wrong.

    Args:
        verifier: A verifier, or the registered name of one with its default settings.
    """
    judge = _Judge(verifier, workers=workers, item_timeout_seconds=item_timeout_seconds)

    def reward_func(
        queries: Sequence[str],
        prompts: Sequence[str],
        labels: Sequence[str],
        *,
        responses: Sequence[str] | None = None,
        image_scales: Sequence[Sequence[Sequence[float]]] | None = None,
        **_other: Any,
    ) -> FunctionReply:
        """Return the reply for parallel lists; raises ValueError for unequal lengths and for a label without answer."""
        scores = judge(items_from(queries, prompts, labels, responses=responses, image_scales=image_scales))
        return {
            "rewards": [score.reward for score in scores],
            "scores": [score.score for score in scores],
            "extra_logs": extra_logs_of(scores),
        }

    # Trainers of this project may call it in so many threads; its workers have the limits of time.
    reward_func.CALLS_AT_ONCE = 32  # type: ignore[attr-defined]
    return reward_func


def items_from(
    queries: Sequence[str],
    prompts: Sequence[str],
    labels: Sequence[str],
    *,
    responses: Sequence[str] | None,
    image_scales: Sequence[Sequence[Sequence[float]]] | None,
) -> list[Item]:
    """Return the items of parallel lists; without responses, each is found in its query. Raises ValueError for unequal lengths."""
    columns = {"queries": queries, "prompts": prompts, "labels": labels}
    check_parallel("the lists given to reward_func", {**columns, "responses": responses, "image_scales": image_scales})
    if responses is None:
        responses = [find_response(query, prompt=prompt) for query, prompt in zip(queries, prompts, strict=True)]
    scales = [()] * len(labels) if image_scales is None else image_scales
    return [
        Item(prompt=prompt, response=response, label=as_text(label), image_scales=of_images)
        for prompt, response, label, of_images in zip(prompts, responses, labels, scales, strict=True)
    ]


class _Judge:
    """Scores items: in the calling thread if that is quick, else in a worker pool on a background event loop."""

    def __init__(self, verifier: Verifier | str, *, workers: int, item_timeout_seconds: float) -> None:
        self._verifier = verifier
        self._workers = workers
        self._item_timeout_seconds = item_timeout_seconds
        self._lock = threading.Lock()
        self._pool: BlockingPool | None = None

    def __call__(self, items: Sequence[Item]) -> list[Score]:
        """Return one score per item, in order; raises ValueError for a label without answer."""
        with self._lock:
            # By name only at the first call: a module that defines its own reward_func is still being imported before.
            if isinstance(self._verifier, str):
                self._verifier = get_verifier(self._verifier)
            verifier = self._verifier
        check_labels(items, verifier=verifier)
        # For a verifier that asks others, this is only the rule's score.
        asks = isinstance(verifier, AskingVerifier)
        quick = [None if asks else quick_score(verifier, item) for item in items]
        open_items = [item for item, score in zip(items, quick, strict=True) if score is None]
        slow = iter(self._running_pool(verifier).judge(open_items) if open_items else ())
        return [next(slow) if score is None else score for score in quick]

    def _running_pool(self, verifier: Verifier) -> "BlockingPool":
        # The pool's own dependencies are imported only by verifiers that have slow items.
        from remote_rm.service.pool import BlockingPool

        with self._lock:
            if self._pool is None:
                pool = BlockingPool(verifier, workers=self._workers, item_timeout_seconds=self._item_timeout_seconds)
                pool.start()
                self._pool = pool
            return self._pool
