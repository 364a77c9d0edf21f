"""Build the documentation as a site from every page of the repository and the files that they link to.

`make docs` runs `python docs/site.py FOLDER [REPOSITORY]`, which writes FOLDER/site. A link to a missing file or heading
fails it. The address of the repository, by default that of the remote `origin`, is for its links and those that edit pages.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from flags_page import CONFIGS, flags_page

import lmm_r1

ROOT = Path(__file__).resolve().parents[1]
SETTINGS, THEME = ROOT / "docs" / "mkdocs.yml", ROOT / "docs" / "theme"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "datasets/README.md", "remote_rm/README.md")
PAGES += ("lmm_r1/lmm_kits/README.md", "compat/flash-attn/README.md")
# The target of a Markdown link or image.
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s]+)(?=\))")
# A line that shows a file of Python: the site has its text here, a Git host only the link next to it.
_SHOWN = re.compile(r"^<!-- file: (\S+\.py) -->$", flags=re.MULTILINE)
_CODE = re.compile(r"```.*?```|`[^`\n]*`", flags=re.DOTALL)
# Where the list of the pages of flags is shown.
_FLAGS = "<!-- flags -->"


def main(folder: str, repository: str = "") -> None:
    """Stage the pages and build the site from them."""
    staged, settings = Path(folder) / "pages", Path(folder) / "mkdocs.yml"
    shutil.rmtree(staged, ignore_errors=True)
    stage(staged)
    shutil.copytree(THEME, Path(folder) / THEME.name, dirs_exist_ok=True)
    text = SETTINGS.read_text(encoding="utf-8") + site_settings(repository or _origin())
    settings.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(settings)]
    # Where the reference finds the package.
    done = subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise SystemExit(done.returncode)
    sys.stdout.write(f"{Path(folder) / 'site' / 'index.html'}\n")


def site_settings(remote: str) -> str:
    """Return the lines of mkdocs.yml with the version of the project, the folders, and the links to a Git remote."""
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    return f"site_name: LMM-R1 {version[1]}\ndocs_dir: pages\nsite_dir: site\n{edit_links(remote)}"


def _origin() -> str:
    asked = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    return subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()


def edit_links(remote: str) -> str:
    """Return the settings of links to a Git remote's pages, without its user and password; empty for a folder or an IP address."""
    short = re.fullmatch(r"(?:[^/@:]+@)?([^/@:]+):(?!/)(.+)", remote)
    parts = urlsplit(f"ssh://{short[1]}/{short[2]}" if short else remote)
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https", "ssh") or not re.search(r"\.[a-z]+$", host):
        return ""
    port = f":{parts.port}" if parts.port and parts.scheme != "ssh" else ""
    scheme = parts.scheme.replace("ssh", "https")
    address = f"{scheme}://{host}{port}{parts.path}".removesuffix("/").removesuffix(".git")
    return f"repo_url: {address}\nedit_uri: edit/main/\n"


def stage(folder: Path) -> None:
    """Copy the pages and the files they link to, with their relative paths; exit with the broken links if there are any."""
    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    broken, staged = [], {}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for link in (*links(text), *_SHOWN.findall(text)):
            target = (page.parent / unquote(link.partition("#")[0])).resolve()
            if not target.exists() or not target.is_relative_to(ROOT):
                broken.append(f"{page.relative_to(ROOT)}: {link} leads to nothing")
            elif target.is_file() and target not in pages:
                _copy(target, folder)
        staged[page] = text
    if broken:
        raise SystemExit("\n".join(broken))
    flags = "\n".join(f"- [{command}](flags/{command}.md)" for command in CONFIGS)
    for page, text in staged.items():
        _copy(page, folder, text=_with_files(_without_folders(text, page), page).replace(_FLAGS, flags))
    for command in CONFIGS:
        _copy(ROOT / "docs" / "flags" / f"{command}.md", folder, text=flags_page(command))
    _copy(ROOT / "docs" / "api.md", folder, text=api_page())


def api_page() -> str:
    """Return the reference of the Python API, which mkdocstrings fills: functions, classes, constants and types."""
    names = sorted(lmm_r1.__all__, key=lambda name: (name.isupper(), not name.islower(), name))
    names += "api.functions.TrainKeywords api.functions.RLKeywords api.functions.KDKeywords".split()
    names += "api.functions.Rewards api.Rows api.Settings".split()
    parts = []
    for name in names:
        # Only functions have their signatures in a block of their own, and only settings those of a base that is not here.
        options = f"{{separate_signature: {name.islower()}, inherited_members: {name.endswith('Config')}}}".lower()
        parts.append(f"::: lmm_r1.{name}\n    options: {options}\n")
    return "\n".join(("# Python reference\n", *parts))


def links(text: str) -> list[str]:
    """Return the targets of a page's links and images that are not addresses."""
    return _LINK.findall(_CODE.sub("", text))


def _with_files(text: str, page: Path) -> str:
    """Return a page with the text of the files that it shows."""
    return _SHOWN.sub(lambda shown: f"```python\n{(page.parent / shown[1]).read_text(encoding='utf-8')}```", text)


def _without_folders(text: str, page: Path) -> str:
    """Return a page without its links to folders, because a site shows no folders."""

    def shown(match: re.Match[str]) -> str:
        target = (page.parent / match["target"].partition("#")[0]).resolve()
        return match["name"] if target.is_dir() else match[0]

    return re.sub(r"(?<!!)\[(?P<name>[^\]]+)\]\((?P<target>(?!https?:|#)[^)\s]+)\)", shown, text)


def _copy(path: Path, folder: Path, *, text: str | None = None) -> None:
    place = folder / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    if text is None:
        shutil.copyfile(path, place)
    else:
        place.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
