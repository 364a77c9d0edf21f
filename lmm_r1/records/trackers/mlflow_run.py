"""MLflow: a run on a tracking server, or in a store of files or SQLite."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

# No usage reports to MLflow's maker, unless the user wants them; read when mlflow is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from lmm_r1.errors import UserError
from lmm_r1.records.trackers.tracker import (
    EVAL_PREFIX,
    TRAIN_PREFIX,
    Generation,
    Session,
    table,
)

# What MLflow takes in the name of a metric.
_REFUSED = re.compile(r"[^/\w.\- :]")
_MOST_PARAMS = 100
_LONGEST_PARAM = 500


class MlflowRun:
    """One run."""

    replaces_repeats = False

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.identity = run_id
        self._client = client

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics(step, values, prefix=TRAIN_PREFIX)

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        self._metrics(step, values, prefix=EVAL_PREFIX)

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        # A file per step: MLflow appends to a table by fetching and sending all of it.
        columns, rows = table(step, samples)
        folder = f"generated_samples/step_{step:06d}"
        data = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
        for index, sample in enumerate(samples):
            for path in sample.images:
                self._client.log_artifact(self.identity, str(path), f"{folder}/sample_{index}")
            for image in sample.turn_images:
                place = f"{folder}/sample_{index}/turn_{image.turn}"
                self._client.log_artifact(self.identity, str(image.path), place)
        self._client.log_table(self.identity, data, f"{folder}/table.json")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")

    def _metrics(self, step: int, values: Mapping[str, float], *, prefix: str) -> None:
        now = int(time.time() * 1000)
        named = {_REFUSED.sub("_", f"{prefix}{name}"): value for name, value in values.items()}
        self._client.log_batch(
            self.identity, metrics=[Metric(name, value, now, step) for name, value in named.items()], synchronous=True
        )


def open_tracker(session: Session) -> MlflowRun:
    """Return a new run with the flags as its parameters, or the earlier one to go on with."""
    settings, shared = session.logger.mlflow, session.logger.wandb
    client = MlflowClient(tracking_uri=settings.tracking_uri)
    if session.earlier is not None:
        client.update_run(session.earlier, status="RUNNING")
        return MlflowRun(client, session.earlier)
    name = settings.experiment or shared.project
    experiment = client.get_experiment_by_name(name)
    if experiment is not None and experiment.lifecycle_stage == "deleted":
        raise UserError(
            f"the experiment {name} is deleted; restore it or give --logger.mlflow.experiment another name"
        )
    experiment_id = experiment.experiment_id if experiment is not None else client.create_experiment(name)
    tags = {"group": shared.group} if shared.group else {}
    run_id = client.create_run(experiment_id, run_name=shared.run_name, tags=tags).info.run_id
    params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in _leaves(session.settings)]
    for start in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run_id, params=params[start : start + _MOST_PARAMS], synchronous=True)
    return MlflowRun(client, run_id)


def _leaves(settings: Mapping[str, Any], *, prefix: str = "") -> list[tuple[str, object]]:
    leaves: list[tuple[str, object]] = []
    for name, value in settings.items():
        leaves += _leaves(value, prefix=f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return leaves
