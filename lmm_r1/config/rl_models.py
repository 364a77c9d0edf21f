"""The flags of the models of an RL run: policy, reference, critic and rewards."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from lmm_r1.config.declared import Below, JsonText, Needs, Within
from lmm_r1.config.shared import AdamConfig, MuonConfig, OptimizerConfig, TrainedModelConfig
from lmm_r1.dotted import FIXED
from lmm_r1.files.user_code import UserFunction

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
    *(
        f"{model}.{count}"
        for model in ("actor", "ref", "critic", "reward")
        for count in ("num_nodes", "num_gpus_per_node")
    ),
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
