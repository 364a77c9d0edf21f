"""Settings of generation: episodes, chat and batch inference."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from lmm_r1 import dotted
from lmm_r1.config.checks import agent_options, check_eager, check_sampling, check_thought
from lmm_r1.config.declared import Within, check_needs, check_ranges
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.config.rewards import check_reward
from lmm_r1.config.shared import (
    Example,
    FirstHelp,
    JsonText,
    OverlongFlags,
    RowsConfig,
    SpeculationFlags,
    ThoughtConfig,
    check_speculation,
)
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable

AGENT_VERIFIER = "agent"
"""Verifiers called `agent:PART` take a part of the environment's reward."""


@dataclass(frozen=True, kw_only=True)
class EpisodeFlags:
    agent: str | None = None
    """An environment that answers the model's turns: one by name (crop, tool, sokoban, ...), or FILE.py:CLASS of your
    own. None has single responses."""
    agent_options: JsonText | None = None
    """Arguments of the environment's class, as a JSON object."""
    agent_max_turns: Annotated[int, Within("[1, inf)")] = AgentConfig.max_turns
    """Maximum number of the model's turns in an episode. Each turn has at most max_new_tokens, and prompt and turns
    together at most max_model_len."""
    agent_max_images: Annotated[int, Within("[0, inf)")] = AgentConfig.max_images
    """Images that the environment may show in an episode, in addition to those of the prompt."""
    agent_answer_s: Annotated[float, Within("(0, inf)")] = AgentConfig.answer_s
    """Seconds that the environment may take to answer a turn; after that the episode fails."""
    agent_thought: ThoughtConfig = field(default_factory=ThoughtConfig)
    """Budget forcing: longer or shorter thoughts."""


EPISODE_FLAGS = tuple(own.name for own in fields(EpisodeFlags))


def check_episodes(flags: EpisodeFlags, *, backend: str, vllm: str) -> None:
    """Raise UserError for contradictions between the flags of episodes.

    Args:
        backend: the flag that names what generates, with its value.
        vllm: the same for vLLM.
    """
    if flags.agent is None:
        refuse_episode_flags(flags, because="it is for episodes; give --agent, too")
        return
    if backend != vllm:
        raise UserError(f"--agent {flags.agent} with {backend}: only vLLM plays episodes; take {vllm}")
    agent_options(episode_limits(flags), flag="--agent_options")
    check_thought(flags.agent_thought, prefix="--agent_thought.")


def refuse_episode_flags(flags: EpisodeFlags, *, because: str) -> None:
    """Raise UserError for the first of these flags that is set although no episode is played."""
    for name in dotted.leaf_types(EpisodeFlags):
        if (given := dotted.get(flags, name)) != dotted.get(EpisodeFlags(), name):
            raise UserError(f"--{name} {given}: {because}")


def episode_limits(flags: EpisodeFlags) -> AgentConfig:
    """Return the limits of episodes. Nothing is trained on them, so one that a limit ends counts as it is."""
    return AgentConfig(
        options=flags.agent_options,
        max_turns=flags.agent_max_turns,
        max_images=flags.agent_max_images,
        answer_s=flags.agent_answer_s,
        thought=flags.agent_thought,
        overturn="keep",
    )


def reward_part(verifier: str) -> str | None:
    """Return the part of the environment's reward that a verifier `agent:PART` judges by; None for every other verifier."""
    name, separator, part = verifier.partition(":")
    return part if name == AGENT_VERIFIER and separator else None


LONGEST_CONVERSATION = 8192
"""Tokens of a conversation if `max_model_len` is None; never more than the model's maximum."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(EpisodeFlags):
    model: str
    """The checkpoint (a folder or a name on the hub), or an adapter's folder."""
    adapter: Path | None = None
    """LoRA adapter to merge into the model."""
    backend: Literal["vllm", "transformers"] = "vllm"
    """What generates: vLLM, or plain transformers, which starts faster and supports every architecture."""
    system: str | None = None
    """System prompt; None takes that of the run which trained the model, or else the chat template's."""
    temperature: float = 0.7
    """Sampling temperature; 0 decodes greedily."""
    top_p: float = 0.95
    """Nucleus sampling: sample from the likeliest tokens that have this probability together."""
    max_new_tokens: Annotated[int, Within("[1, inf)")] = 2048
    """Longest answer in tokens; in an episode, the longest turn."""
    max_model_len: Annotated[int | None, Within("[1, inf)")] = None
    """Longest conversation in tokens, including the answer. None is 8192, or the range of the short factors with
    longrope."""
    max_images: Annotated[int, Within("[0, inf)")] = 8
    """Maximum number of images in one conversation."""
    max_videos: Annotated[int, Within("[0, inf)")] = 0
    """Maximum number of videos in one conversation, for models that take videos."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the model; auto takes the precision of the weights."""
    tensor_parallel_size: Annotated[int, Within("[1, inf)")] = 1
    """GPUs over which vLLM splits the model."""
    gpu_memory_utilization: Annotated[float | None, Within("(0, 1]")] = None
    """Share of a GPU's memory for vLLM; None is what its responses need, limited by the memory that is free at
    start."""
    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs: faster to start, slower to decode. None does so for small models only."""
    seed: int = 0
    """Seed of the sampling."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint."""


