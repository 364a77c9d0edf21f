"""Build the documentation as a site from every page of the repository and the files that they link to.

`make docs` runs `python docs/site.py FOLDER`, which writes FOLDER/site. A link to a missing file or heading fails it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "docs" / "mkdocs.yml"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "datasets/README.md", "remote_rm/README.md")
PAGES += ("lmm_r1/lmm_kits/README.md", "compat/flash-attn/README.md")
# The target of a Markdown link or image.
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s]+)(?=\))")
# A line that shows a file of Python: the site has its text here, a Git host only the link next to it.
_SHOWN = re.compile(r"^<!-- file: (\S+\.py) -->$", flags=re.MULTILINE)
_CODE = re.compile(r"```.*?```|`[^`\n]*`", flags=re.DOTALL)


def main(folder: str) -> None:
    """Stage the pages and build the site from them."""
    staged, site = Path(folder) / "pages", Path(folder) / "site"
    shutil.rmtree(staged, ignore_errors=True)
    stage(staged)
    settings = Path(folder) / "mkdocs.yml"
    paths = f"docs_dir: {staged.name}\nsite_dir: {site.name}\n"
    settings.write_text(SETTINGS.read_text(encoding="utf-8") + paths, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(settings)]
    if (done := subprocess.run(command, check=False)).returncode:
        raise SystemExit(done.returncode)
    sys.stdout.write(f"{site / 'index.html'}\n")


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
    for page, text in staged.items():
        _copy(page, folder, text=_with_files(_without_folders(text, page), page))


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
