"""Device logs: when real devices were reachable, the readers of four formats, and their replay as a trace.

| format     | file                                                                                        |
|------------|---------------------------------------------------------------------------------------------|
| npz        | arrays `offsets (D+1,)`, `t (E,)`, `state (E,)`, optionally `period (D,)` and `id (D,)`;    |
|            | with a prefix `NAME_` each if the file holds several logs                                   |
| csv        | columns `client,time,state` (or similar names, see `read_csv`), one event per line          |
| fedscale   | pickle of {client id: {'active': [s], 'inactive': [s], 'finish_time': s, ...}}              |
| flash-json | {device id: {'messages': "2020-01-28 18:00:00<tab>battery_charged_on<newline>..."}}         |

Times are seconds. A state holds until the next event: 0 unavailable, 1 available for evaluation only, 2 available for
training. FedScale's and FLASH's logs contain 0 and 2 only.

Replay. Round t reads the log at the moment offset_seconds + t * round_seconds. A log that names its clients (csv, npz
with `id`) is matched by these ids. The devices of other logs are a population, dealt to clients at random: with fewer
clients than devices they are drawn without replacement. With more, every further pass over the devices replays them
shifted by another whole day, which keeps the time of the day but not the weekday. After as many passes as a log has
whole days the shifts start again; some clients are then exact copies of others. A log that ends starts again, after
whole days if it is longer than one day. A mask depends on (device, shift) only: a round costs a search per pair and a
gather per client.
"""

from __future__ import annotations

import csv
import json
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from fedpick.availability.process import AvailabilityProcess, Trace, trace_stream
from fedpick.core.arrays import BoolArray, FloatArray, IntArray
from fedpick.core.errors import DataError, FedpickWarning, InvalidInput
from fedpick.core.types import Clients
from fedpick.core.validation import assign, choice, number, require, whole

__all__ = [
    "FORMATS",
    "DeviceLogs",
    "Replay",
    "ReplayTrace",
    "client_id",
    "read_csv",
    "read_fedscale",
    "read_flash_json",
    "read_logs",
    "read_npz",
]

DAY = 86_400.0
_AVAILABLE = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceLogs:
    """Events of D devices, E in all: device d has `times[offsets[d]:offsets[d + 1]]`, in ascending order."""

    offsets: IntArray
    """(D + 1,)"""
    times: FloatArray
    """(E,) seconds since the start of the log."""
    states: NDArray[np.uint8]
    """(E,) the state that holds from then on. Before its first event a device is in state 0."""
    period: FloatArray
    """(D,) seconds after which a device's log starts again."""
    ids: tuple[str, ...] | None = None
    """(D,) the client whose log this is. None: the devices are no particular clients."""

    def __post_init__(self) -> None:
        offsets = np.asarray(self.offsets, dtype=np.int64)
        times = np.asarray(self.times, dtype=np.float64)
        states = np.asarray(self.states)
        period = np.asarray(self.period, dtype=np.float64)
        if offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise InvalidInput("DeviceLogs.offsets must be ascending, start at 0 and have one entry more than devices.")
        if times.shape != (offsets[-1],) or states.shape != times.shape or period.shape != (len(offsets) - 1,):
            raise InvalidInput(
                f"DeviceLogs needs one time and one state per event and one period per device: offsets announce "
                f"{offsets[-1]} events of {len(offsets) - 1} devices. Got {times.shape} times, {states.shape} states, "
                f"{period.shape} periods."
            )
        if states.size and not (np.isin(states, (0, 1, 2)).all()):
            raise InvalidInput("DeviceLogs.states must be 0 (unavailable), 1 (evaluation only) or 2 (training).")
        if not (np.isfinite(times).all() and np.isfinite(period).all() and (period > 0).all()):
            raise InvalidInput("DeviceLogs.times must be finite and DeviceLogs.period finite and above 0.")
        within = np.repeat(np.arange(len(period)), np.diff(offsets))
        descends = (np.diff(times) < 0) & (within[1:] == within[:-1])
        if (times.size and times.min() < 0) or descends.any():
            raise InvalidInput("DeviceLogs.times must be at least 0 and ascending within each device.")
        if self.ids is not None and not len(self.ids) == len(set(self.ids)) == len(period):
            raise InvalidInput(f"DeviceLogs.ids must be one different id for each of the {len(period)} devices.")
        assign(self, offsets=offsets, times=times, period=period, states=states.astype(np.uint8))

    def __len__(self) -> int:
        return len(self.period)


