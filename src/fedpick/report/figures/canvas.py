"""Figures of matplotlib: create one without global state, save it with reproducible bytes."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fedpick.core.errors import InvalidInput, MissingDependency
from fedpick.core.writing import refuse_directory, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "new_figure", "picture_format", "require_matplotlib", "save_figure"]

FORMATS = ("png", "svg", "pdf")
# Leave version and date out: the same figure gives the same bytes.
_UNWANTED = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}


def require_matplotlib() -> ModuleType:
    """Import matplotlib; raise MissingDependency if it is not installed."""
    try:
        import matplotlib.figure
    except ModuleNotFoundError as error:
        raise MissingDependency("Figures need matplotlib. Install it with: pip install 'fedpick[report]'") from error
    return matplotlib


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. It is not known to pyplot: no global state, no window."""
    figure: Figure = require_matplotlib().figure.Figure(figsize=(width, height), layout="constrained")
    return figure


def picture_format(path: str | Path) -> str:
    """The format of a picture, by the suffix of its name."""
    suffix = refuse_directory(path).suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise InvalidInput(f"A picture's name must end in .png, .svg or .pdf. Got {Path(path).name!r}.")
    return suffix


def save_figure(figure: Figure, path: str | Path, dpi: int) -> Path:
    """Write a figure; return its path."""
    form = picture_format(path)
    content = io.BytesIO()
    figure.savefig(content, format=form, dpi=dpi, metadata={_UNWANTED[form]: None})
    return write_atomically(path, content.getvalue())
