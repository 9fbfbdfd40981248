"""Members of a federation: which client a node is, what it reported about itself, and which clients are ready.

A *node* is what the framework talks to: Flower's node id, NVFlare's client name. A *client* is a row of the policy's
table. A client keeps its row when its node changes, as long as its *key* stays the same. The key is, in this order: the
result of the user's key function; the authenticated name; the partition id that the client reports; the node id.

A client that did not answer in time, whatever the question, is busy: it is not asked again until its answer arrives.
One stuck client therefore costs one deadline, not one in every round.

Clients fail and lie. Nothing that a client reports may end the federation or change what is known of another client.
"""

from __future__ import annotations

import math
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.adapter.arrays import count, is_count
from fedpick.adapter.settings import KeyFunction, Settings
from fedpick.core.checkpoint import pack, unpack
from fedpick.core.errors import MissingSignal, StateFileError, TrainingFailed
from fedpick.core.types import Clients
from fedpick.core.writing import write_atomically

__all__ = ["ROSTER_FILE", "Members", "Node", "Roster", "Standing"]

Node = Any
"""What the framework talks to: an int or a str."""
ROSTER_FILE = "roster.npz"
_FORMAT = "fedpick-roster"
_PAUSES = (0.05, 1.0)
"""The first and the longest pause, in seconds, between two looks at the federation."""
_NEARLY_LATE = 0.8
"""The share of a deadline from which on a client may be slow."""
_FAR_SLOWER, _LEAST_SLOW = 10.0, 10.0
"""Times the typical time from which on a client is slow whatever the deadline, if it also takes this many seconds: a
client looks for messages only every few seconds."""
_MOST_STRIKES = 12
_MAX_LABELS = 2**16
"""The largest width of a label histogram: with 1,000 clients the table takes half a gigabyte."""


def _size(value: Any) -> float | None:
    return float(value) if is_count(value) else None


def _histogram(value: Any) -> NDArray[np.float64] | None:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_LABELS or not all(map(is_count, value)):
        return None
    return np.array(value, dtype=np.float64)


def _partition(value: Any) -> int | None:
    return int(value) if is_count(value) and value == int(value) else None


def _tags(value: Any) -> list[str] | None:
    """Texts; a single text is split at its commas."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not all(isinstance(tag, str) for tag in found):
        return None
    return [tag.strip() for tag in found]


_FIELDS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "num-examples": (_size, "a number of at least 0"),
    "label-histogram": (_histogram, f"a list of at most {_MAX_LABELS} numbers of at least 0"),
    "partition-id": (_partition, "a whole number of at least 0"),
    "tags": (_tags, "a list of texts, or texts between commas"),
}
"""Field of a description -> (its reader, which returns None for an unusable value; what it must be, in words)."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Whether a node takes part, as which client, and why."""

    identity: str
    """As in the log: "name:clinic-a", "partition:7", ..."""
    node: str
    """What the framework calls it."""
    status: str
    """One of "member"; "excluded": the server's settings say so; "refused": another node has this identity; and, of
    members, "distrusted": by the guard; "slow": it rests."""
    why: str
    """A reason in words."""


_PROOFS = {
    "name": "registered under this name",
    "key": "the key function says so",
    "partition": "its own report, without proof",
    "node": "known by its node id alone",
}
"""Kind of an identity -> why a client has it."""


