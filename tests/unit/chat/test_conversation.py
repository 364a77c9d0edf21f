import json
from pathlib import Path

import pytest
from helpers.conversations import load_rows
from helpers.tables import table
from PIL import Image

from lmm_r1.chat.conversation import ChatSampling, Conversation, load, save, saved_path, text_of
from lmm_r1.data.messages import ImagePart, Message, TextPart
from lmm_r1.errors import UserError

SAMPLING = ChatSampling(temperature=0.5, top_p=0.9, max_new_tokens=7)
QUESTION = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}


@pytest.fixture
def conversation(tmp_path: Path) -> Conversation:
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    talk = Conversation()
    talk.set_system("Be brief.")
    parts = (
        ImagePart(str(tmp_path / "a.png")),
        ImagePart(Image.new("RGB", (5, 4), "red")),
        TextPart("Größer? <image>"),
    )
    talk.add(Message(role="user", parts=parts), "<think>…</think>", stopped=True)
    talk.add(Message(role="user", parts=(TextPart("So?"),)), "Yes <image>", stopped=False)
    return talk


@pytest.mark.parametrize("name", ["talk.json", "talk.jsonl"])
def test_a_conversation_comes_back_as_it_was_saved(tmp_path, conversation, name):
    path = tmp_path / name
    save(path, conversation, sampling=SAMPLING, model="models/tiny")
    saved = load(path)
    assert saved.model == "models/tiny"
    assert saved.applied_to(ChatSampling(temperature=0, top_p=1, max_new_tokens=1)) == SAMPLING
    assert saved.conversation.stopped == {2}
    messages = saved.conversation.messages
    assert [messages[0], *messages[2:]] == [conversation.messages[0], *conversation.messages[2:]]
    first, second, text = messages[1].parts
    assert (first, text) == (conversation.messages[1].parts[0], conversation.messages[1].parts[2])
    assert second.source.startswith("data:image/png;base64,")
    assert [row.messages for row in load_rows(str(path), answer_required=False)] == [tuple(messages)]


def test_any_row_that_ends_with_an_answer_can_be_loaded(tmp_path):
    path = tmp_path / "row.jsonl"
    empty = [{"role": role, "content": ""} for role in ("system", "user", "assistant")]
    asked = [*empty, QUESTION | {"content": "What is <image>?"}, ANSWER]
    path.write_text(json.dumps({"message": json.dumps(asked), "answer": "2"}))
    saved = load(path)
    assert [text_of(said) for said in saved.conversation.messages] == ["", "", "", "What is <image>?", "2"]
    assert (saved.settings, saved.model) == ({}, None)


@pytest.mark.parametrize(
    ("row", "sentence"), table("chat/conversation", "a_file_that_is_no_conversation_is_refused_with_its_place")
)
def test_a_file_that_is_no_conversation_is_refused_with_its_place(tmp_path, row, sentence):
    path = tmp_path / "row.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path} row 1: {sentence}")


def test_files_without_one_row_are_refused(tmp_path):
    for content, sentence in {"{": "not valid JSON", "[]": "holds 0 rows", "[{}, {}]": "holds 2 rows"}.items():
        (tmp_path / "row.json").write_text(content)
        with pytest.raises(UserError, match=sentence):
            load(tmp_path / "row.json")
    with pytest.raises(UserError, match=r"no file .*nowhere\.json; check the path"):
        load(tmp_path / "nowhere.json")


def test_only_a_saved_conversation_is_written_over(tmp_path, conversation):
    data, path = tmp_path / "rows.jsonl", tmp_path / "talk.jsonl"
    data.write_text(json.dumps({"messages": [QUESTION, ANSWER]}))
    with pytest.raises(UserError, match="holds no saved conversation; choose another name"):
        save(data, conversation, sampling=SAMPLING, model="m")
    for model in ("first", "second"):
        save(path, conversation, sampling=SAMPLING, model=model)
    assert load(path).model == "second"


def test_the_name_of_a_file():
    assert saved_path(" talk ") == Path("talk.json")
    assert saved_path("'my talk.jsonl'") == Path("my talk.jsonl")
    with pytest.raises(UserError, match=r"talk\.txt: files of conversations must end with \.json or \.jsonl"):
        saved_path("talk.txt")
    with pytest.raises(UserError, match="give the name of a file"):
        saved_path("")
