import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tables import table
from PIL import Image

from lmm_r1.data.images import load_image
from lmm_r1.data.messages import (
    ImagePart,
    Message,
    Row,
    TextPart,
    VideoPart,
    as_prompt,
    check_asks,
    demonstration,
    images_of,
    to_chat,
    to_json,
    videos_of,
)
from lmm_r1.data.row_parser import OWN_NAMES, parse_row, stored_messages
from lmm_r1.errors import UserError

BASE = Path("/data/geo")
PICTURE = Image.new("RGB", (3, 2))
CONTENT = [{"type": "image", "image": "img/a.png"}, {"type": "text", "text": "Find x."}]


def parse(record, answer_required=True, **names):
    given = {"location": "rows.jsonl line 7", "base_dir": BASE, "answer_required": answer_required}
    return parse_row(record, **given, names=replace(OWN_NAMES, **names))


def user(content):
    return {"messages": [{"role": "user", "content": content}], "answer": "4"}


def test_a_worked_answer_is_the_response_of_its_prompt_and_learnt_behind_it():
    asked = {"role": "user", "content": CONTENT}
    whole = parse({"messages": [asked, {"role": "assistant", "content": "x is 4."}], "answer": "4"})
    prompt = as_prompt(whole)
    assert prompt.messages == parse({"messages": [asked], "answer": "4"}).messages
    assert prompt.response == Message(role="assistant", parts=(TextPart("x is 4."),))
    assert demonstration(prompt) == whole
    check_asks(prompt)
    with pytest.raises(UserError, match="rows.jsonl line 7: the row ends with an assistant turn"):
        check_asks(whole)


def test_a_row_with_several_assistant_turns_stays_whole():
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi."}]
    several, prompt = parse({"messages": turns * 2, "answer": "4"}), parse(user("Find x."))
    assert (as_prompt(several), as_prompt(prompt)) == (several, prompt)
    pretrained = parse({"messages": turns[1:], "answer": "4"})
    assert as_prompt(pretrained) == pretrained


def test_a_json_string_and_a_list_of_messages_give_the_same_row():
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": CONTENT}]
    expected = Row(
        messages=(
            Message(role="system", parts=(TextPart("Think."),)),
            Message(role="user", parts=(ImagePart("/data/geo/img/a.png"), TextPart("Find x."))),
        ),
        answer="$4$",
        datasource="geo",
        location="rows.jsonl line 7",
        columns={"answer": "$4$", "datasource": "geo"},
    )
    assert parse({"message": json.dumps(messages), "answer": "$4$", "datasource": "geo"}) == expected
    assert parse({"messages": messages, "answer": "$4$", "datasource": "geo"}) == expected
    assert parse({"chat": json.dumps(messages), "answer": "$4$", "datasource": "geo"}, prompt="chat") == expected
    assert parse({"chat": messages, "answer": "$4$", "datasource": "geo"}, prompt="chat") == expected


def test_fields_that_arrow_fills_with_null_count_as_absent():
    content = [
        {"type": "image", "image": "a.png", "text": None, "min_pixels": None, "max_pixels": 784},
        {"type": "text", "image": None, "text": "Find x.", "min_pixels": None, "max_pixels": None},
    ]
    row = parse({"message": None, **user(content), "images": None, "datasource": None})
    assert row.messages[0].parts == (ImagePart("/data/geo/a.png", max_pixels=784), TextPart("Find x."))
    assert row.datasource == "default"


def test_a_plain_prompt_becomes_one_user_turn_with_images_in_the_order_of_its_tags():
    record = {"input": "Compare <image>\nwith <image>.", "images": ["a.png", "b.png"], "answer": "A"}
    row = parse(record, prompt="input")
    assert row.messages == (
        Message(
            role="user",
            parts=(
                TextPart("Compare"),
                ImagePart("/data/geo/a.png"),
                TextPart("with"),
                ImagePart("/data/geo/b.png"),
                TextPart("."),
            ),
        ),
    )


