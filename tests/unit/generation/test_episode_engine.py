"""Episodes of many rows on one engine, outside of training, and one that somebody watches."""

import asyncio
import contextlib
from dataclasses import replace

from helpers.conversations import message, row
from helpers.scripted_episodes import ScriptedEnvironment, episode_engine, told

from lmm_r1.agents.environment import Answered, Turn
from lmm_r1.generation.engine import SamplingSettings

ONE = SamplingSettings(n_samples=1, temperature=0.0, top_p=1.0, max_new_tokens=20)


def rows(*texts: str) -> list:
    return [
        (place, replace(row(message("user", text)), location=f"rows.jsonl line {place + 1}"))
        for place, text in enumerate(texts)
    ]


def counted(turn: Turn) -> Answered:
    """Goes on until the model says `end`."""
    if turn.text == "end":
        return Answered(rewards={"step": 1.0})
    return told(f"no {turn.number}", counts={"calls": 1}, rewards={"step": 0.25})


def says(prompt: str) -> str:
    """Ends row `a` at once, others in their second turn."""
    return "end" if "ua<" in prompt or "no 0" in prompt else "5"


def test_rows_are_played_beside_one_another_and_each_brings_its_whole_episode():
    with contextlib.closing(episode_engine(says, ScriptedEnvironment(counted))) as engine:
        outcomes = {outcome.index: outcome for outcome in engine.respond(rows("a", "b", "c"), ONE)}
        assert engine.engine.engine.most_at_once > 1
    assert sorted(outcomes) == [0, 1, 2]
    [short], [long] = outcomes[0].completions, outcomes[1].completions
    assert (short.text, short.num_tokens, short.finish_reason) == ("end", 4, "stop")
    assert (short.played.end, short.played.turns, short.played.rewards) == ("over", 1, {"step": 1.0, "bonus": 0.0})
    # "5" and "end", with an end token each.
    assert (long.text, long.num_tokens, long.played.counts) == ("end", 6, {"calls": 1, "wrong": 0})
    assert long.played.rewards == {"step": 1.25, "bonus": 0.0}
    assert [(said.role, said.text) for said in long.played.said] == [
        ("assistant", "5"),
        ("user", "no 0"),
        ("assistant", "end"),
    ]
    assert long.played.shown == rows("a", "b")[1][1].messages


def test_episodes_of_a_row_come_in_their_own_order_whichever_ends_first():
    begun = []

    async def slow(turn: Turn) -> Answered:
        begun.append(turn)
        await asyncio.sleep(0.05 * (3 - len(begun)))
        return Answered(rewards={"step": float(len(begun))})

    sampling = replace(ONE, n_samples=2, temperature=1.0)
    with contextlib.closing(episode_engine(lambda prompt: "5", ScriptedEnvironment(slow))) as engine:
        [outcome] = engine.respond(rows("a"), sampling)
    assert [one.played.number for one in outcome.completions] == [0, 1]


def test_turns_have_seeds_that_only_their_place_decides():
    def seeds(*texts: str, seed: int = 0, temperature: float = 1.0) -> dict[str, int]:
        sampling = replace(ONE, n_samples=2, temperature=temperature)
        with contextlib.closing(episode_engine(says, ScriptedEnvironment(counted), seed=seed)) as engine:
            list(engine.respond(rows(*texts), sampling))
            asked = engine.engine.engine.requests
        return {prompt: {p.seed for other, p in asked if other == prompt} for prompt, _ in asked}

    alone, beside = seeds("b"), seeds("b", "c", "d")
    assert {prompt: beside[prompt] for prompt in alone} == alone
    assert len(set().union(*alone.values())) == 4, "two turns of two samples"
    assert seeds("b", seed=1) != alone
    assert set().union(*seeds("b", temperature=0.0).values()) == {None}


def test_a_row_whose_environment_fails_is_left_out_with_the_reason_and_the_others_stay():
    def broken(turn: Turn) -> Answered:
        if turn.text == "5":
            raise KeyError("level")
        return Answered()

    with contextlib.closing(episode_engine(says, ScriptedEnvironment(broken))) as engine:
        outcomes = {outcome.index: outcome for outcome in engine.respond(rows("a", "b"), ONE)}
    assert (outcomes[0].reason, len(outcomes[0].completions)) == (None, 1)
    assert outcomes[1].reason == "rows.jsonl line 2: the environment scripted failed: it raised KeyError: 'level'"
    assert outcomes[1].completions == ()


class Watcher:
    def __init__(self) -> None:
        self.text, self.tokens = "", 0
        self.seen: list[str] = []

    def begin_turn(self) -> None:
        self.seen.append("")

    def write(self, piece: str) -> None:
        self.seen[-1] += piece

    def end_turn(self) -> None:
        self.seen[-1] += "."

    def answered(self, answered: Answered) -> None:
        self.seen.append("over" if answered.is_over else answered.shown[0].text)


def test_a_watcher_is_told_of_turns_as_they_grow_and_of_answers_as_they_come():
    watcher = Watcher()
    environment = ScriptedEnvironment(counted, stops=("</t>",))
    with contextlib.closing(
        episode_engine(lambda prompt: says(prompt) if "no" in prompt else ("5</t>", "</t>"), environment)
    ) as engine:
        completion = engine.play(rows("b")[0][1], ONE, watcher=watcher, should_stop=lambda: False)
        assert [parameters.stream_interval for _, parameters in engine.engine.engine.requests] == [None, None]
    assert watcher.seen == ["5</t>.", "no 0", "end.", "over"]
    assert (completion.text, completion.played.turns, completion.finish_reason) == ("end", 2, "stop")
