"""Who is who: the table from Flower's nodes to the dense client indices that policies work with.

A client keeps its index for ever, also when its SuperNode restarts under another node id, as long as its *key* stays
the same. Keys, in this order: what the caller's function returns; the authenticated name; the partition id that the
client reports; the node id. (Without authentication a node's public key is as short-lived as its node id.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedpick.core.errors import StateFileError
from fedpick.core.types import Clients

__all__ = ["KeyFunction", "Roster"]

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

    def admit(self, newcomers: Mapping[int, tuple[str, Mapping[str, Any]]]) -> None:
        """Take in nodes: node id -> (key, what it reported). Sorted by key, so that arrival order never matters."""
        known = {key: index for index, key in enumerate(self.keys)}
        for node_id, (key, facts) in sorted(newcomers.items(), key=lambda item: _natural(item[1][0])):
            if key not in known:
                known[key] = len(self.keys)
                self.keys.append(key)
                self.num_examples.append(float("nan"))
                self.histograms.append(None)
            index = known[key]
            if "num-examples" in facts:
                self.num_examples[index] = float(facts["num-examples"])
            if "label-histogram" in facts:
                self.histograms[index] = [float(count) for count in facts["label-histogram"]]
            self.index_of_node.pop(self.node_of.get(index, -1), None)
            self.node_of[index] = node_id
            self.index_of_node[node_id] = index

    def clients(self) -> Clients:
        """The table for the policy; sizes nobody reported are taken as the mean of the reported ones."""
        sizes = np.array(self.num_examples)
        reported = sizes[np.isfinite(sizes) & (sizes >= 0)]
        sizes = np.where(np.isfinite(sizes) & (sizes >= 0), sizes, reported.mean() if len(reported) else 1.0)
        if not sizes.sum() > 0:
            sizes = np.ones(len(sizes))
        widths = {len(histogram) for histogram in self.histograms if histogram is not None}
        complete = len(widths) == 1 and all(histogram is not None for histogram in self.histograms)
        return Clients(num_examples=sizes, label_histogram=np.array(self.histograms) if complete else None)

    def indices(self, node_ids: Sequence[int]) -> list[int]:
        """The indices of the nodes that are in the roster."""
        return [self.index_of_node[node_id] for node_id in node_ids if node_id in self.index_of_node]

    def save(self, path: Path) -> None:
        """Write the roster; rows are only ever added, so a roster newer than the policy's state does no harm."""
        path.mkdir(parents=True, exist_ok=True)
        rows = {"keys": self.keys, "num_examples": self.num_examples, "histograms": self.histograms}
        partial = path / "roster.json.partial"
        partial.write_text(json.dumps({"format": "fedpick-roster", "schema": 1, **rows}))
        partial.replace(path / "roster.json")

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Read the roster that `save` wrote."""
        file = path / "roster.json"
        try:
            rows = json.loads(file.read_text())
            if rows["format"] != "fedpick-roster" or rows["schema"] != 1:
                raise StateFileError(f"{file} is not a roster that this version of fedpick reads.")
            return cls(keys=rows["keys"], num_examples=rows["num_examples"], histograms=rows["histograms"])
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise StateFileError(f"{file} is missing or damaged: {error}.") from error


def _natural(key: str) -> tuple[str, int, str]:
    """An order in which partition 9 comes before partition 10."""
    kind, _, rest = key.partition(":")
    return (kind, int(rest), "") if rest.isdigit() else (kind, 0, rest)
