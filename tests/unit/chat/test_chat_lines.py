"""Lines of a chat: messages, commands and what they change."""

import io
import json
import sys

import pytest
from helpers.chats import answer, chat
from PIL import Image
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from lmm_r1.chat.conversation import ChatSampling
from lmm_r1.chat.loop import (
    COMMANDS,
    LineCompleter,
    continues,
    converse,
    first_prompt,
    piped_lines,
    private_file,
    prompt,
    prompted_lines,
)
from lmm_r1.config.generation import ChatConfig
from lmm_r1.data.messages import ImagePart, TextPart
from lmm_r1.data.reading import shipped_prompt


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b c.png"):
        Image.new("RGB", (30, 20)).save(tmp_path / name)
    return tmp_path


def texts(session) -> list[tuple[str, str]]:
    """Role and text of every message."""
    messages = session.conversation.messages
    return [
        (message.role, "".join(part.text for part in message.parts if isinstance(part, TextPart)))
        for message in messages
    ]


def enter(session, *lines: str) -> bool:
    return converse(session, lines, ends_when_stopped=False)


def failure(session, *lines: str) -> str:
    assert not enter(session, *lines)
    return session.screen.failures[-1]


def test_the_engine_reads_the_whole_conversation():
    session = chat(answer("2"), answer("3"), system="Count.")
    assert enter(session, "1?", "", "and?")
    asked = session.model.engine.rows[1]
    assert [message.role for message in asked.messages] == ["system", "user", "assistant", "user"]
    assert texts(session) == [
        ("system", "Count."),
        ("user", "1?"),
        ("assistant", "2"),
        ("user", "and?"),
        ("assistant", "3"),
    ]
    assert session.screen.answers == ["2", "3"]


def test_what_is_attached_goes_with_one_message(folder):
    session = chat(answer("red"), answer("blue"))
    assert enter(session, "/image a.png", "/image b c.png")
    assert prompt(session) == "[2 attached] > "
    assert enter(session, "/images", "Colours?", "/images", "So?")
    images = (ImagePart(str(folder / "a.png")), ImagePart(str(folder / "b c.png")))
    assert [message.parts for message in session.conversation.messages[::2]] == [
        (*images, TextPart("Colours?")),
        (TextPart("So?"),),
    ]
    assert session.screen.tables == [[("a.png", "30x20"), ("b c.png", "30x20")]]
    assert session.screen.said[:2] == ["attached a.png (30x20)", "attached b c.png (30x20)"]
    assert prompt(session) == "> "


def test_of_several_images_all_are_attached_or_none(folder):
    session = chat()
    assert failure(session, "/image a.png nowhere.png") == "no image file nowhere.png; check the path"
    assert session.attached == []
    assert enter(session, "/image a.png 'b c.png'", f"'{folder}/a.png'") is False
    assert "3 images in the conversation are more than --max_images 2" in session.screen.failures[-1]
    assert [item.name for item in session.attached] == ["a.png", "b c.png"]
    assert enter(session, "/clear_images")
    assert session.attached == []


def test_a_dropped_file_is_attached_and_two_slashes_begin_a_message(folder):
    session = chat(answer("a root"))
    assert enter(session, f"{folder}/b\\ c.png", "//etc is what?")
    assert texts(session)[0] == ("user", "/etc is what?")
    assert session.conversation.messages[0].parts[0] == ImagePart(str(folder / "b c.png"))


def test_a_model_without_images_says_so(folder):
    session = chat(takes_images=False, max_images=0)
    assert failure(session, "/image a.png") == "models/tiny is a plain language model and takes no images"
    assert "takes no videos" in failure(session, "/video a.mp4")


def test_a_turn_without_an_answer_is_kept_for_retry(folder):
    session = chat("this conversation: no room", answer(" \n"), answer("2"))
    enter(session, "/image a.png")
    assert failure(session, "1+1?").startswith("this conversation: no room; the turn is not added")
    assert failure(session, "/retry").startswith("the answer is empty; the turn is not added")
    assert (texts(session), len(session.attached)) == ([], 1)
    assert enter(session, "/retry")
    assert (texts(session), session.attached) == ([("user", "1+1?"), ("assistant", "2")], [])


def test_retry_replaces_an_answer_only_by_another():
    session = chat(answer("3"), "no room", answer("2"))
    enter(session, "1+1?")
    failure(session, "/retry")
    assert texts(session)[-1] == ("assistant", "3")
    enter(session, "/retry")
    assert texts(session) == [("user", "1+1?"), ("assistant", "2")]


