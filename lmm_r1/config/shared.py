"""Settings that several commands share: models, optimizers, rows, checkpoints, trackers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from lmm_r1.config.declared import Below, Needs, Within
from lmm_r1.data.messages import NO_PROMPT, BadRows
from lmm_r1.dotted import FIXED
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import UserFunction

# A value with one of these suffixes and without a blank is a file name, not a text.
_TEXT_FILES = (".txt", ".md", ".jinja", ".jinja2", ".j2")
IMAGES = "images"
FormatName: TypeAlias = Literal["lmm_r1", "r1_vlm", "mini_o3_cold_start", "sharegpt", "verl", "flat", "pairs"]


@dataclass(frozen=True, kw_only=True)
class RowReadingConfig:
    """How rows of any kind are read; each command has its own flags for the columns of prompts and answers."""

    format: FormatName | UserFunction | None = None
    """Format of the rows, or FILE.py with a function `read_row` from a record to the columns of lmm_r1; None detects it
    from the columns of each file."""
    image_key: str = IMAGES
    """Column with the images of `<image>` tags and of image parts without a source. If it is left at `images`, a
    format with another column uses its own."""
    datasource_key: str | None = None
    """Column whose values group the metrics; None takes the format's: `datasource` or `data_source`."""
    image_dir: str | None = None
    """Folder that relative paths of images and videos start from; None is the folder of the row file. Rows of a
    downloaded dataset read files only below it and below the dataset's own folder."""
    min_pixels: Annotated[int | None, Within("[1, inf)")] = None
    """Scale smaller images and video frames up to this many pixels; a value in the row has precedence."""
    max_pixels: Annotated[int | None, Within("[1, inf)")] = None
    """Scale larger images and video frames down to this many pixels; a value in the row has precedence."""
    system_prompt: Literal["none", "think", "think_box"] | str | None = None
    """System turn of every row, as text or the name of a text file; replaces the row's own. think and think_box are
    shipped texts for prompts without a system turn; none adds nothing. By default, evaluation
    and batch inference take that of the run which trained the model; without one, they and RL take the shipped text for
    the format that the verifier pays."""
    prompt_template: str | None = None
    """Jinja template of the last user turn, as text or the name of a text file. It gets the turn's text as `content`,
    with `<image>` for each image, and the row's columns by name."""


@dataclass(frozen=True, kw_only=True)
class RowsConfig(RowReadingConfig):
    input_key: str | None = None
    """Column with the prompt: messages or text. Without a format, it is read as one of this project's own rows. None
    takes the column of the format: `message` or `messages` in this project's own."""
    label_key: str | None = None
    """Column with the right answer; None takes the format's, `answer` or `solution`."""


OWN_ENGINE = Needs("!endpoint or checkpoints", because="an endpoint has an engine of its own")
"""What flags of an engine need in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class OverlongFlags:
    overlong_images: Annotated[Literal["scale", "keep"], OWN_ENGINE] = "scale"
    """What to do with images by which a prompt is too long: scale them down until it leaves room for a response, or
    keep them as they are. Only for kits that count an image's tokens by its size, and not in episodes."""


def refuse_row_flags(config: RowsConfig, *, because: str, prefix: str = "--") -> None:
    """Raise UserError for the first of these flags that is set although no rows are read."""
    given = [own.name for own in fields(RowsConfig) if getattr(config, own.name) not in (own.default, NO_PROMPT)]
    if given:
        raise UserError(f"{prefix}{given[0]} {getattr(config, given[0])}: {because}; leave it out")


def text_given(value: str | None, *, flag: str) -> str | None:
    """Return a flag's text, or that of the file it names; raises UserError for an empty one, or none that can be read."""
    if value is None:
        return None
    looks_like_file = value.endswith(_TEXT_FILES) and not any(character.isspace() for character in value)
    if looks_like_file:
        try:
            value = Path(value).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"{flag} {value}: cannot be read ({error.strerror}); check the path") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{flag} {value}: not UTF-8 text ({error})") from error
    if not value.strip():
        raise UserError(f"{flag} is empty; write a text, or leave it out")
    return value.strip()


TrackerName = Literal["tensorboard", "wandb"]
RUNS = "runs"
"""The folder for output that no flag names a place for."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    lr: Annotated[float, Within("[0, inf)"), Needs("..optim=muon")] = 0.02
    """Learning rate of the weight matrices that Muon updates."""
    momentum: Annotated[float, FIXED] = 0.95
    """Muon's momentum."""


