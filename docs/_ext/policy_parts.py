"""The parts of a policy's page that the code knows: `policy-needs`, `policy-options` and `policy-citation`.

Each takes the names of one or more policies. Options come from the fields of the dataclass, their meaning from the
docstring's `Args`. `policy-table` lists every policy with what it needs; `policy-map` draws them by what the user has
and fears.
"""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

from api_pages import ITEM, SECTION
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

import fedpick
from fedpick.core import registry
from fedpick.core.policy import Signal

SIGNALS = {
    Signal.LOSS: "the **loss** of the current model, asked before the selection (`measure`)",
    Signal.TRIAL: "**trials**: `measure` can train a cohort, measure the model and discard it",
    Signal.UPDATE: "an **update** after local training, asked before the selection (`measure`)",
    Signal.OUTPUTS: "**outputs** of the locally trained model on noise, asked before the selection (`measure`)",
    Signal.OUTCOME_LOSS: "`Outcome.loss`: the **loss** of the received model, reported after training",
    Signal.TRAIN_LOSS: "`Outcome.train_loss`: the mean **loss** over the local steps, reported after training",
    Signal.DURATION: "`Outcome.duration`: how long the client took, measured by the driver",
    Signal.UPDATE_NORM: "`Outcome.update_norm`: the norm of the **update**, which the server sees",
    Signal.LOSS_RMS: "`Outcome.loss_rms`: the root mean square of the **losses** of the client's examples, reported",
    Signal.SKETCH: "`Outcome.sketch`: a short form of the **update**, made by the server",
    Signal.LABEL_HISTOGRAM: "`Clients.label_histogram`: examples per **label**, known from the start",
    Signal.FEATURES: "`Clients.features`: a description of each client's data, known from the start",
    Signal.AVAILABILITY: "`Clients.availability`: the true availability, which only an oracle knows",
    Signal.CORRELATION: "`Clients.correlation`: the true correlation of availability, which only an oracle knows",
}

# Rows of the map, the most demanding first: a policy is in the first one that it needs.
HAVE = {
    "trial cohorts": {Signal.TRIAL, Signal.UPDATE, Signal.OUTPUTS},
    "durations": {Signal.DURATION},
    "losses, asked before": {Signal.LOSS},
    "updates, seen by the server": {Signal.SKETCH, Signal.UPDATE_NORM},
    "losses, reported after": {Signal.OUTCOME_LOSS, Signal.TRAIN_LOSS, Signal.LOSS_RMS},
    "labels or features": {Signal.LABEL_HISTOGRAM, Signal.FEATURES},
    "nothing": set(),
}
# Columns of the map: what a policy was made against. Every other policy is in the last one.
FEAR = {
    "uneven availability": {
        "adafed", "ca-fed", "f3ast", "fedau", "fedgs", "herd", "more-available", "refl", "unbiased",
    },
    "slow clients": {"oort", "tifl"},
    "clients whose data differ": set[str](),
}  # fmt: skip
PAGES = Path(__file__).parents[1] / "policies"


def pages() -> dict[str, str]:
    """Return the page of every policy: the one that shows its options."""
    return {
        name: page.stem
        for page in sorted(PAGES.glob("*.md"))
        for listed in re.findall(r"^```\{policy-options\} (.+)$", page.read_text(), re.MULTILINE)
        for name in listed.split()
    }


def row(name: str) -> str:
    """Return the row of the map that a policy is in."""
    wanted = registry.get(name).needs
    return next(label for label, signals in HAVE.items() if not signals or wanted & signals)


def table() -> str:
    """Return the table of all policies."""
    known = pages()
    rows = ["| policy | what it does | needs |", "|---|---|---|"]
    for name in registry.BUILT_IN:
        if name not in known:
            raise ExtensionError(f"No page in docs/policies has a `policy-options` block that names {name!r}.")
        rows.append(f"| [`{name}`](/policies/{known[name]}.md) | {registry.summary(name)} | {row(name)} |")
    return "\n".join(rows)


def policy_map() -> str:
    """Return the map as an HTML table: policies by what the user has (rows) and fears (columns)."""
    known = pages()
    cells: dict[tuple[str, str], str] = {}
    for name in registry.BUILT_IN:
        fear = next((fear for fear, members in FEAR.items() if name in members), list(FEAR)[-1])
        link = f'<a href="../policies/{known[name]}.html">{name}</a> '
        cells[row(name), fear] = cells.get((row(name), fear), "") + link
    head = "".join(f"<th>{fear}</th>" for fear in FEAR)
    rows = [
        f"<tr><th>{have}</th>" + "".join(f"<td>{cells.get((have, fear), '')}</td>" for fear in FEAR) + "</tr>"
        for have in reversed(HAVE)
        if any((have, fear) in cells for fear in FEAR)
    ]
    return f'<table class="map"><tr><th>you have / you fear</th>{head}</tr>{"".join(rows)}</table>'


