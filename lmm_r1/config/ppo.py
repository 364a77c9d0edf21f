"""Every flag of `lmm-r1 train_ppo_ray`: OpenRLHF's names, and the flags that this project adds."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from lmm_r1.config.declared import Below, JsonText, Needs, Within
from lmm_r1.config.shared import (
    AdamConfig,
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    EvalConfig,
    FirstHelp,
    LoggerConfig,
    MuonConfig,
    OptimizerConfig,
    SpeculationFlags,
    ThoughtConfig,
    TrainConfig,
    TrainedModelConfig,
    WandbConfig,
    minute_name,
)
from lmm_r1.dotted import FIXED
from lmm_r1.files.user_code import UserFunction
from lmm_r1.quiet import is_verbose

MOST_PASS_TOKENS = 16192
"""Tokens of a training pass if `train.max_tokens_per_gpu` is not set; OpenRLHF's default."""
MOST_GPU_PASS_TOKENS = 65536
"""The same on a GPU with spare memory: larger passes are no faster per token."""

EstimatorName: TypeAlias = Literal[
    "gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce", "remax"
]
"""Each is the name of a function in `lmm_r1.rl.advantages`."""
# They compare a response with others to the same prompt, so a group of one has no advantage.
GROUP_ESTIMATORS: tuple[EstimatorName, ...] = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
PolicyLossName: TypeAlias = Literal["ppo", "gspo", "gspo_token", "cispo", "sapo"]
"""Each is the name of a function in `lmm_r1.rl.losses`."""
LossAggregation: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CONSTANT = "seq-mean-token-sum-norm"
CLIP_RANGES: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
    "sapo": (float("inf"), float("inf")),
}
"""How far ratios may be below and above 1 by default: the papers', for cispo ScaleRL's (arXiv:2510.13786)."""
FILTER_NAME = "experience_filter"
"""The function of `algo.experience_filter` if the flag names only a file."""
RequestField: TypeAlias = Literal["columns", "images", "step"]
"""What a reward request may hold in addition to OpenRLHF's keys."""

GPU_COUNTS = (
    *(f"{model}.num_{what}" for model in ("actor", "ref", "critic", "reward") for what in ("nodes", "gpus_per_node")),
    "vllm.num_engines",
)
"""The flags that set how many GPUs models and engines have."""


# What flags of a second copy of the weights need: with LoRA, the reference is the policy without its adapters.
WITH_KL = Needs("algo.kl.init_coef>0", warns=True)
SECOND_MODEL = Needs("ds.lora.rank=0", warns=True)


class PlacedModel:
    """A model that has GPUs of its own; `resolve_ppo` fills in counts that are None."""

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
        """GPUs on all machines."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class ActorConfig(OptimizerConfig, PlacedModel, TrainedModelConfig):
    num_nodes: Annotated[int | None, Within("[1, inf)")] = None
    """Machines that train the policy; None is computed from its GPUs."""
    num_gpus_per_node: Annotated[int | None, Within("[1, inf)")] = None
    """GPUs per machine that train the policy. None takes its share of all GPUs, or one rank on a CPU."""
    eps_clip: Annotated[float | None, Within("[0, inf)"), Needs(".policy_loss_type!=sapo")] = None
    """Clip range of ratios on both sides of 1; None is 0.2, and gspo's and cispo's own with these losses."""
    eps_clip_low_high: Annotated[tuple[float, float] | None, Within("[0, inf]")] = None
    """Clip range of ratios below and above 1; None takes eps_clip for both, or 3e-4 4e-4 with gspo, 1 4 with cispo."""
    dual_clip: Annotated[float | None, Within("(1, inf)"), Needs(".policy_loss_type=ppo|gspo|gspo_token")] = None
    """Bound on the loss if the advantage is negative (dual-clip PPO)."""
    policy_loss_type: PolicyLossName | UserFunction = "ppo"
    """ppo clips the probability ratio of each token; gspo clips one ratio per sequence, gspo_token with advantages per
    token; cispo weights log-probs by clipped ratios; sapo passes ratios through a smooth gate. FILE.py:NAME?clip=0.3 is
    a function of your own."""
    sapo_temperature_pos: Annotated[float, Within("(0, inf)"), Needs(".policy_loss_type=sapo")] = 1.0
    """How fast sapo's gate closes when the ratio leaves 1, for positive advantages."""
    sapo_temperature_neg: Annotated[float, Within("(0, inf)"), Needs(".policy_loss_type=sapo")] = 1.05
    """The same for advantages that are not positive."""
    loss_agg_mode: Annotated[
        LossAggregation,
        Needs(".policy_loss_type!=gspo|gspo_token", when=CONSTANT, because="its ratio is one for the whole sequence"),
    ] = "token-mean"
    """Mean over all tokens; mean over sequences of each sequence's token mean; or mean over sequences of each
    sequence's sum divided by loss_agg_length (Dr. GRPO). gspo has one ratio per sequence, so token-mean equals
    seq-mean-token-mean."""
    loss_agg_length: Annotated[int | None, Within("[1, inf)"), Needs(".loss_agg_mode=seq-mean-token-sum-norm")] = None
    """Divisor of each sequence's sum in seq-mean-token-sum-norm. None is rollout.max_new_tokens, or data.max_len if
    that is not set or the run plays episodes."""
    entropy_coef: Annotated[float | None, Within("(-inf, inf)")] = None
    """Weight of the entropy bonus. 0 only logs the entropy; None does neither."""


