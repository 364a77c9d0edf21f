"""The documentation as a site: every link leads somewhere, and every page has a place in the menu; no site is built here."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_of_every_page_leads_to_a_file_which_is_there_in_the_site_too(site, tmp_path):
    site.stage(tmp_path)
    pages = list(tmp_path.rglob("*.md"))
    assert len(pages) > 25
    for page in pages:
        for link in site.links(page.read_text(encoding="utf-8")):
            assert (page.parent / link.partition("#")[0]).is_file(), f"{page.relative_to(tmp_path)}: {link}"


def test_a_link_to_nothing_fails(site, tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("[here](there.md), `[not](a/link.md)` and [out](https://example.org)\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"^README.md: there.md leads to nothing$"):
        site.stage(tmp_path / "staged")


def test_a_page_shows_a_file_as_it_is(site, tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("The step:\n\n<!-- file: step.py -->\n\nThat is all.\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"^README.md: step.py leads to nothing$"):
        site.stage(tmp_path / "staged")
    (tmp_path / "step.py").write_text("def step() -> None: ...\n")
    site.stage(tmp_path / "staged")
    shown = (tmp_path / "staged" / "README.md").read_text()
    assert shown == "The step:\n\n```python\ndef step() -> None: ...\n```\n\nThat is all.\n"


def test_the_rl_step_in_the_docs_is_the_file(site, tmp_path):
    site.stage(tmp_path)
    step = (ROOT / "lmm_r1/rl/step.py").read_text(encoding="utf-8")
    assert f"```python\n{step}```" in (tmp_path / "docs/algorithms.md").read_text(encoding="utf-8")


def test_every_page_of_docs_stands_in_the_menu():
    menu = set(re.findall(r": (\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= menu
    assert all((ROOT / page).is_file() for page in menu)


def test_nothing_is_fetched_from_elsewhere_when_a_page_is_read():
    settings = yaml.safe_load((ROOT / "docs/mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & settings.keys()
