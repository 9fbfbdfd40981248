"""The report: one HTML file that needs nothing else, no network, no server, no other file.

    from fedpick.report import write_report
    write_report("results/fedpick.sqlite", "report.html")           # the latest experiment
    write_report("results/fedpick.sqlite", "report.html", "f4c7b6b3")

The page is a function of the store alone. `charts` decides what is shown; `assets/drawing.js` and `comparing.js` draw
it with Plotly, whose code is in the file once (4.8 MB, nearly all of its size).
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import fedpick
from fedpick.core.errors import MissingDependency
from fedpick.experiments.store_read import Experiment, Reader
from fedpick.report.charts import sections_of
from fedpick.report.charts_base import Chart, Material, Section, opened, read_material
from fedpick.report.charts_palette import Style, styles_of
from fedpick.report.files import put_file, refuse_directory
from fedpick.report.html_parts import (
    citations_card,
    groups_card,
    lead,
    notices,
    policies_card,
    reproduce_card,
    runs_card,
    settings_card,
    tables_cards,
    tiles,
)

try:
    from plotly.offline import get_plotlyjs
except ModuleNotFoundError as error:
    raise MissingDependency("The report needs Plotly. Install it with: pip install 'fedpick[report]'") from error

__all__ = ["page_of", "write_report"]


def write_report(
    store: Reader | str | Path,
    path: str | Path = "report.html",
    experiment: Experiment | str | int | None = None,
    *,
    window: int = 1,
    against: str | None = None,
    grouping: str | None = None,
) -> Path:
    """Write the report of one experiment (id, title or hash; None: the latest) and return where it is.

    `window` adds columns to the tables for the mean over so many evaluations, `against` the paired differences to the
    policy of that name. `grouping`: of clients, "availability" or "cluster"; None: what tells most, if anything does.
    """
    target = refuse_directory(path)  # before the work, not after it
    which = experiment.id if isinstance(experiment, Experiment) else experiment
    with opened(store) as reader:
        text = page_of(read_material(reader, which, grouping=grouping), window=window, against=against)
    return put_file(target, text)


def page_of(material: Material, *, window: int = 1, against: str | None = None) -> str:
    """The whole page as text."""
    results = material.results
    styles = styles_of([policy.label for policy in results.policies])
    sections = sections_of(material, against=against, window=window)
    tables = tables_cards(results, styles, window, against)
    after = {"results": tables, "groups": groups_card(material, styles)}
    parts = [(each.key, each.title, _section(each, after=after.get(each.key, ""))) for each in sections]
    if not any(key == "results" for key, _, _ in parts):
        parts.insert(0, ("results", "Results", _plain_section("results", "Results", tables)))
    closing = settings_card(material) + policies_card(results) + runs_card(results) + reproduce_card(results)
    parts.append(("settings", "Settings", _plain_section("settings", "Settings", closing)))
    citations = citations_card(results)
    if citations:
        parts.append(("citations", "Citations", _plain_section("citations", "Citations", citations)))
    replacements = {
        "generator": f"fedpick {fedpick.__version__}",
        "title": escape(results.experiment.title),
        "lead": escape(lead(material)),
        "contents": "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in parts),
        "main": notices(results) + tiles(material, styles) + "".join(text for _, _, text in parts),
        "footer": _FOOTER.format(version=escape(fedpick.__version__)),
        "data": _embedded(_content(sections, styles)),
        "css": _asset("page.css"),
        "drawing": _asset("drawing.js"),
        "comparing": _asset("comparing.js"),
        "page": _asset("page.js"),
        "plotly": get_plotlyjs(),
    }
    return _filled(_asset("page.html"), replacements)


_FOOTER = (
    "Made by fedpick {version} from its store of results; the figures are drawn by Plotly.js (MIT licence). "
    "With the keyboard: <kbd>Tab</kbd> to a figure, <kbd>←</kbd> <kbd>→</kbd> read values, <kbd>+</kbd> <kbd>−</kbd> "
    "zoom, <kbd>0</kbd> shows everything again."
)


def _asset(name: str) -> str:
    return (resources.files("fedpick.report") / "assets" / name).read_text(encoding="utf-8")


def _filled(template: str, replacements: dict[str, str]) -> str:
    """Put texts in place of @@name@@, in one pass: what is put in is never searched again."""
    pieces = template.split("@@")
    for position in range(1, len(pieces), 2):
        pieces[position] = replacements[pieces[position]]
    return "".join(pieces)


def _embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _content(sections: tuple[Section, ...], styles: dict[str, Style]) -> dict[str, Any]:
    return {
        "policies": [
            {"label": label, "light": style.light, "dark": style.dark, "dash": style.dash}
            for label, style in styles.items()
        ],
        "charts": [
            {"key": chart.key, "kind": chart.kind, "data": dict(chart.data)}
            for section in sections
            for chart in section.charts
        ],
    }


def _figure(chart: Chart) -> str:
    wide = ' class="wide"' if chart.wide else ""
    shape = " square" if chart.kind in ("matrix", "points") else " low" if chart.kind == "forest" else ""
    return (
        f'<figure{wide} id="figure-{chart.key}" aria-labelledby="title-{chart.key}">'
        f'<figcaption><h3 id="title-{chart.key}">{escape(chart.title)}</h3>'
        f'<p id="caption-{chart.key}">{escape(chart.caption)}</p></figcaption>'
        f'<div class="controls" id="controls-{chart.key}"></div><p class="key" id="key-{chart.key}"></p>'
        f'<div class="plot{shape}" id="plot-{chart.key}" tabindex="0" role="group" aria-roledescription="chart" '
        f'aria-labelledby="title-{chart.key}" aria-describedby="caption-{chart.key}"></div></figure>'
    )


def _section(section: Section, after: str = "") -> str:
    figures = "".join(_figure(chart) for chart in section.charts)
    return (
        f'<section id="{section.key}" aria-labelledby="head-{section.key}"><div class="head">'
        f'<h2 id="head-{section.key}">{escape(section.title)}</h2>'
        f'<div class="controls" data-controls="{section.key}"></div></div>'
        f'<div class="figures">{figures}</div>{after}</section>'
    )


def _plain_section(key: str, title: str, content: str) -> str:
    return (
        f'<section id="{key}" aria-labelledby="head-{key}"><h2 id="head-{key}">{escape(title)}</h2>{content}</section>'
    )
