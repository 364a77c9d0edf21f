"""Environments of Gymnasium: its own, and small ones that say what they were asked."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.conversations import message, row
from helpers.episodes import images_in, play, text_of
from helpers.tables import table

from lmm_r1.agents.environment import load_environment
from lmm_r1.data.messages import ImagePart, TextPart
from lmm_r1.errors import UserError

ASKED = row(message("user", "Walk to the goal."))
NAMES = ["left", "down", "right", "up"]


class Corridor(gymnasium.Env):
    """Five cells; the right end pays 1. Where one starts comes from the seed, and the wind from chance."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}
    action_space = spaces.Discrete(2, start=3)
    observation_space = spaces.Dict({"cell": spaces.Discrete(5), "wind": spaces.Box(0.0, 1.0, (2,))})

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(0, 3))
        return self._seen(), {}

    def step(self, action):
        assert action in (3, 4)
        self.cell = max(0, self.cell + (1 if action == 4 else -1))
        return self._seen(), float(self.cell == 4) - 0.1, self.cell == 4, False, {}

    def render(self):
        pixels = np.zeros((10, 50, 3), dtype=np.uint8)
        pixels[:, 10 * self.cell : 10 * self.cell + 10] = 255
        return pixels

    def _seen(self):
        return {"cell": self.cell, "wind": self.np_random.random(2).round(2).astype(np.float32)}


class Echo(gymnasium.Env):
    """Takes a word of up to three letters, and shows it; fails at "bad"."""

    action_space = spaces.Text(3, charset="abcd")
    observation_space = spaces.Text(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        if action == "bad":
            raise RuntimeError("broken")
        return action, float("nan") if action == "d" else 0.0, False, action == "c", {}


@pytest.fixture(autouse=True)
def registered():
    for name, made in (("Corridor-v0", Corridor), ("Echo-v0", Echo)):
        gymnasium.register(name, entry_point=made, disable_env_checker=True)
    yield
    for name in ("Corridor-v0", "Echo-v0"):
        del gymnasium.registry[name]


def made(**options):
    return load_environment("gymnasium", options=options)


def shown(environment, asked=ASKED):
    return environment.shown_row(asked).messages[-1].parts


def texts(parts):
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def test_frozen_lake_is_walked_through():
    lake = made(
        id="FrozenLake-v1", arguments={"is_slippery": False}, actions=NAMES, render="text", instructions="Reach G."
    )
    assert texts(shown(lake)) == (
        "Walk to the goal.\nReach G.\nWrite your next action as <action>left</action>. The actions are: left, down, right, "
        "up.\n[S]FFF\nFHFH\nFFFH\nHFFG"
    )
    path = ["down", "down", "right", "right", "down", "right"]
    answers = play(lake, ASKED, *(f"<action>{name}</action>" for name in path))
    assert text_of(answers[0]).endswith("SFFF\n[F]HFH\nFFFH\nHFFG")
    assert [one.is_over for one in answers] == [False] * 5 + [True]
    assert [one.rewards["env_reward"] for one in answers] == [0.0] * 5 + [1.0]
    assert answers[-1].counts == {"steps": 1, "terminated": 1, "truncated": 0}


def test_an_episode_that_gymnasium_cuts_off_is_truncated():
    lake = made(id="FrozenLake-v1", arguments={"max_episode_steps": 2})
    answers = play(lake, ASKED, "<action>0</action>", "<action>0</action>")
    assert answers[0].counts["truncated"] == 0
    assert (answers[1].is_over, answers[1].counts["truncated"], answers[1].counts["terminated"]) == (True, 1, 0)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("left", "no <action> was found"),
        ("<action>north</action>", "there is no such action"),
        ("<action>3</action>", "there is no such action"),
        ("<action></action>", "there is no such action"),
    ],
)
def test_a_malformed_action_is_answered_and_counted_and_does_nothing(said, told):
    answered, after = play(made(actions=NAMES), ASKED, said, "<action>LEFT</action>")
    assert told in text_of(answered)
    assert "left, down, right, up" in text_of(answered)
    assert (answered.counts, dict(answered.rewards)) == ({"malformed_actions": 1}, {})
    assert after.counts["steps"] == 1


def test_rows_begin_by_their_seeds_and_chance_goes_on_for_each_sample():
    corridor = made(id="Corridor-v0")
    firsts = [texts(shown(corridor, row_with(seed=seed))) for seed in (1, 1, 2)]
    assert firsts[0] == firsts[1] != firsts[2]
    assert "Observation: cell: " in firsts[0]
    assert "\nwind: [0." in firsts[0]
    winds = [text_of(play(corridor, row_with(seed=1), "<action>4</action>", seed=seed)[0]) for seed in (5, 5, 6)]
    assert winds[0] == winds[1] != winds[2]
    # All from the same cell.
    assert len({wind.split("\n")[0] for wind in winds}) == 1
    with pytest.raises(UserError, match='rows.jsonl, line 1: the column "seed" is -1'):
        shown(corridor, row_with(seed=-1))


def row_with(**columns):
    from dataclasses import replace

    return replace(ASKED, columns=columns)


def test_frames_are_images():
    corridor = made(id="Corridor-v0", render="image")
    first = [part for part in shown(corridor) if isinstance(part, ImagePart)]
    assert [part.source.size for part in first] == [(50, 10)]
    assert "Observation" not in texts(shown(corridor))
    (answered,) = play(corridor, row_with(seed=3), "<action>4</action>")
    (image,) = images_in(answered)
    assert image.getpixel((0, 0)) == (0, 0, 0)
    both = made(id="Corridor-v0", render="image", observation=True)
    assert "Observation: cell: " in texts(shown(both))


@pytest.mark.parametrize("word", ["bad", "d"])
def test_what_fails_in_the_environment_is_its_own_fault(word):
    with pytest.raises((RuntimeError, ValueError), match=r"broken|gives the reward nan"):
        play(made(id="Echo-v0"), ASKED, f"<action>{word}</action>")


def test_steps_of_an_episode_are_made_in_one_thread_and_not_in_the_event_loops():
    threads = set()

    class Threads(Echo):
        def step(self, action):
            import threading

            threads.add(threading.current_thread())
            return super().step(action)

        def close(self):
            threads.add("closed")

    gymnasium.register("Threads-v0", entry_point=Threads, disable_env_checker=True)
    try:
        play(made(id="Threads-v0"), ASKED, "<action>a</action>", "<action>b</action>")
    finally:
        del gymnasium.registry["Threads-v0"]
    assert len(threads - {"closed"}) == 1
    assert next(iter(threads - {"closed"})).name == "gymnasium"


@pytest.mark.parametrize(("options", "said"), table("agents/gymnasium_environment", "options_that_cannot_be_are_told"))
def test_options_that_cannot_be_are_told(options, said):
    with pytest.raises(UserError, match=f"environment gymnasium: .*{said}"):
        made(**options)
