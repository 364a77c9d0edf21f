"""Run folders and curriculum folders as training leaves them behind, written without training."""

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

import PIL.Image
import PIL.ImageDraw


def write_lines(path: Path, records: Iterable[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def write_stage(folder: Path, *, name: str, kind: str = "rl", steps: int, seconds: float, hour: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stage = {
        "name": name,
        "kind": kind,
        "steps": steps,
        "seconds": seconds,
        "started_at": f"2026-01-31T{hour:02d}:00:00+00:00",
        "finished_at": f"2026-01-31T{hour:02d}:50:00+00:00",
    }
    (folder / "stage.json").write_text(json.dumps(stage), encoding="utf-8")


def rollout(*, step: int, group: int = 0, response: str = "<answer>4</answer>", **fields: object) -> dict[str, object]:
    return {
        "step": step,
        "group": group,
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
        "response": response,
        "label": "4",
        "reward": 1.0,
        "scores": {"accuracy": 1.0, "format": 1.0},
        "response_tokens": 5,
        "truncated": False,
        **fields,
    }


def write_image(path: Path, *, number: int, side: int = 56) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = PIL.Image.new("RGB", (side, side), "white")
    draw = PIL.ImageDraw.Draw(image)
    draw.rectangle((2, 2, side - 3, side - 3), outline="black")
    draw.text((side // 3, side // 3), str(number), fill="black")
    image.save(path)


def scores(*, accuracy: float, form: float, tokens: float, rows: int = 200) -> dict[str, float]:
    return {
        "rows": rows,
        "accuracy": accuracy,
        "format": form,
        "mean_response_tokens": tokens,
        "truncated_rate": 0.01,
    }


def write_curriculum(folder: Path, *, steps: int = 40) -> None:
    """Write a cold start and two RL stages of `steps` steps with 8 rollouts a step, and their evaluation."""
    chance = random.Random(7)
    write_stage(folder / "cold_start", name="cold_start", kind="sft", steps=150, seconds=23.4, hour=9)
    write_lines(folder / "cold_start" / "metrics.jsonl", _sft_metrics(chance))
    for hour, name in ((10, "fre"), (12, "mgt")):
        stage = folder / name
        write_stage(stage, name=name, steps=steps, seconds=25.5 * steps, hour=hour)
        write_lines(stage / "metrics.jsonl", _rl_metrics(chance, steps=steps))
        write_lines(stage / "rollouts.jsonl", _rollouts(chance, stage=stage, steps=steps, images=name == "mgt"))
        (stage / "run_config.yaml").write_text(
            f"actor:\n  model_name_or_path: runs/demo/{name}/start\n  adam:\n    lr: 1.5e-4\n"
            "algo:\n  advantage:\n    estimator: group_norm\nlogger:\n  wandb:\n    key: 0123456789abcdef\n",
            encoding="utf-8",
        )
    reached = {"cold_start": (0.535, 0.31), "fre": (0.705, 0.36), "mgt": (0.72, 0.815)}
    checkpoints = [
        {
            "name": name,
            "path": str(folder / name),
            "files": {
                "text": scores(accuracy=text, form=0.9 + text / 10, tokens=31.2 + 20 * text),
                "image": scores(accuracy=image, form=0.85 + image / 8, tokens=40.5 + 20 * image),
            },
        }
        for name, (text, image) in reached.items()
    ]
    evaluation = {
        "settings": {"temperature": 0.0, "max_new_tokens": 96, "n_samples": 1, "files": ["text=a.jsonl"]},
        "checkpoints": checkpoints,
    }
    (folder / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")


def _sft_metrics(chance: random.Random) -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "seconds": 0.15 * step,
            "loss": 2.4 * math.exp(-step / 40) + 0.35 + chance.uniform(-0.05, 0.05),
            "lr": 1e-3 * min(1, step / 10),
            "tokens_per_second": 14_200 + chance.uniform(-900, 900),
        }
        for step in range(1, 151)
    ]


def _rl_metrics(chance: random.Random, *, steps: int) -> list[dict[str, float]]:
    return [_rl_row(chance, step=step, done=step / steps) for step in range(1, steps + 1)]


def _rl_row(chance: random.Random, *, step: int, done: float) -> dict[str, float]:
    accuracy = min(1.0, 0.45 + 0.35 * done + chance.uniform(-0.08, 0.08))
    form = min(1.0, 0.9 + 0.09 * done + chance.uniform(-0.02, 0.01))
    return {
        "step": step,
        "seconds": 25.5 * step,
        "reward": accuracy + 0.5 * form,
        "accuracy": accuracy,
        "format": form,
        "response_length": 38 + 30 * done + chance.uniform(-4, 4),
        "truncated_rate": max(0.0, 0.06 - 0.05 * done + chance.uniform(-0.01, 0.01)),
        "kl": 0.004 * done + chance.uniform(0, 0.0006),
        "policy_loss": chance.uniform(-0.02, 0.02),
        "actor_lr": 1.5e-4 * min(1.0, step / 5),
        "actor_grad_norm": 0.8 + chance.uniform(-0.3, 0.5),
        "timing/generation": 12 + 4 * done + chance.uniform(-1, 1),
        "timing/make_experience": 4 + chance.uniform(-0.5, 0.5),
        "timing/ppo_train": 7 + chance.uniform(-0.6, 0.6),
        "timing/broadcast": 0.4 + chance.uniform(0, 0.1),
        "entropy": 1.2 - 0.7 * done + chance.uniform(-0.05, 0.05),
    }


def _rollouts(chance: random.Random, *, stage: Path, steps: int, images: bool) -> list[dict[str, object]]:
    return [
        _sampled(chance, stage=stage, step=step, group=group, done=step / steps, images=images)
        for step in range(1, steps + 1)
        for group in (0, 1)
        for _ in range(4)
    ]


def _sampled(
    chance: random.Random, *, stage: Path, step: int, group: int, done: float, images: bool
) -> dict[str, object]:
    first, second = (7 * step + group) % 50, (11 * step + 3 * group) % 50
    answer = first + second if chance.random() < 0.45 + 0.35 * done else first + second + 10
    truncated = chance.random() < 0.05
    think = f"<think>The tens give {first // 10 * 10 + second // 10 * 10}, the ones {first % 10 + second % 10}. "
    if images:
        think += f"The card shows {second}. "
    response = think if truncated else f"{think}Together that is {answer}.</think><answer>{answer}</answer>"
    right = float(not truncated and answer == first + second)
    question: object = f"What is {first} + {second}? Think first, then give the answer."
    if images:
        write_image(stage / "images" / f"card{second}.png", number=second)
        question = [
            {"type": "image", "image": f"images/card{second}.png"},
            {"type": "text", "text": f"What is {first} plus the number on the card?"},
        ]
    return rollout(
        step=step,
        group=group,
        messages=[
            {"role": "system", "content": "Answer as <think>...</think><answer>...</answer>."},
            {"role": "user", "content": question},
        ],
        response=response,
        label=str(first + second),
        reward=right + 0.5 * (not truncated),
        scores={"accuracy": right, "format": float(not truncated)},
        response_tokens=len(response) // 3,
        truncated=truncated,
    )
