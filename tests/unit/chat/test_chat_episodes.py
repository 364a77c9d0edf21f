"""A chat whose messages begin episodes."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.chats import chat
from helpers.conversations import picture
from helpers.scripted_episodes import LIMITS, ScriptedEnvironment, episode_engine, told
from PIL import Image

from lmm_r1.agents.environment import Answered, Turn
from lmm_r1.chat.loop import converse
from lmm_r1.data.images import PictureFolder
from lmm_r1.data.messages import ImagePart


def looks(turn: Turn) -> Answered:
    if turn.text == "look":
        return told("Cut out:\n", picture(30, 20), "\nGo on.", counts={"calls": 1})
    return Answered()


def says(prompt: str) -> str:
    """Looks once at what the last message asks, then answers it."""
    return "look" if prompt.endswith("?<end>\na") else "a tree"


@pytest.fixture
def session():
    with contextlib.ExitStack() as stack:

        def started(answers=looks, talk=says, limits=LIMITS, **changes):
            engine = episode_engine(talk, ScriptedEnvironment(answers), limits=limits)
            return chat(episodes=stack.enter_context(contextlib.closing(engine)), **changes)

        yield started


def test_turns_and_answers_are_shown_as_they_come_and_the_conversation_goes_on_from_the_last(session, tmp_path):
    talk = session()
    assert converse(talk, ["what?", "and?"], ends_when_stopped=False)
    assert talk.screen.answers == ["look", "a tree"] * 2
    shown, account = talk.screen.said[:2]
    assert shown == "scripted: Cut out:\n[picture of 30x20 pixels]\nGo on."
    assert account.startswith("12 tokens, ")
    assert account.endswith(", 2 turns, calls 1, wrong 0, step 0, bonus 0")
    assert [(one.role, one.parts[0].text) for one in talk.conversation.messages] == [
        ("user", "what?"), ("assistant", "a tree"), ("user", "and?"), ("assistant", "a tree"),
    ]  # fmt: skip
    # What the environment has shown is not in the next prompt.
    begun = [prompt for prompt, _ in talk.model.episodes.engine.engine.requests if prompt.endswith("?<end>\na")]
    assert begun == ["uwhat?<end>\na", "uwhat?<end>\naa tree<end>\nuand?<end>\na"]


def test_pictures_are_written_where_that_is_asked_for(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talk = session(pictures=PictureFolder(Path("shown")))
    assert converse(talk, ["what?"], ends_when_stopped=False)
    [file] = (tmp_path / "shown").iterdir()
    assert Image.open(file).size == (30, 20)
    assert f"[picture of 30x20 pixels, written to shown/{file.name}]" in talk.screen.said[0]


def test_a_limit_that_ends_an_episode_is_told(session):
    talk = session(limits=replace(LIMITS, max_turns=1))
    assert converse(talk, ["what?"], ends_when_stopped=False)
    assert talk.screen.said[-1].endswith("ended at --agent_max_turns 1")
    assert talk.conversation.messages[-1].parts[0].text == "look"


def test_a_failure_of_the_environment_costs_the_turn_alone(session):
    def broken(turn: Turn) -> Answered:
        raise RuntimeError("no board")

    talk = session(broken)
    assert not converse(talk, ["what?"], ends_when_stopped=False)
    assert "the environment scripted failed: it raised RuntimeError: no board; the turn is not added" in (
        talk.screen.failures[0]
    )
    assert talk.conversation.messages == []
    assert talk.unanswered == "what?"


def test_an_image_that_is_attached_is_the_episodes(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture(40, 40).save("a.png")
    seen = []

    class Sees(ScriptedEnvironment):
        def begin(self, row, *, seed):
            seen.append([part.source for part in row.messages[-1].parts if isinstance(part, ImagePart)])
            return super().begin(row, seed=seed)

    engine = episode_engine(says, Sees(looks))
    with contextlib.closing(engine):
        talk = chat(episodes=engine)
        assert converse(talk, ["/image a.png", "what?"], ends_when_stopped=False)
    assert seen == [[str(tmp_path / "a.png")]]
