"""Whatever depends on an architecture stands in its kit: no other module knows one by name."""

import re
from pathlib import Path

import pytest

import lmm_r1
from lmm_r1.lmm_kits import KITS, get_kit

PACKAGE = Path(lmm_r1.__file__).parent
# Short names are looked for as words: "variables" holds one of them, and "graphics" another.
AS_WORDS = ("phi", "aria")
KIT_NAMES = set(KITS) - {"llm", *AS_WORDS}
ANYWHERE = ("qwen", "gemma", "llama", "janus", "internvl", *KIT_NAMES)
NAMES = re.compile(
    "|".join([*map(re.escape, ANYWHERE), *(f"(?<![a-z]){name}(?![a-z])" for name in AS_WORDS)]), re.IGNORECASE
)
# A project, whose name has that of an architecture in it.
PROJECT = re.compile(r"llama[-_]?factory", re.IGNORECASE)
MODULES = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "lmm_kits" not in path.parents]


def test_no_module_outside_the_kits_names_an_architecture():
    named = [
        f"lmm_r1/{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in MODULES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if NAMES.search(PROJECT.sub("", line))
    ]
    assert named == []


@pytest.mark.parametrize("name", KITS)
def test_every_kit_lies_among_the_kits_under_the_name_of_its_checkpoints(name):
    assert KITS[name].startswith("lmm_r1.lmm_kits.")
    assert get_kit(name).model_type == name


@pytest.mark.parametrize("text", ["Qwen/Qwen2.5-VL", "TinyGemma3", "phi3_v", "Phi-4", "rhymes/Aria", "InternVL3"])
def test_the_search_finds_names_as_they_are_written(text):
    assert NAMES.search(text)


@pytest.mark.parametrize("text", ["environment variables", "graphics", "philosophy"])
def test_the_search_leaves_other_words_alone(text):
    assert not NAMES.search(text)