def read_logs(
    path: str | Path,
    *,
    format: str = "auto",
    series: str | None = None,
    requirements: Sequence[str] | None = None,
    known: Collection[str] | None = None,
) -> DeviceLogs:
    """Read device logs. `auto` uses the file's ending: .npz, .csv, .json (FLASH), .pkl, .pickle or none (FedScale).

    `known` are the ids that a CSV may name; None: any.
    """
    path = Path(path)
    if format == "auto":
        format = _ENDINGS.get(path.suffix.lower(), "")
        if not format:
            raise InvalidInput(
                f"The format of {path.name} is not known from its ending. Pass format=, one of {', '.join(FORMATS)}."
            )
    if not path.is_file():
        raise DataError(
            f"There is no file of device logs at {path}. Pass its path, absolute or relative to the working directory."
        )
    if format == "npz":
        return read_npz(path, series)
    if format == "flash-json":
        return read_flash_json(path, requirements or FLASH_REQUIREMENTS)
    if format not in FORMATS:
        raise InvalidInput(f"format must be 'auto' or one of {', '.join(FORMATS)}. Got {format!r}.")
    return read_csv(path, known) if format == "csv" else read_fedscale(path)


def _whole_days(horizon: float) -> float:
    # A log that repeats keeps the time of the day, unless it is shorter than a day.
    return horizon // DAY * DAY if horizon >= DAY else max(horizon, 1.0)


def read_npz(path: str | Path, series: str | None = None) -> DeviceLogs:
    """Read logs stored as arrays. `series` is the prefix if a file holds several.

    Without a `period` array, a log starts again after the whole days between 0 and its last event.
    """
    try:
        # The file is opened here: numpy.load leaves it open if the archive is damaged.
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:  # NumPy and zipfile raise a dozen types for damaged bytes
        raise DataError(f"{path} is damaged or not an .npz file of arrays: {error}.") from error
    found = sorted(name.removesuffix("offsets").rstrip("_") for name in arrays if name.endswith("offsets"))
    if series is None and len(found) == 1:
        series = found[0]
    if series is None or series not in found:
        raise DataError(
            f"{path} holds the logs {', '.join(map(repr, found)) or '(none)'}; "
            f"{'pass one of them as series=' if series is None else f'there is no {series!r}'}."
        )
    prefix = f"{series}_" if series else ""
    missing = [name for name in ("t", "state") if prefix + name not in arrays]
    if missing:
        raise DataError(f"{path} has {prefix}offsets but no {prefix}{missing[0]}.")
    times = arrays[prefix + "t"].astype(np.float64)
    offsets = arrays[prefix + "offsets"]
    period = arrays.get(prefix + "period")
    if period is None:
        period = np.full(len(offsets) - 1, _whole_days(float(times.max(initial=0.0))))
    named = arrays.get(prefix + "id")
    ids = None if named is None else tuple(str(name) for name in named)
    return _checked(path, offsets, times, arrays[prefix + "state"], np.broadcast_to(period, len(offsets) - 1), ids)


_COLUMNS = {
    "client": ("client", "client_id", "device", "device_id", "id", "user", "user_id"),
    "time": ("time", "timestamp", "t", "seconds", "date", "datetime"),
    "state": ("state", "status", "online", "available"),
}
_WORDS = {
    **dict.fromkeys(("on", "online", "available", "true", "yes"), _AVAILABLE),
    **dict.fromkeys(("off", "offline", "unavailable", "false", "no"), 0),
}


def client_id(text: str) -> str:
    """Return an id as files are matched by it: without spaces around it, and without leading zeros of a number."""
    text = text.strip()
    return str(int(text)) if text.isdecimal() else text


