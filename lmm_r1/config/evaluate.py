"""Every flag of `lmm-r1 evaluate`, and of the commands that check and convert files: `check_data` and `merge`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias
from urllib.parse import urlsplit

from lmm_r1.config.declared import Below, JsonText, Needs, Positional, Within, check_needs, check_ranges, json_object
from lmm_r1.config.generation import EngineFlags, EpisodeFlags, reward_part
from lmm_r1.config.ppo import PPODataConfig, PPODeepSpeedConfig
from lmm_r1.config.rewards import check_reward
from lmm_r1.config.shared import (
    OWN_ENGINE,
    RUNS,
    FirstHelp,
    OverlongFlags,
    RowsConfig,
    SpeculationFlags,
    refuse_row_flags,
)
from lmm_r1.data.files import ROWS_FILE
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_new_folder, check_output_file

RESPONSES_SUFFIX = ".responses.jsonl"
# Flags that only an engine in this process has.
ENGINE_FLAGS = (
    *("backend", "max_model_len", "dtype", "batch_rows", "tensor_parallel_size", "gpu_memory_utilization"),
    *("enforce_eager", "seed", "trust_remote_code", "speculative_tokens"),
    "overlong_images",
)
_SERVED = Needs("endpoint")
# Suffixes that are left out of a row file's name; names of checkpoints may contain dots.
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
# Longest default file name: systems allow about 255 bytes, and suffixes follow.
_LONGEST_NAME = 120


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(RowsConfig, OverlongFlags, EpisodeFlags, SpeculationFlags, EngineFlags):
    first_help: ClassVar[FirstHelp] = FirstHelp(
        text="""
        # A checkpoint on a file of rows, judged by the math verifier
        --checkpoints mine=runs/grpo --files test=held_out.jsonl --reward math --output scores.json
        # Before and after a training, four samples a row, on a public benchmark
        --checkpoints before=models/vlm-3b after=runs/grpo --suite mathvista --n_samples 4 --temperature 0.6
        --output scores.json
        # An evaluation made before, shown again without an engine
        --compare scores.json --html scores.html
        """,
        flags="checkpoints files suite reward output html n_samples temperature max_new_tokens backend",
    )

    checkpoints: tuple[str, ...] = ()
    """Checkpoints, LoRA adapters or run folders as FOLDER or NAME=FOLDER, in the order of the table."""
    backend: Annotated[Literal["vllm", "transformers"], OWN_ENGINE] = "vllm"
    """Generate through vLLM, or through plain transformers."""
    files: tuple[str, ...] = ()
    """Row files as PATH or NAME=PATH."""
    suite: tuple[str, ...] = ()
    """Ready-made suites by name, or recipes of your own as FILE.yaml."""
    suite_data: tuple[str, ...] = ()
    """Local copies of suites' datasets as SUITE=PATH; other datasets come from the Hugging Face hub."""
    list_suites: bool = False
    """List the ready-made suites and exit."""
    endpoint: str | None = None
    """Base URL of a server with the OpenAI chat API, whose models are measured: http://127.0.0.1:8000/v1."""
    model: Annotated[tuple[str, ...], _SERVED] = ()
    """Names of the models at --endpoint."""
    api_key_env: Annotated[str | None, _SERVED] = None
    """Environment variable that holds the endpoint's key; None sends no key."""
    endpoint_concurrency: Annotated[int, Within("[1, inf)"), _SERVED] = 16
    """Number of rows requested at the same time."""
    endpoint_timeout: Annotated[float, Within("(0, inf)"), _SERVED] = 600.0
    """Seconds after which a request is given up."""
    endpoint_attempts: Annotated[int, Within("[1, inf)"), _SERVED] = 6
    """Attempts per row before it is left out, after time-outs, broken connections and errors that the server calls
    temporary."""
    endpoint_body: Annotated[JsonText | None, _SERVED] = None
    """A JSON object merged into each request: {"max_tokens": null, "max_completion_tokens": 4096}; null removes a
    field."""
    output: Path | None = None
    """JSON file to write; responses and page are written next to it as STEM.responses.jsonl and STEM.html. By default
    it is named after what is measured: runs/evaluation/sft_rl_on_test.json."""
    overwrite: Annotated[bool, Needs("checkpoints")] = False
    """Measure again what the output already holds for the same checkpoint, rows and settings; otherwise it is
    reused."""
    html: Path | None = None
    """Path of the page, if not next to the output."""
    compare: tuple[str, ...] = ()
    """Compare saved responses instead of generating: PATH for all checkpoints in a file, NAME=PATH for one."""
    baseline: str | None = None
    """Checkpoint that the others are compared with; None takes the first."""
    reward: tuple[str, ...] = ()
    """Verifiers as named by `serve_verifier` (`math`, `list:unordered`, `llm_judge:judge_url=URL,judge_model=NAME`),
    reward functions (FILE.py:NAME), or weighted lists (math=1,reward.py:length=0.1); the first one gives the accuracy. For
    episodes also `agent:PART`, a part of the environment's reward, which is the default if there is one. Other defaults
    are math for files, and each suite's own."""
    k: tuple[int, ...] = ()
    """Values of k for pass@k and majority@k; by default the powers of two up to n_samples."""
    temperature: Annotated[float | None, Within("[0, inf)")] = None
    """Sampling temperature, 0 decodes greedily; None takes each suite's own, and 0 for files."""
    top_p: Annotated[float, Within("(0, 1]")] = 1.0
    """Nucleus sampling: sample from the likeliest tokens that have this probability together."""
    n_samples: Annotated[int | None, Within("[1, inf)")] = None
    """Responses per row, whose mean is the accuracy; None takes each suite's own, and 1 for files."""
    max_new_tokens: Annotated[int | None, Within("[1, inf)")] = None
    """Longest response in tokens, or longest turn of an episode; None takes each suite's own, and 1024 for files."""
    max_model_len: Annotated[int, Within("[1, inf)"), OWN_ENGINE] = 4096
    """Longest prompt and response together; in an episode, including all turns."""
    max_rows: Annotated[int | None, Within("[1, inf)")] = None
    """Rows taken from the start of each file; None takes all."""
    judge_workers: Annotated[int, Within("[1, inf)")] = 4
    """Processes per verifier for answers that simple rules cannot judge."""
    judge_timeout: Annotated[float, Within("(0, inf)")] = 5.0
    """Processor seconds after which judging a response is cut off; the response then counts as wrong."""
    bootstrap_resamples: Annotated[int, Within("[1, inf)")] = 10_000
    """Resamples of the rows for the confidence intervals of comparisons."""
    bootstrap_seed: Annotated[int, Within("[0, inf)")] = 0
    """Seed of the resamples."""
    batch_rows: Annotated[int, Within("[1, inf)"), OWN_ENGINE] = 16
    """Rows in one batch with plain transformers."""


