"""The prompts of a training run in a fixed order, with a position that a checkpoint can keep."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError


class PromptStream:
    """Rows in a new order for each episode; the order depends on the seed and the episode alone."""

    def __init__(self, rows: Sequence[Row], *, seed: int, episodes: int) -> None:
        self.rows = rows
        self.seed = seed
        self.episodes = episodes
        self.episode = 0
        self.position = 0
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Row]:
        """Return the next `count` rows of the current episode, fewer at its end, and none behind the last one."""
        if self.episode >= self.episodes:
            return []
        taken = [self.rows[index] for index in self._order[self.position : self.position + count]]
        self.position += len(taken)
        return taken

    def has(self, count: int) -> bool:
        """Say whether `count` more rows can be taken; moves on to the next episode where this one has too few."""
        while self.episode < self.episodes:
            if self.position + count <= len(self.rows):
                return True
            self.next_episode()
        return False

    def next_episode(self) -> bool:
        """Move on to the next episode, whatever is left of this one; say whether there is one."""
        self.episode, self.position = self.episode + 1, 0
        self._order = self._order_of(self.episode)
        return self.episode < self.episodes

    def state_dict(self) -> dict[str, int]:
        return {"episode": self.episode, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.episode, self.position = state["episode"], state["position"]
        self._order = self._order_of(self.episode)

    def _order_of(self, episode: int) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(f"{self.seed}-{episode}").shuffle(order)
        return order


def check_prompts(rows: Sequence[Row]) -> None:
    """Raise UserError at the first row that ends with an assistant turn: it would show the model the answer."""
    for row in rows:
        if row.messages[-1].role == "assistant":
            raise UserError(
                f"{row.location}: a prompt for RL must not end with an assistant turn; such rows are for train_sft"
            )
