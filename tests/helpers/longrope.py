"""Checkpoints whose positions are turned by other factors beyond a length."""

import json
import shutil
from pathlib import Path
from typing import Any

# Released with them.
LONGROPE = ("llm", "phi3_v", "phi4_multimodal")


def with_rope(folder: Path, copy: Path, **rope: Any) -> Path:
    """Copy a checkpoint with other rope parameters beside its own."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] |= rope
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def with_longrope(folder: Path, length: int, *, copy: Path, **rope: Any) -> Path:
    """Copy a checkpoint with other factors for samples longer than `length`."""
    config = json.loads((folder / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    frequencies = int(head * config["rope_parameters"].get("partial_rotary_factor", 1.0)) // 2
    factors = {"short_factor": [1.0] * frequencies, "long_factor": [1.0 + index for index in range(frequencies)]}
    with_rope(folder, copy, rope_type="longrope", original_max_position_embeddings=length, **factors | rope)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"original_max_position_embeddings": length}))
    return copy
