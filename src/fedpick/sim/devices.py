"""Devices: how fast clients compute and communicate.

A *model of devices* holds hyper-parameters: `get("phones", jitter=0.1)`. On a table of clients with a seed it gives a
`Fleet`: the speed and the links of every client as arrays, the same for all policies.

    seconds = (bytes down / download + seconds_per_example * passes + bytes up / upload) * jitter

Training on an example counts as three passes, because the backward pass costs twice the forward one (FedScale's
model). Measuring a loss is one pass. The jitter is lognormal and drawn anew for every client and round.

| name      | speeds and links                                                                                       |
|-----------|--------------------------------------------------------------------------------------------------------|
| phones    | quantiles of 254 measured phones (AI Benchmark, as in FLASH) and 19 measured links                     |
| lognormal | lognormal speeds and links; the default speed is FedScale's, 5 ms times lognormal(1, 0.6)              |
| classes   | a few classes of equal devices, such as slow, middle and fast                                          |
| csv       | a file with one device per line                                                                        |

>>> import numpy as np
>>> clients = Clients(num_examples=np.full(1000, 60.0))
>>> fleet = get("phones", seconds_per_example=0.01).fleet(clients, seed=0)
>>> np.quantile(fleet.seconds_per_example, [0.1, 0.5, 0.9]).round(3).tolist()
[0.005, 0.01, 0.022]
"""

from __future__ import annotations

import csv
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
from scipy.special import ndtr, ndtri

from fedpick.availability.logs import client_id
from fedpick.core.arrays import FloatArray, IntArray, read_only
from fedpick.core.errors import DataError, InvalidInput, unknown_name
from fedpick.core.rng import Purpose
from fedpick.core.types import Clients
from fedpick.core.validation import assign, choice, number, require
from fedpick.sim import hashing

__all__ = ["TRAINING_PASSES", "Devices", "Fleet", "Seconds", "get", "load", "names", "summary"]

TRAINING_PASSES = 3
"""Forward passes that training on one example costs."""
# FLASH's list of phones with 3 GB or more: the CPU score at these quantiles, over the median score.
_PHONES = (ndtri([0.1, 0.5, 0.9]), np.log([786 / 1774, 1.0, 3489 / 1774]))
# FLASH's 19 links, KB/s: the smallest, the median, the largest; of 19 values these are the quantiles 1/20, 1/2, 19/20.
_DOWNLOADS = (ndtri([0.05, 0.5, 0.95]), np.log([2.370e6, 4.318e6, 17.333e6]))
_UPLOADS = (_DOWNLOADS[0], np.log([0.431e6, 3.286e6, 6.635e6]))


class Seconds(NamedTuple):
    """What some clients spend their time on, (k,) each."""

    receiving: FloatArray
    computing: FloatArray
    sending: FloatArray

    @property
    def total(self) -> FloatArray:
        """(k,) from the request to the answer."""
        return self.receiving + self.computing + self.sending


@dataclass(frozen=True, kw_only=True, eq=False)
class Fleet:
    """The devices of all clients: (N,) arrays, validated when built."""

    seconds_per_example: FloatArray
    """Seconds of one forward pass on one example."""
    download: FloatArray
    """Bytes per second."""
    upload: FloatArray
    jitter: float = 0.0
    """Standard deviation of the logarithm of each round's disturbance."""
    seed: int = 0
    """Of the jitter."""

    def __post_init__(self) -> None:
        for name in ("seconds_per_example", "download", "upload"):
            values = np.asarray(getattr(self, name), np.float64)
            wrong = np.flatnonzero(~((values > 0) & np.isfinite(values)))
            if values.ndim != 1 or len(values) != len(self.seconds_per_example) or len(wrong):
                got = f"client {wrong[0]} has {values[wrong[0]]:g}" if len(wrong) else f"the shape {values.shape}"
                raise InvalidInput(f"Fleet.{name} must be a finite number above 0 for every client. Got {got}.")
            assign(self, **{name: read_only(values)})
        number(self, "jitter", "[0, inf)")

    def __len__(self) -> int:
        return len(self.download)

    def seconds(
        self, round: int, clients: IntArray, passes: FloatArray | IntArray, bytes_down: Any, bytes_up: Any
    ) -> Seconds:
        """Return how long these clients take in this round for `passes` examples and these bytes, (k,) or numbers."""
        parts = (
            bytes_down / self.download[clients],
            passes * self.seconds_per_example[clients],
            bytes_up / self.upload[clients],
        )
        if not self.jitter:
            return Seconds(*parts)
        key = hashing.key_from(self.seed, int(Purpose.DEVICES), round)
        factor = self._factors[hashing.uniform_bits(key, clients.astype(np.uint32)) >> np.uint32(16)]
        for part in parts:
            part *= factor
        return Seconds(*parts)

    @cached_property
    def _factors(self) -> FloatArray:
        """The 2**16 equally likely disturbances. A table is ten times faster than a normal score per client."""
        factors: FloatArray = np.exp(self.jitter * ndtri((np.arange(2**16) + 0.5) / 2**16))
        return factors


