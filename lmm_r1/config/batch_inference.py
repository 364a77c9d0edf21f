"""Every flag of `lmm-r1 batch_inference`, and which of them go together."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from lmm_r1.config.checks import check_eager, check_sampling
from lmm_r1.config.generation import EpisodeFlags, check_episodes
from lmm_r1.config.rewards import verifier_from
from lmm_r1.config.rows import RowsConfig
from lmm_r1.config.shared import Example, FirstHelp, SpeculationFlags, check_speculation
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable

STEP_FLAGS = ("step_scores", "placeholder_token", "reward_tokens")
LOCAL_FLAGS = ("normalize_reward", "max_batch_tokens")
StepScores = Literal["min", "product", "last", "mean"]
COUNTS = (
    "n_samples",
    "max_new_tokens",
    "max_model_len",
    "engines",
    "tensor_parallel_size",
    "batch_rows",
    "max_batch_tokens",
    "max_per_prompt",
    "judges",
    "max_rows",
)


@dataclass(frozen=True, kw_only=True)
class BatchConfig(RowsConfig, EpisodeFlags, SpeculationFlags):
    first_help: ClassVar[FirstHelp] = FirstHelp(
        examples=(
            Example(
                what="A response to every row, judged by the math verifier",
                arguments="--model runs/grpo --data rows.jsonl --output out/responses.jsonl --verifier math",
            ),
            Example(
                what="The right ones of eight responses a row, as rows for train_sft",
                arguments="--model runs/grpo --data rows.jsonl --output out/sampled.jsonl"
                " --n_samples 8 --temperature 1 --verifier math"
                " --select rejection_sampling --selected out/sft.jsonl",
            ),
            Example(
                what="Responses that are there already, scored by a reward model",
                arguments="--eval_task rm --model runs/rm --data out/sampled.jsonl --output out/scored.jsonl",
            ),
        ),
        flags=(
            "model",
            "data",
            "output",
            "n_samples",
            "temperature",
            "max_new_tokens",
            "verifier",
            "select",
            "selected",
            "eval_task",
        ),
    )

    eval_task: Literal["generate_vllm", "generate", "rm"] = "generate_vllm"
    """Generate through vLLM, generate through plain transformers, or score given responses with a reward model."""
    model: str
    """The checkpoint (a folder or a name on the hub), or an adapter's folder; for `rm` the reward model, or its server's
    address."""
    adapter: Path | None = None
    """LoRA adapter to merge into the model."""
    data: str
    """Rows in any format that the trainers read; for `rm` an output of this command, or conversations."""
    output: Path
    """JSON lines: one per row, in the order of the rows; pictures of episodes go beside it, into STEM.images/."""
    overwrite: bool = False
    """Begin anew where the output exists."""
    split: str = "train"
    """Split of a dataset that has several."""
    max_rows: int | None = None
    """Rows taken from the start of the file; None takes all."""
    n_samples: int = 1
    """Responses, or episodes, per row."""
    temperature: float = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_p: float = 1.0
    """Nucleus of the sampling."""
    max_new_tokens: int = 1024
    """Longest response in tokens; of an episode, its longest turn."""
    max_model_len: int = 4096
    """Longest prompt and response together, in tokens; of an episode, with all turns."""
    verifier: str | None = None
    """Score every response by a verifier: math, choice, number, exact, list, box, edit_distance, vqa, format,
    composition:math=1,format=0.5, llm_judge:judge_url=URL,judge_model=NAME."""
    reward_model: str | None = None
    """Score every response by a trained reward model, its steps by a process reward model as train_prm writes it, or by
    what http://HOST:PORT/get_reward gives, as serve_rm does; several addresses are separated by commas."""
    step_scores: StepScores = "min"
    """What a process reward model's scores of steps make of a response's reward: the least, their product, the last, or the mean."""
    placeholder_token: str | None = None
    """Token behind each step, for a process reward model whose config does not say it; with it a checkpoint is one."""
    reward_tokens: tuple[str, ...] = ()
    """Its tokens of a right step and of a wrong one; none take those in its config."""
    select: Literal["best_of_n", "rejection_sampling", "dpo_pairs"] | None = None
    """What to take from the scored responses once all rows are done: the best each, rows for SFT, or pairs for DPO."""
    selected: Path | None = None
    """JSON lines with what is selected."""
    min_reward: float = 1.0
    """Rejection sampling takes responses from this reward up."""
    max_per_prompt: int = 1
    """Rejection sampling takes so many different responses per row at most, the best ones; so many different pairs are made."""
    min_margin: float = 0.0
    """A pair's rewards differ by this much at least."""
    engines: int = 1
    """Engines that share the rows, each in a process of its own (data parallel, through Ray) where there are several."""
    tensor_parallel_size: int = 1
    """GPUs over which one engine is split."""
    batch_rows: int = 16
    """Rows in one batch of plain transformers."""
    max_batch_tokens: int | None = None
    """Tokens in one batch of a reward model; None takes 16384 on a GPU and 1024 on a CPU."""
    normalize_reward: bool = False
    """Normalize rewards by the statistics in the reward model's config."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for vLLM; None is what its responses need, as far as it is free when the engine starts."""
    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs: it starts sooner and decodes more slowly; without CUDA there are none in any case; None does so for small models only."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the models; auto takes that of the weights."""
    judges: int = 2
    """Processes of the verifier."""
    seed: int = 0
    """Seed of the sampling."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint brings along."""

    @property
    def judge(self) -> str | None:
        """The reward model that scores, a checkpoint or the addresses of servers; None where none does."""
        return self.model if self.eval_task == "rm" else self.reward_model

    @property
    def judge_flag(self) -> str:
        """The flag that names it."""
        return "--model" if self.eval_task == "rm" else "--reward_model"

    @property
    def judge_is_remote(self) -> bool:
        """Whether it is asked over HTTP."""
        return self.judge is not None and self.judge.startswith(("http://", "https://"))