def read_csv(path: str | Path, known: Collection[str] | None = None) -> DeviceLogs:
    """Read lines of a client, a time and a state under a header, in any order.

    Columns: `client`, `device`, `id` or `user` (also with `_id`); `time`, `timestamp`, `t`, `seconds`, `date` or
    `datetime`; `state`, `status`, `online` or `available`. Times are seconds or ISO timestamps. With timestamps, the
    log's clock starts at midnight of the first day. States are 0, 1 and 2, or words such as on and off, true and false;
    in a column `online` or `available`, 1 means available for training. `known` are the ids that it may name.
    """
    devices: dict[str, int] = {}
    rows: list[tuple[int, float | datetime, int]] = []
    with _refused(path), Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        columns = _columns(path, reader.fieldnames or ())
        numbers = {"0": 0, "1": _AVAILABLE if columns["state"][0] in ("online", "available") else 1, "2": _AVAILABLE}
        for row in reader:
            client, time, state = ((row[columns[name][1]] or "").strip() for name in _COLUMNS)
            where = f"{path}, line {reader.line_num}"
            client = client_id(client)
            if not client:
                raise DataError(f"{where}: the client is missing. Expected a client, a time and a state.")
            if known is not None and client not in known:
                raise DataError(f"{where}: there is no client {client!r} in the table of clients.")
            moment = _moment(time)
            if moment is None:
                raise DataError(f"{where}: times must be at least 0 seconds, or ISO timestamps. Got {time!r}.")
            if rows and _clock(moment) != _clock(rows[0][1]):
                raise DataError(
                    f"{where}: all times must be of one kind: seconds, or timestamps all with or all without "
                    f"a time zone. Got {time!r} after other ones."
                )
            value = {**numbers, **_WORDS}.get(state.lower())
            if value is None:
                raise DataError(f"{where}: states must be 0, 1 or 2, or words such as on and off. Got {state!r}.")
            rows.append((devices.setdefault(client, len(devices)), moment, value))
    if not rows:
        raise DataError(f"{path} holds no events.")
    device, states = np.array([row[0] for row in rows]), np.array([row[2] for row in rows])
    return _from_events(path, device, _seconds([row[1] for row in rows]), states, len(devices), None, tuple(devices))


def _columns(path: str | Path, header: Sequence[str]) -> dict[str, tuple[str, str]]:
    """For each column that is needed, the name by which it was found and the heading in the file."""
    given = {heading.strip().lower().replace(" ", "_"): heading for heading in header}
    found = {}
    for column, names in _COLUMNS.items():
        name = next((name for name in names if name in given), None)
        if name is None:
            raise DataError(
                f"{path} needs a header with a client, a time and a state. Missing: {column} "
                f"(or {', '.join(names[1:])})."
            )
        found[column] = (name, given[name])
    return found