@dataclass
class Roster:
    """Keys in the order of their index, what is known of each client, and the node that each client has now."""

    keys: list[str] = field(default_factory=list)
    num_examples: list[float] = field(default_factory=list)
    """NaN: not reported yet."""
    histograms: list[NDArray[np.float64] | None] = field(default_factory=list)
    selections: list[int] = field(default_factory=list)
    """In how many rounds each client was selected."""
    last: list[int] = field(default_factory=list)
    """The last round for which each client was selected; -1: never."""
    strikes: list[int] = field(default_factory=list)
    """Two for every exchange in which a client was slow, one less for every other answer."""
    rests_until: list[int] = field(default_factory=list)
    """The round from which on a slow client is asked again."""
    groups: list[str] = field(default_factory=list)
    """The group of each client by the server's settings; "": they name none."""
    node_of: dict[int, Node] = field(default_factory=dict)
    """Index -> node."""
    index_of_node: dict[Node, int] = field(default_factory=dict)
    replaced: dict[Node, int] = field(default_factory=dict)
    """Node -> the client that has another node now."""
    standings: dict[Node, Standing] = field(default_factory=dict)
    news: list[Standing] = field(default_factory=list)
    """Standings since the last choice."""

    def note_standing(self, node: Node, identity: str, status: str, why: str) -> None:
        """Note who a node is, and whether it takes part."""
        standing = Standing(identity=identity, node=str(node), status=status, why=why)
        if self.standings.get(node) != standing:
            self.standings[node] = standing
            self.news.append(standing)

    def knows(self, node: Node, online: Collection[Node]) -> bool:
        """Whether the node is a client's, or was until a node with the same key came that is still online."""
        if node in self.index_of_node:
            return True
        return node in self.replaced and self.node_of[self.replaced[node]] in online

    def admit(self, described: Mapping[Node, tuple[str, Mapping[str, Any]]]) -> None:
        """Add nodes: node -> (key, usable fields). Sorted by key, so that the order of arrival does not matter."""
        known = {key: index for index, key in enumerate(self.keys)}
        for node, (key, fields) in sorted(described.items(), key=lambda item: (_natural(item[1][0]), item[0])):
            if key not in known:
                known[key] = len(self.keys)
                self.keys.append(key)
                self.num_examples.append(math.nan)
                self.histograms.append(None)
                self.selections.append(0)
                self.last.append(-1)
                self.strikes.append(0)
                self.rests_until.append(0)
                self.groups.append("")
            index = known[key]
            if "num-examples" in fields:
                self.num_examples[index] = fields["num-examples"]
            if "label-histogram" in fields:
                self.histograms[index] = np.asarray(fields["label-histogram"], dtype=np.float64)
            if (old := self.node_of.get(index)) is not None and old != node:
                self.index_of_node.pop(old, None)
                self.replaced[old] = index
            self.replaced.pop(node, None)
            self.node_of[index] = node
            self.index_of_node[node] = index

    def clients(self) -> Clients:
        """The table for the policy; an unknown size is the median of the known ones, the lower one of two.

        Clients without a group are one group together, unless no client has one.
        """
        sizes = np.array(self.num_examples)
        known = sizes[np.isfinite(sizes)]
        typical = np.quantile(known, 0.5, method="lower") if len(known) else 1.0
        sizes = np.where(np.isfinite(sizes), sizes, typical)
        if not sizes.sum() > 0:
            sizes = np.ones(len(sizes))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(self.groups))}
        group = np.array([numbers[name] for name in self.groups]) if any(self.groups) else None
        return Clients(num_examples=sizes, label_histogram=self._label_histogram(), group=group)

    def _label_histogram(self) -> NDArray[np.float64] | None:
        """The reported histograms; an unknown one, or one of another width, is the mean of the others."""
        width = self._width()
        if width is None:
            return None
        known = np.array([row is not None and len(row) == width for row in self.histograms])
        table = np.empty((len(known), width))
        table[known] = [row for row, usable in zip(self.histograms, known, strict=True) if usable]
        table[~known] = table[known].mean(axis=0)
        return table

    def _width(self) -> int | None:
        """The number of labels that most clients count; of two equally frequent ones the first reported."""
        widths = Counter(len(row) for row in self.histograms if row is not None)
        return max(widths, key=lambda width: widths[width]) if widths else None

    def odd_histograms(self) -> dict[int, tuple[int, int]]:
        """Index -> (its number of labels, that of most clients), where the two differ."""
        width = self._width()
        return {
            index: (len(row), width)
            for index, row in enumerate(self.histograms)
            if row is not None and width is not None and len(row) != width
        }

    def indices(self, nodes: Iterable[Node]) -> list[int]:
        """The indices of those nodes that are in the roster."""
        return [self.index_of_node[node] for node in nodes if node in self.index_of_node]

    def nodes(self, clients: Iterable[int]) -> list[Node]:
        """The node that each client has now."""
        return [self.node_of[int(index)] for index in clients]

    def names(self, clients: Iterable[int]) -> list[str]:
        """The keys of these clients."""
        return [self.keys[int(index)] for index in clients]

    def note_sizes(self, clients: Iterable[int], reported: Iterable[Any]) -> None:
        """Keep the numbers of examples that these clients reported; an unusable one changes nothing."""
        for index, size in zip(clients, reported, strict=True):
            if is_count(size):
                self.num_examples[int(index)] = float(size)

    def note_selected(self, clients: Iterable[int], round: int) -> None:
        """Count a selection of these clients."""
        for index in clients:
            self.selections[int(index)] += 1
            self.last[int(index)] = round

    def within_limits(self, round: int, cooldown: int, max_share: float) -> NDArray[np.bool_]:
        """(N,) mask of the clients that the last `cooldown` rounds left out, and whose share of all rounds allows one.

        With this round included, a client takes part in at most `max_share` of the rounds, rounded up.
        """
        last, selections = np.array(self.last, dtype=np.int64), np.array(self.selections, dtype=np.int64)
        rested = (last < 0) | (last < round - cooldown)
        return rested & (selections < math.ceil(max_share * (round + 1) - 1e-9))

    def note_pace(
        self,
        clients: Sequence[int],
        seconds: NDArray[np.float64],
        failed: NDArray[np.bool_],
        waited: float,
        deadline: float,
        round: int,
    ) -> list[int]:
        """Let clients rest that are much slower than most others; return them.

        A client rests for 1, 3, 7, ... at most 63 rounds as it is slow again and again. Slow is ten times the typical
        time, or twice that time for a client that nearly missed the deadline. A deadline that is short for most
        clients is therefore no fault of theirs.

        Args:
            clients: that were asked.
            seconds: (k,) after which each answered; NaN: it did not.
            failed: (k,) whose answer is an error; their times are not typical.
            waited: seconds after which the exchange ended.
            deadline: seconds after which it had to end.
            round: the round of the exchange.
        """
        answered = ~np.isnan(seconds)
        good = np.sort(seconds[answered & ~failed])
        if not len(good):
            return []
        took = np.where(answered, seconds, waited)
        typical = float(good[(len(good) - 1) // 2])
        late = (took >= _NEARLY_LATE * deadline) & (took >= 2 * typical)
        late |= took >= max(_FAR_SLOWER * typical, _LEAST_SLOW)
        slow = []
        for index, is_slow, did_answer in zip(clients, late.tolist(), answered.tolist(), strict=True):
            if is_slow:
                self.strikes[index] = min(self.strikes[index] + 2, _MOST_STRIKES)
                self.rests_until[index] = round + 2 ** (self.strikes[index] // 2)
                slow.append(index)
            elif did_answer:
                self.strikes[index] = max(self.strikes[index] - 1, 0)
        return slow

    def save(self, path: Path) -> None:
        """Write the roster. Rows are only ever added, so a roster newer than the policy's state does no harm."""
        path.mkdir(parents=True, exist_ok=True)
        rows = [np.empty(0) if row is None else row for row in self.histograms]
        arrays = {
            "num_examples": np.array(self.num_examples, dtype=np.float64),
            "widths": np.array([len(row) for row in rows], dtype=np.int64),
            "histograms": np.concatenate([np.empty(0), *rows]),
            "selections": np.array(self.selections, dtype=np.int64),
            "last": np.array(self.last, dtype=np.int64),
            "strikes": np.array(self.strikes, dtype=np.int64),
            "rests_until": np.array(self.rests_until, dtype=np.int64),
        }
        plain = {"format": _FORMAT, "schema": 1, "keys": self.keys, "groups": self.groups}
        write_atomically(path / ROSTER_FILE, pack(arrays, plain), private=True)
        for file in path.glob(f"{ROSTER_FILE}.*.partial"):  # left by a crash
            if file.name.removeprefix(f"{ROSTER_FILE}.").removesuffix(".partial").isdecimal():
                file.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Read the roster that `save` wrote."""
        file = path / ROSTER_FILE
        try:
            arrays, plain = unpack(file.read_bytes(), str(file))
            if (plain["format"], plain["schema"]) != (_FORMAT, 1):
                raise StateFileError(f"{file} is not a roster that this version of fedpick reads.")
            keys, sizes, widths = list(map(str, plain["keys"])), arrays["num_examples"], arrays["widths"]
            rows = np.split(arrays["histograms"], np.cumsum(widths)[:-1]) if len(keys) else []
            groups = list(map(str, plain.get("groups", [""] * len(keys))))
            # Rosters of the first versions have no counts.
            counts = {
                name: [int(value) for value in arrays.get(name, np.full(len(keys), unknown))]
                for name, unknown in {"selections": 0, "last": -1, "strikes": 0, "rests_until": 0}.items()
            }
        except StateFileError as error:
            raise StateFileError(f"{error} Restore it, or choose another directory to start anew.") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateFileError(
                f"{file} is missing or is not a fedpick roster ({error!r}). Choose another directory to start anew."
            ) from error
        if {len(sizes), len(rows), len(groups), *map(len, counts.values())} != {len(keys)}:
            raise StateFileError(
                f"{file} is damaged: it has {len(keys)} keys, {len(sizes)} sizes, {len(rows)} histograms, "
                f"{len(groups)} groups and {len(counts['selections'])} counts. Choose another directory to start anew."
            )
        histograms = [_histogram(row.tolist()) for row in rows]
        return cls(
            keys=keys,
            num_examples=[count(size) for size in sizes.tolist()],
            histograms=histograms,
            selections=counts["selections"],
            last=counts["last"],
            strikes=counts["strikes"],
            rests_until=counts["rests_until"],
            groups=groups,
        )


def _natural(key: str) -> tuple[str, int, str]:
    """A sort key that puts partition 9 before partition 10."""
    kind, _, rest = key.partition(":")
    # isdigit accepts superscripts, which int refuses; int also refuses thousands of digits.
    return (kind, int(rest), "") if rest.isdecimal() and len(rest) < 20 else (kind, 0, rest)


class Members:
    """Keeps the roster up to date with the federation. An adapter derives from it, or calls `admit` itself.

    Args:
        roster: the clients known so far.
        settings: of the adapter.
        labels_for: the name of the policy if it needs label histograms; None: label histograms are not kept.
    """

    def __init__(self, roster: Roster, settings: Settings, *, labels_for: str | None) -> None:
        self.roster = roster
        self.busy: dict[int, Any] = {}
        """Client index -> what identifies the answer that is due."""
        self.settings = settings
        self.ineligible: set[Node] = set()
        self._holders: dict[str, Node] = {}  # identity -> the node that has it
        self._labels_for = labels_for
        self._ambiguous: set[str] = set()  # keys that the user's function gave to several nodes at once
        self._odd: set[int] = set()  # indices of clients whose histogram has an odd width
        self._unusable_fields: set[str] = set()

    def wait_until_ready(self, update: Callable[[], Sequence[Node]]) -> NDArray[np.bool_]:
        """Return the (N,) mask of the ready clients; `update` admits new nodes and returns those that are online.

        Wait until `min_clients` have described themselves, at most `wait` seconds; then until one client is ready, at
        most `ready_timeout` seconds. A round is never spent on an empty mask.
        """
        settings, started = self.settings, time.monotonic()
        pause, longest = _PAUSES
        warn_after = settings.wait
        while True:
            online = update()
            ready, members = self._ready(online), len(self.roster.indices(online))
            waited = time.monotonic() - started
            if ready.any() and members >= settings.min_clients:
                return ready
            if ready.any() and waited >= settings.wait:
                settings.log.warning(
                    "Only %d of min_clients=%d clients are ready after %.0f s; the round starts without more.",
                    *(members, settings.min_clients, waited),
                )
                return ready
            if not ready.any() and waited >= settings.ready_timeout:
                raise TrainingFailed(
                    f"No client became ready within {waited:.0f} s: {self._state(online)}.\n\n"
                    "hint: start clients that are eligible, or raise ready_timeout to wait longer"
                )
            if not ready.any() and waited >= warn_after:
                settings.log.warning("No client is ready after %.0f s: %s. Waiting.", waited, self._state(online))
                warn_after = 2 * waited
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _state(self, online: Sequence[Node]) -> str:
        """Why no client is ready, in words."""
        described = self.roster.indices(online)
        ineligible = len(self.ineligible.intersection(online))
        state = f"{len(online)} nodes are online, {f'{ineligible} are not eligible, ' if ineligible else ''}"
        state += f"{len(described)} of them have described themselves"
        if described and self._lacks_labels():
            return f"{state}, but none with a usable label histogram, which {self._labels_for} needs"
        return f"{state}, and {sum(index in self.busy for index in described)} of these are busy"

    def _ready(self, online: Sequence[Node]) -> NDArray[np.bool_]:
        """(N,) mask of the clients that are online and not busy; empty while a needed label histogram is missing."""
        mask = np.zeros(len(self.roster.keys), dtype=bool)
        indices = self.roster.indices(online)
        if not indices or self._lacks_labels():
            return mask
        mask[indices] = True
        mask[list(self.busy)] = False
        return mask

    def _lacks_labels(self) -> bool:
        """Whether label histograms are needed and none has come; raise if no client sends one."""
        if self._labels_for is None or any(row is not None for row in self.roster.histograms):
            return False
        if "label-histogram" in self._unusable_fields:
            return True  # clients do report it; a usable one may come
        raise MissingSignal(
            f"{self._labels_for} needs the clients' label histograms, but no client reported one.\n\n"
            f"hint: {self.labels_hint}"
        )

    @property
    def labels_hint(self) -> str:
        """What to do if no client reports a label histogram."""
        return "choose a policy or options that do not need it"

    def admit(
        self, reported: Mapping[Node, Mapping[str, Any]], infos: Mapping[Node, Any], online: Collection[Node]
    ) -> None:
        """Add nodes to the roster.

        Args:
            reported: node -> what it said about itself.
            infos: node -> what the framework knows of it; its `name`, if it has one, is authenticated.
            online: all nodes that are online.
        """
        usable, unusable = {}, {}
        for node, fields in reported.items():
            usable[node], unusable[node] = _usable_fields(fields)
        described = {
            node: (infos.get(node, SimpleNamespace(node_id=node, name="")), fields) for node, fields in usable.items()
        }
        keys = self._keys_of(described)
        for node, (info, fields) in described.items():
            if why := self._why_excluded(keys[node], info, fields):
                self.settings.log.info("%s takes no part: %s.", keys[node], why)
                self.roster.note_standing(node, keys[node], "excluded", why)
                self.ineligible.add(node)
                del usable[node]
        for node, names in unusable.items():
            self._warn_of_unusable(keys[node], reported[node], names)
        if self._labels_for is None:
            for fields in usable.values():
                fields.pop("label-histogram", None)
        refused, denied = ({}, {}) if self.newest_counts else self._refuse_claims(keys, usable, online)
        self.roster.admit({node: (keys[node], fields) for node, fields in usable.items()})
        for node in usable:
            if (index := self.roster.index_of_node.get(node)) is not None:
                self.roster.groups[index] = self._group_of(keys[node], *described[node])
        for node, holder in refused.items():  # asked again when the holder is gone
            self.roster.replaced[node] = self.roster.index_of_node[holder]
        for node in usable:
            proof = _PROOFS[keys[node].partition(":")[0]]
            self.roster.note_standing(node, keys[node], "member", "; ".join(filter(None, [proof, denied.get(node)])))
        for node in usable:  # after a restart the answer to an old message never comes
            self.busy.pop(self.roster.index_of_node.get(node, -1), None)
        self._warn_of_odd_histograms()

    newest_counts = False
    """Whether a node may take the identity of another that is online: only where the framework proves who it is."""

    def _refuse_claims(
        self, keys: Mapping[Node, str], usable: dict[Node, dict[str, Any]], online: Collection[Node]
    ) -> tuple[dict[Node, Node], dict[Node, str]]:
        """Remove the nodes that claim the identity of another that is online, and the partition ids of others.

        A registered node keeps its name, and loses a partition id that another node has. Of the nodes that describe
        themselves at the same time, the registered ones come first.

        Returns:
            Removed node -> the holder of its identity; and registered node -> which claim of it was refused.
        """
        refused: dict[Node, Node] = {}
        denied: dict[Node, str] = {}
        for node in sorted(usable, key=lambda node: (not keys[node].startswith("name:"), node)):
            holder = self._holders.get(keys[node], node)
            if holder != node and holder in online and (holder in usable or holder in self.roster.index_of_node):
                refused[node] = holder
                del usable[node]
                why = f"node {holder} has this identity and is online"
                self.settings.log.warning(
                    "Node %s claims to be %s, but %s: it takes no part. Give each client its own name or partition id.",
                    *(node, keys[node], why),
                )
                self.roster.note_standing(node, keys[node], "refused", why)
                continue
            self._holders[keys[node]] = node
            if self.settings.key is not None or "partition-id" not in usable[node]:
                continue
            partition = f"partition:{usable[node]['partition-id']}"
            holder = self._holders.get(partition, node)
            if holder != node and holder in online:
                del usable[node]["partition-id"]
                denied[node] = f"its claim to be {partition} is refused: node {holder} has that identity"
                self.settings.log.warning(
                    "%s claims to be %s, which node %s is: the claim is refused.", keys[node], partition, holder
                )
            else:
                self._holders[partition] = node
        return refused, denied

    def _why_excluded(self, key: str, info: Any, fields: Mapping[str, Any]) -> str:
        """Why the server's settings leave out a client; empty if they do not."""
        names = [key, *(f"tag:{tag}" for tag in fields.get("tags", []))]
        if found := [name for name in names if name in self.settings.exclude]:
            return f"exclude= names {found[0]}"
        eligible = self.settings.eligible
        if eligible is None:
            return ""
        if not callable(eligible):
            return "" if any(name in eligible for name in names) else "eligible= names neither it nor one of its tags"
        try:
            return "" if eligible(info, fields) else "the eligible function says so"
        except Exception:  # its input comes from clients: one of them must not end the federation
            self.settings.log.exception("The eligible function failed for %s.", key)
            return "the eligible function failed for it"

    def _group_of(self, key: str, info: Any, fields: Mapping[str, Any]) -> str:
        """The group of a client by the server's settings; empty if they name none."""
        groups = self.settings.groups or {}
        if not callable(groups):
            names = [key, *(f"tag:{tag}" for tag in fields.get("tags", []))]
            return next((str(groups[name]) for name in names if name in groups), "")
        try:
            group = groups(info, fields)
            return "" if group is None else str(group)
        except Exception:  # its input comes from clients: one of them must not end the federation
            self.settings.log.exception("The groups function failed for %s, which counts as without a group.", key)
            return ""

    def _keys_of(self, described: Mapping[Node, tuple[Any, Mapping[str, Any]]]) -> dict[Node, str]:
        """Node -> key. Nodes to which the user's function gives one key are identified by their node ids.

        All of them have just answered, so none is the dead predecessor of another.
        """
        keys = {node: self._key_of(node, info, fields) for node, (info, fields) in described.items()}
        if self.settings.key is None:
            return keys
        shared = {key for key, times in Counter(keys.values()).items() if times > 1} - self._ambiguous
        for key in sorted(shared):
            self.settings.log.warning(
                "The key function gives %r to several nodes that are online: %s. These nodes are identified by their "
                "node ids, which do not survive a restart. Return a different key for each client.",
                *(key.removeprefix("key:"), reprlib.repr(sorted(node for node in keys if keys[node] == key))),
            )
        self._ambiguous |= shared
        return {node: f"node:{node}" if key in self._ambiguous else key for node, key in keys.items()}

    def _key_of(self, node: Node, info: Any, fields: Mapping[str, Any]) -> str:
        if self.settings.key is not None:
            return self._users_key(self.settings.key, node, info, fields)
        if name := getattr(info, "name", ""):
            return f"name:{name}"
        if "partition-id" in fields:
            return f"partition:{fields['partition-id']}"
        return f"node:{node}"

    def _users_key(self, function: KeyFunction, node: Node, info: Any, fields: Mapping[str, Any]) -> str:
        try:
            value = function(info, fields)
            text = "" if value is None else str(value)
        except Exception:  # its input comes from clients: one of them must not end the federation
            self.settings.log.exception(
                "The key function failed for node %s, which is identified by its node id.", node
            )
            return f"node:{node}"
        if not text:
            self.settings.log.warning(
                "The key function returned %r for node %s, which is identified by its node id instead. A node id does "
                "not survive a restart. Return a different key for each client.",
                *(value, node),
            )
            return f"node:{node}"
        return f"key:{text}"

    def _warn_of_unusable(self, key: str, reported: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            self._unusable_fields.add(name)
            self.settings.log.warning(
                "%s reported %s = %s, which counts as unknown: it must be %s.",
                *(key, name, reprlib.repr(reported[name]), _FIELDS[name][1]),
            )

    def _warn_of_odd_histograms(self) -> None:
        odd = self.roster.odd_histograms()
        for index in sorted(odd.keys() - self._odd):
            self.settings.log.warning(
                "%s has a label-histogram of %d labels, but most clients have %d labels: it counts as unknown.",
                *(self.roster.keys[index], *odd[index]),
            )
        self._odd |= odd.keys()


def _usable_fields(reported: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(The usable fields, the names of the unusable ones). Fields unknown to fedpick stay as they are."""
    usable: dict[str, Any] = {}
    unusable: list[str] = []
    for name, value in reported.items():
        read, _ = _FIELDS.get(name, (lambda value: value, ""))
        if (checked := read(value)) is None:
            unusable.append(name)
        else:
            usable[name] = checked
    return usable, unusable
