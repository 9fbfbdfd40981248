"""The papers' figures and tables that are not curves of one experiment: `python -m benchmarks.figures.PAPER --help`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FOLDER", "SPECS"]

SPECS = Path(__file__).parents[1] / "specs"
"""The experiments of the papers."""
FOLDER = Path(__file__).parents[2] / "docs/figures"
"""The pictures of the documentation."""
