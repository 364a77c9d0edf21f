"""Every flag of `lmm-r1 train_ppo_ray`: OpenRLHF's names, and a few of this project's own."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from lmm_r1.config.shared import (
    AdamConfig,
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    EvalConfig,
    Example,
    FirstHelp,
    JsonText,
    LoggerConfig,
    OptimizerConfig,
    SpeculationFlags,
    TrainConfig,
    WandbConfig,
    named_after_the_minute,
)

MOST_PASS_TOKENS = 16192
"""Of a training pass where `train.max_tokens_per_gpu` is left open; OpenRLHF's default."""
MOST_GPU_PASS_TOKENS = 65536
"""The same on a GPU with memory to spare: beyond it a pass is no faster per token."""
AHEAD_TOKENS = 8192
"""The same of the reference's passes during generation, for which memory is set aside."""

EstimatorName: TypeAlias = Literal[
    "gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce", "remax", "grpo_passk"
]
"""Each is the name of a function in `rl.advantages`."""
# They compare a response with others to the same prompt, so a group of one has no advantage.
GROUP_ESTIMATORS: tuple[EstimatorName, ...] = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo", "grpo_passk")
PolicyLossName: TypeAlias = Literal["ppo", "gspo", "gspo_token", "cispo", "sapo"]
"""Each is the name of a function in `rl.losses`."""
LossAggregation: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
FILTER_NAME = "experience_filter"
"""The function of `algo.experience_filter` where none is named."""
RequestField: TypeAlias = Literal["columns", "images", "step"]
"""What a reward request may hold beside OpenRLHF's keys."""


GPU_COUNTS = (
    *(
        f"{model}.{count}"
        for model in ("actor", "ref", "critic", "reward")
        for count in ("num_nodes", "num_gpus_per_node")
    ),
    "vllm.num_engines",
)
"""The flags that say on how many GPUs models and engines are."""


class PlacedModel:
    """A model that has GPUs; None in its counts is filled in by `resolve_ppo`."""

    num_nodes: int | None
    num_gpus_per_node: int | None

    @property
    def nodes(self) -> int:
        assert self.num_nodes is not None, "resolve_ppo fills it in"
        return self.num_nodes

    @property
    def gpus_per_node(self) -> int:
        assert self.num_gpus_per_node is not None, "resolve_ppo fills it in"
        return self.num_gpus_per_node

    @property
    def gpus(self) -> int:
        """On all machines."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class ActorConfig(OptimizerConfig, PlacedModel):
    model_name_or_path: str | None = None
    """The model to train: a folder or a name on the Hugging Face Hub."""
    num_nodes: int | None = None
    """Machines that train the policy; None takes as many as its GPUs are on."""
    num_gpus_per_node: int | None = None
    """GPUs per machine that train the policy; None takes its share of what the machine has, or the Ray cluster; one rank on a CPU."""
    gradient_checkpointing_enable: bool | None = None
    """Save memory by computing activations again in the backward pass; None does so in as few layers as the GPU's memory asks
    for, and without a GPU only where the run would not fit."""
    gradient_checkpointing_layers: int | None = None
    """How many of the language model's layers do so, counted from the first; None is all, or chosen with the flag above."""
    gradient_checkpointing_reentrant: bool = False
    """Use torch's reentrant kind of checkpointing."""
    freeze_visual_encoder: bool = False
    """Train the language model only, in the policy and in the critic."""
    freeze_prefix: tuple[str, ...] = ()
    """Freeze the weights whose names begin so, in the policy and in the critic: `model.visual. lm_head.`."""
    eps_clip: float = 0.2
    """PPO's clip range on both sides of 1."""
    eps_clip_low_high: tuple[float, float] | None = None
    """PPO's clip range below and above 1; None takes eps_clip for both."""
    dual_clip: float | None = None
    """Bound on the loss where the advantage is negative (dual-clip PPO)."""
    policy_loss_type: PolicyLossName = "ppo"
    """Clipped probability ratios per token (ppo) or per sequence (gspo; gspo_token with advantages per token); log-probs
    weighted by clipped ratios (cispo); or ratios through a smooth gate (sapo)."""
    sapo_temperature_pos: float = 1.0
    """How fast sapo's gate closes as the ratio leaves 1 where the advantage is positive."""
    sapo_temperature_neg: float = 1.05
    """The same where it is not."""
    loss_agg_mode: LossAggregation = "token-mean"
    """Mean over all tokens; over sequences of each one's token mean; or over sequences of each one's sum divided by
    loss_agg_length (Dr. GRPO). The ratios of gspo are per sequence, so that token-mean is seq-mean-token-mean there."""
    loss_agg_length: int | None = None
    """Tokens that seq-mean-token-sum-norm divides every sequence's sum by; None is rollout.max_new_tokens, and data.max_len
    where that is left open or episodes are played."""
    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus; 0 only logs the entropy, None does neither."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimizerConfig, PlacedModel):
    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=9e-6))
    """AdamW."""
    model_name_or_path: str | None = None
    """The model that the critic starts from; None takes the reward model where there is one, else the policy's."""
    num_nodes: int | None = None
    """Machines that train the critic; None takes as many as its GPUs are on."""
    num_gpus_per_node: int | None = None
    """GPUs per machine that train the critic; None takes its share of what the machine has, or the Ray cluster; one rank on a CPU."""
    value_clip: float = 0.5
    """Clip range of the critic's values."""
    freezing_steps: int = -1
    """The policy learns from the step after this one on, counted from 0, and the critic from the start; -1: both do."""
    save_value_network: bool = False
    """Save the critic, too, in the folder that is named like output_dir with _critic behind it."""


