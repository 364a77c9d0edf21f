"""The table of kits: what `lmm-r1 kits` prints, and the copy of it in docs/kits.md."""

import re
from pathlib import Path

import pytest
from helpers.tiny_models import altered

from lmm_r1.cli import kits
from lmm_r1.lmm_kits import KITS, get_kit

pytestmark = pytest.mark.contract

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
    (row,) = kits.kit_rows(vllm_version="1.2.3", refusals=kits.Refusals(lora=False, packing=True, critic=True))
    named = dict(zip(kits.COLUMNS, row, strict=True))
    assert named == {
        "kit": "llm", "images": "yes", "video": "no", "SFT": "yes", "RL": "no", "LoRA": "yes", "packing": "no", "critic": "no",
        "vLLM": "no class", "checkpoints": "Some-1B",
    }  # fmt: skip
    assert kits.kit_notes() == ["llm takes no part in RL: it has no class for it."]


def test_the_terminals_table_leaves_out_what_is_the_same_for_all():
    rows = [("a", "yes", "no", "yes", "yes", "yes", "yes", "yes", "1.0", "A"), ("b", "no", *["no"] * 6, "1.0", "B")]
    places, sentence = kits.apart(rows)
    assert [kits.COLUMNS[place] for place in places] == [
        "kit", "images", "SFT", "RL", "LoRA", "packing", "critic", "checkpoints",
    ]  # fmt: skip
    assert sentence == "All kits: video no, vLLM 1.0."


@pytest.mark.parametrize("flags", [[], ["--markdown"]])
def test_the_command_prints_every_kit_with_the_engines_version(flags, capsys):
    kits.main(flags)
    printed = capsys.readouterr().out
    assert all(name in printed for name in KITS)
    assert kits.engine_version() in printed