@pytest.mark.parametrize("picture", [{"bytes": b"png", "path": None}, b"png", [b"png"]])
def test_a_single_image_needs_no_list_and_its_field_can_be_named(picture):
    record = {"q": "<image>Find x.", "picture": picture, "answer": "4"}
    row = parse(record, prompt="q", images="picture")
    assert row.messages[0].parts == (ImagePart(b"png"), TextPart("Find x."))


def test_a_prompt_that_only_looks_like_a_list_stays_text():
    for prompt in ("[3, 1, 2] in order?", '[{"a": 1}] has how many keys?', "{x} is a set"):
        row = parse({"input": prompt, "answer": "1"}, prompt="input")
        assert row.messages[0].parts == (TextPart(prompt),)


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (["a.png"], 'more "<image>" places in "input" than the 1 images in the field "images"'),
        (["a.png", "b.png", "c.png"], '3 images in the field "images" but 2 "<image>" places in "input"'),
    ],
)
def test_a_mismatch_of_tags_and_images_is_an_error(images, sentence):
    with pytest.raises(UserError, match="^rows.jsonl line 7: ") as raised:
        parse({"input": "<image> or <image>?", "images": images, "answer": "A"}, prompt="input")
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image", "image": "a.png"}, "/data/geo/a.png"),
        ({"type": "image", "image": "../b/a.png"}, "/data/b/a.png"),
        ({"type": "image", "image": "/abs/a.png"}, "/abs/a.png"),
        ({"type": "image", "image": "file:///abs/a%20b.png"}, "/abs/a b.png"),
        ({"type": "image", "image": "https://host/a.png"}, "https://host/a.png"),
        ({"type": "image", "image": "data:image/png;base64,AAAA"}, "data:image/png;base64,AAAA"),
        ({"type": "image", "image": b"raw"}, b"raw"),
        ({"type": "image", "image": {"bytes": b"raw", "path": "a.png"}}, b"raw"),
        ({"type": "image", "image": {"bytes": None, "path": "a.png"}}, "/data/geo/a.png"),
        ({"type": "image_url", "image_url": {"url": "https://host/a.png"}}, "https://host/a.png"),
        ({"type": "image_url", "image_url": "a.png"}, "/data/geo/a.png"),
    ],
)
def test_every_form_of_image_source_is_read(part, source):
    assert images_of(parse(user([part])).messages) == [ImagePart(source)]


def test_base64_text_is_not_taken_for_a_path():
    text = "iVBORw0KGgo" + "A" * 80
    jpeg = "/9j/" + "4AAQ" * 40
    assert [
        part.source
        for part in images_of(
            parse(user([{"type": "image", "image": text}, {"type": "image", "image": jpeg}])).messages
        )
    ] == [text, jpeg]
    assert images_of(parse(user([{"type": "image", "image": "/9j/photo.jpg"}])).messages) == [
        ImagePart("/9j/photo.jpg")
    ]


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        (
            {"min_pixels": 0},
            'message 1 of "messages", part 1 has min_pixels 0; it must be a number above 0',
        ),
        ({"max_pixels": True}, "max_pixels True"),
        ({"max_pixels": float("nan")}, "max_pixels nan"),
        ({"min_pixels": 785, "max_pixels": 784}, "min_pixels 785 above max_pixels 784"),
    ],
)
def test_bad_pixel_bounds_are_errors(bounds, sentence):
    with pytest.raises(UserError) as raised:
        parse(user([{"type": "image", "image": "a.png", **bounds}]))
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "video", "video": "a.mp4"}, "/data/geo/a.mp4"),
        ({"type": "video", "video": "file:///abs/a%20b.mp4"}, "/abs/a b.mp4"),
        ({"type": "video", "video": {"path": "../b/a.mp4"}}, "/data/b/a.mp4"),
        ({"type": "video_url", "video_url": {"url": "/abs/a.mp4"}}, "/abs/a.mp4"),
        (
            {"type": "video", "video": ["a.png", "data:image/png;base64,AAAA", {"bytes": b"raw"}]},
            ("/data/geo/a.png", "data:image/png;base64,AAAA", b"raw"),
        ),
    ],
)
def test_a_video_is_a_file_or_a_list_of_frames(part, source):
    assert videos_of(parse(user([part])).messages) == [VideoPart(source)]