@dataclass(frozen=True, kw_only=True)
class AdamConfig:
    lr: Annotated[float | None, Within("[0, inf)")] = None
    """Peak learning rate of AdamW, including for the weights that Muon leaves to AdamW. None is 1e-6; 5e-6 in SFT and
    distillation, 9e-6 for critics and in train_rm, 1e-5 in DPO; with LoRA ten times that."""
    vision_lr: Annotated[float | None, Within("[0, inf)"), Needs("..optim!=muon")] = None
    """Peak learning rate of the vision tower and its projector; None is the same as for other weights."""
    betas: Annotated[tuple[float, float], Within("[0, 1)")] = (0.9, 0.95)
    """Decay rates of AdamW's two running averages."""
    eps: Annotated[float, Within("[0, inf)")] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Within("[0, inf)")] = 0.0
    """Decoupled weight decay, except for biases and norms."""


# Why flags exclude each other.
ONE_TEMPLATE = Needs(".apply_chat_template=False", because="both write the text around a prompt")
PROMPT_COLUMN = Needs(
    ".output_key or .prompt_key or .prompt_dataset", because="the text is for a prompt in a column of its own"
)
_FOUR_BITS = "a layer in 4 bits cannot be split"
_VALUE_HEAD = "it would split the value head"
_Cosine: TypeAlias = Literal["cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr"]
Schedule: TypeAlias = Literal["constant", "constant_with_warmup", "linear", _Cosine, "inverse_sqrt", "polynomial"]
"""Transformers' schedules that need only the number of updates."""
EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
_IN_8_BITS = "|".join(EIGHT_BIT)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    full_lr: ClassVar[float] = 1e-6
    """What adam.lr is if it is open and all weights are trained."""

    optim: Annotated[
        Literal["adam", "muon", "adamw_8bit", "paged_adamw_8bit"],
        Needs("ds.adam_offload=False|None", when=_IN_8_BITS, because="DeepSpeed offloads only its own AdamW"),
        Needs("ds.zero_stage!=0", when=_IN_8_BITS, because="DeepSpeed keeps these states in ZeRO's optimizers only"),
        Needs(
            "ds.enable_sleep=False|None",
            when="paged_adamw_8bit",
            because="DeepSpeed moves no paged states to host memory; adamw_8bit can be moved",
        ),
        Needs("ds.param_dtype!=fp16", when="muon", because="Muon's updates would be divided by the loss scale"),
    ] = "adam"
    """AdamW; Muon for matrices and AdamW for other weights; or AdamW of bitsandbytes, whose moments take one byte each
    and, if paged, may move to host memory."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Muon."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    """AdamW."""
    lr_scheduler: Annotated[
        Schedule, Needs(".adam.lr>1e-7 or .adam.lr=None", when="polynomial", because="the schedule ends at 1e-07")
    ] = "cosine_with_min_lr"
    """Learning-rate schedule, by its name in transformers; constant has no warm-up."""
    lr_warmup_ratio: Annotated[float, Within("[0, 1]"), Needs(".lr_scheduler!=constant or .lr_warmup_ratio=0.0")] = (
        0.03
    )
    """Share of all updates in which the learning rate rises to its peak: n of them have 1/n, 2/n, ..., n/n of it."""
    min_lr_ratio: Annotated[
        float, Within("[0, 1]"), Needs(".lr_scheduler=cosine_with_min_lr|cosine_warmup_with_min_lr")
    ] = 0.1
    """Final learning rate of the schedule, as a share of the peak."""
    max_norm: Annotated[float, Within("[0, inf)")] = 1.0
    """Gradients are clipped to this norm."""


LORA_LR_FACTOR = 10
"""Learning rate of adapters in multiples of that of all weights (Schulman et al., LoRA Without Regret, 2025)."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: Annotated[int, Within("[0, inf)")] = 0
    """Rank of the LoRA adapters, which are merged into the saved model; 0 trains the weights themselves."""
    alpha: Annotated[int | None, Within("[1, inf)"), Needs(".rank", warns=True)] = None
    """Scale of the adapters: they add alpha / rank times their product. None is twice the rank, with rsLoRA twice
    its root."""
    target_modules: Annotated[tuple[str, ...], Needs(".rank")] = ("all-linear",)
    """Linear layers of the language model that get an adapter, by name; all-linear is all except the output layer."""
    dropout: Annotated[float, Within("[0, 1)"), Needs(".rank")] = 0.0
    """Dropout before the adapters."""
    use_rslora: Annotated[bool, Needs(".rank")] = False
    """rsLoRA: the adapters add alpha / sqrt(rank) times their product."""

    @property
    def used_alpha(self) -> int:
        """The alpha of the adapters, named or not."""
        own = round(2 * (math.sqrt(self.rank) if self.use_rslora else self.rank))
        return own if self.alpha is None else self.alpha


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    zero_stage: Annotated[int | None, Within("[0, 3]")] = None
    """ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights. None is 2, or 3 if a run on several GPUs
    would not fit otherwise."""
    param_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Precision of the weights in training; None is bf16, or fp32 on a CPU without bf16 instructions."""
    attn_implementation: str = "auto"
    """Attention in training; auto takes the fastest installed implementation that the model supports."""
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "deepgemm"] | None = None
    """How a mixture of experts is computed; None leaves it to transformers."""
    adam_offload: bool | None = None
    """Keep the optimizer state in CPU memory; None does so only if the run would not fit otherwise."""
    zpg: Annotated[int, Within("[1, inf)"), Needs(".zero_stage=3")] = 1
    """ZeRO++ secondary partition: number of GPUs that share one copy of the weights."""
    grad_accum_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Needs(".param_dtype=bf16", when="bf16", because="only fp32 may differ from the precision of the weights"),
        Needs(".param_dtype=fp16", when="fp16", because="only fp32 may differ from the precision of the weights"),
    ] = "fp32"
    """Precision in which gradients are accumulated: fp32, or the same as ds.param_dtype."""
    overlap_comm: Annotated[bool, Needs(".zero_stage!=0")] = False
    """Overlap gradient communication with the backward pass."""
    deepcompile: Annotated[bool, FIXED] = False
    """Compile the model with DeepCompile."""
    use_universal_ckpt: Annotated[bool, FIXED] = False
    """Load a checkpoint weight by weight, as is done if the number of GPUs or the ZeRO stage has changed."""
    use_liger_kernel: bool = True
    """Use Liger's fused kernels for norms, feed-forward layers and rotary embeddings on GPUs that support them."""
    tensor_parallel_size: Annotated[
        int,
        Within("[1, inf)"),
        Needs("algo.advantage.estimator!=gae", because=_VALUE_HEAD),
        Needs("reward.model_name_or_path=None", because=_VALUE_HEAD),
        Needs(
            "teacher.model_name_or_path=None",
            because="it would split the layers that are compared; take --ds.zero_stage 3",
        ),
    ] = 1
    """GPUs over which each layer is split in training."""
    packing_samples: bool = False
    """Train on packed sequences without padding."""
    ulysses_size: Annotated[
        int, Within("[1, inf)"), Needs(".tensor_parallel_size=1", because="both take the attention heads apart")
    ] = 1
    """GPUs over which each packed sequence is split by exchanging attention heads (Ulysses)."""
    load_in_4bit: Annotated[
        bool,
        Needs(".lora.rank"),
        Needs(".zero_stage!=3", because="weights in 4 bits cannot be sharded; with ZeRO 2 each GPU has all of them"),
        Needs(".tensor_parallel_size=1", because=_FOUR_BITS),
    ] = False
    """Keep the language model under LoRA adapters in 4 bits (QLoRA: NF4 with double quantization), in trained and
    frozen models. Vision tower, projector and heads keep their precision."""
    image_cache_gib: Annotated[float, FIXED] = 2.0
    """Host memory per model for the output of a frozen vision tower, so that each image is encoded once; 0
    caches nothing."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA: train small adapters and freeze all other weights."""


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    model_name_or_path: str | None = None
    """The model to train: a folder or a name on the Hugging Face Hub."""
    gradient_checkpointing_enable: bool | None = None
    """Recompute activations in the backward pass to save memory. None recomputes as few layers as the GPU's memory
    requires, and on a CPU only if the run would not fit otherwise."""
    gradient_checkpointing_layers: Annotated[
        int | None, Within("[1, inf)"), Needs(".gradient_checkpointing_enable")
    ] = None
    """Number of language-model layers that are recomputed, from the first. None is all layers, or is chosen together
    with the flag above."""
    gradient_checkpointing_reentrant: Annotated[bool, Needs(".gradient_checkpointing_enable=True|None")] = False
    """Use PyTorch's reentrant checkpointing."""
    aux_loss_coef: Annotated[
        float,
        Within("[0, inf)"),
        Needs(
            ".gradient_checkpointing_reentrant=False",
            because="no gradient of the load-balancing loss would reach the routers",
        ),
    ] = 0.0
    """Weight of the load-balancing loss of a mixture of experts."""
    freeze_visual_encoder: bool = False
    """Freeze the vision tower and its projector, in RL also the critic's, and train only the language model."""
    freeze_prefix: tuple[str, ...] = ()
    """Freeze weights, in RL also the critic's, whose names begin with one of these: `model.visual. lm_head.`."""