def meanings(policy_class: type[Any]) -> dict[str, str]:
    """Return what the docstring says of every option."""
    text = "\n\n".join(inspect.cleandoc(parent.__doc__ or "") for parent in reversed(policy_class.__mro__))
    return {
        word.strip(): " ".join(item[2].split())
        for section in SECTION.finditer(text)
        if section[1] == "Args"
        for item in ITEM.finditer(section[2])
        for word in item[1].split(",")
    }


def kind_of(annotation: Any) -> str:
    """Return a type as a user writes it: the choices of a Literal, else its name."""
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f'`"{choice}"`' for choice in typing.get_args(annotation))
    return f"`{getattr(annotation, '__name__', annotation)}`".replace("typing.", "").replace("NoneType", "None")


def shown(value: Any) -> str:
    """Return a default value as code."""
    return f'`"{value}"`' if isinstance(value, str) else f"`{value!r}`"


def option_rows(name: str) -> dict[str, tuple[str, str]]:
    """Return the default of every option, and the rest of its row: type and meaning."""
    policy_class: Any = registry.load(name)
    known, types = meanings(policy_class), typing.get_type_hints(policy_class)
    rows = {}
    for item in fields(policy_class):
        if item.name not in known:
            raise ExtensionError(f"{policy_class.__name__}.{item.name} is not described in the docstring's Args.")
        meaning = known[item.name].replace("|", r"\|")
        rows[item.name] = shown(item.default), f"{kind_of(types[item.name])} | {meaning}"
    return rows


def options(names: list[str]) -> str:
    """Return a table of options per policy. One with the options of an earlier policy is a sentence."""
    texts: list[str] = []
    earlier: dict[str, dict[str, tuple[str, str]]] = {}
    for name in names:
        rows = option_rows(name)
        like = next((other for other, known in earlier.items() if list(known) == list(rows)), None)
        if not rows:
            texts.append(f"`{name}` has no options.")
        elif like is not None:
            other = [f"`{key}` {rows[key][0]}" for key in rows if rows[key][0] != earlier[like][key][0]]
            suffix = f", with other defaults: {', '.join(other)}" if other else ""
            texts.append(f"`{name}` has the options of `{like}`{suffix}.")
        else:
            lines = [f"| `{key}` | {default} | {rest} |" for key, (default, rest) in rows.items()]
            head = f"Options of `{name}`:\n\n| option | default | type | meaning |\n|---|---|---|---|\n"
            texts.append(head + "\n".join(lines))
            earlier[name] = rows
    return "\n\n".join(texts)


def needs(name: str) -> str:
    """Return what a policy needs with its defaults."""
    wanted = [SIGNALS[signal] for signal in Signal if signal in registry.get(name).needs]
    if not wanted:
        return f"With its defaults, `{name}` needs nothing but the table of clients."
    return f"With its defaults, `{name}` needs:\n\n" + "\n".join(f"- {sentence}" for sentence in wanted)


def citation(name: str) -> str:
    """Return the BibTeX entry of a policy."""
    return f"```bibtex\n{fedpick.cite(name)}\n```"


class Parts(SphinxDirective):
    """A part of the page, for the policies that the argument names."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the parts, one after the other; equal ones once."""
        names = self.arguments[0].split()
        if self.name == "policy-options":
            return self.parse_text_to_nodes(options(names))
        write = {"policy-needs": needs, "policy-citation": citation}[self.name]
        return self.parse_text_to_nodes("\n\n".join(dict.fromkeys(write(name) for name in names)))


class Table(SphinxDirective):
    """All policies with what they need."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        return self.parse_text_to_nodes(table())


class Map(SphinxDirective):
    """The picture of *Which policy?*; a page in a folder next to policies/ may show it."""

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        return [nodes.raw("", policy_map(), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_directive("policy-table", Table)
    app.add_directive("policy-map", Map)
    for name in ("policy-needs", "policy-options", "policy-citation"):
        app.add_directive(name, Parts)
    return {"parallel_read_safe": True}