def test_tags_of_images_and_videos_are_filled_each_from_its_own_field():
    record = {
        "input": "<video>Is <image> in <video>?",
        "images": "a.png",
        "videos": ["a.mp4", ["f.png", "g.png"]],
        "answer": "A",
    }
    assert parse(record, prompt="input").messages[0].parts == (
        VideoPart("/data/geo/a.mp4"),
        TextPart("Is"),
        ImagePart("/data/geo/a.png"),
        TextPart("in"),
        VideoPart(("/data/geo/f.png", "/data/geo/g.png")),
        TextPart("?"),
    )
    row = parse({**user([{"type": "video", "fps": 4}]), "clips": "a.mp4"}, videos="clips")
    assert row.messages[0].parts == (VideoPart("/data/geo/a.mp4", fps=4.0),)


@pytest.mark.parametrize(
    ("videos", "sentence"),
    [
        ([], 'more "<video>" places in "input" than the 0 videos in the field "videos"; add the missing videos'),
        (["a.mp4", "b.mp4"], '2 videos in the field "videos" but 1 "<video>" places in "input"'),
        ([["a.png", 3]], '"videos" entry 1, frame 2 is not an image'),
        (["https://host/a.mp4"], "not a URL"),
    ],
)
def test_a_video_field_that_does_not_fit_is_an_error(videos, sentence):
    with pytest.raises(UserError, match="^rows.jsonl line 7: ") as raised:
        parse({"input": "<video>?", "videos": videos, "answer": "A"}, prompt="input")
    assert sentence in str(raised.value)


@pytest.mark.parametrize(("settings", "sentence"), table("data/messages", "bad_settings_of_a_video_are_errors"))
def test_bad_settings_of_a_video_are_errors(settings, sentence):
    with pytest.raises(UserError) as raised:
        parse(user([{"type": "video", "video": "a.mp4", **settings}]))
    assert sentence in str(raised.value)


def test_chat_and_json_forms_show_videos():
    messages = parse(
        user([{"type": "video", "video": "a.mp4", "fps": 1}, {"type": "video", "video": ["f.png", PICTURE]}])
    ).messages
    assert to_chat(messages) == [{"role": "user", "content": [{"type": "video"}, {"type": "video"}]}]
    shown = '{"type":"video","video":"/data/geo/a.mp4"},{"type":"video","video":["/data/geo/f.png","<image 3x2>"]}'
    assert to_json(messages) == f'[{{"role":"user","content":[{shown}]}}]'


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {},
            'the answer "answer" is missing (found: messages); fill it in, or name another field with --data.label_key',
        ),
        ({"answer": ""}, 'the answer "answer" is empty'),
        ({"answer": float("nan")}, 'the answer "answer" is empty'),
        ({"answer": True}, "must be text or a number, not bool"),
    ],
)
def test_a_missing_or_unusable_answer_is_an_error(fields, sentence):
    with pytest.raises(UserError, match="^rows.jsonl line 7: ") as raised:
        parse({"messages": [{"role": "user", "content": "Hi"}], **fields})
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"prompt": "Hi"}, 'no field "message" or "messages" (found: prompt, answer); name it with --data.input_key'),
        ({"message": "Hi", "messages": [{"role": "user", "content": "Hi"}]}, 'both "message" and "messages"'),
        ({"message": '[{"role": "user", "content": "Hi"}'}, 'the messages in "message" are not valid JSON: Expecting'),
        ({"message": '{"role": "user", "content": "Hi"}'}, "must be a list with at least one message"),
        ({"messages": ["Hi"]}, 'message 1 of "messages" must be an object with "role" and "content", not str'),
        ({"messages": [{"role": "human", "content": "Hi"}]}, "has the role 'human'; known roles are system"),
        ({"messages": [{"role": "user", "content": None}]}, 'message 1 of "messages" (user) needs a "content"'),
        ({"messages": [{"role": "user", "content": " "}]}, 'message 1 of "messages" (user) is empty'),
        (
            json.loads('{"messages": [{"role": "user", "content": "A \\ud83d?"}]}'),
            'message 1 of "messages" (user) holds half of a character',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]},
            "the type 'audio'; known types are text, image, image_url, video, video_url",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 'type "text" but no "text" string'),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}, "part 1 is not an image"),
    ],
)
def test_a_record_that_breaks_the_schema_is_an_error_with_its_place(record, sentence):
    with pytest.raises(UserError, match="^rows.jsonl line 7: ") as raised:
        parse({**record, "answer": "1"})
    assert sentence in str(raised.value)


