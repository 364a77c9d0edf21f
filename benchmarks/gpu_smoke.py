"""Every command on tiny models, two steps each, as a user types it; figures next to those of a CPU in fp32.

python benchmarks/gpu_smoke.py --output benchmarks/results/smoke_cpu.json                        # on a CPU: the reference
python benchmarks/gpu_smoke.py --output smoke.json --compare benchmarks/results/smoke_cpu.json
python benchmarks/gpu_smoke.py --output smoke.json --compare ... --stages rl_lora serve_chat

Each stage has a fresh folder, which `lmm-r1 init` writes, with rows of `digits`, and at most `--limit_s` seconds (480). Its
processes are killed by their ids. The JSON is complete after each stage. A failing or hanging stage is a result, and the
next one runs. Results that are in the file are not measured again unless `--again` is given. With `--budget_s`, no stage
starts that, like the longest so far, would end later: give the command again for the rest.

A figure has a value, a reference, their difference, a tolerance and `ok`: |value - reference| <= tolerance * max(1, |reference|).
Of lists, the difference is the share of entries that differ. Responses that are sampled differ between devices, so that RL is
compared by its counts of tokens and by how far the engine's log-probs are from the trainer's, before the first update and (new
weights have arrived) before the second. Supervised training is compared by its losses, and the rest by responses at
temperature 0. A stage passes if its commands end as they should and no figure is wrong. Stages that need what the machine
lacks say so and do not count as passed. Ends with code 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gpu_stages.terminal import Terminal
from machine import ROOT, machine_facts
from measuring import parser_of
from PIL import Image
from rl_step import REWARD_FUNCTION

# The repository's own packages, on a machine where they are not installed.
sys.path.append(str(ROOT))

Figures: TypeAlias = dict[str, dict[str, Any]]

DIGITS = "lmm-r1 make_task digits --modality mixed --min_digits 1 --max_digits 2 --max_image_digits 1 --overwrite"
SETUP = (
    "lmm-r1 init .",
    f"{DIGITS} --split train --rows 40 --solutions --output rows/train",
    f"{DIGITS} --split test --rows 20 --output rows/test",
    "lmm-r1 make_tiny_model --arch qwen2_5_vl --rows rows/train --output model",
    "lmm-r1 make_tiny_model --arch qwen2_5_vl --rows rows/train --seed 2 --output teacher",
)
# Shows a picture after the first turn, and judges the second.
ENVIRONMENT = """
from PIL import Image
from lmm_r1.agents.environment import Answered, Environment, Episode
from lmm_r1.data.messages import ImagePart, TextPart


class Looks(Environment):
    name = "looks"
    rewards = ("length",)

    def begin(self, row, *, seed):
        return Look()


class Look(Episode):
    async def answer(self, turn):
        if turn.number == 1:
            return Answered(rewards={"length": len(turn.text) % 7 / 7})
        return Answered(shown=(TextPart("Look again: "), ImagePart(Image.new("RGB", (56, 84), (200, 90, 30)))))
"""
VIDEOS, FRAMES = 8, 3
IMAGE_PART = re.compile(r'\{"type": "image", "image": "(images/[^"]+)"\}')
SETUP_S = 300.0
# New weights that did not arrive would show in the second step's mismatch: the learning rate is large.
RL_SETTINGS = (
    "--actor.model_name_or_path model --data.max_samples 8 --rollout.batch_size 4 --rollout.n_samples_per_prompt 4 "
    "--rollout.max_new_tokens 16 --rollout.ignore_eos --actor.adam.lr 1e-3 --actor.lr_warmup_ratio 0 "
    "--reward reward_of_text.py --ckpt.output_dir runs/rl"
)
SUPERVISED = (
    "--model.model_name_or_path model --ds.param_dtype fp32 --data.max_samples 16 --train.batch_size 8 --train.max_epochs 1 "
    "--train.micro_batch_size 4 --adam.lr 1e-4 --lr_warmup_ratio 0"
)
GREEDY = "--temperature 0 --max_new_tokens 16 --dtype float32"
# Kernels add up in another order, which is some 1e-6 in log-probs; TF32 in an attention kernel of the engine, 1e-3.
GAPS = {"fp32": (2e-2, 2e-3), "fp16": (2e-1, 2e-2)}  # of one token, of the mean ratio
LOSS = 1e-3
COUNTS = ("total_length", "rows/image", "rows/video", "turns", "shown_images")
# Depends on time or on what is sampled: shown without a judgement, whether a stage met what it is for.
SEEN = ("rollout/drafted_tokens", "rollout/accepted_tokens", "rollout/kept_tokens", "async/partial_samples")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: what types the commands and reads out figures, and how many GPUs it needs where there are any."""

    run: Callable[[Terminal], Figures]
    cards: int = 1
    on_cpu: bool = True