def check(config: EvaluateConfig) -> None:
    """Raise UserError for contradictions between flags."""
    if config.compare:
        for name in ("checkpoints", "endpoint", "files", "suite"):
            if getattr(config, name):
                raise UserError(f"--compare and --{name} are both given; --compare takes saved responses: drop one")
    else:
        _check_measurement(config)
    check_ranges(config)
    check_needs(config, config)
    if not config.files:
        refuse_row_flags(config, because="it is for --files, and there are none (suites have their own)")
    for flag, path in (("--output", config.output), ("--html", page_path(config))):
        if path is not None:
            check_output_file(path, flag=flag)
    if config.output is not None and config.output == page_path(config):
        raise UserError(
            f"--output {config.output} is also the path of the page; choose another with --html, or end it in .json"
        )
    if len(set(config.reward)) < len(config.reward):
        raise UserError(f"--reward {' '.join(config.reward)}: one of them is given twice; give each once")
    for reward in config.reward:
        if reward_part(reward) is None:
            check_reward(reward, flag="--reward")
        elif config.agent is None:
            raise UserError(f"--reward {reward} judges by an environment's reward; give --agent, too")


def _check_measurement(config: EvaluateConfig) -> None:
    if not config.checkpoints and config.endpoint is None:
        raise UserError("--checkpoints is missing: name what to measure as FOLDER or NAME=FOLDER")
    if not (config.files or config.suite):
        raise UserError("--files and --suite are missing: name rows as PATH or NAME=PATH, or a suite (--list_suites)")
    if config.output is None:
        raise UserError("--output is missing: name the JSON file to write")
    if config.endpoint is None:
        return
    if not config.model:
        raise UserError(f"--endpoint {config.endpoint}: add --model with the name that the server knows it by")
    if len(set(config.model)) < len(config.model):
        raise UserError(f"--model {' '.join(config.model)}: one of them is given twice; give each once")
    parts = urlsplit(config.endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"--endpoint {config.endpoint}: give the API's base address, as in http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UserError(
            "--endpoint must hold no user, password or query, as it is written to the results; "
            "put the key into an environment variable and name that with --api_key_env"
        )
    endpoint_fields(config)