@dataclass(frozen=True, kw_only=True)
class Devices(ABC):
    """A model of devices. Subclasses are final, frozen, keyword-only dataclasses of plain values."""

    jitter: float = 0.0
    """Standard deviation of the logarithm of each round's disturbance."""
    correlated_with: Literal["size", "availability"] | None = None
    """Speeds follow the number of examples, or the true availability, of the clients; None: they are independent."""
    correlation: float = 0.8
    """Of the ranks of speed and `correlated_with`; negative: clients with more of it are slower."""

    def __post_init__(self) -> None:
        number(self, "jitter", "[0, inf)")
        number(self, "correlation", "[-1, 1]")
        if self.correlated_with is not None:
            choice(self, "correlated_with", ("size", "availability"))

    def fleet(self, clients: Clients, seed: int) -> Fleet:
        """Return the devices of these clients. Equal arguments give equal fleets on every machine."""
        key = hashing.fold(hashing.key_from(seed, int(Purpose.DEVICES)), np.arange(len(clients), dtype=np.uint32))
        speed, link = (ndtri(hashing.uniform_floats(key, np.array([which], np.uint32))) for which in (1, 2))
        if self.correlated_with is not None:
            speed = self._correlated(speed, clients)
        per_example, download, upload = self._devices(speed, link)
        return Fleet(
            seconds_per_example=per_example, download=download, upload=upload, jitter=float(self.jitter), seed=seed
        )

    def _correlated(self, speed: FloatArray, clients: Clients) -> FloatArray:
        """Mix the normal scores of the speeds with those of the ranks of `correlated_with`."""
        followed = clients.num_examples if self.correlated_with == "size" else clients.availability
        if followed is None:
            raise InvalidInput(
                "correlated_with = 'availability' needs the true availability of the clients: pass "
                "clients=trace.oracle(clients), or choose correlated_with = 'size'."
            )
        from scipy.stats import rankdata  # takes half a second to import

        scores = ndtri((rankdata(followed) - 0.5) / len(followed))
        rho = float(self.correlation)
        mixed: FloatArray = rho * scores + np.sqrt(1 - rho**2) * speed
        return mixed

    @abstractmethod
    def _devices(self, speed: FloatArray, link: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return (N,) seconds per example, download and upload from standard normal scores; high is fast."""


@final
@dataclass(frozen=True, kw_only=True)
class Phones(Devices):
    """Published quantiles of phones and their links."""

    seconds_per_example: float = 0.005
    """Of the median phone, for one forward pass of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "seconds_per_example", "(0, inf)")

    def _devices(self, speed: FloatArray, link: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        places, logarithms = _PHONES
        # Beyond the published quantiles the outer segments go on: a lognormal tail on either side.
        slope = np.where(speed < 0, logarithms[0] / places[0], logarithms[2] / places[2])
        per_example = self.seconds_per_example * np.exp(-slope * speed)
        # No link is faster or slower than those measured.
        return per_example, np.exp(np.interp(link, *_DOWNLOADS)), np.exp(np.interp(link, *_UPLOADS))


@final
@dataclass(frozen=True, kw_only=True)
class LogNormal(Devices):
    """Lognormal speeds and links."""

    seconds_per_example: float = 0.0136
    """Of the median device, for one forward pass of the model."""
    spread: float = 0.6
    """Standard deviation of the logarithm of the speed."""
    download: float = 4.318e6
    """Median, in bytes per second."""
    upload: float = 3.286e6
    link_spread: float = 0.5
    """Standard deviation of the logarithm of the links."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("seconds_per_example", "download", "upload"):
            number(self, name, "(0, inf)")
        for name in ("spread", "link_spread"):
            number(self, name, "[0, inf)")

    def _devices(self, speed: FloatArray, link: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        faster = np.exp(self.link_spread * link)
        per_example = self.seconds_per_example * np.exp(-self.spread * speed)
        return per_example, self.download * faster, self.upload * faster


@final
@dataclass(frozen=True, kw_only=True)
class Classes(Devices):
    """Classes of equal devices, from slow to fast; the shares are those of FLASH's three classes of phones."""

    seconds_per_example: Sequence[float] = (0.014, 0.005, 0.0015)
    """Of each class, for one forward pass of the model, the slowest first."""
    shares: Sequence[float] = (0.5315, 0.464, 0.0045)
    """Of the clients in each class; they sum to 1."""
    download: float = 4.318e6
    """Bytes per second, of every class."""
    upload: float = 3.286e6

    def __post_init__(self) -> None:
        super().__post_init__()
        speeds, shares = tuple(self.seconds_per_example), tuple(self.shares)
        assign(self, seconds_per_example=speeds, shares=shares)
        for speed in speeds:
            number(self, "seconds_per_example", "(0, inf)", value=speed)
        require(len(speeds) > 0, self, "seconds_per_example", "a list of numbers, one for each class")
        require(list(speeds) == sorted(speeds, reverse=True), self, "seconds_per_example", "in order, slowest first")
        for share in shares:
            number(self, "shares", "[0, 1]", value=share)
        fits = len(shares) == len(speeds) and abs(sum(shares) - 1) < 1e-6
        require(fits, self, "shares", f"{len(speeds)} numbers with the sum 1, one for each class")
        for name in ("download", "upload"):
            number(self, name, "(0, inf)")

    def _devices(self, speed: FloatArray, link: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        upper = np.cumsum(self.shares)[:-1]
        which = np.searchsorted(upper, ndtr(speed), side="right")
        per_example = np.array(self.seconds_per_example)[which]
        return per_example, np.full(len(speed), self.download), np.full(len(speed), self.upload)


@final
@dataclass(frozen=True, kw_only=True)
class Csv(Devices):
    """A CSV file with one device per line.

    As many devices as clients, and no correlation: line k is client k. Otherwise the devices are a population from
    which every client draws one. With `ids`, clients and devices are matched by the column `id`.
    """

    path: str
    """The file; its columns are seconds_per_example, download and upload (bytes per second)."""
    ids: Sequence[str] | None = None
    """The id of client 0, 1, ... in the column `id` of the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.path, (str, Path)) and bool(str(self.path)), self, "path", "the path of a file")
        assign(self, path=str(self.path))
        if self.ids is not None:
            listed = not isinstance(self.ids, str) and all(isinstance(each, str) for each in self.ids)
            require(listed, self, "ids", "a list of texts, one per client")
            assign(self, ids=tuple(client_id(each) for each in self.ids))
            require(self.correlated_with is None, self, "correlated_with", "left out where ids are given")

    def _devices(self, speed: FloatArray, link: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        if self.ids is not None:
            require(len(self.ids) == len(speed), self, "ids", f"one id for each of the {len(speed)} clients")
            table = _by_id(Path(self.path), self.ids)
            return table[:, 0], table[:, 1], table[:, 2]
        table = np.array([row for _, _, row in _read(Path(self.path))])
        if len(table) != len(speed) or self.correlated_with is not None:
            slow_first = np.argsort(-table[:, 0], kind="stable")
            table = table[slow_first][(ndtr(speed) * len(table)).astype(np.int64)]
        return table[:, 0], table[:, 1], table[:, 2]


_COLUMNS = ("seconds_per_example", "download", "upload")


def _by_id(path: Path, ids: Sequence[str]) -> FloatArray:
    """(N, 3): the device of every client."""
    known, found = set(ids), dict[str, list[float]]()
    for position, name, row in _read(path, with_ids=True):
        if name not in known:
            raise DataError(f"{path}:{position}: there is no client {name!r} in the table of clients.")
        if name in found:
            raise DataError(f"{path}:{position}: the client {name!r} occurs twice. Keep one line.")
        found[name] = row
    missing = next((name for name in ids if name not in found), None)
    if missing is not None:
        raise DataError(f"{path}: the client {missing!r} has no device. Give every client a line.")
    return np.array([found[name] for name in ids])


def _read(path: Path, *, with_ids: bool = False) -> list[tuple[int, str, list[float]]]:
    """The line, the id and the numbers of every device of a file."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: the file of devices cannot be read: {error}.") from error
    header = [name.strip() for name in lines[0]] if lines else []
    expected = ("id", *_COLUMNS) if with_ids else _COLUMNS
    missing = [name for name in expected if name not in header]
    if missing:
        raise DataError(f"{path}: a file of devices has the columns {', '.join(expected)}. It lacks {missing[0]!r}.")
    places = [header.index(name) for name in _COLUMNS]
    rows = []
    for position, line in enumerate(lines[1:], start=2):
        if not any(cell.strip() for cell in line):
            continue
        try:
            row = [float(line[place]) for place in places]
            name = client_id(line[header.index("id")]) if with_ids else ""
        except (ValueError, IndexError):
            row, name = [np.nan], ""
        if not all(np.isfinite(value) and value > 0 for value in row):
            raise DataError(f"{path}:{position}: speeds and links must be numbers above 0. Got {','.join(line)!r}.")
        rows.append((position, name, row))
    if not rows:
        raise DataError(f"{path}: the file of devices holds no device.")
    return rows


_MODELS: dict[str, type[Devices]] = {"phones": Phones, "lognormal": LogNormal, "classes": Classes, "csv": Csv}


def names() -> tuple[str, ...]:
    """Every model of devices."""
    return tuple(_MODELS)


def load(name: str) -> type[Devices]:
    """Return the class that is registered under a name."""
    if name not in _MODELS:
        raise unknown_name("model of devices", name, _MODELS, "`fedpick list devices` shows them all")
    return _MODELS[name]


def summary(name: str) -> str:
    """Return the first line of the model's docstring."""
    return (inspect.getdoc(load(name)) or "").partition("\n")[0]


def get(name: str, **options: Any) -> Devices:
    """Build a model of devices by name. Options are plain values, as a TOML file gives them."""
    chosen: Any = load(name)  # a dataclass, which the type of the base class does not say
    known = [item.name for item in fields(chosen)]
    for option in options:
        if option not in known:
            raise InvalidInput(f"The devices {name!r} have no option {option!r}. They have: {', '.join(known)}.")
    if name == "csv" and "path" not in options:
        raise InvalidInput("The devices 'csv' need path, a file with one device per line.")
    model: Devices = chosen(**options)
    return model