def typed(*lines: str, read: Callable[[Path], Figures]) -> Stage:
    """Return a stage of commands that end by themselves."""

    def run(terminal: Terminal) -> Figures:
        for line in lines:
            terminal.run(line)
        return read(terminal.folder)

    return Stage(run=run)


def figure(value: Any, *, tolerance: float, expected: Any = None) -> dict[str, Any]:
    """Return a figure; without what is expected everywhere, the reference is that of `--compare`."""
    fixed = {} if expected is None else {"reference": expected, "fixed": True}
    return {"value": value, "tolerance": tolerance, **fixed}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def supervised(line: str, run: str, *names: str) -> Stage:
    """Return a stage of two steps of supervised training, compared by metrics of both."""

    def read(folder: Path) -> Figures:
        lines = [line for line in lines_of(folder / run / "metrics.jsonl") if "loss" in line]
        return {"steps": figure(len(lines), tolerance=0, expected=2)} | {
            f"{name}/{line['step']}": figure(line[name], tolerance=LOSS) for line in lines for name in names
        }

    return typed(f"{line} --ckpt.output_dir {run}", read=read)


def rl(
    flags: str = "",
    *,
    rows: str = "rows/train",
    dtype: str = "fp32",
    killed: bool = False,
    synced: bool = True,
    **needs: Any,
) -> Stage:
    """Return a stage of RL with further flags.

    Args:
        killed: It has four steps; the run is killed after the first and resumed by the same command.
        synced: Each step has the same prompts on every device, and samples of the newest weights.
    """
    words = f"lmm-r1 train_ppo_ray {RL_SETTINGS} --data.prompt_dataset {rows} --ds.param_dtype {dtype} {flags}".strip()

    def run(terminal: Terminal) -> Figures:
        metrics = terminal.folder / "runs/rl/metrics.jsonl"
        if killed:
            terminal.run(words, until=lambda: bool(lines_of(metrics)), code=None)
        terminal.run(words)
        return of_rl(lines_of(metrics), steps=4 if killed else 2, synced=synced, gaps=GAPS[dtype])

    return Stage(run=run, **needs)


def of_rl(lines: list[dict[str, Any]], *, steps: int, synced: bool, gaps: tuple[float, float]) -> Figures:
    """Return how far engine and trainer are apart, and what does not depend on the sampled tokens."""
    largest, mean = gaps
    figures = {"steps": figure([line["step"] for line in lines], tolerance=0, expected=list(range(1, steps + 1)))}
    for line in lines:
        step, norms = line["step"], [value for name, value in line.items() if name.endswith("grad_norm")]
        trained = all(0 < norm < float("inf") for norm in norms)
        figures[f"trained/{step}"] = figure(trained, tolerance=0, expected=True)
        if synced:
            figures |= {f"{name}/{step}": figure(line[name], tolerance=0) for name in COUNTS if name in line}
        if synced or step == 1:
            figures[f"mismatch/mean_exp/{step}"] = figure(line["mismatch/mean_exp"], tolerance=mean, expected=1.0)
            figures[f"mismatch/max/{step}"] = figure(line["mismatch/max"], tolerance=largest, expected=0.0)
    seen = {name: sum(line[name] for line in lines) for name in SEEN if name in lines[0]}
    return figures | {name: {"value": value} for name, value in seen.items()}


def generated(folder: Path) -> Figures:
    """Return the responses of a batch at temperature 0."""
    lines = lines_of(folder / "responses.jsonl")
    return {"responses": figure([line["responses"][0]["text"] for line in lines], tolerance=0.1)}


