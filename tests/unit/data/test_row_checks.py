from types import SimpleNamespace

import pytest

from lmm_r1.data.messages import ImagePart, Message, Row, TextPart, VideoPart
from lmm_r1.data.row_checks import check_images_taken, learnt_turns
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit

TEXT_KIT = SimpleNamespace(takes_images=False, takes_videos=False)
IMAGE_KIT = SimpleNamespace(takes_images=True, takes_videos=False)
VIDEO_KIT = SimpleNamespace(takes_images=True, takes_videos=True)


def row(*roles, part=None, number=1):
    messages = tuple(Message(role=role, parts=(part or TextPart("x"),)) for role in roles)
    return Row(messages=messages, answer="1", datasource="default", location=f"rows.jsonl line {number}")


def test_a_row_with_an_image_is_refused_for_a_language_model_only():
    rows = [row("user"), row("user", part=ImagePart("/a.png"), number=2)]
    check_images_taken(rows, kit=IMAGE_KIT, model="--checkpoints a=b")
    check_images_taken(rows[:1], kit=TEXT_KIT, model="--checkpoints a=b")
    with pytest.raises(UserError, match="^rows.jsonl line 2: .* --checkpoints a=b is a plain language model; give"):
        check_images_taken(rows, kit=TEXT_KIT, model="--checkpoints a=b")


def test_a_row_with_a_video_is_refused_where_the_kit_takes_none():
    rows = [
        row("user"),
        row("user", part=ImagePart("/a.png"), number=2),
        row("user", part=VideoPart("/a.mp4"), number=3),
    ]
    check_images_taken(rows, kit=VIDEO_KIT, model="--checkpoints a=b")
    check_images_taken(rows[:2], kit=IMAGE_KIT, model="--checkpoints a=b")
    with pytest.raises(UserError, match="^rows.jsonl line 3: the row has a video, but --checkpoints a=b takes none"):
        check_images_taken(rows, kit=IMAGE_KIT, model="--checkpoints a=b")
    with pytest.raises(UserError, match="^rows.jsonl line 3: the row has a video"):
        check_images_taken(rows[2:], kit=TEXT_KIT, model="--checkpoints a=b")


def test_the_last_or_every_assistant_turn_is_learnt():
    conversation = row("system", "user", "assistant", "user", "assistant")
    assert learnt_turns(conversation, every_turn=False) == [4]
    assert learnt_turns(conversation, every_turn=True) == [2, 4]


@pytest.mark.parametrize("roles", [("user",), ("assistant",)])
def test_a_row_without_a_turn_to_learn_is_refused(roles):
    with pytest.raises(UserError, match="rows.jsonl line 1: an assistant turn must follow a prompt"):
        learnt_turns(row(*roles), every_turn=False)
