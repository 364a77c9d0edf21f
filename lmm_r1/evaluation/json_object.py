"""A small JSON file that holds one object."""

import json
from pathlib import Path

from lmm_r1.errors import UserError


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object in a file; anything else in it is a UserError."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file ({error}); write it again or delete it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}; write it again or delete it")
    return value
