"""The documentation as a site: every link leads somewhere, and every page has a place in the menu; no site is built here."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import lmm_r1

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "docs"))


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


def test_every_page_of_docs_stands_in_the_menu_and_the_built_ones_do_too(site, tmp_path):
    site.stage(tmp_path)
    menu = set(re.findall(r"[:-] (\S+\.md)$", (ROOT / "docs/mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert {str(page.relative_to(tmp_path)) for page in tmp_path.glob("docs/**/*.md")} <= menu
    assert all((tmp_path / page).is_file() for page in menu)
    assert "- [train_sft](flags/train_sft.md)\n" in (tmp_path / "docs/flags.md").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name_once(site):
    listed = re.findall(r"^::: lmm_r1\.(\w+)$", site.api_page(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(lmm_r1.__all__)
    assert listed[:2] + listed[-2:] == ["evaluate", "generate", "KITS", "VERIFIERS"]


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/owner/lmm-r1.git", "https://github.com/owner/lmm-r1"),
        ("https://user:secret@git.example.org:8443/owner/lmm-r1/", "https://git.example.org:8443/owner/lmm-r1"),
        ("git@gitlab.com:group/owner/lmm-r1.git", "https://gitlab.com/group/owner/lmm-r1"),
        ("ssh://git@git.example.org:2222/owner/lmm-r1", "https://git.example.org/owner/lmm-r1"),
        *((remote, None) for remote in ("", "/srv/lmm-r1.git", "../lmm-r1", "file:///srv/lmm-r1.git")),
        *((remote, None) for remote in ("git@host:/srv/lmm-r1", "work:lmm-r1", "http://user:secret@127.0.0.1/lmm-r1")),
    ],
)
def test_only_an_address_that_a_browser_shows_is_linked_and_never_with_a_password(site, remote, address):
    settings = yaml.safe_load(site.edit_links(remote)) or {}
    assert settings == ({"repo_url": address, "edit_uri": "edit/main/"} if address else {})


def test_the_site_has_the_version_of_the_project(site, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "lmm-r1"\nversion = "1.2.3"\n')
    monkeypatch.setattr(site, "ROOT", tmp_path)
    assert site.site_settings("") == "site_name: LMM-R1 1.2.3\ndocs_dir: pages\nsite_dir: site\n"


def test_nothing_is_fetched_from_elsewhere_when_a_page_is_read():
    settings = yaml.safe_load((ROOT / "docs/mkdocs.yml").read_text())
    assert settings["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & settings.keys()
    # The theme's link to the repository asks its host for numbers.
    assert "data-md-component" not in (ROOT / "docs/theme/partials/source.html").read_text()
