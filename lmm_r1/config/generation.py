"""Settings of generation: episodes, chat and batch inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from lmm_r1.config.declared import JsonText, Needs, Within, check_needs, check_ranges
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.config.rewards import check_reward
from lmm_r1.config.shared import OWN_ENGINE, FirstHelp, OverlongFlags, RowsConfig, SpeculationFlags, ThoughtConfig
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_output_file

AGENT_VERIFIER = "agent"
"""Verifiers called `agent:PART` take a part of the environment's reward."""
_EPISODES = Needs("agent")


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """How a command loads a model that generates."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], OWN_ENGINE] = "auto"
    """Precision of the model; auto takes the precision of the weights."""
    tensor_parallel_size: Annotated[int, Within("[1, inf)"), OWN_ENGINE] = 1
    """GPUs over which vLLM splits the model."""
    gpu_memory_utilization: Annotated[float | None, Within("(0, 1]"), OWN_ENGINE] = None
    """Share of a GPU's memory for vLLM; None is what its responses need, limited by the memory that is free at
    start."""
    enforce_eager: Annotated[
        bool | None,
        OWN_ENGINE,
        Needs("backend=vllm|None", because="only vLLM has CUDA graphs"),
        Needs("eval_task=generate_vllm|None", because="only vLLM has CUDA graphs"),
    ] = None
    """Run vLLM without CUDA graphs: faster to start, slower to decode. None does so for small models only."""
    seed: Annotated[int, OWN_ENGINE] = 0
    """Seed of the sampling."""
    trust_remote_code: Annotated[bool, OWN_ENGINE] = False
    """Run Python code that comes with a checkpoint."""

    @property
    def loading(self) -> Mapping[str, Any]:
        """These flags by their names, which are also those of `generation.engine.EngineSettings`."""
        return {one.name: getattr(self, one.name) for one in fields(EngineFlags)}


@dataclass(frozen=True, kw_only=True)
class EpisodeFlags:
    agent: Annotated[
        str | None,
        Needs("backend=vllm|None", because="only vLLM plays episodes"),
        Needs("eval_task=generate_vllm|None", because="only vLLM plays episodes"),
        Needs("!endpoint", because="episodes are played on an engine in this process"),
        Needs("!reward_model", because="a reward model scores single responses"),
        Needs("select!=dpo_pairs", because="pairs are of single responses"),
        Needs("!compare", because="that takes saved responses"),
    ] = None
    """An environment that answers the model's turns: one by name (crop, tool, sokoban, ...), or FILE.py:CLASS of your
    own. None has single responses."""
    agent_options: Annotated[JsonText | None, _EPISODES] = None
    """Arguments of the environment's class, as a JSON object."""
    agent_max_turns: Annotated[int, Within("[1, inf)"), _EPISODES] = AgentConfig.max_turns
    """Maximum number of the model's turns in an episode. Each turn has at most max_new_tokens, and prompt and turns
    together at most max_model_len."""
    agent_max_images: Annotated[int, Within("[0, inf)"), _EPISODES] = AgentConfig.max_images
    """Images that the environment may show in an episode, in addition to those of the prompt."""
    agent_answer_s: Annotated[float, Within("(0, inf)"), _EPISODES] = AgentConfig.answer_s
    """Seconds that the environment may take to answer a turn; after that the episode fails."""
    agent_thought: Annotated[ThoughtConfig, _EPISODES] = field(default_factory=ThoughtConfig)
    """Budget forcing: longer or shorter thoughts."""


EPISODE_FLAGS = tuple(own.name for own in fields(EpisodeFlags))


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
class ConversationFlags(EngineFlags):
    """The model of a conversation, and how long one may be."""

    model: str
    """The checkpoint (a folder or a name on the hub), or an adapter's folder."""
    adapter: Path | None = None
    """LoRA adapter to merge into the model."""
    max_model_len: Annotated[int | None, Within("[1, inf)")] = None
    """Longest conversation in tokens, including the answer. None is 8192, or the range of the short factors with
    longrope."""
    max_images: Annotated[int, Within("[0, inf)")] = 8
    """Maximum number of images in one conversation."""
    max_videos: Annotated[int, Within("[0, inf)")] = 0
    """Maximum number of videos in one conversation, for models that take videos."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(EpisodeFlags, ConversationFlags):
    backend: Literal["vllm", "transformers"] = "vllm"
    """What generates: vLLM, or plain transformers, which starts faster and supports every architecture."""
    system: str | None = None
    """System prompt; None takes that of the run which trained the model, or else the chat template's."""
    temperature: Annotated[float, Within("[0, inf)")] = 0.7
    """Sampling temperature; 0 decodes greedily."""
    top_p: Annotated[float, Within("(0, 1]")] = 0.95
    """Nucleus sampling: sample from the likeliest tokens that have this probability together."""
    max_new_tokens: Annotated[int, Within("[1, inf)")] = 2048
    """Longest answer in tokens; in an episode, the longest turn."""