@dataclass(frozen=True, kw_only=True)
class ThoughtConfig:
    """Budget forcing (s1, arXiv:2501.19393): make the thought of a turn longer or shorter."""

    end: Annotated[str, FIXED] = "</think>"
    """Text that ends the thought at the beginning of a turn."""
    continuations: Annotated[int, Within("[0, inf)")] = 0
    """How often a thought that the policy has ended is continued."""
    continue_with: Annotated[str, FIXED] = "Wait"
    """Text that replaces the end of a thought that is continued; it is not trained on."""
    min_tokens: Annotated[int | None, FIXED] = None
    """Thoughts of at least this many tokens may end; None continues every thought as often as is said above."""
    max_tokens: Annotated[int | None, Within("[1, inf)"), Below("rollout.max_new_tokens")] = None
    """Longest thought in tokens; a longer one is ended with </think>, and the turn continues. None has no
    limit."""

    @property
    def forces(self) -> bool:
        """Whether thoughts are other than the policy would have them."""
        return self.continuations > 0 or self.max_tokens is not None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    output_dir: str = ""
    """Run folder with config, metrics, samples and the final model in Hugging Face format. By default it is named
    after the stage: runs/sft, runs/rl."""
    path: str | None = None
    """Folder of the checkpoints from which a stopped run resumes; None is checkpoints/ in output_dir."""
    save_steps: Annotated[int, Within("[1, inf)", besides=(-1,))] = -1
    """Steps between two checkpoints; -1 saves by save_minutes only."""
    save_minutes: Annotated[float, Within("[0, inf)")] = 20.0
    """Minutes after which the next step is saved, in addition to save_steps; 0 saves by steps only."""
    save_hf: Annotated[bool, Needs(".disable_ds=False", warns=True)] = False
    """Also write each checkpoint in Hugging Face format."""
    disable_ds: bool = False
    """Write no DeepSpeed checkpoints; a stopped run then cannot resume."""
    max_num: Annotated[int, Within("[1, inf)")] = 3
    """Number of checkpoints to keep."""
    load_enable: bool = True
    """Resume from the newest checkpoint of this run, if there is one."""
    overwrite: bool = False
    """Start again in an output_dir that holds a run; its records and checkpoints are deleted first."""
    push_to_hub: str | None = None
    """Upload the final model to this repository of the Hugging Face hub, OWNER/NAME. A new repository is private."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    dataset: str | None = None
    """Row file or dataset to evaluate on during training; separate several by commas."""
    split: Annotated[str, Needs(".dataset", warns=True)] = "train"
    """Split of the evaluation dataset."""
    steps: Annotated[int, Within("[1, inf)", besides=(-1,)), Needs(".dataset")] = -1
    """Steps between two evaluations. -1 is never in RL, and once per epoch in supervised training."""
    before_training: Annotated[bool, Needs(".dataset")] = False
    """Also evaluate before the first step, to measure the initial model."""


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    key: str | None = None
    """Weights & Biases API key, which also turns the tracker on. It is never written to the run folder."""
    org: Annotated[str | None, Needs("logger.trackers~wandb")] = None
    """Weights & Biases team."""
    group: Annotated[str | None, Needs("logger.trackers")] = None
    """Group of the run, in every tracker that has groups."""
    project: str
    """Project of the run."""
    run_name: str
    """Name of the run, in every tracker."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    stage_name: str
    """Name of this stage in stage.json and in the report."""
    logging_steps: Annotated[int, Within("[1, inf)")] = 1
    """Steps between two logged lines."""
    trackers: tuple[TrackerName | UserFunction, ...] = ()
    """Services that show the run, in addition to the console and metrics.jsonl: names, or FILE.py with a function
    `tracker`."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard, which also turns the tracker on; None is in the run folder."""
    wandb: WandbConfig
    """Weights & Biases."""


