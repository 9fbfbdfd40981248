"""Results read from the store: numbers, tables, the HTML report and figures.

`write_report` makes the HTML page, `write_figures` the figures for papers; see docs/guides/report.md. Data sets and the
simulator are not needed. Groups of clients rebuild the availability process from the stored settings (`groups`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpick.report.figures.experiment import write_figures
    from fedpick.report.html import write_report

__all__ = ["write_figures", "write_report"]


def __getattr__(name: str) -> Any:
    # Import late: the tables need neither Plotly nor matplotlib.
    if name == "write_report":
        from fedpick.report.html import write_report

        return write_report
    if name == "write_figures":
        from fedpick.report.figures.experiment import write_figures

        return write_figures
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
