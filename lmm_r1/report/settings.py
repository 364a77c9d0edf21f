"""Settings as they may be shown, without credentials, since a report is made to be passed on; where runs differ."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from lmm_r1.records.run import Run
from lmm_r1.report.stages import StageMatch

# Of an evaluation's settings, those that name its input and output and not how it was done.
EVALUATION_PLACES = ("checkpoints", "files", "output")
HIDDEN = "(hidden)"
SETTING = re.compile(r"^(?P<before>\s*(?:-\s+)?(?P<name>[\w.\-\"']+)\s*:\s+)(?P<value>\S.*)$")
SECRET_NAME = re.compile(
    r"^(key|token|password|secret|credentials)$|(api_key|hf_token|access_token|auth_token)$|(_password|_secret)$"
)
EMPTY_VALUES = ("null", "~", "''", '""', "false", "true")


@dataclass(frozen=True, kw_only=True)
class SettingsDifference:
    """The settings of one stage that are not the same in all runs."""

    title: str
    runs: tuple[int, ...]
    """The places of the runs whose settings are known."""
    same: int
    """How many settings are the same in all of them."""
    rows: dict[str, tuple[str | None, ...]]
    """By dotted name: the value in each of `runs`, None where it is not set."""
    unknown: tuple[int, ...]
    """The runs that have the stage but no settings that could be read."""


def settings_differences(runs: Sequence[Run], *, matches: Sequence[StageMatch]) -> list[SettingsDifference]:
    """Return the differences of each stage that several runs have, then those of the evaluation."""
    found = []
    for match in matches:
        stages = {run: row.stage for run, row in match.rows.items() if row.stage}
        if len(stages) > 1:
            found.append(_difference(match.name, {run: _settings(stage.settings) for run, stage in stages.items()}))
    evaluated = {place: run.evaluation.settings for place, run in enumerate(runs) if run.evaluation.checkpoints}
    if len(evaluated) > 1:
        kept = {
            place: _flat({name: value for name, value in settings.items() if name not in EVALUATION_PLACES})
            for place, settings in evaluated.items()
        }
        found.append(_difference("evaluation", kept))
    return found


def _difference(title: str, settings: Mapping[int, dict[str, str] | None]) -> SettingsDifference:
    known = {run: values for run, values in sorted(settings.items()) if values is not None}
    names = dict.fromkeys(name for values in known.values() for name in values)
    rows = {name: tuple(values.get(name) for values in known.values()) for name in names}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
    return SettingsDifference(
        title=title,
        runs=tuple(known),
        same=len(rows) - len(differing),
        rows=differing,
        unknown=tuple(run for run, values in sorted(settings.items()) if values is None),
    )


def _settings(text: str | None) -> dict[str, str] | None:
    """Return the settings in a run_config.yaml, None where there is none or it is no YAML mapping."""
    if text is None:
        return None
    try:
        # The base loader leaves values as they are written: 1e-6 stays 1e-6, and no date is made of 2026-01-31.
        settings = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError):
        return None
    return _flat(settings) if isinstance(settings, dict) else None


def _flat(settings: Mapping[str, object], *, prefix: str = "") -> dict[str, str]:
    """Return settings by their dotted names, credentials hidden."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if is_secret(name) and value not in ("", "null", None):
            flat[name] = HIDDEN
        elif isinstance(value, dict):
            flat |= _flat(value, prefix=f"{name}.")
        else:
            flat[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def without_secrets(text: str) -> str:
    """Return settings with the value of every key, token and password replaced, `key: ab12` as `key: (hidden)`."""
    return "\n".join(_shown(line) for line in text.splitlines())


def _shown(line: str) -> str:
    setting = SETTING.match(line)
    if not setting or setting["value"].strip().lower() in EMPTY_VALUES:
        return line
    return f"{setting['before']}{HIDDEN}" if is_secret(setting["name"].strip("\"'")) else line


def is_secret(name: str) -> bool:
    """Return whether a setting of this dotted name holds a credential."""
    return bool(SECRET_NAME.search(name.rpartition(".")[2].lower().replace("-", "_")))
