"""The parts of the report that are text: headline, tables, settings, how to make it again, citations."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np

from fedpick.report import analysis
from fedpick.report.analysis import Results
from fedpick.report.charts_base import Material
from fedpick.report.charts_palette import Style
from fedpick.report.tables import Column, Table, difference_table, tables_of
from fedpick.report.tables_groups import distance_table, group_table

__all__ = [
    "citations_card",
    "groups_card",
    "lead",
    "notices",
    "policies_card",
    "reproduce_card",
    "runs_card",
    "settings_card",
    "spec_toml",
    "tables_cards",
    "tiles",
]

_MOST_LINES = 20


def lead(material: Material) -> str:
    """The setting in one sentence."""
    experiment, federation = material.results.experiment, material.shared_federation()
    spec = experiment.spec
    clients = f"{federation.num_clients:,} clients" if federation else "clients"
    budget = spec["run"].get("budget")
    chosen = f"up to {budget:,} chosen" if budget else "everybody available chosen"
    seeds = spec["run"].get("seeds", [])
    availability = spec.get("availability", {}).get("name", "ideal")
    return (
        f"{spec['data']['name']}, dealt by {spec['partition']['name']} to {clients}; {chosen} in each of "
        f"{_count(experiment.rounds, 'round')}, availability {availability}, {_count(len(seeds), 'seed')}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def notices(results: Results) -> str:
    """What a reader must know first: runs that failed or are not finished."""
    runs = [(policy.label, run) for policy in results.policies for run in policy.runs]
    lines = []
    if not any(len(run.rounds["round"]) for _, run in runs):
        lines.append("No run of this experiment has finished a round yet: there is nothing to draw.")
    elif results.incomplete:
        lines.append(
            f"Not finished: {'; '.join(results.incomplete)}. "
            "Lines stop at the last round that all begun seeds of a policy have."
        )
    lines += [f"Failed: {label}, seed {run.run.seed}: {run.run.error}" for label, run in runs if run.run.error]
    return "".join(f'<p class="notice" role="note">{escape(line)}</p>' for line in lines)


def _dot(style: Style) -> str:
    return f'<span class="dot" style="--light:{style.light};--dark:{style.dark}"></span>'


def tiles(material: Material, styles: Mapping[str, Style]) -> str:
    """Who came first at what; nothing where there is only one policy to compare."""
    results = material.results
    wanted = [("Highest final accuracy", Column("", analysis.final_accuracy, 1, 100.0, "high"), " %")]
    target = _hardest_reached(results)
    if target is not None:
        percent = f"{100 * target:g} %"

        def rounds(run: analysis.RunResults) -> float | None:
            return analysis.rounds_to_target(run, target)

        def sent(run: analysis.RunResults) -> float | None:
            return analysis.bytes_to_target(run, target)

        wanted.append((f"Fewest rounds to {percent}", Column("", rounds, 1, 1.0, "low"), " rounds"))
        wanted.append((f"Fewest bytes to {percent}", Column("", sent, 2, 1e-6, "low"), " MB"))

    def jain(run: analysis.RunResults) -> float | None:
        trace = material.traces.get(run.run.id)
        final = trace.jain[-1] if trace is not None and len(trace.jain) else np.nan
        return float(final) if np.isfinite(final) else None

    wanted.append(("Most even choice", Column("", jain, 3, 1.0, "high"), " (Jain's index)"))
    made = []
    for what, column, unit in wanted:
        lines = tuple((policy.label, (analysis.over_seeds(policy, column.measure),)) for policy in results.policies)
        table = Table("", (column,), lines)
        winner = table.best()[0]
        if winner is None:
            continue
        quantity = dict(lines)[winner][0]
        best = quantity.mean or 0.0
        level = [label for label, (each,) in lines if each.mean is not None and np.isclose(each.mean, best)]
        names = "".join(f"{_dot(styles[label])}{escape(label)}" for label in level)
        value = column.text(quantity) if len(level) == 1 else _mean(column, quantity)
        made.append(
            f'<div class="tile"><p class="what">{escape(what)}</p><p class="who">{names}</p>'
            f'<p class="value">{escape(value + unit)}</p></div>'
        )
    return f'<div class="tiles">{"".join(made)}</div>' if made else ""


def _mean(column: Column, quantity: analysis.Quantity) -> str:
    """Of several that are level: their means agree, their deviations need not."""
    return column.text(analysis.Quantity((quantity.mean,)))


def _hardest_reached(results: Results) -> float | None:
    """The highest target that two policies reached with all their seeds."""
    for target in sorted(results.experiment.targets, reverse=True):
        reached = 0
        for policy in results.policies:
            values = [analysis.rounds_to_target(run, target) for run in policy.runs]
            reached += bool(values) and None not in values
        if reached >= 2:
            return target
    return None


def tables_cards(results: Results, styles: Mapping[str, Style], window: int, against: str | None = None) -> str:
    """The tables of `fedpick report`, the best of a column marked; paired differences where somebody asks for them."""
    # The differences stand first, next to their figure.
    shown = [] if against is None else [difference_table(results, against, window)]
    return "".join(_table(table, styles) for table in [*shown, *tables_of(results, window)])


def groups_card(material: Material, styles: Mapping[str, Style]) -> str:
    """What groups of clients should have had and got; nothing where clients are not in groups."""
    if not material.accounts:
        return ""
    table = group_table(material.store, material.results, material.grouping, material.accounts)
    card = _table(table, styles)
    far = _table(distance_table(material.store, material.results, material.grouping, material.accounts), styles)
    if len(table.lines) <= _MOST_LINES:
        return far + card
    # The figures above show the same; whoever wants every number opens it.
    return (
        far
        + f'<details class="card"><summary>{escape(table.title)}: {len(table.lines)} lines</summary>{card}</details>'
    )


def _table(table: Table, styles: Mapping[str, Style]) -> str:
    winners = table.best()
    head = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in table.columns)
    rows = []
    owners = table.policies or tuple(label for label, _ in table.lines)
    for owner, (label, *cells) in zip(owners, table.cells(), strict=True):
        marked = "".join(
            f'<td class="best">{escape(cell)}</td>' if winners[position] == label else f"<td>{escape(cell)}</td>"
            for position, cell in enumerate(cells)
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
    """A setting as a person would write it: name first, then its options."""
    if not isinstance(value, Mapping):
        return json.dumps(value) if isinstance(value, (list, bool)) else str(value)
    options = ", ".join(f"{key} = {_words(item)}" for key, item in value.items() if key != "name")
    name = str(value.get("name", ""))
    return f"{name} ({options})" if name and options else name or options or "defaults"


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs if text)
    return f'<dl class="facts">{lines}</dl>'


def settings_card(material: Material) -> str:
    """The setting, in words."""
    experiment, federation = material.results.experiment, material.shared_federation()
    spec = experiment.spec
    run = spec["run"]
    pairs = [("data set", _words(spec["data"])), ("partition", _words(spec["partition"]))]
    if federation is not None:
        sizes = federation.num_examples
        pairs.append(
            (
                "clients",
                f"{federation.num_clients:,}, with {sizes.min():,.0f} to {sizes.max():,.0f} examples each "
                f"({sizes.sum():,.0f} in all, {federation.num_classes} classes)",
            )
        )
    pairs += [(name, _words(spec[name])) for name in ("task", "local", "server") if spec.get(name)]
    pairs += [(name, _words(spec[name])) for name in ("availability", "faults", "simulator") if spec.get(name)]
    pairs += [
        ("rounds", f"{experiment.rounds:,}"),
        ("cohort size", f"{run['budget']:,}" if run.get("budget") else "everybody available"),
        ("seeds", ", ".join(str(seed) for seed in run.get("seeds", []))),
        ("targets", ", ".join(f"{100 * target:g} %" for target in experiment.targets)),
        ("experiment", experiment.hash),
        ("last run", experiment.touched_at),
    ]
    return f'<div class="card">{_facts(pairs)}</div>'


def policies_card(results: Results) -> str:
    """Every policy with all its hyper-parameters, the defaults included."""
    rows = []
    for policy in results.policies:
        parameters = _words(policy.runs[0].run.parameters) if policy.runs[0].run.parameters else "none"
        cells = f'<th scope="row">{escape(policy.label)}</th><td>{escape(policy.policy)}</td>'
        rows.append(f"<tr>{cells}<td>{escape(parameters)}</td></tr>")
    return (
        '<div class="card"><h3>Policies</h3><table class="left"><thead><tr><th scope="col">label</th>'
        '<th scope="col">policy</th><th scope="col">hyper-parameters</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def runs_card(results: Results) -> str:
    """The manifest: status, time and versions of every run."""
    rows = []
    versions: dict[str, dict[str, None]] = {}
    hosts: dict[str, None] = {}
    for policy in results.policies:
        for run in policy.runs:
            facts = run.run
            for package, version in facts.manifest.get("versions", {}).items():
                versions.setdefault(package, {}).setdefault(str(version))
            host = facts.manifest.get("host", {})
            if host:
                hosts.setdefault(f"{host.get('system', '')}, {host.get('cores', '?')} cores")
            cells = (facts.status, f"{len(run.rounds['round']):,}", f"{facts.wall_seconds:.1f}", facts.key[:12])
            started = str(facts.manifest.get("started_at", ""))
            rows.append(
                f'<tr><th scope="row">{escape(policy.label)}</th><td>{facts.seed}</td>'
                + "".join(f"<td>{escape(cell)}</td>" for cell in (*cells, started))
                + "</tr>"
            )
    pairs = [(package, ", ".join(found)) for package, found in versions.items()]
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("policy", "seed", "status", "rounds", "seconds", "key", "started")
    )
    return (
        f'<div class="card"><h3>Versions</h3>{_facts([*pairs, ("computed on", "; ".join(hosts))])}</div>'
        f'<details class="card"><summary>All {len(rows)} runs</summary><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></details>"
    )


def reproduce_card(results: Results) -> str:
    """The spec and the commands that make these results again."""
    experiment = results.experiment
    commands = f"fedpick run experiment.toml\nfedpick report --experiment {experiment.hash[:8]}"
    return (
        '<div class="card"><h3>Make it again</h3><p>Save the spec below as <code>experiment.toml</code>, then:</p>'
        f'{_copyable("commands", commands)}</div><details class="card"><summary>Spec</summary>'
        f"{_copyable('spec', spec_toml(experiment.spec))}</details>"
    )


def citations_card(results: Results) -> str:
    """BibTeX of the policies, each once, as it was stored with the runs."""
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


def spec_toml(spec: Mapping[str, Any]) -> str:
    """The spec as the TOML file that it came from, or could have come from.

    >>> print(spec_toml({"title": "t", "run": {"rounds": 3}, "policies": [{"name": "uniform"}]}))
    title = "t"
    <BLANKLINE>
    [run]
    rounds = 3
    <BLANKLINE>
    [[policies]]
    name = "uniform"
    """
    plain = [f"{_key(key)} = {_value(value)}" for key, value in spec.items() if not isinstance(value, (Mapping, list))]
    blocks = ["\n".join(plain)] if plain else []
    for name, table in spec.items():
        if isinstance(table, Mapping) and table:
            blocks.append("\n".join([f"[{_key(name)}]", *_assignments(table)]))
    for name, items in spec.items():
        if isinstance(items, list):
            blocks += ["\n".join([f"[[{_key(name)}]]", *_assignments(item)]) for item in items]
    return "\n\n".join(blocks)


def _assignments(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_assignments(value)) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are words of TOML, too
    return json.dumps(value, ensure_ascii=False)
