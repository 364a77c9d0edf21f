"""Worked episodes: turns that are written already, and what an environment answers them, as a conversation to learn from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lmm_r1.agents.environment import Answered, Environment, Turn
from lmm_r1.data.messages import Message, Row, TextPart
from lmm_r1.errors import UserError


def demonstration_of(
    environment: Environment, row: Row, turns: Sequence[str], *, seed: int = 0
) -> tuple[Message, ...]:
    """Return the row as the environment shows it, the turns, and what it shows between them: a rollout that says the same.

    Args:
        turns: all that the policy says, each with what the environment begins it with.
        seed: of the episode.

    Raises:
        UserError: the episode is over before the last turn or goes on after it, or a turn has another beginning.
    """
    return asyncio.run(_played(environment, row, turns, seed=seed))


async def _played(environment: Environment, row: Row, turns: Sequence[str], *, seed: int) -> tuple[Message, ...]:
    messages = list(environment.shown_row(row).messages)
    place = f"{row.location}, environment {environment.name}"
    episode = environment.begin(row, seed=seed)
    answered = Answered()
    try:
        for number, text in enumerate(turns):
            if number:
                if answered.is_over:
                    raise UserError(f"{place}: the episode is over with turn {number} of the {len(turns)} worked ones")
                messages.append(Message(role=answered.role, parts=tuple(answered.shown)))
            if not text.startswith(answered.prefill):
                raise UserError(
                    f"{place}: turn {number + 1} must begin with {answered.prefill!r}, which the environment writes"
                )
            messages.append(Message(role="assistant", parts=(TextPart(text),)))
            answered = await episode.answer(Turn(text=text, number=number, ended=True))
    finally:
        await episode.close()
    if not answered.is_over:
        raise UserError(f"{place}: the episode goes on after the {len(turns)} worked turns")
    return tuple(messages)
