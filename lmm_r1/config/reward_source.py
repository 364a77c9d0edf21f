"""What `--reward.remote_url` names where it is no address: a function, of a Python file or given itself, or a verifier."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.errors import UserError
from remote_rm.registry import VERIFIERS

_FUNCTION = re.compile(r"(?P<path>[^,]+\.py)(:(?P<name>[A-Za-z_]\w*))?")
GIVEN = "python:"
"""In front of the name of a function that `lmm_r1.train_rl` was given itself."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A user's reward function, as the flags describe it."""

    path: str | None
    """The file; None where `lmm_r1.train_rl` was given the function itself."""
    name: str | None
    """None takes the one that the file has of those known by name."""
    arguments: Mapping[str, object]
    """What it is given by name beside the samples."""
    score_key: str | None
    """The part of its result that is the score; None takes what the function says is one, else the reward."""
    deadline_s: float
    """Seconds within which it must have scored the responses to one prompt."""

    @property
    def told(self) -> str:
        """Where it stands, as messages begin with it."""
        return f"--reward.remote_url {self.path or f'{GIVEN}{self.name}'}"


def named_verifier(reward: RewardConfig) -> str | None:
    """Return the verifier that gives the rewards, as `verifier_from` reads it, None where something else does.

    Raises UserError for settings that only requests to a server have.
    """
    spec = reward.remote_url or ""
    if spec.partition(":")[0] not in VERIFIERS:
        return None
    if reward.request_fields:
        raise UserError(
            f"--reward.request_fields {' '.join(reward.request_fields)} is for requests to a reward server, and "
            f"--reward.remote_url {spec} asks none; leave it out"
        )
    return spec


def reward_function(reward: RewardConfig) -> RewardFunction | None:
    """Return the function that gives the rewards, None where a server or a model does.

    Raises:
        UserError: settings of a function contradict others, or are no JSON.
    """
    path, name = _file_and_name(reward.remote_url or "")
    if path is None and name is None:
        for flag in ("function_kwargs", "score_key"):
            if getattr(reward, flag) is not None:
                raise UserError(
                    f"--reward.{flag} {getattr(reward, flag)} is for a reward function: give one as "
                    f"--reward.remote_url FILE.py, not {reward.remote_url}"
                )
        return None
    if reward.request_fields:
        raise UserError(
            f"--reward.request_fields {' '.join(reward.request_fields)} is for requests to a reward server; a function "
            "takes what it has parameters for, so leave it out"
        )
    return RewardFunction(
        path=path,
        name=name,
        arguments=_arguments(reward.function_kwargs),
        score_key=reward.score_key,
        deadline_s=reward.deadline_s,
    )


def _file_and_name(source: str) -> tuple[str | None, str | None]:
    """Return the file of a reward function, None for one that was given itself, and its name; both are None for others."""
    if source.startswith(GIVEN):
        return None, source.removeprefix(GIVEN)
    match = _FUNCTION.fullmatch(source)
    if match is None or source.startswith(("http://", "https://")):
        return None, None
    return match["path"], match["name"]


def _arguments(text: str | None) -> Mapping[str, object]:
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--reward.function_kwargs {text} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise UserError(f"--reward.function_kwargs {text} must be a JSON object, such as '{{\"weight\": 0.1}}'")
    return arguments