def _moment(text: str) -> float | datetime | None:
    """Seconds or a timestamp; None for anything else."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            return None
    return seconds if 0 <= seconds < np.inf else None


def _clock(moment: float | datetime) -> str:
    if not isinstance(moment, datetime):
        return "seconds"
    return "local time" if moment.tzinfo is None else "time zone"


def _seconds(moments: Sequence[Any]) -> FloatArray:
    """Moments in seconds; timestamps since midnight of the first day, so that the time of the day is kept."""
    if isinstance(moments[0], datetime):
        midnight = min(moments).replace(hour=0, minute=0, second=0, microsecond=0)
        moments = [(moment - midnight).total_seconds() for moment in moments]
    return np.array(moments, dtype=np.float64)


@contextmanager
def _refused(path: str | Path) -> Iterator[None]:
    """Say that a file is not the text it should be."""
    try:
        yield
    except (csv.Error, ValueError) as error:
        raise DataError(f"{path} is not a CSV file in UTF-8: {error}.") from error


def read_flash_json(path: str | Path, requirements: Sequence[str] = ("charging", "wifi", "locked")) -> DeviceLogs:
    """Read FLASH's state traces. A device is available while it meets all `requirements`.

    The log's clock starts at midnight of the first day in the file, so the time of the day is kept.
    """
    wrong = [name for name in requirements if name not in FLASH_REQUIREMENTS]
    if wrong:
        raise InvalidInput(f"requirements may name {', '.join(FLASH_REQUIREMENTS)}. Got {wrong[0]!r}.")
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deeply
        raise DataError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(table, dict) or not table:
        raise DataError(f"{path} must hold an object with at least one device. Got {str(table)[:40]!r}.")
    device: list[int] = []
    moments: list[datetime] = []
    states: list[int] = []
    for index, (name, record) in enumerate(table.items()):
        if not isinstance(record, dict) or not isinstance(record.get("messages"), str):
            raise DataError(f"{path}: device {name!r} has no text under 'messages'.")
        for moment, state in _flash_events(f"{path}: device {name!r}", record["messages"], requirements):
            device.append(index)
            moments.append(moment)
            states.append(state)
    if not moments:
        raise DataError(f"{path} holds no events.")
    return _from_events(path, np.array(device), _seconds(moments), np.array(states), len(table), None)


FLASH_REQUIREMENTS = ("charging", "wifi", "locked")
# The effect of each message of a FLASH log. Other messages, such as battery percentages, change no requirement.
_FLASH_MESSAGES = {
    "battery_charged_on": ("charging", True),
    "battery_charged_off": ("charging", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False)),
    "screen_lock": ("locked", True),
    "screen_unlock": ("locked", False),
}


def _flash_events(where: str, messages: str, requirements: Sequence[str]) -> Iterable[tuple[datetime, int]]:
    met = dict.fromkeys(FLASH_REQUIREMENTS, False)
    for position, line in enumerate(messages.splitlines(), start=1):
        if not line.strip():
            continue
        stamp, _, message = line.strip().partition("\t")
        try:
            moment = datetime.strptime(stamp.strip(), "%Y-%m-%d %H:%M:%S")
        except ValueError as error:
            raise DataError(f"{where}, message {position}: expected 'date time<tab>message'. Got {line!r}.") from error
        requirement, value = _FLASH_MESSAGES.get(message.strip().lower(), (None, False))
        if requirement is not None:
            met[requirement] = value
        yield moment, _AVAILABLE * all(met[name] for name in requirements)


_PLAIN = (
    "PROTO FRAME STOP MARK POP POP_MARK DUP GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE NONE NEWTRUE "
    "NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE "
    "BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3"
)
_NAMING = "GLOBAL STACK_GLOBAL INST"  # call find_class, which says what the pickle asks for
_UNPICKLER: Any = pickle._Unpickler  # the one in Python
_REFUSED = (
    "A FedScale behaviour trace holds whole numbers, strings, lists and dicts only; anything else could run code and "
    "is refused. Do not load this file with plain pickle either."
)


class _PlainUnpickler(_UNPICKLER):  # type: ignore[misc]  # its base is Any
    """Read numbers, strings, lists, tuples and dicts only. Refuse every other instruction, any import or call first.

    The unpickler in C cannot leave instructions out, and some of them fill the memory: a file of ten bytes makes it
    reserve 16 GB for its memo. It is six times as fast; a trace of 100,000 devices takes some seconds here.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: _UNPICKLER.dispatch[code[0]]
        for code in (getattr(pickle, name) for name in f"{_PLAIN} {_NAMING}".split())
    }

    def load(self) -> Any:
        try:
            return super().load()
        except KeyError as error:  # as the loop over the instructions raises it
            raise DataError(f"The pickle has the instruction {bytes([error.args[0]])!r}. {_REFUSED}") from None

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DataError(f"The pickle asks for {module}.{name}. {_REFUSED}")


def read_fedscale(path: str | Path) -> DeviceLogs:
    """Read FedScale's behaviour trace, a pickle, with a reader that refuses everything but plain values.

    A client is available from each `active` time to the matching `inactive` time; the pattern repeats after its
    `finish_time`. A pattern that begins with an `inactive` time was available from the start.
    """
    try:
        with Path(path).open("rb") as file:
            table = _PlainUnpickler(file).load()
    except DataError as error:
        raise DataError(f"{path} is refused. {error}") from error.__cause__
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{path} is damaged or not a pickle: {type(error).__name__}: {error}.") from error
    if type(table) is not dict or not table:
        raise DataError(f"{path} must hold a dict of clients. Got {type(table).__name__}.")
    device: list[int] = []
    times: list[int] = []
    states: list[int] = []
    period: list[int] = []
    for index, (name, record) in enumerate(table.items()):
        active, inactive, finish = _fedscale_record(f"{path}: client {name!r}", record)
        if inactive and (not active or min(inactive) < min(active)):
            active = [0, *active]
        active, inactive = _without_empty_sessions(sorted(active), sorted(inactive))
        device += [index] * (len(active) + len(inactive))
        times += active + inactive
        states += [_AVAILABLE] * len(active) + [0] * len(inactive)
        period.append(finish)
    return _from_events(path, np.array(device), np.array(times), np.array(states), len(table), np.array(period))


