"""Groups that are under way beyond those of a step: which are begun, which a rollout takes, and which go on in the next one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Sample
from lmm_r1.data.training_rows import PromptStream

_UNDER_WAY = "under_way"


@dataclass(kw_only=True, eq=False)
class StartedGroup:
    """A group that an engine was asked for, and no rollout has taken."""

    row: Row
    place: int
    """Of its row among the run's."""
    engine: int
    """Which one makes it."""
    ref: Any
    """What the engine gives."""
    held_over: int = 0
    """How many rollouts have ended without it."""
    samples: list[Sample] | None = None
    """None until it has finished."""


class GroupsUnderWay:
    """The groups that were begun and not taken, in the order in which they were begun.

    A rollout begins more than it takes. Those of short responses finish first, so that it is rather these that it takes;
    those of long ones go on where they are, and the next rollouts take them: none is lost, and one that was held over
    `most_held` times is waited for.
    """

    def __init__(self, *, factor: float, most_held: int) -> None:
        """Args: factor: how many times as many groups as a step has are under way together, 1 to 2."""
        assert 1 <= factor <= 2, "of more, the next step had no room for all that must be in it"
        self.factor = factor
        self.most_held = most_held
        self.groups: list[StartedGroup] = []
        # Of rows that were under way when a session ended, which this one begins with.
        self._again: deque[int] = deque()

    @property
    def used(self) -> bool:
        """Whether rollouts begin more than they take."""
        return self.factor > 1

    @property
    def unfinished(self) -> list[StartedGroup]:
        """The groups that an engine is at."""
        return [group for group in self.groups if group.samples is None]

    def available(self, prompts: PromptStream, *, batch: int) -> int:
        """Return how many groups rollouts of `batch` can still take in all."""
        return len(self.groups) + len(self._again) + prompts.left(batch=batch)

    def next_rows(self, prompts: PromptStream, *, batch: int, taken: int) -> list[tuple[int, Row]]:
        """Return the (place, row) of the groups to begin now, in a rollout that has taken some of its `batch`."""
        wanted = self.target(batch) - taken - len(self.groups)
        found: list[tuple[int, Row]] = []
        while self._again and len(found) < wanted:
            place = self._again.popleft()
            found.append((place, prompts.rows[place]))
        while len(found) < wanted and (rows := prompts.take_of_batches(wanted - len(found), batch=batch)):
            found.extend(zip(prompts.taken, rows, strict=True))
        return found

    def target(self, batch: int) -> int:
        """Return how many groups of a rollout are taken and under way together: 1.25 times 6 are 8."""
        # 1.1 times 10 are no 12.
        return math.ceil(round(self.factor * batch, 6))

    def take(self, *, room: int) -> StartedGroup | None:
        """Return the next finished group of a rollout that has room for so many, the oldest first; None where it must wait.

        Room is kept for those that must be in this rollout.
        """
        due = [group for group in self.groups if group.held_over >= self.most_held]
        for group in due if room <= len(due) else self.groups:
            if group.samples is not None and room > 0:
                self.groups.remove(group)
                return group
        return None

    def end_rollout(self) -> None:
        """Hold over what was not taken."""
        for group in self.groups:
            group.held_over += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from; nothing where none is under way."""
        places = [group.place for group in self.groups] + list(self._again)
        return {_UNDER_WAY: places} if places else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin anew, first of all, what was under way when a state was saved."""
        self.groups, self._again = [], deque(state.get(_UNDER_WAY, ()))


def kept_tokens(samples: Iterable[Sample], *, updates: int) -> int:
    """Return how many of the samples' tokens were generated in earlier rollouts.

    Args:
        updates: how many the policy has had before the step.
    """
    return sum(span.tokens for sample in samples for span in sample.weights if span.version < updates)
