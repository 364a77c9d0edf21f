import asyncio
import json
import threading
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from helpers.tables import table

from remote_rm.protocol import RewardRequest
from remote_rm.service.app import INLINE_BYTES, RequestReader, TooManyItems

LONG = "x" * INLINE_BYTES
TEXTS = ["", 'a "b" \\ \n', "3 × 4 \U0001f600", "\ud800"]


def read(body: bytes, *, max_items: int = 100) -> RewardRequest:
    reader = RequestReader(lambda request: [request], max_items=max_items)
    (request,) = asyncio.run(reader.items(body))
    reader.close()
    return request


def request_of(texts: list[str], **more: Any) -> dict[str, Any]:
    return {"query": texts, "prompts": texts, "labels": texts, **more}


@pytest.mark.parametrize("padding", ["", LONG])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_large_and_small_bodies_are_read_alike(padding, indent, is_ascii):
    other = {"a": [1, {"b": "]}"}, 'c"['], "d": None, "e": -1.5e3, "f": True, "g": LONG[: len(padding)]}
    request = request_of([*TEXTS, padding], responses=None, **other)
    body = json.dumps(request, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert read(body).query == ["", 'a "b" \\ \n', "3 × 4 \U0001f600", "\ufffd", padding]


@pytest.mark.parametrize("padding", ["", LONG])
@pytest.mark.parametrize(
    ("spoiled", "place", "told"),
    [
        ({"labels": ["x", None]}, ["body", "labels", 1], "valid string"),
        ({"labels": None}, ["body", "labels"], "valid list"),
        ({"labels": {"a": 1}}, ["body", "labels"], "valid list"),
        ({"labels": ["x"]}, ["body"], "labels has 1"),
    ],
)
def test_a_wrong_field_is_named_whatever_the_size(padding, spoiled, place, told):
    body = json.dumps(request_of(["a", "b"], note=padding) | spoiled).encode()
    with pytest.raises(RequestValidationError) as refused:
        read(body)
    entry, *_ = refused.value.errors()
    assert list(entry["loc"]) == place
    assert told in entry["msg"]


@pytest.mark.parametrize("text", table("remote_rm/service/request_reader", "what_is_no_json_is_told_by_its_place"))
def test_what_is_no_json_is_told_by_its_place(text):
    with pytest.raises(RequestValidationError) as refused:
        read(text.encode())
    assert refused.value.errors()[0]["type"] == "json_invalid"


@pytest.mark.parametrize("padding", ["", LONG])
def test_one_sample_too_many_is_refused_and_the_limit_told(padding):
    assert len(read(json.dumps(request_of(["x"] * 5, note=padding)).encode(), max_items=5).query) == 5
    with pytest.raises(TooManyItems, match="a request may hold 5 samples") as refused:
        read(json.dumps(request_of(["x"] * 6, note=padding)).encode(), max_items=5)
    assert refused.value.max_items == 5


def test_a_large_body_is_read_in_another_thread():
    threads = []

    def note(request: RewardRequest) -> list[RewardRequest]:
        threads.append(threading.current_thread())
        return [request]

    reader = RequestReader(note, max_items=10)
    for text in ("x", LONG):
        asyncio.run(reader.items(json.dumps(request_of([text])).encode()))
    reader.close()
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()