@dataclass(frozen=True, kw_only=True)
class CriticAdamConfig(AdamConfig):
    vision_lr: Annotated[float | None, FIXED] = None
    eps: Annotated[float, FIXED] = 1e-8


@dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimizerConfig, PlacedModel):
    full_lr: ClassVar[float] = 9e-6

    adam: Annotated[CriticAdamConfig, Needs("algo.advantage.estimator=gae", warns=True)] = field(
        default_factory=CriticAdamConfig
    )
    """AdamW."""
    muon: Annotated[MuonConfig, FIXED] = field(default_factory=MuonConfig)
    min_lr_ratio: Annotated[float, FIXED] = 0.1
    model_name_or_path: str | None = None
    """The model that the critic starts from; None takes the reward model if there is one, else the policy."""
    num_nodes: Annotated[int | None, Within("[1, inf)"), Needs("algo.advantage.estimator=gae", warns=True)] = None
    """Machines that train the critic; None is computed from its GPUs."""
    num_gpus_per_node: Annotated[int | None, Within("[1, inf)"), Needs("algo.advantage.estimator=gae", warns=True)] = (
        None
    )
    """GPUs per machine that train the critic. None takes its share of all GPUs, or one rank on a CPU."""
    value_clip: Annotated[float, Within("(0, inf)")] = 0.5
    """Clip range of the critic's values."""
    freezing_steps: Annotated[int, Within("[0, inf)", besides=(-1,))] = -1
    """Train only the critic up to and including this step, counted from 0; -1 trains both from the start."""
    save_value_network: bool = False
    """Save the critic as well, in the folder output_dir with the suffix _critic."""


@dataclass(frozen=True, kw_only=True)
class RefConfig(PlacedModel):
    num_nodes: Annotated[int | None, Within("[1, inf)"), WITH_KL, SECOND_MODEL] = None
    """Machines that hold the reference model; None is computed from its GPUs."""
    num_gpus_per_node: Annotated[int | None, Within("[1, inf)"), WITH_KL, SECOND_MODEL] = None
    """GPUs per machine that hold the reference model. None takes its share of all GPUs, or one rank on a CPU."""
    offload: Annotated[bool | None, WITH_KL, SECOND_MODEL, Needs("ds.zero_stage=3")] = None
    """Keep the reference model in CPU memory while it is not used; None does so only if the run would not fit
    otherwise."""


