"""Reading results: analysis, tables and pictures. Everything here is a function of the store alone.

`write_report` makes the HTML page, `write_figures` the PNG and SVG figures for papers; see docs/guides/report.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpick.report.figures import write_figures
    from fedpick.report.html import write_report

__all__ = ["write_figures", "write_report"]


def __getattr__(name: str) -> Any:
    # Late, so that tables need neither Plotly nor matplotlib.
    if name == "write_report":
        from fedpick.report.html import write_report

        return write_report
    if name == "write_figures":
        from fedpick.report.figures import write_figures

        return write_figures
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
