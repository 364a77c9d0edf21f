"""Lines of a chat: messages, commands and what they change."""

import contextlib
import functools
import io
import sys
import threading
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.chats import answer, chat
from helpers.conversations import picture
from helpers.scripted_episodes import LIMITS, ScriptedEnvironment, episode_engine, told
from PIL import Image

from lmm_r1.agents.environment import Answered, Turn
from lmm_r1.data.messages import ImagePart, TextPart
from lmm_r1.errors import UserError
from lmm_r1.tools.chat import COMMANDS, entries, is_dropped_image, read_image, say, sources_of

HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\r\x08d\x7fe\x9b2Jf\u202eg\ud800h\ti\n"
HARMLESS = "a␛[31mb␛]0;title␇c␍␈d␡e\\x9b2Jf\\u202eg\ufffdh\ti\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.png", "b c.png", "Anna's.png"):
        Image.new("RGB", (30, 20)).save(tmp_path / name)
    return tmp_path


def texts(talk) -> list[tuple[str, str]]:
    """Role and text of every message."""
    return [
        (message.role, "".join(part.text for part in message.parts if isinstance(part, TextPart)))
        for message in talk.turns
    ]


def failure(capsys, talk, *lines: str) -> str:
    capsys.readouterr()
    assert not talk.run(lines)
    return capsys.readouterr().err.splitlines()[-1]


def test_the_engine_reads_the_whole_conversation(capsys):
    talk = chat(answer("2"), answer("3", num_tokens=9, finish_reason="length"), system="Count.")
    assert talk.run(["1?", "", "and?"])
    asked = talk.model.engine.rows[1]
    assert [message.role for message in asked.messages] == ["system", "user", "assistant", "user"]
    assert texts(talk) == [("user", "1?"), ("assistant", "2"), ("user", "and?"), ("assistant", "3")]
    assert talk.out.getvalue() == "2\n\n3\n"
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("4 tokens, ")
    assert second.endswith(", cut off at --max_new_tokens or --max_model_len")


def test_what_is_attached_goes_with_one_message(folder, capsys):
    talk = chat(answer("red"), answer("blue"))
    talk.max_pixels = 784
    assert talk.run(["/image a.png", f"{folder}/b\\ c.png", "Colours?", "So?"])
    images = [ImagePart(str(folder / name), max_pixels=784) for name in ("a.png", "b c.png")]
    assert [message.parts for message in talk.turns[::2]] == [(*images, TextPart("Colours?")), (TextPart("So?"),)]
    assert "attached a.png; images and videos for the next message: 1\n" in capsys.readouterr().err


def test_of_several_images_all_are_attached_or_none(folder, capsys):
    talk = chat(answer("red"))
    assert "nowhere.png" in failure(capsys, talk, "/image a.png nowhere.png")
    assert talk.attached == []
    assert "3 images in the conversation: models/tiny takes 2 here; see --max_images" in failure(
        capsys, talk, "/image a.png 'b c.png'", f"'{folder}/a.png'"
    )
    assert len(talk.attached) == 2
    assert talk.run(["/reset"])
    assert talk.attached == []


def test_media_that_the_model_does_not_take(folder, capsys):
    talk = chat(max_images=0)
    assert "takes 0 here; see --max_images" in failure(capsys, talk, "/image a.png")
    assert "takes 0 here; see --max_videos" in failure(capsys, talk, "/video a.mp4")
    seeing = chat(max_videos=1)
    assert "no video file a.mp4; check the path" in failure(capsys, seeing, "/video a.mp4")


def test_a_turn_without_an_answer_is_not_added_and_keeps_its_attachments(folder, capsys):
    talk = chat("this conversation: no room", answer(" \n"), answer("2"))
    talk.run(["/image a.png"])
    assert failure(capsys, talk, "1+1?").startswith("error: this conversation: no room; the turn is not added")
    assert failure(capsys, talk, "1+1?").startswith("error: the answer is empty; the turn is not added")
    assert (texts(talk), len(talk.attached)) == ([], 1)
    assert talk.run(["1+1?"])
    assert (texts(talk), talk.attached) == ([("user", "1+1?"), ("assistant", "2")], [])


def test_the_system_prompt_is_shown_replaced_and_removed_and_outlives_a_reset(capsys):
    talk = chat(answer("2"), system="")
    assert talk.run(["/system", "/system Be brief.", "1+1?", "/reset", "/system", '/system ""'])
    said = [line for line in capsys.readouterr().err.splitlines() if "system prompt" in line]
    assert said == [
        "system prompt: ",
        "system prompt: Be brief.",
        "a new conversation; the system prompt stays",
        "system prompt: Be brief.",
        "no system prompt",
    ]
    assert talk.turns == []


@pytest.mark.parametrize("word", ["exit", " quit ", "/exit"])
def test_a_word_by_itself_leaves_and_in_a_message_it_does_not(word):
    talk = chat(answer("Type it."))
    assert talk.run(["exit how?", word, "never read"])
    assert texts(talk) == [("user", "exit how?"), ("assistant", "Type it.")]


