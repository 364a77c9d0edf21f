"""Settings that several commands share."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from typing import Literal, NewType

from lmm_r1.config.rows import RowsConfig
from lmm_r1.data.bad_rows import BadRows
from lmm_r1.errors import UserError

TrackerName = Literal["tensorboard", "wandb", "swanlab", "mlflow", "trackio"]
RUNS = "runs"
"""Where that is written which no flag names a place for."""
JsonText = NewType("JsonText", str)
"""A JSON object as text; in a YAML file it may stand as a mapping, too."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    lr: float = 0.02
    """Learning rate of the weight matrices that Muon updates."""
    momentum: float = 0.95
    """Muon's momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    nesterov: bool = True
    """Nesterov momentum."""


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW, or of what Muon leaves to AdamW."""
    vision_lr: float | None = None
    """Peak learning rate of the vision tower and its projector; None is the same as the rest."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two running means."""
    eps: float = 1e-8
    """AdamW's term against division by zero."""
    weight_decay: float = 0.0
    """Decoupled weight decay; biases and norms are left out."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    optim: Literal["adam", "muon", "adamw_8bit", "paged_adamw_8bit"] = "adam"
    """Optimizer: AdamW, or Muon for matrices with AdamW for the rest, or bitsandbytes' AdamW, whose moments take a byte each;
    paged, they may be in the host's memory."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Muon."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    """AdamW."""
    lr_scheduler: str = "cosine_with_min_lr"
    """Learning-rate schedule, by its name in transformers; constant has no warm-up."""
    lr_warmup_ratio: float = 0.03
    """Share of all updates over which the learning rate rises to its peak: n of them learn at 1/n, 2/n, ..., n/n of it."""
    min_lr_ratio: float = 0.1
    """Where the schedule ends, as a share of the peak."""
    max_norm: float = 1.0
    """Gradients are scaled down to this norm."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = 0
    """Rank of the LoRA adapters, which are merged into the saved model; 0 trains the weights themselves."""
    alpha: int = 16
    """Scale of the adapters: they add alpha / rank times their product."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linear layers of the language model that get an adapter, by name; all-linear takes all but the output layer."""
    dropout: float = 0.0
    """Dropout in front of the adapters."""
    use_dora: bool = False
    """DoRA: the adapters turn the rows of a weight, and the length of each row is trained by itself."""
    use_rslora: bool = False
    """rsLoRA: the adapters add alpha / sqrt(rank) times their product."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    zero_stage: int | None = None
    """ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 weights too; None is 2, or 3 where a run on several GPUs would not
    fit otherwise."""
    param_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Precision of the weights in training; None takes bf16, or fp32 on a CPU without bf16 instructions."""
    attn_implementation: str = "auto"
    """Attention in training; auto takes the fastest one installed that the model supports."""
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None = None
    """How a mixture of experts is computed; None leaves it to transformers."""
    adam_offload: bool | None = None
    """Keep the optimizer state in CPU memory; None does so where the run would not fit otherwise."""
    zpg: int = 1
    """ZeRO++ secondary partition: how many GPUs share one copy of the weights."""
    grad_accum_dtype: str = "fp32"
    """Precision in which the gradients of an update's passes are added up: fp32, or what ds.param_dtype is."""
    overlap_comm: bool = False
    """Overlap gradient exchange with the backward pass."""
    deepcompile: bool = False
    """Compile the model with DeepCompile."""
    use_universal_ckpt: bool = False
    """Resume from a DeepSpeed universal checkpoint, which fits any number of GPUs."""
    use_liger_kernel: bool = True
    """Use Liger's fused kernels for norms, feed-forward layers and rotary embeddings, on GPUs where they run."""
    tensor_parallel_size: int = 1
    """GPUs over which each layer is split in training."""
    packing_samples: bool = False
    """Train on rows without padding, each of which holds several samples."""
    ulysses_size: int = 1
    """GPUs over which the tokens of one row are split, with all of them exchanging attention heads (Ulysses)."""
    load_in_4bit: bool = False
    """Keep the language model under LoRA adapters in 4 bits (QLoRA: NF4, double quantization), here and in the models that
    are not trained; vision tower, projector and heads stay as they are."""
    image_cache_gib: float = 2.0
    """Host memory, per process of a model, for what a vision tower that is not trained has made of images, so that each goes
    through it once; 0 keeps nothing."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA: small adapters are trained, all other weights are frozen."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    output_dir: str = ""
    """Run folder: config, metrics, samples and the final model in Hugging Face format; left out, it is named after the
    stage: runs/sft, runs/rl."""
    path: str | None = None
    """Folder of the checkpoints that a stopped run continues from; None is checkpoints/ in output_dir."""
    save_steps: int = -1
    """Steps between two checkpoints; -1 leaves it to save_minutes."""
    save_minutes: float = 20.0
    """Minutes after which the next step is saved, beside those of save_steps; 0 saves by steps alone."""
    save_hf: bool = False
    """Write each checkpoint in Hugging Face format too."""
    disable_ds: bool = False
    """Write no DeepSpeed checkpoints; a stopped run can then not be continued."""
    max_num: int = 3
    """How many checkpoints are kept."""
    load_enable: bool = True
    """Continue from the newest checkpoint of this run if there is one."""
    overwrite: bool = False
    """Train anew in an output_dir that holds a run: its records and checkpoints are deleted first."""
    push_to_hub: str | None = None
    """Upload the trained model to this repository of the Hugging Face hub, OWNER/NAME, once the run is finished; a private
    one, where there is none yet."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    dataset: str | None = None
    """Row file or dataset to evaluate on during training."""
    split: str = "train"
    """Split of the evaluation dataset."""
    steps: int = -1
    """Steps between two evaluations; -1 is never in RL and once an epoch in supervised training."""
    before_training: bool = False
    """Evaluate before the first step, too: what the model knows that the run starts from."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    key: str | None = None
    """Weights & Biases API key, which turns the tracker on, too. Never written to the run folder."""
    org: str | None = None
    """Weights & Biases team."""
    group: str | None = None
    """Group under which the run is shown, in every tracker that has groups."""
    project: str
    """Project under which the run is shown."""
    run_name: str
    """Name of the run, in every tracker."""
    mode: Literal["online", "offline"] | None = None
    """Send to the server, or keep for `wandb sync`; None takes WANDB_MODE, else online."""


def named_after_the_minute(kind: str, *, project: str) -> WandbConfig:
    """Return the defaults of a run of `kind`, such as "ppo": it is named after when its flags are read, as in OpenRLHF."""
    return WandbConfig(project=project, run_name=f"{kind}_{datetime.now():%m%dT%H:%M}")


@dataclass(frozen=True, kw_only=True)
class SwanlabConfig:
    key: str | None = None
    """SwanLab API key, which turns the tracker on, too. Never written to the run folder."""
    workspace: str | None = None
    """SwanLab workspace; None is the user's own."""
    project: str | None = None
    """Project under which the run is shown; None takes logger.wandb.project."""
    mode: Literal["online", "offline", "local"] | None = None
    """Send to the server, keep for `swanlab sync`, or show here with swanboard; None takes SWANLAB_MODE, else online."""


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    tracking_uri: str | None = None
    """Address of the MLflow server or store, which turns the tracker on, too; None takes MLFLOW_TRACKING_URI."""
    experiment: str | None = None
    """Experiment under which the run is shown; None takes logger.wandb.project."""


