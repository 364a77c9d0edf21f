"""Every flag of `lmm-r1 evaluate`, and which of them go together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmm_r1.config.checks import check_eager, check_sampling
from lmm_r1.config.rows import RowsConfig, refuse_row_flags
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable

RESPONSES_SUFFIX = ".responses.jsonl"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RowsConfig):
    checkpoints: tuple[str, ...] = ()
    """Checkpoints or LoRA adapters as NAME=FOLDER, in the order of the table."""
    backend: Literal["vllm", "transformers"] = "vllm"
    """Generate through vLLM, or through plain transformers."""
    files: tuple[str, ...] = ()
    """Row files as NAME=PATH."""
    suite: tuple[str, ...] = ()
    """Ready-made suites by name, or recipes of your own as FILE.yaml."""
    suite_data: tuple[str, ...] = ()
    """Local copies of suites' datasets as SUITE=PATH; the others are taken from the Hugging Face hub."""
    list_suites: bool = False
    """List the ready-made suites and end."""
    output: Path | None = None
    """JSON file to write; the responses and the page go beside it, as STEM.responses.jsonl and STEM.html."""
    html: Path | None = None
    """Where the page goes instead."""
    compare: tuple[str, ...] = ()
    """Compare saved responses instead of making new ones: PATH for all checkpoints in a file, NAME=PATH for one."""
    baseline: str | None = None
    """The checkpoint that the others are compared with; None takes the first."""
    verifiers: tuple[str, ...] = ()
    """Verifiers as `serve_verifier` names them, the accuracy being the first one's: `math`, `choice`, `list:unordered`,
    `composition:math=1.0,format=0.5`; by default math for files, and each suite's own."""
    k: tuple[int, ...] = ()
    """The k of pass@k and majority@k; by default the powers of two up to n_samples."""
    temperature: float | None = None
    """Sampling temperature, 0 decodes greedily; None takes each suite's own, and 0 for files."""
    top_p: float = 1.0
    """Nucleus of the sampling."""
    n_samples: int | None = None
    """Responses per row, over which the accuracy is a mean; None takes each suite's own, and 1 for files."""
    max_new_tokens: int | None = None
    """Longest response in tokens; None takes each suite's own, and 1024 for files."""
    max_model_len: int = 4096
    """Longest prompt and response together."""
    max_rows: int | None = None
    """Rows taken from the start of each file; None takes all."""
    judge_workers: int = 4
    """Processes that judge what rules of thumb cannot, for each verifier."""
    judge_timeout: float = 5.0
    """Seconds after which the judging of a response is cut off; it counts as wrong then."""
    bootstrap_resamples: int = 10_000
    """Resamples of the rows for the intervals of the comparisons."""
    bootstrap_seed: int = 0
    """Seed of that."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the engine; auto takes that of the weights."""
    batch_rows: int = 16
    """Rows in one batch of plain transformers."""
    tensor_parallel_size: int = 1
    """GPUs over which the model is split."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU's memory for the engine."""
    enforce_eager: bool = False
    """Run vLLM without CUDA graphs: it starts sooner and decodes more slowly; without CUDA there are none in any case."""
    seed: int = 0
    """Seed of the sampling."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint brings along."""


def check(config: EvaluateConfig) -> None:
    """Raise UserError for what can be told from the flags alone."""
    if config.compare:
        for name in ("checkpoints", "files", "suite"):
            if getattr(config, name):
                raise UserError(f"--compare and --{name} are both given; --compare takes saved responses: drop one")
    else:
        if not config.checkpoints:
            raise UserError("--checkpoints is missing: name what to measure as NAME=FOLDER")
        if not (config.files or config.suite):
            raise UserError("--files and --suite are missing: name rows as NAME=PATH, or a suite (--list_suites)")
        if config.output is None:
            raise UserError("--output is missing: name the JSON file to write")
    if not config.files:
        refuse_row_flags(config, because="it is for --files, and there are none (suites have their own)")
    for flag, path in (("--output", config.output), ("--html", page_path(config))):
        if path is None:
            continue
        check_creatable(path, flag=flag)
        if path.is_dir():
            raise UserError(f"{flag} {path} is a folder; name a file")
    if config.output is not None and config.output == page_path(config):
        raise UserError(
            f"--output {config.output} is where the page goes; name another with --html, or end it in .json"
        )
    if config.output is not None and responses_path(config.output).is_dir():
        raise UserError(f"--output {config.output}: {responses_path(config.output)} is a folder; choose another name")
    check_eager(config.enforce_eager, backend=f"--backend {config.backend}", uses_vllm=config.backend == "vllm")
    if len(set(config.verifiers)) < len(config.verifiers):
        raise UserError(f"--verifiers {' '.join(config.verifiers)}: one of them is given twice; give each once")
    _check_numbers(config)


def _check_numbers(config: EvaluateConfig) -> None:
    counts = (
        "n_samples",
        "max_new_tokens",
        "max_model_len",
        "max_rows",
        "tensor_parallel_size",
        "judge_workers",
        "batch_rows",
    )
    for name in (*counts, "bootstrap_resamples"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be 1 or more")
    check_sampling(temperature=config.temperature, top_p=config.top_p)
    if config.judge_timeout <= 0:
        raise UserError(f"--judge_timeout {config.judge_timeout}: must be above 0")
    if config.bootstrap_seed < 0:
        raise UserError(f"--bootstrap_seed {config.bootstrap_seed}: must be 0 or more")


def responses_path(output: Path) -> Path:
    """Return where the responses go: `scores.responses.jsonl` for `scores.json`."""
    return output.with_name(f"{output.stem}{RESPONSES_SUFFIX}")


def page_path(config: EvaluateConfig) -> Path | None:
    """Return where the page goes, None where nothing is written."""
    return config.html or (config.output and config.output.with_suffix(".html"))