def check_chat(config: ChatConfig) -> None:
    """Raise UserError for a number that no conversation can be had with."""
    check_ranges(config)
    check_sampling(temperature=config.temperature, top_p=config.top_p)
    check_needs(config, config)
    check_eager(config.enforce_eager, backend=f"--backend {config.backend}", uses_vllm=config.backend == "vllm")
    check_episodes(config, backend=f"--backend {config.backend}", vllm="--backend vllm")


LOCAL_FLAGS = ("normalize_reward", "max_batch_tokens")


@dataclass(frozen=True, kw_only=True)
class BatchConfig(RowsConfig, OverlongFlags, EpisodeFlags, SpeculationFlags):
    first_help: ClassVar[FirstHelp] = FirstHelp(
        examples=(
            Example(
                what="A response to every row, judged by the math verifier",
                arguments="--model runs/grpo --data rows.jsonl --output out/responses.jsonl --reward math",
            ),
            Example(
                what="The right ones of eight responses a row, as rows for train_sft",
                arguments="--model runs/grpo --data rows.jsonl --output out/sampled.jsonl"
                " --n_samples 8 --temperature 1 --reward math"
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
            "reward",
            "select",
            "selected",
            "eval_task",
        ),
    )

    eval_task: Literal["generate_vllm", "generate", "rm"] = "generate_vllm"
    """Generate through vLLM, generate through plain transformers, or score given responses with a reward model."""
    model: str
    """The checkpoint (a folder or a name on the hub) or an adapter's folder; for `rm` the reward model or its server's
    address."""
    adapter: Path | None = None
    """LoRA adapter to merge into the model."""
    data: str
    """Rows in any format that the trainers read; for `rm` an output of this command, or conversations."""
    output: Path
    """JSON lines, one per row in the order of the rows. Pictures of episodes are written to STEM.images/ next to
    it."""
    overwrite: bool = False
    """Start again if the output exists."""
    split: str = "train"
    """Split of a dataset that has several."""
    max_rows: Annotated[int | None, Within("[1, inf)")] = None
    """Rows taken from the start of the file; None takes all."""
    n_samples: Annotated[int, Within("[1, inf)")] = 1
    """Responses, or episodes, per row."""
    temperature: float = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the likeliest tokens that have this probability together."""
    max_new_tokens: Annotated[int, Within("[1, inf)")] = 1024
    """Longest response in tokens; in an episode, the longest turn."""
    max_model_len: Annotated[int, Within("[1, inf)")] = 4096
    """Longest prompt and response together, in tokens; in an episode, including all turns."""
    reward: str | None = None
    """Score every response by a verifier (math, choice, number, exact, list, box, edit_distance, vqa, sokoban, format,
    llm_judge:judge_url=URL,judge_model=NAME), a reward function (FILE.py:NAME), or a weighted list:
    math=1,format=0.5,reward.py:length=0.1."""
    reward_model: str | None = None
    """Score every response with a trained reward model, or with a server of serve_rm: http://HOST:PORT/get_reward,
    several separated by commas."""
    select: Literal["best_of_n", "rejection_sampling", "dpo_pairs"] | None = None
    """What to select from the scored responses when all rows are done: the best of each row, rows for SFT, or pairs
    for DPO."""
    selected: Path | None = None
    """JSON lines with the selection."""
    min_reward: float = 1.0
    """Lowest reward that rejection sampling accepts."""
    max_per_prompt: Annotated[int, Within("[1, inf)")] = 1
    """Maximum number of different responses per row in rejection sampling, best first, or of different pairs."""
    min_margin: float = 0.0
    """Smallest difference between the rewards of a pair."""
    engines: Annotated[int, Within("[1, inf)")] = 1
    """Engines that share the rows (data parallel); several run in separate processes through Ray."""
    tensor_parallel_size: Annotated[int, Within("[1, inf)")] = 1
    """GPUs over which one engine is split."""
    batch_rows: Annotated[int, Within("[1, inf)")] = 16
    """Rows in one batch with plain transformers."""
    max_batch_tokens: Annotated[int | None, Within("[1, inf)")] = None
    """Tokens in one batch of a reward model; None takes 16384 on a GPU and 1024 on a CPU."""
    normalize_reward: bool = False
    """Normalize rewards by the statistics in the reward model's config."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for vLLM; None is what its responses need, limited by the memory that is free at
    start."""
    enforce_eager: bool | None = None
    """Run vLLM without CUDA graphs: faster to start, slower to decode. None does so for small models only."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the models; auto takes the precision of the weights."""
    judges: Annotated[int, Within("[1, inf)")] = 2
    """Processes of the verifier."""
    seed: int = 0
    """Seed of the sampling."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint."""

    @property
    def judge(self) -> str | None:
        """The reward model that scores, as a checkpoint or addresses of servers; None if none does."""
        return self.model if self.eval_task == "rm" else self.reward_model

    @property
    def judge_flag(self) -> str:
        """The flag that names it."""
        return "--model" if self.eval_task == "rm" else "--reward_model"

    @property
    def judge_is_remote(self) -> bool:
        """Whether it is asked over HTTP."""
        return self.judge is not None and self.judge.startswith(("http://", "https://"))


def check_batch(config: BatchConfig) -> None:
    """Raise UserError for contradictions between flags and for files that cannot be written."""
    check_ranges(config)
    check_needs(config, config)
    check_sampling(temperature=config.temperature, top_p=config.top_p)
    uses_vllm = config.eval_task == "generate_vllm"
    check_eager(config.enforce_eager, backend=f"--eval_task {config.eval_task}", uses_vllm=uses_vllm)
    check_speculation(config, other_engine=None if uses_vllm else f"--eval_task {config.eval_task}")
    if config.eval_task != "rm" and config.n_samples > 1 and config.temperature == 0:
        raise UserError(
            f"--n_samples {config.n_samples} at --temperature 0 would give the same response each time; raise it"
        )
    if config.reward is not None and (config.reward_model is not None or config.eval_task == "rm"):
        raise UserError(f"--reward {config.reward} and a reward model both give rewards; leave one out")
    if config.eval_task == "rm" and (config.adapter is not None or config.reward_model is not None):
        raise UserError("--eval_task rm takes its reward model as --model; leave --adapter and --reward_model out")
    if config.reward is not None:
        check_reward(config.reward, flag="--reward")
    _check_remote_judge(config)
    _check_agent(config)
    _check_selection(config)
    check_creatable(config.output, flag="--output")
    if config.output.is_dir():
        raise UserError(f"--output {config.output} is a folder; name a file")


def _check_remote_judge(config: BatchConfig) -> None:
    if config.judge_is_remote:
        given = [name for name in LOCAL_FLAGS if getattr(config, name) != getattr(BatchConfig, name)]
        if given:
            raise UserError(
                f"--{given[0]} is for a reward model that is loaded here, and {config.judge_flag} {config.judge} is a server, "
                "which was started with such flags of its own; leave it out"
            )


def _check_agent(config: BatchConfig) -> None:
    check_episodes(config, backend=f"--eval_task {config.eval_task}", vllm="--eval_task generate_vllm")
    if config.agent is None:
        return
    if config.reward_model is not None:
        raise UserError(
            f"--agent {config.agent} with --reward_model {config.reward_model}: a reward model scores single responses; "
            "give --reward, or leave the rewards to the environment"
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
    # In episodes, the environment may give the rewards.
    if config.reward is None and config.reward_model is None and config.eval_task != "rm" and config.agent is None:
        raise UserError(f"--select {config.select} needs rewards: add --reward math or --reward_model DIR")
    if config.select != "rejection_sampling" and config.n_samples == 1 and config.eval_task != "rm":
        raise UserError(f"--select {config.select} needs several responses per row; add --n_samples 8 --temperature 1")
    check_creatable(config.selected, flag="--selected")
    if config.selected.absolute() == config.output.absolute():
        raise UserError(f"--selected {config.selected} is the --output too; name another file")