def evaluated(folder: Path) -> Figures:
    """Return the accuracy and the responses of an evaluation at temperature 0."""
    (checkpoint,) = json.loads((folder / "scores.json").read_text())["checkpoints"]
    responses = [line["response"] for line in lines_of(folder / "scores.responses.jsonl")]
    accuracy = checkpoint["files"]["test"]["accuracy"]
    return {"accuracy": figure(accuracy, tolerance=0.1), "responses": figure(responses, tolerance=0.1)}


def of_demo(folder: Path) -> Figures:
    """Return the cold start's first loss, and accuracies after each stage, which 400 steps from scratch spread by rounding."""
    stages = json.loads((folder / "runs/demo/summary.json").read_text())["stages"]
    loss = lines_of(folder / "runs/demo/cold_start/metrics.jsonl")[0]["loss"]
    return {"cold_start/loss/1": figure(loss, tolerance=LOSS)} | {
        f"{stage['name']}/{kind}": figure(stage[kind], tolerance=0.25)
        for stage in stages
        for kind in ("text_accuracy", "image_accuracy")
    }


def of_quickstart(folder: Path) -> Figures:
    """Return the first loss, in bf16 on a GPU, and how much of its training file the model memorized."""
    (file,) = (folder / "runs/evaluation").glob("*[!d].json")
    files = json.loads(file.read_text())["checkpoints"][0]["files"]
    loss = lines_of(folder / "runs/sft/metrics.jsonl")[0]["loss"]
    accuracies = {f"{name}/accuracy": figure(entry["accuracy"], tolerance=0.3) for name, entry in files.items()}
    return {"loss/1": figure(loss, tolerance=0.02), **accuracies}


def chatted(terminal: Terminal) -> Figures:
    """Ask a chat server about every test row, at temperature 0."""
    answers = []
    with terminal.serving("lmm-r1 serve_chat --model model --dtype float32 --name tiny", code=0) as address:
        for messages in prompts(terminal.folder, '{"type": "image_url", "image_url": {"url": "%s"}}'):
            request = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 16}
            reply = terminal.ask(f"{address}/v1/chat/completions", request)
            answers.append(reply["choices"][0]["message"]["content"])
    return {"responses": figure(answers, tolerance=0.1)}


def scored(terminal: Terminal) -> Figures:
    """Train a reward model for two steps, and ask its server about every test row."""
    terminal.run(f"{TRAIN_RM} --ckpt.output_dir runs/rm")
    asked = [json.dumps(messages) for messages in prompts(terminal.folder, '{"type": "image", "image": "%s"}')]
    given = {"query": "3", "labels": "", "responses": "3"}
    request = {"prompts": asked, **{name: [value] * len(asked) for name, value in given.items()}}
    with terminal.serving("lmm-r1 serve_rm --model runs/rm --dtype fp32") as address:
        rewards = terminal.ask(f"{address}/get_reward", request)["rewards"]
    return {f"reward/{row}": figure(reward, tolerance=LOSS) for row, reward in enumerate(rewards)}


def prompts(folder: Path, form: str) -> list[list[dict[str, Any]]]:
    """Return the messages of the test rows with each image as a data URI in a part of the given form."""

    def part(found: re.Match[str]) -> str:
        return (
            form % f"data:image/png;base64,{base64.b64encode((folder / 'rows/test' / found[1]).read_bytes()).decode()}"
        )

    rows = lines_of(folder / "rows/test/rows.jsonl")
    return [json.loads(IMAGE_PART.sub(part, json.dumps(row["messages"]))) for row in rows]