DEFAULT_VERIFIER = "math"
_BOUNDS_A_TURN = "it is for single responses; in episodes --rollout.max_new_tokens bounds a turn"
SERVED = Needs(
    "reward.model_name_or_path=None",
    because="a reward model scores only what is trained on; serve it with lmm-r1 serve_rm, and name --reward.remote_url",
)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(PlacedModel):
    remote_url: str | None = None
    """Where rewards come from: the address of a reward service's /get_reward, or several separated by commas; a reward
    function, FILE.py or FILE.py:NAME; a verifier that runs in the engines: math, list:unordered; or a weighted list of
    both: math=1,format=0.5,reward.py:length=0.1. None takes math, unless a reward model or an environment gives the rewards."""
    function_kwargs: JsonText | None = None
    """Additional arguments of the reward function, as a JSON object."""
    score_key: str | None = None
    """Key in the reward function's result that holds the score for pass@k and dynamic filtering; None takes the
    reward."""
    timeout_s: Annotated[float, Within("(0, inf)")] = 60.0
    """Seconds that one reward request may take."""
    deadline_s: Annotated[float, Within("(0, inf)")] = 300.0
    """Seconds during which a failing reward request is retried before the run stops. A reward function must score the
    responses to one prompt within this time."""
    request_fields: Annotated[tuple[RequestField, ...], Needs(".model_name_or_path=None")] = ()
    """What reward requests hold in addition to OpenRLHF's keys: the rows' other columns, their images, or the step.
    For servers of your own that read them."""
    model_name_or_path: Annotated[str | None, Needs(".remote_url=None", because="one of them gives the rewards")] = (
        None
    )
    """A trained reward model, instead of a reward service."""
    num_nodes: Annotated[int | None, Within("[1, inf)"), Needs(".model_name_or_path", warns=True)] = None
    """Machines that hold the reward model; None is computed from its GPUs."""
    num_gpus_per_node: Annotated[int | None, Within("[1, inf)"), Needs(".model_name_or_path", warns=True)] = None
    """GPUs per machine that hold the reward model. None takes its share of all GPUs, or one rank on a CPU."""
    offload: Annotated[bool, Needs(".model_name_or_path"), Needs("ds.zero_stage=3")] = False
    """Keep the reward model in CPU memory while it is not used."""
    part_weights: Annotated[
        JsonText | None, Needs(".model_name_or_path=None", because="its rewards have no parts")
    ] = None
    """Weights of named parts of the reward, constant or scheduled over steps, as a JSON object: {"format": 0.5,
    "tool_calls": {"from": 0.2, "to": 0, "steps": 100}}."""
    clip_range: Annotated[tuple[float, float], Within("[-inf, inf]", rising=True)] = (-10.0, 10.0)
    """Rewards are clipped to this range."""
    normalize_enable: Annotated[bool, Needs(".model_name_or_path")] = False
    """Normalize the rewards of a reward model by their running statistics."""
    overlong_buffer_len: Annotated[
        float | None,
        Within("(0, inf)"),
        Below("rollout.max_new_tokens or data.max_len", or_equal=True),
        Needs("train.agent=None", because=_BOUNDS_A_TURN),
        Needs("train.agent_func_path=None", because=_BOUNDS_A_TURN),
    ] = None
    """Penalize responses whose length comes within this many tokens of max_new_tokens; None has no penalty."""
    overlong_penalty_factor: Annotated[float, Within("[0, inf)"), Needs(".overlong_buffer_len")] = 1.0
    """Penalty for a response that fills the whole buffer."""
    stop_properly_penalty_coef: Annotated[float | None, Within("(-inf, 1]")] = None
    """For a response cut off at the length limit: 0 to 1 scales its reward, a negative number replaces it."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    estimator: Annotated[
        EstimatorName | UserFunction,
        Needs(
            "rollout.n_samples_per_prompt!=1",
            when="|".join(GROUP_ESTIMATORS),
            because="it compares the responses to one prompt",
        ),
        Needs("reward.model_name_or_path=None", when="remax", because=SERVED.because),
        Needs("train.agent_func_path=None", when="remax", because="OpenRLHF's executors play no greedy episodes"),
    ] = "reinforce_baseline"
    """How rewards become advantages. group_norm is GRPO, gae is PPO with a critic, and remax subtracts the reward of a
    greedy response. FILE.py:NAME is a function of your own."""
    gamma: Annotated[float, Within("[0, 1]")] = 1.0
    """Discount per token."""
    lambd: Annotated[float, Within("[0, 1]"), Needs(".estimator=gae")] = 1.0
    """GAE's lambda."""
    no_std_norm: Annotated[bool, Needs(".estimator=gae|reinforce|reinforce_baseline")] = False
    """Subtract the mean without dividing by the standard deviation."""
    is_correction_level: Literal["off", "token", "seq"] = "off"
    """Correct for different log-probs in vLLM and in training: off, by the ratio of each token, or by the geometric
    mean of the ratios of each sequence."""
    is_correction_mode: Annotated[
        Literal["mask", "clip"],
        Needs(".is_correction_level!=off"),
        Needs(".is_correction_gating=ratio", when="clip", because="a divergence cannot be held at a bound"),
    ] = "mask"
    """mask removes the gradient outside the thresholds and weights the tokens inside by their own ratios; clip weights
    all tokens by the ratio of the level, clipped to the thresholds."""
    is_correction_gating: Annotated[Literal["ratio", "binary_kl", "tv"], Needs(".is_correction_level!=off")] = "ratio"
    """What the thresholds bound: the probability ratio or a divergence."""
    is_correction_threshold: Annotated[
        tuple[float, ...], Within("[0, inf]", rising=True), Needs(".is_correction_level!=off")
    ] = (0.5, 5.0)
    """LOW HIGH, or HIGH only."""


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    init_coef: Annotated[float, Within("[0, inf)")] = 0.01
    """Weight of the KL penalty to the reference model; 0 loads no reference model."""
    target: Annotated[float | None, Within("(0, inf)"), Needs(".init_coef>0")] = None
    """KL that an adaptive weight steers to; None keeps the weight constant."""
    horizon: Annotated[int, Within("[1, inf)"), Needs(".target")] = 10000
    """Samples over which the adaptive weight changes."""
    estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Needs(".init_coef>0"),
        Needs(".use_loss=False or .unbiased_gradient", when="k1", warns=True),
        Needs(".use_loss", when="k2|k3", warns=True),
    ] = "k1"
    """Estimator of the KL: k1 as part of the reward, k2 or k3 as a loss."""
    use_loss: Annotated[bool, Needs(".init_coef>0")] = False
    """Add the KL to the loss, as in GRPO, instead of to the reward."""
    unbiased_gradient: Annotated[bool, Needs(".use_loss")] = False
    """With use_loss, use the exact gradient of the reverse KL with any estimator."""


@dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL penalty."""
    dynamic_filtering_enable: Annotated[
        bool, SERVED, Needs("rollout.n_samples_per_prompt!=1", because="it looks at a group's mean reward")
    ] = False
    """Drop prompts whose mean reward is outside dynamic_filtering_range and sample other prompts instead (DAPO)."""
    dynamic_filtering_range: Annotated[
        tuple[float, float], Within("[-inf, inf]", rising=True), Needs(".dynamic_filtering_enable", warns=True)
    ] = (0.0, 1.0)
    """Keep mean rewards strictly between these two numbers."""
    dynamic_filtering_part: Annotated[str | None, Needs(".dynamic_filtering_enable")] = None
    """Part of the reward whose mean must be in the range, for example accuracy; None is the score."""
    dynamic_filtering_min_std: Annotated[float | None, Within("(0, inf)"), Needs(".dynamic_filtering_enable")] = None
    """Also drop groups whose rewards have a lower standard deviation; None has no such bound."""
    dynamic_filtering_max_batches: Annotated[
        int, Within("[0, inf)"), Needs(".dynamic_filtering_enable or .experience_filter")
    ] = 0
    """Stop the run if a step needs more prompts than this many times rollout.batch_size. 0 stops only if a whole
    episode leaves no group."""
    experience_filter: Annotated[str | None, SERVED] = None
    """Your own function, FILE.py or FILE.py:FUNCTION, which gets the samples of a group and selects those that are
    trained on. A group without any is replaced."""
    mismatch_limit: Annotated[float | None, Within("(0, inf]")] = None
    """Stop the run if the mean log-prob difference per token between vLLM and training exceeds this in a step; None is
    0.01 in fp32 and 0.1 in half precision."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    batch_size: Annotated[int, Within("[0, inf)")] = 0
    """Prompts per step; 0 takes a fifth of the rows, at most 1024."""
    n_samples_per_prompt: Annotated[int, Within("[0, inf)")] = 0
    """Responses per prompt: the size of a group. 0 takes 8 if the estimator compares them, else 1."""
    max_new_tokens: Annotated[int | None, Within("[1, inf)")] = None
    """Longest response in tokens; None is whatever the prompt leaves of data.max_len."""
    temperature: Annotated[float, Within("(0, inf)")] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Within("(0, 1]")] = 1.0
    """Nucleus sampling: sample from the likeliest tokens that have this probability together."""
    top_k: Annotated[int, Within("[1, inf)", besides=(-1,))] = -1
    """Number of likeliest tokens that are sampled from; -1 takes all."""
    ignore_eos: bool = False
    """Generate max_new_tokens for every response and ignore end tokens; for speed measurements."""
    micro_batch_size: Annotated[int, Within("[1, inf)"), Needs("train.dynamic_batch_enable=False", warns=True)] = 1
    """Samples in one forward pass for log-probs on one GPU; rounded up to whole groups with shared prefixes."""
    vllm_generate_batch_size: Annotated[int | None, Within("[1, inf)"), Below(".batch_size", or_equal=True)] = None
    """Maximum number of prompts in all engines at one time; None is batch_size."""
    max_tokens_per_gpu: Annotated[
        int | None, Within("[1, inf)"), Needs("train.dynamic_batch_enable or train.shared_prefix_enable", warns=True)
    ] = None
    """Tokens in one forward pass with dynamic batches or shared prefixes. None is train.max_tokens_per_gpu, and on
    GPUs what fits."""