def named(entries: Sequence[str], *, flag: str, bare: bool = True) -> dict[str, str]:
    """`["runs/sft", "b=runs/rl"]` → `{"sft": "runs/sft", "b": "runs/rl"}`; raises UserError for a name that is given twice.

    Args:
        bare: whether NAME= is optional. The default name is the file's, or the folder's for rows.jsonl.
    """
    paths: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        # A path may hold the sign, too.
        if bare and (not equals or Path(entry).exists()):
            name, path = _name_of(entry), entry
        if not (name and path):
            raise UserError(f"{flag} {entry}: write NAME=PATH")
        if name in paths:
            raise UserError(f"{flag} {entry}: the name {name} is given twice; write NAME=PATH with another")
        paths[name] = path
    return paths


def _name_of(path: str) -> str:
    file = Path(path)
    if file.suffix.lower() not in _FILES:
        return file.name
    return file.parent.name if file.name == ROWS_FILE and file.parent.name else file.stem


def with_output(config: EvaluateConfig) -> EvaluateConfig:
    """Return the settings with a default path for the scores if responses are generated."""
    if config.output is not None or config.compare:
        return config
    models = [*named(config.checkpoints, flag="--checkpoints"), *config.model]
    asked = [*named(config.files, flag="--files"), *config.suite]
    name = re.sub(r"[^\w.+-]+", "-", f"{'_'.join(models)}_on_{'_'.join(asked)}")
    return replace(config, output=Path(RUNS) / "evaluation" / f"{name[:_LONGEST_NAME]}.json")


def endpoint_fields(config: EvaluateConfig) -> dict[str, object]:
    """Return the fields of `--endpoint_body`; raises UserError if it is not a JSON object or sets what other flags set."""
    fields = json_object(config.endpoint_body, flag="--endpoint_body")
    for name, instead in (
        ("model", "--model"),
        ("messages", "--files"),
        ("n", "--n_samples"),
        ("stream", "whole replies"),
    ):
        if name in fields:
            raise UserError(f"--endpoint_body: {name} is not to be set here; use {instead}")
    for name, flag in (("temperature", "temperature"), ("top_p", "top_p"), ("max_tokens", "max_new_tokens")):
        if fields.get(name) is not None:
            raise UserError(f"--endpoint_body: {name} can only be taken out here, with null; set it by --{flag}")
    return fields


def responses_path(output: Path) -> Path:
    """Return the path of the responses: `scores.responses.jsonl` for `scores.json`."""
    return output.with_name(f"{output.stem}{RESPONSES_SUFFIX}")


def answers_path(output: Path) -> Path:
    """Return the path of an endpoint's answers as they arrive: `scores.answers.jsonl` for `scores.json`."""
    return output.with_name(f"{output.stem}.answers.jsonl")


def measured_path(output: Path) -> Path:
    """Return the path of what the responses depend on: `scores.measured.json` for `scores.json`."""
    return output.with_name(f"{output.stem}.measured.json")


def page_path(config: EvaluateConfig) -> Path | None:
    """Return the path of the page; None if nothing is written."""
    return config.html or (config.output and config.output.with_suffix(".html"))


