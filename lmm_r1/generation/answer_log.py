"""Answers that were paid for once: appended as they come, and taken up again by the next session."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from lmm_r1.data.sample import Completion, FinishReason
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import append_json_lines, count_field, cut_torn_line, read_json_lines, text_field

KEY = "request"


class AnswerLog:
    """The responses to requests, by a key that says everything a response depends on.

    A request that failed is not in it, so the next session asks again. Of equal requests each has answers of its own.
    """

    def __init__(self, path: Path) -> None:
        """Read what earlier sessions left; raises UserError where the file is of another kind."""
        self.path = path
        self._known: dict[str, list[tuple[Completion, ...]]] = defaultdict(list)
        cut_torn_line(path)
        if path.exists():
            for line in read_json_lines(path):
                assert line.record is not None, "the torn line was cut off"
                self._known[text_field(line.record, KEY, place=line.place)].append(
                    _completions(line.record, place=line.place)
                )
        self.known = sum(map(len, self._known.values()))
        """Requests that earlier sessions had answered."""
        self.taken = 0
        """Those of them that this session needed."""

    def take(self, key: str) -> tuple[Completion, ...] | None:
        """Return the responses that an earlier session got to such a request, once."""
        if not self._known[key]:
            return None
        self.taken += 1
        return self._known[key].pop(0)

    def add(self, key: str, completions: tuple[Completion, ...]) -> None:
        """Append the responses to a request; raises UserError where they cannot be written."""
        responses = [
            {"text": one.text, "tokens": one.num_tokens, "finish_reason": one.finish_reason} for one in completions
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_json_lines(self.path, [{KEY: key, "responses": responses}], readable=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); make room and go on") from error


def _completions(record: dict[str, object], *, place: str) -> tuple[Completion, ...]:
    responses = record.get("responses")
    if not isinstance(responses, list) or not all(isinstance(response, dict) for response in responses):
        raise UserError(f"{place}: responses must be a list of objects; delete the line to ask again")
    return tuple(_completion(response, place=place) for response in responses)


def _completion(record: dict[str, object], *, place: str) -> Completion:
    reason = text_field(record, "finish_reason", place=place)
    ended: FinishReason | None = "stop" if reason == "stop" else "length" if reason == "length" else None
    if ended is None:
        raise UserError(f"{place}: finish_reason must be stop or length, found {reason!r}; delete the line")
    tokens = None if record.get("tokens") is None else count_field(record, "tokens", place=place)
    return Completion(text=text_field(record, "text", place=place), num_tokens=tokens, finish_reason=ended)