_SINGLE_TURNS = "a reward model scores single turns"


@dataclass(frozen=True, kw_only=True)
class PPOTrainConfig(TrainConfig):
    micro_batch_size: Annotated[int, Within("[1, inf)"), Needs(".dynamic_batch_enable=False", warns=True)] = 1
    """Samples in one forward and backward pass on one GPU; rounded up to whole groups with shared prefixes."""
    num_episodes: Annotated[int, Within("[1, inf)")] = 1
    """Passes over the prompts."""
    max_steps: Annotated[int, Within("[1, inf)", besides=(-1,))] = -1
    """Stop after this many steps; -1 runs all episodes."""
    colocate_all: bool | None = None
    """Policy, reference model and vLLM engines take turns on the same GPUs. None does so if a machine has too few
    GPUs, or too little memory, for separate groups."""
    colocate_actor_ref: Annotated[bool, WITH_KL, SECOND_MODEL] = False
    """Put policy and reference model on the same GPUs."""
    colocate_critic_reward: bool = False
    """Put critic and reward model on the same GPUs."""
    dynamic_batch_enable: bool = False
    """Fill batches by tokens instead of samples; turns ds.packing_samples on."""
    max_tokens_per_gpu: Annotated[
        int | None, Within("[1, inf)"), Needs(".dynamic_batch_enable or .shared_prefix_enable", warns=True)
    ] = None
    """Tokens in one training pass with dynamic batches or shared prefixes. None is what fits, at most 65536; 16192
    without a GPU."""
    shared_prefix_enable: bool = True
    """Compute the prompt and images of a group once for all its responses, in packed sequences."""
    enable_ema: Annotated[
        bool, Needs("ds.zero_stage!=0", because="DeepSpeed keeps no weights in single precision to average")
    ] = False
    """Keep a moving average of the policy's weights and save it as a model in the folder ema of output_dir."""
    ema_beta: Annotated[float, Within("(0, 1)"), Needs(".enable_ema")] = 0.992
    """Weight of the previous moving average in each update."""
    async_enable: Annotated[
        bool,
        Needs(".colocate_all=False|None", because="engines and policy would take turns on the same GPUs"),
        Needs("ds.enable_sleep=False|None", because="responses are generated all the time"),
    ] = False
    """Generate the next rollouts while the policy is updated, on separate GPUs or cores. Samples then come from older
    weights than the policy's."""
    async_queue_size: Annotated[int, Within("[1, inf)"), Needs(".async_enable")] = 1
    """Rollouts that may be generated ahead; also the maximum staleness of a sample's weights, in updates."""
    partial_rollout_enable: Annotated[bool, Needs(".async_enable")] = False
    """Continue responses with the new weights after a weight update; otherwise an update waits until all responses are
    finished."""
    agent: Annotated[str | None, Needs("reward.model_name_or_path=None", because=_SINGLE_TURNS)] = None
    """An environment that answers the policy's turns: one by name, or FILE.py:CLASS of your own. None has single
    turns."""
    agent_func_path: Annotated[
        str | None,
        Needs(".agent=None", because="one of them plays the episodes"),
        Needs("reward.model_name_or_path=None", because=_SINGLE_TURNS),
    ] = None
    """Python file with an AgentExecutor as in OpenRLHF, instead of an environment."""

    @property
    def plays(self) -> bool:
        """Whether samples are episodes of several turns."""
        return self.agent is not None or self.agent_func_path is not None


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    options: Annotated[
        JsonText | None, Needs("train.agent_func_path=None", because="a file in OpenRLHF's form takes no options")
    ] = None
    """Arguments of the environment's class, as a JSON object."""
    max_turns: Annotated[int, Within("[1, inf)")] = 6
    """Maximum number of the policy's turns in an episode. Each turn has at most rollout.max_new_tokens, and prompt and
    turns together at most data.max_len."""
    max_images: Annotated[int, Within("[0, inf)")] = 12
    """Images that the environment may show in an episode, in addition to those of the prompt."""
    answer_s: Annotated[float, Within("(0, inf)")] = 60.0
    """Seconds that the environment may take to answer a turn; after that the episode ends."""
    overturn: Literal["mask", "penalise", "keep"] = "mask"
    """What to do with an episode that a limit ends: mask leaves it out of the loss and of its group, penalise
    subtracts 1 from its reward, keep treats it like any other."""
    overturn_penalty: Annotated[float, FIXED] = 1.0
    thought: ThoughtConfig = field(default_factory=ThoughtConfig)
    """Budget forcing: longer or shorter thoughts."""
    branches: Annotated[int, Within("[1, inf)"), Needs(".max_turns>1")] = 1
    """Number of a group's samples that share their first turns: one episode is played up to a turn and continues as
    this many samples. 1 plays each sample separately."""
    branch_turn: Annotated[int | None, Within("[1, inf)"), Needs(".branches>1"), Below(".max_turns")] = None
    """First turn that the branches do not share, counted from 0. None draws it: 1 with probability 1/2, 2 with 1/4, and
    so on."""