@dataclass(frozen=True, kw_only=True)
class ServeChatConfig(ConversationFlags):
    name: str | None = None
    """What requests call the model; None is as --model does."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the server to the network."""
    port: Annotated[int, Within("[0, 65535]")] = 8000
    """Port to listen on; 0 picks a free one."""
    port_file: Path | None = None
    """File to which the port is written once the server answers."""
    token_env: str | None = None
    """Environment variable with the key that requests must bring; required if --host is not an address of this machine."""
    insecure: bool = False
    """Answer everyone on the network: --host without --token_env."""
    image_root: Path | None = None
    """Folder below which images and videos that requests name by a file:// URL are read."""
    allow_urls: tuple[str, ...] = ()
    """Hosts from which images and videos that requests name by an http(s) URL are fetched."""


def check_chat(config: ConversationFlags) -> None:
    """Raise UserError for a number that no conversation can be had with."""
    check_ranges(config)
    check_needs(config, config)


@dataclass(frozen=True, kw_only=True)
class BatchConfig(RowsConfig, OverlongFlags, EpisodeFlags, SpeculationFlags, EngineFlags):
    first_help: ClassVar[FirstHelp] = FirstHelp(
        text="""
        # A response to every row, judged by the math verifier
        --model runs/grpo --data rows.jsonl --output out/responses.jsonl --reward math
        # The right ones of eight responses a row, as rows for train_sft
        --model runs/grpo --data rows.jsonl --output out/sampled.jsonl --n_samples 8 --temperature 1 --reward math
        --select rejection_sampling --selected out/sft.jsonl
        # Responses that are there already, scored by a reward model
        --eval_task rm --model runs/rm --data out/sampled.jsonl --output out/scored.jsonl
        """,
        flags="model data output n_samples temperature max_new_tokens reward select selected eval_task",
    )

    eval_task: Literal["generate_vllm", "generate", "rm"] = "generate_vllm"
    """Generate through vLLM, generate through plain transformers, or score given responses with a reward model."""
    model: str
    """The checkpoint (a folder or a name on the hub) or an adapter's folder; for `rm` the reward model or its server's
    address."""
    adapter: Annotated[Path | None, Needs("eval_task!=rm", because="--model is the whole reward model")] = None
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
    n_samples: Annotated[
        int,
        Within("[1, inf)"),
        Needs("temperature>0 or eval_task=rm", because="it would give the same response each time"),
    ] = 1
    """Responses, or episodes, per row."""
    temperature: Annotated[float, Within("[0, inf)")] = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_p: Annotated[float, Within("(0, 1]")] = 1.0
    """Nucleus sampling: sample from the likeliest tokens that have this probability together."""
    max_new_tokens: Annotated[int, Within("[1, inf)")] = 1024
    """Longest response in tokens; in an episode, the longest turn."""
    max_model_len: Annotated[int, Within("[1, inf)")] = 4096
    """Longest prompt and response together, in tokens; in an episode, including all turns."""
    reward: Annotated[
        str | None,
        Needs("!reward_model", because="both give rewards"),
        Needs("eval_task!=rm", because="both give rewards"),
    ] = None
    """Score every response by a verifier (math, choice, number, exact, list, box, edit_distance, vqa, sokoban, format,
    llm_judge:judge_url=URL,judge_model=NAME), a reward function (FILE.py:NAME), or a weighted list:
    math=1,format=0.5,reward.py:length=0.1."""
    reward_model: Annotated[str | None, Needs("eval_task!=rm", because="it takes its reward model as --model")] = None
    """Score every response with a trained reward model, or with a server of serve_rm: http://HOST:PORT/get_reward,
    several separated by commas."""
    select: Annotated[
        Literal["best_of_n", "rejection_sampling", "dpo_pairs"] | None,
        Needs("selected", because="it names the file for what is selected"),
        # In episodes, the environment may give the rewards.
        Needs("reward or reward_model or eval_task=rm or agent", because="it compares rewards"),
        Needs(
            "n_samples>1 or eval_task=rm", when="best_of_n|dpo_pairs", because="it compares several responses per row"
        ),
    ] = None
    """What to select from the scored responses when all rows are done: the best of each row, rows for SFT, or pairs
    for DPO."""
    selected: Annotated[Path | None, Needs("select")] = None
    """JSON lines with the selection."""
    min_reward: float = 1.0
    """Lowest reward that rejection sampling accepts."""
    max_per_prompt: Annotated[int, Within("[1, inf)")] = 1
    """Maximum number of different responses per row in rejection sampling, best first, or of different pairs."""
    min_margin: float = 0.0
    """Smallest difference between the rewards of a pair."""
    engines: Annotated[int, Within("[1, inf)")] = 1
    """Engines that share the rows (data parallel); several run in separate processes through Ray."""
    batch_rows: Annotated[int, Within("[1, inf)")] = 16
    """Rows in one batch with plain transformers."""
    max_batch_tokens: Annotated[int | None, Within("[1, inf)")] = None
    """Tokens in one batch of a reward model; None takes 16384 on a GPU and 1024 on a CPU."""
    normalize_reward: bool = False
    """Normalize rewards by the statistics in the reward model's config."""
    judges: Annotated[int, Within("[1, inf)")] = 2
    """Processes of the verifier."""

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
    if config.reward is not None:
        check_reward(config.reward, flag="--reward")
    check_output_file(config.output, flag="--output")
    if config.selected is not None:
        check_output_file(config.selected, flag="--selected")
        if config.selected.absolute() == config.output.absolute():
            raise UserError(f"--selected {config.selected} is the --output too; name another file")