def check(config: BatchConfig) -> None:
    """Raise UserError where flags contradict each other or a file cannot be written."""
    for name in COUNTS:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be 1 or more")
    check_sampling(temperature=config.temperature, top_p=config.top_p)
    uses_vllm = config.eval_task == "generate_vllm"
    check_eager(config.enforce_eager, backend=f"--eval_task {config.eval_task}", uses_vllm=uses_vllm)
    check_speculation(config, other_engine=None if uses_vllm else f"--eval_task {config.eval_task}")
    if config.eval_task != "rm" and config.n_samples > 1 and config.temperature == 0:
        raise UserError(
            f"--n_samples {config.n_samples} at --temperature 0 would give the same response each time; raise it"
        )
    if config.verifier is not None and (config.reward_model is not None or config.eval_task == "rm"):
        raise UserError(f"--verifier {config.verifier} and a reward model both give rewards; leave one out")
    if config.eval_task == "rm" and (config.adapter is not None or config.reward_model is not None):
        raise UserError("--eval_task rm takes its reward model as --model; leave --adapter and --reward_model out")
    if config.verifier is not None:
        verifier_from(config.verifier, flag="--verifier")
    _check_steps(config)
    _check_agent(config)
    _check_selection(config)
    check_creatable(config.output, flag="--output")
    if config.output.is_dir():
        raise UserError(f"--output {config.output} is a folder; name a file")


def _check_steps(config: BatchConfig) -> None:
    given = [name for name in STEP_FLAGS if getattr(config, name) != getattr(BatchConfig, name)]
    if given and config.reward_model is None and config.eval_task != "rm":
        raise UserError(
            f"--{given[0]} is for a process reward model; name it with --reward_model, or leave the flag out"
        )
    if config.judge_is_remote:
        local = [*given, *(name for name in LOCAL_FLAGS if getattr(config, name) != getattr(BatchConfig, name))]
        if local:
            raise UserError(
                f"--{local[0]} is for a reward model that is loaded here, and {config.judge_flag} {config.judge} is a server, "
                "which was started with such flags of its own; leave it out"
            )
    if config.reward_tokens and len(set(config.reward_tokens)) != 2:
        raise UserError(
            f"--reward_tokens {' '.join(config.reward_tokens)}: give two tokens, that of a right step and that of a wrong one"
        )


def _check_agent(config: BatchConfig) -> None:
    check_episodes(config, backend=f"--eval_task {config.eval_task}", vllm="--eval_task generate_vllm")
    if config.agent is None:
        return
    if config.reward_model is not None:
        raise UserError(
            f"--agent {config.agent} with --reward_model {config.reward_model}: a reward model scores single responses; "
            "give --verifier, or leave the rewards to the environment"
        )
    if config.select == "dpo_pairs":
        raise UserError(
            f"--agent {config.agent} with --select dpo_pairs: pairs are of single responses; take best_of_n or "
            "rejection_sampling"
        )


def _check_selection(config: BatchConfig) -> None:
    if (config.select is None) != (config.selected is None):
        raise UserError(
            "--select and --selected belong together: what to take from the responses, and the file for it"
        )
    if config.select is None or config.selected is None:
        return
    # Of episodes the environment may give the rewards.
    if config.verifier is None and config.reward_model is None and config.eval_task != "rm" and config.agent is None:
        raise UserError(f"--select {config.select} needs rewards: add --verifier math or --reward_model DIR")
    if config.select != "rejection_sampling" and config.n_samples == 1 and config.eval_task != "rm":
        raise UserError(f"--select {config.select} needs several responses per row; add --n_samples 8 --temperature 1")
    check_creatable(config.selected, flag="--selected")
    if config.selected.absolute() == config.output.absolute():
        raise UserError(f"--selected {config.selected} is the --output too; name another file")