def _without_empty_sessions(active: list[int], inactive: list[int]) -> tuple[list[int], list[int]]:
    """Return the starts and ends of sessions without empty ones. A start after the last end stays."""
    empty = {position for position, ends in enumerate(zip(active, inactive, strict=False)) if ends[0] == ends[1]}
    starts, ends = ([time for at, time in enumerate(times) if at not in empty] for times in (active, inactive))
    return starts, ends


def _fedscale_record(where: str, record: object) -> tuple[list[int], list[int], int]:
    if type(record) is not dict:
        raise DataError(f"{where}: expected a dict. Got {type(record).__name__}.")
    for name in ("active", "inactive"):
        values = record.get(name)
        if type(values) is not list or not all(type(value) is int and value >= 0 for value in values):
            raise DataError(f"{where}: {name!r} must be a list of whole numbers of at least 0.")
    finish = record.get("finish_time")
    if type(finish) is not int or finish < 1:
        raise DataError(f"{where}: 'finish_time' must be a whole number of at least 1. Got {finish!r}.")
    return record["active"], record["inactive"], finish


def _from_events(
    path: str | Path,
    device: NDArray[Any],
    times: NDArray[Any],
    states: NDArray[Any],
    num_devices: int,
    period: NDArray[Any] | None,
    ids: tuple[str, ...] | None = None,
) -> DeviceLogs:
    # Events of one device at one moment keep their order: the last one holds. FedScale lists the end of a session after
    # the start of the next, even at the same moment. There the start must come last, so states break the ties.
    keys = (times, device) if period is None else (states, times, device)
    order = np.lexsort(keys)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(device.astype(np.int64), minlength=num_devices))])
    if period is None:
        period = np.full(num_devices, _whole_days(float(times.max())))
    return _checked(path, offsets, times[order], states[order], period, ids)


def _checked(
    path: str | Path, offsets: Any, times: Any, states: Any, period: Any, ids: tuple[str, ...] | None
) -> DeviceLogs:
    try:
        return DeviceLogs(offsets=offsets, times=times, states=states, period=period, ids=ids)
    except InvalidInput as error:
        raise DataError(f"{path} is not a usable log. {error}") from error


FORMATS: Mapping[str, Callable[..., DeviceLogs]] = {
    "npz": read_npz,
    "csv": read_csv,
    "fedscale": read_fedscale,
    "flash-json": read_flash_json,
}
_ENDINGS = {
    ".npz": "npz",
    ".csv": "csv",
    ".json": "flash-json",
    ".pkl": "fedscale",
    ".pickle": "fedscale",
    "": "fedscale",
}


_MOST_SAMPLES = 10_000