TRAIN_RM = f"lmm-r1 train_rm {SUPERVISED} --data.dataset pairs.jsonl"
ASYNC = "--train.async_enable"
STAGES: dict[str, Stage] = {
    "demo": typed(f"bash {ROOT}/examples/scripts/demo.sh runs/demo --data.max_samples 128", read=of_demo),
    "quickstart": typed(
        "lmm-r1 train_sft --config sft.yaml --train.max_epochs 10",
        "lmm-r1 train_ppo_ray --config rl.yaml --train.num_episodes 1",
        "lmm-r1 evaluate --config evaluate.yaml --temperature 0 --n_samples 1",
        read=of_quickstart,
    ),
    "rl_fp32": rl(),
    "rl_fp16": rl(dtype="fp16", on_cpu=False),
    "rl_lora": rl("--ds.lora.rank 4"),
    "rl_qlora": rl("--ds.lora.rank 4 --ds.load_in_4bit"),
    "rl_critic": rl("--algo.advantage.estimator gae --critic.adam.lr 1e-3"),
    "rl_agent": rl("--train.agent looks.py --agent.max_turns 2"),
    "rl_async": rl(ASYNC, synced=False, cards=2),
    "rl_partial": rl(f"{ASYNC} --train.partial_rollout_enable --rollout.max_new_tokens 256", synced=False, cards=2),
    "rl_ngram": rl("--vllm.speculative_tokens 2 --rollout.temperature 0.2"),
    "rl_video": rl(rows="videos.jsonl"),
    "rl_resume": rl("--train.num_episodes 2 --ckpt.save_steps 1", killed=True),
    "evaluate": typed(
        f"lmm-r1 evaluate --checkpoints tiny=model --files test=rows/test --output scores.json {GREEDY}",
        read=evaluated,
    ),
    "batch_inference": typed(
        f"lmm-r1 batch_inference --model model --data rows/test --output responses.jsonl {GREEDY}", read=generated
    ),
    "serve_chat": Stage(run=chatted),
    "serve_rm": Stage(run=scored),
    "train_sft": supervised(f"lmm-r1 train_sft {SUPERVISED} --data.dataset rows/train", "runs/sft", "loss"),
    "train_dpo": supervised(
        f"lmm-r1 train_dpo {SUPERVISED} --data.dataset pairs.jsonl",
        "runs/dpo",
        *("loss", "chosen_log_prob", "rejected_log_prob"),
    ),
    "train_rm": supervised(TRAIN_RM, "runs/rm", "loss"),
    "train_kd": supervised(
        f"lmm-r1 train_kd {SUPERVISED} --data.dataset rows/train --teacher.model_name_or_path teacher",
        "runs/kd",
        *("loss", "kd_loss"),
    ),
}
PASSED, FAILED, NOT_RUN = "passed", "failed", "not_run"


