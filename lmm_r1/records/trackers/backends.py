"""The tracking services there are: what each needs, and how each is opened."""

from __future__ import annotations

import importlib
import importlib.util
import netrc
import os
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lmm_r1.config import PPOConfig, SupervisedConfig, without_secrets
from lmm_r1.config.shared import LoggerConfig, TrackerName
from lmm_r1.errors import UserError
from lmm_r1.records.trackers.fan_out import TRACKERS_FILE, TrackerRecord, Trackers
from lmm_r1.records.trackers.tracker import Session, Tracker


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A tracking service."""

    module: str
    """Of this package, with a function `open_tracker`; imported only where the tracker is asked for."""
    library: str
    """The library's import name."""
    pip: str
    """What to install."""
    check: Callable[[LoggerConfig], None] = lambda logger: None
    """Raises UserError where a setting is missing without which the library would ask, or fail late."""


def _check_wandb(logger: LoggerConfig) -> None:
    mode = logger.wandb.mode or os.environ.get("WANDB_MODE", "online")
    if mode != "online" or logger.wandb.key or {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & set(os.environ):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        if netrc.netrc(os.environ.get("NETRC")).authenticators(host):
            return
    except (FileNotFoundError, netrc.NetrcParseError):
        pass
    raise UserError(
        f"--logger.trackers wandb: there is no API key for {host}; give --logger.wandb.key, set WANDB_API_KEY, or take "
        "--logger.wandb.mode offline"
    )


def _check_swanlab(logger: LoggerConfig) -> None:
    mode = logger.swanlab.mode or os.environ.get("SWANLAB_MODE", "online")
    if mode == "local" and importlib.util.find_spec("swanboard") is None:
        raise UserError(
            "--logger.swanlab.mode local needs swanboard, which is not installed; pip install 'swanlab[dashboard]'"
        )
    home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab"
    stored = (Path.cwd() / ".swanlab/.netrc", Path(home) / ".netrc")
    if mode in ("online", "cloud") and not (
        logger.swanlab.key or os.environ.get("SWANLAB_API_KEY") or any(path.is_file() for path in stored)
    ):
        raise UserError(
            "--logger.trackers swanlab: there is no API key; give --logger.swanlab.key, set SWANLAB_API_KEY, or take "
            "--logger.swanlab.mode offline"
        )


def _check_mlflow(logger: LoggerConfig) -> None:
    if not (logger.mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):
        raise UserError(
            "--logger.trackers mlflow: where are the runs kept? Give --logger.mlflow.tracking_uri, for example "
            "http://127.0.0.1:5000, or set MLFLOW_TRACKING_URI"
        )


def _check_trackio(logger: LoggerConfig) -> None:
    space = logger.trackio.space_id
    if space is None:
        return
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise UserError(
            f"--logger.trackio.space_id {space}: nobody is logged in to the Hugging Face hub; run `hf auth login`, set "
            "HF_TOKEN, or leave it out to keep the run on this machine"
        )


_PACKAGE = __name__.rpartition(".")[0]
BACKENDS: dict[TrackerName, Backend] = {
    "tensorboard": Backend(
        module=f"{_PACKAGE}.tensorboard_events", library="tensorboard", pip="pip install tensorboard"
    ),
    "wandb": Backend(
        module=f"{_PACKAGE}.wandb_run", library="wandb", pip="pip install 'wandb>=0.20'", check=_check_wandb
    ),
    "swanlab": Backend(
        module=f"{_PACKAGE}.swanlab_run", library="swanlab", pip="pip install 'swanlab>=0.10'", check=_check_swanlab
    ),
    "mlflow": Backend(
        module=f"{_PACKAGE}.mlflow_run", library="mlflow", pip="pip install 'mlflow-skinny>=3.10'", check=_check_mlflow
    ),
    "trackio": Backend(
        module=f"{_PACKAGE}.trackio_run", library="trackio", pip="pip install 'trackio>=0.40'", check=_check_trackio
    ),
}
assert tuple(BACKENDS) == typing.get_args(TrackerName)


def check_trackers(logger: LoggerConfig) -> None:
    """Raise UserError for a tracker that is not installed or lacks its key; loads no library, and asks no one."""
    for name in logger.trackers:
        backend = BACKENDS[name]
        if importlib.util.find_spec(backend.library) is None:
            raise UserError(
                f"--logger.trackers {name}: {backend.library} is not installed; {backend.pip}, or leave it out"
            )
        backend.check(logger)


def open_trackers(config: PPOConfig | SupervisedConfig, *, folder: Path, resumed: bool) -> Trackers:
    """Return the run's trackers, each of which goes on with its earlier run where the training is `resumed`.

    Raises UserError, with none left open, when one cannot be opened.
    """
    logger = config.logger
    check_trackers(logger)
    record = TrackerRecord(folder / TRACKERS_FILE, resumed=resumed)
    settings = without_secrets(config)
    opened: dict[str, Tracker] = {}
    for name in logger.trackers:
        session = Session(logger=logger, folder=folder, settings=settings, earlier=record.identity(name))
        try:
            opened[name] = importlib.import_module(BACKENDS[name].module).open_tracker(session)
            record.identify(name, opened[name].identity)
        # Each library has errors of its own, and those of the network below it.
        except Exception as error:
            Trackers(opened, record=record).close(failed=True)
            raise UserError(f"--logger.trackers {name}: cannot start ({error}); correct it or leave it out") from error
    return Trackers(opened, record=record)