def logged_as(stage: str, *, run: str | None = None) -> LoggerConfig:
    """Return the defaults of a supervised stage, whose run is named as `minute_name` does.

    Args:
        run: the beginning of its name; None takes the stage.
    """
    wandb = WandbConfig(project=f"openrlhf_train_{stage}", run_name=minute_name(run or stage))
    return LoggerConfig(stage_name=stage, wandb=wandb)


def minute_name(kind: str) -> str:
    """Return the name of a run of `kind`, such as "ppo", by the time at which its flags are read, as in OpenRLHF."""
    return f"{kind}_{datetime.now():%m%dT%H:%M}"


@dataclass(frozen=True, kw_only=True)
class SequenceConfig(OverlongFlags):
    input_template: Annotated[str | None, ONE_TEMPLATE, PROMPT_COLUMN] = None
    """Text around a plain-text prompt, which replaces {}; the prompt then goes to the model without its chat
    template."""
    apply_chat_template: Annotated[
        bool,
        Needs(".output_key or model.pretrain_mode_enable=False|None", because="plain text is trained on as it is"),
    ] = False
    """Apply the chat template to plain-text prompts, as a user turn; it always applies to messages."""
    max_len: Annotated[int, Within("[1, inf)")] = 2048
    """Longest sequence, in tokens: prompt, images and response together."""
    bad_rows: BadRows = "stop"
    """What to do with rows that cannot be used or encoded: stop the run and list them all, or continue without them,
    report their number and list them in left_out_rows.jsonl."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(SequenceConfig, RowsConfig):
    """Rows of prompts, and how long their sequences may be."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    micro_batch_size: Annotated[int, Within("[1, inf)")] = 1
    """Samples in one forward and backward pass on one GPU."""
    batch_size: Annotated[int, Within("[0, inf)")] = 0
    """Samples in one weight update, over all GPUs. 0 takes at most 128: all samples of a step in RL, a fifth of the
    rows in supervised training."""
    max_epochs: Annotated[int, Within("[1, inf)")] = 1
    """Passes over the same samples: over each rollout in RL, over the data in supervised training."""
    seed: int = 42
    """Seed of everything random."""
    full_determinism_enable: bool = False
    """Make results repeat bit by bit on the same machine, at the cost of speed."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint."""
    memory_check: Literal["refuse", "warn", "off"] = "refuse"
    """What to do with a run that is predicted not to fit: refuse it, or start with a warning. off predicts nothing."""