def main(argv: list[str] | None = None) -> None:
    began = time.perf_counter()
    arguments = parse(argv)
    # As at the end of `timeout`: the processes of the stage at hand end with this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # After the flags, so that --help is quick.
    from gpu_stages.record import Clock, Record, Task

    from lmm_r1.errors import UserError
    from lmm_r1.files.json_files import read_json_object

    facts = machine_facts()
    try:
        reference = read_json_object(arguments.compare) if arguments.compare else {}
        record = Record(arguments.output, header={"benchmark": "gpu_smoke", **facts}, again=arguments.again)
    except UserError as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.runs or Path(temporary)).absolute()

        def task(name: str) -> Task:
            asked = {"cards": facts["cards"], "limit_s": arguments.limit_s}
            return Task(name=name, measure=lambda save: measured(STAGES[name], folder / name, **asked))

        clock = Clock(began=began, budget=arguments.budget_s)
        record.run("commands", [task(name) for name in arguments.stages], clock=clock)
    judge(record.content, reference)
    record.write()
    print(json.dumps(record.content))
    if record.content["summary"][FAILED]:
        raise SystemExit(1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    every = list(STAGES)
    parser.add_argument("--stages", nargs="+", choices=every, default=every, metavar="STAGE", help=", ".join(every))
    parser.add_argument("--compare", type=Path, help="JSON of a CPU, whose figures are the reference")
    parser.add_argument("--limit_s", type=float, default=480.0, help="seconds that each stage may take")
    parser.add_argument("--budget_s", type=float, default=float("inf"), help="seconds within which all shall end")
    parser.add_argument("--again", action="store_true", help="also run stages whose results the file holds")
    parser.add_argument("--runs", type=Path, help="folder to keep the stages' folders in; otherwise they are deleted")
    return parser.parse_args(argv)


def measured(stage: Stage, folder: Path, *, cards: int, limit_s: float) -> dict[str, Any]:
    """Run a stage in a fresh copy of the project and return its commands and figures, or what it needs."""
    needed = stage.cards if cards or not stage.on_cpu else 0
    if cards < needed:
        return {"needs": "a GPU" if needed == 1 else f"{needed} GPUs"}
    terminal = Terminal(folder, limit_s=limit_s)
    shutil.copytree(project(folder.with_name("project")), terminal.folder)
    figures = stage.run(terminal)
    return {"commands": terminal.typed, "printed_lines": terminal.printed, "figures": figures}


def project(folder: Path) -> Path:
    """Return a folder with the rows, models and further inputs of all stages, made by the first."""
    if not folder.exists():
        terminal = Terminal(folder.with_name("setup"), limit_s=SETUP_S)
        terminal.folder.mkdir()
        for line in SETUP:
            terminal.run(line)
        write_inputs(terminal.folder)
        terminal.folder.rename(folder)
    return folder


def write_inputs(folder: Path) -> None:
    """Write what the stages take besides the project's own files."""
    (folder / "reward_of_text.py").write_text(REWARD_FUNCTION)
    (folder / "looks.py").write_text(ENVIRONMENT)
    rows = lines_of(folder / "rows/train/rows.jsonl")
    with (folder / "pairs.jsonl").open("w") as stream:
        for index, row in enumerate(rows):
            *prompt, solution = row["messages"]
            pair = {"prompt": prompt, "chosen": solution["content"], "rejected": f"{rows[index - 1]['answer']}?"}
            stream.write(json.dumps(pair).replace('"images/', '"rows/train/images/') + "\n")
    noise = random.Random(0)
    with (folder / "videos.jsonl").open("w") as stream:
        for index in range(VIDEOS):
            frames = [f"frame_{index}_{number}.png" for number in range(FRAMES)]
            for frame in frames:
                Image.frombytes("RGB", (84, 56), noise.randbytes(84 * 56 * 3)).save(folder / frame)
            content = [{"type": "video", "video": frames, "fps": 1.0}, {"type": "text", "text": "What is 1+1?"}]
            stream.write(json.dumps({"messages": [{"role": "user", "content": content}], "answer": "2"}) + "\n")


def judge(content: dict[str, Any], reference: dict[str, Any]) -> None:
    """Write the reference, the difference and `ok` into every figure, and into the summary which stages passed."""
    known = reference.get("stages", {}).get("commands", {"results": {}})["results"]
    summary: dict[str, Any] = {PASSED: [], FAILED: [], NOT_RUN: []}
    results = content["stages"]["commands"]["results"]
    for name, result in results.items():
        for label, entry in result.get("figures", {}).items():
            if "tolerance" not in entry:
                continue
            if not entry.get("fixed"):
                entry["reference"] = known.get(name, {}).get("figures", {}).get(label, {}).get("value")
            entry |= compared(entry["value"], entry["reference"], entry["tolerance"])
        wrong = [label for label, entry in result.get("figures", {}).items() if entry.get("ok") is False]
        kind = NOT_RUN if "needs" in result else FAILED if "figures" not in result or wrong else PASSED
        result["ok"] = {PASSED: True, FAILED: False, NOT_RUN: None}[kind]
        summary[kind].append(name)
    summary[NOT_RUN] += [name for name in STAGES if name not in results]
    content["compared_with"] = {name: reference.get(name) for name in ("machine", "device", "commit")}
    content["summary"] = summary


def compared(value: Any, reference: Any, tolerance: float) -> dict[str, Any]:
    """Return the difference of a figure and whether it is within the tolerance; None without a reference."""
    if reference is None:
        return {"difference": None, "ok": None}
    if isinstance(value, list):
        pairs = max(len(value), len(reference), 1)
        equal = sum(one == other for one, other in zip(value, reference, strict=False))
        difference, bound = 1 - equal / pairs, tolerance
    else:
        # Words are what JSON has for infinity and not a number.
        difference = abs(float(value) - float(reference))
        bound = tolerance * max(1.0, abs(float(reference)))
    return {"difference": difference, "ok": difference <= bound}


if __name__ == "__main__":
    main()
