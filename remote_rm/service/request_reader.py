"""Reads the bodies of requests: small ones at once, large ones in a thread and no further than to the limit of items."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from remote_rm.protocol import RewardRequest

INLINE_BYTES = 64 * 2**10
"""Up to so much is read without changing threads, which would take longer than the reading."""
READERS = 4
COLUMNS = frozenset(RewardRequest.model_fields)

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")
_NEXT = re.compile(r"[ \t\n\r]*([,\]])[ \t\n\r]*")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_SCALAR = re.compile(r"[^\s,\[\]{}\"]+")


class TooManyItems(ValueError):
    """A request with more samples than one may hold."""

    def __init__(self, *, max_items: int) -> None:
        super().__init__(f"a request may hold {max_items} samples; send the others in requests of their own")
        self.max_items = max_items


class RequestReader:
    """Makes items of bodies, and keeps the event loop free while it does."""

    def __init__(self, items_of_request: Callable[[RewardRequest], Sequence[Any]], *, max_items: int) -> None:
        self.max_items = max_items
        self._items_of_request = items_of_request
        self._threads = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="request reader")

    async def items(self, body: bytes) -> Sequence[Any]:
        """Return what is to be judged.

        Raises TooManyItems, RequestValidationError for what is no request, and what `items_of_request` raises.
        """
        if len(body) <= INLINE_BYTES:
            return self._items(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._items, body)

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _items(self, body: bytes) -> Sequence[Any]:
        request = self._small(body) if len(body) <= INLINE_BYTES else columns_of(_text_of(body), most=self.max_items)
        try:
            return self._items_of_request(RewardRequest.model_validate(request))
        except ValidationError as error:
            raise _invalid(
                *error.errors(include_url=False, include_context=False, include_input=False)[:20]
            ) from error

    def _small(self, body: bytes) -> Any:
        try:
            request = json.loads(_text_of(body))
        except json.JSONDecodeError as error:
            _refuse(error.msg, place=error.pos)
        except RecursionError:
            _refuse("too many brackets", place=0)
        if isinstance(request, dict) and any(
            isinstance(column, list) and len(column) > self.max_items for column in request.values()
        ):
            raise TooManyItems(max_items=self.max_items)
        return request


def columns_of(text: str, *, most: int) -> dict[str, list[str] | None]:
    """Return the lists of strings of a request's JSON; raises TooManyItems and RequestValidationError.

    String by string: one call of `json.loads` would hold Python's lock for seconds, and build what is then refused.
    """
    columns: dict[str, list[str] | None] = {}
    place = _expected(text, _skipped(text, 0), "{")
    while text[place : place + 1] != "}":
        if columns:
            place = _expected(text, place, ",")
        name, place = _string(text, place)
        place = _expected(text, place, ":")
        columns[name], place = _column(text, place, name=name, most=most)
    if _skipped(text, place + 1) != len(text):
        _refuse("Extra data", place=place)
    return {name: column for name, column in columns.items() if name in COLUMNS}


def _column(text: str, place: int, *, name: str, most: int) -> tuple[list[str] | None, int]:
    """Return a field's strings and the place behind it; of a field that no request has, None."""
    if name not in COLUMNS:
        return None, _skipped_value(text, place)
    if text.startswith("null", place):
        return None, _skipped(text, place + len("null"))
    if text[place : place + 1] != "[":
        raise _invalid({"type": "list_type", "loc": (name,), "msg": "Input should be a valid list"})
    column: list[str] = []
    place = _skipped(text, place + 1)
    if text[place : place + 1] == "]":
        return column, _skipped(text, place + 1)
    while True:
        if len(column) == most:
            raise TooManyItems(max_items=most)
        if text[place : place + 1] != '"':
            entry = {"type": "string_type", "loc": (name, len(column)), "msg": "Input should be a valid string"}
            raise _invalid(entry)
        string, place = _decoded(text, place)
        column.append(string)
        found = _NEXT.match(text, place)
        if found is None:
            _refuse("Expecting ',' or ']'", place=place)
        place = found.end()
        if found[1] == "]":
            return column, place


def _string(text: str, place: int) -> tuple[str, int]:
    if text[place : place + 1] != '"':
        _refuse("Expecting a string", place=place)
    string, place = _decoded(text, place)
    return string, _skipped(text, place)


def _decoded(text: str, place: int) -> tuple[str, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        _refuse(error.msg, place=error.pos)


def _skipped_value(text: str, place: int) -> int:
    """The place behind a value of any kind, whose brackets are counted and which is not read further."""
    depth = 0
    while True:
        found = _BRACKET.search(text, place) if depth else _BRACKET.match(text, place) or _SCALAR.match(text, place)
        if found is None:
            _refuse("Expecting a value", place=place)
        place = found.end()
        depth += found[0] in ("[", "{")
        depth -= found[0] in ("]", "}")
        if depth <= 0:
            return _skipped(text, place)


def _skipped(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    assert found is not None, "no space is a match too"
    return found.end()


def _expected(text: str, place: int, sign: str) -> int:
    if text[place : place + 1] != sign:
        _refuse(f"Expecting {sign!r}", place=place)
    return _skipped(text, place + 1)


def _text_of(body: bytes) -> str:
    try:
        # As json.loads does it, which also reads the other encodings of Unicode.
        return body.decode(json.detect_encoding(body), "surrogatepass")
    except UnicodeDecodeError as error:
        _refuse(f"the body is no text ({error.reason})", place=error.start)


def _refuse(reason: str, *, place: int) -> NoReturn:
    raise _invalid({"type": "json_invalid", "loc": (place,), "msg": f"JSON decode error: {reason}"})


def _invalid(*entries: Any) -> RequestValidationError:
    return RequestValidationError([{**entry, "loc": ("body", *entry["loc"])} for entry in entries])
