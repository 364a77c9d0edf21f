"""Measure checkpoints on held-out rows: `lmm-r1 evaluate --checkpoints NAME=DIR ... --files NAME=ROWS ...`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.data.atomic_file import check_creatable, write_atomically
from lmm_r1.data.files import load_rows
from lmm_r1.data.messages import Row
from lmm_r1.data.row_checks import check_images_taken
from lmm_r1.errors import UserError

PROG = "lmm-r1 evaluate"
DESCRIPTION = "Measure the accuracy of checkpoints on files of rows, with the math verifier."


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    checkpoints: tuple[str, ...]
    """Checkpoints as NAME=FOLDER, in the order of the table."""
    files: tuple[str, ...]
    """Row files as NAME=PATH."""
    output: Path
    """JSON file to write."""
    temperature: float = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_p: float = 1.0
    """Nucleus of the sampling."""
    n_samples: int = 1
    """Responses per row; the accuracy is their mean."""
    max_new_tokens: int = 1024
    """Longest response in tokens."""
    max_model_len: int = 4096
    """Longest prompt and response together."""
    max_rows: int | None = None
    """Rows taken from the start of each file; None takes all."""
    input_key: str | None = None
    """Column with the messages; None looks for `message` and `messages`."""
    label_key: str = "answer"
    """Column with the answer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the engine; auto takes that of the weights."""
    tensor_parallel_size: int = 1
    """GPUs over which the model is split."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory for the engine."""
    seed: int = 0
    """Seed of the sampling."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint brings along."""


def main(argv: list[str] | None = None) -> None:
    config = parse(EvaluateConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        evaluate(config)


def evaluate(config: EvaluateConfig) -> None:
    """Write accuracy, format rate, length and truncation of every checkpoint on every file to `output`."""
    checkpoints, files = _named(config.checkpoints, "--checkpoints"), _named(config.files, "--files")
    _check_numbers(config)
    check_creatable(config.output, flag="--output")
    if config.output.is_dir():
        raise UserError(f"--output {config.output} is a folder; name a file")
    rows = {
        name: load_rows(path, message_key=config.input_key, answer_key=config.label_key, max_rows=config.max_rows)
        for name, path in files.items()
    }
    from lmm_r1 import cpu

    # The engine's process is this one, so what torch says of thread binding would stand between the lines below.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    cpu.prepare_process()
    # One engine after the other in this process: no process of its own for each, which would import vLLM again.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    _check_checkpoints(config, checkpoints, [row for file_rows in rows.values() for row in file_rows])

    from lmm_r1.evaluation.accuracy import evaluate_checkpoint
    from lmm_r1.evaluation.generation import GenerationSettings

    names = GenerationSettings.__dataclass_fields__
    settings = GenerationSettings(**{key: value for key, value in asdict(config).items() if key in names})
    results = []
    for name, path in checkpoints.items():
        scores = evaluate_checkpoint(path, files=rows, settings=settings, report=lambda line: print(line, flush=True))
        results.append({"name": name, "path": path, "files": scores})
        for file, score in scores.items():
            print(f"{name:>12}  {file:<8} accuracy {score['accuracy']:.3f}  format {score['format']:.3f}", flush=True)
    record = {"settings": {**asdict(config), "output": str(config.output)}, "checkpoints": results}
    write_atomically(config.output, text=json.dumps(record, indent=2) + "\n")


def _check_numbers(config: EvaluateConfig) -> None:
    for name in ("n_samples", "max_new_tokens", "max_model_len", "tensor_parallel_size"):
        if getattr(config, name) < 1:
            raise UserError(f"--{name} {getattr(config, name)}: must be 1 or more")
    if config.max_rows is not None and config.max_rows < 1:
        raise UserError(f"--max_rows {config.max_rows}: must be 1 or more")
    if config.temperature < 0:
        raise UserError(f"--temperature {config.temperature}: must be 0 or more")
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top_p {config.top_p}: must be above 0 and at most 1")


def _check_checkpoints(config: EvaluateConfig, checkpoints: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Raise UserError for the last checkpoint, too, before the first is measured."""
    from lmm_r1.lmm_kits import kit_of
    from lmm_r1.lmm_kits.weight_files import check_weights
    from lmm_r1.rollout.agreement import check_engine

    for name, path in checkpoints.items():
        kit = kit_of(path, trust_remote_code=config.trust_remote_code)
        check_engine(kit, model=f"--checkpoints {name}={path}")
        kit.load_processor(path, trust_remote_code=config.trust_remote_code)
        check_weights(path)
        check_images_taken(rows, kit=kit, model=f"--checkpoints {name}={path}")


def _named(entries: tuple[str, ...], flag: str) -> dict[str, str]:
    named = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            raise UserError(f"{flag} {entry}: write NAME=PATH")
        if name in named:
            raise UserError(f"{flag} {entry}: the name {name} is given twice; choose another")
        named[name] = path
    return named


if __name__ == "__main__":
    main()