@dataclass(frozen=True, kw_only=True)
class VllmConfig(SpeculationFlags):
    num_engines: Annotated[int | None, Within("[1, inf)")] = None
    """vLLM engines; None takes as many as fit on their share of the GPUs, or one on a CPU."""
    tensor_parallel_size: Annotated[int, Within("[1, inf)")] = 1
    """GPUs per engine."""
    gpu_memory_utilization: Annotated[float | None, Within("(0, 1]")] = None
    """Share of a GPU's memory for an engine; None is what the run's responses need, if there is room."""
    enable_sleep: bool | None = None
    """Free the engine's memory during training; needs train.colocate_all. None does so if training needs the
    memory."""
    enable_prefix_caching: bool | None = None
    """Keep the keys and values of prompts for later requests. None does so in episodes, for the next turn."""
    enforce_eager: bool | None = None
    """Use no CUDA graphs: faster to start, slower to generate. None uses none for small models."""
    sync_with_ray: Annotated[bool, Needs("train.colocate_all=False|None", warns=True)] = False
    """Send new weights to the engines through Ray instead of NCCL."""

    @property
    def engines(self) -> int:
        assert self.num_engines is not None, "resolve_ppo fills it in"
        return self.num_engines

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.engines * self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class PPODeepSpeedConfig(DeepSpeedConfig):
    enable_sleep: Annotated[bool | None, Needs(".zero_stage!=0")] = None
    """Free the trainer's memory during generation; None does so only if the run would not fit otherwise."""
    value_head_prefix: Annotated[str, Needs("critic.model_name_or_path or reward.model_name_or_path")] = "score"
    """Name of the value head in a critic or reward model."""


@dataclass(frozen=True, kw_only=True)
class PPOCheckpointConfig(CheckpointConfig):
    max_mem: Annotated[float, Within("(0, inf]")] = float("inf")
    """Maximum size of all checkpoints in GiB."""
    best_metric_key: Annotated[str, Needs("eval.dataset or .best_metric_key=none")] = ""
    """Evaluation metric by which the best checkpoint is kept. Empty takes the first pass@1; none keeps no best
    checkpoint."""


@dataclass(frozen=True, kw_only=True)
class PPOEvalConfig(EvalConfig):
    dataset: Annotated[
        str | None, SERVED, Needs(".steps>0 or .before_training", because="it is never evaluated on")
    ] = None
    """Row file or dataset to evaluate on during training; separate several by commas."""
    temperature: Annotated[float, Within("[0, inf)"), Needs(".dataset", warns=True)] = 0.6
    """Sampling temperature in evaluation."""
    top_p: Annotated[float, Within("(0, 1]"), Needs(".dataset", warns=True)] = 1.0
    """As rollout.top_p, in evaluation."""
    top_k: Annotated[int, Within("[1, inf)", besides=(-1,)), Needs(".dataset", warns=True)] = -1
    """As rollout.top_k, in evaluation."""
    n_samples_per_prompt: Annotated[int, Within("[1, inf)"), Needs(".dataset", warns=True)] = 4
    """Responses per prompt in evaluation."""


