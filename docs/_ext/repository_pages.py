"""Pages of the repository that lie outside docs/, and links that leave docs/.

- CHANGELOG.md and its neighbours become pages in project/, written when a build starts.
- Links to these files lead to the pages. Links to folders, which a site does not have, become plain text. Links to
  other files stay: Sphinx copies the files.
- A page without a heading, such as a generated table, gets its file name as heading.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
PAGES = {
    "CHANGELOG.md": "project/changelog",
    "CONTRIBUTING.md": "project/contributing",
    "SECURITY.md": "project/security",
    "CODE_OF_CONDUCT.md": "project/conduct",
    "LICENCES.md": "project/licences",
}
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def adapt_links(text: str, folder: Path) -> str:
    """Return the Markdown of a file in a folder, with the links that the site needs."""

    def adapted(link: re.Match[str]) -> str:
        target = (folder / link["target"]).resolve()
        if "://" in link["target"] or not target.is_relative_to(ROOT) or not target.exists():
            return link[0]
        if target.is_dir():
            return link["text"]
        path, anchor = target.relative_to(ROOT).as_posix(), link["anchor"] or ""
        if path in PAGES:
            return f"[{link['text']}](/{PAGES[path]}.md{anchor})"
        if folder == ROOT:
            return f"[{link['text']}](../{path.removeprefix('docs/')}{anchor})"
        return link[0]

    return LINK.sub(adapted, text)


def write_if_changed(path: Path, text: str) -> None:
    """Write a generated page; leave an equal one alone, so that Sphinx does not read it again."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _write_pages(app: Sphinx) -> None:
    for name, page in PAGES.items():
        write_if_changed(app.srcdir / f"{page}.md", adapt_links((ROOT / name).read_text(), ROOT))


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    text = adapt_links(source[0], (app.srcdir / docname).parent)
    if not re.search(r"^# ", text, re.MULTILINE):
        text = f"# {PurePosixPath(docname).name}\n\n{text}"
    source[0] = text


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("builder-inited", _write_pages)
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
