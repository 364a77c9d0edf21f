"""README.md: short, plain, and every figure is one of a result file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS, MOST_WORDS_OF_A_SENTENCE = 600, 25


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def spoken(page: str) -> list[str]:
    """The sentences of a page as they are read aloud: without code, tables, headings and the targets of links."""
    prose = re.sub(r"```.*?```|^\|.*$|^#.*$|!\[.*?\]\(.*?\)", "", page, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    blocks = re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE)
    return [
        sentence for block in blocks for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(block.split())) if sentence
    ]


def test_the_page_is_short():
    assert len(PAGE.split()) <= MOST_WORDS


def test_no_sentence_is_long():
    # A row of links is no sentence.
    long = [sentence for sentence in spoken(PAGE) if len(sentence.split()) > MOST_WORDS_OF_A_SENTENCE]
    assert [sentence for sentence in long if " · " not in sentence] == []


def test_the_demo_gains_what_its_result_file_says():
    demo = result("demo.json")
    images, texts, seconds = (
        [run[name] for run in demo["runs"]] for name in ("image_gain_of_mgt", "text_gain_of_fre", "seconds")
    )
    assert f"images +{min(images):.1f} to +{max(images):.1f} points" in PAGE
    assert f"text +{min(texts):.1f} to +{max(texts):.1f}, in {min(seconds):.0f} to {max(seconds):.0f} s" in PAGE


def test_the_figures_of_the_gpu_are_those_of_its_result_files():
    demo = result("gpu/demo_h200_summary.json")
    first, *_, last = demo["stages"]
    for name, label in (("image_accuracy", "images"), ("text_accuracy", "text")):
        assert f"{label} {100 * first[name]:.1f} → {100 * last[name]:.1f} %" in PAGE
    assert f"in {demo['seconds']:.0f} s" in PAGE
    assert f"{result('gpu/rl3b.json')['seconds_per_step']:.1f} s" in PAGE


def test_the_speed_of_shared_prompts_is_measured():
    [batch] = [one for one in result("train_step.json")["batches"] if (one["kind"], one["samples"]) == ("image", 16)]
    assert f"{batch['speedup_of_shared']['update_over_packed']:.1f} × on two cores" in PAGE


def test_the_verifiers_agreement_is_measured():
    judged = result("judged_answers.json")["all"]
    assert f"{judged['answers']:,} public answers" in PAGE
    assert f"{100 * judged['agreement']:.1f} % agreement" in PAGE
    assert ("no wrong answer rewarded" in PAGE) == (judged["wrong_but_paid"] == 0)


def test_the_make_targets_of_the_page_are_there():
    targets = set(re.findall(r"^make ([\w-]+)", PAGE, flags=re.MULTILINE))
    assert {"install", "demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_the_plan_of_the_page_is_accepted_for_a_checkpoint_whose_sizes_are_known():
    from lmm_r1.cli.arguments import parse
    from lmm_r1.cli.plan import CONFIG
    from lmm_r1.lmm_kits.registry import released_configs

    [line] = re.findall(r"^lmm-r1 plan (.*)$", PAGE, flags=re.MULTILINE)
    config = parse(CONFIG, line.split(), prog="lmm-r1 plan", description="")
    assert config.actor.model_name_or_path in released_configs()
    assert (config.num_gpus, config.gpu_memory_gib) == (1, 80.0)


@pytest.mark.usefixtures("own_environment")
def test_a_plan_of_the_page_is_what_the_command_prints(capsys):
    """The plan of the row that needs the fewest flags, of all its phases and choices."""
    [plan] = [
        one
        for one in result("plan_gpus.json")["plans"]
        if (one["hardware"], one["model"]) == ("1 x 80 GB", "Qwen/Qwen2.5-VL-3B-Instruct")
    ]
    from lmm_r1.cli import plan as command

    command.main(plan["command"].split()[2:])
    told = " ".join(capsys.readouterr().out.split())
    assert f" {plan['peak_gib_per_gpu']} GiB of 80.0 GiB" in told
    assert f"passes of the update: {plan['pass_tokens']:,} tokens" in told
    assert f"chosen to fit: {plan['chosen']}" in told


def test_the_plans_of_the_page_are_those_of_the_result_file():
    plans = {
        (
            plan["hardware"].replace("x", "×"),
            plan["model"].partition("/")[2].removesuffix("-Instruct"),
            plan["trained"],
        ): plan
        for plan in result("plan_gpus.json")["plans"]
        if plan["stage"] == "RL"
    }
    rows = re.findall(r"^\| (\d × \d+ GB) \| (\S+) \| (LoRA|full) \| (.*?) \| ([\d.]+) \|", PAGE, flags=re.MULTILINE)
    assert len(rows) == 5
    for hardware, model, trained, flags, peak in rows:
        plan = plans[hardware, model, trained]
        assert plan["fits"]
        assert float(peak) == plan["peak_gib_per_gpu"]
        assert flags == "none" or flags.strip("`") in plan["command"]


def test_every_command_is_on_the_page_of_commands():
    from lmm_r1.cli import COMMANDS

    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {name for name in COMMANDS if f"`{name}`" not in page} == set()
