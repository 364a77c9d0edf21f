"""Measure checkpoints on held-out rows: `lmm-r1 evaluate --checkpoints NAME=DIR ... --files NAME=ROWS ...`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lmm_r1.cli.arguments import parse, user_errors
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
    dtype: str = field(default="auto")
    """Precision of the engine: auto, float32, bfloat16 or float16."""
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
    for name, path in checkpoints.items():
        if not (Path(path) / "config.json").is_file() and Path(path).exists():
            raise UserError(f"--checkpoints {name}={path}: no config.json in this folder")
    from lmm_r1 import cpu

    # One engine after the other in this process: no process of its own for each, which would import vLLM again.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    cpu.prepare_process()
    import json

    from lmm_r1.evaluation.accuracy import evaluate_checkpoint, load_files
    from lmm_r1.evaluation.generation import GenerationSettings
    from lmm_r1.trainer.run_folder import write_atomically

    names = GenerationSettings.__dataclass_fields__
    settings = GenerationSettings(**{key: value for key, value in asdict(config).items() if key in names})
    rows = load_files(files, message_key=config.input_key, answer_key=config.label_key, max_rows=config.max_rows)
    results = []
    for name, path in checkpoints.items():
        scores = evaluate_checkpoint(path, files=rows, settings=settings, report=lambda line: print(line, flush=True))
        results.append({"name": name, "path": path, "files": scores})
        for file, score in scores.items():
            print(f"{name:>12}  {file:<8} accuracy {score['accuracy']:.3f}  format {score['format']:.3f}", flush=True)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    record = {"settings": {**asdict(config), "output": str(config.output)}, "checkpoints": results}
    write_atomically(config.output, json.dumps(record, indent=2) + "\n")


def _named(entries: tuple[str, ...], flag: str) -> dict[str, str]:
    named = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not (name and equals and path):
            raise UserError(f"{flag} {entry}: write NAME=PATH")
        named[name] = path
    return named


if __name__ == "__main__":
    main()
