"""Folders of runs and evaluations as commands write them, and what a reader sees of their report."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw

from lmm_r1.records.responses import JudgedResponse, VerifierVerdict
from lmm_r1.tools.report.curves import METRICS, spec_of


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
    return {"rows": rows, "accuracy": accuracy, "format": form, "mean_response_tokens": tokens, "truncated_rate": 0.01}


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


def judged(right: bool = True, **changes: object) -> JudgedResponse:
    """One response, right or wrong by the math verifier."""
    values = {
        "checkpoint": "base",
        "file": "held_out",
        "index": 0,
        "row": "rows.jsonl line 1",
        "datasource": "sums",
        "label": "4",
        "question": "What is 2 + 2?",
        "sample": 0,
        "response": f"<think>so</think><answer>{4 if right else 5}</answer>",
        "response_tokens": 10,
        "finish_reason": "stop",
        "verdicts": {"math": VerifierVerdict(score=float(right), parts={"accuracy": float(right), "ungradable": 0.0})},
    }
    return JudgedResponse(**(values | changes))


def judged_rows(rows: Sequence[Sequence[bool]], **changes: object) -> list[JudgedResponse]:
    """The responses to rows that are given by whether each sample is right."""
    return [
        judged(right, **({"index": index, "row": f"rows.jsonl line {index + 1}", "sample": sample} | changes))
        for index, row in enumerate(rows)
        for sample, right in enumerate(row)
    ]


def write_scene(folder: Path) -> tuple[str, str]:
    """Write a picture of 400 x 300 pixels and the part of it from (100, 60) to (180, 120); return both names."""
    scene = PIL.Image.new("RGB", (400, 300), "#dfe6ee")
    draw = PIL.ImageDraw.Draw(scene)
    draw.rectangle((20, 180, 380, 290), fill="#9db48a")
    draw.rectangle((100, 60, 180, 120), fill="#f4f0e6", outline="#333333")
    draw.text((118, 84), "OPEN 7", fill="#a02020")
    names = ("images/scene.png", "images/part.png")
    (folder / "images").mkdir(parents=True, exist_ok=True)
    scene.save(folder / names[0])
    scene.crop((100, 60, 180, 120)).save(folder / names[1])
    return names


def cropped(folder: Path, *, step: int = 1, last: str = "<answer>7</answer>", **fields: Any) -> dict[str, object]:
    """A line of rollouts.jsonl: a call that is refused, one that shows the part of the scene, the answer."""
    scene, part = write_scene(folder)
    call = '<grounding>{"bbox_2d": [0.25, 0.2, 0.45, 0.4], "source": "original_image"}</grounding>'
    problem = "bbox_2d [0.45, 0.2, 0.25, 0.4] has swapped corners"
    cut = {"picture": 0, "name": "original_image", "box": [100, 60, 180, 120], "size": [400, 300], "keypoint": None}
    return rollout(
        step=step,
        response=last,
        label="7",
        messages=[
            {"role": "system", "content": "Look closer by one call."},
            {"role": "user", "content": [{"type": "image", "image": scene}, {"type": "text", "text": "Which?"}]},
        ],
        **{
            "said": [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": f"<think>Where is the sign?</think>{call}"}],
                    "calls": [{"tool": "crop", "outcome": "malformed", "problem": problem}],
                },
                {"role": "user", "content": [{"type": "text", "text": f"This call was not carried out: {problem}."}]},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": f"<think>The other way round.</think>{call}"}],
                    "calls": [{"tool": "crop", "outcome": "done", "problem": ""}],
                    "rewards": {"looked": 0.25},
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "This is observation_1:\n"},
                        {"type": "image", "image": part, "cut": cut},
                        {"type": "text", "text": "\nGo on."},
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": last}]},
            ],
            "end": "over",
            "scores": {
                "accuracy": 1.0,
                "looked": 0.25,
                "tool_calls": 2.0,
                "malformed_calls": 1.0,
                "turns": 3.0,
                "shown_images": 1.0,
                "over_turn": 0.0,
                "environment_failed": 0.0,
            },
            "counts": {"tool_calls": 2, "malformed_calls": 1},
            **fields,
        },
    )


def check_listed(folder: Path, *sections: str) -> None:
    """Fail if the table of metrics lacks one that a run has logged, or if the run lacks one of these sections of it."""
    metrics, rollouts = (folder / f"{name}.jsonl" for name in ("metrics", "rollouts"))
    logged = {name for line in metrics.read_text().splitlines() for name in json.loads(line)} - {"step", "seconds"}
    lines = rollouts.read_text().splitlines() if rollouts.exists() else []
    parts = {name for line in lines for name in json.loads(line)["scores"]}
    assert {name for name in logged - parts if spec_of(name) is None} == set()
    rows = [spec.metrics for spec in METRICS if spec.section in sections and not spec.optional]
    assert {name for names in rows for name in names if "*" not in name} - logged == set()


class PageText(HTMLParser):
    """The words of a page, the data for its script and the addresses it refers to."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.words, self.addresses, self.within = [], [], []
        data = re.search(r'id="rollout-data">(.*?)</script>', html, re.S)
        self.data = json.loads(data[1]) if data else None
        self.feed(html)
        self.text = re.sub(r"[\s\N{NO-BREAK SPACE}]+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.within.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset") and value]

    def handle_endtag(self, tag: str) -> None:
        if tag in self.within:
            del self.within[len(self.within) - 1 - self.within[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.within):
            self.words.append(data)
