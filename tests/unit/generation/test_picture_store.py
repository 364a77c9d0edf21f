"""Pictures of an episode stay behind when the sample goes to the driver, and are fetched for its record alone."""

import logging
from typing import Any

import pytest
import ray
from helpers.conversations import message, picture
from helpers.samples import episode, generated_sample

from lmm_r1.data.messages import ImagePart
from lmm_r1.data.sample import Cut, CutImage, Said
from lmm_r1.generation.media_store import fetch_pictures, put_pictures

SAID = (Said("assistant", "crop"), Said("user", "see <image>", (ImagePart(picture(8, 6)),)), Said("assistant", "2"))
SHOWN = (message("system", "Think."), message("user", "?"))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A dict that plays Ray's store."""
    objects: dict[str, Any] = {}

    def put(value: object) -> str:
        objects[f"object {len(objects)}"] = value
        return f"object {len(objects) - 1}"

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", objects.__getitem__)
    return objects


def test_pictures_stay_in_the_store_until_a_record_wants_them(store):
    sample = episode(*SAID, shown=SHOWN)
    sent, plain = put_pictures([sample, generated_sample()])
    assert [one.images for one in sent.played.said] == [(), (), ()]
    assert (sent.played.shown, sent.played.pictures) == ((), "object 0")
    assert [one.text for one in sent.played.said] == ["crop", "see <image>", "2"]
    assert plain.played is None
    assert list(store) == ["object 0"], "one object for all pictures of an episode"
    assert fetch_pictures(sent) == sample
    assert fetch_pictures(plain) is plain


def test_pictures_are_no_larger_than_the_policy_saw_them_and_keep_their_box(store):
    cut = Cut(picture=0, name="original_image", box=(0, 0, 40, 20), size=(80, 60))
    part = CutImage(picture(40, 20), max_pixels=200, cut=cut)
    (kept,) = fetch_pictures(put_pictures([episode(Said("user", "<image>", (part,)))])[0]).played.said[0].images
    assert (kept.source.size, kept.cut) == ((20, 10), cut)


def test_pictures_that_are_lost_with_their_engine_are_told_and_left_out(store, monkeypatch, caplog):
    (sent,) = put_pictures([episode(*SAID)])

    def lost(ref: str) -> None:
        raise ray.exceptions.OwnerDiedError("00" * 28, b"", "")

    monkeypatch.setattr(ray, "get", lost)
    with caplog.at_level(logging.WARNING):
        assert fetch_pictures(sent) is sent
    assert "rows.jsonl, line 1: the pictures of an episode are lost" in caplog.text