@final
class ReplayTrace(Trace):
    """Device logs, read once per round; all rounds are equally long."""

    def __init__(
        self,
        num_clients: int,
        seed: int,
        *,
        logs: DeviceLogs,
        round_seconds: float,
        offset_seconds: float = 0.0,
        least_state: int = 2,
        assignment: str | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        super().__init__(num_clients, seed)
        if not (logs.states >= least_state).any():
            raise InvalidInput(
                f"No device of these logs is ever in state {least_state} or above (the highest is "
                f"{logs.states.max(initial=0)}), so no client would ever be available. Choose a smaller least_state."
            )
        self.logs = logs
        self.round_seconds = round_seconds
        self.offset_seconds = offset_seconds
        if ids is None:
            self.device, self.shift_days = _deal(num_clients, seed, logs, assignment)
        else:
            self.device = _devices_of(ids, logs.ids, num_clients)
            self.shift_days = np.zeros(num_clients, dtype=np.int64)
        pairs, self._pair_of = np.unique(self.shift_days * len(logs) + self.device, return_inverse=True)
        self._pair_device, self._pair_shift = pairs % len(logs), pairs // len(logs) * DAY
        # One ascending axis for all devices: device d's events lie at d * stride + time.
        self._stride = max(float(logs.times.max(initial=0.0)), float(logs.period.max())) + 1.0
        owner = np.repeat(np.arange(len(logs)), np.diff(logs.offsets))
        self._keys = owner * self._stride + logs.times
        self._on = np.append(logs.states >= least_state, False)  # the last entry is the state before the first event

    def _mask(self, round: int) -> BoolArray:
        return self.at(round * self.round_seconds)

    def at(self, seconds: float) -> BoolArray:
        """(N,) the clients that are available this long after the start of round 0."""
        start = self.offset_seconds + seconds
        return self._states_at(self._pair_device, start + self._pair_shift)[self._pair_of]

    def _states_at(self, device: IntArray, moments: FloatArray) -> BoolArray:
        within = np.mod(moments, self.logs.period[device])
        event = np.searchsorted(self._keys, device * self._stride + within, side="right") - 1
        event[event < self.logs.offsets[device]] = -1
        return self._on[event]

    def _truth(self) -> tuple[FloatArray, FloatArray]:
        """Compute the share of rounds and the correlation between rounds over a whole cycle of each log.

        Rounds of equal length read the same moments of a log again: a device that is on every night is always available
        in a round at every midnight. If the cycle is too long, the availability is the log's share of time.
        """
        period = self.logs.period[self._pair_device]
        cycle = _rounds_per_cycle(period, self.round_seconds)
        samples = int(min(_MOST_SAMPLES, max(2, np.ceil(period.max() / self.round_seconds), cycle.max())))
        count, now, later, both = (np.zeros(len(period)) for _ in range(4))
        for sample in range(samples):
            seen = self.offset_seconds + self._pair_shift + sample * self.round_seconds
            moment = np.where(cycle > 0, seen, period * (sample / samples))
            counted = (cycle == 0) | (sample < cycle)
            first = self._states_at(self._pair_device, moment) & counted
            second = self._states_at(self._pair_device, moment + self.round_seconds) & counted
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
    """(D,) rounds until a log is read at the same moments again; 0 if that is never or takes too long."""
    if round_seconds != int(round_seconds):
        return np.zeros(len(period), dtype=np.int64)
    whole = period.astype(np.int64)
    cycle = whole // np.gcd(whole, int(round_seconds))
    return np.where((whole == period) & (cycle <= _MOST_SAMPLES), cycle, 0)


def _deal(num_clients: int, seed: int, logs: DeviceLogs, assignment: str | None) -> tuple[IntArray, IntArray]:
    """(N,) the device and (N,) the shift in days of every client."""
    count = len(logs)
    if assignment == "id" or (assignment is None and logs.ids is not None):
        return _devices_by_id(logs.ids, num_clients), np.zeros(num_clients, dtype=np.int64)
    if assignment is None and count == num_clients > 1:
        warnings.warn(
            f"The logs of {count} devices have no ids, so they are dealt to the {count} clients at random. Choose "
            "assignment='order' if device k is client k, or assignment='shuffle' if random is what you mean.",
            FedpickWarning,
            stacklevel=4,
        )
    generator = trace_stream(seed)
    passes = -(-num_clients // count)
    rows = [np.arange(count) if assignment == "order" else generator.permutation(count) for _ in range(passes)]
    device = np.concatenate(rows)[:num_clients]
    days = np.maximum(logs.period // DAY, 1).astype(np.int64)
    return device, (np.arange(num_clients) // count) % days[device]


def _devices_by_id(ids: tuple[str, ...] | None, num_clients: int) -> IntArray:
    """(N,) the device of every client: of row k for ids that are numbers, the k-th in sorted order for other ids."""
    advice = "Give every client a log (one line with state 0 if it is never available), or use assignment='shuffle'."
    if ids is None:
        raise InvalidInput("assignment='id' needs logs with ids: a CSV, or an .npz with an array `id`.")
    if all(name.isdecimal() for name in ids):
        device = {int(name): place for place, name in enumerate(ids)}
        unknown = next((number for number in device if number >= num_clients), None)
        missing = next((row for row in range(num_clients) if row not in device), None)
        if unknown is not None or missing is not None:
            fault = f"there is no client {unknown}" if unknown is not None else f"client {missing} has no log"
            raise InvalidInput(f"Logs are matched by id, and the clients are 0 to {num_clients - 1}: {fault}. {advice}")
        return np.array([device[row] for row in range(num_clients)], dtype=np.int64)
    if len(ids) != num_clients:
        raise InvalidInput(
            f"Logs are matched by id, in sorted order: {num_clients} clients need {num_clients} ids. Got {len(ids)}, "
            f"the first {min(ids)!r}. {advice}"
        )
    return np.array(sorted(range(len(ids)), key=ids.__getitem__), dtype=np.int64)


def _devices_of(ids: Sequence[str], logged: tuple[str, ...] | None, num_clients: int) -> IntArray:
    """(N,) the device of every client, whose ids are given."""
    if len(ids) != num_clients:
        raise InvalidInput(f"The option ids needs one id for each of the {num_clients} clients. Got {len(ids)}.")
    if logged is None:
        raise InvalidInput("The option ids needs logs with ids: a CSV, or an .npz with an array `id`.")
    device = {client_id(name): place for place, name in enumerate(logged)}
    unknown = min(device.keys() - set(ids), default=None)
    missing = next((name for name in ids if name not in device), None)
    if unknown is not None or missing is not None:
        fault = f"{missing!r} has no log" if unknown is None else f"{unknown!r} is no client"
        raise InvalidInput(
            f"Logs are matched by id: {fault}. Give every client a log, with one line of state 0 if it is never "
            "available."
        )
    return np.array([device[name] for name in ids], dtype=np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class Replay(AvailabilityProcess):
    """Replay of real device logs, resampled to any number of clients by whole-day shifts."""

    path: str
    """The file of logs."""
    round_seconds: float = 600.0
    """Length of a round."""
    offset_seconds: float = 0.0
    """Position of round 0 in the log."""
    least_state: int = 2
    """A device in this state or above is available: 2 for training only, 1 for evaluation, too."""
    format: str = "auto"
    """"npz", "csv", "fedscale", "flash-json", or "auto": by the ending of the file's name."""
    series: str | None = None
    """The log to read from an .npz file that holds several."""
    requirements: Sequence[str] = FLASH_REQUIREMENTS
    """Conditions that a FLASH device must meet to be available: some of charging, wifi, locked."""
    assignment: Literal["id", "order", "shuffle"] | None = None
    """"id": client k has the log with the id k, or the k-th in sorted order if the ids are not numbers; "order": client
    k is device k of the file; "shuffle": at random. None: "id" if the log has ids (csv, npz with `id`), else "shuffle".
    """
    ids: Sequence[str] | None = None
    """The id of client 0, 1, ... in the log, in the place of `assignment`."""
    reference: ClassVar[str] = """@inproceedings{yang2021flash,
  title={Characterizing Impacts of Heterogeneity in Federated Learning upon Large-Scale Smartphone Data},
  author={Yang, Chengxu and Wang, Qipeng and Xu, Mengwei and Chen, Zhenpeng and Bian, Kaigui and Liu, Yunxin and
          Liu, Xuanzhe},
  booktitle={Proceedings of the Web Conference},
  year={2021}
}"""

    def __post_init__(self) -> None:
        require(isinstance(self.path, (str, Path)) and bool(str(self.path)), self, "path", "the path of a file")
        assign(
            self,
            path=str(self.path),
            round_seconds=number(self, "round_seconds", "[1e-3, inf)"),
            offset_seconds=number(self, "offset_seconds", "[0, inf)"),
            least_state=whole(self, "least_state", 1),
            requirements=tuple(self.requirements),
        )
        choice(self, "format", ("auto", *FORMATS))
        if self.assignment is not None:
            choice(self, "assignment", ("id", "order", "shuffle"))
        if self.ids is not None:
            require(self.assignment is None, self, "assignment", "left out where ids are given")
            listed = not isinstance(self.ids, str) and all(isinstance(each, str) for each in self.ids)
            require(listed, self, "ids", "a list of texts, one per client")
            assign(self, ids=tuple(client_id(each) for each in self.ids))
        known = bool(self.requirements) and set(self.requirements) <= set(FLASH_REQUIREMENTS)
        require(known, self, "requirements", f"a list of some of {', '.join(FLASH_REQUIREMENTS)}")

    def start(self, clients: Clients, seed: int) -> ReplayTrace:
        """See `AvailabilityProcess.start`; reads the file."""
        logs = read_logs(
            self.path,
            format=self.format,
            series=self.series,
            requirements=self.requirements,
            known=None if self.ids is None else frozenset(self.ids),
        )
        try:
            return ReplayTrace(
                len(clients),
                seed,
                logs=logs,
                round_seconds=self.round_seconds,
                offset_seconds=self.offset_seconds,
                least_state=self.least_state,
                assignment=self.assignment,
                ids=self.ids,
            )
        except InvalidInput as error:
            raise InvalidInput(f"{self.path}: {error}") from error