@dataclass(frozen=True, kw_only=True)
class RefConfig(PlacedModel):
    num_nodes: int | None = None
    """Machines that hold the reference model; None takes as many as its GPUs are on."""
    num_gpus_per_node: int | None = None
    """GPUs per machine that hold the reference model; None takes its share of what the machine has, or the Ray cluster; one rank on a CPU."""
    offload: bool | None = None
    """Keep the reference model in CPU memory while it is not needed; None does so where the run would not fit otherwise."""
    during_generation: bool | None = None
    """Compute the reference model's log-probs of finished groups while others are generated; None does so on GPUs that
    have memory for it."""
    refresh_steps: int = 0
    """Steps after which the reference model takes the policy's weights, again and again; 0 keeps the model of the start."""


DEFAULT_VERIFIER = "math"


@dataclass(frozen=True, kw_only=True)
class RewardConfig(PlacedModel):
    remote_url: str | None = None
    """Address of the reward service's /get_reward, several are separated by commas; a reward function: FILE.py, or
    FILE.py:NAME; or a verifier that the engines ask themselves: math, list:unordered, composition:math=1,format=0.5. None
    takes math, unless a reward model or an environment gives the rewards."""
    function_kwargs: JsonText | None = None
    """Further arguments of the reward function, as a JSON object."""
    score_key: str | None = None
    """Part of the reward function's result that is the score, for pass@k and dynamic filtering; None is the reward."""
    timeout_s: float = 60.0
    """Seconds that one reward request may take."""
    deadline_s: float = 300.0
    """Seconds for which a failing reward is tried again before the run stops; of a reward function, those within which it
    must have scored the responses to one prompt."""
    request_fields: tuple[RequestField, ...] = ()
    """What reward requests hold beside OpenRLHF's keys: the rows' other columns, their images, the step; for servers of
    your own that read it."""
    model_name_or_path: str | None = None
    """A trained reward model, in place of a reward service."""
    num_nodes: int | None = None
    """Machines that hold the reward model; None takes as many as its GPUs are on."""
    num_gpus_per_node: int | None = None
    """GPUs per machine that hold the reward model; None takes its share of what the machine has, or the Ray cluster; one rank on a CPU."""
    offload: bool = False
    """Keep the reward model in CPU memory while it is not needed."""
    part_weights: JsonText | None = None
    """How much named parts of the reward count, constant or scheduled over steps, as a JSON object:
    {"format": 0.5, "tool_calls": {"from": 0.2, "to": 0, "steps": 100}}."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Rewards are clipped to this range."""
    normalize_enable: bool = False
    """Normalize the scores of a reward model by its running statistics."""
    overlong_buffer_len: float | None = None
    """Tokens before max_new_tokens from which on length costs reward; None charges nothing."""
    overlong_penalty_factor: float = 1.0
    """Reward lost by a response that fills the whole buffer."""
    stop_properly_penalty_coef: float | None = None
    """For a response cut off at the limit: 0 to 1 scales its reward, a negative number replaces it."""


