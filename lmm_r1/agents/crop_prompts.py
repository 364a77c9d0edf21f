"""Words of the environment `crop` from a file: those that a checkpoint was trained with."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

from lmm_r1.errors import UserError

_NAMES = {
    "system": "TOOL_CROP_SYSTEM_PROMPT",
    "observation": "TOOL_CALL_CROP_MULTI_TRUN_PROMPT",
    "error": "ERROR_INFO_MULTI_TURN_PROMPT",
}
"""What the texts are called in Mini-o3's `verl/trainer/constants.py`."""
_IMAGE = re.compile(r"<image>|<\|vision_start\|>.*?<\|vision_end\|>")


@dataclass(frozen=True, kw_only=True)
class CropPrompts:
    """The texts that a policy reads, in the wording of its own training."""

    system: str
    observation: str
    """With the image at `<image>` or as tokens of a chat template, and `{action_turn}` and `{observation_turn}` for their numbers."""
    error: str
    """Follows the sentence that says what was wrong with a call."""
    first_turn: int = 1
    """The number of the first turn in them; Mini-o3 counts actions from 0."""

    def around_image(self, *, turn: int, observation: int) -> tuple[str, str]:
        """Return the text before and after an observation.

        Args:
            turn: number of the turn with the call, from 1.
            observation: number of the observation, from 1.
        """
        number = turn - 1 + self.first_turn
        text = self.observation.replace("{action_turn}", str(number)).replace("{observation_turn}", str(observation))
        before, after = _IMAGE.split(text, maxsplit=1)
        return before, after


def load_crop_prompts(path: Path) -> CropPrompts:
    """Return the texts of a file: JSON with the keys system, observation and error, or Mini-o3's `constants.py`.

    The Python file is not run: only its texts are read.

    Raises:
        UserError: the file cannot be read, or lacks a text.
    """
    try:
        content = path.read_text(encoding="utf-8")
        texts = _constants(content) if path.suffix == ".py" else json.loads(content)
    except OSError as error:
        raise UserError(f"prompts {path}: {error.strerror}; check the path") from error
    except (ValueError, SyntaxError) as error:
        raise UserError(f"prompts {path}: neither JSON nor Python that can be read: {error}") from error
    keys = _NAMES if path.suffix == ".py" else dict(zip(_NAMES, _NAMES, strict=True))
    given = texts if isinstance(texts, dict) else {}
    found = {key: text for key, name in keys.items() if isinstance(text := given.get(name), str)}
    if missing := [name for key, name in keys.items() if key not in found]:
        raise UserError(f"prompts {path}: it has no text {', '.join(missing)}; add it")
    if len(_IMAGE.findall(found["observation"])) != 1:
        raise UserError(f"prompts {path}: {keys['observation']} must have one <image>, where the observation is shown")
    return CropPrompts(**found, first_turn=0 if path.suffix == ".py" else 1)


def _constants(content: str) -> dict[str, object]:
    """Return the texts that are assigned to names at the top of a Python file."""
    return {
        target.id: node.value.value
        for node in ast.parse(content).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
