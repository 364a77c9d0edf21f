"""The table of kits: what `lmm-r1 kits` prints, and the copy of it in docs/kits.md."""

import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lmm_r1.cli import kits
from lmm_r1.lmm_kits import KITS, get_kit
from lmm_r1.lmm_kits.registry import read_facts

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.search(r'"vllm==([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]


def test_the_docs_show_the_table_of_the_kits():
    shown = (ROOT / "docs" / "kits.md").read_text().partition("<!-- kits -->\n")[2].partition("\n<!-- /kits -->")[0]
    made = kits.markdown(kits.kit_rows(vllm_version=PINNED), kits.kit_notes())
    assert shown == made, "put the output of `lmm-r1 kits --markdown` between the marks in docs/kits.md"


def test_every_column_names_the_kits_that_a_contract_is_asked_of():
    """A contract that takes its kits from elsewhere lets its column claim what no test runs."""
    contracts = "".join(file.read_text() for file in Path(__file__).parent.glob("test_kit_*.py"))
    asked = set(re.findall(r'kits_with\("(.+?)"\)', contracts))
    assert asked == set(kits.COLUMNS) - {"kit", "vLLM", "checkpoints"}


@pytest.mark.parametrize("name", KITS)
def test_the_facts_read_from_a_kits_source_are_the_attributes_of_the_kit(name):
    assert asdict(read_facts(name)) == {fact: getattr(get_kit(name), fact) for fact in asdict(read_facts(name))}


def test_the_table_is_made_without_loading_a_kit_and_fits_on_80_columns(tmp_path):
    environment = {**os.environ, "COLUMNS": "80", "LMM_R1_CACHE": str(tmp_path)}
    printed = (
        "import sys; from lmm_r1.cli import main; main(['kits']); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", printed], env=environment, capture_output=True, text=True, check=True)
    *lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert all(re.search(rf"^ ?{name} ", done.stdout, re.MULTILINE) for name in KITS)


def test_a_row_says_what_the_kit_and_the_flags_say(monkeypatch):
    trains_only = replace(
        read_facts("llm"), engine_refusal="it has no class for it", takes_images=True, checkpoints="Some-1B"
    )
    monkeypatch.setattr(kits, "KITS", {"some": "nowhere"})
    monkeypatch.setattr(kits, "read_facts", lambda name: trains_only)
    (row,) = kits.kit_rows(vllm_version="1.2.3")
    named = dict(zip(kits.COLUMNS, row, strict=True))
    assert named == {
        "kit": "llm", "images": "yes", "video": "no", "SFT": "yes", "DPO": "yes", "RL": "no", "critic": "no", "LoRA": "yes",
        "QLoRA": "yes", "packed": "yes", "shared prefix": "yes", "vLLM": "no class", "checkpoints": "Some-1B",
    }  # fmt: skip
    assert kits.kit_notes() == ["llm does not support RL: it has no class for it."]


def test_the_terminals_table_leaves_out_what_is_the_same_for_all():
    rows = [("a", "yes", "no", *["yes"] * 8, "1.0", "A"), ("b", "no", "no", *["no"] * 8, "1.0", "B")]
    places, sentence = kits.apart(rows)
    assert [kits.COLUMNS[place] for place in places] == [
        "kit", "images", "SFT", "DPO", "RL", "critic", "LoRA", "QLoRA", "packed", "shared prefix", "checkpoints",
    ]  # fmt: skip
    assert sentence == "All kits: video no, vLLM 1.0."


@pytest.mark.parametrize("flags", [[], ["--markdown"]])
def test_the_command_prints_every_kit_with_the_engines_version(flags, capsys):
    kits.main(flags)
    printed = capsys.readouterr().out
    assert all(name in printed for name in KITS)
    assert kits.engine_version() in printed