# What papers and other trainers call them.
ESTIMATORS_ELSEWHERE = {
    "grpo": "group_norm",
    "ppo": "gae",
    "reinforce++": "reinforce",
    "reinforce_plus_plus": "reinforce",
    "reinforce++_baseline": "reinforce_baseline",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
    "drgrpo": "dr_grpo",
    "dapo": "group_norm",
    "passk": "grpo_passk",
    "pass_k": "grpo_passk",
    "pass@k": "grpo_passk",
}


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    estimator: EstimatorName = "reinforce_baseline"
    """How rewards become advantages; group_norm is GRPO, gae is PPO with a critic, remax compares with a greedy response, and
    grpo_passk counts the best of pass_k."""
    pass_k: int = 4
    """Responses of which the best counts, with grpo_passk."""
    gamma: float = 1.0
    """Discount per token."""
    lambd: float = 1.0
    """GAE's lambda."""
    no_std_norm: bool = False
    """Subtract the mean only and do not divide by the standard deviation."""
    is_correction_level: Literal["off", "token", "seq"] = "off"
    """Correct for vLLM and the trainer disagreeing on log-probs: not at all, by the ratio of each token, or by the geometric
    mean of the ratios of its sequence."""
    is_correction_mode: Literal["mask", "clip"] = "mask"
    """What happens outside the thresholds: no gradient, with tokens inside weighted by their own ratios; or all are weighted
    by the ratio of the level, held at the bound."""
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """What the thresholds bound: the probability ratio or a divergence."""
    is_correction_threshold: tuple[float, ...] = (0.5, 5.0)
    """LOW HIGH, or HIGH alone."""


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    init_coef: float = 0.01
    """Weight of the KL penalty to the reference model; 0 loads no reference model."""
    target: float | None = None
    """KL that an adaptive weight steers to; None keeps the weight fixed."""
    horizon: int = 10000
    """Samples over which the adaptive weight moves."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL: k1 as a part of the reward, k2 or k3 as a loss."""
    use_loss: bool = False
    """Put the KL into the loss, as in GRPO, not into the reward."""
    unbiased_gradient: bool = False
    """As a loss, use the exact gradient of the reverse KL with any estimator."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL penalty."""
    dynamic_filtering_enable: bool = False
    """Drop prompts whose mean reward is outside dynamic_filtering_range and sample others (DAPO)."""
    dynamic_filtering_range: tuple[float, float] = (0.0, 1.0)
    """Mean rewards strictly between these two are kept."""
    dynamic_filtering_part: str | None = None
    """The part of the reward whose mean must be in that range, accuracy for example; None is the score."""
    dynamic_filtering_min_std: float | None = None
    """Groups whose rewards have a lower standard deviation than this are dropped, too; None has no such bound."""
    dynamic_filtering_max_batches: int = 0
    """Most prompts that a step may take to be full, in multiples of rollout.batch_size, beyond which the run stops; 0 has no
    bound but a whole episode in which no group is left."""
    experience_filter: str | None = None
    """FILE.py or FILE.py:FUNCTION of your own that is given the samples of a group and says which are learnt from; a group
    of which it keeps none is replaced."""
    mismatch_limit: float | None = None
    """Largest mean distance per token between engine's and trainer's log-probs in the first step, beyond which the run
    stops; None is 0.01 in fp32 and 0.1 in half precision."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    batch_size: int = 0
    """Prompts per step; 0 takes 1024, or a fifth of the rows where that is less."""
    n_samples_per_prompt: int = 0
    """Responses per prompt: the size of a group; 0 takes 8 where the estimator compares them with one another, else 1."""
    max_new_tokens: int | None = None
    """Longest response in tokens; None is whatever the prompt leaves of data.max_len."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_p: float = 1.0
    """Nucleus sampling: share of the probability that is sampled from."""
    top_k: int = -1
    """How many of the likeliest tokens are sampled from; -1 takes all."""
    ignore_eos: bool = False
    """Let every response run to max_new_tokens, whatever is sampled; for measurements of speed."""
    micro_batch_size: int = 1
    """Samples in one forward pass for log-probs on one GPU; with shared prefixes rounded up to whole groups."""
    vllm_generate_batch_size: int | None = None
    """Most prompts that the engines have at one time, all together; None is batch_size."""
    max_tokens_per_gpu: int | None = None
    """Tokens in one forward pass with dynamic batches or shared prefixes; None is train.max_tokens_per_gpu, and on GPUs what fits."""
    oversample: float = 1.0
    """Prompts that are under way at a time, in multiples of batch_size, 2 at most: a rollout ends with the first batch_size
    groups that are finished, and what the others have generated goes on in the next one."""
    oversample_max_held: int = 1
    """Rollouts that may end without a group that is under way; the one behind them waits for it."""


