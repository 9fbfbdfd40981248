"""The report: one HTML file that needs no network, no server and no other file.

    from fedpick.report import write_report
    write_report("results/fedpick.sqlite", "report.html")           # the latest experiment
    write_report("results/fedpick.sqlite", "report.html", "f4c7b6b3")

`charts` decides what is shown. `assets/drawing.js` and `comparing.js` draw it with Plotly, whose code (4.8 MB) is
nearly all of the file.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from functools import partial
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import fedpick
from fedpick.core.errors import MissingDependency
from fedpick.core.writing import refuse_directory, write_atomically
from fedpick.experiments.store import Experiment, Store, opened
from fedpick.experiments.toml import toml_text
from fedpick.report import analysis
from fedpick.report.analysis import Quantity, Results, RunResults
from fedpick.report.charts import sections_of
from fedpick.report.charts.chart import Chart, Section, Style, styles_of
from fedpick.report.material import Material, read_material
from fedpick.report.tables import (
    CREDIBILITY_TITLE,
    TIME_TITLE,
    Column,
    Table,
    clock_unit,
    difference_table,
    distance_table,
    fairness_table,
    group_table,
    tables_of,
)
from fedpick.report.verdict import Verdict, plural, verdict_of

try:
    from plotly.offline import get_plotlyjs
except ModuleNotFoundError as error:
    raise MissingDependency("The report needs Plotly. Install it with: pip install 'fedpick[report]'") from error

__all__ = ["page_of", "write_report"]

_MOST_LINES = 20
_MOST_CLIENTS = 1000


def write_report(
    store: Store | str | Path,
    path: str | Path = "report.html",
    experiment: Experiment | str | int | None = None,
    *,
    window: int = 1,
    against: str | None = None,
    grouping: str | None = None,
    by: str = "accuracy",
) -> Path:
    """Write the report of one experiment (id, title or hash; None: the latest) and return its path.

    `window` adds columns to the tables for the mean over that many evaluations, `against` paired differences to the
    policy of that name. `grouping` of the clients: "availability" or "cluster"; None: the most telling one, if any.
    `by`: "accuracy", or "time" or "equal-time" to judge by virtual time and to draw lines over it.
    """
    target = refuse_directory(path)  # fail before the work
    with opened(store) as reader:
        text = page_of(read_material(reader, experiment, grouping=grouping), window=window, against=against, by=by)
    return write_atomically(target, text)


def page_of(material: Material, *, window: int = 1, against: str | None = None, by: str = "accuracy") -> str:
    """The whole page as text."""
    results = material.results
    timed = analysis.common_time(results.policies) is not None
    styles = styles_of([policy.label for policy in results.policies])
    sections = sections_of(material, against=against, window=window)
    tables = tables_of(results, window, most_clients=_MOST_CLIENTS)
    times = [tables.pop()] if tables and tables[-1].title == TIME_TITLE else []
    if against is not None:
        tables.insert(0, difference_table(results, against, window))  # next to its figure
    after = {
        "outcome": _table(fairness_table(results, material.fairness), styles) if material.fairness else "",
        "results": "".join(
            (_folded if table.title == CREDIBILITY_TITLE else _table)(table, styles) for table in tables
        ),
        "groups": _groups_card(material, styles),
        "appendix": "".join(_table(table, styles) for table in times) + _distance_card(material, styles),
    }
    parts = [(each.key, each.title, _section(each, after=after.pop(each.key, ""))) for each in sections]
    if "results" in after:
        parts.insert(0, ("results", "Results", _plain_section("results", "Results", after["results"])))
    if after.get("appendix"):
        parts.append(("appendix", "Appendix", _plain_section("appendix", "Appendix", after["appendix"])))
    closing = _settings_card(material) + _policies_card(results) + _runs_card(results) + _reproduce_card(results)
    parts.append(("settings", "Settings", _plain_section("settings", "Settings", closing)))
    citations = _citations_card(results)
    if citations:
        parts.append(("citations", "Citations", _plain_section("citations", "Citations", citations)))
    replacements = {
        "generator": f"fedpick {fedpick.__version__}",
        "title": escape(results.experiment.title),
        "lead": escape(_lead(material)),
        "contents": "".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in parts),
        "main": _notices(results)
        + _verdict(verdict_of(results, material.accounts, material.fairness, against=against, window=window, by=by))
        + _tiles(material, styles)
        + "".join(text for _, _, text in parts),
        "footer": _FOOTER.format(version=escape(fedpick.__version__)),
        "data": _embedded({**_content(sections, styles), "axis": "clock" if by != "accuracy" and timed else "round"}),
        "css": _asset("page.css"),
        "drawing": _asset("drawing.js"),
        "comparing": _asset("comparing.js"),
        "page": _asset("page.js"),
        "plotly": get_plotlyjs(),
    }
    return _filled(_asset("page.html"), replacements)


_FOOTER = (
    "Made by fedpick {version} from its store of results; figures drawn by Plotly.js (MIT licence). "
    "With the keyboard: <kbd>Tab</kbd> to a figure, <kbd>←</kbd> <kbd>→</kbd> read values, <kbd>+</kbd> <kbd>−</kbd> "
    "zoom, <kbd>0</kbd> shows everything again."
)


def _asset(name: str) -> str:
    return (resources.files("fedpick.report") / "assets" / name).read_text(encoding="utf-8")


def _filled(template: str, replacements: dict[str, str]) -> str:
    """Replace every @@name@@ in one pass, so that inserted texts are not searched again."""
    pieces = template.split("@@")
    for position in range(1, len(pieces), 2):
        pieces[position] = replacements[pieces[position]]
    return "".join(pieces)


def _embedded(value: Any) -> str:
    """JSON that cannot close the script element around it."""
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


# The parts of the page


def _lead(material: Material) -> str:
    """The setting in one sentence."""
    experiment, federation = material.results.experiment, material.shared_federation()
    spec = experiment.spec
    clients = f"{federation.num_clients:,} clients" if federation else "clients"
    if experiment.recorded:
        seeds = plural(len(spec["run"]["seeds"]), "seed")
        return f"Recorded in a training loop with {clients}; {plural(experiment.rounds, 'round')}, {seeds}."
    budget = spec["run"].get("budget")
    chosen = f"up to {budget:,} chosen" if budget else "all available clients chosen"
    seeds = spec["run"].get("seeds", [])
    availability = spec.get("availability", {}).get("name", "ideal")
    return (
        f"{spec['data']['name']}, dealt by {spec['partition']['name']} to {clients}; {chosen} in each of "
        f"{plural(experiment.rounds, 'round')}, availability {availability}, {plural(len(seeds), 'seed')}."
    )


def _notices(results: Results) -> str:
    """Runs that failed or are not finished."""
    runs = [(policy.label, run) for policy in results.policies for run in policy.runs]
    lines = []
    if not any(len(run.rounds["round"]) for _, run in runs):
        lines.append("No run of this experiment has finished a round yet: there is nothing to draw.")
    elif results.incomplete:
        lines.append(
            f"Not finished: {'; '.join(results.incomplete)}. "
            "Lines stop at the last round that all started seeds of a policy have reached."
        )
    lines += [f"Failed: {label}, seed {run.run.seed}: {run.run.error}" for label, run in runs if run.run.error]
    return "".join(f'<p class="notice" role="note">{escape(line)}</p>' for line in lines)


def _dot(style: Style) -> str:
    return f'<span class="dot" style="--light:{style.light};--dark:{style.dark}"></span>'


def _verdict(verdict: Verdict) -> str:
    headline, *details = (escape(sentence).replace(" %", "\N{NO-BREAK SPACE}%") for sentence in verdict.sentences)
    items = "".join(f"<li>{sentence}</li>" for sentence in details)
    return (
        f'<section class="verdict" aria-label="Verdict"><p class="headline">{headline}</p>'
        f"{f'<ul>{items}</ul>' if items else ''}</section>"
    )


def _tiles(material: Material, styles: Mapping[str, Style]) -> str:
    """Winners and ties of the main comparisons; empty if there is only one policy or one seed."""
    results = material.results
    wanted = [("Highest final accuracy", Column("", analysis.final_accuracy, 1, 100.0, "high"), " %")]
    target = _hardest_reached(results)
    if target is not None:
        rounds, sent = (partial(each, target=target) for each in (analysis.rounds_to_target, analysis.bytes_to_target))
        wanted.append((f"Fewest rounds to {100 * target:g} %", Column("", rounds, 1, 1.0, "low"), " rounds"))
        wanted.append((f"Fewest bytes to {100 * target:g} %", Column("", sent, 2, 1e-6, "low"), " MB"))
        unit, scale = clock_unit(results)
        soon = partial(analysis.seconds_to_target, target=target)  # None without a clock: no tile
        wanted.append((f"Shortest time to {100 * target:g} %", Column("", soon, 2, scale, "low"), f" {unit}"))

    def jain(run: RunResults) -> float | None:
        history = material.histories.get(run.run.id)
        final = history.jain[-1] if history is not None and len(history.jain) else np.nan
        return float(final) if np.isfinite(final) else None

    wanted.append(("Most even choice", Column("", jain, 3, 1.0, "high"), " (Jain's index)"))
    made = []
    for what, column, unit in wanted:
        quantities = {policy.label: analysis.over_seeds(policy, column.measure) for policy in results.policies}
        leading = analysis.leaders(quantities, column.best)
        if not leading or quantities[leading[0]].sd is None:
            continue
        names = "".join(f"<span>{_dot(styles[label])}{escape(label)}</span>" for label in leading)
        value = column.text(quantities[leading[0]])
        if len(leading) > 1:
            ends = sorted({column.text(Quantity((quantities[label].mean,))) for label in leading}, key=float)
            value = f"a tie: {' to '.join(dict.fromkeys([ends[0], ends[-1]]))}"
        made.append(
            f'<div class="tile"><p class="what">{escape(what)}</p><p class="who">{names}</p>'
            f'<p class="value">{escape(value + unit)}</p></div>'
        )
    return f'<div class="tiles">{"".join(made)}</div>' if made else ""


def _hardest_reached(results: Results) -> float | None:
    """The highest target that at least two policies reached with all their seeds."""
    for target in sorted(results.experiment.targets, reverse=True):
        costs = [
            Quantity(tuple(analysis.rounds_to_target(run, target) for run in policy.runs))
            for policy in results.policies
        ]
        if sum(cost.mean is not None for cost in costs) >= 2:
            return target
    return None


def _distance_card(material: Material, styles: Mapping[str, Style]) -> str:
    """Distance from the target importance, with the bounds on its cost; empty if clients are not grouped."""
    return _table(distance_table(material.results, material.accounts), styles) if material.accounts else ""


def _groups_card(material: Material, styles: Mapping[str, Style]) -> str:
    """Target and realised importance of the groups; empty if clients are not grouped."""
    if not material.accounts:
        return ""
    return _folded(group_table(material.results, material.accounts), styles)  # the figures above show the same


def _folded(table: Table, styles: Mapping[str, Style]) -> str:
    """A table; one of many lines opens on a click."""
    card = _table(table, styles)
    if len(table.lines) > _MOST_LINES:
        summary = f"{escape(table.title)}: {len(table.lines)} lines"
        card = f'<details class="card"><summary>{summary}</summary>{card}</details>'
    return card


def _cell(heading: str, text: str, *, best: bool = False) -> str:
    """A cell with its heading: on a narrow screen every cell is a line of its own."""
    mark = ' class="best"' if best else ""
    return f'<td{mark} data-heading="{escape(heading)}">{escape(text)}</td>'


def _table(table: Table, styles: Mapping[str, Style]) -> str:
    winners = table.best()
    head = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in table.columns)
    rows = []
    owners = table.policies or tuple(label for label, _ in table.lines)
    for owner, (label, *cells) in zip(owners, table.cells(), strict=True):
        marked = "".join(
            _cell(column.heading, cell, best=winner == label)
            for column, winner, cell in zip(table.columns, winners, cells, strict=True)
        )
        row = f'<th scope="row">{_dot(styles[owner])}{escape(label)}</th>{marked}'
        rows.append(f'<tr data-line="{escape(owner)}">{row}</tr>')
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    # The name of the experiment is on the page already.
    title = table.title.rpartition(": ")[2] if table.title.endswith(": accuracy") else table.title
    title = title[:1].upper() + title[1:]
    return (
        f'<div class="card"><h3>{escape(title)}</h3><table><thead><tr><th scope="col">{escape(table.corner)}</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{note}</div>"
    )


def _words(value: Any) -> str:
    """A setting in words: the name, then its options."""
    if not isinstance(value, Mapping):
        return json.dumps(value) if isinstance(value, (list, bool)) else str(value)
    options = ", ".join(f"{key} = {_words(item)}" for key, item in value.items() if key != "name")
    name = str(value.get("name", ""))
    return f"{name} ({options})" if name and options else name or options or "defaults"


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs if text)
    return f'<dl class="facts">{lines}</dl>'


def _settings_card(material: Material) -> str:
    """The settings of the experiment."""
    experiment, federation = material.results.experiment, material.shared_federation()
    spec = experiment.spec
    run = spec["run"]
    pairs = [
        (name, _words(spec[key])) for name, key in (("data set", "data"), ("partition", "partition")) if key in spec
    ]
    if federation is not None:
        sizes = federation.num_examples
        pairs.append(
            (
                "clients",
                f"{federation.num_clients:,}, with {sizes.min():,.0f} to {sizes.max():,.0f} examples each "
                f"({sizes.sum():,.0f} in all{f', {classes} classes' if (classes := federation.num_classes) else ''})",
            )
        )
    sections = ("task", "local", "server", "availability", "faults", "attacks", "devices", "waiting", "simulator")
    pairs += [(name, _words(spec[name])) for name in sections if spec.get(name)]
    pairs += [
        ("rounds", f"{experiment.rounds:,}"),
        ("cohort size", "" if experiment.recorded else f"{run.get('budget') or 'all available clients'}"),
        ("seeds", ", ".join(str(seed) for seed in run.get("seeds", []))),
        ("targets", ", ".join(f"{100 * target:g} %" for target in experiment.targets)),
        ("experiment", experiment.hash),
        ("last run", experiment.touched_at),
    ]
    return f'<div class="card">{_facts(pairs)}</div>'


def _policies_card(results: Results) -> str:
    """Every policy with all its hyper-parameters, including defaults."""
    rows = []
    for policy in results.policies:
        parameters = _words(policy.runs[0].run.parameters) if policy.runs[0].run.parameters else "none"
        cells = f'<th scope="row">{escape(policy.label)}</th>{_cell("policy", policy.policy)}'
        rows.append(f"<tr>{cells}{_cell('hyper-parameters', parameters)}</tr>")
    return (
        '<div class="card"><h3>Policies</h3><table class="left"><thead><tr><th scope="col">label</th>'
        '<th scope="col">policy</th><th scope="col">hyper-parameters</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _runs_card(results: Results) -> str:
    """Status and time of every run, and the versions used."""
    rows = []
    headings: tuple[str, ...] = ()
    versions: dict[str, dict[str, None]] = {}  # dictionaries as ordered sets
    hosts: dict[str, None] = {}
    for policy in results.policies:
        for run in policy.runs:
            facts = run.run
            for package, version in facts.manifest.get("versions", {}).items():
                versions.setdefault(package, {}).setdefault(str(version))
            host = facts.manifest.get("host", {})
            if host:
                hosts.setdefault(f"{host.get('system', '')}, {host.get('cores', '?')} cores")
            cells = {
                "seed": str(facts.seed),
                "status": facts.status,
                "rounds": f"{len(run.rounds['round']):,}",
                "seconds": f"{facts.wall_seconds:.1f}",
                "key": facts.key[:12],
                "started": str(facts.manifest.get("started_at", "")),
            }
            headings = ("policy", *cells)
            row = "".join(_cell(heading, text) for heading, text in cells.items())
            rows.append(f'<tr><th scope="row">{escape(policy.label)}</th>{row}</tr>')
    pairs = [(package, ", ".join(found)) for package, found in versions.items()]
    head = "".join(f'<th scope="col">{name}</th>' for name in headings)
    return (
        f'<div class="card"><h3>Versions</h3>{_facts([*pairs, ("computed on", "; ".join(hosts))])}</div>'
        f'<details class="card"><summary>All {len(rows)} runs</summary><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></details>"
    )


def _reproduce_card(results: Results) -> str:
    """The spec and the commands that reproduce the results; empty for a recorded experiment."""
    experiment = results.experiment
    if experiment.recorded:
        return ""
    commands = f"fedpick run experiment.toml\nfedpick report --experiment {experiment.hash[:8]}"
    return (
        '<div class="card"><h3>Make it again</h3><p>Save the spec below as <code>experiment.toml</code>, then:</p>'
        f'{_copyable("commands", commands)}</div><details class="card"><summary>Spec</summary>'
        f"{_copyable('spec', toml_text(experiment.spec).rstrip())}</details>"
    )


def _citations_card(results: Results) -> str:
    """BibTeX of the policies, as stored with the runs, each entry once."""
    references: dict[str, list[str]] = {}
    for policy in results.policies:
        reference = next((inspect.cleandoc(run.run.reference) for run in policy.runs if run.run.reference), "")
        if reference:
            references.setdefault(reference, []).append(policy.label)
    if not references:
        return ""
    text = "\n\n".join(references)
    return (
        '<div class="card"><p style="margin-top:0">If these results are of use in a paper, cite those who thought of '
        f"the policies.</p>{_copyable('bibtex', text)}</div>"
    )


def _copyable(key: str, text: str) -> str:
    return (
        f'<button type="button" class="quiet copy" data-copy="{key}">Copy</button><pre id="{key}">{escape(text)}</pre>'
    )