def test_undo_and_reset():
    session = chat(answer("2"), answer("4"), system="Count.")
    enter(session, "1+1?", "2+2?", "/undo")
    assert session.screen.said[-1] == "took back: 2+2?"
    assert texts(session) == [("system", "Count."), ("user", "1+1?"), ("assistant", "2")]
    enter(session, "/reset")
    assert texts(session) == [("system", "Count.")]
    assert failure(session, "/undo") == "there is no turn to take back"
    assert failure(session, "/retry") == "there is no turn yet to ask for again"


@pytest.mark.parametrize("word", ["exit", "quit", " quit ", "/exit"])
def test_a_word_by_itself_leaves_and_in_a_message_it_does_not(word):
    session = chat(answer("Type it."))
    assert enter(session, "exit how?", word, "never read")
    assert texts(session) == [("user", "exit how?"), ("assistant", "Type it.")]
    assert session.leaving


def test_what_is_not_of_this_conversation_is_overwritten_only_on_the_second_demand(folder):
    session = chat(answer("2"), answer("4"), answer("6"))
    enter(session, "1+1?", "/save old.json")
    precious = (folder / "old.json").read_text()
    enter(session, "/reset", "2+2?")
    assert (
        failure(session, "/save old.json") == "old.json holds another conversation; repeat the command to overwrite it"
    )
    assert (folder / "old.json").read_text() == precious
    assert enter(session, "/save new.json", "3+3?", "/save new.json"), "its own file is its own"
    assert (
        failure(session, "/save old.json") == "old.json holds another conversation; repeat the command to overwrite it"
    )
    assert enter(session, "/save old.json")
    assert len(json.loads((folder / "old.json").read_text())[0]["messages"]) == 4
    assert enter(session, "/load new.json", "/undo", "/save new.json")


def test_a_stopped_answer_stays_and_is_marked():
    session = chat(answer("2 and", finish_reason="aborted"))
    enter(session, "1+1?", "/system Count.")
    assert session.screen.said[0].endswith("tokens/s, stopped")
    assert session.conversation.stopped == {2}
    enter(session, '/system ""')
    assert session.conversation.stopped == {1}
    enter(session, "/undo")
    assert session.conversation.stopped == set()


def test_a_stopped_answer_ends_what_comes_from_a_pipe():
    session = chat(answer("2 and", finish_reason="aborted"))
    with pytest.raises(KeyboardInterrupt):
        converse(session, ["1+1?", "never read"], ends_when_stopped=True)
    assert len(session.model.engine.rows) == 1


@pytest.mark.parametrize(
    ("completion", "ending"),
    [
        (answer("2", num_tokens=1), "tokens/s"),
        (answer("2", num_tokens=16, finish_reason="length"), "cut off at max_new_tokens 16"),
        (answer("2", num_tokens=9, finish_reason="length"), "cut off: the conversation fills --max_model_len"),
    ],
)
def test_the_account_of_an_answer(completion, ending):
    session = chat(completion)
    enter(session, "1+1?")
    unit = "token" if completion.num_tokens == 1 else "tokens"
    assert session.screen.said[0].startswith(f"{completion.num_tokens} {unit}, ")
    assert session.screen.said[0].endswith(ending)


def test_settings_are_checked_and_reach_the_engine():
    session = chat(answer("2"))
    assert enter(session, "/set temperature 0.25", "/set top_p=0.5", "/set", "1+1?")
    assert session.screen.tables[-1] == [("temperature", "0.25"), ("top_p", "0.5"), ("max_new_tokens", "16")]
    asked = session.model.engine.sampling[0]
    assert (asked.n_samples, asked.temperature, asked.top_p, asked.max_new_tokens) == (1, 0.25, 0.5, 16)
    for line, sentence in {
        "/set top_p 0": "top_p 0: must be above 0 and at most 1",
        "/set temperature -1": "temperature -1: must be a number, at least 0 (greedy)",
        "/set temperature nan": "temperature nan: must be a number, at least 0 (greedy)",
        "/set max_new_tokens 1.5": "max_new_tokens 1.5: must be a whole number",
        "/set max_new_tokens 0": "max_new_tokens 0: must be 1 or more",
        "/set top_q 1": "no setting top_q; did you mean top_p?",
        "/set top_p": "write /set NAME VALUE; the names are temperature, top_p, max_new_tokens",
    }.items():
        assert failure(session, line) == sentence
    assert session.sampling == ChatSampling(temperature=0.25, top_p=0.5, max_new_tokens=16)


