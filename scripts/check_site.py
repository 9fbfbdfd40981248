"""Check the built documentation: every internal link leads somewhere, and no page needs a network.

    python scripts/check_site.py build/site               # links, anchors, resources
    python scripts/check_site.py build/site --browser     # also open pages in Chromium: console errors, search, width

With `--screenshots FOLDER`, `--browser` writes pictures of the pages that it opens.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import re
import shutil
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}
PAGES = ["index.html", "start/which-policy.html", "policies/fedcor.html", "tutorials/compare.html", "architecture.html"]
WIDTHS = {"desktop": 1400, "phone": 390}


class Page(HTMLParser):
    """The links, the anchors and the loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element refers to."""
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag in LOADED and LOADED[tag] in found:
            self.loaded.append(found[LOADED[tag]])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])


def check_links(site: Path) -> list[str]:
    """Return what is wrong: a sentence per dead link, and per resource from the network."""
    site = site.resolve()
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        here = path.relative_to(site)
        for target in page.links + page.loaded:
            parts = urlsplit(target)
            if parts.scheme in ("http", "https") or target.startswith("//"):
                if target in page.loaded:
                    wrong.append(f"{here} loads {target} from the network")
                continue
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file():
                wrong.append(f"{here} links to {target}, which does not exist")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
                wrong.append(f"{here} links to {target}, which has no such anchor")
    for sheet in site.rglob("*.css"):
        for url in re.findall(r"url\(['\"]?((?:https?:)?//[^)'\"]+)", sheet.read_text()):
            wrong.append(f"{sheet.relative_to(site)} loads {url} from the network")
    return wrong


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line per request."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


def check_in_browser(site: Path, screenshots: Path | None) -> list[str]:
    """Open some pages wide and narrow, light and dark, and search; return what is wrong."""
    from playwright.sync_api import sync_playwright

    handler = functools.partial(QuietHandler, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
        for name, width in WIDTHS.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
                page = context.new_page()
                page.on("console", lambda line: line.type == "error" and wrong.append(f"console: {line.text}"))
                page.on("pageerror", lambda error: wrong.append(f"page error: {error}"))
                page.on("request", lambda made: made.url.startswith((address, "data:")) or wrong.append(made.url))
                for shown in PAGES if scheme == "light" else PAGES[:2]:
                    page.goto(f"{address}/{shown}", wait_until="load")
                    overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                    if overflow > 0:
                        wrong.append(f"{shown} is {overflow} pixels wider than a screen of {width}")
                    if screenshots:
                        page.screenshot(path=screenshots / f"{Path(shown).stem}-{name}-{scheme}.png")
                context.close()
        page = browser.new_page()
        for start in (address, site.resolve().as_uri()):  # from a server, and from disk
            page.goto(f"{start}/search.html?q=availability", wait_until="load")
            page.wait_for_selector("ul.search li a", timeout=30_000)
            if page.locator("ul.search li a").count() < 3:
                wrong.append(f"searching {start} for 'availability' finds fewer than three pages")
            if screenshots:
                page.screenshot(path=screenshots / "search.png")
        browser.close()
    server.shutdown()
    return wrong


def main() -> None:
    """Check a site; leave with 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--screenshots", type=Path)
    options = parser.parse_args()
    wrong = check_links(options.site)
    if options.browser:
        if options.screenshots:
            options.screenshots.mkdir(parents=True, exist_ok=True)
        wrong += check_in_browser(options.site, options.screenshots)
    print("\n".join(wrong) or f"{len(list(options.site.rglob('*.html')))} pages: every link leads somewhere.")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