@dataclass(frozen=True, kw_only=True)
class PPOTrainConfig(TrainConfig):
    micro_batch_size: int = 1
    """Samples in one forward and backward pass on one GPU; with shared prefixes rounded up to whole groups."""
    num_episodes: int = 1
    """Passes over the prompts."""
    colocate_all: bool | None = None
    """Policy, reference and vLLM engines share the same GPUs and take turns; None does so where a machine's GPUs are too few, or
    too small, for groups of their own."""
    colocate_actor_ref: bool = False
    """Policy and reference share the same GPUs."""
    colocate_critic_reward: bool = False
    """Critic and reward model share the same GPUs."""
    dynamic_batch_enable: bool = False
    """Fill batches by tokens instead of by samples; turns ds.packing_samples on."""
    max_tokens_per_gpu: int | None = None
    """Tokens in one training pass with dynamic batches or shared prefixes; None is what fits, 65536 at most, without a GPU 16192."""
    shared_prefix_enable: bool = True
    """Compute the prompt and images of a group once for all its responses, in rows without padding."""
    enable_ema: bool = False
    """Keep a moving average of the policy's weights, and save it as a model in the folder ema of output_dir."""
    ema_beta: float = 0.992
    """Share of the moving average that an update leaves."""
    async_enable: bool = False
    """Generate the next rollouts while the policy is updated, on GPUs or cores of their own; the samples' weights are then older
    than the policy's."""
    async_queue_size: int = 1
    """Rollouts that may be made ahead, and by how many updates the weights may be older that samples came of."""
    partial_rollout_enable: bool = False
    """Let responses run on across weight updates, with the new weights from there on; else an update waits for their end."""
    agent: str | None = None
    """An environment that answers the policy's turns: one by name, or FILE.py:CLASS of your own; None is single turns."""
    agent_func_path: str | None = None
    """Python file with an agent in OpenRLHF's form, its AgentExecutor, in the place of an environment."""

    @property
    def plays(self) -> bool:
        """Whether samples are episodes of several turns."""
        return self.agent is not None or self.agent_func_path is not None