@dataclass(frozen=True, kw_only=True)
class TrackioConfig:
    space_id: str | None = None
    """Hugging Face Space that shows the run, as OWNER/NAME, which turns the tracker on, too; None keeps it on this machine."""
    project: str | None = None
    """Project under which the run is shown; None takes logger.wandb.project."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    stage_name: str
    """Name of this stage in stage.json and in the report."""
    logging_steps: int = 1
    """Steps between two logged lines."""
    trackers: tuple[TrackerName, ...] = ()
    """Services that show the run, beside the console and metrics.jsonl."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard, which turns the tracker on, too; None is in the run folder."""
    wandb: WandbConfig
    """Weights & Biases."""
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    """SwanLab."""
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    """MLflow."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """Trackio."""


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    input_template: str | None = None
    """Text around a plain-text prompt, with {} in its place, which then goes to the model without its chat template."""
    apply_chat_template: bool = False
    """Give plain-text prompts to the chat template, as a user's turn; rows of messages always go there."""
    max_len: int = 2048
    """Longest sequence, in tokens: prompt, images and response together."""
    bad_rows: BadRows = "stop"
    """What becomes of rows that cannot be used or encoded, all of which are listed: they stop the run, or it goes on without
    them, says how many they are, and keeps their list in left_out_rows.jsonl."""
    dataloader_num_workers: int = 0
    """Processes that read and encode rows ahead of the step that learns from them; 0 does it between steps."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(SequenceConfig, RowsConfig):
    """Rows of prompts, and how long their sequences may be."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    micro_batch_size: int = 1
    """Samples in one forward and backward pass on one GPU."""
    batch_size: int = 0
    """Samples in one weight update, over all GPUs; 0 takes 128, or where that is less all samples of a step in RL, and
    else a fifth of the rows."""
    max_epochs: int = 1
    """Passes over the same samples: over each rollout in RL, over the data in supervised training."""
    seed: int = 42
    """Seed of everything random."""
    full_determinism_enable: bool = False
    """Trade speed for results that repeat bit by bit on the same machine."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint."""
    memory_check: Literal["refuse", "warn", "off"] = "refuse"
    """What becomes of a run that is predicted not to fit: refused, or begun with a warning; off predicts nothing."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A command line that works as it stands."""

    what: str
    """What it does, in a line."""
    arguments: str
    """What stands behind the command's name, as a shell reads it."""


