"""Verifiers as a command line names them: `math`, `list:unordered`, `composition:math=1.0,format=0.5`."""

from __future__ import annotations

import dataclasses

from lmm_r1.errors import UserError
from remote_rm.registry import verifier_class
from remote_rm.verifier import Verifier

SETTINGS_SEPARATOR = ":"
SELECT_PREFIX = "select."
COMPOSITION = "composition"


def verifier_from(spec: str, *, flag: str = "--verifiers") -> Verifier:
    """Return the verifier that `NAME` or `NAME:SETTING,SETTING` describes.

    A setting is a switch of the verifier (`list:unordered`, `exact:ignore_case`). Those of a composition are its parts,
    `NAME=WEIGHT` or `NAME`; a part `select.NAME=WEIGHT` judges only the rows whose label opens with `NAME:`.

    Raises:
        UserError: the name, a setting or a part is unknown; the message begins with `flag`.
    """
    name, separator, settings = spec.partition(SETTINGS_SEPARATOR)
    given = [setting.strip() for setting in settings.split(",")] if separator else []
    try:
        return _composition(given) if name == COMPOSITION else _with_switches(name, given)
    except ValueError as error:
        raise UserError(f"{flag} {spec}: {error}") from error


def _with_switches(name: str, given: list[str]) -> Verifier:
    kind = verifier_class(name)
    switches = [field.name for field in dataclasses.fields(kind) if field.default is False]
    for switch in given:
        if switch not in switches:
            known = f"its settings are {', '.join(switches)}" if switches else "it has no settings"
            raise ValueError(f"{name} has no setting {switch!r}; {known}")
    return kind(**dict.fromkeys(given, True))


def _composition(given: list[str]) -> Verifier:
    from remote_rm.composition import Composition, part_from

    return Composition(
        parts=tuple(part_from(text) for text in given if not text.startswith(SELECT_PREFIX)),
        select=tuple(part_from(text.removeprefix(SELECT_PREFIX)) for text in given if text.startswith(SELECT_PREFIX)),
    )