def test_json_form_keeps_paths_and_describes_other_images(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    sources = (
        "/data/é.png",
        "https://host/a.png",
        Image.new("L", (84, 56)),
        data,
        b"not an image",
        "data:image/png,AA",
    )
    messages = (Message(role="user", parts=tuple(ImagePart(source) for source in sources)),)
    described = [
        "/data/é.png",
        "https://host/a.png",
        "<image 84x56>",
        "<image 3x2>",
        "<image, 12 bytes>",
        "<image as text, 17 characters>",
    ]
    content = ",".join(f'{{"type":"image","image":"{text}"}}' for text in described)
    assert to_json(messages) == f'[{{"role":"user","content":[{content}]}}]'
    assert to_json((Message(role="user", parts=(TextPart("Hi"),)),)) == '[{"role":"user","content":"Hi"}]'


def test_relative_paths_are_absolute_even_where_the_row_file_was_named_relatively(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = parse_row(user([{"type": "image", "image": "a.png"}]), location="x", base_dir=Path("rows"))
    assert images_of(row.messages) == [ImagePart(str(tmp_path / "rows" / "a.png"))]


def read_back(messages):
    stored = {"messages": stored_messages(messages)}
    return parse_row(stored, location="row", base_dir=Path("/nowhere"), answer_required=False).messages


@pytest.mark.parametrize(
    "parts",
    [
        (TextPart("What is 1+1?"),),
        (TextPart("the text <image> is a word here"),),
        (ImagePart("/a/b.png", max_pixels=784), TextPart("What?")),
        (ImagePart("https://example.com/a.png"), ImagePart("data:image/png;base64,AAAA"), TextPart("<video>")),
        (VideoPart("/a/b.mp4", fps=2.0, max_frames=8), TextPart("What?")),
    ],
)
def test_what_is_text_already_comes_back_as_it_was(parts):
    messages = (Message(role="system", parts=(TextPart("Be brief."),)), Message(role="user", parts=parts))
    assert read_back(messages) == messages


@pytest.mark.parametrize("form", ["pil", "png", "jpeg"])
def test_other_images_come_back_with_the_same_pixels(form):
    image = Image.effect_noise((20, 10), 50).convert("RGB")
    source = image
    if form != "pil":
        buffer = io.BytesIO()
        image.save(buffer, format=form)
        source = buffer.getvalue()
    before = ImagePart(source)
    [after] = images_of(read_back((Message(role="user", parts=(before, TextPart("?"))),)))
    assert str(after.source).startswith(f"data:image/{'jpeg' if form == 'jpeg' else 'png'};base64,")
    assert load_image(after, location="").tobytes() == load_image(before, location="").tobytes()