@dataclass(frozen=True, kw_only=True)
class PPODataConfig(DataConfig):
    prompt_dataset: str | None = None
    """Row file or dataset with the prompts; separate several by commas."""
    prompt_probs: str | None = None
    """Share of each prompt dataset, separated by commas."""
    prompt_split: str = "train"
    """Split of the prompt dataset."""
    max_samples: Annotated[int, Within("[1, inf)")] = 100_000_000
    """Maximum number of rows."""
    max_images_per_prompt: Annotated[int, Within("[0, inf)")] = 0
    """Maximum number of images in one prompt; 0 counts them in the data."""
    overlong_prompts: Literal["error", "skip"] = "skip"
    """What to do with a prompt that leaves no room for a response; prompts are never cut."""


@dataclass(frozen=True, kw_only=True)
class PPOLoggerConfig(LoggerConfig):
    stage_name: str = "rl"
    """Name of this stage in stage.json and in the report."""
    rollouts_per_step: Annotated[int, Within("[0, inf)")] = 8
    """Rollouts written to rollouts.jsonl and sent to the trackers per step, in whole groups and at least one; 0 writes
    none."""
    wandb: WandbConfig = field(
        default_factory=lambda: WandbConfig(project="openrlhf_train_ppo", run_name=minute_name("ppo"))
    )
    """Weights & Biases."""

    @property
    def worker_logs(self) -> bool:
        """Whether the terminal shows the output of Ray's workers, which is always in Ray's session folder."""
        return is_verbose()


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of one reinforcement-learning stage."""

    first_help: ClassVar[FirstHelp] = FirstHelp(
        text="""
        # GRPO on rows with answers, which the math verifier judges
        --actor.model_name_or_path models/vlm-3b --data.prompt_dataset rows.jsonl --algo.advantage.estimator group_norm
        --ckpt.output_dir runs/grpo
        # A reward of your own; policy, reference and engines take turns on the GPUs
        --actor.model_name_or_path models/vlm-3b --data.prompt_dataset rows.jsonl --reward rewards.py
        --train.colocate_all --ckpt.output_dir runs/own
        # The settings of a stage of LMM-R1, some of them changed
        --config examples/scripts/lmm_r1/configs/fre_text.yaml --actor.model_name_or_path models/vlm-3b
        --data.prompt_dataset rows.jsonl --actor.adam.lr 5e-7
        """,
        flags="actor.model_name_or_path data.prompt_dataset reward.remote_url eval.dataset train.num_episodes "
        "rollout.n_samples_per_prompt rollout.max_new_tokens data.max_len actor.adam.lr ds.lora.rank",
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
    agent: Annotated[AgentConfig, Needs("train.agent or train.agent_func_path")] = field(default_factory=AgentConfig)
    """Episodes of several turns."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """The generation engines."""
    ds: PPODeepSpeedConfig = field(default_factory=PPODeepSpeedConfig)
    """DeepSpeed."""
    ref: Annotated[RefConfig, Needs("algo.kl.init_coef>0")] = field(default_factory=RefConfig)
    """The reference model."""
    critic: Annotated[CriticConfig, Needs("algo.advantage.estimator=gae")] = field(default_factory=CriticConfig)
    """The critic."""
    ckpt: PPOCheckpointConfig = field(default_factory=PPOCheckpointConfig)
    """Checkpoints and output."""
    eval: PPOEvalConfig = field(default_factory=PPOEvalConfig)
    """Evaluation during training."""
    logger: PPOLoggerConfig = field(default_factory=PPOLoggerConfig)
    """Logs."""
    local_rank: Annotated[int, FIXED] = -1

    @property
    def placed(self) -> dict[str, PlacedModel]:
        """The models of the run by their groups of flags, the policy first."""
        found: dict[str, PlacedModel] = {"actor": self.actor}
        if self.needs_reference_model:
            found["ref"] = self.ref
        if self.critic.model_name_or_path:
            found["critic"] = self.critic
        if self.reward.model_name_or_path:
            found["reward"] = self.reward
        return found

    @property
    def refers_to_base(self) -> bool:
        """Whether the reference is the policy with its LoRA adapters switched off."""
        return self.algo.kl.init_coef > 0 and self.ds.lora.rank > 0

    @property
    def needs_reference_model(self) -> bool:
        """Whether a second model is loaded as reference."""
        return self.algo.kl.init_coef > 0 and not self.refers_to_base