@dataclass(frozen=True, kw_only=True)
class ThoughtConfig:
    """Budget forcing (s1, arXiv:2501.19393): a turn's thought is made longer or shorter than the policy would have it."""

    end: str = "</think>"
    """Text that ends the thought with which a turn begins."""
    continuations: int = 0
    """How many times a turn's thought is gone on with where the policy has ended it."""
    continue_with: str = "Wait"
    """What takes the place of a thought's end where it is gone on with; the policy has not written it."""
    min_tokens: int | None = None
    """A thought of so many tokens may end; None goes on with every one, agent.thought.continuations times."""
    max_tokens: int | None = None
    """Longest thought in tokens; a longer one is ended with agent.thought.end, and the turn goes on. None is any length."""

    @property
    def forces(self) -> bool:
        """Whether thoughts are other than the policy would have them."""
        return self.continuations > 0 or self.max_tokens is not None


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    options: JsonText | None = None
    """Arguments of the environment's class, as a JSON object."""
    max_turns: int = 6
    """Turns of the policy in an episode; each is of rollout.max_new_tokens at most, and all with the prompt of data.max_len."""
    max_images: int = 12
    """Images that the environment may show in an episode, beside those of the prompt."""
    prefix_caching: bool = True
    """Let the engines keep the keys and values of an episode's turns for its next one, as vllm.enable_prefix_caching does."""
    answer_s: float = 60.0
    """Seconds that the environment may take to answer a turn; beyond them the episode ends."""
    overturn: Literal["mask", "penalise", "keep"] = "mask"
    """What becomes of an episode that a limit ends: nothing is learnt from it and its group is compared without it, it
    pays agent.overturn_penalty, or it counts as any other."""
    overturn_penalty: float = 1.0
    """What such an episode pays with agent.overturn penalise."""
    last_turn_regex: str | None = None
    """What the last turn that agent.max_turns allows must match, an answer for example; the loss leaves it out."""
    thought: ThoughtConfig = field(default_factory=ThoughtConfig)
    """Budget forcing: the thought of each turn made longer, or shorter."""
    branches: int = 1
    """How many samples at a time of a group's rollout.n_samples_per_prompt have their first turns in common: one episode is
    played up to a turn, and as many go on from there. 1 plays all of them by themselves."""
    branch_turn: int | None = None
    """The first turn that the branches do not have in common, where 0 is the first of an episode; left out it is drawn: 1 with
    a chance of one half, or else 2, and so on."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig(SpeculationFlags):
    num_engines: int | None = None
    """vLLM engines; None takes as many as their share of the GPUs has room for; one on a CPU."""
    tensor_parallel_size: int = 1
    """GPUs per engine."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory that an engine takes; None is what the run's responses need, as far as there is room for it."""
    enable_sleep: bool | None = None
    """Free the engine's memory while training runs; needs train.colocate_all. None does so where that makes room that training
    needs."""
    enable_prefix_caching: bool = False
    """Keep the prompts' keys and values for later requests."""
    enforce_eager: bool | None = None
    """Use no CUDA graphs: quicker to start, slower to generate. None leaves them out for small models only."""
    sync_backend: str = "nccl"
    """How new weights travel to the engines."""
    sync_with_ray: bool = False
    """Send new weights through Ray."""

    @property
    def engines(self) -> int:
        assert self.num_engines is not None, "resolve_ppo fills it in"
        return self.num_engines

    @property
    def gpus(self) -> int:
        """Of all engines."""
        return self.engines * self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class PPODeepSpeedConfig(DeepSpeedConfig):
    enable_sleep: bool | None = None
    """Free the trainer's memory while responses are generated; None does so where the run would not fit otherwise."""
    value_head_prefix: str = "score"
    """Name of the value head in a critic or reward model."""


@dataclass(frozen=True, kw_only=True)
class PPOCheckpointConfig(CheckpointConfig):
    max_mem: float = float("inf")
    """GiB that all checkpoints may take."""
    max_restarts: int = 0
    """How many times a run that loses a worker, an engine or a machine goes on by itself from its last saved step."""
    best_metric_key: str = ""
    """Evaluation metric by which the best checkpoint is kept; empty takes the first pass@1, none keeps no best."""


@dataclass(frozen=True, kw_only=True)
class PPOEvalConfig(EvalConfig):
    temperature: float = 0.6
    """Sampling temperature in evaluation."""
    n_samples_per_prompt: int = 4
    """Responses per prompt in evaluation."""


