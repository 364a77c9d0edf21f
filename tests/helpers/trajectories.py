"""Episodes as training leaves them in a run folder, written without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
from helpers.run_folders import rollout


def write_scene(folder: Path) -> tuple[str, str]:
    """Write a picture of 400 x 300 pixels and the part of it from (100, 60) to (180, 120); return both names."""
    scene = PIL.Image.new("RGB", (400, 300), "#dfe6ee")
    draw = PIL.ImageDraw.Draw(scene)
    draw.rectangle((20, 180, 380, 290), fill="#9db48a")
    draw.rectangle((100, 60, 180, 120), fill="#f4f0e6", outline="#333333")
    draw.text((118, 84), "OPEN 7", fill="#a02020")
    names = ("images/scene.png", "images/part.png")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    scene.save(folder / names[0])
    scene.crop((100, 60, 180, 120)).save(folder / names[1])
    return names


def cropped(folder: Path, *, step: int = 1, last: str = "<answer>7</answer>", **fields: Any) -> dict[str, object]:
    """A line of rollouts.jsonl: a call that is refused, one that shows the part of the scene, the answer."""
    scene, part = write_scene(folder)
    call = '<grounding>{"bbox_2d": [0.25, 0.2, 0.45, 0.4], "source": "original_image"}</grounding>'
    problem = "bbox_2d [0.45, 0.2, 0.25, 0.4] has swapped corners"
    cut = {"picture": 0, "name": "original_image", "box": [100, 60, 180, 120], "size": [400, 300], "keypoint": None}
    return rollout(
        step=step,
        response=last,
        label="7",
        messages=[
            {"role": "system", "content": "Look closer by one call."},
            {"role": "user", "content": [{"type": "image", "image": scene}, {"type": "text", "text": "Which?"}]},
        ],
        **{
            "said": [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": f"<think>Where is the sign?</think>{call}"}],
                    "calls": [{"tool": "crop", "outcome": "malformed", "problem": problem}],
                },
                {"role": "user", "content": [{"type": "text", "text": f"This call was not carried out: {problem}."}]},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": f"<think>The other way round.</think>{call}"}],
                    "calls": [{"tool": "crop", "outcome": "done", "problem": ""}],
                    "rewards": {"looked": 0.25},
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "This is observation_1:\n"},
                        {"type": "image", "image": part, "cut": cut},
                        {"type": "text", "text": "\nGo on."},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": last}]},
            ],
            "end": "over",
            "scores": {
                "accuracy": 1.0,
                "looked": 0.25,
                "tool_calls": 2.0,
                "malformed_calls": 1.0,
                "turns": 3.0,
                "shown_images": 1.0,
                "over_turn": 0.0,
                "environment_failed": 0.0,
            },
            "counts": {"tool_calls": 2, "malformed_calls": 1},
            **fields,
        },
    )