@dataclass(frozen=True, kw_only=True)
class FirstHelp:
    """Three examples, and the ten flags that most runs give."""

    examples: tuple[Example, Example, Example]
    flags: tuple[str, ...]
    """Dotted names, in the order in which they are shown."""


# Of every trainer that learns from rows.
SUPERVISED_FLAGS = (
    *("model.model_name_or_path", "data.dataset", "data.max_len", "ckpt.output_dir", "adam.lr", "train.max_epochs"),
    *("train.batch_size", "eval.dataset"),
)


def supervised_help(*examples: Example, flags: tuple[str, str]) -> FirstHelp:
    """Return the first help of a trainer that learns from rows.

    Args:
        examples: three of them.
        flags: the two that matter in this trainer beside those of all.
    """
    first, second, third = examples
    return FirstHelp(examples=(first, second, third), flags=(*SUPERVISED_FLAGS, *flags))


SpeculativeMethod = Literal["ngram", "suffix"]


# vLLM's rejection sampler asserts it.
MOST_TOKENS = 128


# Tokens at the end that must stand elsewhere, too. vLLM's own 5 finds little in short responses, and 1 guesses at random.
LOOKUP = (2, 5)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How an engine guesses tokens, which the model then checks in one pass."""

    method: SpeculativeMethod
    tokens: int
    """Most that are guessed at a time."""


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    speculative_tokens: int = 0
    """Tokens that vLLM guesses ahead of each response, from what stands in its prompt and in itself already, and lets the
    model check in one pass; what is sampled has the same distribution. 0 guesses none."""
    speculative_method: SpeculativeMethod = "ngram"
    """What is guessed from: the last place of the response and its prompt that reads alike (ngram), or earlier responses,
    too (suffix, arXiv:2411.04975), for which the package arctic-inference is needed."""

    @property
    def speculation(self) -> Speculation | None:
        """How tokens are guessed; None where they are not."""
        if not self.speculative_tokens:
            return None
        return Speculation(method=self.speculative_method, tokens=self.speculative_tokens)


def check_speculation(flags: SpeculationFlags, *, prefix: str = "", other_engine: str | None = None) -> None:
    """Raise UserError where tokens cannot be guessed as the flags say.

    Args:
        prefix: what stands in front of the flags' names.
        other_engine: the flag and its value where something else than vLLM generates.
    """
    tokens, method = flags.speculative_tokens, flags.speculative_method
    given = f"--{prefix}speculative_tokens {tokens}"
    if not 0 <= tokens <= MOST_TOKENS:
        raise UserError(f"{given} must be between 0, which guesses none, and vLLM's most, {MOST_TOKENS}")
    if tokens == 0:
        if method != SpeculationFlags.speculative_method:
            raise UserError(
                f"--{prefix}speculative_method {method} says how tokens are guessed; give --{prefix}speculative_tokens, too"
            )
        return
    if other_engine is not None:
        raise UserError(f"{given} has vLLM guess tokens, and {other_engine} generates without it; leave it out")
    if method == "suffix" and find_spec("arctic_inference") is None:
        raise UserError(
            f"--{prefix}speculative_method suffix needs the package arctic-inference, which is not installed; run `pip "
            f"install arctic-inference==0.1.1`, or take --{prefix}speculative_method ngram"
        )
