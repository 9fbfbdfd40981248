"""Putting a finished file in its place: all of it or nothing, and nothing left behind where that fails."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from fedpick.core.errors import InvalidInput
from fedpick.core.writing import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "picture_format", "put_file", "refuse_directory", "save_figure"]

PICTURES = ("png", "svg", "pdf")
# Neither version nor date in the file: the same picture stays the same.
_UNWANTED = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}


def picture_format(path: str | Path) -> str:
    """What kind of picture a file is to be, by the ending of its name."""
    ending = refuse_directory(path).suffix.lower().removeprefix(".")
    if ending not in PICTURES:
        raise InvalidInput(f"A picture's name must end in .png, .svg or .pdf. Got {Path(path).name!r}.")
    return ending


def save_figure(figure: Figure, path: str | Path, dpi: int) -> Path:
    """A figure of matplotlib as a file; the same figure gives the same bytes."""
    form = picture_format(path)
    content = io.BytesIO()
    figure.savefig(content, format=form, dpi=dpi, metadata={_UNWANTED[form]: None})
    return put_file(path, content.getvalue())


def refuse_directory(path: str | Path) -> Path:
    """The path, unless a directory stands where the file should go."""
    target = Path(path)
    if target.is_dir():
        raise InvalidInput(f"{target} is a directory. Name the file to write, such as {target / 'report.html'}.")
    return target


def put_file(path: str | Path, content: bytes | str) -> Path:
    """Write a file, with the directories above it. A reader, a crash or a full disk never meets half of it."""
    target = refuse_directory(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(target, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error  # the name that people know
    return target
