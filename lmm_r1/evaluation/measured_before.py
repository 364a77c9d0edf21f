"""Evaluations that are not repeated: what an output holds of the same checkpoints, rows and settings is read again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmm_r1.checkpoints.parity_record import checkpoint_state, library_versions
from lmm_r1.config.evaluate import ENGINE_FLAGS, EvaluateConfig, measured_path, responses_path
from lmm_r1.config.generation import EPISODE_FLAGS
from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.training_rows import files_of_rows, rows_digest
from lmm_r1.errors import UserError
from lmm_r1.evaluation.row_set import RowSet
from lmm_r1.files.json_files import (
    count_field,
    number_field,
    read_json_object,
    text_field,
    write_json_object,
)
from lmm_r1.generation.engine import split_adapter
from lmm_r1.records.responses import JudgedResponse, read_responses, responses_digest, write_responses


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One checkpoint on one file of rows."""

    key: str
    """Says everything that the responses and their verdicts depend on."""
    responses: tuple[JudgedResponse, ...]
    skipped: tuple[SkippedRow, ...]
    seconds: float


def measured_key(config: EvaluateConfig, path: str, row_set: RowSet) -> str | None:
    """Return what an evaluation of a checkpoint on a file depends on, as a digest; None where that cannot be told."""
    base, adapter = split_adapter(path, None)
    states = [checkpoint_state(part) for part in (base, adapter and str(adapter)) if part]
    if None in states:
        return None
    rows = list(row_set.rows.values())
    flags = {name: getattr(config, name) for name in (*ENGINE_FLAGS, *EPISODE_FLAGS, "top_p", "judge_timeout")}
    depends = {
        "checkpoint": states,
        "rows": [rows_digest(rows), list(row_set.rows), files_of_rows(rows)],
        "sampling": row_set.sampling.model_dump(),
        "verifiers": row_set.file.verifiers,
        "flags": flags | {"agent_thought": dataclasses.asdict(config.agent_thought)},
        "agent": _state_of_code(config.agent),
        "libraries": library_versions(),
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _state_of_code(agent: str | None) -> str | None:
    """Return the digest of a file with an environment of the user's own; what that imports is not told."""
    file = Path(agent.rpartition(":")[0]) if agent and ":" in agent else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else None


class MeasuredBefore:
    """The responses beside an output, with what they depended on in `STEM.measured.json`."""

    def __init__(self, output: Path) -> None:
        self.path = responses_path(output)
        self._record = measured_path(output)
        self._known: dict[tuple[str, str], Measured] = {}
        """By checkpoint and file."""

    def read(self) -> None:
        """Take up what is there and whole; what is not what was written down counts as nothing."""
        if not (self._record.is_file() and self.path.is_file()):
            return
        record, place = read_json_object(self._record), str(self._record)
        entries = record.get("measured")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UserError(f"{place}: measured must be a list of objects; delete the file")
        try:
            responses = read_responses(self.path)
        except UserError:
            # A session was killed while it wrote them, or there are none yet.
            return
        by_place: dict[tuple[str, str], list[JudgedResponse]] = {}
        for response in responses:
            by_place.setdefault((response.checkpoint, response.file), []).append(response)
        for entry in entries:
            names = text_field(entry, "checkpoint", place=place), text_field(entry, "file", place=place)
            own = by_place.get(names, [])
            if responses_digest(own, folder=self.path.parent) == text_field(entry, "responses", place=place):
                self._known[names] = Measured(
                    key=text_field(entry, "key", place=place),
                    responses=tuple(own),
                    skipped=_skipped(entry.get("skipped"), place=place),
                    seconds=number_field(entry, "seconds", place=place) or 0.0,
                )

    def take(self, checkpoint: str, file: str, key: str | None) -> Measured | None:
        """Return what was measured with the same key, under whatever name, as of this checkpoint and file."""
        same = [(names, known) for names, known in self._known.items() if key is not None and known.key == key]
        if not same:
            return None
        # Of a checkpoint that was given under two names, each keeps its own.
        _, found = min(same, key=lambda one: one[0] != (checkpoint, file))
        renamed = (replace(response, checkpoint=checkpoint, file=file) for response in found.responses)
        return replace(found, responses=tuple(renamed))

    def write(self, found: Mapping[tuple[str, str], Measured]) -> None:
        """Write all of this, and nothing else, in this order."""
        write_responses(self.path, _all_responses(found), append=False)
        self._write_record(found)

    def add(self, found: Mapping[tuple[str, str], Measured], new: Collection[tuple[str, str]]) -> None:
        """Append what is new of what was found, of which the rest is there."""
        write_responses(self.path, _all_responses({names: found[names] for names in new}), append=True)
        self._write_record(found)

    def _write_record(self, found: Mapping[tuple[str, str], Measured]) -> None:
        entries = [
            {
                "checkpoint": checkpoint,
                "file": file,
                "key": measured.key,
                "responses": responses_digest(measured.responses, folder=self.path.parent),
                "seconds": measured.seconds,
                "skipped": [dataclasses.asdict(row) for row in measured.skipped],
            }
            for (checkpoint, file), measured in found.items()
            if measured.key
        ]
        write_json_object(self._record, {"measured": entries})


def _all_responses(found: Mapping[tuple[str, str], Measured]) -> Sequence[JudgedResponse]:
    return [response for measured in found.values() for response in measured.responses]


def _skipped(value: object, *, place: str) -> tuple[SkippedRow, ...]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise UserError(f"{place}: skipped must be a list of rows; delete the file")
    return tuple(
        SkippedRow(index=count_field(row, "index", place=place), reason=text_field(row, "reason", place=place))
        for row in value
    )