def test_the_system_prompt_is_shown_changed_and_taken_away():
    session = chat(system="")
    enter(session, "/system", "/system Be brief.", "/system", '/system ""')
    assert session.screen.said == [
        'system prompt: \n(/system "" removes it)',
        'system prompt: Be brief.\n(/system "" removes it)',
        'system prompt: Be brief.\n(/system "" removes it)',
        "no system prompt, except for what the checkpoint's chat template may add",
    ]


def test_a_chat_begins_with_the_prompt_of_the_run_unless_a_flag_has_another(tmp_path):
    (tmp_path / "run_config.yaml").write_text("rollout: {}\ndata: {system_prompt: think}\n")
    screen, think = chat().screen, shipped_prompt("think")
    for given in ({"model": str(tmp_path)}, {"model": "base", "adapter": tmp_path}):
        assert first_prompt(ChatConfig(**given), screen) == think
        assert screen.said.pop() == f"system prompt of the run: {' '.join(think.split())} (/system replaces it)"
        assert first_prompt(ChatConfig(**given, system="Be brief."), screen) == "Be brief."
    (tmp_path / "run_config.yaml").write_text("rollout: {}\ndata: {system_prompt: none}\n")
    assert first_prompt(ChatConfig(model=str(tmp_path)), screen) is first_prompt(ChatConfig(model="a"), screen) is None
    assert screen.said == []


def test_images_are_shown_as_large_as_in_the_run_of_the_model(folder):
    session = chat(answer("red"))
    session.max_pixels = 784
    assert enter(session, "/image a.png", "Colour?")
    assert session.conversation.messages[0].parts[0] == ImagePart(str(folder / "a.png"), max_pixels=784)


def test_a_saved_conversation_is_taken_up_where_the_model_can(folder):
    session = chat(answer("red"))
    assert failure(session, "/save talk") == "there is nothing to save yet"
    assert enter(session, "/image a.png", "Colour?", "/set top_p 0.5", "/save talk")
    other = chat(answer("blue"), name="models/other")
    assert enter(other, "/load talk.json", "And?")
    assert [role for role, _ in texts(other)] == ["user", "assistant", "user", "assistant"]
    assert other.sampling.top_p == 0.5
    assert other.screen.said[:2] == ["it was saved with another model: models/tiny", "loaded 1 turn from talk.json"]
    blind = chat(takes_images=False, max_images=0)
    assert failure(blind, "/load talk") == "talk.json: models/tiny is a plain language model and takes no images"
    (folder / "talk.json").write_text(json.dumps([{"messages": 1}]))
    assert "must be a list" in failure(other, "/load talk")
    assert len(texts(other)) == 4


def test_unknown_commands_and_stray_arguments():
    session = chat()
    assert failure(session, "/imgae a.png") == "unknown command /imgae; did you mean /image?"
    assert failure(session, "/xyzzy") == "unknown command /xyzzy; /help lists them"
    assert failure(session, "/undo 2") == "/undo takes no argument, but got 2"


def test_help_lists_every_command_and_exit_leaves():
    session = chat()
    assert enter(session, "/help", "/exit", "/unknown")
    [listed] = session.screen.tables
    assert [name.split()[0] for name, _ in listed[: len(COMMANDS)]] == list(COMMANDS)


def test_lines_of_a_pipe(monkeypatch):
    text = "\ufeffone \r\ntwo\\\nthree\\\\\nGrüße \\"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="ascii"))
    assert list(piped_lines()) == ["one ", "two\nthree\\\\", "Grüße "]
    assert [continues(line) for line in ("", "a", "\\", "\\\\", "a\\\\\\")] == [False, False, True, False, True]


def test_a_dumb_terminal_is_written_no_escape_sequence(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\\\ntwo\nthree\n"))
    out = io.StringIO()
    assert list(prompted_lines(out, history=None, before=lambda: "> ")) == ["one\ntwo", "three"]
    assert out.getvalue() == "> . > > \n"


def test_the_history_is_private(tmp_path):
    path = private_file(tmp_path / "new" / "history")
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_tab_key_completes_commands_files_and_settings(folder):
    def offered(line: str) -> list[str]:
        completions = LineCompleter().get_completions(Document(line, len(line)), CompleteEvent())
        return sorted(line[: len(line) + completion.start_position] + completion.text for completion in completions)

    assert offered("/sa") == ["/save "]
    assert offered("/im") == ["/image ", "/images"]
    assert offered("/set t") == ["/set temperature", "/set top_p"]
    assert offered("/image b") == ["/image b c.png"]
    assert offered("/image 'b") == ["/image 'b c.png"]
    assert offered("/undo b") == offered("b") == offered("hello /sa") == []
