"""One colour per policy, the same in every figure, on light and on dark paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Style", "styles_of"]

# The hues of Okabe and Ito, told apart by colour-blind readers; darkened or lightened until each has a contrast of at
# least 3 to 1 with the page behind it.
_COLOURS = (
    ("#0072B2", "#4AA3E8"),  # blue
    ("#D55E00", "#F5854A"),  # vermilion
    ("#00876A", "#2FC49B"),  # green
    ("#B8478F", "#E68FC4"),  # purple
    ("#A97900", "#E5B83B"),  # amber
    ("#3C8FB5", "#8FD6F2"),  # sky
    ("#5A5A5A", "#BDBDBD"),  # grey
    ("#7A3B2E", "#C98F7E"),  # brown
)
# More policies than colours: the same colours again, in another line style.
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Style:
    """How a policy is drawn everywhere."""

    light: str
    dark: str
    dash: str


def styles_of(labels: Sequence[str]) -> dict[str, Style]:
    """A style per label, by position in the experiment.

    >>> styles_of(["uniform", "fedcor"])["fedcor"].light
    '#D55E00'
    """
    return {
        label: Style(*_COLOURS[position % len(_COLOURS)], _DASHES[position // len(_COLOURS) % len(_DASHES)])
        for position, label in enumerate(labels)
    }
