"""What Python code calls instead of commands: here the settings and rows of a call, and the process state that it restores."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import yaml
from PIL import Image

from lmm_r1 import cpu, dotted
from lmm_r1.cli.arguments import YamlError, parse_settings, read_settings
from lmm_r1.config.rewards import GIVEN
from lmm_r1.errors import RunStopped, UserError
from lmm_r1.files.atomic import writing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Config = TypeVar("Config", bound="DataclassInstance")
Settings: TypeAlias = "Config | Mapping[str, object] | str | os.PathLike[str]"
"""A dataclass of `lmm_r1.config`, a mapping of its settings (nested, by dotted names, or both), or the path of a YAML file."""


def read_config(config_class: type[Config], given: Settings[Config], *more: Mapping[str, object]) -> Config:
    """Return the settings as `config_class` has them, overridden by the mappings in `more`; later ones have precedence.

    Raises:
        UserError: the file cannot be read, a name is unknown, or a value has another type; the message suggests the nearest name.
    """
    if isinstance(given, config_class):
        config, layers = given, more
    elif isinstance(given, Mapping):
        config, layers = config_class(), (given, *more)
    else:
        config, layers = dotted.replace(config_class(), _from_file(config_class, given)), more
    for layer in layers:
        config = dotted.replace(config, _from_mapping(config_class, layer))
    return config


def _from_file(config_class: type, path: object) -> dict[str, object]:
    if not isinstance(path, str | os.PathLike):
        raise UserError(
            f"config is a {type(path).__name__}; give a mapping of settings, the path of a YAML file, or a "
            f"{config_class.__name__}"
        )
    try:
        return read_settings(Path(path), dotted.leaf_types(config_class))
    except YamlError as error:
        raise UserError(str(error).removeprefix("--config ")) from error


def _from_mapping(config_class: type, settings: Mapping[str, object]) -> dict[str, object]:
    try:
        text = yaml.safe_dump(_plain(settings), sort_keys=False)
        return parse_settings(text, dotted.leaf_types(config_class), source=None)
    except yaml.representer.RepresenterError as error:
        raise UserError(
            f"config: {error.args[-1]!r} is no value of a setting; give a text, a number or a list"
        ) from error
    except YamlError as error:
        raise UserError(f"config: {error}") from error


def _plain(value: object) -> object:
    """Return a value that YAML can write: paths become text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


Rows: TypeAlias = "str | os.PathLike[str] | Iterable[Mapping[str, Any]]"
"""A path or a name of the hub, as the commands take it; or rows as mappings, in any format that the commands read, with
images as PIL images and bytes, too."""
IMAGE_DIR = "image_dir"


def row_file(rows: Rows, *, folder: Path, argument: str) -> str:
    """Return the path of a file with the rows: the one that was given, or one that is written into `folder`.

    Rows are taken one by one, so that a streaming dataset needs no memory. The file is named after its content and never
    takes another one's place.

    Args:
        argument: of the call, for messages and the file's name.

    Raises:
        UserError: something else than a row is among them, or the file cannot be written.
    """
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    digest, count, partial = hashlib.sha256(), 0, folder / f".{argument}-{os.getpid()}.partial"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                for count, row in enumerate(rows, start=1):
                    line = f"{_line(row, place=f'{argument}[{count - 1}]')}\n".encode(errors="replace")
                    digest.update(line)
                    file.write(line)
            if not count:
                raise UserError(f"{argument} is empty; give at least one row")
            return str(partial.rename(folder / f"{argument}-{digest.hexdigest()[:12]}.jsonl"))
        finally:
            partial.unlink(missing_ok=True)


def is_messages(rows: object) -> bool:
    """Return whether the given rows are one conversation."""
    return (
        isinstance(rows, Sequence) and bool(rows) and all(isinstance(one, Mapping) and "role" in one for one in rows)
    )


def image_dir(rows: object) -> dict[str, object]:
    """Return the setting of the folder that relative paths of images start from: of rows in no file, the current one."""
    return {} if isinstance(rows, str | os.PathLike) else {IMAGE_DIR: os.getcwd()}


def _line(row: object, *, place: str) -> str:
    if not isinstance(row, Mapping):
        raise UserError(
            f"{place} is a {type(row).__name__}; a row is a mapping, such as {{'messages': [...], 'answer': '4'}}"
        )
    try:
        return json.dumps(dict(row), default=_as_json, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{place}: {error}; a row holds texts, numbers, lists, mappings and images") from error


def _as_json(value: object) -> object:
    """Return what JSON has no form for: images as data URIs, numbers of arrays as numbers."""
    if isinstance(value, Image.Image):
        stream = io.BytesIO()
        value.save(stream, format="PNG")
        return _data_uri(stream.getvalue(), "image/png")
    if isinstance(value, bytes | bytearray | memoryview):
        return _data_uri(bytes(value), "application/octet-stream")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    # Arrays and their numbers, of any library.
    if callable(as_list := getattr(value, "tolist", None)):
        return as_list()
    raise TypeError(f"a {type(value).__name__} is nothing that a row can hold")


def _data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


_FLAG = re.compile(r"--(?=[A-Za-z])")


@contextmanager
def own_process() -> Iterator[None]:
    """Run a command's work in this process, and restore what it changes afterwards.

    That is the environment, Ray, the process group and Python's garbage collector. Errors name settings and not flags.

    Raises:
        UserError: this process cannot run it, or what is raised inside. RunStopped is also raised again.
    """
    _check_process()
    environment, thresholds = dict(os.environ), gc.get_threshold()
    try:
        with _without_loop():
            yield
    except UserError as error:
        # One that was raised in a worker comes with its traceback, as the cause of Ray's own.
        raise UserError(without_flags(str(getattr(error, "cause", error)))) from error
    except RunStopped as stop:
        raise RunStopped(without_flags(str(stop)), exit_code=stop.exit_code) from stop
    finally:
        _leave()
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def _without_loop() -> Iterator[None]:
    """Let code inside run its own event loops although one runs in this thread, as in a notebook.

    That one waits for the cell either way. asyncio has these functions for whoever writes a loop.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    task = asyncio.current_task()
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)


def without_flags(sentence: str) -> str:
    """Return a sentence about flags as one about settings: `--train.seed` is `train.seed`."""
    sentence = " ".join(line.strip() for line in sentence.splitlines()).replace(GIVEN, "")
    return _FLAG.sub("", sentence).replace("the same command", "the same call")


def _check_process() -> None:
    # `multiprocessing` checks the same before it starts a process.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "a process that was started to help imports this script again, and would do all of it once more; put the "
            'calls of lmm_r1 under `if __name__ == "__main__":`'
        )
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise UserError(
            "this process has joined a Ray cluster; call ray.shutdown() first: a call of lmm_r1 starts its own"
        )


def _leave() -> None:
    """End what a command leaves running until its process ends."""
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()
    if "lmm_r1.host.strategy" in sys.modules:
        from lmm_r1.host.strategy import leave_group

        leave_group()
    cpu.follow_workers(None)
