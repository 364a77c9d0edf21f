"""The table of kits: what `lmm-r1 kits` prints, and the copy of it in docs/kits.md."""

import re
from pathlib import Path

import pytest
from helpers.tiny_models import altered

from lmm_r1.cli import kits
from lmm_r1.lmm_kits import KITS, get_kit

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.search(r'"vllm==([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]


def test_the_docs_show_the_table_of_the_kits():
    shown = (ROOT / "docs" / "kits.md").read_text().partition("<!-- kits -->\n")[2].partition("\n<!-- /kits -->")[0]
    made = kits.markdown(kits.kit_rows(vllm_version=PINNED), kits.kit_notes())
    assert shown == made, "put the output of `lmm-r1 kits --markdown` between the marks in docs/kits.md"


def test_a_row_says_what_the_kit_and_the_flags_say(monkeypatch):
    trains_only = altered(
        get_kit("llm"), engine_refusal="it has no class for it", takes_images=True, checkpoints="Some-1B"
    )
    monkeypatch.setattr(kits, "KITS", {"some": "nowhere"})
    monkeypatch.setattr(kits, "get_kit", lambda name: trains_only)
    (row,) = kits.kit_rows(vllm_version="1.2.3")
    named = dict(zip(kits.COLUMNS, row, strict=True))
    assert named == {
        "kit": "llm", "images": "yes", "video": "no", "SFT": "yes", "DPO": "yes", "RL": "no", "critic": "no", "LoRA": "yes",
        "QLoRA": "yes", "packed": "yes", "shared prefix": "yes", "vLLM": "no class", "checkpoints": "Some-1B",
    }  # fmt: skip
    assert kits.kit_notes() == ["llm does not support RL: it has no class for it."]


@pytest.mark.parametrize("flags", [[], ["--markdown"]])
def test_the_command_prints_every_kit_with_the_engines_version(flags, capsys):
    kits.main(flags)
    printed = capsys.readouterr().out
    assert all(name in printed for name in KITS)
    assert kits.engine_version() in printed