def test_a_stopped_answer_stays_in_a_terminal_and_ends_a_pipe(capsys):
    stopped = answer("2 and", finish_reason="aborted")
    talk = chat(stopped)
    talk.in_terminal = True
    assert talk.run(["1+1?"])
    assert capsys.readouterr().err.endswith(", stopped\n")
    assert texts(talk)[-1] == ("assistant", "2 and")
    piped = chat(stopped)
    with pytest.raises(KeyboardInterrupt):
        piped.run(["1+1?", "never read"])
    assert len(piped.model.engine.rows) == 1


def test_unknown_commands_are_refused_help_lists_all_and_two_slashes_begin_a_message(capsys):
    talk = chat(answer("a root"))
    assert failure(capsys, talk, "/imgae a.png") == "error: unknown command /imgae a.png; did you mean /image?"
    assert talk.run(["/help", "//etc is what?"])
    said = capsys.readouterr().err
    assert all(f"{name} " in said for name in COMMANDS)
    assert texts(talk)[0] == ("user", "/etc is what?")


def test_nothing_that_is_written_can_steer_a_terminal(capsys):
    talk = chat(answer(HOSTILE))
    assert talk.run(["?"])
    assert talk.out.getvalue() == HARMLESS
    capsys.readouterr()
    say(HOSTILE)
    assert capsys.readouterr().err == HARMLESS + "\n"


def test_lines_of_a_pipe(monkeypatch):
    text = "\ufeffone \r\ntwo\\\nthree\\\\\nGrüße \\"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii"))
    assert list(entries(in_terminal=False)) == ["one ", "two\nthree\\\\", "Grüße \n"]


@pytest.mark.parametrize(
    ("typed", "sources"),
    [
        ("a.png", ["a.png"]),
        ("'b c.png'", ["b c.png"]),
        ("b\\ c.png", ["b c.png"]),
        ("b c.png", ["b c.png"]),
        ("a.png 'b c.png'", ["a.png", "b c.png"]),
        ("Anna's.png", ["Anna's.png"]),
        ("http://host/a.png http://host/b.png", ["http://host/a.png", "http://host/b.png"]),
    ],
)
def test_paths_and_urls_as_they_are_typed_or_dragged(folder, typed, sources):
    assert sources_of(typed) == sources
    assert sources_of("~/a.png") == [f"{folder}/a.png"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("'{}/b c.png'", True),
        ("file://{}/a.png", True),
        ("./a.png", True),
        ("a.png", False),
        ("{}/a.png shows what?", False),
        ("{}/nowhere.png", False),
        ("{}", False),
        ("'quoted' words", False),
    ],
)
def test_a_line_that_is_the_path_of_an_image(folder, line, expected):
    assert is_dropped_image(line.format(folder)) is expected


def test_an_image_from_a_url_is_kept_as_it_was_and_private_addresses_are_refused(folder, monkeypatch):
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/a.png"
        try:
            with pytest.raises(UserError, match="private"):
                read_image(url)
            monkeypatch.setenv("LMM_R1_ALLOW_PRIVATE_URLS", "1")
            assert read_image(url).source.size == (30, 20)
        finally:
            server.shutdown()
            thread.join()


def looks(turn: Turn) -> Answered:
    if turn.text == "look":
        return told("Cut out:\n", picture(30, 20), "\nGo on.", counts={"calls": 1})
    return Answered()


def says(prompt: str) -> str:
    """Looks once at what the last message asks, then answers it."""
    return "look" if prompt.endswith("?<end>\na") else "a tree"


def test_the_turns_of_an_episode_are_shown_and_the_conversation_goes_on_from_the_last(capsys):
    engine = episode_engine(says, ScriptedEnvironment(looks), limits=LIMITS)
    with contextlib.closing(engine):
        talk = chat(episodes=engine)
        assert talk.run(["what?", "and?"])
    assert talk.out.getvalue() == "\n\n".join(["look", "a tree"] * 2) + "\n"
    said = capsys.readouterr().err
    assert "the environment: Cut out:\n[picture]\nGo on.\n12 tokens, " in said
    assert ", 2 turns, calls 1, wrong 0, step 0, bonus 0\n" in said
    # What the environment has shown is not in the next prompt.
    begun = [prompt for prompt, _ in engine.engine.engine.requests if prompt.endswith("?<end>\na")]
    assert begun == ["uwhat?<end>\na", "uwhat?<end>\naa tree<end>\nuand?<end>\na"]


def test_limits_and_failures_of_an_environment_are_said(capsys):
    limited = episode_engine(says, ScriptedEnvironment(looks), limits=replace(LIMITS, max_turns=1))
    with contextlib.closing(limited):
        assert chat(episodes=limited).run(["what?"])
    assert capsys.readouterr().err.endswith("ended at its limit of turns\n")

    def broken(turn: Turn) -> Answered:
        raise RuntimeError("no board")

    with contextlib.closing(episode_engine(says, ScriptedEnvironment(broken), limits=LIMITS)) as engine:
        talk = chat(episodes=engine)
        assert "it raised RuntimeError: no board; the turn is not added" in failure(capsys, talk, "what?")
    assert talk.turns == []
