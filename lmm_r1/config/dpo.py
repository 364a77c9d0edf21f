"""Every flag of `lmm-r1 train_dpo`: OpenRLHF's names, and a few of this project's own."""

from dataclasses import dataclass, field
from typing import ClassVar

from lmm_r1.config.first_help import Example, FirstHelp, supervised_help
from lmm_r1.config.shared import AdamConfig, EvalConfig, LoggerConfig, WandbConfig, named_after_the_minute
from lmm_r1.config.supervised import (
    SupervisedConfig,
    SupervisedDataConfig,
    SupervisedTrainConfig,
    TrainedModelConfig,
)


@dataclass(frozen=True, kw_only=True)
class DPOModelConfig(TrainedModelConfig):
    beta: float = 0.1
    """How closely the policy is held to the reference; a response's reward is beta times its log-ratio of the two."""
    label_smoothing: float = 0.0
    """Share of pairs that are taken to be the wrong way round (conservative DPO); below 0.5."""
    ipo_enable: bool = False
    """IPO: the difference of the two log-ratios is drawn to 1 / (2 beta) instead of growing without end."""
    simpo_enable: bool = False
    """SimPO: no reference model; rewards are beta times the mean log-prob per token, and are to differ by simpo_gamma."""
    simpo_gamma: float = 0.5
    """By how much SimPO's reward of the chosen response is to be the larger one."""
    mean_log_probs: bool = False
    """Take the mean log-prob per token of each response instead of the sum, as TRL's IPO does."""
    nll_loss_coef: float = 0.0
    """Weight of the chosen response's mean loss per token, which is added to each pair's loss."""


@dataclass(frozen=True, kw_only=True)
class DPORefConfig:
    model_name_or_path: str | None = None
    """The reference model, which stays as it is; None takes the model as it is before the first step."""
    offload: bool = False
    """Keep the reference model in CPU memory; needs --ds.zero_stage 3."""


@dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(SupervisedDataConfig):
    prompt_key: str | None = None
    """Column with the prompt, text or messages; None takes the format's, or what both conversations begin with."""
    chosen_key: str = "chosen"
    """Column with the better response: text, messages, or a whole conversation."""
    rejected_key: str = "rejected"
    """Column with the worse response, in the same form."""


@dataclass(frozen=True, kw_only=True)
class PreferenceTrainConfig(SupervisedTrainConfig):
    batch_size: int = 0
    """Pairs in one weight update, over all GPUs; 0 takes 128, or a fifth of the pairs where that is less."""
    micro_batch_size: int = 0
    """Pairs in one forward and backward pass on one GPU; 0 takes 8, or what divides a GPU's share of an update."""
    shared_prefix_enable: bool = True
    """Compute what the two responses of a pair have in common once: prompt, images, and how both begin."""


@dataclass(frozen=True, kw_only=True)
class DPOEvalConfig(EvalConfig):
    split: str = "test"
    """Split of the evaluation dataset."""


@dataclass(frozen=True, kw_only=True)
class DPOLoggerConfig(LoggerConfig):
    stage_name: str = "dpo"
    """Name of this stage in stage.json and in the report."""
    wandb: WandbConfig = field(default_factory=lambda: named_after_the_minute("exp", project="openrlhf_train_dpo"))
    """Weights & Biases."""


@dataclass(frozen=True, kw_only=True)
class ReferredConfig(SupervisedConfig):
    """Settings of one stage whose loss compares the policy with a model that stays as it is."""

    train: PreferenceTrainConfig = field(default_factory=PreferenceTrainConfig)
    """The training loop."""
    ref: DPORefConfig = field(default_factory=DPORefConfig)
    """The reference model."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss asks a reference at all."""
        return True

    @property
    def needs_reference_model(self) -> bool:
        """Whether a second model is loaded: not where the policy without its adapter is the reference."""
        return self.has_reference and not self.refers_to_base

    @property
    def refers_to_base(self) -> bool:
        """Whether the reference is the policy with its LoRA adapter switched off."""
        same = self.ref.model_name_or_path in (None, self.model.model_name_or_path)
        return self.has_reference and self.ds.lora.rank > 0 and same


@dataclass(frozen=True, kw_only=True)
class DPOConfig(ReferredConfig):
    """Settings of one stage that learns from pairs of responses."""

    first_help: ClassVar[FirstHelp] = supervised_help(
        Example(
            what="Learn from pairs of a chosen and a rejected response",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset pairs.jsonl --ckpt.output_dir runs/dpo",
        ),
        Example(
            what="Train adapters, for which no second model is loaded as reference",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset pairs.jsonl --ds.lora.rank 16 --ckpt.output_dir runs/lora",
        ),
        Example(
            what="SimPO, which has no reference",
            arguments="--model.model_name_or_path models/vlm-3b"
            " --data.dataset pairs.jsonl --model.simpo_enable --model.beta 2"
            " --ckpt.output_dir runs/simpo",
        ),
        flags=("model.beta", "ds.lora.rank"),
    )

    adam: AdamConfig = field(default_factory=lambda: AdamConfig(lr=1e-5))
    """AdamW."""
    model: DPOModelConfig = field(default_factory=DPOModelConfig)
    """The model and the loss."""
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    """Rows."""
    train: PreferenceTrainConfig = field(default_factory=PreferenceTrainConfig)
    """The training loop."""
    eval: DPOEvalConfig = field(default_factory=DPOEvalConfig)
    """Evaluation during training."""
    logger: DPOLoggerConfig = field(default_factory=DPOLoggerConfig)
    """Logs."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss asks a reference at all: SimPO does not."""
        return not self.model.simpo_enable
