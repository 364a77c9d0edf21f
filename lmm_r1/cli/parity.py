"""Compare a checkpoint's log-probs in the engine and in training, in two steps of a run: before and after an update."""

from __future__ import annotations

import json
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from lmm_r1 import cpu, dotted
from lmm_r1.checkpoints.parity_record import Gap, Parity, checkpoint_state, full_name, keep, library_versions
from lmm_r1.cli.training import begin_workers, prepare_training
from lmm_r1.cli.yaml_file import read_settings
from lmm_r1.config import PPOConfig, mismatch_limit, resolve
from lmm_r1.config.hardware import check_machine
from lmm_r1.config.rewards import GIVEN
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.registry import facts_of
from lmm_r1.records.metrics import METRICS_FILE, MetricLog, read_metrics
from lmm_r1.tasks import get_task

COLUMNS = ("rows", "weights", "mean exp |d|", "mean |d|", "largest |d|", "verdict")
WEIGHTS = {1: "as loaded", 2: "after an update"}
"""By step; the engine generates for the second with weights that the first has sent it."""
PROMPTS, SAMPLES = 8, 2
FILLER = "Twelve and thirty-four are forty-six. "
# So large that bf16's weights move: 1e-6 would be lost in rounding, and the engine's old weights not be seen.
LEARNING_RATE = 1e-3


def spread(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], responses: Sequence[str]) -> Any:
    """Return pseudo-random rewards, so that responses differ and the update moves the weights."""
    return {"rewards": [zlib.crc32(response.encode()) / 2**32 for response in responses]}


def certify(path: str, *, max_len: int, dtype: str | None, settings: str | None) -> tuple[str, list[Gap]]:
    """Return what was measured, in a sentence, and the gaps of text and of image rows, both before and after an update.

    The engine, the trainer and the way of weights between them are those of `train_ppo_ray`. What is found is kept for
    later runs. Raises UserError if the checkpoint or the settings are refused there.

    Args:
        max_len: tokens of a prompt with its response.
        settings: YAML of the run that it is measured for; None is this machine's defaults.
    """
    facts = facts_of(path)
    base = PPOConfig()
    if settings is not None:
        base = dotted.replace(base, read_settings(Path(settings), dotted.leaf_types(PPOConfig)))
    with tempfile.TemporaryDirectory(prefix="lmm-r1-parity-") as folder:
        rows = Path(folder) / "rows.jsonl"
        given = parity_flags(path, max_len=max_len, dtype=dtype, folder=Path(folder))
        config = resolve(dotted.replace(base, given))
        check_machine(config)
        prepare_training(config)
        write_rows(rows, path=path, max_len=max_len, takes_images=facts.takes_images)
        begin_workers(config)
        from lmm_r1.generation.codec import disagrees
        from lmm_r1.lmm_kits import Checkpoint
        from lmm_r1.rl.run import train

        train(config, reward=spread)
        log = read_metrics(Path(config.ckpt.output_dir) / METRICS_FILE)
    limit = mismatch_limit(dotted.replace(config, {"algo.mismatch_limit": None}))
    told = (
        f"{facts.model_type}: {path} in {config.ds.param_dtype}, {PROMPTS} prompts x {SAMPLES} responses of {max_len} tokens "
        f"together; a mean |d| of {limit:g} is rounding"
    )
    gaps = gaps_of(log, corrected=disagrees(Checkpoint(path)), limit=limit)
    assert config.ds.param_dtype is not None, "resolve fills it in"
    keep(
        Parity(
            checkpoint=full_name(path),
            state=checkpoint_state(path),
            kit=facts.model_type,
            dtype=config.ds.param_dtype,
            max_len=max_len,
            device="CUDA" if cpu.has_cuda() else "CPU",
            measured=date.today().isoformat(),
            libraries=library_versions(),
            gaps=tuple(gaps),
        )
    )
    return told, gaps


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
    from lmm_r1.generation.codec import PromptCodec

    codec = PromptCodec.of(path, trust_remote_code=False)
    task_rows = get_task("digits").generate(
        split="train", modality="mixed" if takes_images else "text", rows=PROMPTS, seed=0
    )
    lines = []
    for number, task_row in enumerate(task_rows):
        content = _content(task_row.messages[0]["content"], image=file.parent / f"{number}.png")
        record: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "answer": task_row.answer}

        def tokens(record: dict[str, Any] = record) -> int:
            row = parse_row(record, location=str(file), base_dir=file.parent)
            return len(codec.encode(row).token_ids)

        before = tokens()
        content.insert(0, {"type": "text", "text": FILLER})
        each = tokens() - before
        room = max_len // 2 - before
        if room < each:
            raise UserError(
                f"--max_len {max_len}: a prompt of {before} tokens leaves no room; give --max_len {4 * before} or more"
            )
        content[0]["text"] = FILLER * (room // each)
        lines.append(json.dumps(record) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def _content(content: str | list[dict[str, Any]], *, image: Path) -> list[dict[str, Any]]:
    """Return a task's turn as parts, its image in a file."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = []
    for part in content:
        if part["type"] == "image":
            part["image"].save(image)
            part = {"type": "image", "image": str(image)}
        parts.append(part)
    return parts


def gaps_of(log: MetricLog, *, corrected: bool, limit: float) -> list[Gap]:
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
                mean_exp, mean, largest = (
                    float("inf") if (value := values[name]) is None else value for name in names
                )
                verdict = "agree" if mean <= limit else "apart"
                if verdict == "apart" and rows == "image" and corrected:
                    verdict = "apart, corrected on CPUs"
                gaps.append(
                    Gap(rows=rows, weights=weights, mean_exp=mean_exp, mean=mean, largest=largest, verdict=verdict)
                )
    return gaps
