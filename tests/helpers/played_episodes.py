"""Plays episodes of environments with given turns, for tests."""

import asyncio
from collections import Counter
from dataclasses import dataclass

from lmm_r1.agents.environment import Answered, Turn
from lmm_r1.data.messages import Message, Row, TextPart


@dataclass(frozen=True, kw_only=True)
class Played:
    answers: list[Answered]
    rewards: dict[str, float]
    """Summed over the turns."""
    counts: Counter


def row_of(text="Solve it.", *, answer="", **columns):
    message = Message(role="user", parts=(TextPart(text),))
    return Row(messages=(message,), answer=answer, datasource="", location="rows.jsonl, line 3", columns=columns)


def play_episode(environment, row, *texts):
    """Give the turns to a new episode; it must be over with the last of them or go on after it, and not before."""

    async def run():
        episode = environment.begin(row, seed=0)
        answers = []
        for number, text in enumerate(texts):
            assert not answers or not answers[-1].is_over, f"over before turn {number}"
            answers.append(await episode.answer(Turn(text=text, number=number, ended=True)))
        await episode.close()
        return answers

    answers = asyncio.run(run())
    rewards: dict[str, float] = {}
    counts: Counter = Counter()
    for answered in answers:
        counts.update(answered.counts)
        for name, value in answered.rewards.items():
            rewards[name] = rewards.get(name, 0.0) + value
    return Played(answers=answers, rewards=rewards, counts=counts)


def texts_of(parts):
    return "".join(part.text for part in parts if isinstance(part, TextPart))
