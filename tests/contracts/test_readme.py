"""README.md: short, plain, and every figure is one of a result file."""

import json
import re
from importlib.metadata import distribution, version
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


def test_the_study_of_the_claim_says_what_its_result_file_says():
    advantage = result("claim.json")["arms"]["fre_text"]["image, trained"]["advantage"]
    low, high = advantage["over_seeds"]
    assert f"images {advantage['mean']:+.1f} points ({low:+.1f} to {high:+.1f}): undecided" in PAGE


def test_the_figures_of_the_gpu_are_those_of_its_result_files():
    demo = result("gpu/demo_h200_summary.json")
    first, *_, last = demo["stages"]
    for name, label in (("image_accuracy", "images"), ("text_accuracy", "text")):
        assert f"{label} {100 * first[name]:.1f} → {100 * last[name]:.1f} %" in PAGE
    assert f"in {demo['seconds']:.0f} s" in PAGE
    assert f"{result('gpu/rl3b.json')['seconds_per_step']:.1f} s; first step" in PAGE
    notes = (RESULTS / "gpu/README.md").read_text(encoding="utf-8")
    [first_step] = re.findall(r"^\| first step of `rl3b.json` \| ([\d.]+ s) \|$", notes, flags=re.MULTILINE)
    [trl] = re.findall(r"^\| TRL 1\.16 .*\| first step ([\d.]+ s);", notes, flags=re.MULTILINE)
    assert f"first step {first_step} (TRL 1.16: {trl})" in PAGE
    assert "commit 99dc669 with three faults worked around" in PAGE
    assert "Commit 99dc669, with three faults of that commit worked around" in " ".join(notes.split())


def test_the_speed_of_shared_prompts_is_measured():
    [batch] = [one for one in result("train_step.json")["batches"] if (one["kind"], one["samples"]) == ("image", 16)]
    assert f"{batch['speedup_of_shared']['update_over_packed']:.1f} × on two cores" in PAGE
    timed = result("gpu/gpu_check_h200_pinned.json")["stages"]["c"]["results"]
    shared, packed = (timed[f"{kind}/chunked/flash_windows"] for kind in ("shared", "packed"))
    assert shared["samples"] == packed["samples"] == 16
    assert f"{packed['seconds'] / shared['seconds']:.1f} × on the H200" in PAGE


def test_the_verifiers_agreement_is_measured():
    judged = result("judged_answers.json")["all"]
    assert f"{judged['answers']:,} public answers" in PAGE
    assert f"{100 * judged['agreement']:.1f} % agreement" in PAGE
    assert ("one disputed answer rewarded" in PAGE) == (judged["wrong_but_paid"] == 1)


def test_the_architectures_are_those_of_the_kits():
    from lmm_r1.cli.kits import COLUMNS, kit_rows

    kits = [dict(zip(COLUMNS, row, strict=True)) for row in kit_rows(vllm_version="0.29.0")]
    assert ("[Nineteen architectures]" in PAGE) == (len(kits) == 19)
    without = [kit["kit"] for kit in kits if (kit["RL"], kit["critic"]) != ("yes", "yes")]
    assert ("all but Janus with RL and a critic" in PAGE) == (without == ["janus"])


def test_what_the_page_says_of_other_trainers_is_what_their_installed_versions_do():
    for name, says in (("openrlhf", "[OpenRLHF 0.11.2]"), ("trl", "[TRL 1.16]")):
        assert says.strip("[]").rpartition(" ")[2] in version(name)
        assert says in PAGE
    for module, refusals in (
        ("openrlhf.cli.train_ppo_ray", ("VLM training does not support critic", "does not support --packing_samples")),
        ("trl.trainer.sft_trainer", ("Packing is not supported for vision datasets",)),
    ):
        package, *names = module.split(".")
        path = "/".join(names) + ".py"
        assert f"`{path}`" in PAGE
        source = Path(str(distribution(package).locate_file(package))) / path
        assert all(refusal in source.read_text(encoding="utf-8") for refusal in refusals)


def test_the_make_targets_of_the_page_are_there():
    targets = set(re.findall(r"^make ([\w-]+)", PAGE, flags=re.MULTILINE))
    assert {"install", "demo", "test"} <= targets
    targets |= set(re.findall(r"`?make ([\w-]+)", PAGE))
    assert "test-full" in targets
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


def test_the_page_names_commands_files_and_a_version_of_python_that_exist():
    from lmm_r1.cli import COMMANDS

    assert set(re.findall(r"lmm-r1 (\w+)", PAGE)) <= set(COMMANDS)
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGE)]
    assert [link for link in links if not (ROOT / link).exists()] == []
    [oldest] = re.findall(r"Python ([\d.]+) or later", PAGE)
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_command_is_on_the_page_of_commands():
    from lmm_r1.cli import COMMANDS

    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {name for name in COMMANDS if f"`{name}`" not in page} == set()
