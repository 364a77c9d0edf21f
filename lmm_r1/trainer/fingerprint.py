"""Which run a folder of checkpoints belongs to: its models, its rows and the settings that decide what it learns."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmm_r1.config import PPOConfig, SFTConfig
from lmm_r1.config.export import settings_of_the_run
from lmm_r1.data.messages import ImagePart, Row, TextPart, VideoPart, describe_video
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically

FINGERPRINT_FILE = "fingerprint.json"
# Of a weight file these many blocks are read, evenly spread: whole ones hold many GiB.
_BLOCKS = 64
_BLOCK_BYTES = 64 * 1024
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
# More differences than this are counted only.
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What two sessions of one run have in common."""

    models: Mapping[str, str]
    """Digest of each checkpoint that the run starts from, by flag; of a hub name, the name."""
    rows: Mapping[str, str]
    """Number and digest of the rows, by flag."""
    settings: Mapping[str, object]
    """The settings of `settings_of_the_run`, by flag."""

    @classmethod
    def of(
        cls, config: PPOConfig | SFTConfig, *, models: Mapping[str, str | None], rows: Mapping[str, Sequence[Row]]
    ) -> Fingerprint:
        """Return the fingerprint of a run.

        Args:
            models: the path of each model by its flag; None for one that the run does not have.
            rows: the rows by the flag that gave them, as they were blended.
        """
        return cls(
            models={flag: model_digest(path) for flag, path in models.items() if path is not None},
            rows={flag: rows_digest(part) for flag, part in rows.items()},
            settings=settings_of_the_run(config),
        )

    def write(self, folder: Path) -> None:
        """Write it beside the checkpoints that will lie in `folder`."""
        write_atomically(folder / FINGERPRINT_FILE, text=json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def differences(self, earlier: Fingerprint) -> list[str]:
        """Return what of this run is not as in an earlier one, a phrase each; a flag that only one knows is left out."""
        phrases = [
            f"--{flag} is another model"
            for flag in sorted(self.models.keys() | earlier.models.keys())
            if self.models.get(flag) != earlier.models.get(flag)
        ]
        phrases += [
            f"--{flag} gives other rows ({earlier.rows.get(flag, 'none')} there, {digest} here)"
            for flag, digest in self.rows.items()
            if digest != earlier.rows.get(flag)
        ]
        phrases += [
            f"--{flag} {_shown(earlier.settings[flag])} there, {_shown(value)} here"
            for flag, value in self.settings.items()
            if flag in earlier.settings and earlier.settings[flag] != value
        ]
        return phrases


def read_fingerprint(folder: Path) -> Fingerprint | None:
    """Return the fingerprint of the checkpoints in a folder, None where there is none; raises UserError if damaged."""
    path = folder / FINGERPRINT_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Fingerprint(models=content["models"], rows=content["rows"], settings=content["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error!r}); give another --ckpt.output_dir") from error


def check_same_run(fingerprint: Fingerprint, folder: Path) -> None:
    """Raise UserError, naming what differs, unless the checkpoints in a folder are of the run with this fingerprint."""
    earlier = read_fingerprint(folder)
    ways = "give another --ckpt.output_dir, or --ckpt.overwrite to delete them and train anew here"
    if earlier is None:
        raise UserError(
            f"{folder} holds checkpoints that do not say of which run they are (no {FINGERPRINT_FILE}); {ways}. "
            "lmm-r1 merge makes a model of one, to start from"
        )
    phrases = fingerprint.differences(earlier)
    if phrases:
        more = f"; and {len(phrases) - _SHOWN} more" if len(phrases) > _SHOWN else ""
        raise UserError(f"{folder} holds checkpoints of another run: {'; '.join(phrases[:_SHOWN])}{more}; {ways}")


def model_digest(path: str) -> str:
    """Return the digest of a checkpoint folder: its small files, and of its weights the sizes and evenly spread blocks.

    A name of the hub is its own digest.
    """
    folder = Path(path)
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".json", ".jinja", *_WEIGHT_SUFFIXES)):
        if file.name in ("stage.json", "trackers.json"):
            continue
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        _add_blocks(digest, file)
    return digest.hexdigest()[:16]


def _add_blocks(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(stream.read())
            return
        for index in range(_BLOCKS):
            stream.seek(index * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            digest.update(stream.read(_BLOCK_BYTES))


def rows_digest(rows: Sequence[Row]) -> str:
    """Return the number of rows and a digest of what they ask and answer; of an image in a file its name counts."""
    digest = hashlib.sha256()
    for row in rows:
        for message in row.messages:
            for part in message.parts:
                digest.update(_described(part))
            digest.update(message.role.encode())
        digest.update(f"\0{row.answer}\0{row.datasource}\n".encode(errors="replace"))
    return f"{len(rows)} rows {digest.hexdigest()[:12]}"


def _described(part: TextPart | ImagePart | VideoPart) -> bytes:
    if isinstance(part, TextPart):
        return part.text.encode(errors="replace")
    pixels = f" {part.min_pixels} {part.max_pixels}".encode()
    if isinstance(part, VideoPart):
        return f"{describe_video(part)} {part.fps} {part.max_frames}".encode(errors="replace") + pixels
    if isinstance(part.source, bytes):
        return part.source + pixels
    if isinstance(part.source, str):
        return part.source.rpartition("/")[2].encode(errors="replace") + pixels
    return part.source.tobytes() + pixels


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
