"""Verifiers as a command line names them: `math`, `list:unordered`, `composition:math=1.0,format=0.5`."""

from __future__ import annotations

import dataclasses
import re

from lmm_r1.errors import UserError
from remote_rm.registry import verifier_class
from remote_rm.verifier import Verifier
from remote_rm.verifier_settings import verifier_with

SETTINGS_SEPARATOR = ":"
SELECT_PREFIX = "select."
COMPOSITION = "composition"

# A comma in front of no setting is part of a value, such as JSON.
_BETWEEN = re.compile(r",(?=\s*[A-Za-z_.]+\s*(?:[=,]|$))")


def verifier_from(spec: str, *, flag: str = "--verifiers") -> Verifier:
    """Return the verifier that `NAME` or `NAME:SETTING,SETTING` describes.

    A setting is a switch of the verifier (`list:unordered`, `exact:ignore_case`), or a flag of `serve_verifier NAME` with
    its value (`math:format_weight=0.1`, `llm_judge:judge_url=http://127.0.0.1:8000/v1,judge_model=m`). Those of a
    composition are its parts, `NAME=WEIGHT` or `NAME`; a part `select.NAME=WEIGHT` judges only the rows whose label opens
    with `NAME:`.

    Raises:
        UserError: the name, a setting or a part is unknown; the message begins with `flag`.
    """
    name, separator, settings = spec.partition(SETTINGS_SEPARATOR)
    given = [setting.strip() for setting in _BETWEEN.split(settings)] if separator else []
    try:
        return _composition(given) if name == COMPOSITION else _with_settings(name, given)
    except ValueError as error:
        raise UserError(f"{flag} {spec}: {error}") from error


def _with_settings(name: str, given: list[str]) -> Verifier:
    settings: dict[str, object] = {}
    switches = [field.name for field in dataclasses.fields(verifier_class(name)) if field.default is False]
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals and key not in switches:
            known = f"its settings are {', '.join(switches)}" if switches else "it has no settings"
            raise ValueError(f"{name} has no setting {setting!r}; {known}")
        settings[key.strip()] = value.strip() if equals else True
    return verifier_with(name, settings)


def _composition(given: list[str]) -> Verifier:
    from remote_rm.composition import Composition, part_from

    return Composition(
        parts=tuple(part_from(text) for text in given if not text.startswith(SELECT_PREFIX)),
        select=tuple(part_from(text.removeprefix(SELECT_PREFIX)) for text in given if text.startswith(SELECT_PREFIX)),
    )
