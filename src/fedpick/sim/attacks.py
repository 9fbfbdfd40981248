"""Clients that lie in simulation: false reports, false updates, and no answer after being chosen.

Who lies is a function of the seed alone, and every lie is a function of (seed, round, client): all policies of one seed
face the same liars.

>>> Attacks(kind="inflate-flip", share=0.2).liars(seed=0, num_clients=10).tolist().count(True)
2
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.rng import Purpose, stream
from fedpick.core.validation import is_whole, number, require, whole

__all__ = ["KINDS", "Attacks"]

KINDS = {
    "inflate": "reports `factor` times its loss",
    "deflate": "reports its loss divided by `factor`",
    "alternate": "reports `factor` times its loss in every second round, and the truth in the others",
    "collude": "reports `factor` times the largest loss among the liars that are asked with it: all say the same",
    "flip": "sends its update with the opposite sign",
    "scale": "sends its update times `scale`",
    "drop": "never answers after it was chosen",
    "sybils": "comes back under a fresh identity in every round",
}
_REPORTS = ("inflate", "deflate", "alternate", "collude")
"""A client tells one kind of false losses."""


@dataclass(frozen=True, kw_only=True)
class Attacks:
    """What the liars do, and who they are.

    Lies about losses concern answers to probes and all losses that are reported after training. Norms and sketches of
    updates are made by the server, from the update that it receives.
    """

    kind: str
    """One of `KINDS`, or several with hyphens between them, such as "inflate-flip"."""
    share: float = 0.2
    """Of the clients that lie, rounded to whole clients; which of them is drawn at random."""
    clients: tuple[int, ...] = ()
    """The clients that lie, instead of a share."""
    group: int | None = None
    """Draw the liars from this group of `Clients.group` alone; `share` is then that of its clients. None: from all."""
    factor: float = 100.0
    scale: float = 10.0
    seed: int | None = None
    """Of the draw of liars; None: the seed of the run."""

    def __post_init__(self) -> None:
        known = isinstance(self.kind, str) and set(self.parts) <= set(KINDS) and len(set(self.parts)) == len(self.parts)
        require(known, self, "kind", f"one or several of {', '.join(KINDS)}, with hyphens between them")
        if len(set(self.parts) & set(_REPORTS)) > 1:
            raise InvalidInput(
                f"A liar tells losses in one way: choose one of {', '.join(_REPORTS)}. Got {self.kind!r}."
            )
        number(self, "share", "[0, 1]")
        for name in ("factor", "scale"):
            number(self, name, "(0, inf)")
        whole(self, "seed", 0, most=2**64 - 1, optional=True)
        require(all(is_whole(each, 0) for each in self.clients), self, "clients", "a list of whole numbers")
        whole(self, "group", 0, optional=True)
        if self.clients and self.group is not None:
            raise InvalidInput("Attacks take clients or a group, not both. Leave out one of them.")

    @property
    def parts(self) -> tuple[str, ...]:
        """The single lies."""
        return tuple(self.kind.split("-"))

    def liars(self, seed: int, num_clients: int, group: IntArray | None = None) -> BoolArray:
        """(N,) who lies; `group` is that of the clients' table. Clients and groups that are not in the table raise."""
        lying = np.zeros(num_clients, dtype=bool)
        if self.clients:
            if max(self.clients) >= num_clients:
                raise InvalidInput(f"[attacks]: there is no client {max(self.clients)} among {num_clients} clients.")
            lying[list(self.clients)] = True
            return lying
        rng = stream(seed if self.seed is None else self.seed, 0, Purpose.ATTACKS)
        members = np.arange(num_clients) if self.group is None else self._members(group)
        lying[members[rng.permutation(len(members))[: round(self.share * len(members))]]] = True
        return lying

    def _members(self, group: IntArray | None) -> IntArray:
        """The clients of the attacking group."""
        if group is None:
            raise InvalidInput(
                f"[attacks]: group = {self.group} needs groups of clients. Set groups in [run], such as groups = 10, "
                "or Clients.group in Python."
            )
        members = np.flatnonzero(group == self.group)
        if len(members) == 0:
            raise InvalidInput(f"[attacks]: no client is in group {self.group}. The groups go up to {group.max()}.")
        return members

    def settings(self, lying: BoolArray) -> dict[str, Any]:
        """Everything that decides the numbers, as plain values. With a group, the liars (N,) drawn from it."""
        values = asdict(self)
        if self.group is None:
            del values["group"]
        else:
            values["clients"] = np.flatnonzero(lying).tolist()
        return values

    def losses(self, values: FloatArray, lying: BoolArray, round: int) -> FloatArray:
        """(d,) the losses that the clients tell instead of their true `values`."""
        told = values.copy()
        if "inflate" in self.parts or ("alternate" in self.parts and round % 2 == 0):
            told[lying] *= self.factor
        elif "deflate" in self.parts:
            told[lying] /= self.factor
        elif "collude" in self.parts and np.isfinite(values[lying]).any():
            told[lying] = np.nanmax(values[lying]) * self.factor
        return told

    def update_factors(self, lying: BoolArray) -> FloatArray:
        """(k,) by what the liars multiply their updates; 1 for the others."""
        factor = (-1.0 if "flip" in self.parts else 1.0) * (self.scale if "scale" in self.parts else 1.0)
        return np.where(lying, factor, 1.0)

    def dropped(self, lying: BoolArray) -> BoolArray:
        """(k,) who does not answer after being chosen."""
        return lying & ("drop" in self.parts)
