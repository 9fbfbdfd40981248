"""Who is who: the table from Flower's nodes to the dense client indices that policies work with.

A client keeps its index for ever, also when its SuperNode restarts under another node id, as long as its *key* stays
the same. Keys, in this order: what the caller's function returns; the authenticated name; the partition id that the
client reports; the node id. (Without authentication a node's public key is as short-lived as its node id.)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.core.errors import StateFileError
from fedpick.core.state import write_atomically
from fedpick.core.types import Clients
from fedpick.flower.introduction import usable_histogram, usable_size

__all__ = ["KeyFunction", "Roster"]

_FILE, _FORMAT = "roster.json", "fedpick-roster"

KeyFunction = Callable[[Any, Mapping[str, Any]], "str | int"]
"""(NodeInfo, what the client reported) -> a key that stays the same when the node id does not."""


@dataclass
class Roster:
    """Keys in the order of their index, what is known of each client, and the node that speaks for it now."""

    keys: list[str] = field(default_factory=list)
    num_examples: list[float] = field(default_factory=list)
    """NaN: not reported yet."""
    histograms: list[list[float] | None] = field(default_factory=list)
    node_of: dict[int, int] = field(default_factory=dict)
    """index -> node id"""
    index_of_node: dict[int, int] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)
    """node id -> the index for which another node speaks now"""

    def speaks_or_is_spoken_for(self, node_id: int, online: Collection[int]) -> bool:
        """The node is in the roster, or was until another one that is online came with the same key."""
        if node_id in self.index_of_node:
            return True
        return node_id in self.replaced and self.node_of[self.replaced[node_id]] in online

    def admit(self, newcomers: Mapping[int, tuple[str, Mapping[str, Any]]]) -> list[tuple[int, int]]:
        """Take in nodes: node id -> (key, what it reported). Sorted by key, so that arrival order never matters.

        Returns (old node, new node) wherever another node spoke for the client before.
        """
        known = {key: index for index, key in enumerate(self.keys)}
        successions: list[tuple[int, int]] = []
        for node_id, (key, facts) in sorted(newcomers.items(), key=lambda item: (_natural(item[1][0]), item[0])):
            if key not in known:
                known[key] = len(self.keys)
                self.keys.append(key)
                self.num_examples.append(float("nan"))
                self.histograms.append(None)
            index = known[key]
            if not math.isnan(size := usable_size(facts.get("num-examples"))):
                self.num_examples[index] = size
            if (histogram := usable_histogram(facts.get("label-histogram"))) is not None:
                self.histograms[index] = histogram
            if (old := self.node_of.get(index)) is not None and old != node_id:
                self.index_of_node.pop(old, None)
                self.replaced[old] = index
                successions.append((old, node_id))
            self.replaced.pop(node_id, None)
            self.node_of[index] = node_id
            self.index_of_node[node_id] = index
        return successions

    def clients(self) -> Clients:
        """The table for the policy; sizes nobody reported are taken as the mean of the reported ones."""
        sizes = np.array(self.num_examples)
        reported = sizes[np.isfinite(sizes) & (sizes >= 0)]
        sizes = np.where(np.isfinite(sizes) & (sizes >= 0), sizes, reported.mean() if len(reported) else 1.0)
        if not sizes.sum() > 0:
            sizes = np.ones(len(sizes))
        return Clients(num_examples=sizes, label_histogram=self._label_histogram())

    def _label_histogram(self) -> NDArray[np.float64] | None:
        """What was reported; clients that keep theirs to themselves, or count other labels, are the others' mean."""
        width = self._width()
        if width is None:
            return None
        mean = np.mean([row for row in self.histograms if row is not None and len(row) == width], axis=0)
        return np.array(
            [mean if row is None or len(row) != width else row for row in self.histograms], dtype=np.float64
        )

    def _width(self) -> int | None:
        """How many labels most clients count; among equals the width that was reported first."""
        widths = Counter(len(row) for row in self.histograms if row is not None)
        return max(widths, key=lambda width: widths[width]) if widths else None

    def odd_histograms(self) -> dict[int, tuple[int, int]]:
        """index -> (number of labels, that of most clients) for those whose histogram does not fit the others'."""
        width = self._width()
        return {
            index: (len(row), width)
            for index, row in enumerate(self.histograms)
            if row is not None and width is not None and len(row) != width
        }

    def indices(self, node_ids: Sequence[int]) -> list[int]:
        """The indices of the nodes that are in the roster."""
        return [self.index_of_node[node_id] for node_id in node_ids if node_id in self.index_of_node]

    def save(self, path: Path) -> None:
        """Write the roster; rows are only ever added, so a roster newer than the policy's state does no harm."""
        path.mkdir(parents=True, exist_ok=True)
        rows = {"keys": self.keys, "num_examples": self.num_examples, "histograms": self.histograms}
        write_atomically(path / _FILE, json.dumps({"format": _FORMAT, "schema": 1, **rows}).encode())
        for file in path.glob(f"{_FILE}.*.partial"):  # what a crash left
            if file.name.removeprefix(f"{_FILE}.").removesuffix(".partial").isdecimal():
                file.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Read the roster that `save` wrote."""
        file = path / _FILE
        try:
            rows = json.loads(file.read_text())
            if rows["format"] != _FORMAT or rows["schema"] != 1:
                raise StateFileError(
                    f"{file} is not a roster that this version of fedpick reads. Choose another directory."
                )
            keys = [str(key) for key in rows["keys"]]
            sizes = [usable_size(size) for size in rows["num_examples"]]
            histograms = [usable_histogram(row) for row in rows["histograms"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, StateFileError):
                raise
            raise StateFileError(
                f"{file} is missing, damaged or not a fedpick roster: {error!r}. Choose another directory."
            ) from error
        if not len(keys) == len(sizes) == len(histograms):
            raise StateFileError(f"{file} is damaged: it has {len(keys)} keys for {len(sizes)} sizes.")
        return cls(keys=keys, num_examples=sizes, histograms=histograms)


def _natural(key: str) -> tuple[str, int, str]:
    """An order in which partition 9 comes before partition 10."""
    kind, _, rest = key.partition(":")
    # Not isdigit: to that a superscript is a digit. And int refuses to read thousands of digits.
    return (kind, int(rest), "") if rest.isdecimal() and len(rest) < 20 else (kind, 0, rest)