_SIZE = re.compile(r"[1-9]\d*(\.\d+)?\s*([KMGT]i?)?B", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    adapter: Annotated[Path | None, Needs("!checkpoint", because="one of them is merged")] = None
    """Folder of a LoRA adapter in peft's format, such as adapter/ next to a model trained with --ds.lora.rank."""
    checkpoint: Annotated[
        Path | None, Needs("base", because="it holds no name of the model that the run started from")
    ] = None
    """DeepSpeed checkpoint (pickles): the folder --ckpt.path of train_sft, or _actor or _critic in that of
    train_ppo_ray."""
    tag: Annotated[str | None, Needs("checkpoint")] = None
    """Name of the checkpoint in that folder, such as global_step20; None takes the newest."""
    base: str | None = None
    """Model that the run started from, a folder or a hub name; None takes the one named by the adapter."""
    output: Path
    """Folder to write; must not exist yet or be empty."""
    lora_alpha: Annotated[int | None, Within("[1, inf)"), Needs("checkpoint")] = None
    """--ds.lora.alpha of the run, for a DeepSpeed checkpoint with adapters; None reads it from the run's settings."""
    use_rslora: Annotated[bool, Needs("lora_alpha", because="without it, both are read from the run's settings")] = (
        False
    )
    """With --lora_alpha: the run had --ds.lora.use_rslora."""
    run_config: Annotated[Path | None, Needs("checkpoint")] = None
    """run_config.yaml of the run; None looks for it in the three folders above the checkpoint."""
    value_head_prefix: str = PPODeepSpeedConfig.value_head_prefix
    """Name of a critic's value head, if the config of the base does not name it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the written weights, which are merged in fp32; auto takes the base's."""
    max_shard_size: str = "5GB"
    """Largest weight file."""
    check: bool = True
    """Load the written folder and compare its logits with the unmerged model's. This needs the memory of two models in
    fp32, or three for a DeepSpeed checkpoint."""
    push_to_hub: str | None = None
    """Upload the folder to this repository on the Hugging Face Hub, OWNER/NAME."""
    private: bool = True
    """Make the repository private if it does not exist yet."""
    trust_checkpoint: Annotated[bool, Needs("checkpoint")] = False
    """Load --checkpoint even if its files hold objects that can run code."""
    trust_remote_code: bool = False
    """Run Python code that comes with the base."""


def check_merge(config: MergeConfig) -> None:
    """Raise UserError for contradictions between flags, and for an output folder that must not be written to."""
    if config.adapter is None and config.checkpoint is None:
        raise UserError("give either --adapter or --checkpoint")
    check_ranges(config)
    check_needs(config, config)
    if not _SIZE.fullmatch(config.max_shard_size):
        raise UserError(f"--max_shard_size {config.max_shard_size}: write a number and a unit, such as 5GB or 500MB")
    check_new_folder(config.output, flag="--output")
    if config.push_to_hub is not None:
        from lmm_r1.hub import check_uploadable

        check_uploadable(config.push_to_hub, flag="--push_to_hub")


Kind: TypeAlias = Literal["prompts", "preference"]
"""What rows are for: RL and SFT; DPO and reward models."""


@dataclass(frozen=True, kw_only=True)
class CheckDataConfig(RowsConfig):
    file: Positional[str]
    """Row file, folder or dataset to check, as --data.prompt_dataset and --data.dataset take it."""
    model: str | None = None
    """Model whose processor counts the tokens, a folder or a hub name; None leaves lengths unchecked."""
    kind: Kind | None = None
    """Kind of the rows; None detects it from the columns of the file."""
    chosen_key: Annotated[str | None, Needs("kind=preference|None")] = None
    """Column of a preference with the better response; None takes `chosen`."""
    rejected_key: Annotated[str | None, Needs("kind=preference|None")] = None
    """Column of a preference with the worse response; None takes `rejected`."""
    against: tuple[str, ...] = ()
    """Other row files, for example held-out ones; rows that also occur there are reported."""
    reward: tuple[str, ...] = ("math",)
    """Verifiers, functions (FILE.py:NAME) or weighted lists of them (math=1,reward.py:length=0.1) that must accept every
    row's own answer."""
    max_len: Annotated[int, Within("[1, inf)")] = PPODataConfig.max_len
    """Longest sequence of the training, in tokens."""
    max_new_tokens: Annotated[int | None, Within("[1, inf)"), Below("max_len")] = None
    """Longest response. A prompt must leave this much room in max_len; None requires one token."""
    split: str = "train"
    """Split of a dataset that has several."""
    max_rows: Annotated[int | None, Within("[1, inf)")] = None
    """Rows taken from the start of each file; None takes all."""
    output: Path | None = None
    """JSON file to write with all findings."""
    judge_workers: Annotated[int, Within("[1, inf)")] = 2
    """Processes per verifier for answers that simple rules cannot judge."""
    judge_timeout: Annotated[float, Within("(0, inf)")] = 5.0
    """Processor seconds after which judging an answer is cut off; this is also a finding."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's checkpoint."""


def check_rows_flags(config: CheckDataConfig) -> None:
    """Raise UserError for contradictions between flags."""
    check_ranges(config)
    check_needs(config, config)
    if config.output is not None:
        check_output_file(config.output, flag="--output")
