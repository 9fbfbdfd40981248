"""Replay of real device logs: round t looks at the moment offset_seconds + t * round_seconds of the log.

Any number of clients. With fewer clients than devices, clients are devices drawn without replacement; with more, every
further pass over the devices replays them shifted by another whole day, which keeps the time of the day, the weekday
being the price. After as many passes as a log has whole days the shifts start again, so some clients are then exact
copies of others. A log that ends starts again (after whole days where it is longer than one).

A mask depends on (device, shift) only, so each round costs one look-up per such pair and one gather per client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from fedpick.availability.logs import DAY, FLASH_REQUIREMENTS, FORMATS, DeviceLogs, read_logs
from fedpick.availability.process import (
    AvailabilityProcess,
    Trace,
    trace_stream,
)
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import InvalidInput
from fedpick.core.types import Clients
from fedpick.core.validation import assign, choice, flag, number, whole

__all__ = ["Replay", "ReplayTrace"]

_MOST_SAMPLES = 10_000


@final
class ReplayTrace(Trace):
    """Device logs as seen by rounds of equal length."""

    def __init__(
        self,
        num_clients: int,
        seed: int,
        *,
        logs: DeviceLogs,
        round_seconds: float,
        offset_seconds: float = 0.0,
        least_state: int = 2,
        shuffle: bool = True,
    ) -> None:
        super().__init__(num_clients, seed)
        if not (logs.states >= least_state).any():
            raise InvalidInput(
                f"No device of these logs is ever in state {least_state} or above (the highest is "
                f"{logs.states.max(initial=0)}), so nobody would ever be available. Choose a smaller least_state."
            )
        self.logs = logs
        self.round_seconds = round_seconds
        self.offset_seconds = offset_seconds
        self.device, self.shift_days = _deal(num_clients, seed, logs, shuffle)
        pairs, self._pair_of = np.unique(self.shift_days * len(logs) + self.device, return_inverse=True)
        self._pair_device, self._pair_shift = pairs % len(logs), pairs // len(logs) * DAY
        # One ascending axis for all devices: device d's events lie at d * stride + time.
        self._stride = max(float(logs.times.max(initial=0.0)), float(logs.period.max())) + 1.0
        owner = np.repeat(np.arange(len(logs)), np.diff(logs.offsets))
        self._keys = owner * self._stride + logs.times
        self._on = np.append(logs.states >= least_state, False)  # the last entry answers "before the first event"

    def _mask(self, round: int) -> BoolArray:
        start = self.offset_seconds + round * self.round_seconds
        return self._looked_up(self._pair_device, start + self._pair_shift)[self._pair_of]

    def _looked_up(self, device: IntArray, moments: FloatArray) -> BoolArray:
        within = np.mod(moments, self.logs.period[device])
        event = np.searchsorted(self._keys, device * self._stride + within, side="right") - 1
        event[event < self.logs.offsets[device]] = -1
        return self._on[event]

    def _truth(self) -> tuple[FloatArray, FloatArray]:
        """Shares of the rounds, and the correlation of one round with the next, over a whole cycle of each log.

        Rounds of equal length look at the same moments of a log again and again: a device that is on every night is
        always there for a round every midnight. Where that cycle is too long to go through, the log's share of time.
        """
        period = self.logs.period[self._pair_device]
        cycle = _rounds_per_cycle(period, self.round_seconds)
        samples = int(min(_MOST_SAMPLES, max(2, np.ceil(period.max() / self.round_seconds), cycle.max())))
        count, now, later, both = (np.zeros(len(period)) for _ in range(4))
        for sample in range(samples):
            seen = self.offset_seconds + self._pair_shift + sample * self.round_seconds
            moment = np.where(cycle > 0, seen, period * (sample / samples))
            counted = (cycle == 0) | (sample < cycle)
            first = self._looked_up(self._pair_device, moment) & counted
            second = self._looked_up(self._pair_device, moment + self.round_seconds) & counted
            count += counted
            now += first
            later += second
            both += first & second
        now, later, both = now / count, later / count, both / count
        spread = np.sqrt(np.maximum(now * (1 - now) * later * (1 - later), 0.0))
        correlation = np.divide(both - now * later, spread, out=np.zeros(len(period)), where=spread > 1e-12)
        share = np.where(cycle > 0, now, self._time_share()[self._pair_device])
        return share[self._pair_of], np.clip(correlation, -1, 1)[self._pair_of]

    def _time_share(self) -> FloatArray:
        offsets, period = self.logs.offsets, self.logs.period
        owner = np.repeat(np.arange(len(self.logs)), np.diff(offsets))
        ends = np.append(self.logs.times[1:], 0.0)
        last = offsets[1:][np.diff(offsets) > 0] - 1
        ends[last] = np.inf
        inside = np.minimum(ends, period[owner]) - np.minimum(self.logs.times, period[owner])
        return np.bincount(owner, weights=inside * self._on[:-1], minlength=len(self.logs)) / period


def _rounds_per_cycle(period: FloatArray, round_seconds: float) -> IntArray:
    """(D,) rounds until a log is seen at the same moments again; 0 where that is never or takes too many."""
    if round_seconds != int(round_seconds):
        return np.zeros(len(period), dtype=np.int64)
    whole = period.astype(np.int64)
    cycle = whole // np.gcd(whole, int(round_seconds))
    return np.where((whole == period) & (cycle <= _MOST_SAMPLES), cycle, 0)


def _deal(num_clients: int, seed: int, logs: DeviceLogs, shuffle: bool) -> tuple[IntArray, IntArray]:
    """(N,) the device and (N,) the shift in days of every client."""
    generator = trace_stream(seed)
    count = len(logs)
    passes = -(-num_clients // count)
    rows = [generator.permutation(count) if shuffle else np.arange(count) for _ in range(passes)]
    device = np.concatenate(rows)[:num_clients]
    days = np.maximum(logs.period // DAY, 1).astype(np.int64)
    return device, (np.arange(num_clients) // count) % days[device]


@final
@dataclass(frozen=True, kw_only=True)
class Replay(AvailabilityProcess):
    """Replay of real device logs, resampled to any number of clients by whole-day shifts."""

    path: str
    """The file of logs."""
    round_seconds: float = 600.0
    """How long a round takes."""
    offset_seconds: float = 0.0
    """Where in the log round 0 lies."""
    least_state: int = 2
    """A device in this state or above is available: 2 training only, 1 evaluation too."""
    format: str = "auto"
    """"npz", "csv", "fedscale", "flash-json", or "auto": by the ending of the file's name."""
    series: str | None = None
    """Which log of an .npz file that holds several."""
    requirements: Sequence[str] = FLASH_REQUIREMENTS
    """What a FLASH device must meet to be available: any of charging, wifi, locked."""
    shuffle: bool = True
    """Deal devices to clients at random; false: client k is device k."""
    reference: ClassVar[str] = """@inproceedings{yang2021flash,
  title={Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale Smartphone Data},
  author={Yang, Chengxu and Wang, Qipeng and Xu, Mengwei and Chen, Zhenpeng and Bian, Kaigui and Liu, Yunxin and
          Liu, Xuanzhe},
  booktitle={Proceedings of the Web Conference},
  year={2021}
}"""

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or not str(self.path):
            raise InvalidInput(f"The parameter 'path' of Replay must be the path of a file. Got {self.path!r}.")
        assign(
            self,
            path=str(self.path),
            round_seconds=number(self, "round_seconds", "[1e-3, inf)"),
            offset_seconds=number(self, "offset_seconds", "[0, inf)"),
            least_state=whole(self, "least_state", 1),
            requirements=tuple(self.requirements),
        )
        choice(self, "format", ("auto", *FORMATS))
        flag(self, "shuffle")
        wrong = [name for name in self.requirements if name not in FLASH_REQUIREMENTS]
        if wrong or not self.requirements:
            raise InvalidInput(
                f"The parameter 'requirements' of Replay must name some of {', '.join(FLASH_REQUIREMENTS)}. "
                f"Got {list(self.requirements)}."
            )

    def start(self, clients: Clients, seed: int) -> ReplayTrace:
        """See `AvailabilityProcess.start`; reads the file."""
        logs = read_logs(self.path, format=self.format, series=self.series, requirements=self.requirements)
        return ReplayTrace(
            len(clients),
            seed,
            logs=logs,
            round_seconds=self.round_seconds,
            offset_seconds=self.offset_seconds,
            least_state=self.least_state,
            shuffle=self.shuffle,
        )
