"""The documentation as a site: every link leads somewhere, and every page has a place in the menu; no site is built here."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

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
