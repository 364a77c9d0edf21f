"""README.md: short, plain and true; test_figures.py checks its figures."""

import json
import re
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS, MOST_WORDS_OF_A_SENTENCE = {"README.md": 900, "docs/performance.md": 900}, 25


def spoken(page: str) -> list[str]:
    """The sentences of a page as they are read aloud: without code, tables, headings and the targets of links."""
    prose = re.sub(r"```.*?```|^\|.*$|^#.*$|!\[.*?\]\(.*?\)", "", page, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    blocks = re.split(r"\n\s*\n|^- ", prose, flags=re.MULTILINE)
    return [
        sentence for block in blocks for sentence in re.split(r"(?<=[.!?:;])\s+", " ".join(block.split())) if sentence
    ]


def test_the_pages_are_short():
    assert [page for page, most in MOST_WORDS.items() if len((ROOT / page).read_text().split()) > most] == []


def test_no_sentence_is_long():
    # A row of links is no sentence.
    long = [sentence for sentence in spoken(PAGE) if len(sentence.split()) > MOST_WORDS_OF_A_SENTENCE]
    assert [sentence for sentence in long if " · " not in sentence] == []


def test_the_architectures_are_those_of_the_kits():
    from lmm_r1.cli.kits import COLUMNS, kit_rows

    kits = [dict(zip(COLUMNS, row, strict=True)) for row in kit_rows(vllm_version="0.29.0")]
    assert f"[{len(kits)} architectures]" in PAGE
    without = [kit["kit"] for kit in kits if (kit["RL"], kit["critic"]) != ("yes", "yes")]
    assert ("all except Janus support RL, with or without a critic" in PAGE) == (without == ["janus"])


def test_what_the_page_says_of_other_trainers_is_what_their_installed_versions_do():
    for name, says in (("openrlhf", "[OpenRLHF 0.11.2]"), ("trl", "[TRL 1.16]")):
        assert says.strip("[]").rpartition(" ")[2] in version(name)
        assert says in PAGE
    for module, refusals in (
        ("openrlhf.cli.train_ppo_ray", ("VLM training does not support critic", "does not support --packing_samples")),
        ("trl.trainer.sft_trainer", ("Packing is not supported for vision datasets",)),
        ("trl.experimental.async_grpo.packing", ("so a token shared by several samples is forwarded",)),
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
        for one in json.loads((ROOT / "benchmarks/results/plan_gpus.json").read_text())["plans"]
        if (one["hardware"], one["model"]) == ("1 x 80 GB", "Qwen/Qwen2.5-VL-3B-Instruct")
    ]
    from lmm_r1.cli import plan as command

    command.main(plan["command"].split()[2:])
    told = " ".join(capsys.readouterr().out.split())
    assert f" {plan['peak_gib_per_gpu']} GiB of 80.0 GiB" in told
    assert f"passes of the update: {plan['pass_tokens']:,} tokens" in told
    assert f"chosen to fit: {plan['chosen']}" in told


def test_the_page_names_commands_files_and_a_version_of_python_that_exist():
    from lmm_r1.cli import COMMANDS

    assert set(re.findall(r"lmm-r1 (\w+)", PAGE)) <= set(COMMANDS)
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGE)]
    assert [link for link in links if not (ROOT / link).exists()] == []
    [oldest] = re.findall(r"Python ([\d.]+)\+", PAGE)
    assert f'requires-python = ">={oldest}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_command_is_on_the_page_of_commands():
    from lmm_r1.cli import COMMANDS

    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {name for name in COMMANDS if f"`{name}`" not in page} == set()
