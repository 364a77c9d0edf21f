"""README.md and docs: each measured figure is computed anew from its result file, and none is without one."""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu_stages.operations import GroupWork, ModelSizes, useful_operations

from lmm_r1.lmm_kits import get_kit
from lmm_r1.lmm_kits.registry import released_configs

ROOT = Path(__file__).resolve().parents[2]
README = "README.md"
PAGES = {f"docs/{page.name}": page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
PAGES[README] = (ROOT / README).read_text(encoding="utf-8")
DEMO, H200, STEP = "gpu/demo_h200_summary.json", "gpu/gpu_check_h200_pinned.json", "gpu/rl3b.json"
Figures = Iterator[tuple[str, str, str, list[float]]]
"""A page, the files that it links, a text at the first figure or before it, and the figures from there on."""


@cache
def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))


def pick(data: Any, *paths: str) -> list[float]:
    """`pick(run, "seed", "text|image.low|high")` is the seed and the four limits in this order."""
    picked = []
    for keys in (keys for path in paths for keys in product(*(step.split("|") for step in path.split(".")))):
        value = data
        for key in keys:
            value = value[int(key) if isinstance(value, list) else key]
        picked.append(value)
    return picked


def share_of_peak() -> float:
    """The RL step's operations on unique tokens per second of its update, as a share of the card's peak."""
    step, config = result(STEP), released_configs()["Qwen/Qwen2.5-VL-3B-Instruct"]["config"]
    with torch.device("meta"):
        model = get_kit("qwen2_5_vl").model_class._from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    responses = [step["new_tokens"]] * step["samples"]
    prompt = int(step["update_tokens"]["unique"]) // step["prompts"] - sum(responses)
    group = GroupWork(prompt=prompt, responses=responses, images=((step["image_side"] // 14) ** 2,))
    done = useful_operations(ModelSizes.of(model), [group] * step["prompts"])
    return done / step["phases"]["ppo_train"] / (result(H200)["peak_tflops"] * 1e12)


def of_speed() -> Figures:
    page, whole = "docs/performance.md", ["phases.generation|make_experience|ppo_train", "seconds_per_step"]
    for batch in (
        one for one in result("train_step.json")["batches"] if one["samples"] == 16 and one["kind"] != "mixed"
    ):
        padded, packed, shared = took = pick(batch["ways"], "openrlhf|packed|shared.update_seconds")
        peaks = [padded / shared, packed / shared, *pick(batch["ways"], "openrlhf|shared.update_peak_mib")]
        yield page, "train_step.json", f"| {batch['kind']} | 16", [16, *took, *peaks]
    stages = result(H200)["stages"]
    timed = pick(
        stages["c"]["results"],
        "shared/chunked/flash_windows.seconds|utilisation",
        "packed/chunked/flash_windows.seconds",
    )
    yield page, H200, "| shared prompt", timed
    yield README, f"train_step.json {H200}", "over packing |", [packed / shared, timed[2] / timed[0]]
    for name in ("rl_step.json", "rl_step_fp32.json"):
        yield page, name, f"| {result(name)['dtype']} ([file])", pick(result(name), *whole)
    yield page, "trl_step_fp32.json", "image tokens twice]", [result("trl_step_fp32.json")["seconds_per_step"]]
    took = [*pick(result(STEP), *whole[::-1]), share_of_peak(), 989, *pick(result(STEP), "phases.broadcast")]
    yield page, STEP, "([file]) | 22", took
    yield README, STEP, "same H200 |", took[:1]
    accuracies = "stages.0|-1.text_accuracy", "stages.0|-1.image_accuracy"
    yield README, DEMO, "2026-11-26 | images", pick(result(DEMO), *accuracies[::-1], "seconds")
    parity = [one["differences"]["fp32"] for name, one in stages["a"]["results"].items() if name.startswith("parity")]
    ways = [pick(one, "padded|packed|shared.log_probs", "padded|packed|shared.gradients") for one in parity]
    yield page, H200, "| 16 kits", [len(parity), max(max(one[:3]) for one in ways), max(max(one[3:]) for one in ways)]
    sent = pick(stages["e"]["results"], "ipc/buckets.bytes|seconds", "ipc/tensors.seconds")
    yield page, H200, "| 6.1 GB of weights", [sent[0] / 1e9, *sent[1:]]


def of_the_demo() -> Figures:
    page, runs, kits = "docs/demo.md", result("demo.json")["runs"], result("demo_architectures.json")["architectures"]
    both = "text_accuracy|image_accuracy"
    for place, name in enumerate(("cold start", "FRE", "MGT")):
        yield page, "demo.json", f"| {name} |", [cell for run in runs for cell in pick(run, f"stages.{place}.{both}")]
    text, image, fre, seconds = (
        [limit(run[name] for run in runs) for limit in (min, max)]
        for name in ("text_gain_of_fre", "image_gain_of_mgt", "image_gain_of_fre", "seconds")
    )
    yield page, "demo.json", "FRE raised text by", [*text, *image, *fre]
    yield page, "demo.json", "A run took", seconds
    gains = [run["stages"][-1]["text_accuracy"] - run["stages"][0]["text_accuracy"] for run in runs]
    yield README, "demo.json", "after both RL stages |", [*image, min(gains), max(gains), *seconds]
    starts = ("| full |", "rate of full training |", "eighth of that alpha |", "one seed |")
    for start, way in zip(starts, ("full", "lora", "lora_alpha_16", "lora_rate_10"), strict=True):
        runs = result("demo_lora.json")["ways"][way]["runs"]
        gained = [run[kind] for kind in ("text_gain_of_fre", "image_gain_of_mgt") for run in runs]
        yield "docs/training.md", "demo_lora.json", start, gained
    yield page, "startup.json", "optimizer step in", [result("startup.json")["seconds_to_first_step"]]
    row = "seed", f"stages.0|1|2.{both}", "seconds"
    for kit, run in ((kit, run) for kit, found in kits.items() for run in found["runs"]):
        again = [key for key in run if key == "cold_start_continued_at_step"]
        yield page, "demo_architectures.json", f"| `{kit}` | {run['seed']} |", pick(run, *row, *again)
    for kind, start in {"image": "held-out images rose", "text": "Text rose from 6"}.items():
        first, second = (pick(run, f"stages.0|-1.{kind}_accuracy") for run in result("demo_ppo.json")["runs"])
        yield page, "demo_ppo.json", start, [*first, 1, *second, 2] if kind == "image" else [*first, *second]


def of_studies() -> Figures:
    page, arms, shares = "docs/claim.md", result("claim.json")["arms"], result("claim_shares.json")["arms"]
    for seeds, points in result("claim_power.json")["detectable_points"].items():
        count = seeds.split()[0]
        yield page, "claim_power.json", f"| {count} | {points['spread 2']}", [int(count), *points.values()]
    row = "image, trained|text, trained"
    over = "advantage.mean", "advantage.over_seeds.0|1"
    for name, start in {"cold_start": "| cold start |", "direct": "`direct` | 59.7"}.items():
        yield page, "claim.json", start, pick(arms[name], f"{row}.accuracy.mean")
    for name in ("fre_text", "fre_multi", "reversed", "mixed"):
        cells = [pick(arms[name][kind], "accuracy.mean", *over) for kind in row.split("|")]
        yield page, "claim.json", f"`{name}` | {cells[0][0]:.1f}", cells[0] + cells[1]
        assert arms[name]["image, held out"]["advantage"]["mean"] <= 2.5
    yield README, "claim.json", "([study]", pick(arms["fre_text"]["image, trained"], *over)
    yield page, "claim.json", "Text gained", pick(arms["fre_text"], "text, trained.advantage.mean")
    yield page, "claim_shares.json", "`direct` | 59.4", pick(
        shares, "shares direct|wide direct.image, trained.accuracy.mean"
    )
    for share, arm in {25: "fre_25", 50: "fre_text", 75: "fre_75"}.items():
        cells = [
            cell for width in ("shares", "wide") for cell in pick(shares[f"{width} {arm}"]["image, trained"], *over)
        ]
        yield page, "claim_shares.json", f"| {share} %", [share, *cells]
    gains = [arm["text, trained"]["advantage"]["mean"] for name, arm in shares.items() if "fre" in name]
    cold = pick(shares, "wide cold_start|shares cold_start.image, trained.accuracy.mean")
    yield page, "claim_shares.json", "On text, it gained", [min(gains), max(gains), *cold]
    page, found = "docs/algorithms.md", result("recipes.json")
    gains = [pick(gain, "text|image.mean") for gain in found["gains"].values()]
    took = [mean(run["seconds"] for run in found["runs"] if run["algorithm"] == name) for name in found["gains"]]
    ranges = [limit(values) for values in (*zip(*gains, strict=True), took) for limit in (min, max)]
    yield page, "recipes.json", "gained", ranges
    page, found = "docs/async_training.md", result("async_training.json")
    for mode, start in {"in_turn": "| alternating", "async": "| `--train.async", "partial": "| and `--train"}.items():
        first, second = (
            [*pick(run, "seconds_per_step", "accuracy.share|low|high")] for run in found["runs"] if run["mode"] == mode
        )
        row = [first[0], second[0], found["faster_than_in_turn"][mode], *first[1:], *second[1:]]
        yield page, "async_training.json", start, row


def of_loops() -> Figures:
    page, runs, pairs = "docs/preferences.md", result("loops.json")["runs"], {"rm": [], "rm_mixed": []}
    for run in runs:
        last = list(run["gains"])[-1]
        cells = [
            f"{name}.{last}.{kind}.{keys}"
            for kind in ("text", "image")
            for name, keys in (("accuracies", "share"), ("gains", "difference|low|high"))
        ]
        if run["loop"] != "kd":
            yield page, "loops.json", f"{run['seed']} | {run['seconds']:,.0f} |", pick(run, "seed", "seconds", *cells)
        if run["loop"] == "iterative_dpo":
            start = pick(run, "seed", "stages.cold_start.seconds", "accuracies.start.text|image.share")
            yield page, "loops.json", f"{start[0]} | {start[1]:.0f} |", start
        if run["loop"] in pairs:
            pairs[run["loop"]].append(run["held_out_pairs"]["eval_pair_accuracy"])
    yield page, "loops.json", "reward models of text rank", [mean(pairs["rm"])]
    yield page, "loops.json", "ranks at most", [max(pairs["rm_mixed"])]
    page, [run] = "docs/distillation.md", [run for run in runs if run["loop"] == "kd"]
    for arm, start in {
        "start": "| start",
        "alone": "tokens only |",
        "taught": "(forward KL)",
        "own": "on-policy |",
    }.items():
        yield page, "loops.json", start, pick(run, f"accuracies.{arm}.text|image.share")
    yield page, "loops.json", "cold start on them in", pick(run, "stages.alone.steps")
    gains = [run["gains"][arm][kind] for arm in ("taught", "own") for kind in ("text", "image")]
    assert all(abs(gain["difference"]) <= 3 and gain["low"] < 0 < gain["high"] for gain in gains)


def of_rollouts() -> Figures:
    page, found = "docs/rollouts.md", result("rollout_steps.json")
    greedy = {run["speculative_tokens"]: run["steps"] for run in found["guesses"] if run["temperature"] == 0}
    drawn = [run["steps_per_token"] for run in found["guesses"] if run["temperature"] and run["speculative_tokens"]]
    yield page, "rollout_steps.json", "2,013 greedy", [
        greedy[0],
        greedy[2],
        2,
        greedy[8],
        8,
        1,
        min(drawn),
        max(drawn),
    ]
    per_rollout = "steps_per_rollout|held_over_groups_per_rollout|kept_tokens_per_rollout"
    for run in found["oversampling"]:
        yield page, "rollout_steps.json", f"| {run['oversample']:g} | {run['steps_per_rollout']:.0f}", pick(
            run, "oversample", per_rollout
        )
    seconds = [run["cpu_seconds_per_rollout"] for run in found["oversampling"]]
    yield page, "rollout_steps.json", "CPU seconds stay the same", [min(seconds), max(seconds)]
    page, ways = "docs/agents.md", ("episodes", "in_one_turn", "without_tools")
    rates = [
        result("episodes.json")["kinds"][kind][way]["tokens_per_second"] for way in ways for kind in ("text", "images")
    ]
    yield page, "episodes.json", "Qwen2.5-VL generated", rates
    page, found, share = "docs/cold_start.md", result("visual_search.json"), "success_before|success_after.share"
    first, second = (pick(run, f"crop.{share}") for run in found["runs"])
    control = [*first, 1, *second, 2, *pick(found, f"runs.0.control.{share}", "chance")]
    yield page, "visual_search.json", "RL takes 20", [
        20,
        *pick(found, "runs.0.crop.seconds", "runs.0.held_out_rows"),
        *control,
    ]
    kills = pick(result("killed_runs.json"), "sft|ppo|asynchronous.kills")
    yield "docs/runs.md", "killed_runs.json", "asynchronous RL", [sum(kills)]


def of_data_and_tasks() -> Figures:
    cases = result("row_store.json")["cases"].values()
    memory = sorted(case["resident_mib"] - min(one["resident_mib"] for one in cases) for case in cases)
    loads = [case.get("first_load_seconds", case["load_seconds"]) for case in cases]
    row = [*pick(result("row_store.json"), "rows"), 20, memory[1], memory[-1], min(loads), max(loads)]
    yield "docs/data.md", "row_store.json", "100,000 rows", row
    ways = pick(result("train_step_qwen3_5.json")["batches"][0]["ways"], "shared|packed|openrlhf.update_seconds")
    yield "docs/kits.md", "train_step_qwen3_5.json", "responses about an image took", ways
    page, found = "docs/quickstart.md", result("quickstart.json")
    yield page, "quickstart.json", "toy rows takes", [found["seconds"] / 60]
    gain, low, high = pick(found, "gains.1.difference|low|high")
    row = [
        *pick(found, "accuracy.sft|rl.test"),
        gain,
        95,
        low,
        high,
        *pick(found, "further_seeds.runs.0|1|2.difference"),
    ]
    yield page, "quickstart.json", "held-out rows from", row
    judged = result("judged_answers.json")["all"]
    yield README, "judged_answers.json", "human judgements,", pick(judged, "answers", "agreement")
    assert ("one disputed answer rewarded" in PAGES[README]) == (judged["wrong_but_paid"] == 1)


def of_plans() -> Figures:
    page, more = "docs/training.md", {2: [], 3: []}
    for case in result("plan.json")["cases"]:
        more[case["zero_stage"]].append(case["measured_mib"] / case["predicted_mib"] - 1)
    assert (len(more[2]), len(more[3]), 0.05 < max(more[2]) <= 0.06) == (10, 1, True)
    yield page, "plan.json", "ZeRO-2 took up to", [6, more[3][0]]
    for plan in result("plan_gpus.json")["plans"]:
        model, hardware = plan["model"].partition("/")[2].removesuffix("-Instruct"), plan["hardware"].replace("x", "×")
        row = f"| {hardware} | {plan['stage']}, {model} | {plan['trained']}"
        sizes = [int(size) for size in re.findall(r"\d+", hardware)]
        rank = [64] if plan["trained"] != "full" else []
        yield page, "plan_gpus.json", row, [*sizes, *rank, *pick(plan, "peak_gib_per_gpu", "pass_tokens")]
        row = f"| {hardware} | {model} | {plan['trained']} |"
        if plan["stage"] == "RL" and row in PAGES[README]:
            yield README, "plan_gpus.json", row, [*sizes, plan["peak_gib_per_gpu"]]


NUMBER = re.compile(r"(?<![\w.,:+-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?(?!\w|\.\d|-\d)")
UNITS = r" ?×(?! ?\d)| ?%| (?:s|ms|seconds?|min|minutes?|hours?|GiB|MiB|MB|KB|GB|TFLOP/s|tokens/s|points?|times)\b"
# What is measured has a unit, or a sign or one decimal.
MEASURED = re.compile(rf"{NUMBER.pattern}(?:{UNITS})|{NUMBER.pattern}(?<=\.\d)(?<!\b0\.\d)|[+-]{NUMBER.pattern}")
# No measurements: limits, settings, sizes of inputs, of hardware and of designs, calculated memory, the paper's figures.
STATED = (
    "deadline (30 s)|A 1.4 M Qwen2.5-VL|0, 25, 50 and 75 %|less than 5 % or more than 90 %|80 % of 2,000 simulated|"
    "5.4 and 3.8 points above direct|Shares of 0 to 75 %|0 %, accuracy of|more than 2.5 points|above 8 MiB|"
    "1.4 M parameters|1.0 for a right answer|at most 2.5 points|within 3 points|at most 60 seconds|"
    "up to 512 MiB|takes 4.2 MB|34 MB with|(141 GB)|0.3 to 1.6|(300 s)|at most 10 times|64 MiB and 30 s in all|"
    "10, 5, 1 minutes|24 GB uses LoRA|128 GiB, 256 GiB and 2 TiB|95 %"
).split("|")


def plain(page: str) -> str:
    """A page without the targets of its links and its blocks of code."""
    return " ".join(re.sub(r"```.*?```|<!--.*?-->|(?<=\])\([^)]*\)", "", PAGES[page], flags=re.DOTALL).split())


@pytest.mark.parametrize("page", PAGES)
def test_each_figure_is_what_its_linked_file_says_and_no_other_looks_measured(page: str):
    text, wrong = plain(page), []
    bare = re.sub("`[^`]*`", lambda code: "`" * len(code[0]), text)
    rest = bare
    groups = (of_speed, of_the_demo, of_studies, of_loops, of_rollouts, of_data_and_tasks, of_plans)
    for _, links, start, values in (figure for group in groups for figure in group() if figure[0] == page):
        assert [link for link in links.split() if f"{link})" not in PAGES[page]] == []
        found = list(NUMBER.finditer(bare, text.index(start)))[: len(values)]
        for shown, value in zip(found, values, strict=True):
            digits, _, power = shown[0].replace(",", "").partition("e")
            within = (0.5 * 10 ** -len(digits.partition(".")[2]) + 1e-9) * float(f"1e{power or 0}")
            if min(abs(float(shown[0].replace(",", "")) - value * scale) for scale in (1, 100)) > within:
                wrong.append((start, shown[0], value))
            rest = f"{rest[: shown.start()]}{'_' * len(shown[0])}{rest[shown.end() :]}"
    assert wrong == []
    for phrase in STATED:
        rest = rest.replace(phrase, "")
    rest = re.sub(r"\d (?:×|x) \d+ GB", "", rest)
    assert [rest[max(0, found.start() - 30) : found.end() + 20] for found in MEASURED.finditer(rest)] == []


def test_what_is_stated_without_a_file_is_on_a_page():
    assert [phrase for phrase in STATED if not any(phrase in plain(page) for page in PAGES)] == []


def test_what_looks_measured_is_told_from_settings_versions_and_sizes():
    text = (
        "3.3 s, 9 %, 2 × as fast, +4.1, (-7.2 to +5.8) and 60.8 | 0.5, 3B, v0.11.2, 99dc669, 896 × 896 and 2026-11-26"
    )
    assert [found[0] for found in MEASURED.finditer(text)] == ["3.3 s", "9 %", "2 ×", "+4.1", "-7.2", "+5.8", "60.8"]