@dataclass(frozen=True, kw_only=True)
class PPODataConfig(DataConfig):
    prompt_dataset: str | None = None
    """Row file or dataset with the prompts; several are separated by commas."""
    prompt_probs: str | None = None
    """Share of each prompt dataset, separated by commas."""
    prompt_split: str = "train"
    """Split of the prompt dataset."""
    max_samples: int = 100_000_000
    """Rows used at most."""
    max_images_per_prompt: int = 0
    """Most images that one prompt may hold; 0 counts them in the data."""
    curriculum: Literal["off", "easy_first", "uncertain"] = "off"
    """Order of the prompts by how many of their responses were right in the episodes before: off shuffles them, easy_first
    begins with those solved most often, uncertain takes those that are solved now and then more often, others less."""
    overlong_prompts: Literal["error", "skip"] = "skip"
    """What happens to a prompt that leaves no room for a response; none is ever cut."""


@dataclass(frozen=True, kw_only=True)
class PPOLoggerConfig(LoggerConfig):
    stage_name: str = "rl"
    """Name of this stage in stage.json and in the report."""
    rollouts_per_step: int = 8
    """Rollouts written to rollouts.jsonl, and sent to the trackers, per step: whole groups, as many as fit in, but one at
    least; 0 writes none."""
    worker_logs: bool = False
    """Show the output of Ray's workers in the terminal; without it, it is in Ray's session folder only."""
    wandb: WandbConfig = field(default_factory=lambda: named_after_the_minute("ppo", project="openrlhf_train_ppo"))
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of one reinforcement-learning stage."""

    first_help: ClassVar[FirstHelp] = FirstHelp(
        examples=(
            Example(
                what="GRPO on rows with answers, which the math verifier judges",
                arguments="--actor.model_name_or_path models/vlm-3b"
                " --data.prompt_dataset rows.jsonl --algo.advantage.estimator group_norm"
                " --rollout.n_samples_per_prompt 8 --ckpt.output_dir runs/grpo",
            ),
            Example(
                what="A reward of your own; policy, reference and engines take turns on the GPUs",
                arguments="--actor.model_name_or_path models/vlm-3b"
                " --data.prompt_dataset rows.jsonl --reward rewards.py --rollout.n_samples_per_prompt 8"
                " --train.colocate_all"
                " --ckpt.output_dir runs/own_reward",
            ),
            Example(
                what="The settings of a stage of LMM-R1, some of them changed",
                arguments="--config examples/scripts/lmm_r1/configs/fre_text.yaml"
                " --actor.model_name_or_path models/vlm-3b"
                " --data.prompt_dataset rows.jsonl --actor.adam.lr 5e-7 --ckpt.output_dir runs/fre",
            ),
        ),
        flags=(
            "actor.model_name_or_path",
            "data.prompt_dataset",
            "reward.remote_url",
            "ckpt.output_dir",
            "algo.advantage.estimator",
            "rollout.n_samples_per_prompt",
            "rollout.batch_size",
            "rollout.max_new_tokens",
            "train.batch_size",
            "actor.adam.lr",
        ),
    )

    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling."""
    data: PPODataConfig = field(default_factory=PPODataConfig)
    """Prompts."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Rewards."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    """The algorithm."""
    train: PPOTrainConfig = field(default_factory=PPOTrainConfig)
    """The training loop."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Episodes of several turns."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """The generation engines."""
    ds: PPODeepSpeedConfig = field(default_factory=PPODeepSpeedConfig)
    """DeepSpeed."""
    ref: RefConfig = field(default_factory=RefConfig)
    """The reference model."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic."""
    ckpt: PPOCheckpointConfig = field(default_factory=PPOCheckpointConfig)
    """What is written."""
    eval: PPOEvalConfig = field(default_factory=PPOEvalConfig)
    """Evaluation during training."""
    logger: PPOLoggerConfig = field(default_factory=PPOLoggerConfig)
    """Logs."""
    local_rank: int = -1
    """Set by launchers; -1 reads LOCAL_RANK."""
    use_ms: bool = False
    """Download models from ModelScope."""