@dataclass(frozen=True, kw_only=True)
class FirstHelp:
    """Three examples and the ten most used flags."""

    text: str
    """For each example a line with what it does, after a number sign, and below it what follows the command's name."""
    flags: str
    """Dotted names, in the order in which they are shown."""

    @property
    def examples(self) -> dict[str, str]:
        """The arguments of each example, in one line, by what it does."""
        parts = (part.partition("\n") for part in self.text.split("# ")[1:])
        return {what: " ".join(arguments.split()) for what, _, arguments in parts}


def supervised_help(text: str, *, rows: str, flags: str) -> FirstHelp:
    """Return the first help of a trainer that learns from rows.

    Args:
        text: as in `FirstHelp`, without the flags of model and rows.
        flags: two flags of this trainer, in addition to those of all trainers.
    """
    shared = (
        "model.model_name_or_path data.dataset data.max_len ckpt.output_dir adam.lr train.max_epochs train.batch_size"
    )
    parts = (part.partition("\n") for part in text.split("# ")[1:])
    given = f"--model.model_name_or_path models/vlm-3b --data.dataset {rows}"
    return FirstHelp(
        text="".join(f"# {what}\n{given} {arguments}" for what, _, arguments in parts),
        flags=f"{shared} eval.dataset {flags}",
    )


# Length of the n-gram to look up. vLLM's default of 5 finds little in short responses, and 1 guesses at random.
LOOKUP = (2, 5)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How an engine guesses tokens, which the model then verifies in one pass."""

    tokens: int
    """Maximum number of tokens guessed at a time."""


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    speculative_tokens: Annotated[
        int,
        Within("[0, 128]"),
        OWN_ENGINE,
        Needs("backend=vllm|None", because="only vLLM guesses tokens"),
        Needs("eval_task=generate_vllm|None", because="only vLLM guesses tokens"),
    ] = 0
    """Tokens that vLLM guesses ahead of each response from its prompt and previous tokens, and that the model verifies
    in one pass. The distribution of samples stays the same. 0 guesses none."""

    @property
    def speculation(self) -> Speculation | None:
        """How tokens are guessed; None if they are not."""
        return Speculation(tokens=self.speculative_tokens) if self.speculative_tokens else None
