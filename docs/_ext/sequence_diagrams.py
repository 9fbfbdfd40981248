"""Draw Mermaid sequence diagrams as SVG during the build; GitHub draws the same blocks itself.

Mermaid is a megabyte of JavaScript from a server. A sequence diagram is lines and arrows: participants in columns,
messages from top to bottom. Colours are the page's, so that the picture follows light and dark. Any other Mermaid
diagram is shown as its source.
"""

from __future__ import annotations

import re
from html import escape

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

PARTICIPANT = re.compile(r"participant (\w+)(?: as (.+))?")
MESSAGE = re.compile(r"(\w+)(-->>|->>)(\w+): (.+)")
COLUMN, ROW, LETTER = 150, 34, 6.6  # pixels; LETTER is the width of a character of the labels


def sequence_svg(source: str) -> str | None:
    """Return the SVG of a sequence diagram, or None if the source is not one of the known form."""
    kind, *lines = [line.strip() for line in source.splitlines() if line.strip()]
    names: dict[str, str] = {}
    messages: list[tuple[str, str, str, str]] = []
    for line in lines:
        if found := PARTICIPANT.fullmatch(line):
            names[found[1]] = found[2] or found[1]
        elif (found := MESSAGE.fullmatch(line)) and {found[1], found[3]} <= set(names):
            messages.append((found[1], found[2], found[3], found[4]))
        else:
            return None
    if kind != "sequenceDiagram":
        return None
    column = {name: COLUMN * (place + 0.5) for place, name in enumerate(names)}
    width, height = COLUMN * len(names) + 60, 60 + ROW * len(messages) + 20
    parts = []
    for name, label in names.items():
        x = column[name]
        parts.append(f'<line class="life" x1="{x}" y1="34" x2="{x}" y2="{height - 6}"/>')
        parts.append(f'<rect x="{x - COLUMN / 2 + 5}" y="6" width="{COLUMN - 10}" height="28" rx="5"/>')
        parts.append(f'<text x="{x}" y="25" text-anchor="middle">{escape(label)}</text>')
    for row, (sender, arrow, receiver, text) in enumerate(messages):
        y, start, end = 66 + ROW * row, column[sender], column[receiver]
        dashed = ' stroke-dasharray="5 4"' if arrow == "-->>" else ""
        if start == end:
            path, middle = f"M{start} {y - 6}h26v12h-20", start + 34
            anchor = "start"
        else:
            path, middle = f"M{start} {y}H{end + (7 if end < start else -7)}", (start + end) / 2
            anchor = "middle"
        shift = y - 6 if anchor == "middle" else y + 4
        if anchor == "middle":  # keep the label inside the picture
            half = LETTER * len(text) / 2
            middle = min(max(middle, half + 2), width - half - 2)
        parts.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"{dashed}/>')
        parts.append(f'<text class="message" x="{middle}" y="{shift}" text-anchor="{anchor}">{escape(text)}</text>')
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
    )
    return (
        f'<div class="sequence"><svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="Sequence diagram: {escape(", ".join(names.values()))}">{head}{"".join(parts)}</svg></div>'
    )


class Mermaid(SphinxDirective):
    """A `mermaid` block."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the picture, or the source."""
        source = "\n".join(self.content)
        if (svg := sequence_svg(source)) is None:
            return [nodes.literal_block(source, source, language="text")]
        return [nodes.raw("", svg, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True}
