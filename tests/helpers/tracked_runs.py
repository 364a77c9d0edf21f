"""What each tracking service has of a run, read back with its own library."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

OFFLINE = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "DO_NOT_TRACK": "1"}
FOLDERS = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
KEYS = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL")
WANDB_BLOCK = 32768
WANDB_HEADER = struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def keep_offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the libraries ask no one, know no keys, and keep in `home` what else would be in the home folder."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    for name in FOLDERS:
        monkeypatch.setenv(name, str(home / name.lower()))
    monkeypatch.setenv("NETRC", str(home / "netrc"))


def of_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every number as TensorBoard shows it; of texts and images, (step, count of values)."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(folder))
    events.Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        values = [(event.step, tensor_util.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        found[tag] = [
            (step, value.size if value.dtype == object else round(float(value), 5)) for step, value in values
        ]
    return found


def texts_of_tensorboard(folder: Path, tag: str) -> dict[int, str]:
    """The text of each step."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)}


def of_wandb(folder: Path) -> list[dict[str, object]]:
    """The rows of all offline sessions, in order; what a table or an image has is under `NAME/_type` and so on."""
    import wandb

    # Its service may still be writing.
    wandb.teardown()
    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in _wandb_records(file.read_bytes()):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


def _wandb_records(content: bytes) -> Iterator[object]:
    """Yield the records of a file in the form of a LevelDB log behind seven bytes: wandb reads it in Go alone."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, parts = WANDB_HEADER.size, b""
    while place + WANDB_HEADER.size <= len(content):
        if (left := WANDB_BLOCK - place % WANDB_BLOCK) < WANDB_HEADER.size:
            place += left
            continue
        _, length, kind = WANDB_HEADER.unpack_from(content, place)
        place += WANDB_HEADER.size
        parts += content[place : place + length]
        place += length
        if kind in (WHOLE, LAST):
            yield Record.FromString(parts)
            parts = b""
